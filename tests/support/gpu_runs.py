"""Many runs of the trainer in a few groups of processes, each process of a group with a GPU.

A small run takes a second or two, starting processes ten times that. `run_all` starts torchrun with
this file as the program, which trains run after run, runs of one rank on all GPUs concurrently.
Most of the time is spent compiling on one CPU core, so several groups share the GPUs. A failed run
ends its group, as the other ranks may wait for it; the remaining runs continue in a new one.

Tables of runs that train alike are modules with `CASES`, runs by name, of `STEPS` steps, which have
`SECONDS` to end together, and `PAIRS`; they import the two tests here, and tests/conftest.py the
rest. With `CHECKED` only runs whose name has this text are checked on a CPU.
"""

import contextlib
import gc
import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from phalanx.configs.load import load
from phalanx.configs.validate import validate
from phalanx.moe.report.loggers import read

ROOT = Path(__file__).resolve().parents[2]
RANKS = 2
_GROUPS = 32
"""Groups of processes at a time, divided by the square of the GPUs of each: 8 of two, 2 of four.
Processes take turns on a GPU, and an exchange needs those of all ranks at once."""
_CORES = 2
"""CPU cores of a process: one for itself and one for its threads."""
_MOST_STARTS = 3
"""Starts of a group, after which its remaining runs count as failed: the tree is broken."""


class Outcome(NamedTuple):
    """End of a run."""

    code: int
    """Exit code; -1 if its processes died or were never started."""
    text: str
    """Output of the rank that ended first."""
    seconds: float
    folder: Path
    """Run folder."""


class Case(NamedTuple):
    """A run."""

    ranks: int
    """1, or as many as the group has."""
    overrides: list[str]
    node_gpus: str = ""
    """PHALANX_NODE_GPUS, the GPUs of a simulated node; empty: the environment's."""


def run_on_hopper(cases: Mapping[str, Case], folder: Path, timeout: float) -> dict[str, Outcome]:
    """`run_all` for each size of nodes; skips the test on a machine without enough Hopper GPUs."""
    gpus = max(case.ranks for case in cases.values())
    if torch.cuda.device_count() < gpus or torch.cuda.get_device_capability()[0] != 9:
        pytest.skip(f"needs {gpus} Hopper GPUs")
    done = dict[str, Outcome]()
    for size in dict.fromkeys(case.node_gpus for case in cases.values()):
        same = {name: case for name, case in cases.items() if case.node_gpus == size}
        done |= run_all(same, folder / f"nodes{size}", timeout, gpus)
    return done


