"""Number of tokens that a checkpoint's model was trained on."""

from collections.abc import Mapping
from typing import Any


def trained_tokens(common: Mapping[str, Any], sequence_length: int) -> int:
    """Tokens of the steps that are in a checkpoint's weights, those of its earlier data included.

    Args:
        common: what all ranks share of the checkpoint.
        sequence_length: of its configuration.
    """
    data = common.get("data", {})
    samples = data.get("consumed_samples", 0) - data.get("undone_samples", 0)
    samples -= common.get("skipped_samples", 0)
    return int(samples * sequence_length + common.get("carried", {}).get("tokens", 0))
