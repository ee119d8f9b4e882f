"""Text to ids: one rule for prepare_data, prompts and scored files.

A text may spell a special token, as a page about language models does. `plain` encodes it as the
text that it is (`encode_special_tokens` of Hugging Face's tokenizers), `special` makes it the
token, and `error` refuses the text. Invariant: without `special`, no text has a special token
inside, that which ends documents above all.
"""

import json
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models

from phalanx.moe.data.host_cache import DataError, digest


def load_tokenizer(path: str) -> Tokenizer:
    """A tokenizer that neither truncates nor pads, whatever its file says; else a DataError."""
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
    """True if two files of tokenizer.json give every text the same ids; a DataError for others."""
    return meaning(load_tokenizer(str(one))) == meaning(load_tokenizer(str(two)))


def byte_tokenizer() -> Tokenizer:
    """A tokenizer whose ids are bytes of UTF-8, each of which is a token as `<0x0A>`."""
    words = {f"<0x{number:02X}>": number for number in range(256)}
    tokenizer = Tokenizer(models.BPE(words, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def _without_offsets(part: Any) -> Any:
    if isinstance(part, dict):
        return {k: _without_offsets(v) for k, v in part.items() if k != "trim_offsets"}
    return [_without_offsets(each) for each in part] if isinstance(part, list) else part


PLAIN, SPECIAL, ERROR = "plain", "special", "error"
CHOICES = (PLAIN, SPECIAL, ERROR)
HELP = (
    "special tokens that a text spells: plain encodes them as text, special makes them tokens, "
    "error refuses the text (default: %(default)s)"
)
_NUL = b"\xc0\x80"


class Encoder(ABC):
    """Conversion of texts to ids, with one of `CHOICES`."""

    def __init__(self, choice: str) -> None:
        self.choice = choice

    @abstractmethod
    def encode(self, texts: Sequence[str]) -> Iterator[np.ndarray]:
        """Ids of each text, unsigned integers [tokens], without an end.

        Raises:
            DataError: a special token in a text has no other ids.
        """

    @abstractmethod
    def spelled(self, text: str) -> list[tuple[str, int]]:
        """Special tokens that a text spells, each with its first character's index."""

    def refused(self, text: str) -> tuple[str, str] | None:
        """Kind of fault and its place if `error` refuses a text."""
        if self.choice != ERROR or not (found := self.spelled(text)):
            return None
        token, at = found[0]
        place = f" at character {at} (--special-text plain encodes it as text)"
        return f"the special token {token!r} in the text", place


@cache
def encoder_of(path: str, ends: tuple[int, ...], choice: str) -> Encoder:
    """The encoder of a tokenizer.json, or of bytes for an empty path."""
    return TokenEncoder(load_tokenizer(path), ends, choice) if path else ByteEncoder(choice)


class ByteEncoder(Encoder):
    """Ids are bytes of UTF-8, and byte 0 ends documents.

    U+0000 in a text becomes bytes C0 80, as in Java's modified UTF-8, unless byte 0 is wanted.
    """

    def encode(self, texts: Sequence[str]) -> Iterator[np.ndarray]:
        for text in texts:
            raw = text.encode(errors="surrogateescape")
            if self.choice != SPECIAL:
                raw = raw.replace(b"\0", _NUL)
            yield np.frombuffer(raw, np.uint8)

    def spelled(self, text: str) -> list[tuple[str, int]]:
        return [(found[0], found.start()) for found in re.finditer("\0", text)]


def text_of_bytes(raw: bytes) -> str:
    """Text of ids of `ByteEncoder`; invalid UTF-8 becomes U+FFFD."""
    return raw.replace(_NUL, b"\0").decode(errors="replace")


class TokenEncoder(Encoder):
    """Ids of a tokenizer, which becomes the encoder's own: its settings change.

    The `ends` of documents are special whatever the tokenizer calls them.
    """

    def __init__(self, tokenizer: Tokenizer, ends: Iterable[int], choice: str) -> None:
        super().__init__(choice)
        added, ends = tokenizer.get_added_tokens_decoder(), set(ends)
        special = {i: token for i, token in added.items() if token.special}
        for end in ends - special.keys():
            if (content := tokenizer.id_to_token(end)) is not None:
                special[end] = _as_special(added.get(end, content))
        self._special = {token.content for token in special.values()}
        self._finder = _finder(tokenizer, {**added, **special})
        raw = tokenizer.normalizer is None or not any(t.normalized for t in special.values())
        words = "|".join(map(re.escape, self._special))
        self._quick = re.compile(words) if raw else None
        self._tokenizer = tokenizer
        if choice == SPECIAL:
            return
        tokenizer.add_special_tokens([special[end] for end in ends & special.keys()])
        tokenizer.encode_special_tokens = True
        self._unknown = _unknown(tokenizer)
        self._inside = np.zeros(max(tokenizer.get_vocab(True).values(), default=0) + 1, bool)
        self._inside[[i for i in special if i in ends or i != self._unknown]] = True

    def encode(self, texts: Sequence[str]) -> Iterator[np.ndarray]:
        for encoding in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False):
            row = np.array(encoding.ids, np.uint32)
            if self.choice != SPECIAL and self._inside[row].any():
                row = self._apart(row)
            yield row

    def spelled(self, text: str) -> list[tuple[str, int]]:
        if not self._special or (self._quick and not self._quick.search(text)):
            return []
        found = self._finder.encode(text, add_special_tokens=False)
        pairs = zip(found.tokens, found.offsets, strict=True)
        return [(token, start) for token, (start, _) in pairs if token in self._special]

    def _apart(self, row: np.ndarray) -> np.ndarray:
        """Replace special tokens that the model itself makes of their spelling, as Unigram does."""
        ids = (self._pieces(i) if self._inside[i] else [i] for i in row.tolist())
        return np.array([i for some in ids for i in some], np.uint32)

    def _pieces(self, number: int) -> list[int]:
        """Ids of the first character of a token's spelling, and of the others."""
        content = str(self._tokenizer.id_to_token(number))
        halves = [half for half in (content[:1], content[1:]) if half]
        ids = [token.id for half in halves for token in self._tokenizer.model.tokenize(half)]
        if not ids or number == self._unknown or self._unknown in ids or self._inside[ids].any():
            raise DataError(
                f"the tokenizer makes its special token {content!r} of text that has no other "
                "ids; give --special-text special to keep it"
            )
        return ids


def listed(spelled: Mapping[str, int]) -> str:
    """`2 '</s>', 1 '<s>'` of counts by token, the most frequent first."""
    return ", ".join(f"{count:,} {token!r}" for token, count in Counter(spelled).most_common())


def _as_special(token: AddedToken | str) -> AddedToken:
    if isinstance(token, str):
        return AddedToken(token, special=True, normalized=False)
    return AddedToken(
        token.content,
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=token.normalized,
        special=True,
    )


def _finder(tokenizer: Tokenizer, added: Mapping[int, AddedToken]) -> Tokenizer:
    """Tokenizer that finds added tokens as another one does, and drops all other text."""
    finder = Tokenizer(models.BPE())
    finder.normalizer = tokenizer.normalizer
    finder.add_tokens([added[i] for i in sorted(added)])
    return finder


def _unknown(tokenizer: Tokenizer) -> int | None:
    """Id of characters that the model does not know; its spelling may have it too."""
    if isinstance(tokenizer.model, models.Unigram):  # has no attribute for it
        number: int | None = json.loads(tokenizer.to_str())["model"]["unk_id"]
        return number
    name = tokenizer.model.unk_token
    return None if name is None else tokenizer.token_to_id(name)
