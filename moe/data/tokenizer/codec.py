"""Text to the tokens that a checkpoint was trained on, and back."""

from dataclasses import asdict, dataclass
from functools import cached_property
from os.path import commonprefix
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from phalanx.configs import programs
from phalanx.configs.schema import Config
from phalanx.moe.data.host_cache import DataError
from phalanx.moe.data.token_files import BYTES, BYTES_EOD
from phalanx.moe.data.tokenizer.encoder import (
    PLAIN,
    ByteEncoder,
    Encoder,
    TokenEncoder,
    load_tokenizer,
    text_of_bytes,
)
from phalanx.moe.data.tokenizer.special_tokens import (
    check_of_data,
    check_of_model,
    sidecars,
    special_tokens,
    tokenizer_of_data,
    tokenizers_of,
)


@dataclass(frozen=True)
class Codec:
    """A tokenizer, and the tokens that end a document."""

    tokenizer: Tokenizer | None
    """None for bytes of UTF-8; else the codec's own, whose settings change."""
    ends: tuple[int, ...]  # that of the training data first; empty if none is known
    special_text: str = PLAIN  # `choice` of the encoder

    @cached_property
    def encoder(self) -> Encoder:
        """The conversion of text to ids, which is that of the data."""
        if self.tokenizer is None:
            return ByteEncoder(self.special_text)
        return TokenEncoder(self.tokenizer, self.ends, self.special_text)

    def encode(self, text: str) -> list[int]:
        """Ids of a text, without an end. Bytes that are not UTF-8 (surrogateescape) stay bytes.

        Raises DataError for such bytes if a tokenizer needs UTF-8, and for refused special tokens.
        """
        if self.tokenizer is not None and shown(text) != text:
            raise DataError(f"{shown(text)!r} is not UTF-8, which its tokenizer needs")
        if fault := self.encoder.refused(text):
            raise DataError("".join(fault))
        (row,) = self.encoder.encode([text])
        return [int(i) for i in row]

    def decode(self, ids: list[int]) -> str:
        """Text of ids; invalid UTF-8 becomes U+FFFD."""
        if self.tokenizer is None:
            return text_of_bytes(bytes(i if i < 256 else 0xFF for i in ids))
        return str(self.tokenizer.decode(ids, skip_special_tokens=False))

    def continuation(self, before: list[int], ids: list[int]) -> str:
        """Text of `ids` that follows the text of `before`, which may be empty.

        Decoded together, because decoders such as Llama's drop the leading space of a text.
        """
        full = self.decode([*before, *ids])
        return full[len(commonprefix((self.decode(before), full))) :]  # noqa: RUF071


def shown(text: str) -> str:
    """A text that can be printed; bytes that are not UTF-8 become U+FFFD."""
    return text.encode(errors="surrogateescape").decode(errors="replace")


def codec_of(
    common: dict[str, Any],
    vocab_size: int,
    tokenizer: str | None,
    eod: str | None = None,
    *,
    special_text: str = PLAIN,
    remedy: str = "give --tokenizer FILE (a tokenizer.json), or --tokenizer bytes",
    end: str = "give --eod TOKEN",
) -> Codec:
    """The codec of a run's data, or of the tokenizer that a person names.

    Args:
        common: of the checkpoint: its configuration, and facts of an imported model.
        tokenizer: `bytes`, a tokenizer.json or its folder; None takes that of the data.
        eod: token that ends a document, if neither data nor model define one.
        special_text: `choice` of the encoder.
        remedy: advice on a tokenizer that is unknown or wrong.
        end: advice on special tokens that the model does not have.

    Raises:
        DataError: the tokenizer is not known, not readable, or not that of the data.
    """
    data = common.get("config", {}).get("data", {})
    described = sidecars(data)
    if tokenizer is None:
        known_one = tokenizer_of_data(data)
        tokenizer = None if known_one is None else str(known_one)
    if tokenizer is None:
        names = tokenizers_of(described)
        known = f"the data was made with {names}" if names else "the data names no tokenizer"
        raise DataError(f"{known}: {remedy}")
    if tokenizer == BYTES:
        if vocab_size < 256:
            raise DataError(f"bytes do not fit model.vocab_size={vocab_size}: {remedy}")
        if eod is not None:
            raise DataError(f"--eod is for a tokenizer.json; byte {BYTES_EOD} ends documents")
        if names := tokenizers_of(s for s in described if s.tokenizer_sha256):
            raise DataError(f"tokenizer bytes is not that of the data, which is {names}: {remedy}")
        return Codec(None, (BYTES_EOD,), special_text)
    path = Path(tokenizer).expanduser()
    path = path / "tokenizer.json" if path.is_dir() else path
    if not path.is_file():
        raise DataError(f"tokenizer {path} does not exist; {remedy}")
    loaded = load_tokenizer(str(path))
    check_of_data(path, data)
    check_of_model(path, loaded.get_vocab(with_added_tokens=True), vocab_size)
    if eod is None:
        base = common.get("huggingface")
        base = base if isinstance(base, dict) else {}
        ends = special_tokens(data, path.parent, base, vocab_size, remedy=end).ends
        return Codec(loaded, ends, special_text)
    number = loaded.token_to_id(eod)
    if number is None:
        raise DataError(f"--eod {eod} is not a token of {path}")
    return Codec(loaded, (number,), special_text)


def codec_of_run(cfg: Config) -> Codec:
    """The codec of a run that samples; a DataError if its data does not define a tokenizer."""
    data = {"config": {"data": asdict(cfg.data)}}
    remedy = programs.here(
        "run.sample_every needs <prefix>.tokenizer.json next to each prefix of data.blend, where "
        "prepare_data.py writes it; copy it there, or set run.sample_every=0"
    )
    end = "correct that file, or set run.sample_every=0"
    return codec_of(data, cfg.model.vocab_size, None, remedy=remedy, end=end)
