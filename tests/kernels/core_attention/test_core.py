"""Attention backends against a statement of one query at a time in fp64, and against each other."""

from typing import NamedTuple

import pytest
import torch
from torch.nn.attention import SDPAParams

from phalanx.kernels.core_attention.core import BLOCK, attention, block_mask, visible_ST
from phalanx.kernels.core_attention.documents import Documents


class Case(NamedTuple):
    heads: int = 4
    groups: int = 4
    queries: int = 7
    keys: int = 7
    d: int = 8
    v: int = 8
    window: int = 0
    sinks: bool = False


CASES = {
    "plain": Case(),
    "gqa": Case(groups=2),
    "mqa": Case(groups=1),
    "mla": Case(d=24, v=16),
    "window1": Case(window=1),
    "window2": Case(window=2),
    "window_s": Case(window=7),
    "window_more": Case(window=9),
    "sinks": Case(sinks=True),
    "gpt_oss": Case(groups=2, window=3, sinks=True),
    "one_token": Case(queries=1, keys=1, sinks=True),
    "last_queries": Case(groups=2, queries=3, keys=9),
    "last_queries_window": Case(queries=3, keys=9, window=4, sinks=True),
}


def inputs(
    case: Case, dtype: torch.dtype, device: str = "cpu", batch: int = 2
) -> list[torch.Tensor]:
    """Leaves q, k, v (and sinks), in the strides that Megatron-Core's [S, B, H, d] gives them."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        x = torch.randn(shape, generator=generator, dtype=torch.float64)
        return x.to(device, dtype)

    def heads_of(rows: int, heads: int, channels: int) -> torch.Tensor:
        return draw(rows, batch, heads, channels).permute(1, 2, 0, 3)

    tensors = [
        heads_of(case.queries, case.heads, case.d),
        heads_of(case.keys, case.groups, case.d),
        heads_of(case.keys, case.groups, case.v),
    ]
    if case.sinks:
        tensors.append(draw(case.heads))
    return [t.requires_grad_() for t in tensors]


def run(
    case: Case,
    tensors: list[torch.Tensor],
    backend: str,
    scale: float = 0.3,
    documents: Documents | None = None,
) -> torch.Tensor:
    q, k, v, *sinks = tensors
    return attention(
        q,
        k,
        v,
        scale=scale,
        window=case.window,
        sinks_H=sinks[0] if sinks else None,
        documents=documents,
        backend=backend,
    )


def one_query_at_a_time(case: Case, tensors: list[torch.Tensor]) -> torch.Tensor:
    q, k, v, *sinks = tensors
    rows = []
    for b in range(q.size(0)):
        for h in range(case.heads):
            g = h // (case.heads // case.groups)
            for i in range(case.queries):
                p = case.keys - case.queries + i
                first = max(0, p - case.window + 1) if case.window else 0
                weight = [
                    torch.exp(0.3 * (q[b, h, i] * k[b, g, j]).sum()) for j in range(first, p + 1)
                ]
                total = sum(weight) + (torch.exp(sinks[0][h]) if sinks else 0)
                rows.append(sum(w * v[b, g, first + n] for n, w in enumerate(weight)) / total)
    return torch.stack(rows).view(q.size(0), case.heads, case.queries, case.v)


def with_gradients(out: torch.Tensor, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    upstream = torch.randn(out.shape, generator=generator, dtype=torch.float64)
    grads = torch.autograd.grad(out, tensors, upstream.to(out.device, out.dtype))
    return [out.detach(), *grads]


def rms(x: torch.Tensor) -> float:
    return x.double().square().mean().sqrt().item()


def test_reference_equals_one_query_at_a_time_to_fp64_rounding() -> None:
    for case in CASES.values():
        tensors = inputs(case, torch.float64)
        expected = with_gradients(one_query_at_a_time(case, tensors), tensors)
        got = with_gradients(run(case, tensors, "reference"), tensors)
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("backend", ["reference", "sdpa"])
def test_outputs_and_gradients_in_fp32(backend: str, name: str) -> None:
    case = CASES[name]
    exact, single = inputs(case, torch.float64), inputs(case, torch.float32)
    expected = with_gradients(one_query_at_a_time(case, exact), exact)
    got = with_gradients(run(case, single, backend), single)
    assert [g.dtype for g in got] == [torch.float32] * len(got)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=2e-6, check_dtype=False)


@pytest.mark.parametrize("name", CASES)
def test_flex_forward(name: str) -> None:
    # torch has no backward of FlexAttention on a CPU; gradients are compared on a GPU below.
    case = CASES[name]
    exact, single = inputs(case, torch.float64), inputs(case, torch.float32)
    with torch.no_grad():
        got = run(case, [t.detach() for t in single], "flex")
        torch.testing.assert_close(
            got, one_query_at_a_time(case, exact), rtol=1e-5, atol=2e-6, check_dtype=False
        )


def plain_bf16(case: Case, tensors: list[torch.Tensor], scale: float = 0.3) -> torch.Tensor:
    """A user's implementation: bf16 matrix products around an fp32 softmax."""
    q, k, v, *sinks = tensors
    k, v = (x.repeat_interleave(case.heads // case.groups, 1) for x in (k, v))
    logits = (q @ k.mT).float() * scale
    seen = visible_ST(case.queries, case.keys, case.window, q.device)
    logits = logits.masked_fill(~seen, -torch.inf)
    if sinks:
        sink = sinks[0].float()[:, None, None].expand(*logits.shape[:3], 1)
        logits = torch.cat([logits, sink], -1)
    return logits.softmax(-1)[..., : case.keys].to(v.dtype) @ v


def assert_error_of_plain_bf16(backend: str, case: Case, device: str) -> None:
    """RMS errors at most twice those of `plain_bf16`, or at most that of rounding to bf16."""
    scale = case.d**-0.5
    low = inputs(case, torch.bfloat16, device)
    exact = [t.detach().double().requires_grad_() for t in low]
    expected = with_gradients(run(case, exact, "reference", scale), exact)
    plain = with_gradients(plain_bf16(case, low, scale), low)
    got = with_gradients(run(case, low, backend, scale), low)
    for e, p, g in zip(expected, plain, got, strict=True):
        assert g.dtype == torch.bfloat16
        assert rms(g - e) <= max(2 * rms(p - e), 2**-9 * rms(e))


@pytest.mark.parametrize(
    ("backend", "case"),
    [
        ("reference", Case(groups=2, queries=96, keys=96, d=64, v=64, window=20, sinks=True)),
        ("reference", Case(queries=96, keys=96, d=96, v=64)),
        ("sdpa", Case(groups=2, queries=96, keys=96, d=64, v=64)),
        ("sdpa", Case(queries=96, keys=96, d=96, v=64)),
        ("sdpa", Case(groups=2, queries=96, keys=96, d=64, v=64, window=20)),
    ],
)
def test_bf16_error(backend: str, case: Case) -> None:
    assert_error_of_plain_bf16(backend, case, "cpu")


@pytest.mark.parametrize("queries", [1, 100, 256, 300])
@pytest.mark.parametrize("before", [0, 90, 256])
@pytest.mark.parametrize("window", [0, 1, 128, 200])
def test_block_mask_lists_the_visible_tiles(queries: int, before: int, window: int) -> None:
    keys = queries + before
    mask = block_mask(queries, keys, window, torch.device("cpu"))
    rows, columns = -(-queries // BLOCK), -(-keys // BLOCK)
    seen = torch.zeros(rows * BLOCK, columns * BLOCK, dtype=torch.bool)
    seen[:queries, :keys] = visible_ST(queries, keys, window, "cpu")
    tiles = seen.view(rows, BLOCK, columns, BLOCK).sum((1, 3))

    def listed(count: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        dense = torch.zeros(rows, columns, dtype=torch.bool)
        for r in range(rows):
            dense[r, index[0, 0, r, : count[0, 0, r]].long()] = True
        return dense

    full = tiles == BLOCK * BLOCK
    assert torch.equal(listed(mask.full_kv_num_blocks, mask.full_kv_indices), full)
    assert torch.equal(listed(mask.kv_num_blocks, mask.kv_indices), (tiles > 0) & ~full)
    assert mask.shape[-2:] == (queries, keys)


@pytest.mark.parametrize(
    ("case", "backend", "words"),
    [
        (Case(heads=4, groups=3), "reference", "multiple of 3"),
        (Case(queries=8, keys=7), "reference", "8 queries"),
        (Case(), "flash", "reference, sdpa, flex"),
    ],
)
def test_refusals_say_what_to_change(case: Case, backend: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        run(case, inputs(case, torch.float32), backend)


# On a GPU: the reference, which the tests above pin, is the oracle at real sizes.

GPU_CASES = {
    "flex_gpt_oss": (
        "flex",
        Case(heads=16, groups=2, queries=2048, keys=2048, d=64, v=64, window=128, sinks=True),
    ),
    "flex_gpt_oss_full": (
        "flex",
        Case(heads=16, groups=2, queries=2048, keys=2048, d=64, v=64, sinks=True),
    ),
    "flex_gqa": ("flex", Case(heads=8, groups=2, queries=2048, keys=2048, d=128, v=128)),
    "flex_ragged": (
        "flex",
        Case(groups=2, queries=1000, keys=1000, d=64, v=64, window=100, sinks=True),
    ),
    "flex_chunk": (
        "flex",
        Case(groups=2, queries=512, keys=2048, d=64, v=64, window=128, sinks=True),
    ),
    "flex_short_chunk": (
        "flex",
        Case(heads=8, groups=2, queries=64, keys=192, d=16, v=16, window=32, sinks=True),
    ),
    "flex_64_queries": ("flex", Case(heads=8, groups=2, queries=64, keys=64, d=64, v=64)),
    "flex_mla": ("flex", Case(heads=8, groups=8, queries=2048, keys=2048, d=192, v=128)),
    "flex_short": ("flex", Case(groups=2, queries=1, keys=1, d=64, v=64, sinks=True)),
    "sdpa_gqa": ("sdpa", Case(heads=8, groups=2, queries=2048, keys=2048, d=128, v=128)),
    "sdpa_mla": ("sdpa", Case(heads=8, groups=8, queries=2048, keys=2048, d=192, v=128)),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", GPU_CASES)
def test_gpu_error(name: str) -> None:
    assert_error_of_plain_bf16(*GPU_CASES[name], "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("name", GPU_CASES)
def test_gpu_repeats_are_bitwise_equal(name: str) -> None:
    backend, case = GPU_CASES[name]
    tensors = inputs(case, torch.bfloat16, "cuda")
    torch.use_deterministic_algorithms(backend == "sdpa")  # flex is deterministic as it is
    try:
        first = with_gradients(run(case, tensors, backend), tensors)
        for _ in range(3):
            again = with_gradients(run(case, tensors, backend), tensors)
            assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("backend", "case"),
    [
        ("sdpa", Case(heads=16, groups=16, queries=8192, keys=8192, d=192, v=128)),
        ("flex", Case(heads=16, groups=2, queries=8192, keys=8192, d=64, v=64, sinks=True)),
    ],
)
def test_gpu_memory_is_linear(backend: str, case: Case) -> None:
    tensors = inputs(case, torch.bfloat16, "cuda", batch=1)
    with_gradients(run(case, tensors, backend), tensors)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with_gradients(run(case, tensors, backend), tensors)
    grown = torch.cuda.max_memory_allocated() - before
    assert grown < case.heads * case.queries * case.keys * 2 / 4


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 2])
def test_gpu_latent_attention_runs_on_cudnn(batch: int) -> None:
    # The other fused kernel that takes narrower values is several times slower on Hopper.
    case = Case(heads=8, groups=8, queries=1024, keys=1024, d=192, v=128)
    q, k, v = inputs(case, torch.bfloat16, "cuda", batch)
    assert torch.backends.cuda.can_use_cudnn_attention(
        SDPAParams(q, k, v, None, 0.0, True, False), debug=True
    )


@pytest.mark.gpu
def test_gpu_sdpa_refuses_windows() -> None:
    case = Case(queries=64, keys=64, d=64, v=64, window=8)
    with pytest.raises(ValueError, match="kernels.attention=flex"):
        run(case, inputs(case, torch.bfloat16, "cuda"), "sdpa")
