"""Arithmetic of linear attention: sizes, parameters, FLOPs, bytes, limits, tensors in checkpoints.

It imports neither torch nor Megatron-Core.
"""

from collections.abc import Iterator
from typing import Any

from phalanx.configs.arithmetic.layers import Mixer
from phalanx.configs.formats import in_bf16, width
from phalanx.configs.knobs import repair
from phalanx.configs.layout import largest_divisor
from phalanx.configs.schema import Config, LinearAttentionConfig, ModelConfig
from phalanx.moe.hf.weights import TensorPart, TensorRegion, rows_of, same
from phalanx.moe.saved_tensors import SavedTensors, TokenCounts

HEAD_DIM = 128  # channels of a query, key or value head of every published model
TAPS = 4  # width of the convolution: a token and the three before it
_CHUNK = 64  # positions of a chunk of flash-linear-attention's kernels
_AT = "model.linear_attention"


def qkv_dim(a: LinearAttentionConfig) -> int:
    """Channels of queries, keys and values together, which the convolution goes over."""
    return (2 * a.key_heads + a.value_heads) * HEAD_DIM


def input_dim(a: LinearAttentionConfig) -> int:
    """Outputs of the input projection: queries, keys, values, gates, two numbers per value head."""
    return qkv_dim(a) + a.value_heads * (HEAD_DIM + 2)


class LinearAttention(Mixer):
    """Gated DeltaNet (`extras.linear_attention.gated_delta_net`)."""

    def matrices(self, m: ModelConfig) -> list[tuple[int, int]]:
        a = m.linear_attention
        return [(m.hidden, input_dim(a)), (a.value_heads * HEAD_DIM, m.hidden)]

    def input_parts(self, m: ModelConfig) -> list[tuple[int, int]]:
        a = m.linear_attention
        heads = [(2, n * HEAD_DIM) for n in (a.key_heads, a.value_heads)]
        return [*heads, (2, a.value_heads)]

    def vectors(self, m: ModelConfig) -> int:
        a = m.linear_attention
        return TAPS * qkv_dim(a) + 2 * a.value_heads

    def norms(self, m: ModelConfig) -> int:
        return HEAD_DIM

    def products(self, m: ModelConfig) -> int:
        """The convolution, and four products with each value head's state, as in Megatron-LM."""
        a = m.linear_attention
        return TAPS * qkv_dim(a) + 4 * a.value_heads * HEAD_DIM**2

    def heads(self, m: ModelConfig) -> dict[str, int]:
        a = m.linear_attention
        return {f"{_AT}.key_heads": a.key_heads, f"{_AT}.value_heads": a.value_heads}

    def exchanged_channels(self, m: ModelConfig) -> int:
        """Outputs of the input projection to heads, inputs of the output projection to tokens."""
        a = m.linear_attention
        return input_dim(a) + a.value_heads * HEAD_DIM

    def problems(self, cfg: Config) -> Iterator[str]:
        a = cfg.model.linear_attention
        if a.value_heads % a.key_heads:
            fits = largest_divisor(a.value_heads, a.key_heads)
            reason = f"does not divide value_heads={a.value_heads}"
            yield repair(cfg, f"{_AT}.key_heads", reason, fits)
        if cfg.model.bias:
            reason = f"is not possible with linear attention ({_AT})"
            yield repair(cfg, "model.bias", reason, False)

    def not_capturable(self, cfg: Config) -> str | None:
        if in_bf16(cfg):
            return None
        return "linear attention in fp32 is that of torch, for checks of eager steps"

    def not_in_fp8_of_megatron(self, m: ModelConfig) -> str | None:
        channels = input_dim(m.linear_attention)
        if channels % 16 == 0:
            return None
        # Megatron-Core asserts it of every model with an FP8 recipe, though this layer stays bf16
        reason = "takes fp8_block only where linear attention projects its input to a multiple of "
        return reason + f"16 channels, and here it is {channels:,}"

    def megatron_fields(self, m: ModelConfig) -> dict[str, Any]:
        """Sizes only: `moe.model.gpt` decides layer by layer which layers have it."""
        return dict(
            linear_conv_kernel_dim=TAPS,
            linear_key_head_dim=HEAD_DIM,
            linear_value_head_dim=HEAD_DIM,
            linear_num_key_heads=m.linear_attention.key_heads,
            linear_num_value_heads=m.linear_attention.value_heads,
        )


def saved_tensors(cfg: Config, counts: TokenCounts) -> SavedTensors:
    """Saved bytes of flash-linear-attention and the modules around it.

    Context parallelism changes nothing: gradients in flight take less than the kernels did before.
    """
    a, values = cfg.model.linear_attention, cfg.model.linear_attention.value_heads * HEAD_DIM
    keys = 2 * a.key_heads * HEAD_DIM
    # The input projection, of which the convolution's input is a part, and a copy of its gates;
    # normalised queries and keys, and values, as the kernels read them; solved systems; the output,
    # and the input of the output projection.
    channels = input_dim(a) + values + keys + values + a.value_heads * _CHUNK + 2 * values
    scalars = 4 * 6 * a.value_heads  # fp32: decays and their sums, beta, norms
    tokens = counts.tokens // cfg.parallel.tensor
    return {"linear": tokens * (width(cfg) * channels + scalars)}


def backward_bytes(cfg: Config, counts: TokenCounts) -> int:
    """Peak of the backward pass beside the saved tensors."""
    heads = cfg.model.linear_attention.value_heads
    # States of all chunks and their gradients; gradients of queries and keys of every value head,
    # twice, and of values.
    states = 2 * heads * HEAD_DIM**2 // _CHUNK
    tokens = counts.tokens // cfg.parallel.tensor
    return tokens * width(cfg) * (states + 6 * heads * HEAD_DIM)


def regions(m: ModelConfig, key: str, name: str) -> Iterator[TensorRegion]:
    """Regions by prefixes: grouped by key head in a folder (`name`), by kind in a checkpoint."""
    a, d, name = m.linear_attention, HEAD_DIM, f"{name}linear_attn."
    shared = a.value_heads // a.key_heads
    joint = {
        "in_proj_qkvz": {"query": d, "key": d, "value": shared * d, "z": shared * d},
        "in_proj_ba": {"beta": shared, "alpha": shared},
    }
    for theirs, kinds in joint.items():
        shape = (a.key_heads * sum(kinds.values()), m.hidden)
        start = 0
        for head in range(a.key_heads):
            for kind, rows in kinds.items():
                part = TensorPart(f"{name}{theirs}.weight", shape, (start, start + rows), same)
                ours = (f"{key}in_proj.weight.{kind}", (a.key_heads * rows, m.hidden))
                yield TensorRegion(*ours, (head * rows, (head + 1) * rows), (part,))
                start += rows
    start, taps = 0, (qkv_dim(a), 1, TAPS)
    for kind, heads in (("query", a.key_heads), ("key", a.key_heads), ("value", a.value_heads)):
        rows = heads * d
        part = TensorPart(f"{name}conv1d.weight", taps, (start, start + rows), same)
        yield TensorRegion(f"{key}conv1d.weight.{kind}", (rows, 1, TAPS), (0, rows), (part,))
        start += rows
    for vector in ("A_log", "dt_bias"):
        yield from rows_of(f"{key}{vector}", (a.value_heads,), f"{name}{vector}")
    yield from rows_of(f"{key}out_norm.weight", (d,), f"{name}norm.weight")
    out = (m.hidden, a.value_heads * d)
    yield from rows_of(f"{key}out_proj.weight", out, f"{name}out_proj.weight")
