"""Print the tables of docs/plan.md and draw its pictures into docs/plan; takes a minute."""

from pathlib import Path

from phalanx import train
from phalanx.scripts.lab.plan import pictures, tables
from phalanx.scripts.lab.plan.points import (
    IN_MEMORY,
    MODELS,
    SHOWN,
    every_point,
    machine,
    memory,
    time,
)

FOLDER = Path(train.__file__).resolve().parent / "docs" / "plan"


def main() -> None:
    points = every_point()
    shown = {each.model: each for each in points if each.gpus == SHOWN}
    stages, buffers = memory(shown[IN_MEMORY])
    steps = {model: time(shown[model]) for model in MODELS}
    reserve = machine().reserved_gib
    print(
        tables.clusters(points),
        tables.memory_table(stages, buffers, reserve),
        tables.time_table(steps),
        sep="\n\n",
    )
    FOLDER.mkdir(exist_ok=True)
    pictures.speed(points, FOLDER / "speed.png")
    limits = {"memory": machine().memory_gib, "reserve": reserve}
    title = f"{IN_MEMORY} on {SHOWN:,} H100s: memory by stage"
    pictures.memory(stages, buffers, limits, FOLDER / "memory.png", title)
    pictures.time(steps, FOLDER / "time.png", f"Where a step goes on {SHOWN:,} H100s")


if __name__ == "__main__":
    main()
