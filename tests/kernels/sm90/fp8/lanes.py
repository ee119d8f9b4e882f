"""A warp in lockstep on the CPU: its own functions run as plain Python, a value an array of lanes.

`warp` stands in for the DSL in a module; shared memory is an array of bytes.
"""

import inspect
from types import FunctionType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

LANES = np.arange(32)


class Lanes(np.ndarray):
    """Integers of all lanes."""

    def bitcast(self, kind: Any) -> np.ndarray:
        assert kind == "Float32"
        return np.asarray(self).astype(np.int64).astype(np.uint32).view(np.float32)


def integers(x: Any) -> Lanes:
    return np.asarray(x).astype(np.int64).view(Lanes)


def plain(method: Any, module: Any) -> FunctionType:
    """A method as it is written; the first compilation of a kernel rewrites it for the device."""
    written = inspect.unwrap(method)
    return FunctionType(
        written.__code__, vars(module), written.__name__, written.__defaults__, written.__closure__
    )


def bind(made: Any, kind: type, module: Any, *names: str) -> None:
    """Give `made` methods of a class."""
    for name in names:
        call = plain(vars(kind)[name], module)
        setattr(made, name, lambda *args, call=call: call(made, *args))


def _unpack(word: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    word = np.asarray(word).astype(np.uint32)
    return (word << np.uint32(16)).view(np.float32), (word & np.uint32(0xFFFF0000)).view(np.float32)


def _max_pair(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Maximum; of a number and NaN, the number."""
    low, high = (np.fmax(x, y) for x, y in zip(_unpack(a), _unpack(b), strict=True))
    return (low.view(np.uint32) >> np.uint32(16)) | (high.view(np.uint32) & np.uint32(0xFFFF0000))


def _fp8(name: str, x: np.ndarray) -> np.ndarray:
    top, kind = {"e4m3": (448, torch.float8_e4m3fn), "e5m2": (57344, torch.float8_e5m2)}[name]
    made = torch.from_numpy(np.ascontiguousarray(x)).clamp(-top, top).to(kind)
    return made.view(torch.uint8).numpy().astype(np.uint32)


def _pack_fp8(name: str, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    return _fp8(name, low) | (_fp8(name, high) << np.uint32(8))


class Warp:
    """Shared memory of a warp, and what stands in for the DSL's modules."""

    def __init__(self, shared: int) -> None:
        self.shared = np.zeros(shared, np.uint8)

    def store_half(self, where: np.ndarray, word: np.ndarray) -> None:
        assert (where % 2 == 0).all() and len(set(where.tolist())) == 32
        assert (self._banks(where) <= 1).all(), "the lanes' stores wait for each other"
        self.shared[where], self.shared[where + 1] = word & 0xFF, word >> 8

    @staticmethod
    def _banks(where: np.ndarray) -> np.ndarray:
        """Different words in each bank."""
        return np.bincount(np.unique(where // 4) % 32, minlength=32)

    def install(self, monkeypatch: pytest.MonkeyPatch, module: Any) -> None:
        """Replace the DSL in a module."""
        ptx = SimpleNamespace(
            lane=lambda: integers(LANES),
            unpack=_unpack,
            max_pair=_max_pair,
            pack_fp8=_pack_fp8,
            store_shared_half=self.store_half,
        )
        cutlass = SimpleNamespace(
            select_=np.where,
            min=np.minimum,
            max=np.maximum,
            const_expr=bool,
            range_constexpr=range,
        )
        arch = SimpleNamespace(shuffle_sync_bfly=lambda x, step: x[LANES ^ step])
        given = dict(ptx=ptx, cutlass=cutlass, cute=SimpleNamespace(arch=arch), Int32=integers)
        given |= dict(Int64=int, Uint32=np.uint32, Float32="Float32")
        for name, value in given.items():
            monkeypatch.setattr(module, name, value, raising=False)
