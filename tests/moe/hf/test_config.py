"""config.json without tensors: published ones are understood, and nothing in one is passed over."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from phalanx.configs.knobs import put
from phalanx.configs.load import load
from phalanx.configs.schema import Config
from phalanx.configs.validate import validate
from phalanx.moe.hf import ConversionError
from phalanx.moe.hf.config import rotated_share, to_json, to_knobs
from phalanx.moe.hf.families import family_of
from phalanx.scripts.convert_hf import configured
from tests.moe.hf.models import MODELS
from tests.moe.hf.published import PUBLISHED

DEEPSEEK, _ = PUBLISHED["DeepSeek-V3, V3-Base"]
GPT_OSS, _ = PUBLISHED["GPT-OSS-20B"]
QWEN3, _ = PUBLISHED["Qwen3-30B-A3B"]
FAMILIES = {"deepseek_v3": DEEPSEEK, "gpt_oss": GPT_OSS, "qwen3_moe": QWEN3}
OTHERS = {
    "mixtral": "Mixtral-8x7B-v0.1",
    "deepseek_v2": "DeepSeek-V2-Lite",
    "olmoe": "OLMoE-1B-7B-0924",
    "glm4_moe": "GLM-4.5-Air",
    "minimax_m2": "MiniMax-M2",
    "qwen3_next": "Qwen3-Next-80B-A3B-Instruct and -Thinking",
}
FAMILIES |= {family: PUBLISHED[name][0] for family, name in OTHERS.items()}
OPTIONS = {"deepseek_v3": "deepseek_v3", "gpt_oss": "gpt_oss_20b", "qwen3_moe": "qwen3_30b_a3b"}
OPTIONS |= {
    "mixtral": "mixtral_8x7b",
    "deepseek_v2": "deepseek_v2_lite",
    "olmoe": "olmoe_1b_7b",
    "glm4_moe": "glm_4_5",
    "minimax_m2": "minimax_m2",
    "qwen3_next": "qwen3_next_80b_a3b",
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_files_are_understood(name: str) -> None:
    fields, expected = PUBLISHED[name]
    before = copy.deepcopy(fields)
    cfg, overrides = configured(to_knobs(fields), None)
    validate(cfg, 1)
    assert fields == before
    assert [overrides[0], *sorted(overrides[1:])] == expected


SMALL_GLM = dict(
    hidden_size=64,
    intermediate_size=128,
    moe_intermediate_size=32,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    vocab_size=256,
    n_routed_experts=8,
    num_experts_per_tok=2,
    first_k_dense_replace=1,
)
"""Sizes of configs/model/tiny.yaml, which has other routing."""


@pytest.mark.parametrize("name", [*MODELS, "small GLM-4.5"])
def test_the_nearest_option_is_of_the_same_family_whatever_the_sizes(
    name: str, tmp_path: Path
) -> None:
    kind, values = {**MODELS, "small GLM-4.5": ("Glm4MoeConfig", SMALL_GLM)}[name]
    getattr(transformers, kind)(**values).save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    cfg, (option, *_) = configured(to_knobs(fields), None)
    family = family_of(cfg.model)
    assert family == fields["model_type"]
    if family != "llama":  # of which there is no option
        assert family_of(load([option]).model) == family
    if family == "glm4_moe":
        assert option in ("model=glm_4_5", "model=glm_4_5_air")


UNKNOWN = {
    "logit_scale": 0.5,
    "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0,
    "mlp_bias": True,
    "qk_norm": False,
    "partial_rotary_factor": 0.5,
    "dual_chunk_attention_config": {"chunk_size": 8192},
    "per_layer_config": {"0": {"hidden_act": "gelu"}},
    "a_field_of_next_year": None,
}


PARTLY_ROTATED = ("glm4_moe", "minimax_m2", "qwen3_next")


@pytest.mark.parametrize(
    ("family", "field"),
    [
        (family, field)
        for family in FAMILIES
        for field in UNKNOWN
        if field != "partial_rotary_factor" or family not in PARTLY_ROTATED
    ],
)
def test_a_field_that_nothing_reads_is_refused_by_name(family: str, field: str) -> None:
    refused(FAMILIES[family] | {field: UNKNOWN[field]}, f"config.json has {field}=")


def refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConversionError, match=message) as error:
        to_knobs(fields)
    assert "\n" not in str(error.value) and len(str(error.value)) < 300


DEFAULT = {"rope_type": "default", "rope_theta": 150000}
YARN = {**GPT_OSS["rope_scaling"], "rope_theta": 150000}
WRONG: list[tuple[str, dict[str, Any], str]] = [
    # what every family has
    ("qwen3_moe", {"attention_dropout": 0.1}, "attention_dropout=0.1; only 0.0"),
    ("deepseek_v3", {"attention_dropout": 0.1}, "attention_dropout=0.1; only 0.0"),
    ("gpt_oss", {"attention_dropout": None}, "attention_dropout=None; only 0.0"),
    ("gpt_oss", {"hidden_act": "gelu"}, "hidden_act='gelu'; only 'silu'"),
    ("gpt_oss", {"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000; published models"),
    ("gpt_oss", {"num_key_value_heads": 7}, "num_key_value_heads=7, which does not divide"),
    ("qwen3_moe", {"num_key_value_heads": 0}, "num_key_value_heads=0, which does not divide"),
    ("deepseek_v3", {"num_key_value_heads": 64}, "num_key_value_heads=64; only 128"),
    ("deepseek_v3", {"head_dim": 56}, "head_dim=56; only 64"),
    ("deepseek_v3", {"qk_head_dim": 64}, "qk_head_dim=64; only 192"),
    ("qwen3_moe", {"eos_token_id": "</s>"}, "eos_token_id='</s>'; expected an id"),
    ("qwen3_moe", {"max_position_embeddings": -1}, "max_position_embeddings=-1"),
    ("qwen3_moe", {"model_type": ["llama"]}, "model_type="),
    ("qwen3_moe", {"hidden_size": "64"}, "hidden_size='64'"),
    ("qwen3_moe", {"rms_norm_eps": None}, "rms_norm_eps=None"),
    ("qwen3_moe", {"rms_norm_eps": float("inf")}, "rms_norm_eps=inf"),
    ("qwen3_moe", {"attention_bias": True}, "attention_bias=True"),
    ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step=2"),
    ("qwen3_moe", {"mlp_only_layers": [1]}, r"mlp_only_layers=\[1\]"),
    ("qwen3_moe", {"mlp_only_layers": 1}, "mlp_only_layers=1"),
    ("qwen3_moe", {"rope_parameters": [1]}, r"rope_parameters=\[1\]"),
    ("gpt_oss", {"layer_types": ["full_attention", "sliding_attention"] * 12}, "not full at each"),
    ("gpt_oss", {"layer_types": 4}, "layer_types=4; expected a list"),
    ("gpt_oss", {"attention_bias": False}, "attention_bias=False"),
    ("deepseek_v3", {"rope_interleave": False}, "rope_interleave=False"),
    ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func='softmax'"),
    ("deepseek_v3", {"topk_group": 3}, "group_topk=3"),
    ("deepseek_v3", {"n_shared_experts": None}, "n_shared_experts=None"),
    # two names of one thing
    ("gpt_oss", {"experts_per_token": 2}, "num_experts_per_tok=4 and experts_per_token=2"),
    ("gpt_oss", {"num_experts": 64}, "num_local_experts=32 and num_experts=64"),
    ("qwen3_moe", {"num_local_experts": 64}, "num_experts=128 and num_local_experts=64"),
    ("deepseek_v3", {"num_mtp_layers": 2}, "num_nextn_predict_layers=1 and num_mtp_layers=2"),
    ("gpt_oss", {"initial_context_length": 8192}, "initial_context_length=8192; only 4096"),
    # windows
    ("gpt_oss", {"layer_types": ["chunked_attention"] * 24}, "'chunked_attention' in layer_types"),
    (
        "gpt_oss",
        {"layer_types": ["sliding_attention", "linear_attention"] * 12},
        "'linear_attention' in layer_types",
    ),
    ("gpt_oss", {"layer_types": ["full_attention"] * 23}, "layer_types that are not full"),
    ("gpt_oss", {"sliding_window": 0}, "sliding_window=0 and sliding layers"),
    ("gpt_oss", {"sliding_window": None}, "sliding_window=None and sliding layers"),
    ("gpt_oss", {"sliding_window": True}, "sliding_window=True and sliding layers"),
    ("qwen3_moe", {"layer_types": ["sliding_attention"] * 48}, "layer_types=.*; only"),
    ("qwen3_moe", {"use_sliding_window": True}, "use_sliding_window=True"),
    ("gpt_oss", {"swiglu_limit": 0}, "swiglu_limit=0.0; expected a number above 0"),
    ("gpt_oss", {"swiglu_limit": None}, "swiglu_limit=None"),
    ("gpt_oss", {"head_dim": None}, "head_dim=None; expected int"),
    # the rotary embedding
    ("gpt_oss", {"rope_scaling": None}, "neither rope_parameters nor rope_scaling"),
    ("gpt_oss", {"rope_scaling": {}}, "neither rope_parameters nor rope_scaling"),
    ("gpt_oss", {"rope_parameters": DEFAULT}, "rope_parameters and rope_scaling that differ"),
    (
        "qwen3_moe",
        {"rope_parameters": {"rope_type": "default"}, "rope_scaling": {**YARN, "rope_theta": 1e6}},
        "rope_parameters and rope_scaling that differ",
    ),
    ("qwen3_moe", {"rope_parameters": DEFAULT}, "rope_theta=1000000.0, and 150000.0 in"),
    ("gpt_oss", {"rope_scaling": {**YARN, "mrope_section": [1]}}, "has mrope_section="),
    ("gpt_oss", {"rope_scaling": {**YARN, "type": "linear"}}, "rope_type='yarn' and type='linear'"),
    ("gpt_oss", {"rope_scaling": {**YARN, "truncate": None}}, "truncate=None; expected bool"),
    ("gpt_oss", {"rope_scaling": {**YARN, "partial_rotary_factor": 0.5}}, "factor=0.5; only 1.0"),
    ("qwen3_moe", {"rope_scaling": {"rope_type": "default", "factor": 4.0}}, "has factor=4.0"),
    # one expert
    ("qwen3_moe", {"num_experts_per_tok": 1}, "num_experts_per_tok=1 with norm_topk_prob=true"),
    ("gpt_oss", {"num_experts_per_tok": 1, "experts_per_token": 1}, "with softmax over one expert"),
    (
        "deepseek_v3",
        {"num_experts_per_tok": 1, "n_group": 1, "topk_group": 1},
        "num_experts_per_tok=1 with norm_topk_prob=true",
    ),
    # losses
    ("deepseek_v3", {"seq_aux": "yes"}, "seq_aux='yes'"),
    ("deepseek_v3", {"aux_loss_alpha": "1"}, "aux_loss_alpha='1'"),
    ("gpt_oss", {"router_aux_loss_coef": None}, "router_aux_loss_coef=None"),
    # what only some families have
    ("mixtral", {"sliding_window": 0}, "sliding_window=0; expected a number"),
    ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise=0.1; only 0.0"),
    ("mixtral", {"num_experts_per_tok": 1}, "with softmax over one expert"),
    ("deepseek_v2", {"topk_method": "group_limited_greedy"}, "'group_limited_greedy'; only 'gre"),
    ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob=True; only False"),
    ("deepseek_v2", {"scoring_func": "sigmoid"}, "scoring_func='sigmoid'; only 'softmax'"),
    ("deepseek_v2", {"num_nextn_predict_layers": 1}, "num_nextn_predict_layers=1, which is not"),
    ("olmoe", {"clip_qkv": 8.0}, "clip_qkv=8.0; only None"),
    ("olmoe", {"head_dim": 64}, "head_dim=64, and heads fill hidden_size=2048"),
    ("glm4_moe", {"partial_rotary_factor": 0.2}, "rotates 25 of 128 channels"),
    ("glm4_moe", {"partial_rotary_factor": 2.0}, "rotates 256 of 128 channels"),
    ("glm4_moe", {"rope_scaling": {**YARN, "rope_theta": 1e6}}, "YaRN on a part of each head"),
    ("glm4_moe", {"use_qk_norm": None}, "use_qk_norm=None; expected bool"),
    ("glm4_moe", {"n_group": 4, "topk_group": 3}, "top_k=8 with group_topk=3"),
    ("minimax_m2", {"attn_type_list": [1] * 61 + [0]}, "attn_type_list="),
    ("minimax_m2", {"partial_rotary_factor": 1.0}, "and rotary_dim, which differ"),
    ("minimax_m2", {"qk_norm_type": "per_head"}, "qk_norm_type='per_head'; only 'per_layer'"),
    ("minimax_m2", {"use_routing_bias": False}, "use_routing_bias=False; only True"),
    ("minimax_m2", {"shared_intermediate_size": 1536}, "shared_intermediate_size=1536; only 0"),
    ("qwen3_next", {"linear_key_head_dim": 64}, "linear_key_head_dim=64; only 128"),
    ("qwen3_next", {"linear_value_head_dim": 256}, "linear_value_head_dim=256; only 128"),
    ("qwen3_next", {"linear_conv_kernel_dim": 3}, "linear_conv_kernel_dim=3; only 4"),
    ("qwen3_next", {"linear_num_key_heads": 5}, "linear_num_key_heads=5, which does not divide"),
    ("qwen3_next", {"linear_num_value_heads": 0}, "linear_num_key_heads=16, which does not"),
    ("qwen3_next", {"linear_num_value_heads": None}, "linear_num_value_heads=None; expected int"),
    ("qwen3_next", {"full_attention_interval": 0}, "full_attention_interval=0; expected a number"),
    ("qwen3_next", {"decoder_sparse_step": 2}, "decoder_sparse_step=2; only 1"),
    ("qwen3_next", {"mlp_only_layers": [0]}, r"mlp_only_layers=\[0\]; only \[\]"),
    ("qwen3_next", {"layer_types": ["mamba"] * 48}, "layer_types=.*; expected a list of full_att"),
    ("qwen3_next", {"layer_types": ["linear_attention"] * 47}, "not full at each n-th layer"),
    (
        "qwen3_next",
        {"layer_types": ["linear_attention", "full_attention"] * 24},
        "full_attention_interval=4 and layer_types that differ",
    ),
    ("qwen3_next", {"shared_expert_intermediate_size": None}, "intermediate_size=None; expected"),
    ("qwen3_next", {"attn_output_gate": False}, "has attn_output_gate=False, which is not known"),
    # quantised
    ("qwen3_moe", {"quantization_config": {"quant_method": "gptq", "bits": 4}}, "'gptq', not fp8"),
    ("qwen3_moe", {"quantization_config": {"bits": 4}}, "quant_method=None, not fp8"),
    ("qwen3_moe", {"quantization_config": "fp8"}, "quantization_config='fp8'; expected a JSON"),
    (
        "deepseek_v3",
        {"quantization_config": {"quant_method": "fp8", "fmt": "e5m2"}},
        "quantization_config of config.json has fmt='e5m2'; only 'e4m3'",
    ),
    (
        "deepseek_v3",
        {"quantization_config": {"quant_method": "fp8", "group_size": 32}},
        "quantization_config of config.json has group_size=32",
    ),
]


@pytest.mark.parametrize(("family", "fields", "message"), WRONG)
def test_a_value_without_a_counterpart_is_refused(
    family: str, fields: dict[str, Any], message: str
) -> None:
    refused(FAMILIES[family] | fields, message)


def test_the_lack_of_a_rotary_embedding_is_refused_where_versions_differ() -> None:
    silent = {k: v for k, v in GPT_OSS.items() if k != "rope_scaling"}
    refused(silent, "neither rope_parameters nor rope_scaling")
    assert to_knobs(silent | {"rope_parameters": DEFAULT})["attention.yarn.factor"] == 1.0
    assert to_knobs(silent | {"rope_parameters": YARN}) == to_knobs(GPT_OSS)


LOSSES = [
    ("deepseek_v3", {"aux_loss_alpha": 0.01}, {"seq_aux_loss": 0.01, "aux_loss": 0.0}),
    (
        "deepseek_v3",
        {"aux_loss_alpha": 0.01, "seq_aux": False},
        {"seq_aux_loss": 0.0, "aux_loss": 0.01},
    ),
    ("qwen3_moe", {"router_aux_loss_coef": 0.02}, {"aux_loss": 0.02, "seq_aux_loss": 0.0}),
    ("gpt_oss", {"router_aux_loss_coef": 0}, {"aux_loss": 0.0, "seq_aux_loss": 0.0}),
]


@pytest.mark.parametrize(("family", "fields", "expected"), LOSSES)
def test_coefficients_of_balancing_losses_there_and_back(
    family: str, fields: dict[str, Any], expected: dict[str, float]
) -> None:
    found = to_knobs(FAMILIES[family] | fields)
    assert {k: found[f"moe.router.{k}"] for k in expected} == expected
    cfg, _ = configured(found, None)
    back = to_json(cfg.model, 4096, "bfloat16")
    assert {name: back[name] for name in fields} == fields


def changed(option: str, **changes: Any) -> Config:
    cfg = load([f"model={option}"])
    for knob, value in changes.items():
        put(cfg, f"model.{knob.replace('__', '.')}", value)
    return cfg


@pytest.mark.parametrize("option", ["qwen3_30b_a3b", "moonlight_16b_a3b"])
def test_one_expert_is_exported_as_it_is_trained(option: str) -> None:
    m = changed(option, moe__top_k=1).model
    assert m.moe.router.normalize and to_json(m, 4096, "bfloat16")["norm_topk_prob"] is False
    m.moe.top_k = 2
    assert to_json(m, 4096, "bfloat16")["norm_topk_prob"] is True


def test_exported_groups_limit_or_are_one() -> None:
    fields = to_json(changed("deepseek_v3", moe__router__group_topk=8).model, 4096, "bfloat16")
    assert (fields["n_group"], fields["topk_group"]) == (1, 1)


def test_exported_shares_of_a_head_are_read_as_they_were() -> None:
    """Also of 30 of 44 channels, where 44 * (30 / 44) is below 30."""
    assert all(
        int(channels * rotated_share(dim, channels)) == dim
        for channels in range(2, 257, 2)
        for dim in range(2, channels + 1, 2)
    )
    m = changed("glm_4_5_air", attention__head_dim=44, attention__rotary_dim=30).model
    assert to_knobs(to_json(m, 4096, "bfloat16"))["attention.rotary_dim"] == 30


def test_a_clamp_that_is_always_there_is_not_exported_as_none() -> None:
    m = changed("gpt_oss_20b", moe__activation_limit=0.0).model
    with pytest.raises(ConversionError, match=r"model\.moe\.activation_limit=0 cannot"):
        to_json(m, 4096, "bfloat16")


def test_what_is_normalised_over_the_best_is_a_softmax_of_these() -> None:
    """The model that a newcomer trains first is one, too."""
    m = changed("mixtral_8x7b", moe__router__softmax_over="all").model
    assert to_json(m, 4096, "bfloat16") == to_json(
        load(["model=mixtral_8x7b"]).model, 4096, "bfloat16"
    )
    assert to_json(load(["model=tiny"]).model, 256, "bfloat16")["model_type"] == "mixtral"


NOT_EXPORTED: list[tuple[str, dict[str, Any], str]] = [
    ("mixtral_8x7b", {"moe__shared_ffn": 14336}, "shared_ffn=14336 .*mixtral of .* has 0"),
    ("mixtral_8x7b", {"attention__rotary_dim": 64}, "rotary_dim=64 .*mixtral of .* has 0"),
    (
        "mixtral_8x7b",
        {"moe__router__softmax_over": "all", "moe__router__normalize": False},
        "softmax_over=all .* has topk",
    ),
    (
        "mixtral_8x7b",
        {"moe__router__softmax_over": "all", "moe__top_k": 1},
        "softmax_over=all .* has topk",
    ),
    ("qwen3_235b_a22b", {"attention__qkv_bias": True}, "qkv_bias=true .*qwen3_moe of .* has false"),
    ("deepseek_v2_lite", {"mtp_layers": 1}, "mtp_layers=1 .*deepseek_v2 of .* has 0"),
    ("deepseek_v2_lite", {"moe__router__normalize": True}, "normalize=true .* has false"),
    ("olmoe_1b_7b", {"attention__head_dim": 64}, "head_dim=64 .*olmoe of .* has .*hidden=2048"),
    ("glm_4_5", {"moe__router__bias_rate": 0.0}, "bias_rate=0 .*glm4_moe of .* an expert bias"),
    ("glm_4_5_air", {"moe__shared_ffn": 700}, "shared_ffn=700 .*a multiple of model.moe.ffn=1408"),
    ("minimax_m2", {"moe__router__scale": 2.0}, "scale=2.0 .*minimax_m2 of .* has 1.0"),
    ("qwen3_next_80b_a3b", {"attention__output_gate": False}, "output_gate=false .* has true"),
    ("qwen3_next_80b_a3b", {"norm_zero_centered": False}, "norm_zero_centered=false .* has true"),
    ("qwen3_next_80b_a3b", {"moe__shared_gate": False}, "shared_gate=false .*qwen3_next of .* has"),
    ("qwen3_next_80b_a3b", {"moe__shared_ffn": 0}, "shared_ffn=0 .* has a shared expert"),
    ("qwen3_next_80b_a3b", {"mtp_layers": 2}, "mtp_layers=2 .*qwen3_next of .* at most 1"),
    ("qwen3_next_80b_a3b", {"moe__dense_layers": 1}, "dense_layers=1 .*qwen3_next of .* has 0"),
    (
        "qwen3_30b_a3b",
        {"norm_zero_centered": True},
        "norm_zero_centered=true .*qwen3_moe of .* has",
    ),
    ("mixtral_8x7b", {"linear_attention__full_attention_interval": 4}, "norm_zero_centered=false"),
    ("minimax_m2", {"moe__router__bias_rate": 0.0}, "bias_rate=0 .*minimax_m2 of .* expert bias"),
]


@pytest.mark.parametrize(("option", "changes", "message"), NOT_EXPORTED)
def test_a_model_of_no_family_is_not_exported(
    option: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConversionError, match=rf"model\..*{message}") as error:
        to_json(changed(option, **changes).model, 4096, "bfloat16")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("option", OPTIONS.values())
def test_exported_fields(option: str) -> None:
    m = load([f"model={option}"]).model
    fields = to_json(m, 200_000, "float32")
    assert fields["dtype"] == fields["torch_dtype"] == "float32"
    assert fields["max_position_embeddings"] == 200_000  # beyond what YaRN was made for
    assert fields["eos_token_id"] is None  # for transformers has ids of its own where there is none
    reach = {"deepseek_v3": 163_840, "deepseek_v2_lite": 163_840, "gpt_oss_20b": 131_072}
    assert to_json(m, 4096, "float32")["max_position_embeddings"] == reach.get(option, 4096)
