"""`--check` refuses what a start of the run on this machine would refuse, in the same words."""

import contextlib
import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import pytest

from phalanx.configs.bounds import choices
from phalanx.configs.knobs import knobs, spelled
from phalanx.configs.load import load
from phalanx.moe.run.check import asks_machine
from tests.support.distributed import run_distributed
from tests.support.runs import TINY
from tests.support.scheduling import mostly_slow

COMMAND = [*TINY, "run.device=auto", "run.steps=2", "data=synthetic"]


class Answer(NamedTuple):
    code: object
    errors: list[str]


def every_choice() -> list[str]:
    """Every value of every knob that has a list of them, and of every switch."""
    found = []
    for path, names in choices().items():
        listed = knobs()[path].type == list[str]
        found += [f"{path}={spelled([name] if listed else name)}" for name in names]
    switches = [path for path, knob in knobs().items() if knob.type in (bool, bool | str)]
    found += [f"{path}={value}" for path in switches for value in ("true", "false")]
    return [*found, "parallel.expert_replication=2", "parallel.comm_sms=16", "optim.qk_clip=10"]


def asks(override: str) -> bool:
    return asks_machine(load([override]))


ASKED = [override for override in every_choice() if asks(override)]


def answer(args: list[str]) -> Answer:
    """Exit code and errors of `train.py`, which trains no step."""
    from phalanx import train
    from phalanx.moe.run.trainer import Trainer

    def fit(trainer: Trainer) -> None:
        trainer.progress.step = trainer.cfg.run.steps

    before, err = dict(os.environ), io.StringIO()
    with (
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(err),
        mock.patch.object(Trainer, "fit", fit),
    ):
        try:
            code: object = train.main(args)
        except SystemExit as end:
            code = end.code
        finally:
            os.environ.clear()
            os.environ.update(before)
    return Answer(code, [x for x in err.getvalue().splitlines() if x.startswith("error: ")])


def both(world: int, folder: Path, overrides: Sequence[str]) -> tuple[Answer, Answer]:
    args = [*COMMAND, f"run.dir={folder}", *overrides]
    return tuple(run_distributed(answer, world, [*args, *more])[0] for more in ([], ["--check"]))


@pytest.mark.dist
@mostly_slow("override", every_choice(), *ASKED)
def test_a_check_of_any_choice_says_what_a_start_says(override: str, tmp_path: Path) -> None:
    started, checked = both(1, tmp_path, [override])
    assert checked == started and started.code in (0, 2)
    assert len(started.errors) == bool(started.code)


@pytest.mark.dist
@mostly_slow(
    "override",
    every_choice(),
    "parallel.dispatch=symm",
    "parallel.dispatch=hier",
    "parallel.dispatch=alltoall",
    "parallel.expert_replication=2",
    "kernels.backend=megatron",
)
def test_a_check_for_two_ranks_says_what_they_say(override: str, tmp_path: Path) -> None:
    started, checked = both(2, tmp_path, [override])
    assert checked == started and started.code in (0, 2)


@pytest.mark.dist
def test_a_check_of_kernels_for_gpus_fails_on_a_cpu(tmp_path: Path) -> None:
    _, checked = both(1, tmp_path, ["kernels=fused"])
    line = "error: kernels.backend=fused cannot run here: needs CUDA; use kernels.backend="
    assert checked.code == 2 and checked.errors[0].startswith(line)


@pytest.mark.dist
def test_a_check_for_ranks_of_other_machines_does_not_ask_this_one(tmp_path: Path) -> None:
    _, checked = both(1, tmp_path, ["kernels=fused", "parallel.world_size=2"])
    assert checked == (0, [])
