"""Masks in a run: gradients of dead blocks are zeros, and masks change between two steps.

- In a step, after the reduction and before the norm: the squares of the gradients of all blocks are
  kept, and dead blocks of the gradients become zeros. Norm, clipping and optimizer see living
  blocks alone, and AdamW leaves a weight of 0 with moments of 0 where it is. This is part of the
  step that a CUDA graph captures.
- After an update of the weights, at steps of the schedule: norms of weights and the kept norms of
  gradients choose the masks, and all that belongs to a dead block becomes 0: weight, master weight,
  moments, average (`optim.ema`). A block that has grown begins with zeros.

Gradients of dead blocks never reach the optimizer. To let them through in one step, and take the
score from the first moment, would save a read of the gradients, but let norm, clipping and
`run.skip_spikes` see a step that is not like the others.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.configs.arithmetic.layers import of_variants
from phalanx.configs.schema import Config, ModelConfig, RunConfig
from phalanx.extras.block_sparse.facts import Blocks
from phalanx.extras.block_sparse.masks import BlockMasks, Matrix
from phalanx.extras.block_sparse.schedule import Schedule, living_blocks
from phalanx.extras.block_sparse.selection import choose
from phalanx.extras.block_sparse.slices import squares, zero_dead_
from phalanx.kernels.registry import Choice
from phalanx.parallel.checkpoint.saved_knobs import CheckpointMismatch
from phalanx.parallel.engine import Engine
from phalanx.parallel.megatron.updated import Updated, parts, updated


def install(cfg: Config, engine: Engine) -> list[Choice]:
    """Have an engine keep to the masks of its model; lines of the start page."""
    (facts,) = (v for v in of_variants(cfg.model) if isinstance(v, Blocks))
    layers = MaskedTraining(facts, cfg.model, cfg.run, engine).layers
    living = f"{facts.living(cfg.model)} of {facts.blocks(cfg.model)} live in the end"
    skips = any(layer.skips for layer in layers)
    dead = "fused kernels in bf16 skip dead ones" if skips else "kernels multiply dead ones too"
    return [Choice("blocks", facts.name, f"{living}; {dead}")]


class _Masked:
    """One matrix of the experts of a layer, and what this rank updates of it."""

    def __init__(self, matrix: Matrix, block: int, owned: Sequence[tuple[Updated, Any]]) -> None:
        self.matrix, self._block, self._owned = matrix, block, owned
        self.gradient = torch.zeros_like(matrix.living, dtype=torch.float32)
        """Squares of the gradients of blocks in the last step, of this rank's slices."""

    def keep_and_mask_gradients(self) -> None:
        dead, found = self.matrix.dead_rows(), list[tuple[Tensor, int]]()
        for each, _ in self._owned:
            main: Any = each.main
            grad = getattr(main, "decoupled_grad", None)
            grad = main.grad if grad is None else grad
            if grad is not None:  # as of weights that are frozen
                found.append((grad.view(-1), each.start))
        self.gradient.copy_(self._squares(found))
        for flat, start in found:
            zero_dead_(flat, start, dead, self._block)

    def weight(self) -> Tensor:
        """Squares of the weights of blocks, of this rank's slices."""
        return self._squares([(u.main.detach().view(-1), u.start) for u, _ in self._owned])

    def zero_dead(self) -> None:
        """Make what the optimizer keeps of dead blocks zeros."""
        dead = self.matrix.dead_rows()
        for each, part in self._owned:
            states = part.optimizer.state.get(each.main, {}).values()
            for kept in (each.main.detach(), *states):
                if isinstance(kept, Tensor) and kept.numel() == each.main.numel():
                    zero_dead_(kept.view(-1), each.start, dead, self._block)

    def _squares(self, slices: Sequence[tuple[Tensor, int]]) -> Tensor:
        total, weight = torch.zeros_like(self.gradient), self.matrix.weight
        rows, columns = weight.shape[:2].numel(), weight.size(2)
        for flat, start in slices:
            total += self.matrix.of_blocks(squares(flat, start, rows, columns, self._block))
        return total


