"""Work of attention on ranks that share sequences of packed documents, by how tokens are split.

    python -m phalanx.scripts.lab.context.balance

A query sees the keys of its own document, so that work is the number of such pairs. Every layer
waits for the rank with most of them: a figure is the sum of these maxima over that of the means,
and 1.00 is even. Splits of a sequence over R ranks:

    contiguous    rank r has the r-th part of the tokens
    zigzag        chunks r and 2 R - 1 - r of 2 R, as Megatron-Core deals them out
                  (`extras.context.keys`)
    documents     chunks r and 2 R - 1 - r of each document
    heads         all tokens, some of the heads (`extras.context.heads`)

Lengths of documents, which follow one another in random order and are cut at ends of sequences:

    one         of a whole sequence: what zigzag is for
    embedded    of data=embedded: files of Python's standard library, in bytes
    qwen3       three of four have 1/2 to all of a sequence's tokens, the fourth 1/8 to 1/2, evenly
                within each: 16,384 to 32,768 and 4,096 to 16,384 of 32,768 in the long stage of
                Qwen3 (arXiv 2505.09388, section 3.2)
    mixed       half of the tokens of documents of 1/2 to all of a sequence, half of `embedded`:
                long next to short

The second table is about documents that ranks need not share, as they are no longer than a rank's
tokens: their part of all tokens, and what an exchange without them would save of a step by the
estimate of a dry run, if all else stayed as even as it is.
"""

from collections.abc import Callable, Iterator
from itertools import chain, islice

import numpy as np
from numpy.typing import NDArray

from phalanx.configs.layout import ranks_of_experiment
from phalanx.configs.load import load
from phalanx.configs.tables.machines import MACHINES
from phalanx.moe.data.host_cache import cache_folder
from phalanx.moe.data.packing import positions
from phalanx.moe.data.token_files import embedded
from phalanx.moe.plan.cost.step_time import step_time
from phalanx.moe.plan.described import resolved

Ints = NDArray[np.int64]
TOKENS = 1 << 24  # of each figure


