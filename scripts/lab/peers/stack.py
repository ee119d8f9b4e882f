"""The framework of a published run, as far as its estimate needs it: `stack` of a record."""

import hashlib
from dataclasses import dataclass

from phalanx.configs.records import Published


@dataclass(frozen=True)
class Stack:
    """Facts of a framework, from the source of a record or assumed."""

    dispatcher: str  # package: a key of `dispatchers.DISPATCHERS`
    attention: str = "cudnn"  # library of core attention: one of configs.arithmetic.rates
    overlap: bool = False  # exchanges run beside the computation of another micro-batch
    graphs: bool = False  # CUDA graphs launch layers, or parts of them
    early: bool = False  # measured before April 2026, by its release or date
    biases: bool = False  # those of experts are added by passes of their own (Megatron-Core)
    casts: bool = False  # FP8 values have one scale a tensor, of passes over whole tensors
    tuned: bool = True  # its source calls it a benchmark, not a trial of functions
    assumed: tuple[str, ...] = ()  # what the source does not say


def stack_of(record: Published) -> Stack:
    """The framework of a record, or ValueError."""
    if record.stack is None:
        raise ValueError(f"{record.system} of {record.source} has no stack to estimate")
    try:
        return Stack(**record.stack | {"assumed": tuple(record.stack.get("assumed", ()))})
    except TypeError as error:
        raise ValueError(f"{record.system} of {record.source}: stack: {error}") from error


def name_of(record: Published) -> str:
    """A name of a record that no other has."""
    rate = f"{record.tokens_per_second_per_gpu:g}"
    return f"{record.model}, {record.system}, {record.hardware}, {record.dtype}, {rate}"


def is_held(record: Published) -> bool:
    """Is a record left out when rates are fitted, so that its error tells that of a new one?

    By the last bit of the SHA-256 of its name, which was fixed before anything was fitted.
    """
    return hashlib.sha256(name_of(record).encode()).digest()[-1] % 2 == 1
