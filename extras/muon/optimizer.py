"""Muon for matrices and AdamW for all else, as one optimizer of Megatron-Core's distributed one.

Muon (K. Jordan, kellerjordan.github.io/posts/muon) moves a matrix by its momentum made orthogonal.
Matrices that tensor parallel ranks share and the scale of an update are left to the package
emerging-optimizers, whose optimizers, and Megatron-Core's over them, take parameters of two axes,
one at a time. Stacks of whole matrices are made orthogonal here: its function takes and returns
fp32, and adds a X to each product, in passes that cost as much as half of the products. Here the
multiple of X is in the matrix that multiplies it, which errs as little, and symmetric matrices are
computed by half (`extras.muon.newton_schulz`). The recipe is Moonlight's (arXiv 2502.16982): an
update has the root mean square of AdamW's.

Nothing of an update is decided by the host but the numbers of `StepNumbers`, so that it is captured
as a CUDA graph.

Legend: B matrices of a stack, M rows, N columns.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core import parallel_state as ps
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer.param_layout import FullParamLayout
from torch import Tensor

from phalanx.extras.muon.elementwise import momentum, move_
from phalanx.extras.muon.matrices import (
    Matrices,
    Range,
    hand_on,
    joined,
    layout,
    mark,
    of,
    pieces,
    untag,
)
from phalanx.extras.muon.newton_schulz.symmetric import gram, polynomial
from phalanx.kernels.expert_mlp.main_grad import facts_of
from phalanx.parallel.megatron.adam import AdamW, Setup, StepNumbers
from phalanx.parallel.megatron.updated import parts, updated

_COEFFICIENTS, _ABC = "simple", (3.4445, -4.7750, 2.0315)
"""Moonlight's, by their name in emerging-optimizers and as a, b and c in X <- (a I + b A + c A^2) X
with A = X X^T."""
_RMS = 0.2
"""RMS of an update before the learning rate, about that of AdamW: factor on the orthogonal matrix,
beside sqrt(max(M, N))."""
_SLICE = 64 << 20
"""Elements that are made orthogonal at a time, but for larger matrices: 256 MiB of fp32. With half
as many the products of Moonlight's experts leave a tenth of an H200 without work."""


@dataclass(frozen=True)
class Recipe:
    """How a matrix is updated."""

    momentum: float
    steps: int
    dtype: torch.dtype  # bf16 or fp32, of the matrices that are multiplied
    tensor_group: Any = None  # ranks that share the matrices whose `split` is set; they gather them


