"""Meaning of the section `precision` for kernels, Megatron-Core and estimates."""

from dataclasses import asdict, fields
from typing import Any, get_args, get_type_hints
from unittest import mock

import pytest
import torch

from phalanx.configs.bounds import choices
from phalanx.configs.formats import described, fp8_row, quantizes_on_arrival, rows_in_fp8, width
from phalanx.configs.load import load, options
from phalanx.configs.schema import PrecisionConfig
from phalanx.configs.tables.transports import TRANSPORTS
from phalanx.kernels.quantize.blocks import quantize_rows
from phalanx.kernels.quantize.recipe import Fp8Block
from phalanx.moe.model.kernel_facts import compute_dtype, recipe
from phalanx.parallel.dispatcher.transport import own_exchange
from tests.support.additions import COUNTING_TRANSPORTS
from tests.support.distributed import run_distributed

FP8 = "precision=fp8_block"


def test_switches_are_those_of_the_kernels() -> None:
    default, hints = Fp8Block(), get_type_hints(Fp8Block)
    for f in fields(Fp8Block):
        assert getattr(PrecisionConfig(), f.name) == getattr(default, f.name)
        assert sorted(choices()[f"precision.{f.name}"]) == sorted(get_args(hints[f.name]))


def test_every_option_is_a_recipe() -> None:
    assert sorted(choices()["precision.recipe"]) == options("precision")
    for name in options("precision"):
        assert load([f"precision={name}"]).precision == PrecisionConfig(recipe=name)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, torch.float32 if name == "fp32" else torch.bfloat16) for name in options("precision")],
)
def test_dtype_of_a_recipe(name: str, dtype: torch.dtype) -> None:
    cfg = load([f"precision={name}"])
    assert compute_dtype(cfg) == dtype and width(cfg) == dtype.itemsize
    assert (recipe(cfg, 0) is None) == (name in ("bf16", "fp32"))


def test_recipe_of_a_layer() -> None:
    """Four layers and one of multi-token prediction after them."""
    switches = dict(grad_format="e5m2", wgrad="bf16", hidden="fp8")
    given = [f"precision.{name}={value}" for name, value in switches.items()]
    cfg = load([FP8, "model=tiny_deepseek", *given])
    assert cfg.model.layers == 4
    assert [recipe(cfg, i) for i in range(5)] == 5 * [Fp8Block(**switches)]  # type: ignore[arg-type]
    cfg.precision.bf16_first_layers, cfg.precision.bf16_last_layers = 2, 1
    assert [recipe(cfg, i) is not None for i in range(5)] == [False, False, True, False, True]


def test_what_differs_from_the_defaults_is_described() -> None:
    assert described(load([])) == "bf16"
    assert described(load([FP8])) == "fp8_block"
    given = ["precision.hidden=fp8", "precision.bf16_first_layers=1"]
    assert described(load([FP8, *given])) == "fp8_block (hidden fp8, bf16_first_layers 1)"


@mock.patch.dict(TRANSPORTS, COUNTING_TRANSPORTS)
@pytest.mark.parametrize(
    ("overrides", "in_fp8"),
    [
        ([], False),
        (["precision=mxfp8"], False),
        ([FP8], True),
        ([FP8, "precision.dispatch=bf16"], False),
        ([FP8, "parallel.dispatch=alltoall"], True),
        ([FP8, "parallel.dispatch=broadcasts"], False),  # which carries bf16 alone
        ([FP8, "precision.wgrad=bf16"], False),  # which reads the tokens themselves
        ([FP8, "precision.wgrad=bf16", "precision.dispatch=fp8"], True),
        ([FP8, "kernels=megatron"], False),
    ],
)
def test_rows_travel_in_fp8_where_no_bit_changes(overrides: list[str], in_fp8: bool) -> None:
    assert rows_in_fp8(load(overrides)) == in_fp8


def test_no_row_travels_in_fp8_by_the_dispatcher_of_the_stock_layer() -> None:
    cfg = load([FP8, "kernels=megatron"])
    cfg.parallel.dispatch = own_exchange("megatron", cfg.parallel.dispatch).name
    assert not rows_in_fp8(cfg) and not quantizes_on_arrival(cfg)


@pytest.mark.parametrize(("channels", "parts"), [(64, 1), (2880, 1), (5760, 2), (4096, 2)])
def test_bytes_of_a_row_are_those_of_the_oracle(channels: int, parts: int) -> None:
    q = quantize_rows(torch.zeros(3, channels), parts)
    assert 3 * fp8_row(channels, parts) == q.data.nbytes + q.scale.nbytes


def stock_config(overrides: list[str]) -> dict[str, Any]:
    """FP8 fields of Megatron-Core's configuration, as if Transformer Engine were installed."""
    from phalanx.parallel.megatron import cpu

    cpu.install()
    from megatron.core.transformer import transformer_config as of_megatron

    from phalanx.moe.model.megatron_config import Layout, transformer_config

    installed, of_megatron.is_te_min_version = of_megatron.is_te_min_version, lambda *_: True
    try:
        made = transformer_config(load(overrides), Layout(), on_cpu=True)
    finally:
        of_megatron.is_te_min_version = installed
    return {k: v for k, v in asdict(made).items() if k.startswith(("fp8", "first_", "num_layers_"))}


def test_megatron_core_gets_transformer_engines_recipe() -> None:
    layers = ["precision.bf16_first_layers=1", "precision.bf16_last_layers=0"]
    for given, expected in (
        ([], ("e4m3", "blockwise", False)),
        (["precision.grad_format=e5m2", *layers], ("hybrid", "blockwise", True)),
    ):
        (made,) = run_distributed(stock_config, 1, [FP8, "kernels=megatron", *given])
        assert (made["fp8"], made["fp8_recipe"], made["first_last_layers_bf16"]) == expected
        if given:
            assert made["num_layers_at_start_in_bf16"] == 1
            assert made["num_layers_at_end_in_bf16"] == 0
        assert not made["fp8_param"]
    (made,) = run_distributed(stock_config, 1, [FP8, "kernels=torch"])
    assert made["fp8"] is None
