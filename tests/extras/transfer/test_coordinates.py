"""The coordinate check at small widths: what must not depend on the width, and does without mup."""

from typing import Any
from unittest import mock

import pytest

from tests.support.distributed import run_distributed

pytestmark = pytest.mark.dist
WIDTHS, STEPS = (64, 128, 256), 5
MOST, MOST_OF_ROUTER = 0.25, 0.4
"""Bounds on the exponents of the width. Those of the router's four rows differ by 0.1 from seed to
seed; without mup they are above 1, and those of experts above 2."""


def _slopes(
    base: int, more: list[str], wrong: str = "", widths: tuple[int, ...] = WIDTHS
) -> dict[str, float]:
    from phalanx.extras.transfer import begin, scales
    from phalanx.extras.transfer.coordinates import KINDS, changes, overrides, slope
    from phalanx.parallel.runtime import start

    def without(cfg: Any) -> Any:
        return scales.scales(cfg) | ({wrong: scales.Scale()} if wrong else {})

    runtime = start(seed=1, timeout=60, deterministic=False)
    with mock.patch.object(begin, "scales", without):
        last = {w: changes(overrides(w, base, *more), runtime, STEPS)[-1] for w in widths}
    return {kind: slope({w: sizes[kind] for w, sizes in last.items()}) for kind in KINDS}


@pytest.mark.parametrize("more", [[], ["optim.kind=muon", "optim.lr=1e-2"]])
def test_with_mup_a_step_moves_all_widths_alike(more: list[str]) -> None:
    (found,) = run_distributed(_slopes, 1, WIDTHS[0], more)
    # The initial weights of the router add less with the width, its updates do not.
    assert found.pop("router logits") < MOST
    assert abs(found.pop("router update")) < MOST_OF_ROUTER
    assert {kind: s for kind, s in found.items() if abs(s) > MOST} == {}


def test_without_it_activations_grow_with_the_width() -> None:
    (found,) = run_distributed(_slopes, 1, 0, [])
    assert abs(found["embedding"]) < MOST
    assert min(found[kind] for kind in ("attention", "expert fc1", "experts")) > 0.5
    assert found["router update"] > 0.5


@pytest.mark.parametrize(
    ("wrong", "kind"),
    [("expert_fc2", "experts"), ("hidden", "attention"), ("router", "router update")],
)
def test_a_kind_without_its_factors_is_seen(wrong: str, kind: str) -> None:
    (found,) = run_distributed(_slopes, 1, WIDTHS[0], [], wrong, (64, 256))
    assert found[kind] > 2 * MOST, found
