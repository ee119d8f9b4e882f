"""Plans without `auto`: of Hopper GPUs that need not exist, and of ranks that have met."""

from dataclasses import replace
from typing import TYPE_CHECKING

from phalanx.configs.schema import Config
from phalanx.configs.tables.machines import machine_named
from phalanx.moe.plan.facts import JobFacts, described, gather_facts
from phalanx.moe.plan.plan import Plan
from phalanx.moe.plan.resolve import decided, resolve
from phalanx.parallel.fault.agreement import gather

if TYPE_CHECKING:  # imports Megatron-Core
    from phalanx.parallel.runtime import Runtime


def resolved(cfg: Config, world: int, node_gpus: int, *, delays: bool = True) -> Config:
    """A copy without `auto`, by the plan of a run on GPUs of `run.machine`.

    Without `delays` no weight gradient waits, whatever is set. Raises ConfigError if no Hopper GPU
    can run a choice, or no group has that number of ranks.
    """
    machine = replace(machine_named(cfg.run.machine), node_gpus=node_gpus)
    return decided(cfg, described(cfg, world, machine), delays=delays).cfg


def agreed_plan(cfg: Config, runtime: "Runtime") -> tuple[Plan, JobFacts]:
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
