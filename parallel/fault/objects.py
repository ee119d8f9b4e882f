"""Collectives of Python objects over the whole job, for `parallel.fault.agreement`.

Those of torch.distributed need NumPy, which torch does not install.
"""

import ctypes
import pickle
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def all_gather(value: Any) -> list[Any]:
    """`value` of every rank, in rank order."""
    mine = _encoded(value)
    size = torch.tensor([len(mine)], device=_device())
    sizes = [torch.zeros_like(size) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, size)
    lengths = [int(size) for size in sizes]
    padded = torch.nn.functional.pad(mine, (0, max(lengths) - len(mine)))
    found = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(found, padded)
    return [_decoded(data[:n]) for data, n in zip(found, lengths, strict=True)]


def broadcast(value: Any) -> Any:
    """`value` of rank 0."""
    mine = _encoded(value) if dist.get_rank() == 0 else torch.empty(0, dtype=torch.uint8)
    size = torch.tensor([len(mine)], device=_device())
    dist.broadcast(size, src=0)
    data = mine if dist.get_rank() == 0 else mine.new_empty(int(size), device=_device())
    dist.broadcast(data, src=0)
    return _decoded(data)


def _encoded(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8).to(_device())


def _decoded(data: Tensor) -> Any:
    here = data.cpu().contiguous()
    return pickle.loads(ctypes.string_at(here.data_ptr(), len(here)))


def _device() -> str:
    """Type of the device whose tensors the job's collectives take; the host's if they do."""
    return "cpu" if "cpu" in dist.get_backend_config() else "cuda"
