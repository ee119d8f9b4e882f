"""Tiny random models of transformers, and ours with the weights of an imported checkpoint.

transformers is imported inside functions: ranks import this module and must not have it.
"""

import copy
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from phalanx.configs.schema import Config
from phalanx.moe.hf.convert import determined, import_folder
from phalanx.scripts.convert_hf import configured
from tests.moe.hf.without_fla import without_fla


def _rope(theta: float, **more: Any) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": theta, **more}


def _yarn(theta: float, **more: Any) -> dict[str, Any]:
    context = {"factor": 4.0, "original_max_position_embeddings": 8}
    return {"rope_type": "yarn", "rope_theta": theta, **context, **more}


_DENSE: dict[str, Any] = dict(
    vocab_size=96,
    hidden_size=64,
    intermediate_size=80,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
)
_EXPERTS = dict(_DENSE, intermediate_size=32, num_experts_per_tok=2)
"""All layers have experts, whose width has the name of a dense MLP's."""
_BOTH = dict(_DENSE, moe_intermediate_size=32, num_experts_per_tok=2)
_LATENT = dict(
    _BOTH,
    num_key_value_heads=4,
    n_shared_experts=2,
    n_routed_experts=8,
    num_experts_per_tok=4,
    kv_lora_rank=32,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=24,
    first_k_dense_replace=1,
)
_INDEXER = dict(q_lora_rank=48, index_n_heads=4, index_head_dim=16, index_topk=6)
_GLM = dict(
    _BOTH,
    head_dim=24,
    attention_bias=True,
    n_shared_experts=1,
    n_routed_experts=8,
    first_k_dense_replace=1,
    rope_parameters=_rope(1e6, partial_rotary_factor=0.5),
)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v3": (
        "DeepseekV3Config",
        dict(
            _LATENT,
            q_lora_rank=48,
            n_group=4,
            topk_group=2,
            rope_parameters=_yarn(1e4, mscale=1.0, mscale_all_dim=1.0),
        ),
    ),
    "moonlight": (
        "DeepseekV3Config",
        dict(
            _LATENT,
            q_lora_rank=None,
            n_group=1,
            topk_group=1,
            routed_scaling_factor=2.446,
            rms_norm_eps=1e-5,
            rope_parameters=_rope(5e4),
        ),
    ),
    "deepseek_v32": (
        "DeepseekV32Config",
        dict(
            _LATENT,
            **_INDEXER,
            n_group=4,
            topk_group=2,
            rope_parameters=_yarn(1e4, mscale=1.0, mscale_all_dim=1.0),
        ),
    ),
    "glm_moe_dsa": (
        "GlmMoeDsaConfig",
        dict(
            _LATENT,
            **_INDEXER,
            rms_norm_eps=1e-5,
            routed_scaling_factor=2.5,
            rope_parameters=_rope(1e6),
        ),
    ),
    "gpt_oss": (
        "GptOssConfig",
        dict(
            _EXPERTS,
            num_hidden_layers=4,
            head_dim=16,
            num_local_experts=4,
            sliding_window=6,
            rope_parameters=_yarn(1.5e5, truncate=False),
        ),
    ),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        dict(
            _BOTH,
            head_dim=24,
            num_experts=8,
            norm_topk_prob=True,
            mlp_only_layers=[0],
            rope_parameters=_rope(1e6),
        ),
    ),
    "qwen3": ("Qwen3Config", dict(_DENSE, head_dim=24, rope_parameters=_rope(1e6))),
    "llama": (
        "LlamaConfig",
        dict(_DENSE, tie_word_embeddings=True, rope_parameters=_rope(5e5)),
    ),
    "kimi_k2": (
        "DeepseekV3Config",
        dict(
            {**_LATENT, "n_shared_experts": 1},
            q_lora_rank=48,
            n_group=1,
            topk_group=1,
            routed_scaling_factor=2.827,
            rope_parameters=_yarn(
                5e4, mscale=1.0, mscale_all_dim=1.0, beta_fast=1.0, beta_slow=1.0
            ),
        ),
    ),
    "deepseek_v2": (
        "DeepseekV2Config",
        dict(
            _LATENT,
            q_lora_rank=None,
            rope_parameters=_yarn(1e4, mscale=0.707, mscale_all_dim=0.707),
        ),
    ),
    "mixtral": ("MixtralConfig", dict(_EXPERTS, num_local_experts=4, rope_parameters=_rope(1e6))),
    "olmoe": (
        "OlmoeConfig",
        dict(
            _EXPERTS,
            num_key_value_heads=4,
            num_experts=8,
            eos_token_id=2,
            rope_parameters=_rope(1e4),
        ),
    ),
    "glm4_moe": ("Glm4MoeConfig", dict(_GLM, use_qk_norm=True, routed_scaling_factor=2.5)),
    "glm4_moe_air": ("Glm4MoeConfig", dict(_GLM, first_k_dense_replace=0)),
    "minimax_m2": (
        "MiniMaxM2Config",
        dict(
            _EXPERTS,
            head_dim=24,
            bos_token_id=1,
            eos_token_id=2,
            num_local_experts=8,
            rope_parameters=_rope(5e6, partial_rotary_factor=0.5),
        ),
    ),
    "qwen3_next": (
        "Qwen3NextConfig",
        dict(
            _BOTH,
            shared_expert_intermediate_size=48,
            num_hidden_layers=4,
            head_dim=32,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            num_experts=8,
            num_experts_per_tok=4,
            rope_parameters=_rope(1e7, partial_rotary_factor=0.25),
        ),
    ),
}
"""Name -> configuration class and its arguments: every part of the published models."""