def run_all(
    cases: Mapping[str, Case], folder: Path, timeout: float, gpus: int
) -> dict[str, Outcome]:
    """Train every case; `run.dir` is `folder` and `run.name` the name of the case.

    Args:
        cases: cases by name, all with nodes of one size. They run in their order, but those of one
            rank first. Neighbours share a group of processes, so cases that share kernels should be
            neighbours.
        folder: parent of the run folders.
        timeout: seconds for all cases.
        gpus: number of processes of a group.
    """
    listed = list(cases.items())
    cores = len(os.sched_getaffinity(0))
    groups = max(1, min(_GROUPS // gpus**2, cores // (_CORES * gpus)))
    size = -(-len(listed) // groups)
    parts = [dict(listed[i : i + size]) for i in range(0, len(listed), size)]
    deadline = time.monotonic() + timeout
    with ThreadPoolExecutor(len(parts)) as pool:
        done = pool.map(
            lambda i: _run_part(parts[i], folder / f"group{i}", deadline, gpus), range(len(parts))
        )
        return {name: outcome for part in done for name, outcome in part.items()}


def steps_of(outcome: Outcome, count: int) -> list[dict[str, Any]]:
    """Metrics of the steps of a run, which ended well after so many."""
    assert outcome.code == 0, f"{outcome.folder.name}: exit code {outcome.code}\n{outcome.text}"
    steps = read(outcome.folder / "metrics.jsonl")
    assert len(steps) == count
    return steps


LOSS, NORM = 5e-3, 5e-2
"""Relative tolerance. In bf16 nearly tied choices of experts differ between layouts."""
LOSSES = ("loss", "grad_norm")


def training(steps: int, batch: int, *more: str) -> list[str]:
    """Overrides of a small run of the fused kernels, of so many steps and sequences of a step."""
    return [
        *["run.device=cuda", f"run.steps={steps}", "run.save_interval=-1", "kernels=fused"],
        *["data.sequence_length=256", "data.micro_batch=2", f"data.global_batch={batch}"],
        *["optim.warmup_steps=2", "parallel.timeout=60"],
        "parallel.capacity_factor=8",  # a rerun is an eager step, and a capture of some seconds
        *more,
    ]


class Pair(NamedTuple):
    """A run, and another one that has the same bits, or is close."""

    run: str
    other: str
    close: bool = False
    values: Sequence[str] = LOSSES


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize by the pairs of a module that has `PAIRS`."""
    pairs = getattr(metafunc.module, "PAIRS", None)
    if pairs is not None and "pair" in metafunc.fixturenames:
        ids = [f"{pair.run} as {pair.other}" for pair in pairs]
        metafunc.parametrize("pair", pairs, ids=ids)


@pytest.fixture(scope="module")
def outcomes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Outcome]:
    """Outcomes by name of the module's runs, trained once for all of its tests."""
    module = request.module
    return run_on_hopper(module.CASES, tmp_path_factory.mktemp("runs"), module.SECONDS)


@pytest.mark.gpu
def test_runs_train_alike(
    pair: Pair, outcomes: dict[str, Outcome], request: pytest.FixtureRequest
) -> None:
    got, want = (steps_of(outcomes[n], request.module.STEPS) for n in (pair.run, pair.other))
    for value in pair.values:
        found, expected = ([step.get(value) for step in steps] for steps in (got, want))
        within: Any = expected
        if pair.close:
            within = pytest.approx(expected, rel=LOSS if value == "loss" else NORM)
        assert found == within, f"{value}: {found} and {expected}"


def test_every_run_is_a_valid_configuration(request: pytest.FixtureRequest) -> None:
    checked = getattr(request.module, "CHECKED", "")
    for name, case in request.module.CASES.items():
        if checked in name:
            validate(load(case.overrides), case.ranks)


def _run_part(
    cases: Mapping[str, Case], folder: Path, deadline: float, gpus: int
) -> dict[str, Outcome]:
    done: dict[str, Outcome] = {}
    for _ in range(_MOST_STARTS):
        left = {name: case for name, case in cases.items() if name not in done}
        if not left or time.monotonic() > deadline:
            break
        log = _torchrun(left, folder, deadline - time.monotonic(), gpus)
        finished = _finished(folder)
        done |= finished
        lost = [name for name in left if name not in finished]
        if lost and not any(outcome.code for outcome in finished.values()):
            # No outcome was written: processes died, or the time was up.
            done[lost[0]] = Outcome(-1, log[-4000:], 0.0, folder.parent / lost[0])
    return {
        name: done.get(name, Outcome(-1, "was not run", 0.0, folder.parent / name))
        for name in cases
    }


def _torchrun(cases: Mapping[str, Case], folder: Path, timeout: float, gpus: int) -> str:
    """Run the cases in a group of processes, which write to `folder`; returns their output."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("outcomes.*"):
        old.unlink()
    listed = folder / "cases.json"
    listed.write_text(json.dumps({name: list(case) for name, case in cases.items()}))
    env = dict(os.environ)
    env.pop("PYTHONDONTWRITEBYTECODE", None)  # every run starts a guard, which imports
    if size := next(iter(cases.values())).node_gpus:
        env["PHALANX_NODE_GPUS"] = size
    command = [*(sys.executable, "-m", "torch.distributed.run", "--standalone")]
    command += ["--nproc-per-node", str(gpus), "-m", "tests.support.gpu_runs", str(listed)]
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=timeout
        )
    except subprocess.TimeoutExpired as late:
        return str(late)
    return done.stdout + done.stderr


def _finished(folder: Path) -> dict[str, Outcome]:
    """Outcome of each case: the first failure of its ranks, if any."""
    found: dict[str, Outcome] = {}
    for file in sorted(folder.glob("outcomes.*")):
        for line in file.read_text().splitlines():
            name, code, text, seconds = json.loads(line)
            if name not in found or (code and not found[name].code):
                found[name] = Outcome(code, text, seconds, folder.parent / name)
    return found


# --- the program ----------------------------------------------------------------------------------


class _Groups:
    """Process groups that runs inherit from the runs before them.

    NCCL takes a second to create the groups of a run and four to destroy them. Groups of a run stay
    distinct: the n-th group of the same ranks is the n-th one of every run.
    """

    def __init__(self) -> None:
        self._make: Callable[..., Any] = dist.new_group
        self._made: dict[tuple[int, ...], list[Any]] = {}
        self._taken: dict[tuple[int, ...], int] = {}
        dist.new_group = self._new

    def begin(self) -> None:
        """Start a run: all groups are free."""
        self._taken = {}

    def _new(self, ranks: Sequence[int] | None = None, *given: Any, **named: Any) -> Any:
        key = tuple(range(dist.get_world_size()) if ranks is None else ranks)
        made, taken = self._made.setdefault(key, []), self._taken.get(key, 0)
        if taken == len(made):
            made.append(self._make(ranks, *given, **named))
        self._taken[key] = taken + 1
        return made[taken]


def _main(listed: Path) -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store, _, _ = next(dist.rendezvous("env://", rank, world))
    cases = {name: Case(*case) for name, case in json.loads(listed.read_text()).items()}
    alone = [name for name, case in cases.items() if case.ranks == 1][rank::world]
    together = [name for name, case in cases.items() if case.ranks == world]
    torch.cuda.set_device(rank)
    for chosen, ranks, own in ((alone, 1, 0), (together, world, rank)):
        if not chosen:
            continue
        os.environ |= {"RANK": str(own), "WORLD_SIZE": str(ranks)}
        dist.init_process_group(
            "nccl",
            store=dist.PrefixStore(f"alone on {rank}" if ranks == 1 else "together", store),
            rank=own,
            world_size=ranks,
            device_id=torch.device("cuda", rank),
        )
        groups = _Groups()
        for name in chosen:
            groups.begin()
            _train(name, cases[name], store, listed.parent, rank)
        dist.new_group = groups._make
        dist.destroy_process_group()


def _train(name: str, case: Case, store: dist.Store, folder: Path, process: int) -> None:
    """Train in this process; a failure ends it."""
    from phalanx import train
    from phalanx.parallel.connections import Connections
    from tests.support.distributed import _forget_models

    began = time.monotonic()
    # Keys in the store must be fresh in each run.
    own = dist.PrefixStore(name if case.ranks > 1 else f"{name} on {process}", store)
    dist.distributed_c10d._get_default_store = lambda: own  # type: ignore[assignment]
    out = io.StringIO()
    places = [f"run.dir={folder.parent}", f"run.name={name}"]
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        code = train.main([*case.overrides, *places], ends_process=True)
    with open(folder / f"outcomes.{process}", "a") as file:
        outcome: list[Any] = [name, code, out.getvalue()[-6000:], time.monotonic() - began]
        file.write(json.dumps(outcome) + "\n")
    if code:
        os._exit(3)
    for connections in [*Connections.unreleased]:
        connections.release()
    parallel_state.destroy_model_parallel()
    _forget_models()
    gc.collect()
    if not gc.get_freeze_count():
        gc.freeze()  # imported objects, which every collection of a run would visit
    torch.cuda.empty_cache()


def names(parts: Sequence[str]) -> str:
    """Name of a case that consists of parts."""
    return "-".join(parts)


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
