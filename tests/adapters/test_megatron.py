"""Experts in Megatron-Core's MoE layer and its specifications, against its sequential experts."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.moe.cases import HIDDEN, compare_layers, draw, fill, install, model, transformer
from tests.support.distributed import run_distributed
from tests.support.scheduling import matrix

SEQUENCE, BATCH = 8, 4
MODELS: dict[str, dict[str, Any]] = {
    "swiglu": dict(moe={"shared_ffn": 12}),
    "gpt_oss": dict(
        moe={"activation": "quick_geglu", "activation_limit": 0.5, "activation_offset": 1.0},
        bias=True,
    ),
    "geglu, top-1": dict(moe={"activation": "geglu", "top_k": 1}),
    "squared_relu": dict(moe={"activation": "squared_relu"}),
}


def config(name: str, **changes: Any) -> Any:
    from megatron.core.activations import squared_relu

    made = transformer(model(**MODELS[name]), expert=dist.get_world_size(), **changes)
    made.moe_token_dispatcher_type = "allgather"  # that of all-to-all needs a GPU
    made.moe_shared_expert_overlap = False
    made.perform_initialization = True
    if name == "squared_relu":
        made.activation_func = squared_relu
    return made


def pair(name: str, layer: str, **changes: Any) -> tuple[Any, Any]:
    """Megatron-Core's layer with our experts, and with its own of the same weights."""
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec_for_backend
    from megatron.core.transformer.moe.moe_layer import MoELayer

    from phalanx.adapters.megatron import Experts, SymmMoELayer
    from phalanx.parallel.groups import create

    pg = create(expert=dist.get_world_size()).pg
    stock = get_moe_module_spec_for_backend(LocalSpecProvider(), num_experts=8)
    parts = replace(stock.keywords["submodules"], experts=Experts)
    ours = partial(SymmMoELayer if layer == "symm" else MoELayer, submodules=parts)
    layers = [
        ours(config(name, **changes), pg_collection=pg),
        stock(config(name), pg_collection=pg),
    ]
    fill(layers[1])
    for module in layers[1].experts.modules():
        if hasattr(module, "explicit_expert_comm"):
            module.explicit_expert_comm = True  # or a bias is added to a view, which torch refuses
    with torch.no_grad():
        for seed, p in enumerate(layers[1].experts.parameters()):
            p.copy_(draw(*p.shape, seed=1000 * dist.get_rank() + seed, scale=0.3))
        for key, p in layers[0].experts.named_parameters():
            p.copy_(stacked(layers[1], key))
        rest = {k: v for k, v in layers[1].state_dict().items() if not k.startswith("experts.")}
        layers[0].load_state_dict(rest, strict=False)
    for made in layers:
        made.set_layer_number(1)
    return layers[0], layers[1]


def stacked(stock: Any, key: str, *, grad: bool = False) -> Tensor:
    """A parameter of all local experts, or its gradient."""
    found = [e.get_parameter(key) for e in stock.experts.local_experts]
    return torch.stack([p.grad if grad else p.detach() for p in found])


def layers_agree(name: str, layer: str) -> None:
    install()
    ours, stock = pair(name, layer)
    compare_layers(ours, stock, (SEQUENCE, BATCH), partial(stacked, stock, grad=True))
    assert not any(p.allreduce for p in ours.experts.parameters())
    if layer == "symm":
        from phalanx.adapters.megatron import groups, release

        (group,) = groups()
        assert not group.overflowed()
        release()


@pytest.mark.dist
@pytest.mark.parametrize("layer", ["experts", "symm"])
@pytest.mark.parametrize(("name", "ranks"), [("swiglu", 1), *((name, 2) for name in MODELS)])
def test_layers_agree(name: str, layer: str, ranks: int) -> None:
    run_distributed(layers_agree, ranks, name, layer)


