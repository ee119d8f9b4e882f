"""The largest logit of each head: torch and the interpreted kernel against every logit in fp64."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from phalanx.kernels.core_attention.core import attention, visible_ST
from phalanx.kernels.core_attention.documents import Documents
from phalanx.kernels.core_attention.max_logit import MaxLogit, raise_max_logits
from tests.kernels.interpreter import interpret

CASES = [
    # B, H, G, S, T, d, window, documents
    (2, 4, 2, 70, 70, 8, 0, ()),
    (1, 3, 3, 200, 200, 24, 0, ()),  # latent attention: 128 and 64 channels in small
    (2, 6, 1, 300, 300, 16, 37, ()),
    (1, 2, 2, 130, 130, 16, 1, ()),
    (1, 4, 2, 100, 290, 40, 0, ()),  # a chunk of a context parallel rank
    (1, 4, 4, 90, 190, 16, 100, ()),
    (1, 2, 1, 300, 300, 16, 200, ()),
    (1, 2, 1, 500, 500, 16, 300, ()),
    (1, 4, 2, 333, 333, 16, 0, (5, 1, 200, 127)),
    (1, 2, 1, 256, 256, 16, 20, (128, 64, 63, 1)),
]


def problem(case: Any, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Any]:
    """Queries and keys in odd strides, and documents; logits that are not seen are the largest."""
    B, H, G, S, T, d, _window, lengths = case
    g = torch.Generator().manual_seed(S + d)
    q = torch.randn(S, B, H, d + 2, generator=g).permute(1, 2, 0, 3)[..., 1:-1].to(dtype)
    k = torch.randn(T, B, G, d, generator=g).permute(1, 2, 0, 3).to(dtype)
    k[:, :, -1] *= 8  # seen by the last query alone
    k[:, :, 0] *= 8  # out of its window, and of other documents
    documents = None
    if lengths:
        positions = torch.cat([torch.arange(n) for n in lengths])
        documents = Documents(positions, places=0, longest=T)
    return q, k, documents


def stated(q: Tensor, k: Tensor, scale: float, window: int, documents: Any) -> Tensor:
    """[H], fp64."""
    k = k.double().repeat_interleave(q.size(1) // k.size(1), 1)
    logits = scale * q.double() @ k.transpose(-1, -2)
    seen = visible_ST(q.size(2), k.size(2), window, "cpu", documents)
    return logits.masked_fill(~seen, float("-inf")).amax((0, 2, 3))


def fresh(H: int, due: int = 1) -> MaxLogit:
    most_LH = torch.full((3, H), float("-inf"))
    return MaxLogit(most_LH[1], torch.tensor(due, dtype=torch.int32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("case", CASES)
def test_against_every_logit(case: Any, dtype: torch.dtype) -> None:
    q, k, documents = problem(case, dtype)
    top, how = fresh(q.size(1)), dict(scale=0.3, window=case[6], documents=documents)
    raise_max_logits(top, q, k, **how)
    want = stated(q, k, **how)
    torch.testing.assert_close(top.most_H.double(), want, rtol=1e-6, atol=1e-6)
    assert not want.equal(stated(q, k, 0.3, 0, None)) or not (case[6] or documents)


def test_it_is_raised_and_never_lowered() -> None:
    (q, k, _), top = problem(CASES[0]), fresh(4)
    raise_max_logits(top, q, k, scale=1.0)
    first = top.most_H.clone()
    raise_max_logits(top, -0.1 * q, k, scale=1.0)
    assert torch.equal(top.most_H, first)
    raise_max_logits(top, 2 * q, k, scale=1.0)
    assert torch.equal(top.most_H, 2 * first)


def test_what_is_not_due_is_left_alone() -> None:
    (q, k, _), top = problem(CASES[0]), fresh(4, due=0)
    raise_max_logits(top, q, k, scale=1.0)
    assert (top.most_H == float("-inf")).all()


def test_what_does_not_fit() -> None:
    q, k, _ = problem(CASES[0])
    with pytest.raises(ValueError, match="4 heads, and 3 largest logits"):
        raise_max_logits(fresh(3), q, k, scale=1.0)
    with pytest.raises(ValueError, match="scale of -1"):
        raise_max_logits(fresh(4), q, k, scale=-1.0)


@pytest.mark.parametrize("backend", ["reference", "sdpa", "flex"])
def test_attention_takes_note(backend: str) -> None:
    """`attention` records its largest logits with every backend, without changing its result."""
    q, k, _ = problem(CASES[2])
    top, how = fresh(6), dict(scale=0.3, window=37, backend=backend)
    out = attention(q, k, k, top=top, **how)
    assert torch.equal(out, attention(q, k, k, **how))
    want = stated(q, k, 0.3, 37, None)
    torch.testing.assert_close(top.most_H.double(), want, rtol=1e-6, atol=1e-6)


# --- the kernel -----------------------------------------------------------------------------------


def lse_of(q: Tensor, k: Tensor, window: int, documents: Any) -> Tensor:
    k = k.repeat_interleave(q.size(1) // k.size(1), 1)
    logits = (0.3 * q @ k.transpose(-1, -2)).float()
    seen = visible_ST(q.size(2), k.size(2), window, "cpu", documents)
    return logits.masked_fill(~seen, float("-inf")).logsumexp(-1).contiguous()


def launches() -> Iterator[tuple[str, MaxLogit, Tensor]]:
    """The kernel's result against torch's, in fp32, whose products torch rounds."""
    from phalanx.kernels.core_attention.max_logit_triton import launch

    for case in CASES:
        q, k, documents = problem(case)
        window, H = case[6], q.size(1)
        first = None if documents is None else documents.first_T
        want = stated(q, k, 0.3, window, documents)
        for lse in (None, lse_of(q, k, window, documents)):
            top = fresh(H)
            launch(top.most_H, top.due, q, k, first, lse, 0.3, window)
            yield f"{case}, {lse is not None}", top, want
        off = fresh(H, due=0)
        launch(off.most_H, off.due, q, k, first, None, 0.3, window)
        yield "not due", off, torch.full_like(want, float("-inf"))
        beyond = fresh(H)
        beyond.most_H.fill_(1e3)  # no row can reach it
        launch(beyond.most_H, beyond.due, q, k, first, lse, 0.3, window)
        yield "reached before", beyond, torch.full_like(want, 1e3)


def interpreted() -> None:
    for what, top, want in launches():
        torch.testing.assert_close(
            top.most_H.double(), want, rtol=1e-6, atol=1e-6, msg=lambda m, what=what: f"{what}: {m}"
        )


def test_kernel_interpreted() -> None:
    pytest.importorskip("triton")
    interpret(__name__)


def own_loads_of_first_branch(ptx: str) -> set[str]:
    """Parameters from whose memory each thread itself reads what the first branch depends on.

    A value that another program may raise meanwhile must not be among them: warps would read
    different values, and part of them would leave products that need all of them.
    """
    lines = re.findall(r"^\s*(?:@(%\w+) )?([a-z][\w.]*)\s+([^;]*);", ptx, re.MULTILINE)
    end = next(i for i, (_, name, _) in enumerate(lines) if name == "bra")
    wanted, found = {lines[end][0]}, set()
    for predicate, name, operands in reversed(lines[:end]):
        result, *sources = re.findall(r"%\w+|\[\s*\w+\s*\]", operands) or [""]
        if result not in wanted or name.startswith("ld.shared"):
            wanted.discard(result)  # from here on every warp has the same
            continue
        if name.startswith("ld.param"):
            found.add(sources[0].strip("[ ]"))
        wanted |= {source for source in (predicate, *sources) if source.startswith("%")}
    return found


@pytest.mark.parametrize(
    "what", ["Moonlight", "GPT-OSS, with denominators", "GPT-OSS, window", "documents"]
)
def test_machine_code(what: str, tmp_path: Path) -> None:
    """Compiled for sm_90: by tensor cores, nothing spilled, one maximum an element."""
    pytest.importorskip("triton")
    pytest.importorskip("cutlass")
    from phalanx.kernels.core_attention import max_logit_triton
    from tests.kernels.triton_code import launched

    S, H, G, d = {"Moonlight": (8192, 16, 16, 192)}.get(what, (4096, 64, 8, 64))
    q, k = (torch.empty(S, 2, n, d, dtype=torch.bfloat16, device="meta") for n in (H, G))
    due = torch.empty((), dtype=torch.int32, device="meta")
    most, lse = torch.empty(H, device="meta"), torch.empty(2, H, S, device="meta")
    first = torch.empty(S, dtype=torch.int64, device="meta")
    heads = [x.permute(1, 2, 0, 3) for x in (q, k)]
    window = 128 if "window" in what else 0
    rest = (first if what == "documents" else None, lse if "GPT" in what else None, 0.1, window)
    code = launched(
        max_logit_triton,
        "attention_max_logit",
        lambda: max_logit_triton.launch(most, due, *heads, *rest),
        tmp_path,
    )
    assert own_loads_of_first_branch(code.ptx) == {"attention_max_logit_param_1"}  # due
    rows, columns, loops = 128, 64 if d == 192 else 128, 3
    programs = 2  # on an SM
    if window:
        rows, columns, loops, programs = 64, 64, 1, 6
    assert code.stack == 0 and code.registers * code.threads * programs <= 65536
    assert code.threads == 2 * rows
    each = loops * rows * columns // code.threads
    assert code.count("HGMMA") == loops * d // 16
    assert 0.9 * each <= code.count("FMNMX") <= 1.5 * each
