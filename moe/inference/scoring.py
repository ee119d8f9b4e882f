"""How well a model predicts files: loss, perplexity, bits per byte.

Files are read as training reads them: documents one after another, an end behind each, cut into
sequences. Here an end comes before the first as well, so that every token of the text is predicted
once; a token sees what lies before it in its sequence.

Legend: B sequences, S tokens of a sequence, N tokens of a file.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from phalanx.configs.addresses import is_address
from phalanx.moe.data.documents import KINDS, Recipe, cut, read
from phalanx.moe.data.host_cache import DataError
from phalanx.moe.data.token_files import open_corpus
from phalanx.moe.inference.codec import Codec

if TYPE_CHECKING:
    from phalanx.moe.inference.predictor import Predictor


@dataclass(frozen=True)
class Text:
    """The tokens of a file."""

    name: str
    ids_N: np.ndarray
    """All but the first are predicted."""
    text_bytes: int | None
    """UTF-8 bytes behind them; None if that is not known."""


@dataclass(frozen=True)
class Score:
    """Of a file, or of several together."""

    nats: float
    """Cross entropy, summed over tokens."""
    tokens: int
    text_bytes: int | None

    @property
    def loss(self) -> float:
        """Nats a token."""
        return self.nats / self.tokens

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss) if self.loss < 700 else math.inf

    @property
    def bits_per_byte(self) -> float | None:
        """Bits a byte of text, those of ends of documents included; None if bytes are not known."""
        return self.nats / math.log(2) / self.text_bytes if self.text_bytes else None

    def __add__(self, other: "Score") -> "Score":
        known = self.text_bytes is not None and other.text_bytes is not None
        text_bytes = (self.text_bytes or 0) + (other.text_bytes or 0) if known else None
        return Score(self.nats + other.nats, self.tokens + other.tokens, text_bytes)


def text_of(
    path: str,
    codec: Callable[[], Codec],
    *,
    key: str = "text",
    lines: bool = False,
    limit: int | None = None,
) -> Text:
    """The tokens of a .txt, .jsonl or .parquet file, or of a .bin/.idx pair without the ending.

    Args:
        path: of the file, or the prefix of the pair.
        codec: asked where there is text to tokenize.
        key: JSON key or Parquet column.
        lines: each line of a .txt is a document.
        limit: read whole documents until there are so many tokens.

    Raises:
        DataError: it cannot be read, or holds nothing to predict.
    """
    given = Path(path).expanduser()
    if Path(f"{given}.idx").is_file():
        found = _of_corpus(path, str(given), limit)
    elif given.suffix in KINDS and given.is_file():
        recipe = Recipe("", 0, "int64", key, lines)
        found = _of_documents(path, _documents(given, recipe), codec(), limit)
    elif is_address(path):
        raise DataError(f"{path} is an address; evaluate copies of its files in a folder")
    else:
        state = "is none of" if given.exists() else "does not exist; expected"
        raise DataError(f"{path} {state} {', '.join(KINDS)} or a prefix of .bin and .idx")
    if len(found.ids_N) < 2:
        raise DataError(f"{path} holds no tokens to predict; give a file with text")
    return found


def score(predictor: "Predictor", text: Text, context: int, batch: int) -> Iterator[Score]:
    """Scores of the parts of a text, `batch` sequences of `context` tokens each; their sum is its.

    Raises:
        DataError: a token is outside the vocabulary.
    """
    ids_N, vocab = text.ids_N, predictor.cfg.model.vocab_size
    if ids_N.min() < 0 or ids_N.max() >= vocab:
        wrong = ids_N[(ids_N < 0) | (ids_N >= vocab)][0]
        raise DataError(
            f"{text.name} has token id {wrong}, but model.vocab_size={vocab}: it was made with "
            "another tokenizer"
        )
    predicted = len(ids_N) - 1
    context = min(context, predicted)  # of a short text no row is filled up at length
    for start in range(0, predicted, batch * context):
        count = min(batch * context, predicted - start)
        rows = -(-count // context)
        # What fills the last sequence up is behind all that counts.
        row_N = np.zeros(rows * context + 1, np.int64)
        row_N[: count + 1] = ids_N[start : start + count + 1]
        tokens_BS = torch.from_numpy(row_N[:-1]).view(rows, context)
        labels_BS = torch.from_numpy(row_N[1:]).view(rows, context)
        loss_N = predictor.losses(tokens_BS, labels_BS).flatten()[:count]
        share = None if text.text_bytes is None else text.text_bytes if not start else 0
        yield Score(float(loss_N.double().sum()), count, share)


def _documents(path: Path, recipe: Recipe) -> Iterator[str]:
    for piece, _ in cut(str(path), KINDS[path.suffix], recipe, 1 << 62):
        yield from read(piece, recipe)


def _of_documents(name: str, texts: Iterator[str], codec: Codec, limit: int | None) -> Text:
    if not codec.ends:
        raise DataError("nothing tells which token ends a document: give --eod TOKEN")
    end, parts, tokens, text_bytes = codec.ends[0], [[codec.ends[0]]], 0, 0
    for text in texts:
        ids = codec.encode(text)
        if not ids:
            continue
        parts.append([*ids, end])
        tokens += len(ids) + 1
        text_bytes += len(text.encode())
        if limit is not None and tokens >= limit:
            break
    return Text(name, np.concatenate([np.array(part, np.int64) for part in parts]), text_bytes)


def _of_corpus(name: str, prefix: str, limit: int | None) -> Text:
    corpus = open_corpus(prefix)
    ids_N = np.memmap(f"{prefix}.bin", corpus.dtype, "r")
    described, count = corpus.sidecar, len(ids_N)
    if limit is not None and limit < count:
        ends = np.cumsum(corpus.lengths, dtype=np.int64)
        count = int(ends[int(np.searchsorted(ends, limit))])
    whole = described is not None and count == len(ids_N)
    first = [] if described is None else [described.eod]
    known = described.text_bytes if described is not None and whole else 0
    return Text(name, np.concatenate((np.array(first, np.int64), ids_N[:count])), known or None)
