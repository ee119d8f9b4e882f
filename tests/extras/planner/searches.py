"""Layouts that searches find for models on clusters, as text.

    python -m tests.extras.planner.searches > tests/extras/planner/searches.txt

A change of a line is a change of what users get, unless a rate or an estimate has changed: how a
search goes about it must not show.
"""

from collections.abc import Iterator

from phalanx.configs.knobs import overrides
from phalanx.configs.load import load
from phalanx.configs.schema import Config
from phalanx.configs.tables.machines import machine_named
from phalanx.extras.planner.best import Found, best

LARGEST = ("deepseek_v3_256gpu", "h100", 16384)
CASES = (
    ("gpt_oss_120b_64gpu", "h100", 256),
    ("kimi_k2_256gpu", "h100", 512),
    ("deepseek_v3_1024gpu", "h200", 1024),
    ("qwen3_235b_64gpu", "h100", 2048),
    ("qwen3_30b_8gpu", "h200", 8),
    ("moonlight_8gpu", "h20", 32),
    ("mixtral_8x22b_64gpu", "h100", 64),
    ("deepseek_v3_256gpu", "h100", 96),
    LARGEST,
)


def configuration(experiment: str, machine: str, gpus: int) -> Config:
    words = [f"experiment={experiment}", f"run.machine={machine}", f"parallel.world_size={gpus}"]
    return load([*words, *(["data.global_batch=16384"] if gpus > 4096 else [])])


def line(one: Found) -> str:
    memory = f"{one.size} bytes, {one.host} of the host"
    rates = f"{one.tokens:.2f} tokens/s/GPU, {one.natural:.2f} with natural routing"
    return f"  {rates}, {memory}, busy {one.busy:.3f}: {overrides(one.changes)}".rstrip()


def lines(*case: str | int) -> Iterator[str]:
    """A case, and a line for each layout that its search shows."""
    experiment, machine, gpus = case
    cfg = configuration(str(experiment), str(machine), int(gpus))
    yield f"{experiment} {machine} {gpus}"
    yield from map(line, best(cfg, int(gpus), machine_named(str(machine)), 5))


if __name__ == "__main__":
    for case in CASES:
        print("\n".join(lines(*case)))
