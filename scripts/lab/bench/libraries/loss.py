"""Language-model loss and its gradient from bf16 logits, in one pass.

Against QuACK's kernel for both and our two-pass kernels, which other GPUs and split vocabularies
use. Each side overwrites its own logits with the gradient: later runs see gradients as logits,
which takes as long.

Legend: N tokens, V vocabulary.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from phalanx.kernels.elementwise import cross_entropy as two_passes
from phalanx.kernels.sm90.loss import cross_entropy as one_pass
from phalanx.scripts.lab.bench.libraries.compared import Row, gap, row
from phalanx.scripts.lab.bench.libraries.libraries import Sizes, drawn
from phalanx.scripts.lab.bench.timing import Bench, Case, reason

VOCABULARIES = {
    "Qwen3": 151936,
    "GPT-OSS": 201088,
    "DeepSeek-V3": 129280,
    "Moonlight": 163840,
    "a small one": 32000,
}
Both = Callable[[Tensor, Tensor], Tensor]
"""Losses [N] from logits [N, V], overwritten by their gradient, and targets [N]."""


def losses(bench: Bench, sizes: Sizes) -> Iterator[list[Row]]:
    """Time the losses of 2 sequences, each with gradient 1."""
    N = 2 * sizes.positions
    for model, V in VOCABULARIES.items():
        logits = drawn(N, V, device=bench.clock.device)
        target = torch.randint(V, (N,), device=bench.clock.device)
        for library, theirs in (("QuACK", _quack), ("two passes", _in_two_passes)):
            operation = f"loss and gradient, {model}, {N} x {V}"
            yield [_measured(bench, operation, library, theirs, logits, target)]
            bench.clock.free()
        del logits


def _measured(
    bench: Bench, operation: str, library: str, theirs: Both, logits: Tensor, target: Tensor
) -> Row:
    timings, note, result_gap = bench.timings(operation, ()), "", None
    x = logits.clone()
    our_results = [_in_one_pass(x, target), x]
    try:
        other = logits.clone()
        result_gap = gap(our_results, [theirs(other, target), other])
        timings.add(Case(library, "both", lambda: theirs(other, target), ours=False))
    except Exception as error:
        note = reason(error)
    timings.add(Case("ours", "both", lambda: _in_one_pass(x, target)))
    timings.run()
    return row(timings, library, "both", result_gap, note)


def _in_one_pass(logits: Tensor, target: Tensor) -> Tensor:
    return one_pass.cross_entropy_(logits, target, torch.ones(1, device=logits.device))


def _in_two_passes(logits: Tensor, target: Tensor) -> Tensor:
    maximum, total, hit = two_passes.statistics(logits, target, 0)
    lse = maximum + total.log()
    two_passes.gradient_(logits, target, lse, torch.ones_like(lse), 0)
    return lse - hit


def _quack(logits: Tensor, target: Tensor) -> Tensor:
    from quack.cross_entropy import cross_entropy_fwd

    loss: Tensor = cross_entropy_fwd(logits, target, return_dx=True, inplace_backward=True)[0]
    return loss
