"""The plan of a job that has met: its only exchange between ranks about what they do."""

from phalanx.configs.schema import Config
from phalanx.moe.plan.facts import JobFacts, gather_facts
from phalanx.moe.plan.plan import Plan
from phalanx.moe.plan.resolve import resolve
from phalanx.parallel.fault.agreement import gather
from phalanx.parallel.runtime import Runtime


def agreed_plan(cfg: Config, runtime: Runtime) -> tuple[Plan, JobFacts]:
    """The plan of a run from the facts of all ranks, and these. Collective.

    Raises:
        ConfigError: on all ranks, a forced choice cannot run on one of them.
        RuntimeError: ranks came to different plans, which would hang or corrupt the run later.
    """
    facts = gather_facts(cfg, runtime)
    plan = resolve(cfg, facts)
    digests = gather(plan.digest())
    differing = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if differing:
        raise RuntimeError(
            f"rank {differing[0]} plans another run than rank 0 from the same facts: start all "
            "ranks from the same code"
        )
    return plan, facts