def embedded_lengths() -> Ints:
    """Tokens of the documents of data=embedded."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    corpus = IndexedDataset(embedded(cache_folder("")))
    return np.asarray(corpus.sequence_lengths, dtype=np.int64)


def _whole(length: int, _: np.random.Generator) -> Ints:
    return np.array([length])


def _embedded(length: int, _: np.random.Generator) -> Ints:
    return embedded_lengths()


def _qwen3(length: int, random: np.random.Generator) -> Ints:
    long = random.integers(length // 2, length + 1, 3000)
    return np.concatenate([long, random.integers(length // 8, length // 2, 1000)])


def _mixed(length: int, random: np.random.Generator) -> Ints:
    short = embedded_lengths()
    number = max(1, round(short.sum() / (0.75 * length)))
    return np.concatenate([short, random.integers(length // 2, length + 1, number)])


LENGTHS: dict[str, Callable[[int, np.random.Generator], Ints]] = {
    "one": _whole,
    "embedded": _embedded,
    "qwen3": _qwen3,
    "mixed": _mixed,
}


def sequences(lengths: Ints, length: int, seed: int) -> Iterator[list[int]]:
    """Tokens of the pieces of documents in each of endless sequences."""
    random = np.random.default_rng(seed)
    left, pieces = length, list[int]()
    for tokens in chain.from_iterable(random.permutation(lengths) for _ in iter(int, 1)):
        while tokens:
            pieces.append(int(min(tokens, left)))
            tokens, left = tokens - pieces[-1], left - pieces[-1]
            if not left:
                yield pieces
                left, pieces = length, []


def contiguous(pieces: list[int], ranks: int) -> Ints:
    """Rank of each token."""
    tokens = np.arange(sum(pieces))
    return tokens * ranks // len(tokens)


def zigzag(pieces: list[int], ranks: int) -> Ints:
    """Rank of each token."""
    tokens = np.arange(sum(pieces))
    return _of_chunk(tokens * 2 * ranks // len(tokens), ranks)


def by_document(pieces: list[int], ranks: int) -> Ints:
    """Rank of each token."""
    of_token = np.repeat(np.array(pieces), pieces)
    return _of_chunk(positions(np.array(pieces)) * 2 * ranks // of_token, ranks)


def _of_chunk(chunk: Ints, ranks: int) -> Ints:
    return np.minimum(chunk, 2 * ranks - 1 - chunk)


SPLITS = {"contiguous": contiguous, "zigzag": zigzag, "documents": by_document}


def imbalance(rows: list[list[int]], split: Callable[[list[int], int], Ints], ranks: int) -> float:
    """Sum of the most pairs of a rank in each sequence, over that of the means."""
    most = mean = 0.0
    for pieces in rows:
        seen = positions(np.array(pieces)) + 1
        pairs = np.bincount(split(pieces, ranks), weights=seen, minlength=ranks)
        most, mean = most + pairs.max(), mean + pairs.mean()
    return most / mean


def drawn(name: str, length: int) -> list[list[int]]:
    """Sequences of documents with the lengths of that name."""
    lengths = LENGTHS[name](length, np.random.default_rng(0))
    return list(islice(sequences(lengths, length, seed=1), TOKENS // length))


def pairs(rows: list[list[int]]) -> float:
    """Pairs of a query and a key, over those of one document in each sequence."""
    found = sum(n * (n + 1) for row in rows for n in row)
    return found / sum(sum(row) * (sum(row) + 1) for row in rows)


def kept(rows: list[list[int]], most: int) -> float:
    """Part of the tokens whose documents have no more than `most`."""
    return sum(n for row in rows for n in row if n <= most) / sum(map(sum, rows))


def saving(experiment: str, rows: list[list[int]]) -> tuple[float, float, float]:
    """Parts of a step that attention and the exchange of context ranks take, and tokens kept."""
    cfg, world = load([f"experiment={experiment}"]), ranks_of_experiment(experiment)
    machine = MACHINES[cfg.run.machine]
    step = step_time(resolved(cfg, world, machine.node_gpus), world, machine)
    attention = step.attention * pairs(rows)
    whole = step.total - step.attention + attention
    share = cfg.data.sequence_length // cfg.parallel.context
    return attention / whole, step.context / whole, kept(rows, share)


def main() -> None:
    """Print both tables of docs/long_context.md, in half a minute."""
    print("| tokens, ranks | documents | mean length | contiguous | zigzag | documents | heads |")
    print("|---|---|---:|---:|---:|---:|---:|")
    for length, ranks in ((32768, 2), (131072, 8), (1048576, 8)):
        for name in LENGTHS:
            rows = drawn(name, length)
            tokens = sum(map(sum, rows)) / sum(map(len, rows))
            found = " | ".join(f"{imbalance(rows, each, ranks):.2f}" for each in SPLITS.values())
            print(f"| {length:,}, {ranks} | `{name}` | {tokens:,.0f} | {found} | 1.00 |")
    print("\n| experiment | documents | attention | exchange | kept whole | saved at most |")
    print("|---|---|---:|---:|---:|---:|")
    for experiment in ("qwen3_30b_128k_8gpu", "qwen3_30b_1m_32gpu"):
        length = load([f"experiment={experiment}"]).data.sequence_length
        cases = {f"`{name}`": drawn(name, length) for name in LENGTHS}
        cases |= {f"all of {n:,}": [[n] * (length // n)] for n in (4096, 32768, 131072)}
        for name, rows in cases.items():
            attention, exchange, whole = saving(experiment, rows)
            figures = " | ".join(f"{x:.1%}" for x in (attention, exchange, whole, exchange * whole))
            print(f"| `{experiment}` | {name} | {figures} |")


if __name__ == "__main__":
    main()
