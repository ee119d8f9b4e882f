"""Background saves on a GPU: training waits for less than a step, and the bytes are the same.

One process trains a model of 0.1 B parameters (1.5 GB a checkpoint) with train.py's own code and
takes the time. The first save is not counted: it pins its host memory and validates the layout.
"""

import itertools
import multiprocessing
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.parallel.checkpoint.checkpoints import assert_equal, stored

pytestmark = pytest.mark.gpu

INTERVAL, STEPS = 6, 24
TWIN = STEPS  # also saved while training waits
OVERRIDES = [
    "run.device=cuda",
    "run.name=run",
    f"run.steps={STEPS}",
    f"run.save_interval={INTERVAL}",
    "run.keep_last=9",
    "run.resume=never",
    "run.graph=off",
    "kernels=torch",
    "model=tiny",
    "model.hidden=1024",
    "model.layers=4",
    "model.dense_ffn=2048",
    "model.attention.heads=8",
    "model.attention.kv_heads=8",
    "model.attention.head_dim=128",
    "model.moe.experts=16",
    "model.moe.ffn=512",
    "data=synthetic",
    "data.sequence_length=1024",
    "data.micro_batch=8",
    "data.global_batch=512",
    "optim.warmup_steps=0",
]


def _train(folder: Path) -> tuple[int, list[float], list[float], bool]:
    """(exit code, when each step began, how long each save took, was the memory pinned)."""
    from phalanx import train

    with _watched(folder) as seen:
        code = train.main([*OVERRIDES, f"run.dir={folder}"])
    return code, seen["began"], seen["saves"], seen["pinned"]


@contextmanager
def _watched(folder: Path) -> Iterator[dict[str, Any]]:
    from phalanx.moe.run.trainer import Trainer
    from phalanx.parallel.checkpoint.checkpointer import Checkpointer
    from phalanx.parallel.checkpoint.writer import Staging

    seen: dict[str, Any] = {"began": [], "saves": [], "pinned": False}
    step, save, hold = Trainer._train_step, Checkpointer.save, Staging.hold
    lost = 0.0  # on the twin, which training would not wait for

    def timed_step(self: Any) -> bool:
        torch.cuda.synchronize()
        seen["began"].append(time.perf_counter() - lost)
        return step(self)

    def timed_save(self: Checkpointer, number: int, *state: Any) -> Path:
        nonlocal lost
        torch.cuda.synchronize()
        began = time.perf_counter()
        if number == TWIN:  # the same state, once more, while training waits
            self.close()
            twin = Checkpointer(
                folder / "twin", keep_last=1, async_save=False, dp_cp_group=self._dp_cp_group
            )
            save(twin, number, *state)
        lost += time.perf_counter() - began
        began = time.perf_counter()
        path = save(self, number, *state)
        seen["saves"].append(time.perf_counter() - began)
        return path

    def watched_hold(self: Staging, tensors: Any) -> list[torch.Tensor]:
        copies = hold(self, tensors)
        seen["pinned"] = all(copy.is_pinned() for copy in copies if copy.numel())
        return copies

    Trainer._train_step, Checkpointer.save, Staging.hold = timed_step, timed_save, watched_hold  # type: ignore[method-assign,assignment]
    try:
        yield seen
    finally:
        Trainer._train_step, Checkpointer.save, Staging.hold = step, save, hold  # type: ignore[method-assign]


def test_training_waits_for_less_than_a_step(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as child:  # CUDA is not to be forked
        code, began, saves, pinned = child.submit(_train, tmp_path).result(timeout=900)
    assert code == 0 and len(began) == STEPS and len(saves) == STEPS // INTERVAL
    assert pinned

    steps = [b - a for a, b in itertools.pairwise(began)]
    step = statistics.median(steps)  # nothing is being saved yet
    # What a save costs, all in all: the copy, the fork, polling, the commit, slower steps.
    costs = [
        began[at + INTERVAL] - began[at] - INTERVAL * step
        for at in range(INTERVAL - 1, STEPS - INTERVAL, INTERVAL)
    ]
    report = f"step {step:.3f} s, save calls {saves}, costs {costs}"
    print(report)
    assert all(save < step for save in saves[1:]), report
    assert statistics.mean(costs[1:]) < step, report

    checkpoints = tmp_path / "run/checkpoints"
    name = f"step_{TWIN:08d}"
    assert_equal(stored(checkpoints / name), stored(tmp_path / "twin" / name))
    shards = sorted(path.name for path in (checkpoints / name).glob("*.distcp"))
    assert shards
    for shard in shards:
        both = [(folder / name / shard) for folder in (checkpoints, tmp_path / "twin")]
        assert both[0].read_bytes() == both[1].read_bytes()


def test_copies_from_the_gpu_are_exact() -> None:
    from phalanx.parallel.checkpoint.writer import Staging

    staging, generator = Staging(), torch.Generator("cuda").manual_seed(0)
    given = [
        torch.randn(1000, 300, device="cuda", generator=generator).T,
        torch.randn(77, device="cuda", generator=generator).bfloat16()[3:50],
        torch.empty(0, 4, device="cuda"),
        torch.arange(5),
    ]
    for _ in range(2):  # the second time in the same memory
        copies = staging.hold(given)
        for tensor, copy in zip(given, copies, strict=True):
            assert not copy.is_cuda and torch.equal(copy, tensor.cpu())
            assert copy.is_pinned() or not copy.numel()
        given[0].mul_(2)
