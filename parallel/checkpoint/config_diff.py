"""May a run go on from a checkpoint of another configuration?

Configurations are plain nested dicts. What the saved weights and the data cursor depend on must
agree: architecture, dtype of the weights, source and order of the tokens, kind of optimizer.
Layout, kernels, recipe of FP8, schedule, length and logging may change, and are reported.
"""

from typing import Any

from phalanx.configs.arithmetic.data_stages import begun
from phalanx.configs.knobs import overrides
from phalanx.configs.tables.optimizers import OPTIMIZERS
from phalanx.parallel.checkpoint.saved_knobs import CheckpointMismatch, leaves, shown, understood
from phalanx.parallel.checkpoint.start import start_over_override

_FIXED = (
    "model",
    "data.source",
    "data.blend",
    "data.stages",
    "data.split",
    "data.sequence_length",
    "data.seed",
    "optim.kind",
)
_STAGES = "data.stages"
# Parts of the model section that are not its architecture.
_FREE = (
    "model.name",
    "model.init_std",
    "model.mtp_loss",
    "model.moe.router.aux_loss",
    "model.moe.router.seq_aux_loss",
    "model.moe.router.global_aux_loss",
    "model.moe.router.z_loss",
    "model.moe.router.force_balance",
    "model.moe.router.replay",
)
# Zero or not is architecture (a bias rate of 0 has no bias); the value is not.
_SWITCHES = ("model.moe.router.bias_rate",)
# Whose weights have a dtype of their own; all others have bf16 ones with fp32 masters.
_WIDE = {"precision.recipe": "fp32"}
_FEW = 8  # differences that a person reads one by one


def compare(saved: dict[str, Any], current: dict[str, Any], samples: int = 0) -> list[str]:
    """Differences that a resumed run may have, as `key old -> new`.

    Args:
        saved: configuration of the checkpoint.
        current: configuration of this run. A knob that only one of them knows is not compared.
        samples: number of samples that the checkpoint has passed; later stages may differ.

    Raises:
        CheckpointMismatch: a knob that must agree does not; the message is a diff with the way out.
            Or the checkpoint has one that must be understood and is not.
    """
    old, new = understood(saved).values, dict(leaves(current))
    if any(key.startswith("optim.") for key in old):  # weights alone go with any optimizer
        old.setdefault("optim.kind", next(iter(OPTIMIZERS)))  # of versions that had no other
    if "data.blend" in old:
        old.setdefault(_STAGES, [])  # of versions that had none
    changed = [key for key in old if key in new and old[key] != new[key]]
    refused = [key for key in changed if must_agree(key, old[key], new[key])]
    if _STAGES in refused:
        passed = samples, old.get("data.sequence_length", 1)
        if begun(old[_STAGES], *passed) == begun(new[_STAGES], *passed):
            refused.remove(_STAGES)
    if refused:
        raise CheckpointMismatch(_refusal(refused, old, new))
    return [f"{key} {shown(old[key])} -> {shown(new[key])}" for key in changed]


def must_agree(key: str, old: Any, new: Any) -> bool:
    """Return whether weights and data cursor depend on a knob with two different values."""
    if key in _FREE:
        return False
    if key in _SWITCHES:
        return bool(old) != bool(new)
    if key in _WIDE:
        return (old == _WIDE[key]) != (new == _WIDE[key])
    return any(key == fixed or key.startswith(fixed + ".") for fixed in _FIXED)


def _refusal(keys: list[str], old: dict[str, Any], new: dict[str, Any]) -> str:
    rows = [("", "checkpoint", "now"), *((k, shown(old[k]), shown(new[k])) for k in keys)]
    widths = [max(len(row[i]) for row in rows) for i in range(2)]
    table = [f"  {a:<{widths[0]}}  {b:<{widths[1]}}  {c}" for a, b, c in rows]
    values = "the values of the checkpoint"
    if len(keys) <= _FEW:
        values = overrides({k: old[k] for k in keys})
    else:
        table[_FEW + 1 :] = [f"  and {len(keys) - _FEW} more"]
    return "\n".join(
        [
            "this run is not configured as its checkpoint:",
            *table,
            f"go on with {values},",
            f"or start anew with another run.name or with {start_over_override()} run.resume=never",
        ]
    )