class MaskedTraining:
    """The masks of all layers of this rank, in the steps of an engine."""

    def __init__(self, facts: Blocks, model: ModelConfig, run: RunConfig, engine: Engine) -> None:
        self._facts, self._model, self._run = facts, model, run
        self._loaded = 0  # living blocks of a matrix in a checkpoint, until masks have changed
        self._scheduler, self._began = engine.scheduler, 0
        self.layers = list(_masks(engine))
        owned: dict[int, list[tuple[Updated, Any]]] = {}
        for part in parts(engine.optimizer):
            for each in updated(part):
                owned.setdefault(id(each.parameter), []).append((each, part))
        self._matrices = [
            _Masked(matrix, layer.block, owned.get(id(matrix.weight), []))
            for layer in self.layers
            for matrix in layer.matrices()
        ]
        self._prepare, engine.optimizer.prepare_grads = engine.optimizer.prepare_grads, self.prepare
        self._update, engine.step = engine.step, self.step  # type: ignore[method-assign]
        self._next, engine.scheduler.step = engine.scheduler.step, self.next
        self._announce()

    @torch.no_grad()
    def prepare(self, *given: Any, **named: Any) -> Any:
        """`prepare_grads` of the optimizer, and then its gradients are masked. Captured."""
        result = self._prepare(*given, **named)
        for each in self._matrices:
            each.keep_and_mask_gradients()
        return result

    def step(self, *given: Any, **named: Any) -> float:
        """`Engine.step`, and the update of the masks that is due after it."""
        norm = self._update(*given, **named)
        schedule, step = self._schedule, self._done
        late = step > schedule.last and self._loaded > self._facts.living(self._model)
        if schedule.due(step) or late:
            self._loaded = 0
            self.change(schedule.density(step), schedule.exchanged(step))
        return norm

    def next(self, increment: int) -> None:
        """`step` of the scheduler, which every step calls, also a skipped one, and a load."""
        self._next(increment)
        if any(layer.loaded for layer in self.layers):
            self._loaded = self._number_loaded()
            self._began = int(self.layers[0].began[0])
            if self._began < 0:  # the checkpoint was of a dense model
                phases, steps = self._run.phases, self._scheduler.num_steps
                self._began = phases[-1].first if phases else steps
            for layer in self.layers:
                layer.began.fill_(self._began)
                layer.loaded = False
        self._announce()

    def _number_loaded(self) -> int:
        """Living blocks of a matrix in a checkpoint, unless fewer than are to live in the end."""
        living_n = self.layers[0].living_fc1[0].flatten()
        living, blocks, name = int(living_n.sum()), living_n.numel(), self._facts.name
        if living < self._facts.living(self._model):
            fits = [n for n in range(1, 101) if living_blocks(blocks, n / 100) <= living]
            raise CheckpointMismatch(
                f"model.variants has {name}:{self._facts.size}, which is more than the {living} of "
                f"{blocks} blocks that live in the checkpoint, and their number never grows; "
                f"set it to {name}:{min(fits, key=lambda n: abs(n * blocks - 100 * living))}"
            )
        return living

    @torch.no_grad()
    def change(self, density: float, exchanged: float) -> None:
        """Choose the masks anew, and make dead blocks zeros. Collective."""
        if not self._matrices:
            return
        found = [(each.weight(), each.gradient) for each in self._matrices]
        flat = torch.cat([score.flatten() for pair in found for score in pair])
        dist.all_reduce(flat, group=self.layers[0].group)
        scores = iter(flat.split([score.numel() for pair in found for score in pair]))
        for each in self._matrices:
            living = each.matrix.living
            of_experts = living.flatten(1)
            chosen = choose(
                of_experts,
                next(scores).view_as(of_experts),
                next(scores).view_as(of_experts),
                most=living_blocks(of_experts.size(1), density),
                exchanged=exchanged,
            )
            living.copy_(chosen.view_as(living))
            each.zero_dead()
        for layer in self.layers:
            layer.changed()

    @property
    def _schedule(self) -> Schedule:
        return self._facts.schedule(self._run.steps - self._began)

    @property
    def _done(self) -> int:
        """Steps since the masks began."""
        return int(self._run.schedule_begin + self._scheduler.num_steps - self._began)

    def _announce(self) -> None:
        """Tell kernels whether the next step needs the gradients of dead blocks."""
        due = self._schedule.due(self._done + 1)
        for layer in self.layers:
            layer.want_all(due)


def _masks(engine: Engine) -> Iterator[BlockMasks]:
    for chunk in engine.modules:
        for module in chunk.modules():
            if isinstance(module, BlockMasks):
                yield module
