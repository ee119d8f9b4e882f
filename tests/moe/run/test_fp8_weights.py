"""Layers that keep FP8 copies of their weights (`precision.weights`)."""

import pytest

from phalanx.configs.formats import is_resident, resident_layers
from phalanx.configs.load import load
from phalanx.configs.validate import validate
from tests.support.distributed import run_distributed

TINY = ["model=tiny_deepseek", "precision=fp8_block", "run.device=cpu", "data.sequence_length=16"]


@pytest.mark.parametrize(
    ("weights", "resident"),
    [
        ("auto", [0, 1, 2, 3, 4]),
        ("resident", [0, 1, 2, 3, 4]),
        ("99", [0, 1, 2, 3, 4]),
        ("3", [1, 3, 4]),
        ("2", [2, 4]),
        ("1", [4]),
        ("0", []),
        ("scratch", []),
    ],
)
def test_layers_that_keep_copies_are_spread_over_the_model(
    weights: str, resident: list[int]
) -> None:
    """Over four layers, and one of multi-token prediction."""
    cfg = load([*TINY, f"precision.weights={weights}"])
    assert [i for i in range(5) if is_resident(cfg, i)] == resident
    assert resident_layers(cfg) == (len(resident), 5)


def _kept(overrides: list[str]) -> dict[str, bool]:
    """Inside a rank: by the name of each module with a recipe, whether it keeps copies."""
    from phalanx.moe.run.setup import setup
    from phalanx.parallel.megatron.recipe_linear import computes_by
    from phalanx.parallel.runtime import start

    cfg = load(overrides)
    validate(cfg, 1)
    job = setup(cfg, start(seed=1, timeout=60, deterministic=False))
    found = {}
    for name, module in job.engine.modules[0].named_modules():
        spec = computes_by(module) or getattr(module, "spec", None)
        if getattr(spec, "recipe", None) is not None:
            found[name] = spec.keep_fp8
    return found


@pytest.mark.dist
@pytest.mark.parametrize("weights", ["3", "scratch", "resident"])
def test_modules_of_a_layer_keep_copies_together(weights: str) -> None:
    overrides = [*TINY, f"precision.weights={weights}"]
    (found,) = run_distributed(_kept, 1, overrides)
    assert {name.split(".")[0] for name in found} == {"decoder", "mtp"}
    cfg = load(overrides)
    for name, kept in found.items():
        number = int(name.split("layers.")[1].split(".")[0])
        assert kept == is_resident(cfg, number if name.startswith("decoder") else 4), name
    assert len({name.rsplit(".", 1)[1] for name in found}) > 4  # experts, MLPs and projections
