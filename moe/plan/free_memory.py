"""Free memory of a host or a GPU, cgroups included."""

from dataclasses import dataclass
from pathlib import Path

import psutil
import torch


@dataclass(frozen=True)
class FreeMemory:
    """Memory that ranks on one device can still allocate together."""

    device: str  # `this host`, `GPU 0`
    free: int  # free bytes
    swap: int = 0  # free bytes of swap space, which are slow


def free_host_memory(
    root: Path = Path("/sys/fs/cgroup"), me: Path = Path("/proc/self/cgroup")
) -> FreeMemory:
    """Free memory of this host, or less if a cgroup of this process allows less.

    Args:
        root: mount point of the cgroups.
        me: file with the cgroups of this process.
    """
    free, swap = psutil.virtual_memory().available, psutil.swap_memory().free
    device = "this host"
    for folder in _cgroups(root, me):
        if (left := _left(folder)) is not None and left < free:
            free, device = max(0, left), "this host's cgroup"
    return FreeMemory(device, free, swap)


def free_gpu_memory(device: torch.device) -> FreeMemory:
    """Free memory of a GPU, unused memory that torch's allocator has reserved included."""
    free, _ = torch.cuda.mem_get_info(device)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return FreeMemory(f"GPU {device.index or 0}", free + unused)


def _cgroups(root: Path, me: Path) -> list[Path]:
    """Folders of the memory cgroups of this process, starting at the mount point."""
    try:
        lines = me.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    folders = []
    for line in lines:
        _, kinds, path = line.split(":", 2)
        if kinds and "memory" not in kinds.split(","):
            continue
        top = root / "memory" if kinds else root
        parts = Path(path.lstrip("/"))
        folders += [top, *(top / p for p in reversed(parts.parents)), top / parts]
    return list(dict.fromkeys(folders))


def _left(folder: Path) -> int | None:
    """Bytes that a cgroup may still allocate, reclaimable page cache included; None: no limit."""
    for limit, usage, cache in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        try:
            most = (folder / limit).read_text(encoding="utf-8").strip()
            used = int((folder / usage).read_text(encoding="utf-8"))
            stat = (folder / "memory.stat").read_text(encoding="utf-8")
        except OSError:
            continue
        if not most.isdecimal():  # max
            return None
        counters = dict(line.split(" ", 1) for line in stat.splitlines())
        return int(most) - used + int(counters.get(cache, 0))
    return None
