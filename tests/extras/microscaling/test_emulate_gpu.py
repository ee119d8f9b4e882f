"""MXFP8 and NVFP4 and back on a GPU: the bits of the definition, eager and captured."""

import pytest

from phalanx.extras.microscaling import emulated
from tests.extras.microscaling.test_emulate import same
from tests.kernels.capture import check_replay
from tests.kernels.quantize import problems
from tests.kernels.quantize.problems import COUNTS, expert_rows, offsets_of

pytestmark = pytest.mark.gpu

FORMS = pytest.mark.parametrize(
    ("form", "random"), [("mxfp8", False), ("nvfp4", False), ("nvfp4", True)]
)


@FORMS
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize("channels", [40, 2880])
def test_rows_and_columns(channels: int, counts: list[int], form: str, random: bool) -> None:
    x, offsets = expert_rows(counts, channels), offsets_of(counts)
    for through, used in ((emulated.rows, sum(counts)), (emulated.columns, None)):
        made = through(x.cuda(), offsets.cuda(), form, stochastic=random)
        got = tuple(t if t is None else t.cpu() for t in made)
        same(got, through(x, offsets, form, stochastic=random), used)


@pytest.mark.parametrize("form", ["mxfp8", "nvfp4"])
def test_every_finite_bf16(form: str) -> None:
    for amax in (3e38, 448.0, 6.0, 1.0, 2.0**-126, 2.0**-131):
        x = problems.below(amax)
        offsets = offsets_of([len(x)])
        made = emulated.rows(x.cuda(), offsets.cuda(), form)
        got = tuple(t if t is None else t.cpu() for t in made)
        same(got, emulated.rows(x, offsets, form))


@pytest.mark.parametrize("form", ["mxfp8", "nvfp4"])
@pytest.mark.parametrize(("parts", "parts_in"), [(1, 1), (2, 1), (1, 2)])
def test_weights_and_their_transpose(parts: int, parts_in: int, form: str) -> None:
    w = problems.spread(3 * 144, 208).view(3, 144, 208)
    for given, of, inner in ((w, parts, parts_in), (w.mT, parts_in, parts)):
        made = emulated.weights(given.cuda(), form, of, inner)
        got = tuple(t if t is None else t.cpu() for t in made)
        same(got, emulated.weights(given, form, of, inner))


@FORMS
def test_replays_have_the_bits_of_eager(form: str, random: bool) -> None:
    """Replays with other data too: random bits are not those of the captured data."""
    x, offsets = expert_rows([70, 58], 160, padding=0).cuda(), offsets_of([70, 58]).cuda()
    for through in (emulated.rows, emulated.columns):
        step = lambda: [through(x, offsets, form, stochastic=random).matrix]  # noqa: B023, E731
        check_replay(step, x, x.flip(0))
