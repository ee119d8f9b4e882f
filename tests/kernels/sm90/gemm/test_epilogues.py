"""Epilogues and their staging, by running their own functions as plain Python.

Strips of shared memory are stood in for by ones that only note who uses them: a store reads its
strips until it is drained, a load writes its strips at any time until it is waited for. Addresses
are those of the real `Staging`, lane by lane.
"""

import inspect
from types import FunctionType, SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("cutlass")

from phalanx.kernels.expert_mlp.activation import Activation
from phalanx.kernels.sm90.gemm import epilogues, smem_strips
from phalanx.kernels.sm90.gemm.epilogues import Act, ActGrad, Linear, _Act, _ActGrad, _Linear, _Warp
from phalanx.kernels.sm90.gemm.mainloop import TILE_ROWS, Mainloop
from phalanx.kernels.sm90.gemm.smem_strips import ROWS, Staging, Strips

ACTS = [Activation("swiglu"), Activation("squared_relu")]
LOOPS = [
    Mainloop(128, pingpong=True),
    Mainloop(192, pingpong=True),
    Mainloop(128),
    Mainloop(192),
    Mainloop(256),
]
ROW = 1000
END_OF_TILE = [1, 15, 16, 17, 63, 64, 65, 100, 127, 128, 500]


def _plain(method: Any, module: Any) -> FunctionType:
    """A method as it is written; the first compilation of a kernel rewrites it for the device."""
    return FunctionType(inspect.unwrap(method).__code__, vars(module))


class Barrier:
    """Number `number` of those at `memory`."""

    def __init__(self, memory: "Memory", number: int = 0) -> None:
        self.memory, self.number = memory, number

    def __add__(self, further: int) -> "Barrier":
        return Barrier(self.memory, self.number + further)


class Memory:
    """All strips of a warp; stores in the order in which they were begun."""

    def __init__(self) -> None:
        self.reading: list[set[Any]] = []
        self.arriving: dict[int, set[Any]] = {}
        self.holds: dict[Any, Any] = {}
        self.stored: list[tuple[Any, ...]] = []
        self.phases: dict[int, int] = {}
        self.expected = 0

    def touch(self, strip: Any, change: bool) -> None:
        assert not any(strip in strips for strips in self.arriving.values()), "still loading"
        assert not change or not any(strip in strips for strips in self.reading), "still storing"

    def drain(self, pending: int) -> None:
        done = len(self.reading) - pending
        del self.reading[: max(0, done)]

    def wait(self, barrier: Barrier, phase: int) -> None:
        number = barrier.number
        assert self.phases.get(number, 0) == phase and number in self.arriving
        self.phases[number] = phase ^ 1
        assert len(self.arriving.pop(number)) == self.expected


