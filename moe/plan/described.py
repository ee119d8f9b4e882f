"""Values of every `auto` on Hopper GPUs with all optional packages."""

from dataclasses import replace

from phalanx.configs.schema import Config
from phalanx.configs.tables.machines import MACHINES
from phalanx.moe.plan.facts import described
from phalanx.moe.plan.resolve import resolve


def resolved(cfg: Config, world: int, node_gpus: int) -> Config:
    """A copy without `auto`, by the plan of a run on GPUs of `run.machine`.

    Raises:
        ConfigError: no Hopper GPU can run a choice, or no group has that number of ranks.
    """
    machine = replace(MACHINES[cfg.run.machine], node_gpus=node_gpus)
    return resolve(cfg, described(cfg, world, machine)).cfg
