"""Positions of documents in rows, the masks that follow from it, and how sequences are packed."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from phalanx.moe.data.host_cache import DataError
from phalanx.moe.data.loader import Loader, Samples
from phalanx.moe.data.packing import packing, pieces, positions
from phalanx.moe.data.token_files import open_corpus
from tests.moe.data.test_loader import build, numbers, write

BEGINS = 10_000
"""Ids of the first tokens of documents, from here on; the others count from 1."""
VOCAB = 20_000


def documents(lengths: Sequence[int], first: int = BEGINS) -> list[list[int]]:
    """Token i of a document is i, but for the first."""
    return [[first + k, *range(1, n)] if n else [] for k, n in enumerate(lengths)]


def expected(row: np.ndarray) -> list[int]:
    """Positions from the ids: a row begins a piece wherever it begins in a document."""
    found: list[int] = []
    for token in row:
        found.append(0 if not found or token >= BEGINS else found[-1] + 1)
    return found


def test_positions_and_pieces() -> None:
    lengths = np.array([3, 0, 1, 2])
    assert positions(lengths).tolist() == [0, 1, 2, 0, 0, 1]
    assert pieces(positions(lengths)).tolist() == [3, 1, 2]


@pytest.mark.parametrize(
    "lengths",
    [
        (7, 1, 30, 2, 64, 5, 11, 3),  # some longer than a sequence
        (10, 10, 10, 10),  # ends at the ends of sequences, where rows overlap
        (11, 11, 11, 11),
        (1,) * 40,
        (4, 0, 9, 0, 0, 20, 6),
        (95,),
    ],
)
def test_rows_know_their_documents(tmp_path: Path, lengths: tuple[int, ...]) -> None:
    prefix = write(tmp_path / "a", documents(lengths))
    rows = 3 * ((sum(lengths) - 1) // 10)  # three epochs, in other orders
    train, _ = build(tmp_path, [prefix], rows, vocab=VOCAB)
    for i in range(rows):
        place = train.positions(i)
        assert place.dtype == np.int64 and place.tolist() == expected(train[i])


def test_rows_of_a_blend_know_their_documents(tmp_path: Path) -> None:
    one = write(tmp_path / "a", documents((7, 1, 30, 2)))
    two = write(tmp_path / "b", documents((12, 50, 3), first=BEGINS + 100))
    train, _ = build(tmp_path, ["0.5", one, "0.5", two], 24, vocab=VOCAB)
    assert {train.source(i) for i in range(24)} == {0, 1}
    for i in range(24):
        assert train.positions(i).tolist() == expected(train[i])


def test_documents_of_several_sequences_are_whole(tmp_path: Path) -> None:
    """Positions, masks, counts and parts go by documents, whatever sequences an index has."""
    texts = documents((15,) * 40)
    many = write(tmp_path / "many", texts, cuts=[5, 4, 6])
    one = write(tmp_path / "one", texts)
    settings = dict(vocab=VOCAB, split="75,25")
    train, valid = build(tmp_path, [many], 90, 28, **settings)
    others = build(tmp_path, [one], 90, 28, **settings)
    assert valid is not None and others[1] is not None
    for rows, alone, held in ((train, others[0], 30), (valid, others[1], 10)):
        (source,) = rows.sources
        assert (source.documents, source.tokens) == (held, 15 * held)
        assert source == replace(alone.sources[0], name="many", stamp=source.stamp)
        for i in range(len(rows)):
            assert np.array_equal(rows[i], alone[i])
            assert rows.positions(i).tolist() == expected(rows[i])
    begun = [
        {t for i in range(len(r)) for t in r[i].tolist() if t >= BEGINS} for r in (train, valid)
    ]
    assert not begun[0] & begun[1] and begun[0] | begun[1] == {*range(BEGINS, BEGINS + 40)}
    loader = Loader(train, 2, 2, 0, 1, documents=True)
    for batch in loader.next_step():
        assert torch.equal(batch["loss_mask"], batch["labels"] < BEGINS)
    loader.close()


def test_documents_without_sequences(tmp_path: Path) -> None:
    builder = IndexedDatasetBuilder(str(tmp_path / "a.bin"), dtype=np.uint16)
    builder.end_document()
    for document in documents((30, 25)):
        builder.add_document(np.array(document, np.uint16), [7, len(document) - 7])
    builder.end_document()
    builder.finalize(str(tmp_path / "a.idx"))
    corpus = open_corpus(str(tmp_path / "a"))
    assert corpus.documents == 4 and corpus.lengths.tolist() == [0, 30, 25, 0]
    train, _ = build(tmp_path, [str(tmp_path / "a")], 15, vocab=VOCAB)
    for i in range(15):
        assert train.positions(i).tolist() == expected(train[i])


@pytest.fixture
def corpus(tmp_path: Path) -> Samples:
    return build(
        tmp_path, [write(tmp_path / "a", documents((7, 1, 30, 2, 64, 5)))], 20, vocab=VOCAB
    )[0]


def test_batches_have_positions_and_masks(corpus: Samples) -> None:
    loader = Loader(corpus, 2, 4, 0, 1, documents=True)
    plain = Loader(corpus, 2, 4, 0, 1)
    for batch, whole in zip(loader.next_step(), plain.next_step(), strict=True):
        assert batch.keys() == {"tokens", "labels", "position_ids", "loss_mask"}
        assert all(t.shape == (2, 10) and t.is_contiguous() for t in batch.values())
        for name in ("tokens", "labels"):
            assert torch.equal(batch[name], whole[name])
        for tokens, place in zip(batch["tokens"], batch["position_ids"], strict=True):
            assert place.tolist() == expected(tokens.numpy())
        # A label of another document is one that begins it.
        assert torch.equal(batch["loss_mask"], batch["labels"] < BEGINS)
    loader.close(), plain.close()


def test_a_cursor_goes_on_with_the_same_batches(corpus: Samples) -> None:
    whole, resumed = (Loader(corpus, 2, 4, 0, 1, documents=True) for _ in range(2))
    whole.next_step()
    resumed.load_state_dict(whole.state_dict())
    for a, b in zip(whole.next_step(), resumed.next_step(), strict=True):
        assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
    whole.close(), resumed.close()


def test_more_documents_than_places(tmp_path: Path) -> None:
    corpus, _ = build(tmp_path, [write(tmp_path / "a", documents((1,) * 40))], 2, vocab=VOCAB)
    message = r"sample 0 has 10 documents.* 9; set data.max_documents=10, or kernels.attention=flex"
    loader = Loader(corpus, 1, 1, 0, 1, documents=True, places=9)
    with pytest.raises(DataError, match=message):
        next(loader)
    loader.close()
    for places in (0, 10):
        loader = Loader(corpus, 1, 1, 0, 1, documents=True, places=places)
        assert not next(loader)["position_ids"].any()
        loader.close()


def test_statistics() -> None:
    rows = [positions(np.array(lengths)) for lengths in ((4, 4), (8,), (1, 2, 5))]
    found = packing(rows)
    assert (found.sequences, found.documents, found.most, found.length) == (3, 2.0, 3, 4.0)
    pairs = sum(n * (n + 1) // 2 for n in (4, 4, 8, 1, 2, 5))
    assert found.saved == pytest.approx(1 - pairs / (3 * 36))
    assert str(found) == (
        "2.0 documents per sequence (most 3) of 4 tokens; 31% of causal attention saved"
    )


def test_statistics_of_a_corpus(tmp_path: Path) -> None:
    corpus, _ = build(tmp_path, [write(tmp_path / "a", numbers(0, 5, 60))], 20)
    loader = Loader(corpus, 1, 1, 0, 1, documents=True)
    found = loader.packing()
    assert (found.sequences, found.documents, found.most, found.length) == (20, 2, 2, 5)
    assert found.saved == pytest.approx(1 - 30 / 55)
    assert loader.packing(3).sequences == 3
    loader.close()
