"""Conversion of a vocabulary of tiktoken to tokenizer.json of Hugging Face.

A line of the file is a token in base64 and its rank. BPE merges the pair of the lowest rank first,
so that the merge that makes a token is the last one when its bytes are merged by the ranks below.
"""

import base64
from itertools import pairwise
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

END = "<|endoftext|>"  # token that ends a document; its id follows those of the file, as in GPT-2


def convert(data: bytes) -> Tokenizer:
    """Tokenizer of a byte-level vocabulary, the content of a .tiktoken file, that splits as GPT-2.

    Raises ValueError for a line that is no token and rank.
    """
    ranks = {}
    for number, line in enumerate(data.splitlines(), 1):
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError:
            raise ValueError(f"line {number} of the vocabulary is no token and rank") from None
    letters = _letters()

    def spelled(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    by_rank = sorted(ranks, key=lambda token: ranks[token])
    merges = [
        (spelled(left), spelled(right))
        for token in by_rank
        if len(token) > 1
        for left, right in [_halves(token, ranks)]
    ]
    vocabulary = {spelled(token): rank for token, rank in ranks.items()}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END])
    return tokenizer


def write(data: bytes, path: Path) -> None:
    """Write tokenizer.json of a .tiktoken file."""
    convert(data).save(str(path))


def _halves(token: bytes, ranks: dict[bytes, int]) -> tuple[bytes, bytes]:
    """The two tokens whose merge makes a token."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        pairs = [(ranks.get(a + b, len(ranks)), i) for i, (a, b) in enumerate(pairwise(parts))]
        rank, i = min(pairs)
        if rank >= ranks[token]:
            raise ValueError(f"no merge makes the token {token!r} of the vocabulary")
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return parts[0], parts[1]


def _letters() -> list[str]:
    """Printable character of each byte, as GPT-2's vocabulary spells them."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]