def gradients_in_buffers() -> None:
    install()
    ours, stock = pair("gpt_oss", "experts", gradient_accumulation_fusion=True)
    for p in ours.experts.parameters():
        p.main_grad, p.grad_added_to_main_grad = torch.ones(p.shape), False
    x = draw(SEQUENCE, BATCH, HIDDEN, seed=70)
    for made in (ours, stock):
        for _ in range(2):
            made(x)[0].square().sum().backward()
    for key, p in ours.experts.named_parameters():
        want = stacked(stock, key, grad=True)
        if p.grad_added_to_main_grad:
            torch.testing.assert_close(p.main_grad - 1, want, rtol=1e-4, atol=1e-4)
        else:
            torch.testing.assert_close(p.grad, want, rtol=1e-4, atol=1e-4)
    for layer in (ours.experts.linear_fc1, ours.experts.linear_fc2):
        assert layer.weight.grad_added_to_main_grad


@pytest.mark.dist
def test_gradients_are_added_to_megatrons_buffers() -> None:
    run_distributed(gradients_in_buffers, 1)


def decay() -> dict[str, float]:
    install()
    from megatron.core.optimizer import OptimizerConfig, get_standard_config_overrides

    ours, _ = pair("gpt_oss", "experts")
    overrides = get_standard_config_overrides(OptimizerConfig())
    return {
        name: min(
            [o.get("wd_mult", 1.0) for key, o in overrides.items() if key.matches(p, name)],
            default=1.0,
        )
        for name, p in ours.named_parameters(prefix="mlp")
        if "experts" in name
    }


@pytest.mark.dist
def test_biases_do_not_decay() -> None:
    (factors,) = run_distributed(decay, 1)
    assert {name.rpartition(".")[2]: factor for name, factor in factors.items()} == {
        "weight": 1.0,
        "bias": 0.0,
    }


# --- checkpoints ----------------------------------------------------------------------------------


def write(folder: str, name: str, stock_writes: bool) -> Tensor:
    install()
    from megatron.core import dist_checkpointing

    from phalanx.parallel.groups import create

    writer = pair(name, "experts")[stock_writes]
    metadata = {"dp_cp_group": create(expert=dist.get_world_size()).pg.dp_cp}
    dist_checkpointing.save({"model": writer.sharded_state_dict("mlp.", (), metadata)}, folder)
    out: Tensor = writer(draw(SEQUENCE, BATCH, HIDDEN, seed=70))[0].detach()
    return out


def read(folder: str, name: str, stock_reads: bool) -> Tensor:
    install()
    from megatron.core import dist_checkpointing

    from phalanx.parallel.groups import create

    reader = pair(name, "experts")[stock_reads]
    with torch.no_grad():
        for p in reader.parameters():
            p.zero_()
    metadata = {"dp_cp_group": create(expert=dist.get_world_size()).pg.dp_cp}
    wanted = {"model": reader.sharded_state_dict("mlp.", (), metadata)}
    state = dist_checkpointing.load(wanted, folder)["model"]
    reader.load_state_dict({key.removeprefix("mlp."): value for key, value in state.items()})
    out: Tensor = reader(draw(SEQUENCE, BATCH, HIDDEN, seed=70))[0].detach()
    return out


@pytest.mark.dist
@matrix(("name", "stock_writes"), ("swiglu", False), ("gpt_oss", True))
def test_checkpoints_are_interchangeable(name: str, stock_writes: bool, tmp_path: Path) -> None:
    """Nothing is missing in either direction, and expert parallelism may differ."""
    written = run_distributed(write, 2, str(tmp_path), name, stock_writes)
    got = run_distributed(read, 1, str(tmp_path), name, not stock_writes)
    torch.testing.assert_close(got[0], written[0], rtol=1e-4, atol=1e-5)


# --- specifications -------------------------------------------------------------------------------


