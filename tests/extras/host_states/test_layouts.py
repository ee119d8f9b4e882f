"""Whole runs with states in host memory, on layouts: losses and weights of states on the device."""

from pathlib import Path

import pytest
import torch

from tests.end_to_end.layouts.test_layouts import DEEPSEEK, LAYOUTS, results
from tests.support.runs import TINY, records, run
from tests.support.scheduling import slow
from tests.support.training import trained

BF16 = {"precision.recipe": "bf16"}


@pytest.mark.dist
@pytest.mark.parametrize(
    ("layout", "moments"),
    [
        ("ep2", "bf16"),
        *slow(
            ("tp2_ep2", "bf16"),
            ("ep2_edp2", "fp32"),
            ("cp2_ep2", "bf16"),
            ("pp2_vp2_ep2", "fp32"),
            ("tp2_dp2", "fp32"),
        ),
    ],
)
def test_a_run_is_that_of_states_on_the_device(layout: str, moments: str) -> None:
    world, changes = LAYOUTS[layout]
    changes = changes | BF16 | ({"model.layers": 4} if "vp2" in layout else {})
    model = [*DEEPSEEK, "run.eval_interval=2"]
    here, there = (
        trained(world, model, changes | {"optim.moments": f"{moments}{where}"})
        for where in ("", "_host")
    )
    assert results(here) == results(there)
    for key, weight in here.after.items():
        assert torch.equal(there.after[key], weight), key


@pytest.mark.dist
def test_stages_without_layers_train_and_go_on(tmp_path: Path) -> None:
    """Nor has every rank a group of parameters, or any parameter."""
    common = [*TINY, "parallel.pipeline=3", f"run.dir={tmp_path}", "run.save_interval=2"]
    for steps, layout, moments in ((2, "E|tt|L", "fp32_host"), (4, "Ett||L", "bf16_host")):
        command = [f"run.steps={steps}", f"parallel.pipeline_layout='{layout}'"]
        ranks = run(3, [*common, *command, f"optim.moments={moments}"])
        assert [rank.code for rank in ranks] == [0, 0, 0], ranks[0].err
    losses = [record["loss"] for record in records(tmp_path / "run") if "loss" in record]
    assert len(losses) == 4 and losses[-1] < losses[0]
