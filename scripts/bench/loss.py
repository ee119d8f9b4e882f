"""The loss of a language model and its gradient, from logits in bf16: in one pass, against QuACK's
kernel for both and against our own two passes, which other GPUs and split vocabularies take.

Each side writes the gradient over its own copy of the logits, so that after the first run these are
gradients of gradients, which take as long.

Legend: N tokens, V vocabulary.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from phalanx.kernels.elementwise import cross_entropy as two_passes
from phalanx.kernels.sm90.loss import cross_entropy as one_pass
from phalanx.scripts.bench.comparison import Row, both_ms, gap, note_of
from phalanx.scripts.bench.libraries import Sizes, drawn
from phalanx.scripts.bench.measure import Bench, reason

VOCABULARIES = {
    "Qwen3": 151936,
    "GPT-OSS": 201088,
    "DeepSeek-V3": 129280,
    "Moonlight": 163840,
    "a small one": 32000,
}
Both = Callable[[Tensor, Tensor], Tensor]
"""Losses [N], of logits [N, V] that become their gradient, and targets [N]."""


def losses(bench: Bench, sizes: Sizes) -> Iterator[list[Row]]:
    """Rows of 2 sequences; a gradient of 1 for each."""
    N = 2 * sizes.positions
    for model, V in VOCABULARIES.items():
        logits = drawn(N, V, device=bench.clock.device)
        target = torch.randint(V, (N,), device=bench.clock.device)
        for library, theirs in (("QuACK", _quack), ("two passes", _in_two_passes)):
            at = f"loss and gradient, {model}, {N} x {V}"
            yield [_measured(bench, at, library, theirs, logits, target)]
            bench.clock.free()
        del logits


def _measured(
    bench: Bench, at: str, library: str, theirs: Both, logits: Tensor, target: Tensor
) -> Row:
    sides, note, apart = bench.sides(at, ()), "", None
    x = logits.clone()
    own = [_in_one_pass(x, target), x]
    try:
        other = logits.clone()
        apart = gap(own, [theirs(other, target), other])
        sides.add(library, "both", lambda: theirs(other, target), ours=False)
    except Exception as error:
        note = reason(error)
    sides.add("ours", "both", lambda: _in_one_pass(x, target))
    sides.run()
    ms = both_ms(sides, library, "both")
    return Row(at, library, "both", *ms, apart, note_of(sides, note))


def _in_one_pass(logits: Tensor, target: Tensor) -> Tensor:
    return one_pass.cross_entropy_(logits, target, torch.ones(1, device=logits.device))


def _in_two_passes(logits: Tensor, target: Tensor) -> Tensor:
    most, total, hit = two_passes.statistics(logits, target, 0)
    lse = most + total.log()
    two_passes.gradient_(logits, target, lse, torch.ones_like(lse), 0)
    return lse - hit


def _quack(logits: Tensor, target: Tensor) -> Tensor:
    from quack.cross_entropy import cross_entropy_fwd

    loss: Tensor = cross_entropy_fwd(logits, target, return_dx=True, inplace_backward=True)[0]
    return loss
