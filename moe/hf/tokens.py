"""`moe.data.tokenizer.special_tokens` for Hugging Face folders; errors are `ConversionError`."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from phalanx.moe.data.host_cache import DataError
from phalanx.moe.data.tokenizer import special_tokens as checks
from phalanx.moe.data.tokenizer.special_tokens import (
    GENERATION,
    Chosen,
    Ids,
    SpecialTokens,
    json_object,
)
from phalanx.moe.hf import ConversionError
from phalanx.moe.hf.config import besides

__all__ = [
    "GENERATION",
    "Chosen",
    "Ids",
    "SpecialTokens",
    "check_ids",
    "check_tokenizer",
    "imported_tokens",
    "special_tokens",
]


@contextmanager
def _conversion() -> Iterator[None]:
    """Raise what is wrong with data as an error of the conversion."""
    try:
        yield
    except DataError as error:
        raise ConversionError(str(error)) from None


check_ids = _conversion()(checks.check_ids)
check_tokenizer = _conversion()(checks.check_tokenizer)
special_tokens = _conversion()(checks.special_tokens)


@_conversion()
def imported_tokens(
    folder: Path, config: dict[str, Any], vocab_size: int, chosen: Chosen | None = None
) -> dict[str, Any]:
    """Facts of a folder without a knob: special tokens, published context, generation_config.json.

    Args:
        folder: the imported one.
        config: its config.json, with `chosen` in it.
        vocab_size: of the model.
        chosen: ids in place of the folder's.

    Raises:
        ConversionError: an id is outside the vocabulary, or the folder's tokenizer is.
    """
    chosen = chosen or {}
    extra = besides(config)
    check_ids("config.json", extra, vocab_size)
    fields = json_object(folder / GENERATION).items()
    generation = {n: chosen.get(n, v) for n, v in fields if chosen.get(n, v) is not None}
    check_ids(GENERATION, generation, vocab_size)
    remedy = "move its files elsewhere to import the weights alone"
    checks.check_vocabulary(folder, vocab_size, remedy)
    return extra | ({"generation_config": generation} if generation else {})
