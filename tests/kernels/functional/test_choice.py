"""The choice of `auto` on GPUs that are not here, and its warnings, by tensors without data."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from phalanx.kernels.api import (
    GroupedMLP,
    KernelUnavailable,
    grouped_experts,
    grouped_experts_sorted,
    resolve_backend,
)
from phalanx.kernels.functional import choice
from phalanx.kernels.functional.options import with_defaults
from phalanx.kernels.registry import Facts

E, D, F, T = 4, 64, 128, 6
A100, HOPPER, B200, RTX = (8, 0), (9, 0), (10, 0), (12, 0)


COMPILER = frozenset({"triton", "nvidia_cutlass_dsl"})


@contextmanager
def gpu(capability: tuple[int, int], packages: frozenset[str] = COMPILER) -> Iterator[None]:
    """A process that has made no choice yet, with a GPU and packages."""
    caches = (choice._chosen, choice.specification, choice._warn_once)
    for cache in caches:
        cache.cache_clear()
    with (
        FakeTensorMode(),
        torch._C.DisableTorchFunction(),  # else a CPU stands in for CUDA where Megatron-Core ran
        mock.patch.object(torch.cuda, "get_device_capability", return_value=capability),
        mock.patch.object(choice, "Facts", partial(Facts, packages=packages)),
    ):
        yield
    for cache in caches:
        cache.cache_clear()


def given(
    dtype: torch.dtype, top_k: int = 2, ffn: int = F, experts: int = E, hidden: int = D
) -> dict[str, Tensor]:
    where: Any = dict(device="cuda", dtype=dtype)
    return dict(
        x=torch.empty(T, hidden, **where),
        topk_idx=torch.empty(T, top_k, dtype=torch.int32, device="cuda"),
        topk_prob=torch.empty(T, top_k, device="cuda"),
        w1=torch.empty(experts, 2 * ffn, hidden, **where),
        w2=torch.empty(experts, hidden, ffn, **where),
    )


def resolved(of: dict[str, Tensor], **options: Any) -> choice.BackendChoice:
    return resolve_backend(of["x"], of["w1"], of["w2"], of["topk_idx"].shape[-1], **options)


HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32
READS = "reference on this GPU, which reads the rows of each expert on the host ("
CASES: dict[str, tuple[tuple[int, int], dict[str, Any], str, list[str]]] = {
    "fp16": (HOPPER, dict(dtype=HALF), READS, ["not fused: needs bf16, not fp16; ", "not torch"]),
    "fp32": (
        HOPPER,
        dict(dtype=SINGLE),
        READS,
        ["not fused: needs bf16, not fp32; ", "not torch: needs bf16 on CUDA, not fp32): set b"],
    ),
    "A100": (A100, dict(dtype=BRAIN), READS, ["not torch: needs CUDA capability 9.x or 10.x, no"]),
    "RTX": (RTX, dict(dtype=BRAIN), READS, ["not torch: needs CUDA capability 9.x or 10.x, no"]),
    "odd": (
        HOPPER,
        dict(dtype=BRAIN, hidden=72),
        "torch on this GPU (",
        ["not fused: needs whole boxes of 64 channels: hidden=72 and ffn=128 must be multiples"],
    ),
    "choices": (
        HOPPER,
        dict(dtype=BRAIN, top_k=17, experts=32),
        "torch on this GPU (",
        ["not fused: needs at most 16 experts a token to choose from, not 17"],
    ),
    "no cuDNN": (
        B200,
        dict(dtype=BRAIN),
        "torch on this GPU (",
        ["not cudnn: needs cuDNN's frontend: pip install nvidia-cudnn-frontend"],
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_auto_says_once_that_it_takes_a_slower_backend(case: Any) -> None:
    capability, sizes, takes, reasons = case
    with gpu(capability), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        of = given(**sizes)
        found = resolved(of)
        assert not told  # asking is not taking
        for _ in range(2):
            grouped_experts(**of)
        of["x"] = of["x"][:3]
        grouped_experts(of["x"], of["topk_idx"][:3], of["topk_prob"][:3], of["w1"], of["w2"])
        (one,) = [str(w.message) for w in told]
        assert one.startswith(f"backend=auto takes {takes}not ") and "\n" not in one
        assert all(reason in one for reason in reasons)
        assert one.endswith(f"): set backend={found.backend} if it is meant")
        assert "not te" not in one.replace("not torch", "")
        assert found.backend == takes.partition(" ")[0]
        assert found.reads_counts == (found.backend == "reference")
        assert all(reason.partition(")")[0] in found.reason for reason in reasons)
        told.clear()
        grouped_experts(**of | given(**sizes), backend=found.backend)
        assert not told  # it is meant


def test_another_reason_is_told_too() -> None:
    with gpu(HOPPER), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for dtype in (HALF, SINGLE, HALF):
            grouped_experts(**given(dtype))
        assert [("fp16" in str(w.message)) for w in told] == [True, False]


@pytest.mark.parametrize(
    ("capability", "ffn", "dtype", "backend"),
    [
        (HOPPER, 648, BRAIN, "fused"),
        (HOPPER, 640, BRAIN, "fused"),
        (HOPPER, 72, BRAIN, "torch"),  # 128 are too many more
        (HOPPER, 648, SINGLE, "reference"),
        (A100, 648, BRAIN, "reference"),
    ],
)
def test_channels_are_padded_where_kernels_lack_nothing_else(
    capability: tuple[int, int], ffn: int, dtype: torch.dtype, backend: str
) -> None:
    with gpu(capability):
        of = given(dtype, ffn=ffn)
        found = resolved(of)
        assert found.backend == backend
        padded = ffn == 648 and backend == "fused"
        assert found.reason.endswith("; F is padded to 704") == padded
        if padded:
            assert grouped_experts(**of).shape == of["x"].shape
            with pytest.raises(ValueError, match="whole boxes of 64 channels"):
                resolved(of, backend="fused")


def test_the_best_kernels_need_no_word() -> None:
    with gpu(HOPPER), warnings.catch_warnings():
        warnings.simplefilter("error")
        of = given(BRAIN)
        found = resolved(of)
        assert (found.backend, found.reads_counts) == ("fused", False)
        assert found.reason == "backend=auto"
        problem = choice.Problem(of["x"].device, BRAIN, D, F, E, 2, sorted_rows=False)
        choice.specification(with_defaults({}).constants, problem)
    x = torch.randn(T, D)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nor does a CPU
        weights = torch.randn(E, 2 * F, D), torch.randn(E, D, F)
        grouped_experts_sorted(x, [1, 2, 3, 0], None, *weights)
        assert resolve_backend(x, *weights).backend == "reference"


def test_sorted_rows_on_blackwell_say_why_not_cudnn() -> None:
    with gpu(B200, COMPILER | {"nvidia_cudnn_frontend"}):
        of = given(BRAIN)
        assert resolved(of).backend == "cudnn"
        found = resolve_backend(of["x"], of["w1"], of["w2"])
        assert found.backend == "torch"
        assert "not cudnn: pads the rows of each expert, which are sorted here" in found.reason
        with pytest.raises(ValueError, match="backend=cudnn pads the rows of each expert: use"):
            resolve_backend(of["x"], of["w1"], of["w2"], backend="cudnn")


def test_modules_have_the_backend_they_take() -> None:
    with gpu(HOPPER):
        for dtype, backend in ((BRAIN, "fused"), (HALF, "reference")):
            module = GroupedMLP(E, D, F, 2, device="cuda", dtype=dtype)
            assert module.resolved_backend == backend
        assert GroupedMLP(E, D, F, 2, device="cuda", backend="reference").resolved_backend == (
            "reference"
        )
        wanted = GroupedMLP(E, D, F, 2, device="cuda", backend="fused", dtype=HALF)
        with pytest.raises(KernelUnavailable, match="backend=fused cannot run here: needs bf16, n"):
            _ = wanted.resolved_backend


def test_autocast_decides_by_its_dtype() -> None:
    """A CPU multiplies groups of 60 channels in fp32, and not in bf16."""
    module = GroupedMLP(33, 60, 48, 2)
    assert module.resolved_backend == "torch"
    with torch.autocast("cpu", dtype=BRAIN):
        assert module.resolved_backend == "reference"


def test_other_layouts_have_the_same_sizes() -> None:
    with gpu(HOPPER):
        of = given(BRAIN, ffn=72)
        weights = of["w1"].mT, of["w2"].mT
        found = resolve_backend(of["x"], *weights, 2, layout="transposed")
        assert found == resolved(of) and "hidden=64 and ffn=72" in found.reason
