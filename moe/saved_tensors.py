"""Types in which modules declare the bytes that they save for the backward pass.

A module's file has a function `saved_tensors`, beside the code that saves them; `moe.plan.page`
adds them up. Tensors that two modules share are declared by one of them. The configuration has
resolved kernels.
"""

from dataclasses import dataclass

from phalanx.configs.formats import is_fp8
from phalanx.configs.schema import Config

SavedTensors = dict[str, int]  # saved bytes of a layer, by group of tensors


@dataclass(frozen=True)
class TokenCounts:
    """Token and row counts of one rank's micro-batch."""

    tokens: int  # tokens before sequence parallelism splits them
    local_tokens: int
    """Tokens after sequence parallelism has split them over tensor ranks; input of the experts."""
    received: int  # received tokens, with one copy per rank
    rows: int  # budgeted expert rows
    worst_rows: int  # expert rows if all tokens of the expert-parallel group went to this rank


def saves_fp8_inputs(cfg: Config) -> bool:
    """Do linear layers save their inputs in FP8?"""
    return is_fp8(cfg) and cfg.precision.wgrad == "fp8"
