"""Small MoE models for the tests of router, layer and baseline; all of it runs inside a rank."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

EXPERTS, TOP_K, HIDDEN, FFN = 8, 2, 16, 8
SEQUENCE, BATCH = 12, 3

LOSSES = {"aux_loss": 0.3, "seq_aux_loss": 0.7, "global_aux_loss": 0.5, "z_loss": 0.2}
SCORES = [
    {"score": "softmax"},
    {"score": "sigmoid"},
    # The losses judge the scores, whatever bias and groups make of them.
    {"score": "sigmoid", "bias_rate": 1e-3, "groups": 4, "group_topk": 2},
]


DEEPSEEK: dict[str, Any] = dict(
    router={
        **dict(score="sigmoid", scale=2.5, groups=4, group_topk=2),
        **dict(bias_rate=1e-3, seq_aux_loss=0.01),
    },
    moe={"shared_ffn": 12, "top_k": 4},
)
GPT_OSS: dict[str, Any] = dict(
    router={"softmax_over": "topk"},
    moe={"activation": "quick_geglu", "activation_limit": 0.5, "activation_offset": 1.0},
    bias=True,
)


def with_loss(kind: dict[str, Any], **losses: float) -> dict[str, Any]:
    """A kind of layer, with balancing losses."""
    return kind | dict(router=kind["router"] | losses)


def install() -> None:
    """Megatron-Core on this host, and the schedules' loss scales as if no other test had run."""
    from phalanx.parallel.megatron import cpu

    cpu.install()
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
    from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler

    for scaler in (MoEAuxLossAutoScaler, MTPLossAutoScaler):
        scaler.main_loss_backward_scale = torch.tensor([1.0])


def model(router: dict[str, Any] | None = None, moe: dict[str, Any] | None = None, **kwargs: Any):
    """ModelConfig of one MoE layer, with changes to the router, the experts, or the model."""
    from phalanx.configs.schema import AttentionConfig, ModelConfig, MoEConfig, RouterConfig

    fields: dict[str, Any] = dict(experts=EXPERTS, top_k=TOP_K, ffn=FFN)
    return ModelConfig(
        layers=1,
        hidden=HIDDEN,
        dense_ffn=FFN,
        attention=AttentionConfig(heads=4, kv_heads=4, head_dim=4),
        moe=MoEConfig(**{**fields, **(moe or {})}, router=RouterConfig(**(router or {}))),
        **kwargs,
    )


def transformer(model: Any, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """TransformerConfig of the model as training builds it, with layout sizes and changes."""
    from phalanx.configs.schema import Config, PrecisionConfig
    from phalanx.moe.model.megatron_config import Layout, transformer_config

    sizes = {k: changes.pop(k) for k in ("tensor", "context", "expert") if k in changes}
    cfg = Config(model=model, precision=PrecisionConfig("fp32"))
    config = transformer_config(cfg, Layout(**sizes), on_cpu=True)
    config.params_dtype = dtype
    for name, value in changes.items():
        setattr(config, name, value)
    return config


def options(model: Any, pg: Any, backend: str = "torch") -> Any:
    """Options of the model's MoE layers on these process groups.

    All ranks call it together. The budget fits any routing.
    """
    from phalanx.kernels.expert_mlp.mlp_spec import MLPSpec
    from phalanx.moe.layer import MoEOptions
    from phalanx.moe.model.kernel_facts import activation_of
    from phalanx.parallel.dispatcher.capacity import Budget
    from phalanx.parallel.dispatcher.transport import choose_transport

    e = model.moe
    return MoEOptions(
        moe=e,
        spec=MLPSpec(activation_of(e), backend),
        transport=choose_transport("auto", pg.ep, torch.float32),
        budget=Budget(max(1.0, float(e.experts)), torch.device("cpu")),
    )


def recomputing(*names: str) -> Any:
    """Context of a layer that recomputes these."""
    from phalanx.parallel.memory.layer_context import MemoryPlan, enter_layer

    return enter_layer(MemoryPlan(frozenset(names) - {"none"}), 1)


def draw(*shape: int, seed: int, scale: float = 1.0, dtype: torch.dtype = torch.float32):
    """Normal values that depend on shape and seed alone."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * scale).to(dtype)


@torch.no_grad()
def fill(module: torch.nn.Module, scale: float = 0.3) -> None:
    """Values for all parameters, by the order of their names."""
    for seed, (_, p) in enumerate(sorted(module.named_parameters())):
        p.copy_(draw(*p.shape, seed=seed, scale=scale, dtype=p.dtype))


def build_router(
    router: dict[str, Any], *, dtype: torch.dtype = torch.float32, pg: Any = None, **changes: Any
) -> Any:
    """A router with the values of `fill`, on one rank without groups."""
    from phalanx.moe.router.router import Router
    from phalanx.parallel.groups import create

    top_k, bias = changes.pop("top_k", TOP_K), changes.pop("bias", False)
    backend = changes.pop("backend", "torch")
    m = model(router, moe={"top_k": top_k}, bias=bias)
    built = Router(
        config=transformer(m, dtype, **changes),
        options=m.moe.router,
        top_k=top_k,
        pg_collection=pg or create().pg,
        backend=backend,
    )
    fill(built)
    return built


def hidden(dtype: torch.dtype = torch.float32, scale: float = 1.0) -> torch.Tensor:
    """Input of a router: [SEQUENCE, BATCH, HIDDEN]."""
    return draw(SEQUENCE, BATCH, HIDDEN, seed=50, scale=scale, dtype=dtype)


def best(values: list[float], k: int) -> list[int]:
    """The k best in order, ties to the lower index."""
    return sorted(range(len(values)), key=lambda i: (-values[i], i))[:k]


def compare_layers(
    ours: Any,
    stock: Any,
    tokens: tuple[int, int],
    experts_grad: Callable[[str], Any],
    call: Callable[[Any, Any], Any] = lambda layer, x: layer(x),
) -> None:
    """Output of two layers for [S, B] tokens of each rank, and gradients of input and parameters.

    `experts_grad` gives the stock layer's for a parameter of our experts, by its name.
    """
    rank, results = dist.get_rank(), []
    for layer in (ours, stock):
        x = draw(*tokens, HIDDEN, seed=70 + rank).requires_grad_()
        out, bias = call(layer, x)
        assert bias is None
        out.backward(draw(*out.shape, seed=90 + rank))
        results.append((out.detach(), x.grad))
    close = partial(torch.testing.assert_close, rtol=1e-4, atol=1e-5)
    close(*results)
    for key, p in ours.named_parameters():
        of_experts = key.startswith("experts.")
        want = experts_grad(key[8:]) if of_experts else stock.get_parameter(key).grad
        close(p.grad, want, msg=lambda m, k=key: f"{k}: {m}")
