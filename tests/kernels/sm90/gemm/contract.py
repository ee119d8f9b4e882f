"""Contract of all grouped GEMMs, in bf16 and FP8: one class of tests, and a class for each kernel.

Numbers of rows of experts, sizes that do not divide a tile, few rows, integers, NaN of others, the
order of claims, the counter, host, stream and graph. A kernel's class names its problem, its tiles
and its sizes; cases of its own are methods beside these. A test that a kernel does not have is None
in its class.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import pytest
import torch

from phalanx.kernels.launch_options import LaunchOptions
from phalanx.kernels.sm90.jit.launch import counter_of
from tests.kernels.sm90.gemm.gemm_problems import COUNTS, Outputs, Problem

GATHERED = {"rows": dict(gather=False), "gathered": dict(gather=True)}
"""Variants of kernels that may pick their rows by an index."""
OWN_COUNTER = {"own counter": True, "a counter": False}
Sizes = tuple[int, int]
Variant = dict[str, Any]


class Parametrized:
    """Tests whose parameters are attributes of their class: `parameters` names these."""

    parameters: ClassVar[dict[str, str]] = {}
    """Attribute of each parameter: a dict by id, or a sequence."""

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        marks = metafunc.definition.iter_markers("parametrize")
        given = " ".join(str(mark.args[0]) for mark in marks)
        for name in metafunc.fixturenames:
            if name in self.parameters and name not in given:
                values = getattr(self, self.parameters[name])
                ids: Any = list(values) if isinstance(values, dict) else _joined
                values = values.values() if isinstance(values, dict) else values
                metafunc.parametrize(name, values, ids=ids)


def _joined(value: Any) -> str | None:
    """Name of sizes; pytest's own for others."""
    of_sizes = isinstance(value, tuple) and all(isinstance(each, int) for each in value)
    return "-".join(map(str, value)) if of_sizes else None


