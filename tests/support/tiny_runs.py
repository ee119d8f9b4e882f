"""Tiny runs with checkpoints, and commands that read them, on the ranks of this session."""

import contextlib
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.support import runs
from tests.support.distributed import run_distributed

TINY = [*runs.TINY, "precision=fp32", "data=embedded"]


class CommandResult(NamedTuple):
    """Exit code and output of a command."""

    code: int
    out: str
    err: str


def train(folder: Path, name: str, world: int, *overrides: str) -> Path:
    """Train on `world` ranks and save at the end; return the run folder."""
    given = [*TINY, f"run.dir={folder}", f"run.name={name}", f"data.cache={folder}/cache"]
    main = runs.run(world, [*given, *overrides])[0]
    assert main.code == 0, main.err
    return folder / name


def command(main: Callable[[Sequence[str]], int], *argv: Any) -> CommandResult:
    """Call the `main` of a script in a separate process with Megatron-Core imported."""
    return run_distributed(_command, 1, main, [str(word) for word in argv])[0]


def _command(main: Callable[[Sequence[str]], int], argv: list[str]) -> CommandResult:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(argv)
        except SystemExit as left:
            code = int(left.code or 0)
    return CommandResult(code, out.getvalue(), err.getvalue())


def untrained(folder: Path, name: str, world: int, origin: Path, *overrides: str) -> Path:
    """Continue from a checkpoint on `world` ranks for a step that changes no weight."""
    same = ["optim.lr=1e-30", "optim.min_lr=1e-30", f"run.resume={origin}"]
    return train(folder, name, world, *same, *overrides)


def step_of(folder: Path, step: int) -> Path:
    """Checkpoint of a step of a run."""
    return folder / "checkpoints" / f"step_{step:08d}"
