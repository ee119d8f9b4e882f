"""Out of memory: what would help, and where the memory is.

`advised` goes around the code that allocates. It does not handle the error; it makes of it one line
with the knobs that help at their present values, and a snapshot of the allocator for
pytorch.org/memory_viz in the run folder.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from phalanx.configs.bounds import oversized
from phalanx.configs.knobs import written
from phalanx.configs.schema import Config
from phalanx.configs.validate import data_parallel_size, expert_parallel_size

_HOST = "DefaultCPUAllocator: can't allocate memory"


class OutOfMemory(torch.OutOfMemoryError):
    """The message says which knobs help, and their values."""


@contextmanager
def advised(cfg: Config, world: int, folder: Path) -> Iterator[None]:
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
        raise OutOfMemory(f"{'; '.join(advice(cfg, world))}{where} ({what})") from error


def advice(cfg: Config, world: int) -> list[str]:
    """Knobs that would help, as `data.micro_batch=4: lower it`; the cheapest first.

    Where a size is impossible nothing else would help, and only that is named.
    """
    if impossible := oversized(cfg):
        return impossible
    d, p, r = cfg.data, cfg.parallel, cfg.run
    expert = expert_parallel_size(cfg, world)
    knobs = {
        f"data.micro_batch={d.micro_batch}: lower it": d.micro_batch > 1,
        f"run.recompute={written(r.recompute)}: set full": r.recompute != ["full"],
        f"run.offload={written(r.offload)}: add residual": "residual" not in r.offload,
        "parallel.distributed_optimizer=false: set true": not p.distributed_optimizer
        and data_parallel_size(cfg, world) > 1,
        f"parallel.expert={expert}: raise it": expert < min(world, cfg.model.moe.experts),
        f"parallel.tensor={p.tensor} or parallel.pipeline={p.pipeline}: raise one": True,
        f"data.sequence_length={d.sequence_length}: lower it": True,
    }
    return [text for text, helps in knobs.items() if helps]


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