def layer_kinds(which: str) -> list[list[str]]:
    install()
    from megatron.core.models.gpt import GPTModel

    from phalanx.adapters import megatron
    from phalanx.parallel.groups import create

    pg = create().pg
    kinds = []
    for spec in (which, "block_spec"):
        cfg = config("swiglu", num_layers=3, moe_layer_freq=[0, 1, 1])
        cfg.transformer_impl = "local"
        made = getattr(megatron, spec)
        if spec == "block_spec":
            symm = {"layer": megatron.SymmMoELayer} if which == "symm_spec" else {}
            made = megatron.block_spec(cfg, **symm)
        gpt = GPTModel(cfg, made, vocab_size=32, max_sequence_length=16, pg_collection=pg)
        ids = torch.arange(8)[None]
        loss = gpt(ids, ids, None, labels=ids).mean()
        loss.backward()
        assert all(p.grad is not None for p in gpt.parameters() if p.requires_grad)
        mlps = [layer.mlp for layer in gpt.decoder.layers]
        kinds.append([type(getattr(mlp, "experts", mlp)).__name__ for mlp in mlps])
        kinds[-1] += [type(mlps[-1]).__name__]
    return kinds


@pytest.mark.dist
@pytest.mark.parametrize(("which", "layer"), [("spec", "MoELayer"), ("symm_spec", "SymmMoELayer")])
def test_a_specification_chooses_layers_by_the_config(which: str, layer: str) -> None:
    """`--spec phalanx.adapters.megatron NAME` imports an object, which has no config."""
    (kinds,) = run_distributed(layer_kinds, 1, which)
    assert kinds == [["MLP", "Experts", "Experts", layer]] * 2


def refusals() -> list[str]:
    install()
    from phalanx.adapters.megatron import Experts
    from phalanx.parallel.groups import create

    pg, seen = create().pg, []
    for changes in (
        {"moe_latent_size": 8},
        {"moe_apply_probs_on_input": True},
        {"fp8": "hybrid"},
        {"delay_wgrad_compute": True},
        {"activation_func_fp8_input_store": True},
        {"moe_paged_stash": True},
        {"fine_grained_activation_offloading": True, "offload_modules": ["core_attn", "moe_act"]},
        {"activation_func": torch.tanh},
    ):
        made = config("swiglu")
        for name, value in changes.items():
            setattr(made, name, value)  # some need further options of Megatron-Core's own
        with pytest.raises(ValueError) as error:
            Experts(4, made, pg)
        seen.append(str(error.value))
    pg.expt_tp = type("Group", (), {"size": lambda self: 2})()
    with pytest.raises(ValueError) as error:
        Experts(4, config("swiglu"), pg)
    return [*seen, str(error.value)]


@pytest.mark.dist
def test_what_the_experts_lack_is_refused_by_name() -> None:
    (seen,) = run_distributed(refusals, 1)
    names = ["moe_latent_size", "moe_apply_probs_on_input", "fp8", "delay_wgrad_compute"]
    names += ["activation_func_fp8_input_store", "moe_paged_stash", "offload_modules=moe_act"]
    names += ["activation_func=tanh", "expert_tensor_parallel_size"]
    assert not any("\n" in text for text in seen)
    assert all(text.startswith(name) for text, name in zip(seen, names, strict=True))


def without_transformer_engine() -> list[str]:
    install()
    from megatron.core.models.gpt import GPTModel

    from phalanx.adapters import megatron
    from phalanx.adapters.megatron import specs
    from phalanx.parallel.groups import create

    pg, seen = create().pg, []
    cfg = config("swiglu")
    cfg.transformer_impl = "transformer_engine"  # the default of Megatron-LM
    options = dict(vocab_size=32, max_sequence_length=16, pg_collection=pg)
    ways = [
        lambda: megatron.block_spec(cfg),
        lambda: GPTModel(cfg, megatron.spec, **options),
        lambda: GPTModel(cfg, megatron.symm_spec, **options),
    ]
    with mock.patch.object(specs, "HAVE_TE", False):
        for way in ways:
            with pytest.raises(ValueError) as error:
                way()
            seen.append(str(error.value))
    return seen


@pytest.mark.dist
def test_layers_that_are_not_installed_are_refused_by_name() -> None:
    (seen,) = run_distributed(without_transformer_engine, 1)
    for line in seen:
        assert line.startswith("transformer_impl=transformer_engine needs Transformer Engine, wh")
        assert ": set --transformer-impl local, or pip install 'transformer-engine[" in line
