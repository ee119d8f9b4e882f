"""Models of transformers with its implementations of experts and with ours.

All sides share one model, whose implementation is switched; a second GPT-OSS has converted weights.
"""

import importlib
from typing import Any

import torch
from transformers import GptOssConfig, GptOssForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.integrations import sonicmoe

from phalanx.adapters.transformers import convert, fuse_norms
from phalanx.scripts.lab.bench.adapters.compared import OURS, Comparison
from phalanx.scripts.lab.bench.timing import Bench

_SIDES = ("grouped_mm", "sonicmoe", "eager")
_CONVERTED = ", converted"  # end of the name of a side whose weights are converted
_FUSED = ", fused norms"  # end of the name of a side whose norms are torch's fused ones
_TINY: dict[str, Any] = dict(
    hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=16
)
_QWEN3: dict[str, Any] = dict(
    hidden_size=2048, num_attention_heads=32, num_key_value_heads=4, head_dim=128
)
_GPT_OSS: dict[str, Any] = dict(
    hidden_size=2880, num_attention_heads=64, num_key_value_heads=8, head_dim=64
)


def qwen3(bench: Bench, *, tiny: bool) -> Comparison:
    """The decoder layers."""
    return _qwen3(bench, tiny=tiny, with_loss=False)


def qwen3_loss(bench: Bench, *, tiny: bool) -> Comparison:
    """The whole model and its loss; its logits and their gradients take too much for graphs."""
    return _qwen3(bench, tiny=tiny, with_loss=True)


def _qwen3(bench: Bench, *, tiny: bool, with_loss: bool) -> Comparison:
    config = Qwen3MoeConfig(
        **(_TINY if tiny else _QWEN3),
        vocab_size=512 if tiny else 151936,
        num_hidden_layers=4,
        num_experts=16 if tiny else 128,
        num_experts_per_tok=8,
        moe_intermediate_size=64 if tiny else 768,
        norm_topk_prob=True,
    )
    model = _made(bench, Qwen3MoeForCausalLM, config, "eager", tiny=tiny)
    ids = _ids(bench, config, 32 if tiny else 4096)
    modes = ("eager",) if with_loss else ("eager", "graph")
    name = "qwen3_loss" if with_loss else "qwen3"
    compared = Comparison(bench, name, ids.numel(), modes)
    for side in (OURS, OURS + _FUSED, *_SIDES, _SIDES[0] + _FUSED):
        _add(compared, model, side, ids, with_loss=with_loss)
    return compared


def gpt_oss(bench: Bench, *, tiny: bool) -> Comparison:
    """The decoder layers; sonicmoe's experts have another activation."""
    config = GptOssConfig(
        **(_TINY if tiny else _GPT_OSS),
        vocab_size=512 if tiny else 201088,
        num_hidden_layers=4,
        num_local_experts=8 if tiny else 32,
        num_experts_per_tok=4,
        intermediate_size=64 if tiny else 2880,
    )
    model = _made(bench, GptOssForCausalLM, config, OURS, tiny=tiny)
    converted = _made(bench, GptOssForCausalLM, config, OURS, tiny=tiny)
    converted.load_state_dict(model.state_dict())
    convert(converted)
    # Its attention holds all scores, and each side's graph has memory of its own.
    ids = _ids(bench, config, 32 if tiny else 512)
    compared = Comparison(bench, "gpt_oss", ids.numel())
    for side in (OURS, OURS + _FUSED):
        _add(compared, model, side, ids)
        _add(compared, converted, OURS + _CONVERTED + side.removeprefix(OURS), ids)
    for side in (*_SIDES, _SIDES[0] + _FUSED):
        _add(compared, model, side, ids)
    return compared


def _made(bench: Bench, kind: Any, config: Any, side: str, *, tiny: bool) -> Any:
    torch.manual_seed(0)
    with torch.device(bench.clock.device):
        return kind._from_config(
            config,
            dtype=torch.float32 if tiny else torch.bfloat16,
            experts_implementation=side,
        ).train()


def _ids(bench: Bench, config: Any, sequence: int) -> torch.Tensor:
    """[., sequence] ids, 8,192 of them, or 64 in short sequences."""
    shape = ((8192 if sequence > 64 else 64) // sequence, sequence)
    return torch.randint(0, config.vocab_size, shape, device=bench.clock.device)


def _add(
    compared: Comparison, model: Any, side: str, ids: torch.Tensor, *, with_loss: bool = False
) -> None:
    body = model.model
    # Without the embedding, whose gradient is a table of the vocabulary's size.
    embedded = body.embed_tokens(ids).detach()
    timed = model if with_loss else body.layers
    parameters = list(timed.parameters())

    if side.endswith(_FUSED):
        fuse_norms(model)
    norms = [module for module in model.modules() if "forward" in module.__dict__]
    fused = [(norm, norm.__dict__.pop("forward")) for norm in norms]

    def forward() -> torch.Tensor:
        model.config._experts_implementation_internal = side.split(",")[0]
        for norm, function in fused:
            norm.forward = function
        # Without a cache transformers builds a mask in a capture, as it cannot look whether
        # sequences are packed there, and SDPA has no flash attention with a mask.
        out: torch.Tensor = (
            model(ids, labels=ids).loss
            if with_loss
            else body(inputs_embeds=embedded, use_cache=True)[0]
        )
        for norm, _ in fused:
            del norm.forward
        return out

    if side == "sonicmoe":
        _use_installed_sonic()
    compared.add(side, forward, parameters)


def _use_installed_sonic() -> None:
    """Give transformers, which loads this kernel from a hub, the installed package."""
    try:
        sonic = importlib.import_module("sonicmoe.functional")
        enums = importlib.import_module("sonicmoe.enums")
    except ImportError:
        return  # transformers says what is missing
    sonicmoe._SONICMOE = sonicmoe.SonicMoE(enums.ActivationType, sonic.moe_general_routing_inputs)