FULL, SLIDING = "full_attention", "sliding_attention"
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt_oss without YaRN": ("gpt_oss", {"rope_parameters": _rope(1.5e5)}),
    "gpt_oss without a window": ("gpt_oss", {"layer_types": [FULL] * 4}),
    "gpt_oss with windows only": ("gpt_oss", {"layer_types": [SLIDING] * 4}),
    "gpt_oss with tied embeddings, clamped": (
        "gpt_oss",
        {"tie_word_embeddings": True, "swiglu_limit": 0.5, "swiglu_alpha": 1.25},
    ),
    "qwen3_moe with one expert": ("qwen3_moe", {"num_experts_per_tok": 1, "norm_topk_prob": False}),
    "qwen3_moe not normalised": ("qwen3_moe", {"norm_topk_prob": False}),
    "qwen3_moe with tied embeddings and YaRN": (
        "qwen3_moe",
        {"tie_word_embeddings": True, "rope_parameters": _yarn(1e6)},
    ),
    "qwen3_moe with a temperature of YaRN": (
        "qwen3_moe",
        {"rope_parameters": _yarn(1e6, mscale=1.5, mscale_all_dim=0.5)},
    ),
    "deepseek_v3 with one expert": (
        "deepseek_v3",
        {"num_experts_per_tok": 1, "norm_topk_prob": False, "n_group": 1, "topk_group": 1},
    ),
    "deepseek_v3 not normalised, all groups": (
        "deepseek_v3",
        {"norm_topk_prob": False, "topk_group": 4},
    ),
    "deepseek_v3 with YaRN that scales no logits": (
        "deepseek_v3",
        {"rope_parameters": _yarn(1e4)},
    ),
    "deepseek_v3 with both temperatures": (
        "deepseek_v3",
        {"rope_parameters": _yarn(1e4, mscale=1.5, mscale_all_dim=0.7)},
    ),
    "mixtral with windows and wide heads": ("mixtral", {"sliding_window": 6, "head_dim": 24}),
    "deepseek_v2 with a low rank and scaled experts": (
        "deepseek_v2",
        {"q_lora_rank": 48, "routed_scaling_factor": 16.0},
    ),
    "olmoe with fewer key heads, normalised": (
        "olmoe",
        {"num_key_value_heads": 2, "norm_topk_prob": True},
    ),
    "glm4_moe without biases, all channels rotated": (
        "glm4_moe",
        {
            "attention_bias": False,
            "n_group": 4,
            "topk_group": 1,
            "rope_parameters": _rope(1e6, partial_rotary_factor=1.0),
        },
    ),
    "minimax_m2 with all channels rotated": (
        "minimax_m2",
        {"rope_parameters": _rope(5e6)},
    ),
    "qwen3_next with every second layer full, one key head, not normalised": (
        "qwen3_next",
        {
            **{"layer_types": ["linear_attention", FULL] * 2, "linear_num_key_heads": 1},
            **{"norm_topk_prob": False, "tie_word_embeddings": True},
        },
    ),
    "moonlight with tied embeddings": ("moonlight", {"tie_word_embeddings": True}),
}
"""Name -> model and changes: what an architecture can have and the published models have not."""


