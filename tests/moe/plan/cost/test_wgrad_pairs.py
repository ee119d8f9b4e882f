"""Weight gradients of two micro-batches at once in estimates, beside measured steps."""

import re
from math import hypot

import pytest

from phalanx.configs.layout import replicas
from phalanx.configs.load import load
from phalanx.configs.tables.machines import MACHINES
from phalanx.moe.plan.cost.step_time import StepTime, step_time
from phalanx.moe.plan.cost.weights import stage_weights
from phalanx.moe.plan.described import resolved
from tests.extras.planner.pages import RUN, section

H100 = MACHINES["h100"]
MODEL = [
    *["model=gpt_oss_20b", "model.layers=8", "model.moe.experts=16", "data=synthetic"],
    *["data.micro_batch=1", "data.sequence_length=2048", "data.global_batch=16"],
    *["model.moe.router.force_balance=true", "run.machine=h100"],
]
STAGES = ["parallel.expert=1", "parallel.pipeline=2"]


def step(*overrides: str) -> StepTime:
    return step_time(resolved(load([*MODEL, *overrides]), 2, 8), 2, H100)


@pytest.mark.parametrize(
    ("overrides", "measured"),
    [  # docs/measured/training/pipelines_two_h100s.md
        ([*STAGES, "parallel.delay_wgrad=off"], 0.477),
        ([*STAGES, "parallel.delay_wgrad=on"], 0.470),
        (STAGES, 0.418),
        ([*STAGES, "parallel.virtual_pipeline=2"], 0.420),
        (["parallel.expert=1"], 0.454),
        (["parallel.expert=2"], 0.400),
    ],
)
def test_the_estimate_is_near_what_was_measured(overrides: list[str], measured: float) -> None:
    """When it was measured, parameters were gathered twice, after the update."""
    cfg = load([*MODEL, *overrides])
    (w, *_), (dense, experts) = stage_weights(cfg, 2), (1 - 1 / n for n in replicas(cfg, 2))
    gathered = 2 * (w.dense * dense + w.expert * experts) / (H100.node_gbs * 1e9)
    assert step(*overrides).total + 2 * gathered == pytest.approx(measured, rel=0.04)


def test_pairs_read_and_write_the_sums_half_as_often() -> None:
    """Experts of 512 rows, and of twice as many. Products and passes overlap in part."""
    alone, together = (step(*STAGES, f"parallel.delay_wgrad={v}") for v in ("on", "pairs"))
    elements = 6 * 16 * 16 * 3 * 2880 * 2880  # of 16 experts of 6 layers, in 16 micro-batches
    products = elements * 512 * 2 / (H100.expert_tflops * 1e12)
    one_pass = elements * 8 / (H100.memory_gbs * 1e9)
    assert one_pass / 2 < products < one_pass
    assert alone.experts == pytest.approx(2 * products + hypot(products, one_pass))
    assert together.experts == pytest.approx(2 * products + hypot(products, one_pass / 2))
    assert alone.total / together.total == pytest.approx(0.470 / 0.418, rel=0.04)
    longer = ["data.sequence_length=4096", "data.global_batch=8"]
    alone, together = (step(*STAGES, *longer, f"parallel.delay_wgrad={v}") for v in ("on", "pairs"))
    assert alone.experts == pytest.approx(2 * products + hypot(products, one_pass / 2))
    assert together.experts == pytest.approx(2 * products + hypot(products, one_pass / 4))


def test_the_page_names_what_auto_takes_and_the_step_without() -> None:
    text = section(RUN, *MODEL, *STAGES, world=2)
    assert re.search(r"stages    weight gradients wait .*; auto takes pairs\n", text)
    (without,) = re.findall(r"pairs     experts compute .*, and a step (\S+) s\n", text)
    assert float(without) == pytest.approx(0.470, rel=0.02)
    text = section(RUN, *MODEL, *STAGES, "parallel.delay_wgrad=on", world=2)
    assert "auto takes" not in text and "pairs     " not in text
