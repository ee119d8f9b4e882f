"""Map between the tensors of a Hugging Face folder and those of a checkpoint.

The same map serves both directions. A checkpoint's tensor is split into regions that are small
enough for memory; each consists of parts of the folder's tensors. A part is a strided view of its
region: import copies into the view, export reads from it.

Legend: E experts, D hidden, F expert width, G key-value heads, d channels of a head.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pkgutil import resolve_name

from torch import Tensor

from phalanx.configs.arithmetic.layers import is_dense, mixer
from phalanx.configs.schema import ModelConfig
from phalanx.configs.tables.layers import MIXERS
from phalanx.moe.hf.families import FAMILIES, Names, family_of

Shape = tuple[int, ...]
View = Callable[[Tensor], Tensor]

_PIECE = 1 << 24  # elements of a region, if its tensor can be split between rows


@dataclass(frozen=True)
class TensorPart:
    """Rows of a tensor of the folder."""

    name: str
    shape: Shape  # of the full tensor
    rows: tuple[int, int]
    view: View  # function from the region to these rows, up to a reshape


@dataclass(frozen=True)
class TensorRegion:
    """Rows of a tensor of the checkpoint. The views of its parts cover each element once."""

    key: str
    shape: Shape  # of the full tensor
    rows: tuple[int, int]
    parts: tuple[TensorPart, ...]
    exact: bool = False  # in fp32, with any dtype of the weights
    repeated: bool = False  # an optional second copy in the folder


def same(region: Tensor) -> Tensor:
    """View of a part whose rows are those of its region."""
    return region


def regions(m: ModelConfig) -> Iterator[TensorRegion]:
    """All regions of a model that `hf.config` accepts, in the order of the layers."""
    words = (m.vocab_size, m.hidden)
    yield from rows_of("embedding.word_embeddings.weight", words, "model.embed_tokens.weight")
    for layer in range(m.layers):
        yield from _layer(m, f"decoder.layers.{layer}.", f"model.layers.{layer}.", layer)
    yield from rows_of("decoder.final_layernorm.weight", (m.hidden,), "model.norm.weight")
    for depth in range(m.mtp_layers):
        if first := FAMILIES[family_of(m)].names.prediction:
            yield from _prediction_apart(m, f"mtp.layers.{depth}.", first)
        else:
            yield from _prediction(m, f"mtp.layers.{depth}.", f"model.layers.{m.layers + depth}.")
    if not m.tie_embeddings:
        yield from rows_of("output_layer.weight", words, "lm_head.weight")


def rows_of(
    key: str,
    shape: Shape,
    name: str,
    *,
    first: int = 0,
    count: int = 0,
    exact: bool = False,
    repeated: bool = False,
) -> Iterator[TensorRegion]:
    """Regions of `count` rows from row `first`, by default all, stored as `name` in the folder."""
    count = count or shape[0]
    step = max(1, _PIECE // math.prod(shape[1:]))
    for start in range(0, count, step):
        stop = min(start + step, count)
        part = TensorPart(name, (count, *shape[1:]), (start, stop), same)
        yield TensorRegion(key, shape, (first + start, first + stop), (part,), exact, repeated)


def _layer(m: ModelConfig, key: str, name: str, layer: int) -> Iterator[TensorRegion]:
    yield from rows_of(f"{key}input_layernorm.weight", (m.hidden,), f"{name}input_layernorm.weight")
    if path := MIXERS[mixer(m, layer)].regions:
        yield from resolve_name(path)(m, f"{key}self_attention.", name)
    else:
        attention = latent_attention if m.attention.kind == "mla" else _grouped_attention
        yield from attention(m, f"{key}self_attention.", f"{name}self_attn.")
    norm = f"{name}post_attention_layernorm.weight"
    yield from rows_of(f"{key}pre_mlp_layernorm.weight", (m.hidden,), norm)
    if is_dense(m, layer):
        yield from _mlp(f"{key}mlp.", f"{name}mlp.", m.hidden, m.dense_ffn)
        return
    names = FAMILIES[family_of(m)].names
    block = f"{name}{names.block}."
    yield from _router(m, f"{key}mlp.router.", block, names)
    if names.matrices:
        yield from _separate_experts(m, f"{key}mlp.experts.experts.", f"{block}experts.", names)
    else:
        yield from _joint_experts(m, f"{key}mlp.experts.experts.", f"{block}experts.")
    if m.moe.shared_ffn:
        shared = f"{block}{names.shared}."
        yield from _mlp(f"{key}mlp.shared_experts.", shared, m.hidden, m.moe.shared_ffn)
    if m.moe.shared_gate:
        gate = f"{block}{names.shared}_gate.weight"
        yield from rows_of(f"{key}mlp.shared_experts.gate_weight", (1, m.hidden), gate)


def _prediction(m: ModelConfig, key: str, name: str) -> Iterator[TensorRegion]:
    """Regions of a prediction layer in DeepSeek-V3's layout, which repeats embedding and head."""
    words, embedding = (m.vocab_size, m.hidden), "embedding.word_embeddings.weight"
    head = embedding if m.tie_embeddings else "output_layer.weight"
    yield from rows_of(embedding, words, f"{name}embed_tokens.weight", repeated=True)
    for norm in ("enorm", "hnorm"):
        yield from rows_of(f"{key}{norm}.weight", (m.hidden,), f"{name}{norm}.weight")
    yield from rows_of(f"{key}eh_proj.weight", (m.hidden, 2 * m.hidden), f"{name}eh_proj.weight")
    yield from _layer(m, f"{key}transformer_layer.", name, m.layers)
    norm = f"{name}shared_head.norm.weight"
    yield from rows_of(f"{key}final_layernorm.weight", (m.hidden,), norm)
    yield from rows_of(head, words, f"{name}shared_head.head.weight", repeated=True)


