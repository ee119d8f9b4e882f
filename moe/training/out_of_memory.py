"""Out of memory: what would help, and where the memory is.

`explain_out_of_memory` goes around the code that allocates. It does not handle the error; it makes of it one line
with the knobs that help at their present values, and a snapshot of the allocator for
pytorch.org/memory_viz in the run folder.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from phalanx.configs.bounds import oversized
from phalanx.configs.knobs import changed, get, listed, overrides
from phalanx.configs.layout import data_parallel_size, expert_parallel_size, largest_divisor
from phalanx.configs.schema import Config
from phalanx.configs.validate import is_valid

_HOST = "DefaultCPUAllocator: can't allocate memory"


class OutOfMemory(torch.OutOfMemoryError):
    """The message says which knobs help, and their values."""


@contextmanager
def explain_out_of_memory(cfg: Config, world: int, folder: Path) -> Iterator[None]:
    """Raise OutOfMemory for torch's own errors, of a GPU or of the host.

    Args:
        cfg: of the run.
        world: ranks.
        folder: of the run, for the snapshot.
    """
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, torch.OutOfMemoryError) and _HOST not in str(error):
            raise
        what = (str(error).splitlines() or ["no reason given"])[0]
        where = _snapshot(folder / f"memory_rank{os.environ.get('RANK', '0')}.pickle")
        raise OutOfMemory(f"{advice(cfg, world)}{where} ({what})") from error


def advice(cfg: Config, world: int) -> str:
    """Overrides of which each takes less memory, as `set data.micro_batch=2 or ...`; the cheapest
    first.

    Where a size is impossible nothing else would help, and only that is named.
    """
    if impossible := oversized(cfg):
        return "; ".join(impossible)
    kinds = [
        (overrides(changes) for changes in kind if is_valid(changed(cfg, changes), world))
        for kind in _kinds(cfg, world)
    ]
    helps = [text for kind in kinds if (text := next(kind, ""))]
    return f"set {listed(helps)}" if helps else "take more ranks or a smaller model"


def _kinds(cfg: Config, world: int) -> Iterator[list[dict[str, Any]]]:
    """Values by knob, of each kind the least change first."""
    d, p, r = cfg.data, cfg.parallel, cfg.run
    if d.micro_batch > 1:
        yield [{"data.micro_batch": largest_divisor(d.micro_batch, d.micro_batch - 1)}]
    if r.recompute != ["full"]:
        # What is computed again is not moved as well.
        moved = [name for name in r.offload if name == "residual"]
        beside = {} if moved == r.offload else {"run.offload": moved}
        yield [{"run.recompute": ["full"]} | beside]
    if "residual" not in r.offload:
        yield [{"run.offload": ["residual", *r.offload]}]
    if not p.distributed_optimizer and data_parallel_size(cfg, world) > 1:
        yield [{"parallel.distributed_optimizer": True}]
    yield [{"parallel.expert": size} for size in _doubles(expert_parallel_size(cfg, world), world)]
    yield [{"parallel.tensor": size} for size in _doubles(p.tensor, world)]
    even = {"parallel.pipeline_layout": "", "parallel.virtual_pipeline": 1}
    even = {path: value for path, value in even.items() if get(cfg, path) != value}
    yield [{"parallel.pipeline": size} | even for size in _doubles(p.pipeline, world)]
    if d.sequence_length > 1:
        yield [{"data.sequence_length": d.sequence_length // 2}]


def _doubles(size: int, most: int) -> list[int]:
    """2, 4, ... times a size, up to `most`."""
    return [size << n for n in range(1, most.bit_length()) if size << n <= most]


def _snapshot(path: Path) -> str:
    """Write what the allocator holds; a part of the message."""
    if not torch.cuda.is_initialized():
        return ""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.cuda.memory._dump_snapshot(str(path))
    except (OSError, RuntimeError) as error:
        return f"; no memory snapshot: {error}"
    return f"; memory snapshot in {path}"