class Notes:
    """In place of a `Staging`."""

    def __init__(self, memory: Memory, strips: Strips) -> None:
        self.memory, self.strips, self.drain = memory, strips, memory.drain

    def _of(self, strip: int) -> int:
        assert 0 <= strip < self.strips.count
        return strip

    def read(self, strip: int, q: int) -> list[Any]:
        self.memory.touch(self._of(strip), False)
        return [self.memory.holds[self._of(strip), q]] * 4

    def write(self, strip: int, q: int, words: list[Any]) -> None:
        assert len(words) == 4 and q < self.strips.columns // 16
        self.memory.touch(self._of(strip), True)
        self.memory.holds[self._of(strip), q] = words[0]

    def store(self, strip: int, tma: Any, rows: Any, top: int, end: int, column: int) -> None:
        assert top < end
        self.memory.touch(self._of(strip), False)
        self.memory.reading.append({self._of(strip)})
        self.memory.stored.append((rows.name, top, column))

    def expect(self, strips: int, barrier: Barrier) -> None:
        assert barrier.number not in self.memory.arriving
        self.memory.arriving[barrier.number], self.memory.expected = set(), strips

    def load(self, strip: int, tma: Any, top: int, column: int, barrier: Barrier) -> None:
        self.memory.touch(self._of(strip), True)
        self.memory.arriving[barrier.number].add(self._of(strip))
        for q in range(self.strips.columns // 16):
            self.memory.holds[self._of(strip), q] = ("h", top, column)


class Tensor(SimpleNamespace):
    """Stand-in with a name and a shape."""


def _warp(loop: Mainloop, number: int, memory: Memory) -> SimpleNamespace:
    first = number % 4 * 16 if loop.pingpong else number * 16
    warp = SimpleNamespace(loop=loop, blocks_m=loop.group_rows // 64, column=0)
    warp.first, warp.number = first, number
    values = _plain(_Warp.values, epilogues)
    size = warp.blocks_m * loop.columns // 2
    warp.values = lambda acc, m, q: values(warp, range(size), m, q)
    warp.per_row = lambda tensor, top, end: [1.0, 1.0]
    return warp


def _run(kind: Any, config: Any, loop: Mainloop, number: int, ends: list[int], F: int) -> Memory:
    """Store tiles that end at `ends` with one warp; its memory."""
    memory, num_gate_parts = Memory(), getattr(config, "num_gate_parts", 1)
    made = SimpleNamespace(
        config=config,
        loop=loop,
        warp=_warp(loop, number, memory),
        staging=Notes(memory, config.strips(loop)),
        bias=None,
        scale=None,
        prob=None,
        dprob=None,
        tma=None,
        tma_h=None,
        tma_a=None,
        tma_d=None,
        mY=Tensor(name="y", shape=(0, F)),
        mH=Tensor(name="h", shape=(0, num_gate_parts * F)),
        mD=Tensor(name="h", shape=(0, num_gate_parts * F)),
        mA=Tensor(name="a", shape=(0, F)),
        loaded=Barrier(memory),
        width=loop.columns // 32,
    )
    made.steps = made.width * made.warp.blocks_m
    for name in ("_store", "_words", "_load", "prefetch", "__call__"):
        if hasattr(kind, name):
            call = _plain(getattr(kind, name), epilogues)
            setattr(made, name, lambda *args, call=call: call(made, *args))
    made._sum = lambda *args: None
    turn, wide = 0, loop.columns // (num_gate_parts if kind is _Act else 1)
    for end in ends:
        for column in range(-(-F // wide)):
            made.prefetch(ROW, end, column)
            turn = made.__call__("acc", turn, ROW, end, column, 0)
            assert not memory.arriving
    return memory


def _wanted(loop: Mainloop, number: int, ends: list[int], columns: dict[str, int], step: int):
    first = number % 4 * 16 if loop.pingpong else number * 16
    tops = [ROW + first + 64 * m for m in range(loop.group_rows // 64)]
    return sorted(
        (name, top, n)
        for end in ends
        for top in tops
        if top < end
        for name, wide in columns.items()
        for n in range(0, wide, step)
    )


@pytest.fixture
def seen(monkeypatch) -> list[tuple[Any, Any]]:
    """Inputs of the gradients; words are values, which say where they come from."""
    integers = SimpleNamespace(const_expr=bool, range_constexpr=range, min=min)
    monkeypatch.setattr(epilogues, "cutlass", integers)
    pairs = SimpleNamespace(unpack=lambda word: (word, word), pack=lambda low, high: low)
    monkeypatch.setattr(epilogues, "ptx", pairs)
    taken: list[tuple[Any, Any]] = []

    def backward(act: Activation, gate: Any, up: Any, da: Any) -> tuple[float, ...]:
        taken.append((gate, up))
        return 0.0, 0.0, 1.0

    activations = SimpleNamespace(forward=lambda act, gate, up: 1.0, backward=backward)
    monkeypatch.setattr(epilogues, "activate", activations)
    wait = SimpleNamespace(mbarrier_wait=lambda barrier, phase: barrier.memory.wait(barrier, phase))
    tensor = SimpleNamespace(fill=lambda value: None)
    device = SimpleNamespace(arch=wait, make_rmem_tensor=lambda *a: tensor)
    monkeypatch.setattr(epilogues, "cute", device)
    return taken


@pytest.mark.parametrize("loop", LOOPS, ids=str)
@pytest.mark.parametrize("F", [64, 192, 448])
def test_plain_epilogue(loop, F, seen):
    for number in range(8):
        ends = [ROW + end for end in END_OF_TILE]
        memory = _run(_Linear, Linear(), loop, number, ends, F)
        assert sorted(memory.stored) == _wanted(loop, number, ends, {"y": F}, 64)


@pytest.mark.parametrize("keep_h", [True, False])
@pytest.mark.parametrize("act", ACTS, ids=lambda act: act.kind)
@pytest.mark.parametrize("loop", LOOPS, ids=str)
@pytest.mark.parametrize("F", [64, 192, 448])
def test_activation(loop, F, act, keep_h, seen):
    for number in range(8):
        ends = [ROW + end for end in END_OF_TILE]
        memory = _run(_Act, Act(act, keep_h=keep_h), loop, number, ends, F)
        columns = {"a": F, "h": act.width(F)} if keep_h else {"a": F}
        assert sorted(memory.stored) == _wanted(loop, number, ends, columns, 32)


@pytest.mark.parametrize("act", ACTS, ids=lambda act: act.kind)
@pytest.mark.parametrize("loop", LOOPS, ids=str)
@pytest.mark.parametrize("F", [64, 192, 448])
def test_gradient_of_the_activation(loop, F, act, seen):
    """h is read from where dh goes, after it has come and before its strip is used again."""
    ends = [ROW + end for end in END_OF_TILE]
    for number in range(8):
        seen.clear()
        memory = _run(_ActGrad, ActGrad(act, prob=False), loop, number, ends, F)
        columns = {"a": F, "h": act.width(F)}
        assert sorted(memory.stored) == _wanted(loop, number, ends, columns, 32)
        gates = _wanted(loop, number, ends, {"h": F}, 32)
        assert sorted(gate for gate, _ in seen) == sorted(16 * gates)
        for (_, top, n), up in seen:
            assert up == ("h", top, n + F if act.gated else n)


def _staging(strips: Strips, warp: int, lane: int, base: int) -> SimpleNamespace:
    """A real `Staging` of one lane, its strips at address `base`."""
    made = SimpleNamespace(strips=strips)
    made._flip = lambda row: Staging._flip(made, row)
    made._inside = lambda lane: Staging._inside(made, lane)
    made._at = lambda *args: Staging._at(made, *args)
    data = SimpleNamespace(get_tensor=lambda *a, **k: None, data_ptr=lambda: base)
    Staging.__init__(made, strips, SimpleNamespace(data=data), 32 * warp + lane)
    return made


@pytest.fixture
def lanes(monkeypatch):
    arch = SimpleNamespace(make_warp_uniform=lambda x: x)
    monkeypatch.setattr(smem_strips, "cute", SimpleNamespace(arch=arch))
    monkeypatch.setattr(Strips, "layout", lambda *a: SimpleNamespace(outer=None, inner=None))


def _swizzled(strips: Strips, row: int, chunk: int) -> int:
    """Address at which TMA has 16 bytes of a strip: address bits 7 and up flip those of the
    chunk."""
    at = row * strips.pitch + chunk * 16
    return at ^ (at >> 3 & (strips.pitch - 16))


@pytest.mark.parametrize("strips", [Strips(64, 2), Strips(64, 4), Strips(32, 6)], ids=str)
def test_fragments_lie_where_tma_looks_for_them(strips, lanes, monkeypatch):
    base = 5 * 1024
    addresses: list[int] = []
    monkeypatch.setattr(
        smem_strips,
        "ptx",
        SimpleNamespace(address=int, stmatrix=lambda where, *words: addresses.append(where)),
    )
    used = set()
    for warp in range(8):
        for strip in range(strips.count):
            for q in range(strips.columns // 16):
                addresses.clear()
                for lane in range(32):
                    Staging.write(_staging(strips, warp, lane, base), strip, q, [])
                start = base + (warp * strips.count + strip) * ROWS * strips.pitch
                # lanes 0 to 15 have rows of the first 8 columns, the others of the next ones
                assert addresses == [
                    start + _swizzled(strips, lane % 16, 2 * q + lane // 16) for lane in range(32)
                ]
                used.update(addresses)
    assert len(used) == strips.bytes // 16
    assert max(used) - base == strips.bytes - 16


@pytest.mark.parametrize("strips", [Strips(64, 2), Strips(32, 6)], ids=str)
@pytest.mark.parametrize("left", [1, 5, 15])
def test_the_ragged_end_is_stored_row_by_row(left, strips, lanes, monkeypatch):
    base, width, top, column, memory = 1024, 448, 70_000_000, 320, 1 << 40
    stored: dict[int, int] = {}
    loads = SimpleNamespace(
        address=int,
        lane=lambda: lane,
        load_shared=lambda where: [where],
        store_global=lambda where, word: stored.setdefault(where, word),
    )
    monkeypatch.setattr(smem_strips, "ptx", loads)
    monkeypatch.setattr(smem_strips, "Int64", int)
    monkeypatch.setattr(smem_strips, "cutlass", SimpleNamespace(range_constexpr=range))
    rows = SimpleNamespace(shape=(0, width), iterator=SimpleNamespace(toint=lambda: memory))
    call = _plain(Staging._store_rows, smem_strips)
    for lane in range(32):
        call(_staging(strips, 3, lane, base), 1, rows, top, top + left, column)
    start = base + (3 * strips.count + 1) * ROWS * strips.pitch
    assert stored == {
        memory + 2 * ((top + row) * width + column) + 16 * chunk: start
        + _swizzled(strips, row, chunk)
        for row in range(left)
        for chunk in range(strips.pitch // 16)
    }


def test_warps_cover_a_tile(monkeypatch):
    arch = SimpleNamespace(make_warp_uniform=lambda x: x)
    monkeypatch.setattr(epilogues, "cute", SimpleNamespace(arch=arch))
    for loop in LOOPS:
        rows: list[int] = []
        for number in range(loop.warps):
            warp = _Warp(loop, 32 * number)
            for m in range(warp.blocks_m):
                rows.extend(range(warp.first + 64 * m, warp.first + 64 * m + 16))
        assert sorted(rows) == list(range(TILE_ROWS))
