"""A job that is ready to train: what the loop, the reports and inference share."""

from dataclasses import dataclass

from phalanx.configs.schema import Config
from phalanx.kernels.registry import Choice
from phalanx.moe.model.max_logits import MaxLogits
from phalanx.moe.plan.plan import Plan
from phalanx.parallel.dispatcher.capacity import Budget
from phalanx.parallel.engine import Engine
from phalanx.parallel.groups import Groups
from phalanx.parallel.runtime import Runtime


@dataclass(frozen=True)
class Job:
    """Objects that the training loop uses."""

    cfg: Config  # configuration as the user set it
    plan: Plan
    runtime: Runtime
    groups: Groups
    lines: list[Choice]  # lines of the start page on the plan and its estimated speed
    budget: Budget
    engine: Engine
    max_logits: MaxLogits | None = None  # largest logits of attention, if the run measures them

    @property
    def data_parallel(self) -> int:
        """Number of replicas that read different samples."""
        return self.groups.data
