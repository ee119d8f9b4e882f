"""Numbers that become zero in FP8: counted for each operand, without padding."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from phalanx.kernels.expert_mlp.activation import Activation
from phalanx.kernels.expert_mlp.backend import provider
from phalanx.kernels.expert_mlp.expert_plan import ExpertPlan
from phalanx.kernels.expert_mlp.grouped_mlp import grouped_mlp
from phalanx.kernels.expert_mlp.mlp_spec import MLPSpec, MLPWeights
from phalanx.kernels.quantize.quantize import quantize_rows
from phalanx.kernels.quantize.recipe import Fp8Block
from phalanx.scripts.lab import fp8_zeros
from phalanx.scripts.lab.fp8_zeros import Counting, Zeros, counting
from tests.kernels.problems import Problem, leaves_of, make
from tests.support.torchrun import Torchrun

SPEC = MLPSpec(Activation("swiglu"), "torch", recipe=Fp8Block())


def test_what_a_block_is_too_wide_for_is_lost() -> None:
    x = torch.full((2, 128), 2.0**-30)
    x[:, 0], x[1, 64:] = 1.0, 0.0
    zeros = Zeros()
    zeros.add("x", x, quantize_rows(x).data)
    assert zeros.shares == {"x": (127 + 63) / (128 + 64)}
    lost = torch.full((1, 128), torch.nan)
    zeros.add("x", lost, quantize_rows(lost).data)  # is no number that could be kept
    zeros.add("x", x[:0], quantize_rows(x[:0]).data)
    assert zeros.table().splitlines()[1:] == ["x       98.9583%"]


def count_zeros(p: Problem, spec: MLPSpec) -> tuple[Zeros, torch.Tensor]:
    """One pass of the expert MLP in both directions."""
    with counting() as zeros:
        leaves = leaves_of(p)
        weights = MLPWeights(leaves["w1"], leaves["w2"])
        plan = ExpertPlan(p.index, leaves["prob"], p.offsets, p.inverse, None, None)
        assert isinstance(provider(spec.backend, recipe=spec.recipe), Counting)
        out = grouped_mlp(leaves["x"], weights, plan, spec)
        out.backward(p.dout)
    return zeros, out.detach()


def test_a_run_counts_operands_without_padding() -> None:
    p = make(SPEC.activation, torch.bfloat16, bias=False, rows=160)
    zeros, out = count_zeros(p, SPEC)
    assert list(zeros.shares) == ["x", "a", "dy", "dh"] and max(zeros.shares.values()) < 1e-3
    rows, width = int(p.offsets[-1]), p.w2.shape[-1]
    assert rows < len(p.index) and zeros._some["a"] == rows * width
    assert not isinstance(provider(SPEC.backend, recipe=SPEC.recipe), Counting)
    small = p.dout.clone()
    small[:, 1:] *= 2.0**-40
    few, repeated = count_zeros(replace(p, dout=small), SPEC)
    assert torch.equal(out, repeated), "counting changes nothing"
    assert few.shares["x"] == few.shares["a"] == 0.0
    assert few.shares["dy"] == pytest.approx(31 / 32, abs=1e-3)


@pytest.mark.dist
def test_a_run_prints_the_table_at_its_end(tmp_path: Path) -> None:
    small = ["model=tiny", "model.layers=1", "data.sequence_length=32", "data.micro_batch=1"]
    more = ["data.global_batch=1", "run.steps=1", "run.device=cpu", f"run.dir={tmp_path}"]
    command = ["scripts/lab/fp8_zeros.py", *small, *more]
    with Torchrun(1, command, tmp_path / "printed") as launch:
        assert launch.wait() == 0, launch.err()
    rows = [line.split() for line in launch.out().splitlines()[-4:]]
    assert [name for name, _ in rows] == ["x", "a", "dy", "dh"]
    assert all(share.endswith("%") for _, share in rows)


def test_without_overrides_it_says_what_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert fp8_zeros.main([]) == 2 and fp8_zeros.main(["--help"]) == 0
    assert "become zero" in capsys.readouterr().out
