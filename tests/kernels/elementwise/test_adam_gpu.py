"""The kernel of AdamW with bf16 moments on a GPU, against fp64."""

import pytest
import torch

from phalanx.kernels.elementwise.adam import Update, update_
from tests.kernels.elementwise.test_adam import (
    HOW,
    assert_as_with_masters,
    assert_clipped,
    assert_updated,
    drawn,
    finite,
    halves,
)

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("step", [1, 1000])
@pytest.mark.parametrize("n", [1, 4095, 4096, 1_000_003])
def test_a_step_rounds_the_moments_and_nothing_else(n, step):
    assert_updated([t.cuda() for t in drawn(n)], Update(**HOW, step=step))


@pytest.mark.parametrize("coef", [1.0, 0.3, 1e-6])
def test_clipping_on_the_way_has_the_bits_of_clipping_before(coef):
    given = [t.cuda() for t in drawn(1_000_003)]
    assert_clipped([t.clone() for t in given], coef)
    assert_updated(given, Update(**HOW, step=3, clip_coef=coef))


@pytest.mark.parametrize("n", [1, 4095, 1_000_003])
def test_halves_are_updated_as_the_whole(n):
    assert_as_with_masters(drawn(n)[0].cuda())


def test_halves_of_any_exponent():
    assert_as_with_masters(finite().cuda())
    here, there = halves(finite()), halves(finite().cuda())
    assert all(torch.equal(a, b.cpu()) for a, b in zip(here, there, strict=True))


@pytest.mark.parametrize("split", [False, True])
def test_a_part_of_a_buffer(split):
    """Shards begin anywhere, and what is around them stays."""
    master, *others = (t.cuda() for t in drawn(1000))
    weight, remainder = halves(master)
    whole, how = [weight, *others, remainder] if split else [master, *others], Update(**HOW, step=3)
    before = [t.clone() for t in whole]

    def update(tensors):
        update_(*tensors[:4], how, *tensors[4:])

    update([t[3:777] for t in whole])
    alone = [t[3:777].clone() for t in before]
    update(alone)
    for got, old, part in zip(whole, before, alone, strict=True):
        assert torch.equal(got, torch.cat((old[:3], part, old[777:])))
