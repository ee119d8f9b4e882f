"""Files of tokenizers, and what two of them have in common."""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models

from phalanx.moe.data.host_cache import DataError, digest


def load_tokenizer(path: str) -> Tokenizer:
    """A tokenizer that neither truncates nor pads, whatever its file says.

    Raises:
        DataError: the file is no tokenizer.json.
    """
    try:
        tokenizer = Tokenizer.from_file(path)
    except Exception as error:  # the library raises Exception itself
        raise DataError(f"{path} is not a tokenizer.json of Hugging Face: {error}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def meaning(tokenizer: Tokenizer) -> str:
    """Digest of all that gives a text its ids: vocabulary, merges, added tokens, how text is split.

    Files of one meaning may differ in their form, and in what they add or do after that.
    """
    content = json.loads(tokenizer.to_str())  # the library's form, whatever the file's
    splitting = _without_offsets(content["pre_tokenizer"])
    return digest([content["model"], content["normalizer"], splitting, content["added_tokens"]])


def same_meaning(one: Path, two: Path) -> bool:
    """Do two files of tokenizer.json give every text the same ids?

    Raises:
        DataError: a file is no tokenizer.json.
    """
    return meaning(load_tokenizer(str(one))) == meaning(load_tokenizer(str(two)))


def byte_tokenizer() -> Tokenizer:
    """A tokenizer whose ids are bytes of UTF-8, each of which is a token as `<0x0A>`."""
    words = {f"<0x{number:02X}>": number for number in range(256)}
    tokenizer = Tokenizer(models.BPE(words, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def _without_offsets(part: Any) -> Any:
    """A part without the option that moves offsets of tokens and no ids."""
    if isinstance(part, dict):
        return {k: _without_offsets(v) for k, v in part.items() if k != "trim_offsets"}
    return [_without_offsets(each) for each in part] if isinstance(part, list) else part
