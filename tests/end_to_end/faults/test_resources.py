"""A resource fails during a run, which continues, or ends with one line and can be resumed.

Runs of four steps on one rank, with a checkpoint after two; the third step meets the failure.
"""

import builtins
import contextlib
import os
import resource
import types
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch

from phalanx.configs.bounds import oversized
from phalanx.configs.load import load, options
from phalanx.moe.report.console import quiet
from phalanx.moe.run import memory_check
from tests.parallel.surroundings import standing_for
from tests.support.advice import advised, tried
from tests.support.runs import TINY, Change, before_step, records, run, write_corpus

pytestmark = pytest.mark.dist


class Case(NamedTuple):
    """A failure, and the reaction of the run."""

    change: Callable[..., contextlib.AbstractContextManager[Any]]
    """(rank, folder) -> context in which the run fails."""
    code: int
    output: str
    """Text of the only error line, or of the only warning of a run that continues."""
    overrides: tuple[str, ...] = ()


@contextlib.contextmanager
def third_step(rank: int, folder: Path, act: Callable[[Path], Any]) -> Iterator[None]:
    quiet()  # `before_step` imports the trainer before it does
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        with before_step(3, partial(act, folder)):
            yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def full_disk(folder: Path) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def no_folder_of_checkpoints(folder: Path) -> None:
    """Simulate a file system that vanished or became read-only, also for root."""
    (folder / "runs/run/checkpoints").rename(folder / "away")
    (folder / "runs/run/checkpoints").write_text("")


def no_file(folder: Path) -> None:
    (folder / "runs/run/trace_3_4.json.gz").mkdir()


def cut_data(folder: Path) -> None:
    os.truncate(folder / "text.bin", 600)


def other_data(folder: Path) -> None:
    (folder / "text.bin").write_bytes(bytes((folder / "text.bin").stat().st_size))


def no_memory(folder: Path) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.\nmore")


@contextlib.contextmanager
def out_of_gpu_memory(rank: int, folder: Path) -> Iterator[None]:
    """Simulate out-of-memory on a GPU, where the allocator writes a snapshot."""
    real = torch.cuda.is_initialized, torch.cuda.memory._dump_snapshot

    def refuse(folder: Path) -> None:
        torch.cuda.is_initialized = lambda: True
        torch.cuda.memory._dump_snapshot = lambda path: Path(path).write_text("snapshot")
        no_memory(folder)

    try:
        with third_step(rank, folder, refuse):
            yield
    finally:
        torch.cuda.is_initialized, torch.cuda.memory._dump_snapshot = real
    snapshot = folder / "runs/run/memory_rank0.pickle"
    assert snapshot.read_text() == "snapshot"
    assert snapshot.stat().st_mode & 0o777 == 0o600  # stacks are for the user of the run


@contextlib.contextmanager
def no_console(rank: int, folder: Path) -> Iterator[None]:
    """Make `print` fail as on a full disk or a closed pipe."""
    real, calls = builtins.print, 0

    def refuse(*args: Any, **kw: Any) -> None:
        nonlocal calls
        calls += 1
        if calls > 3:
            raise OSError(28, "No space left on device")
        real(*args, **kw)

    with mock.patch.object(builtins, "print", refuse):
        yield
    assert calls > 6


class Service(types.ModuleType):
    """Stands in for wandb and for torch.utils.tensorboard; the method `fails` raises."""

    def __init__(self, fails: str) -> None:
        super().__init__("service")
        self._fails = fails
        self.Settings = dict
        for name in ("init", "SummaryWriter", "log", "finish", "add_scalar", "flush", "close"):
            setattr(self, name, partial(self._call, name))

    def define_metric(self, *args: Any, **kw: Any) -> None: ...

    def _call(self, name: str, *args: Any, **kw: Any) -> "Service":
        if name == self._fails:
            raise ConnectionError("no route to host")
        return self


@contextlib.contextmanager
def service(rank: int, folder: Path, name: str, fails: str) -> Iterator[None]:
    with standing_for(name, Service(fails)):
        yield


