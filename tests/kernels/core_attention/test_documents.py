"""Attention within packed documents against the same documents alone, on every backend of a CPU."""

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode

from phalanx.kernels.core_attention import core
from phalanx.kernels.core_attention.core import visible_ST
from phalanx.kernels.core_attention.documents import Documents
from tests.kernels.core_attention.test_core import Case, inputs, rms, run, with_gradients

LENGTHS = (5, 1, 9, 2, 13)
TOKENS = sum(LENGTHS)
CASES = {
    "plain": Case(),
    "gqa": Case(groups=2),
    "mla": Case(d=24, v=16),
    "window": Case(window=3),
    "window1": Case(window=1),
    "sinks": Case(sinks=True),
    "gpt_oss": Case(groups=2, window=4, sinks=True),
}


def of(*lengths: int, places: int = 0) -> Documents:
    position = torch.cat([torch.arange(n) for n in lengths])
    return Documents(position, places=places, longest=max(lengths))


def leaves(case: Case, dtype: torch.dtype) -> list[torch.Tensor]:
    return inputs(case._replace(queries=TOKENS, keys=TOKENS), dtype, batch=1)


def alone(case: Case, tensors: list[torch.Tensor]) -> torch.Tensor:
    """Each document by the reference, without any other."""
    q, k, v, *sinks = tensors
    parts = zip(*(x.split(LENGTHS, 2) for x in (q, k, v)), strict=True)
    return torch.cat([run(case, [*part, *sinks], "reference") for part in parts], 2)


@pytest.mark.parametrize("name", CASES)
def test_documents_do_not_see_each_other(name: str) -> None:
    case = CASES[name]
    tensors = leaves(case, torch.float64)
    expected = with_gradients(alone(case, tensors), tensors)
    got = with_gradients(run(case, tensors, "reference", documents=of(*LENGTHS)), tensors)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    whole = run(case, tensors, "reference")
    assert name == "window1" or rms(whole - expected[0]) > 0.05 * rms(expected[0])


@pytest.mark.parametrize("name", CASES)
def test_sdpa_in_fp32(name: str) -> None:
    case = CASES[name]
    exact, single = leaves(case, torch.float64), leaves(case, torch.float32)
    expected = with_gradients(alone(case, exact), exact)
    got = with_gradients(run(case, single, "sdpa", documents=of(*LENGTHS)), single)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=2e-6, check_dtype=False)


@pytest.mark.parametrize("name", CASES)
def test_flex_forward(name: str) -> None:
    case = CASES[name]
    exact, single = leaves(case, torch.float64), leaves(case, torch.float32)
    with torch.no_grad():
        got = run(case, [t.detach() for t in single], "flex", documents=of(*LENGTHS))
        torch.testing.assert_close(got, alone(case, exact), rtol=1e-5, atol=2e-6, check_dtype=False)