class Muon(AdamW):
    """AdamW whose parameters with `Matrices` (extras.muon.matrices) are updated by Muon.

    These are updated as a whole: what is updated for one, flat or not, has all of its elements.
    Their state is `momentum_buffer`, in the dtype of `moments`; the rest is as in `AdamW`.

    Raises:
        ImportError: emerging-optimizers is not installed.
    """

    own_state = "momentum_buffer"

    def __init__(self, params: Iterable[Any], *given: Any, recipe: Recipe, **named: Any) -> None:
        self._library = _library()
        super().__init__(params, *given, **named)
        self.recipe = recipe

    def _moments_of(self, p: Tensor) -> tuple[str, ...]:
        return super()._moments_of(p) if of(p) is None else (self.own_state,)

    def batches(
        self, params: Iterable[Tensor], packed: Callable[[list[Tensor]], Iterator[list[Range]]]
    ) -> Iterator[list[Range]]:
        """Ranges of parameters that are updated at a time, in order; `packed` makes AdamW's."""
        params = list(params)
        yield from packed([p for p in params if of(p) is None])
        yield from self._together(params)

    def part_of(self, part: Tensor, whole: Tensor) -> None:
        """Note on a part of a parameter, of whole matrices, which they are."""
        if (found := of(whole)) is not None:
            batch = found.batch * part.numel() // whole.numel()
            facts_of(part).matrices = replace(found, batch=batch)

    def _update(self, group: dict[str, Any], params: list[Tensor], numbers: StepNumbers) -> None:
        super()._update(group, [p for p in params if of(p) is None], numbers)
        for ranges in self._together(params):
            self._move([self._with_momentum(each, numbers) for each in ranges], numbers)

    def _together(self, params: Iterable[Tensor]) -> Iterator[list[Range]]:
        """Ranges of whole matrices, of `_SLICE` elements or a larger matrix at a time."""
        waiting, size = list[Range](), 0
        for p in sorted(params, key=torch.numel):  # small ones of all layers together
            if (matrices := of(p)) is not None:
                matrix = p.numel() // matrices.batch
                for begin in range(0, p.numel(), step := max(1, _SLICE // matrix) * matrix):
                    part = Range(p, begin, min(begin + step, p.numel()))
                    if waiting and size + part.stop - begin > _SLICE:
                        yield waiting
                        waiting, size = [], 0
                    waiting.append(part)
                    size += part.stop - begin
        if waiting:
            yield waiting

    def _with_momentum(self, part: Range, numbers: StepNumbers) -> "_Move":
        p, matrices, state = part.tensor, of(part.tensor), self.state[part.tensor]
        assert matrices is not None
        shape = ((part.stop - part.start) * matrices.batch // p.numel(), -1, matrices.columns)

        def stack(t: Tensor) -> Tensor:
            return t.detach().view(-1)[part.start : part.stop].view(shape)

        update = momentum(
            stack(getattr(p, self._grad)),
            stack(state[self.own_state]),
            keep=self.recipe.momentum,
            nesterov=True,
            clip_coef=numbers.clip_coef,
            # The library normalizes the matrices that it takes before it rounds them.
            dtype=self.recipe.dtype if matrices.split is None else torch.float32,
        )
        remainder = stack(state["remainder"]) if "remainder" in state else None
        return _Move(stack(p), remainder, matrices, pieces(update, matrices))

    def _move(self, waiting: list["_Move"], numbers: StepNumbers) -> None:
        """Move what waits. Matrices of one shape are made orthogonal together."""
        alike = defaultdict[Any, list[tuple[_Move, int]]](list)
        for move in waiting:
            for i, part in enumerate(move.parts):
                alike[part.shape[1:], move.matrices.split].append((move, i))
        for (_, split), places in alike.items():
            stacks = [move.parts[i] for move, i in places]
            made = self._orthogonal(stacks[0] if len(stacks) == 1 else torch.cat(stacks), split)
            for (move, i), stack in zip(places, made.split([len(s) for s in stacks]), strict=True):
                move.parts[i] = stack
        how: dict[str, Any] = dict(kept=numbers.decay, rate=numbers.lr)
        for move in waiting:
            update = joined(move.parts, move.matrices)
            move_(move.weight, update, **how, remainder=move.remainder)

    def _orthogonal(self, stack_BMN: Tensor, split: int | None) -> Tensor:
        """Scaled to the update of weights, before the learning rate; contiguous."""
        how, lib = self.recipe, self._library
        rows, columns = stack_BMN.shape[-2:]
        if split is None:
            scale = _RMS * lib.scale(rows, columns, mode="spectral")
            return orthogonal(stack_BMN, how.steps, how.dtype, scale)
        given = (how.steps, _COEFFICIENTS, how.tensor_group, split)
        with lib.precision("medium" if how.dtype == torch.bfloat16 else "highest"):
            # Shards of rows are whole heads or a slice of a half: their order in the gathered
            # matrix is that of the ranks, and an orthogonal factor does not depend on it.
            made = torch.stack([lib.newton_schulz_tp(part, *given) for part in stack_BMN])
        ranks = how.tensor_group.size()
        rows, columns = (rows * ranks, columns) if split == 0 else (rows, columns * ranks)
        # What the library made of more rows than columns is a transposed view.
        found = torch.empty(made.shape, device=made.device)
        return torch.mul(made, _RMS * lib.scale(rows, columns, mode="spectral"), out=found)


def orthogonal(stack_BMN: Tensor, steps: int, dtype: torch.dtype, scale: float) -> Tensor:
    """Matrices by Newton-Schulz iterations near their orthogonal factors, times `scale`.

    Args:
        stack_BMN: fp32 or of `dtype`, contiguous; matrices of zeros stay zero.
        steps: number of iterations, at least 1.
        dtype: bf16 or fp32, of the products' operands and of the result; sums are fp32.
        scale: applied in the last product, before its result is rounded.
    """
    x_BMN, scale_B = stack_BMN.to(dtype), None
    tall = x_BMN.shape[1] > x_BMN.shape[2]
    for step, factor in enumerate([1.0] * (steps - 1) + [scale]):
        gram_BSS = gram(x_BMN)
        if step == 0:
            # The first iteration divides by the norm, whose square is the trace. As in the library,
            # norms below 1e-7 count as that.
            square_B = gram_BSS.diagonal(dim1=1, dim2=2).float().sum(1)
            scale_B = square_B.clamp_min_(1e-14).reciprocal_()
        by = polynomial(gram_BSS, _ABC, scale_B)
        scale_B = None
        left, right = (x_BMN, by) if tall else (by, x_BMN)
        x_BMN = torch.baddbmm(x_BMN, left, right, beta=0, alpha=factor)  # beta=0: a bmm, scaled
    return x_BMN


class MuonSetup(Setup):
    """Muon in the engine: parameters are marked with their matrices, and lie whole on one rank."""

    kind = Muon

    def mark(self, chunk: torch.nn.Module) -> None:
        mark(chunk, self.config)

    def layout(
        self, chunk: torch.nn.Module, ddp: DistributedDataParallelConfig, *, one_bucket: bool
    ) -> FullParamLayout:
        return layout(chunk, self.config, ddp, one_bucket=one_bucket)

    def wrapped(self, chunk: torch.nn.Module) -> None:
        untag(chunk)

    def options(self) -> dict[str, Any]:
        o, tensor_group = self.optim, ps.get_tensor_model_parallel_group()
        dtype = torch.bfloat16 if self.config.bf16 else torch.float32
        return {"recipe": Recipe(o.momentum, o.ns_steps, dtype, tensor_group)}

    def built(self, optimizer: Any) -> None:
        for part in parts(optimizer):
            hand_on((u.parameter, u.main) for u in updated(part))


@dataclass
class _Move:
    weight: Tensor
    remainder: Tensor | None
    matrices: Matrices
    parts: list[Tensor]  # its momentum as stacks of matrices, and then these made orthogonal


@dataclass(frozen=True)
class _Library:
    newton_schulz_tp: Any
    scale: Any
    precision: Any


def _library() -> _Library:
    # Here, since a run with AdamW needs none of it.
    from emerging_optimizers.orthogonalized_optimizers.muon import get_muon_scale_factor
    from emerging_optimizers.orthogonalized_optimizers.muon_utils import newton_schulz_tp
    from emerging_optimizers.utils import fp32_matmul_precision

    return _Library(newton_schulz_tp, get_muon_scale_factor, fp32_matmul_precision)
