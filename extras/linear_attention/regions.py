"""Tensors of linear attention in a checkpoint and in a folder of Hugging Face."""

from collections.abc import Iterator

from phalanx.configs.schema import ModelConfig
from phalanx.extras.linear_attention.facts import HEAD_DIM, TAPS, qkv_dim
from phalanx.moe.hf.weights import TensorPart, TensorRegion, rows_of, same


def regions(m: ModelConfig, key: str, name: str) -> Iterator[TensorRegion]:
    """Regions of linear attention: grouped by key head in a folder, by kind in a checkpoint.

    Args:
        m: the model.
        key: prefix of the checkpoint's tensors.
        name: prefix of the layer's tensors in the folder.
    """
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