def _prediction_apart(m: ModelConfig, key: str, name: str) -> Iterator[TensorRegion]:
    """Regions of a prediction layer in Qwen3-Next's layout, with a prefix of its own."""
    norms = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden"}
    for ours, theirs in (norms | {"final_layernorm": "norm"}).items():
        yield from rows_of(f"{key}{ours}.weight", (m.hidden,), f"{name}{theirs}.weight")
    yield from rows_of(f"{key}eh_proj.weight", (m.hidden, 2 * m.hidden), f"{name}fc.weight")
    yield from _layer(m, f"{key}transformer_layer.", f"{name}layers.0.", m.layers)


def _grouped_attention(m: ModelConfig, key: str, name: str) -> Iterator[TensorRegion]:
    """Regions of grouped attention.

    A checkpoint interleaves queries, keys and values by key-value head, with output gates after a
    head's queries; in a folder each gate follows its own query.
    """
    a = m.attention
    per, d = a.heads // a.kv_heads, a.head_dim
    queries = 2 * per if a.output_gate else per

    def heads(first: int, last: int) -> View:
        def view(region: Tensor) -> Tensor:
            part = region.view(a.kv_heads, queries + 2, d, *region.shape[1:])[:, first:last]
            if a.output_gate and first == 0:
                return part.unflatten(1, (2, per)).transpose(1, 2)
            return part

        return view

    spans = {"q": (0, queries), "k": (queries, queries + 1), "v": (queries + 1, queries + 2)}
    for kind in ("weight", "bias") if m.bias or a.qkv_bias else ("weight",):
        columns = (m.hidden,) if kind == "weight" else ()
        parts = []
        for letter, (first, last) in spans.items():
            rows = a.kv_heads * (last - first) * d
            source = f"{name}{letter}_proj.{kind}"
            parts.append(TensorPart(source, (rows, *columns), (0, rows), heads(first, last)))
        total = a.kv_heads * (queries + 2) * d
        yield TensorRegion(f"{key}linear_qkv.{kind}", (total, *columns), (0, total), tuple(parts))
    out = (m.hidden, a.heads * d)
    yield from rows_of(f"{key}linear_proj.weight", out, f"{name}o_proj.weight")
    if m.bias:
        yield from rows_of(f"{key}linear_proj.bias", (m.hidden,), f"{name}o_proj.bias")
    if a.sinks:
        yield from rows_of(f"{key}core_attention.softmax_offset", (a.heads,), f"{name}sinks")
    if a.qk_norm:
        full = a.qk_norm_over == "projection"  # ordered by query head, as in the folder
        for letter, count in (("q", a.heads), ("k", a.kv_heads)):
            width = count * d if full else d
            norm = f"{name}{letter}_norm.weight"
            yield from rows_of(f"{key}{letter}_layernorm.weight", (width,), norm)