@pytest.mark.parametrize(
    ("name", "backend"),
    [(name, backend) for backend in ("reference", "sdpa", "flex") for name in CASES],
)
def test_the_last_queries_alone(name: str, backend: str) -> None:
    """Queries of a context-parallel rank, with keys from the first that the window includes."""
    case = CASES[name]
    tensors = leaves(case, torch.float64)
    q, k, v, *sinks = tensors
    position = torch.cat([torch.arange(n) for n in LENGTHS])
    for start, end in ((3, 12), (8, 16), (15, 16), (20, 30), (1, 30)):
        begin = max(0, start - case.window + 1) if case.window else 0
        before = start - begin
        documents = Documents(position[start:end], places=0, longest=30, before=before)
        whole = alone(case, tensors)
        own = [q[:, :, start:end], k[:, :, begin:end], v[:, :, begin:end], *sinks]
        if backend == "flex":  # no backward pass on a CPU
            with torch.no_grad():
                got = run(case, [t.detach() for t in own], backend, documents=documents)
            torch.testing.assert_close(got, whole[:, :, start:end], rtol=1e-10, atol=1e-12)
            continue
        got = with_gradients(run(case, own, backend, documents=documents), tensors)
        expected = with_gradients(whole[:, :, start:end], tensors)
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("window", [0, 1, 100, 300])
@pytest.mark.parametrize(
    "lengths", [(700,), (128, 256, 128), (100, 300, 1, 1, 298), (127, 2, 383), (1,) * 260]
)
@pytest.mark.parametrize("before", [0, 128, 300])
def test_tiles_of_flex_are_those_of_the_mask(
    lengths: tuple[int, ...], window: int, before: int
) -> None:
    keys, before = sum(lengths), before if before < sum(lengths) else 1
    position = torch.cat([torch.arange(n) for n in lengths])[before:]
    documents = Documents(position, places=0, longest=max(lengths), before=before)
    window = 0 if window >= keys else window
    mask = core.document_block_mask(documents, window)
    rows, tiles = -(-(keys - before) // core.BLOCK), -(-keys // core.BLOCK)
    padded = torch.zeros(rows * core.BLOCK, tiles * core.BLOCK, dtype=torch.bool)
    padded[: keys - before, :keys] = visible_ST(keys - before, keys, window, "cpu", documents)
    seen = padded.unflatten(0, (rows, -1)).unflatten(2, (tiles, -1))
    some, full = seen.any(3).any(1), seen.all(3).all(1)

    def dense(count: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        chosen = torch.zeros(rows, tiles, dtype=torch.bool)
        for row in range(rows):
            chosen[row, columns[0, 0, row, : count[0, 0, row]].long()] = True
        return chosen

    assert torch.equal(dense(mask.full_kv_num_blocks, mask.full_kv_indices), full)
    partly = dense(mask.kv_num_blocks, mask.kv_indices)
    assert torch.equal(partly, some & ~full)
    assert core.document_block_mask(documents, window) is mask


def test_other_documents_are_not_compiled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounds are tensors that the compiled function is given, not constants in it."""
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    counter = CompileCounter()
    case = CASES["gqa"]
    tensors = [t.detach() for t in leaves(case, torch.float32)]
    with torch._dynamo.config.patch(disable=False):
        compiled = torch.compile(
            core._flex_with_sinks, backend=counter, dynamic=False, fullgraph=True
        )
        for lengths in (LENGTHS, (30,), (1, 29), (10, 10, 10)):
            documents = of(*lengths)
            got = compiled(*tensors, None, core.document_block_mask(documents, 0), 0.3)
            want = run(case, tensors, "reference", documents=documents)
            torch.testing.assert_close(got, want, rtol=1e-5, atol=2e-6)
    assert counter.frame_count == 1


def test_bounds_have_a_static_size() -> None:
    documents = of(*LENGTHS, places=8)
    assert documents.bounds_N1.dtype == torch.int32
    assert documents.bounds_N1.tolist() == [0, 5, 6, 15, 17, 30, 30, 30, 30]
    assert of(*LENGTHS, places=5).bounds_N1.tolist() == [0, 5, 6, 15, 17, 30]
    assert of(2, 1, places=5).bounds_N1.tolist() == [0, 2, 3, 3, 3, 3]
    assert of(*LENGTHS).bounds_N1 is None
    assert documents.first_T.tolist() == [0] * 5 + [5] + [6] * 9 + [15] * 2 + [17] * 13
    assert documents.last_T.nonzero().flatten().tolist() == [4, 5, 14, 16, 29]


def test_nothing_is_read_on_the_host() -> None:
    """A fake tensor has no values that the host could ask for."""
    with FakeTensorMode():
        documents = Documents(torch.zeros(640, dtype=torch.int64), places=16, longest=640)
        for window in (0, 100):
            mask = core.document_block_mask(documents, window)
            assert mask.kv_indices.shape == (1, 1, 5, 5)
        assert documents.bounds_N1.shape == (17,)


def test_what_does_not_fit_is_refused() -> None:
    case = CASES["plain"]
    with pytest.raises(
        ValueError, match="documents in 29 tokens of one sequence, behind 0 others, do"
    ):
        run(case, leaves(case, torch.float32), "reference", documents=of(29))
    two = inputs(case._replace(queries=TOKENS, keys=TOKENS), torch.float32, batch=2)
    with pytest.raises(ValueError, match="30 keys of 2"):
        run(case, two, "reference", documents=of(*LENGTHS))
