"""Linear layers in FP8 over tensor parallel ranks: parts of what one rank computes.

Legend: s tokens, B sequences, I channels in, O channels out.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.kernels.expert_mlp.activation import Activation
from phalanx.kernels.expert_mlp.dense_mlp import dense_linear
from phalanx.kernels.expert_mlp.mlp_spec import MLPSpec
from phalanx.kernels.quantize.recipe import Fp8Block
from tests.moe.cases import install, model, transformer
from tests.support.distributed import run_distributed

RANKS, s, B, I, O = 2, 6, 2, 256, 512  # noqa: E741
SPEC = MLPSpec(Activation("swiglu"), "reference", recipe=Fp8Block())


def _drawn() -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    x, w, dy = (torch.randn(size, generator=g) for size in ((s, B, I), (O, I), (s, B, O)))
    return x.bfloat16(), w.bfloat16(), dy.bfloat16()


def _layer(kind: str, spec: MLPSpec = SPEC, out: int = O) -> Any:
    install()
    from megatron.core.tensor_parallel import layers

    from phalanx.parallel.groups import create
    from phalanx.parallel.megatron.recipe_linear import compute_by

    groups = create(tensor=RANKS).pg
    config = transformer(model(), torch.bfloat16, tensor=RANKS)
    assert config.sequence_parallel
    given = dict(config=config, init_method=lambda w: w, bias=False, tp_group=groups.tp)
    given |= dict(skip_bias_add=False)
    if kind == "column":
        layer = layers.ColumnParallelLinear(I, out, gather_output=False, **given)
    else:
        layer = layers.RowParallelLinear(I, out, input_is_parallel=True, **given)
    compute_by(spec, layer)
    return layer


def _part(of: int) -> slice:
    """This rank's."""
    size = of // RANKS
    return slice(dist.get_rank() * size, (dist.get_rank() + 1) * size)


def _column() -> list[Tensor]:
    layer, (x, w, dy) = _layer("column"), _drawn()
    some, mine = _part(s), _part(O)
    x = x[some].clone().requires_grad_()
    layer.weight.data.copy_(w[mine])
    y, _ = layer(x)
    assert not y._is_view()  # of which autograd would copy the gradient, were it turned in place
    y.backward(dy[..., mine])
    return [y.detach(), layer.weight.grad, x.grad]


def _row() -> list[Tensor]:
    layer, (x, w, dy) = _layer("row"), _drawn()
    some, mine = _part(s), _part(I)
    x = x[..., mine].clone().requires_grad_()
    layer.weight.data.copy_(w[:, mine])
    y, _ = layer(x)
    y.backward(dy[some])
    return [y.detach(), layer.weight.grad, x.grad]


def _whole() -> list[Tensor]:
    x, w, dy = _drawn()
    x, w = x.requires_grad_(), w.requires_grad_()
    y = dense_linear(x.flatten(0, 1), w, None, SPEC).view(s, B, O)
    y.backward(dy)
    return [y.detach(), w.grad, x.grad]


def _near(got: Tensor, want: Tensor) -> None:
    """A sum of two products, each rounded to bf16."""
    assert (got.double() - want.double()).norm() <= 4e-3 * want.double().norm()


@pytest.mark.dist
def test_columns_of_the_output() -> None:
    """Blocks of 128 are whole on each rank, so that its part has the bits of the whole."""
    parts, (y, dw, dx) = run_distributed(_column, RANKS), _whole()
    assert torch.equal(torch.cat([p[0] for p in parts], -1), y)
    assert torch.equal(torch.cat([p[1] for p in parts]), dw)
    _near(torch.cat([p[2] for p in parts]), dx)


@pytest.mark.dist
def test_rows_of_the_input() -> None:
    parts, (y, dw, dx) = run_distributed(_row, RANKS), _whole()
    _near(torch.cat([p[0] for p in parts]), y)
    assert torch.equal(torch.cat([p[1] for p in parts], -1), dw)
    assert torch.equal(torch.cat([p[2] for p in parts], -1), dx)


def _taken(out: int) -> tuple[str, list[tuple[str, str]]]:
    """Implementation of a layer that is to be fused, and its line of the start page."""
    from phalanx.moe.run.setup import emulated_layers
    from phalanx.parallel.megatron.recipe_linear import computes_by

    layer = _layer("column", replace(SPEC, backend="fused"), out)
    spec = computes_by(layer)
    assert spec is not None
    said = emulated_layers([torch.nn.ModuleDict({"linear_kv_down_proj": layer})], "fused")
    return spec.backend, [(choice.backend, choice.reason) for choice in said]


@pytest.mark.dist
def test_widths_that_the_fused_kernels_do_not_take() -> None:
    """Parts of 48 of 96 channels, as of a projection of latents on one of several ranks."""
    assert run_distributed(_taken, RANKS, 2 * 128) == [("fused", [])] * RANKS
    reason = "emulated, which is slower: linear_kv_down_proj (48 x 256): the fused kernels take "
    want = ("torch", [("torch", f"{reason}multiples of 64")])
    assert run_distributed(_taken, RANKS, 2 * 48) == [want] * RANKS
