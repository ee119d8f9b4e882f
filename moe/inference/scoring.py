"""Scores of a model on files: loss, perplexity, bits per byte.

Files are read as in training: documents one after another, each followed by an end token, split
into sequences. An end token also precedes the first, so that every token of the text is predicted
once. With `data.document_mask` a token attends to its own document only, whose first token is then
not predicted, as in training.

Legend: B sequences, S tokens of a sequence, N tokens of a file.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING

import numpy as np
import torch

from phalanx.configs.addresses import is_address
from phalanx.configs.tables.rows import MASKED_TEXT
from phalanx.moe.data.host_cache import DataError
from phalanx.moe.data.inputs import NAMES, kind_of
from phalanx.moe.data.packing import positions
from phalanx.moe.data.text_rows import Reading, Refused, cut, read
from phalanx.moe.data.token_files import open_corpus
from phalanx.moe.data.tokenizer.codec import Codec

if TYPE_CHECKING:
    from phalanx.moe.inference.predictor import Predictor


@dataclass(frozen=True)
class Text:
    """The tokens of a file."""

    name: str
    ids_N: np.ndarray
    """All but the first are predicted; with `position_N` all but the first of each document."""
    text_bytes: int | None  # UTF-8 bytes of the text; None if that is not known
    position_N: np.ndarray | None = None
    """Position of each token in its document; None if attention crosses documents."""
    spelled: Mapping[str, int] = field(default_factory=dict)
    """Special tokens that the text spells, by token; empty for a pair."""
    counted_N: np.ndarray | None = None
    """bool, tokens that count by the loss mask of a pair; None: all."""

    @property
    def predicted(self) -> int:
        """Number of predicted tokens."""
        return int(np.count_nonzero(self.counts(1, len(self.ids_N))))

    def counts(self, first: int, end: int) -> np.ndarray:
        """bool [end - first]: the predicted ones of some tokens, which are not the first of all."""
        counted = self.counted_N
        inside = np.ones(end - first, bool) if counted is None else counted[first:end]
        return inside if self.position_N is None else inside & (self.position_N[first:end] != 0)


@dataclass(frozen=True)
class Score:
    """Score of a file, or of several together."""

    nats: float  # cross entropy, summed over tokens
    tokens: int
    text_bytes: int | None
    firsts: int = 0  # further tokens, the first of their document, which are not predicted

    @property
    def loss(self) -> float:
        """Nats per token."""
        return self.nats / self.tokens

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss) if self.loss < 700 else math.inf

    @property
    def bits_per_byte(self) -> float | None:
        """Bits per byte of text, end tokens included; None if the number of bytes is not known.

        A token that is not predicted counts as the average of the others.
        """
        if not self.text_bytes:
            return None
        return self.loss * (self.tokens + self.firsts) / math.log(2) / self.text_bytes

    def __add__(self, other: "Score") -> "Score":
        known = self.text_bytes is not None and other.text_bytes is not None
        text_bytes = (self.text_bytes or 0) + (other.text_bytes or 0) if known else None
        tokens, firsts = self.tokens + other.tokens, self.firsts + other.firsts
        return Score(self.nats + other.nats, tokens, text_bytes, firsts)


def text_of(
    path: str,
    codec: Callable[[], Codec],
    *,
    reading: Reading = Reading(),  # noqa: B008  (frozen)
    limit: int | None = None,
    apart: bool = False,
    progress: Callable[[int], object] = lambda n: None,
) -> Text:
    """The tokens of a file with text, or of a .bin/.idx pair without the ending.

    Args:
        path: of the file, or the prefix of the pair.
        codec: called if there is text to tokenize.
        limit: number of tokens after which no further document is read.
        apart: attention does not cross documents.
        progress: called with bytes of text, or of the pair, as they are read.

    Raises:
        DataError: it cannot be read, or holds nothing to predict.
    """
    local = Path(path).expanduser()
    if Path(f"{local}.idx").is_file():
        text = _of_corpus(path, str(local), limit, apart)
        progress(text.ids_N.nbytes)
    elif kind_of(local) and local.is_file():
        text = _of_documents(path, local, reading, codec(), limit, apart, progress)
    elif is_address(path):
        raise DataError(f"{path} is an address; evaluate copies of its files in a folder")
    else:
        state = "is none of" if local.exists() else "does not exist; expected"
        raise DataError(f"{path} {state} {NAMES}, or a prefix of .bin and .idx")
    if not text.predicted:
        raise DataError(f"{path} holds no tokens to predict; name a file with text")
    return text


def score(predictor: "Predictor", text: Text, context: int, batch: int) -> Iterator[Score]:
    """Scores of a text in parts of `batch` sequences of `context` tokens; they add up to its score.

    Raises:
        DataError: a token is outside the vocabulary.
    """
    ids_N, vocab = text.ids_N, predictor.cfg.model.vocab_size
    if ids_N.min() < 0 or ids_N.max() >= vocab:
        wrong = ids_N[(ids_N < 0) | (ids_N >= vocab)][0]
        raise DataError(
            f"{text.name} has token id {wrong}, but model.vocab_size={vocab}: it was prepared with "
            "another tokenizer"
        )
    predicted = len(ids_N) - 1
    context = min(context, predicted)  # a short text needs little padding
    for start in range(0, predicted, batch * context):
        count = min(batch * context, predicted - start)
        rows = -(-count // context)
        # Padding of the last sequence comes after all tokens that count.
        row_N = np.zeros(rows * context + 1, np.int64)
        row_N[: count + 1] = ids_N[start : start + count + 1]
        tokens_BS = torch.from_numpy(row_N[:-1]).view(rows, context)
        labels_BS = torch.from_numpy(row_N[1:]).view(rows, context)
        share = None if text.text_bytes is None else text.text_bytes if not start else 0
        counts_N = torch.from_numpy(text.counts(start + 1, start + count + 1))
        tokens = int(counts_N.sum())
        position_BS, left_out = None, 0
        if text.position_N is not None:
            # No document starts in the padding.
            position_N = torch.full((rows * context,), context)
            position_N[:count] = torch.from_numpy(text.position_N[start : start + count])
            # The rest of a document in another sequence is a separate piece.
            position_BS = position_N.view(rows, context).minimum(torch.arange(context))
            left_out = count - tokens + (not start)  # the file's first token is no label either
        loss_N = predictor.losses(tokens_BS, labels_BS, position_BS).flatten()[:count]
        nats = float((loss_N.double().cpu() * counts_N).sum())
        yield Score(nats, tokens, share, left_out)


def _documents(path: Path, reading: Reading, refused: Refused) -> Iterator[str]:
    for piece, _ in cut(str(path), reading, 1 << 62):
        yield from read(piece, reading, refused)


def _of_documents(
    name: str,
    path: Path,
    reading: Reading,
    codec: Codec,
    limit: int | None,
    apart: bool,
    progress: Callable[[int], object],
) -> Text:
    if not codec.ends:
        raise DataError("the token that ends a document is not known: give --eod TOKEN")
    end, parts, tokens, text_bytes = codec.ends[0], [[codec.ends[0]]], 0, 0
    spelled, encoder = Counter[str](), codec.encoder
    for text in _documents(path, reading, encoder.refused):
        ids = codec.encode(text)
        if not ids:
            continue
        parts.append([*ids, end])
        tokens += len(ids) + 1
        spelled.update(token for token, _ in encoder.spelled(text))
        size = len(text.encode())
        text_bytes += size
        progress(size)
        if limit is not None and tokens >= limit:
            break
    ids_N = np.concatenate([np.array(part, np.int64) for part in parts])
    if apart and len(parts) > 1:
        position_N = positions(np.array([len(part) for part in parts[1:]]))
        return Text(name, ids_N[1:], text_bytes, position_N, spelled)
    return Text(name, ids_N, text_bytes, spelled=spelled)


def _of_corpus(name: str, prefix: str, limit: int | None, apart: bool) -> Text:
    corpus = open_corpus(prefix)
    ids_N = np.memmap(f"{prefix}.bin", corpus.dtype, "r")
    described, count, lengths = corpus.sidecar, len(ids_N), corpus.lengths
    if limit is not None and limit < count:
        ends = np.cumsum(lengths, dtype=np.int64)
        lengths = lengths[: int(np.searchsorted(ends, limit)) + 1]
        count = int(ends[len(lengths) - 1])
    complete = described is not None and count == len(ids_N)
    known = described.text_bytes if described is not None and complete else 0
    position_N = positions(lengths) if apart else None  # of the tokens read: eight bytes per token
    if described is not None and described.labels:  # the first token of a row never counts
        counted_N, position_N = resolve_name(MASKED_TEXT)(corpus, count, position_N)
        masked_N = ids_N[:count].astype(np.int64)
        return Text(name, masked_N, None, position_N, counted_N=counted_N)
    if apart:
        return Text(name, ids_N[:count].astype(np.int64), known or None, position_N)
    first = [] if described is None else [described.eod]
    return Text(name, np.concatenate((np.array(first, np.int64), ids_N[:count])), known or None)