WANDB = partial(partial, service, name="wandb")
BOARD = partial(partial, service, name="torch.utils.tensorboard")
AT_3 = partial(partial, third_step)
DATA = ("data=indexed",)
NOT_SAVED = ("run.save_interval=-1",)
CASES = {
    "full disk, checkpoint": Case(AT_3(act=full_disk), 2, "checkpoint of step 4 not written"),
    "full disk, metrics": Case(
        AT_3(act=full_disk), 0, "records are being lost, {folder}/runs/run/metrics", NOT_SAVED
    ),
    "no file for the trace": Case(
        AT_3(act=no_file),
        *(0, "trace_3_4.json.gz cannot be written"),
        (*NOT_SAVED, "run.profile=[3,4]"),
    ),
    "full disk, console": Case(no_console, 0, ""),
    "no folder": Case(AT_3(act=no_folder_of_checkpoints), 2, "cannot write checkpoint"),
    "data cut": Case(AT_3(act=cut_data), 2, "text.bin was changed while this run reads it", DATA),
    "data changed": Case(AT_3(act=other_data), 2, "text.bin was changed while", DATA),
    "host memory": Case(AT_3(act=no_memory), 1, "set data.micro_batch=2, run.recompute='[full]', "),
    "gpu memory": Case(out_of_gpu_memory, 1, "memory snapshot in {folder}/runs/run/memory_rank0"),
    "wandb init": Case(WANDB(fails="init"), 0, "Weights & Biases is off", ("run.wandb=offline",)),
    "wandb log": Case(WANDB(fails="log"), 0, "Weights & Biases is off", ("run.wandb=offline",)),
    "wandb end": Case(WANDB(fails="finish"), 0, "Weights & Biases is off", ("run.wandb=offline",)),
    "board init": Case(
        BOARD(fails="SummaryWriter"), 0, "TensorBoard is", ("run.trackers=[tensorboard]",)
    ),
    "board log": Case(
        BOARD(fails="add_scalar"), 0, "TensorBoard is", ("run.trackers=[tensorboard]",)
    ),
    "board end": Case(BOARD(fails="close"), 0, "TensorBoard is", ("run.trackers=[tensorboard]",)),
}


@pytest.mark.parametrize("name", CASES)
def test_a_run_goes_on_or_ends_in_a_line(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    args = [*TINY, "run.steps=4", "data=synthetic"]
    args += [f"run.dir={tmp_path / 'runs'}", f"data.cache={tmp_path / 'cache'}"]
    args += ["run.save_interval=2", *case.overrides]
    if DATA[0] in args:
        write_corpus(tmp_path / "text")
        args += [f"data.blend=[{tmp_path / 'text'}]"]
    change: Change = partial(case.change, folder=tmp_path)
    full_run = (tmp_path / "text.bin").read_bytes() if DATA[0] in args else b""
    (main,) = run(1, args, change)
    output = case.output.format(folder=tmp_path)
    assert main.code == case.code and "Traceback" not in main.err + main.out
    if case.code == 0:
        warnings = [line for line in main.out.splitlines() if "warning: " in line]
        assert (
            main.err == "" and len(warnings) == bool(output) and all(output in w for w in warnings)
        )
        lost = name == "full disk, metrics"
        assert lost or [r["step"] for r in records(tmp_path / "runs/run")] == [1, 2, 3, 4]
        return
    (line,) = main.err.splitlines()
    assert line.startswith("error: ") and output in line
    # The cause is removed; the checkpoint of step 2 is there, and the run ends as it should have.
    if (tmp_path / "away").exists():
        (tmp_path / "runs/run/checkpoints").unlink()
        (tmp_path / "away").rename(tmp_path / "runs/run/checkpoints")
    if full_run:
        (tmp_path / "text.bin").write_bytes(full_run)
    (main,) = run(1, args)
    assert main.code == 0 and "resumed from step 2: " in main.out
    assert [r["step"] for r in records(tmp_path / "runs/run")] == [1, 2, 3, 4]


@pytest.mark.parametrize("size", ["model.vocab_size=1000000000", "model.moe.experts=99999"])
def test_memory_advice_names_an_impossible_size_alone(size: str) -> None:
    line = memory_check.advice(load([size]), world=2)
    assert line.startswith(f"{size}: lower it, published models have at most ") and ";" not in line


def test_no_published_size_is_impossible() -> None:
    for name in options("model"):
        assert oversized(load([f"model={name}"])) == []


LESS_MEMORY = [
    (
        ["model=tiny", "data.micro_batch=1", "run.recompute=full", "parallel.expert=2"],
        [["run.offload=[residual]"], ["parallel.tensor=2"], ["data.sequence_length=128"]],
    ),
    (
        ["model=tiny", "parallel.expert=1", "parallel.distributed_optimizer=false"],
        [
            ["data.micro_batch=2"],
            ["run.recompute=[full]"],
            ["run.offload=[residual]"],
            ["parallel.distributed_optimizer=true"],
            ["parallel.expert=2"],
        ],
    ),
    (
        [
            "model=tiny_deepseek",
            "data.micro_batch=3",
            "data.global_batch=6",
            "run.offload=expert_h",
        ],
        [["data.micro_batch=1"], ["run.recompute=[full]", "run.offload=[]"]],
    ),
    (
        ["parallel.pipeline=2", "parallel.pipeline_layout='Ett|ttL'", "data.sequence_length=7"],
        [["parallel.delay_wgrad=off"], ["data.micro_batch=2"]],
    ),
    (["precision=fp8_block"], [["precision.weights=scratch"], ["data.micro_batch=2"]]),
    (["precision=fp8_block", "precision.weights=0"], [["data.micro_batch=2"]]),
    (["precision=fp8_block", "kernels=torch"], [["data.micro_batch=2"]]),
]


@pytest.mark.parametrize(("given", "first"), LESS_MEMORY)
def test_memory_advice_is_taken_as_it_is_printed(given: list[str], first: list[list[str]]) -> None:
    actual = advised(memory_check.advice(load(given), world=2))
    assert actual[: len(first)] == first and len(actual) > 1
    for words in actual:
        assert tried(given, words, world=2) != load(given)
