"""Numbers and rules of block-sparse experts, and their schedule."""

from itertools import pairwise
from pathlib import Path

import pytest

from phalanx.configs.arithmetic.accounting import flops_note, flops_per_token, parameters
from phalanx.configs.arithmetic.layers import of_variants
from phalanx.configs.load import load
from phalanx.configs.tables.machines import MACHINES
from phalanx.extras.block_sparse.facts import Blocks128
from phalanx.extras.block_sparse.schedule import Schedule, living_blocks
from tests.configs import test_validate

LIST = Path(__file__).parents[3] / "scripts/lab/proof/block_sparse.yaml"
PROBLEMS = test_validate.table(Path(__file__).with_name("problems.md"))


@pytest.mark.parametrize(("overrides", "world", "problem", "fix"), PROBLEMS)
def test_problem_names_the_override_that_fixes_it(
    overrides: str, world: int, problem: str, fix: str
) -> None:
    test_validate.test_problem_names_the_override_that_fixes_it(overrides, world, problem, fix)


def test_estimates_are_those_of_dense_experts() -> None:
    """Dense kernels store and multiply zeros, so that neither bytes nor seconds become fewer."""
    from phalanx.moe.plan.cost.step_time import step_time
    from phalanx.moe.plan.described import resolved

    given = ["experiment=proof_moe", "data.source=synthetic", "parallel.world_size=1"]
    dense, sparse = (
        load([*given, f"model.variants={variants}"]) for variants in ("[]", "[blocks128:25]")
    )
    assert parameters(sparse.model) == parameters(dense.model)
    assert flops_per_token(sparse.model, 1024) == flops_per_token(dense.model, 1024)
    assert flops_note(dense) == ""
    assert flops_note(sparse) == ", dense: 4 of 18 blocks live in the end"
    seconds = [step_time(resolved(cfg, 1, 1), 1, MACHINES["h200"]) for cfg in (dense, sparse)]
    assert seconds[0] == seconds[1]


def test_living_blocks_are_the_nearest_number() -> None:
    m = load(["experiment=proof_moe", "model.variants=[blocks128:50]"]).model
    (facts,) = of_variants(m)
    assert isinstance(facts, Blocks128)
    assert (facts.blocks(m), facts.living(m)) == ((384 // 128) * (768 // 128), 9)
    assert [living_blocks(n, 0.25) for n in (1, 2, 18, 72)] == [1, 1, 4, 18]


@pytest.mark.parametrize("steps", [1, 2, 7, 80, 800, 100_000])
def test_density_falls_to_the_target_and_masks_stay_at_the_end(steps: int) -> None:
    s = Schedule(0.25, steps)
    due = [step for step in range(1, steps + 1) if s.due(step)]
    densities = [s.density(step) for step in due]
    assert densities == sorted(densities, reverse=True)
    assert densities[-1] == 0.25 and all(0.25 <= d <= 1 for d in densities)
    assert s.density(due[0] - 1) == 1.0
    assert due[-1] <= max(1, round(0.75 * steps)) and s.fallen in due
    assert s.exchanged(s.last) == pytest.approx(0) and 0 <= s.exchanged(due[0]) <= 0.3
    gaps = {b - a for a, b in pairwise(due)}
    assert gaps <= {max(1, min(100, steps // 80))}


def test_the_curve_is_cubic() -> None:
    s = Schedule(0.5, 1000)
    assert (s.first, s.fallen, s.last, s.every) == (50, 506, 750, 12)
    assert s.density(278) == 0.5 + 0.5 * 0.5**3


@pytest.mark.parametrize(("target", "mean"), [(0.5, "0.582"), (0.25, "0.372")])
def test_mean_densities_are_those_of_the_list(target: float, mean: str) -> None:
    s = Schedule(target, 800)
    assert f"{sum(map(s.density, range(800))) / 800:.3f}" == mean
    assert f"of {mean} " in LIST.read_text("utf-8") or f"or {mean} " in LIST.read_text("utf-8")


def test_hugging_face_takes_models_whose_dead_blocks_are_zeros() -> None:
    from phalanx.moe.hf.config import to_json
    from phalanx.moe.hf.reading import ConversionError

    m = load(["model=mixtral_8x7b", "model.variants=[blocks128:50]"]).model
    assert to_json(m, 4096, "bfloat16")["model_type"] == "mixtral"
    m = load(["model=mixtral_8x7b", "model.variants=[mhc:4,blocks128:50]"]).model
    with pytest.raises(ConversionError, match="model.variants=.* cannot be exported"):
        to_json(m, 4096, "bfloat16")
