"""Out of memory: advice, and a snapshot of the allocator.

`explain_out_of_memory` surrounds the code that allocates. It does not handle the error, but raises
one line with the knobs that help at their current values, and writes a snapshot of the allocator
for pytorch.org/memory_viz to the run folder.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from phalanx.configs.bounds import oversized
from phalanx.configs.formats import is_fp8, multiplies_fp8, resident_layers
from phalanx.configs.knobs import changed, get, listed, overrides
from phalanx.configs.layout import data_parallel_size, expert_parallel_size, largest_divisor
from phalanx.configs.schema import Config
from phalanx.configs.validate import is_valid
from phalanx.parallel.fault.private_files import open_private

_HOST = "DefaultCPUAllocator: can't allocate memory"


class OutOfMemory(torch.OutOfMemoryError):
    """Error whose message has the knobs that help, and their values."""


@contextmanager
def explain_out_of_memory(cfg: Config, world: int, folder: Path) -> Iterator[None]:
    """Raise OutOfMemory for torch's own errors, of a GPU or of the host.

    Args:
        cfg: config of the run.
        world: number of ranks.
        folder: folder of the run, for the snapshot.
    """
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, torch.OutOfMemoryError) and _HOST not in str(error):
            raise
        reason = (str(error).splitlines() or ["no reason was reported"])[0]
        snapshot = _snapshot(folder / f"memory_rank{os.environ.get('RANK', '0')}.pickle")
        raise OutOfMemory(f"{advice(cfg, world)}{snapshot} ({reason})") from error


def advice(cfg: Config, world: int) -> str:
    """Overrides that each save memory, such as `set data.micro_batch=2 or ...`, cheapest first.

    If a size is impossible nothing else would help, and only that is named.
    """
    if impossible := oversized(cfg):
        return "; ".join(impossible)
    remedies = [
        (overrides(changes) for changes in remedy if is_valid(changed(cfg, changes), world))
        for remedy in _remedies(cfg, world)
    ]
    helpful = [text for remedy in remedies if (text := next(remedy, ""))]
    return f"set {listed(helpful)}" if helpful else "use more ranks or a smaller model"


def _remedies(cfg: Config, world: int) -> Iterator[list[dict[str, Any]]]:
    """Changes of knobs that save memory, for each remedy the smallest change first."""
    d, p, r = cfg.data, cfg.parallel, cfg.run
    copies = is_fp8(cfg) if cfg.kernels.backend == "auto" else multiplies_fp8(cfg)
    if copies and resident_layers(cfg)[0]:
        yield [{"precision.weights": "scratch"}]
    if p.delay_wgrad == "pairs" or (p.pipeline > 1 and p.delay_wgrad != "off"):
        yield [{"parallel.delay_wgrad": "off"}]
    if d.micro_batch > 1:
        yield [{"data.micro_batch": largest_divisor(d.micro_batch, d.micro_batch - 1)}]
    if r.recompute != ["full"]:
        # Activations that are recomputed cannot be offloaded.
        offload = [name for name in r.offload if name == "residual"]
        change = {} if offload == r.offload else {"run.offload": offload}
        yield [{"run.recompute": ["full"]} | change]
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
    """Write a snapshot of the allocator; return a part of the message."""
    if not torch.cuda.is_initialized():
        return ""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        open_private(path, "wb").close()  # it has stacks in it; torch opens the file that is there
        torch.cuda.memory._dump_snapshot(str(path))
    except (OSError, RuntimeError) as error:
        return f"; no memory snapshot: {error}"
    return f"; memory snapshot in {path}"
