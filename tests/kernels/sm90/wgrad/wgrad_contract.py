"""Contract of all kernels of weight gradients, in bf16 and FP8; see `contract`."""

from typing import Any, ClassVar

import torch
from torch import Tensor

from phalanx.kernels.launch_options import LaunchOptions
from phalanx.kernels.sm90.wgrad.wgrad import wgrad
from tests.kernels.sm90.gemm.contract import Parametrized, Variant, no_waiting, on_other_stream
from tests.kernels.sm90.gemm.gemm_problems import COUNTS, FP32
from tests.kernels.sm90.wgrad.wgrad_problems import MODES, TILES, Pair

Shape = tuple[int, int]


def rounded(exact: Tensor, mode: str) -> Tensor:
    """As kernels round: a sum in fp32, once."""
    return exact.to(FP32).to(MODES[mode][0])


class WgradContract(Parametrized):
    """Tests of `wgrad`."""

    parameters: ClassVar[dict[str, str]] = {
        "counts": "counts",
        "exact_of": "exact_counts",
        "tile": "tiles",
        "mode": "modes",
        "variant": "variants",
        "scheduled": "schedules",
    }
    problem: type[Any]
    tiles: ClassVar[list[int]] = TILES
    modes: ClassVar[dict[str, str]] = {mode: mode for mode in MODES}
    variants: ClassVar[dict[str, Variant]] = {"rows": {}}
    exact_counts: ClassVar[dict[str, list[int]]]
    exact_shape: ClassVar[Shape] = (192, 320)
    counted: ClassVar[list[list[int]]]
    schedules: ClassVar[list[tuple[int, str, Variant]]]
    """Tile, mode and options."""
    schedule_shape: ClassVar[Shape]

    def test_integers_are_exact(self, exact_of, tile, mode, variant):
        p = self.problem(exact_of, *self.exact_shape, integers=True, **variant)
        assert torch.equal(p.ours(mode, tile=tile), rounded(p.exact(mode), mode))

    def test_experts_without_rows_may_be_left_alone(self, variant):
        p = self.problem([130, 0, 64, 0], 192, 320, **variant)
        want = p.ours("fp32")
        got = torch.full_like(want, 3)
        wgrad(**p.given, out_LOI=got, zeros=False)
        assert torch.equal(got[::2], want[::2]) and (got[1::2] == 3).all()

    def test_bits_do_not_depend_on_who_computes(self, scheduled):
        tile, mode, options = scheduled
        p = self.problem(COUNTS["many"], *self.schedule_shape, **options)
        first = p.ours(mode, tile=tile)
        for change in schedules(p.L):
            assert torch.equal(p.ours(mode, tile=tile, **change), first), change

    def test_counter_is_left_at_zero(self):
        counter = torch.zeros(1, dtype=torch.int32, device="cuda")
        for counts in self.counted:
            for margin in (0, 100, 131):
                self.check(counts, counter=counter, options=LaunchOptions(margin))
                assert counter.item() == 0

    def check(self, counts: list[int], **options: Any) -> None:
        """Call the kernel with `options`, and compare its result."""
        self.problem(counts, 448, 320).check("bf16", **options)

    def test_host_never_waits(self, variant):
        p = self.problem(COUNTS["ragged"], 448, 320, **variant)
        expected = p.ours()
        out = torch.empty_like(expected)
        with no_waiting():
            wgrad(**p.given, out_LOI=out)
            made = wgrad(**p.given)
        assert torch.equal(out, expected) and torch.equal(made, expected)

    def test_other_stream_than_the_default(self):
        p = self.problem(COUNTS["ragged"], 448, 320)
        expected = p.ours()
        assert torch.equal(on_other_stream(p.ours), expected)


class PairContract(Parametrized):
    """Tests of `wgrad_pair`, whose results are exact for integers."""

    parameters: ClassVar[dict[str, str]] = WgradContract.parameters
    kind: type[Any]
    counts: ClassVar[dict[str, tuple[list[int], list[int]]]]
    tiles: ClassVar[list[int]] = TILES
    modes: ClassVar[dict[str, str]]
    variants: ClassVar[dict[str, Variant]] = {"rows": {}}
    exact_shape: ClassVar[Shape] = (192, 320)
    schedules: ClassVar[list[tuple[int | None, tuple[list[int], list[int]], Variant]]]
    """Tile, numbers of rows and options."""

    def test_integers_are_exact(self, counts, tile, mode, variant):
        p = Pair(self.kind, counts, *self.exact_shape, integers=True, **variant)
        assert torch.equal(p.ours(mode, tile=tile), rounded(p.exact(mode), mode))

    def test_bits_do_not_depend_on_who_computes(self, scheduled):
        tile, counts, options = scheduled
        p = Pair(self.kind, counts, 448, 704, **options)
        first = p.ours("fp32 +=", tile=tile)
        for change in schedules(p.both[0].L):
            assert torch.equal(p.ours("fp32 +=", tile=tile, **change), first), change


def schedules(experts: int) -> list[Variant]:
    """Margins and orders of experts that may change no bit."""
    order = torch.randperm(experts, device="cuda").to(torch.int32)
    return [
        *[{"options": LaunchOptions(margin)} for margin in (4, 8, 16, 32, 131, 32)],
        {"order_L": order},
        {"order_L": order.flip(0), "options": LaunchOptions(3)},
        *[{}] * 5,
    ]