def latent_attention(m: ModelConfig, key: str, name: str) -> Iterator[TensorRegion]:
    """Regions of latent attention; rotated channels are interleaved pairs in both formats."""
    a = m.attention
    queries = a.heads * (a.qk_nope_dim + a.qk_rope_dim)
    shapes = {
        ("linear_kv_down_proj", "kv_a_proj_with_mqa"): (a.kv_lora_rank + a.qk_rope_dim, m.hidden),
        ("kv_layernorm", "kv_a_layernorm"): (a.kv_lora_rank,),
        ("linear_kv_up_proj", "kv_b_proj"): (a.heads * (a.qk_nope_dim + a.v_dim), a.kv_lora_rank),
        ("linear_proj", "o_proj"): (m.hidden, a.heads * a.v_dim),
    }
    if a.q_lora_rank:
        shapes[("linear_q_down_proj", "q_a_proj")] = (a.q_lora_rank, m.hidden)
        shapes[("q_layernorm", "q_a_layernorm")] = (a.q_lora_rank,)
        shapes[("linear_q_up_proj", "q_b_proj")] = (queries, a.q_lora_rank)
    else:
        shapes[("linear_q_proj", "q_proj")] = (queries, m.hidden)
    for (ours, theirs), shape in shapes.items():
        yield from rows_of(f"{key}{ours}.weight", shape, f"{name}{theirs}.weight")


def _mlp(key: str, name: str, hidden: int, width: int) -> Iterator[TensorRegion]:
    fc1 = (f"{key}linear_fc1.weight", (2 * width, hidden))
    yield from rows_of(*fc1, f"{name}gate_proj.weight", count=width)
    yield from rows_of(*fc1, f"{name}up_proj.weight", first=width, count=width)
    yield from rows_of(f"{key}linear_fc2.weight", (hidden, width), f"{name}down_proj.weight")


def _router(m: ModelConfig, key: str, name: str, names: Names) -> Iterator[TensorRegion]:
    experts, theirs = m.moe.experts, names.router
    yield from rows_of(f"{key}weight", (experts, m.hidden), f"{name}{theirs}.weight")
    if m.bias:
        yield from rows_of(f"{key}bias", (experts,), f"{name}{theirs}.bias")
    if m.moe.router.bias_rate:
        bias = f"{name}{names.choice_bias}"
        yield from rows_of(f"{key}expert_bias", (experts,), bias, exact=True)


def _separate_experts(m: ModelConfig, key: str, name: str, names: Names) -> Iterator[TensorRegion]:
    E, F, D = m.moe.experts, m.moe.ffn, m.hidden
    first, second, third = names.matrices
    for e in range(E):
        gate = TensorPart(f"{name}{e}.{first}.weight", (F, D), (0, F), lambda t: t[0, :F])
        up = TensorPart(f"{name}{e}.{second}.weight", (F, D), (0, F), lambda t: t[0, F:])
        down = TensorPart(f"{name}{e}.{third}.weight", (D, F), (0, D), same)
        yield TensorRegion(f"{key}linear_fc1.weight", (E, 2 * F, D), (e, e + 1), (gate, up))
        yield TensorRegion(f"{key}linear_fc2.weight", (E, D, F), (e, e + 1), (down,))


def _joint_experts(m: ModelConfig, key: str, name: str) -> Iterator[TensorRegion]:
    """Regions of experts in one transposed tensor, gate and up channels interleaved (GPT-OSS)."""
    E, F, D = m.moe.experts, m.moe.ffn, m.hidden
    for e in range(E):
        at = (e, e + 1)
        gate_up = TensorPart(
            f"{name}gate_up_proj", (E, D, 2 * F), at, lambda t: t.view(1, 2, F, D).transpose(1, 3)
        )
        down = TensorPart(f"{name}down_proj", (E, F, D), at, lambda t: t.transpose(1, 2))
        yield TensorRegion(f"{key}linear_fc1.weight", (E, 2 * F, D), at, (gate_up,))
        yield TensorRegion(f"{key}linear_fc2.weight", (E, D, F), at, (down,))
    bias = TensorPart(
        f"{name}gate_up_proj_bias", (E, 2 * F), (0, E), lambda t: t.view(E, 2, F).transpose(1, 2)
    )
    yield TensorRegion(f"{key}linear_fc1.bias", (E, 2 * F), (0, E), (bias,))
    yield from rows_of(f"{key}linear_fc2.bias", (E, D), f"{name}down_proj_bias")