def theirs(name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A model of transformers with random values everywhere: no bias 0, no norm 1."""
    import transformers

    kind, fields = MODELS[name]
    config = getattr(transformers, kind)(**{**fields, **changes})
    with without_fla():
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    generator = torch.Generator().manual_seed(1)
    state = model.state_dict()
    for key, value in state.items():
        value.normal_(0, 0.2, generator=generator)
        if "norm" in key:
            value.add_(1.0)
    return _rounded(model.eval(), dtype)


def _rounded(model: Any, dtype: torch.dtype) -> Any:
    """The bias that shapes the choice of experts stays fp32, as from_pretrained keeps it."""
    kept = {k: v.clone() for k, v in model.named_buffers() if k.endswith("correction_bias")}
    model.to(dtype)
    for key, value in kept.items():
        owner, _, name = key.rpartition(".")
        setattr(model.get_submodule(owner), name, value)
    return model


def tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder by name."""
    found: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}
    return found


def imported(folder: Path, out: Path, precision: str = "fp32") -> Config:
    """Import a folder; a configuration with its model, on CPU."""
    cfg, _ = configured(determined(folder), None)
    import_folder(folder, out, cfg.model)
    cfg.run.device, cfg.precision.recipe, cfg.kernels.backend = "cpu", precision, "torch"
    cfg.run.dir = str(out.parent / "runs")
    cfg.data.source, cfg.data.sequence_length = "synthetic", 24
    cfg.data.micro_batch, cfg.data.global_batch = 2, 4
    cfg.parallel.capacity_factor = max(1.0, cfg.model.moe.experts)  # any routing fits
    return cfg


def words(vocabulary: int = 96) -> Tensor:
    """Token ids [2, 24]: longer than the windows and the context before YaRN."""
    return torch.randint(vocabulary, (2, 24), generator=torch.Generator().manual_seed(2))


def loaded(cfg: Config, checkpoint: Path, *, optimizer: bool = False) -> Any:
    """Inside a rank: the job with the weights of the checkpoint."""
    from phalanx.moe.run.setup import setup
    from phalanx.parallel.checkpoint.checkpointer import Checkpointer
    from phalanx.parallel.runtime import start

    job = setup(cfg, start(seed=1, timeout=60, deterministic=False))
    folder = Path(cfg.run.dir) / cfg.run.name / "checkpoints"
    group = job.groups.pg.dp_cp
    saver = Checkpointer(folder, keep_last=1, async_save=False, dp_cp_group=group)
    engine = job.engine
    parts = (engine.optimizer, engine.scheduler) if optimizer else ()
    saver.load(checkpoint, engine.chunks, *parts, config=asdict(cfg))
    engine.eval()
    return job, saver


def our_logits(cfg: Config, checkpoint: Path, ids: Tensor) -> tuple[Tensor, Tensor | None]:
    """Inside a rank, without a pipeline: logits [B, S, V], and those of the first prediction layer.

    The prediction layer sees the tokens one further, and 0 behind the last.
    """
    job, _ = loaded(cfg, checkpoint)
    (model,) = job.engine.modules
    seen: list[Tensor] = []
    if cfg.model.mtp_layers:
        model.mtp.register_forward_hook(lambda module, args, result: seen.append(result))
    positions = torch.arange(ids.size(1)).expand_as(ids)
    with torch.no_grad():
        logits = model(ids, positions, None)
        if not seen:
            return logits.float(), None
        hidden = seen[0].chunk(1 + cfg.model.mtp_layers)[1]
        head = model.shared_embedding_or_output_weight() if cfg.model.tie_embeddings else None
        predicted, _ = model.output_layer(hidden, weight=head)
    return logits.float(), predicted.transpose(0, 1).float()


