"""bench_libraries on a CPU: our side of every part, without the libraries that it compares with."""

import math
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from phalanx.kernels.core_attention import core
from phalanx.kernels.routing.topk_scores import choose, probabilities
from phalanx.moe.router import fused_topk
from phalanx.scripts.lab import bench_libraries
from phalanx.scripts.lab.bench import timing
from phalanx.scripts.lab.bench.clocks import Cpu
from phalanx.scripts.lab.bench.libraries import attention, libraries, loss, quantize
from phalanx.scripts.lab.bench.libraries.compared import Operation, Row, compare, gap
from phalanx.scripts.lab.bench.libraries.libraries import Sizes
from phalanx.scripts.lab.bench.timing import Bench

SMALL = Sizes(positions=16, batches=(1, 2), parameters=1 << 12, tensors=4)
LIBRARIES = (
    "transformer_engine",
    "transformer_engine.pytorch",
    "megatron.core.fusions",
    "quack.cross_entropy",
)


def run(*parts: str) -> list[Row]:
    return bench_libraries.run(Bench(Cpu(), 2), parts, SMALL)


def topk(logits: Tensor, bias: Tensor | None, options: Any, top_k: int) -> tuple[Tensor, Tensor]:
    """`moe.router.fused_topk.topk` in torch."""
    score = logits.detach()
    if bias is not None or options.group_topk < options.groups:
        score = score.sigmoid() + (0 if bias is None else bias)
    idx = choose(score, top_k, options.groups, options.group_topk)
    return idx.int(), probabilities(logits, idx, options)


def cross_entropy_(logits: Tensor, target: Tensor, scale: Tensor | None = None) -> Tensor:
    """Losses; the logits become their gradient."""
    x = logits.float().requires_grad_()
    losses = torch.nn.functional.cross_entropy(x, target, reduction="none")
    logits.copy_(torch.autograd.grad(losses.sum(), x)[0])
    return losses.detach()


@pytest.fixture(autouse=True)
def _on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small models, our kernels in torch, no library, and one round to warm up."""
    monkeypatch.setattr(timing, "WARM_ROUNDS", 1)
    for name in LIBRARIES:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(fused_topk, "topk", topk)
    monkeypatch.setattr(libraries, "MLA_HEADS", {"Moonlight": 2})
    layers = {
        "grouped": attention.Layer(2, 4, 2, 16, 16),
        "sinks": attention.Layer(1, 4, 2, 16, 16, window=3, sinks=True),
        "latent": attention.Layer(1, 2, 2, 24, 16),
    }
    monkeypatch.setattr(attention, "LAYERS", layers)
    for name in ("fa4", "flex"):
        monkeypatch.setitem(core._BACKENDS, name, core._BACKENDS["reference"])
    monkeypatch.setattr(loss, "VOCABULARIES", {"small": 40, "large": 72})
    monkeypatch.setattr(loss, "_in_two_passes", cross_entropy_)
    monkeypatch.setattr(loss.one_pass, "cross_entropy_", cross_entropy_)
    monkeypatch.setattr(quantize, "ROWS", {"small": (300, 160, 3)})
    monkeypatch.setattr(quantize, "WEIGHTS", {"small": (2, 130, 64)})


ROWS = {"router": 24, "rope": 8, "heads": 4, "adam": 3, "mla": 8, "attention": 24, "loss": 4}
ROWS["quantize"] = 5


@pytest.mark.parametrize("part", bench_libraries.PARTS)
def test_our_side_is_measured_without_the_library(
    part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = run(part)
    assert len(rows) == ROWS[part] and not any(row.failed for row in rows)
    ours_alone = {"TE", "TE map", "TE indices", "Megatron-Core", "QuACK"}
    for row in rows:
        missing = row.library in ours_alone and "attention, sinks" not in row.operation
        assert row.ours
        if missing:
            assert row.theirs is None and row.gap is None and "Error" in row.note
        elif row.theirs is not None and row.gap is not None:
            assert row.gap.difference <= 0.02 * row.gap.largest
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert len(lines) == len(rows) + 2 and {line.count("|") for line in lines} == {10}


def test_rates_of_quantizing() -> None:
    row = run("quantize")[0]
    ours, copied = (float(rate) for rate in row.note.removesuffix(" TB/s").split(", "))
    moved = 300 * 160 * 3 + 300 * 2 * 4  # two bytes in, one out, and scales of two blocks
    assert ours == pytest.approx(moved / row.ours * 1e-9, rel=0.01)
    assert copied == pytest.approx(moved / row.theirs * 1e-9, rel=0.01)


def test_two_sides_are_compared_in_the_same_layout() -> None:
    def side(factor: float, transposed: bool) -> Callable[[], Operation]:
        def make() -> Operation:
            x = torch.arange(6.0).reshape(2, 3).requires_grad_()
            run = lambda: [(x.T if transposed else x) * factor]  # noqa: E731
            grad = torch.ones(3, 2) if transposed else torch.ones(2, 3)
            return Operation(run, [x], [grad], (lambda y: y.T) if transposed else (lambda y: y))

        return make

    forward, backward = compare(Bench(Cpu(), 1), "scale", "other", side(2, False), side(3, True))
    assert forward.gap == (5.0, 10.0) and backward.gap == (1.0, 2.0)
    assert forward.ours and forward.theirs and backward.pass_name == "backward"


def test_a_part_that_fails_is_a_row(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(bench: Any, sizes: Any) -> Any:
        raise RuntimeError("out of | memory")
        yield

    monkeypatch.setitem(bench_libraries.PARTS, "rope", broken)
    assert [row.note for row in run("rope")] == ["RuntimeError: out of | memory"]
    assert "out of / memory |" in capsys.readouterr().out


def test_a_nan_is_not_hidden() -> None:
    same, other = torch.ones(3), torch.tensor([1.0, float("nan"), 1.0])
    assert gap([same, same], [same, same]) == (0.0, 1.0)
    assert gap([same, same], [same, 3 * same]).difference == 2
    assert math.isnan(gap([same, same], [other, same]).difference)
    with pytest.raises(ValueError):
        gap([same], [same, same])
    broken = Row("rope", "te", "forward", 1.0, 2.0, gap([other], [same]), "slow")
    assert broken.failed and "| FAILED: a result is NaN or infinite; slow |" in broken.markdown()
    assert not Row("rope", "te", "forward", 1.0, 2.0, gap([same], [same])).failed


def test_arguments(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for argv in (["ropes"], ["--rounds", "0"]):
        with pytest.raises(SystemExit):
            bench_libraries.main(argv)
    assert "a part is one of router, rope, heads, adam, mla" in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench_libraries.main(["rope"]) == 1