class GemmContract(Parametrized):
    """Tests of a kernel that computes rows of experts."""

    parameters: ClassVar[dict[str, str]] = {
        "counts": "counts",
        "tile": "tiles",
        "variant": "variants",
        "sizes": "all_sizes",
        "scheduled": "schedules",
        "own_counter": "counters",
        "refused": "errors",
        "exact": "exact_cases",
        "graphed": "graphs",
    }
    problem: type[Problem]
    counts: ClassVar[dict[str, list[int]]] = COUNTS
    tiles: ClassVar[Sequence[Any]]
    variants: ClassVar[dict[str, Variant]] = GATHERED
    all_sizes: ClassVar[Sequence[Sizes]]
    size: ClassVar[Sizes] = (448, 320)
    """Sizes of most problems."""
    of_counts: ClassVar[Variant] = {}
    """Options of the problems with many numbers of rows."""
    exact_cases: ClassVar[Sequence[tuple[Sizes, Variant, tuple[str, ...]]]]
    """Sizes, options and outputs of problems of integers."""
    schedules: ClassVar[Sequence[tuple[Sizes, Any, Variant]]]
    """Sizes, tile and options."""
    usual: ClassVar[Variant] = dict(gather=True)
    """Options of problems of any tile."""
    counted: ClassVar[Sequence[list[int]]] = [*COUNTS.values()]
    counted_size: ClassVar[Sizes] = (448, 128)
    counted_options: ClassVar[Variant] = {}
    graphs: ClassVar[dict[str, Variant]] = GATHERED
    counters: ClassVar[dict[str, bool]] = OWN_COUNTER
    errors: ClassVar[Sequence[tuple[Variant, str]]] = ()

    def make(self, counts: list[int], sizes: Sizes | None = None, **options) -> Any:
        return self.problem(counts, *(sizes or self.size), **options)

    def loop(self, tile: Any, variant: Variant) -> Variant:
        """Options of a call that takes this tile."""
        raise NotImplementedError

    def check_counts(self, p: Any, ours: Outputs) -> None:
        p.check(ours)

    def check_counted(self, p: Any, ours: Outputs) -> None:
        p.check(ours)

    def call(self, **change) -> Any:
        """Call the kernel with small arguments, of which some are changed."""
        raise NotImplementedError

    def test_every_number_of_rows(self, counts, tile, variant):
        """The error is that of bf16 torch; in FP8 integers are exact."""
        p = self.make(counts, **self.of_counts, **variant)
        self.check_counts(p, p.ours(**self.loop(tile, variant)))

    def test_sizes_that_do_not_divide_the_tile(self, sizes, tile, variant):
        p = self.make(COUNTS["ragged"], sizes, **variant)
        p.check(p.ours(**self.loop(tile, variant)))

    def test_few_rows_in_a_full_buffer(self, tile, variant):
        for counts in ([1], [0, 5, 3], [15, 1], [17], [200, 56, 300], [128], [16, 16]):
            p = self.make(counts, padding=0, **variant)
            p.check(p.ours(**self.loop(tile, variant)))

    def test_integers_are_exact(self, tile, exact):
        sizes, options, names = exact
        p = self.make(COUNTS["many"], sizes, integers=True, **options)
        p.check_exact(p.ours(**self.loop(tile, options)), *names)

    def test_an_expert_does_not_see_its_neighbours(self, tile):
        p = self.make([130, 70, 65])
        loop = self.loop(tile, {})
        clean = p.ours(**loop)
        p.poison(slice(130, 200))
        for name, ours in p.ours(**loop).items():
            assert torch.equal(ours[:130], clean[name][:130]), name
            assert torch.equal(ours[200:], clean[name][200:]), name
            assert ours[130:200].isnan().all(), name

    def test_bits_do_not_depend_on_who_computes(self, scheduled):
        """The same bits, also of padding, and again."""
        sizes, tile, options = scheduled
        p, loop = self.make(COUNTS["many"], sizes, **options), self.loop(tile, options)
        first = p.ours(**loop)
        for margin in (8, 32, 131, 32):
            check_equal(p.ours(**loop, options=LaunchOptions(margin)), first)
        for _ in range(5):
            check_equal(p.ours(**loop), first)

    def test_counter_is_left_at_zero(self):
        counter = torch.zeros(1, dtype=torch.int32, device="cuda")
        for counts in self.counted:
            p = self.make(counts, self.counted_size, **self.counted_options)
            first = p.ours()
            self.check_counted(p, first)
            for margin in (0, 100, 131):
                check_equal(p.ours(counter=counter, options=LaunchOptions(margin)), first)
                assert counter.item() == 0
        assert counter_of(torch.device("cuda", torch.cuda.current_device())).item() == 0

    def test_host_never_waits(self):
        p = self.make(COUNTS["ragged"], (448, 320), **self.usual)
        expected = p.ours()
        with no_waiting():
            ours = p.ours()
        check_equal(ours, expected)

    def test_other_stream_than_the_default(self):
        p = self.make(COUNTS["ragged"], (448, 320), **self.usual)
        expected = p.ours()
        check_equal(on_other_stream(p.ours), expected)

    def test_a_graph_serves_every_routing(self, graphed, own_counter):
        """A hundred replays, each with another routing, are what calls would have been."""
        p = self.make([300, 200, 100, 400], (704, 320), padding=0, **graphed)
        p.ours()  # compiles
        counter = torch.zeros(1, dtype=torch.int32, device="cuda")
        graph, given = torch.cuda.CUDAGraph(), dict(counter=counter) if own_counter else {}
        with torch.cuda.graph(graph):
            replayed = p.ours(**given)
        g = torch.Generator().manual_seed(0)
        for _ in range(100):
            p.reroute(g)
            graph.replay()
            check_equal(replayed, p.ours())
        assert counter.item() == 0

    def test_errors_name_the_argument(self, refused):
        change, message = refused
        with pytest.raises(ValueError, match=message):
            self.call(**change)


class no_waiting:
    """Calls that wait for the device raise."""

    def __enter__(self) -> None:
        torch.cuda.set_sync_debug_mode("error")

    def __exit__(self, *_: object) -> None:
        torch.cuda.set_sync_debug_mode("default")


def on_other_stream(call: Any) -> Any:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        made = call()
    torch.cuda.current_stream().wait_stream(side)
    return made


def check_equal(ours: Outputs, others: Outputs) -> None:
    for name, want in others.items():
        assert torch.equal(ours[name], want), name
