"""Storages of tensors, freed and refilled without autograd's knowledge."""

from collections.abc import Iterable

import torch
from torch import Tensor, UntypedStorage


def storages(tensors: Iterable[Tensor]) -> list[UntypedStorage]:
    """Distinct storages of the tensors, without those that have no bytes."""
    distinct = {t.untyped_storage()._cdata: t.untyped_storage() for t in tensors}
    return [storage for storage in distinct.values() if storage.nbytes()]


def free(storage: UntypedStorage) -> None:
    """Free the memory; tensors on it keep their shape and can be refilled."""
    storage.resize_(0)


def refill(tensor: Tensor, value: Tensor, size: int) -> None:
    """Write `value` to the storage of `tensor`, of `size` bytes, which may have been freed.

    It is written through another tensor on the storage, so that autograd sees no change.
    """
    storage = tensor.untyped_storage()
    if storage.nbytes() != size:
        storage.resize_(size)
    alias(tensor).copy_(value)


def alias(tensor: Tensor) -> Tensor:
    """Another tensor on the same storage, unknown to autograd."""
    out = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return out.set_(
        tensor.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride()
    )


def as_bytes(storage: UntypedStorage) -> Tensor:
    """All bytes of a storage, uint8."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
