"""Plans of all experiments on both kinds of GPU and all numbers of ranks, as text.

    python -m tests.moe.plan.golden > tests/moe/plan/golden.txt

A change of a plan is a change of what users get: the difference of the file tells which.
"""

from collections.abc import Iterator
from itertools import product
from pathlib import Path

from phalanx.configs.knobs import changed
from phalanx.configs.load import load
from phalanx.configs.schema import Config
from phalanx.configs.tables.machines import MACHINES
from phalanx.configs.validate import ConfigError, validate
from phalanx.moe.plan.facts import described
from phalanx.moe.plan.resolve import resolve

EXPERIMENTS = sorted(path.stem for path in Path("configs/experiment").glob("*.yaml"))
WORLDS = [2**n for n in range(12)]


def values(cfg: Config) -> str:
    """Values that replaced `auto`."""
    k, p = cfg.kernels, cfg.parallel
    exchange = f"{p.dispatch} replication {p.expert_replication} sms {p.comm_sms}"
    wgrad = f"overlap {p.overlap_microbatches} wgrad {p.delay_wgrad}"
    kernels = f"{k.backend} {k.attention} {k.norm}"
    return f"{kernels} {exchange} {cfg.run.graph} weights {cfg.precision.weights} {wgrad}"


def configurations() -> Iterator[tuple[str, Config, int]]:
    """Each experiment that is valid on a number of ranks, with its description."""
    for experiment in EXPERIMENTS:
        cfg = load([f"experiment={experiment}", "run.device=cuda", "run.dry_run=true"])
        for machine, recipe in product(MACHINES, ("bf16", "fp8_block")):
            of = changed(cfg, {"run.machine": machine, "precision.recipe": recipe})
            for world in WORLDS:
                one = changed(of, {"parallel.world_size": world})
                try:
                    validate(one, world)
                except ConfigError:
                    continue
                yield f"{experiment} {machine} {recipe} {world}", one, world


def lines() -> Iterator[str]:
    """A line for each."""
    for name, cfg, world in configurations():
        yield f"{name}: {values(resolve(cfg, described(cfg, world)).cfg)}"


if __name__ == "__main__":
    print("\n".join(lines()))
