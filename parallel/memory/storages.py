"""Storages of tensors, emptied and filled again behind the back of autograd."""

from collections.abc import Iterable

import torch
from torch import Tensor, UntypedStorage


def storages(tensors: Iterable[Tensor]) -> list[UntypedStorage]:
    """Those that have bytes, each once."""
    found = {t.untyped_storage()._cdata: t.untyped_storage() for t in tensors}
    return [storage for storage in found.values() if storage.nbytes()]


def empty(storage: UntypedStorage) -> None:
    """Give the memory back; tensors that are there keep their shape and can be filled again."""
    storage.resize_(0)


def fill(tensor: Tensor, value: Tensor, size: int) -> None:
    """Write `value` to the storage of `tensor`, of `size` bytes, which may be empty.

    Through another tensor on it: autograd does not take it for a change.
    """
    storage = tensor.untyped_storage()
    if storage.nbytes() != size:
        storage.resize_(size)
    alias(tensor).copy_(value)


def alias(tensor: Tensor) -> Tensor:
    """Another tensor on the same storage, of which autograd knows nothing."""
    made = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return made.set_(
        tensor.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride()
    )


def whole(storage: UntypedStorage) -> Tensor:
    """All bytes, uint8."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
