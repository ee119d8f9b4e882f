"""Bytes that Megatron-Core's experts save for the backward pass."""

from phalanx.configs.formats import fp8_row, width
from phalanx.configs.schema import Config
from phalanx.moe.experts import h_bytes
from phalanx.moe.saved_tensors import SavedTensors, TokenCounts


def saved_tensors(cfg: Config, counts: TokenCounts, *, fp8: bool) -> SavedTensors:
    """Saved bytes of the experts of a layer in FP8 or not, without the router's.

    Rows as received and sorted by expert, the activated product, and with biases the projection
    plus bias; in FP8 the transposed inputs of linear layers.
    """
    m, rows = cfg.model, counts.rows
    x, a = (fp8_row(n) if fp8 else width(cfg) * n for n in (m.hidden, m.moe.ffn))
    h = h_bytes(cfg, counts, fp8=fp8)
    return {"moe": h * (2 if m.bias else 1) + rows * x, "expert_a": rows * a}