def save_with_predictions(model: Any, folder: Path) -> Any:
    """Save a DeepSeek-V3 with a layer of multi-token prediction, as published; returns that."""
    from safetensors.torch import save_file
    from transformers.modeling_layers import MtpModel

    layer = model.config.num_hidden_layers
    predictor = MtpModel(model, 1).eval()
    predictor = _rounded(predictor, model.dtype)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for key, value in predictor.layers.state_dict().items():
            value.normal_(float("norm" in key), 0.2, generator=generator)
    model.save_pretrained(folder)
    extra: dict[str, Tensor] = {}
    for key, value in predictor.layers.state_dict().items():
        name = f"model.layers.{layer}.{key.removeprefix('0.').removeprefix('mtp_block.')}"
        name = name.replace(".post_norm.", ".shared_head.norm.")
        prefix, found, kind = name.partition(".experts.")
        if not found or kind not in ("gate_up_proj", "down_proj"):
            extra[name] = value
            continue
        for e, expert in enumerate(value):
            halves = expert.chunk(2) if kind == "gate_up_proj" else [expert]
            kinds = ["gate_proj", "up_proj"] if kind == "gate_up_proj" else [kind]
            for half, matrix in zip(kinds, halves, strict=True):
                extra[f"{prefix}.experts.{e}.{half}.weight"] = matrix
    extra[f"model.layers.{layer}.embed_tokens.weight"] = model.get_input_embeddings().weight
    extra[f"model.layers.{layer}.shared_head.head.weight"] = model.lm_head.weight
    extra = {name: value.detach().clone() for name, value in extra.items()}
    save_file(extra, folder / "more.safetensors")
    index(folder)
    return predictor


def add_prediction_of_qwen3_next(model: Any, folder: Path) -> dict[str, Tensor]:
    """Save a Qwen3-Next with a prediction layer, as published; returns the layer's tensors.

    It has the parts of the last layer of the decoder, whose attention is full.
    """
    from safetensors.torch import save_file

    model.save_pretrained(folder)
    hidden, last = model.config.hidden_size, model.config.num_hidden_layers - 1
    whole = tensors(folder)
    prefix = f"model.layers.{last}."
    shapes = {
        f"layers.0.{name.removeprefix(prefix)}": value.shape
        for name, value in whole.items()
        if name.startswith(prefix)
    }
    shapes |= {"fc.weight": torch.Size((hidden, 2 * hidden))}
    norms = ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
    shapes |= {f"{name}.weight": torch.Size((hidden,)) for name in norms}
    generator = torch.Generator().manual_seed(3)
    made = {n: torch.randn(shape, generator=generator) * 0.2 for n, shape in shapes.items()}
    save_file({f"mtp.{name}": value for name, value in made.items()}, folder / "more.safetensors")
    index(folder)
    return made


def prediction_of_qwen3_next(
    model: Any, made: dict[str, Tensor], hidden_BSD: Tensor, ids: Tensor
) -> Tensor:
    """Logits of the prediction layer: of the embedding of the next token joined to the hidden state
    of this one, through a layer (as published code for it has it)."""
    config = copy.deepcopy(model.config)
    eps = config.rms_norm_eps

    def norm(x: Tensor, name: str) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * (1 + made[f"{name}.weight"])

    layer = copy.deepcopy(model.model.layers[-1])
    state = {n.removeprefix("layers.0."): v for n, v in made.items() if n.startswith("layers.0.")}
    experts = {n: v for n, v in state.items() if ".experts." in n}
    number = config.num_experts
    joint = {
        "mlp.experts.gate_up_proj": torch.stack(
            [
                torch.cat(
                    [experts[f"mlp.experts.{e}.{kind}_proj.weight"] for kind in ("gate", "up")]
                )
                for e in range(number)
            ]
        ),
        "mlp.experts.down_proj": torch.stack(
            [experts[f"mlp.experts.{e}.down_proj.weight"] for e in range(number)]
        ),
    }
    layer.load_state_dict({n: v for n, v in state.items() if n not in experts} | joint)
    following = torch.cat([ids[:, 1:], torch.zeros_like(ids[:, :1])], 1)
    embedded = norm(model.get_input_embeddings()(following), "pre_fc_norm_embedding")
    x = torch.cat([embedded, norm(hidden_BSD, "pre_fc_norm_hidden")], -1) @ made["fc.weight"].T
    positions = torch.arange(ids.size(1)).expand_as(ids)
    S = ids.size(1)
    mask = torch.full((S, S), -torch.inf).triu(1)[None, None]
    turned = model.model.rotary_emb(x, positions)
    x = layer(x, position_embeddings=turned, attention_mask=mask)
    return model.lm_head(norm(x, "norm"))


def index(folder: Path) -> None:
    """Name every tensor of every shard in an index, in place of the one that was there.

    A single file gets another name: readers take it for the whole model.
    """
    if (single := folder / "model.safetensors").exists():
        single.rename(folder / "main.safetensors")
    files: dict[str, str] = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            files |= dict.fromkeys(file.keys(), path.name)
    text = json.dumps({"metadata": {}, "weight_map": files})
    (folder / "model.safetensors.index.json").write_text(text)
