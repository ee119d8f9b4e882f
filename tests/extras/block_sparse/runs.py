"""Contexts of runs with block-sparse experts: what is seen after each step, and a dense reference.

Used as the `change` of `tests.support.runs.run`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from tests.support.runs import SMALL

BLOCK = 64
MODEL = [
    *SMALL,
    "model=tiny",
    "model.attention.head_dim=8",
    "model.hidden=128",
    "model.moe.ffn=192",
    "model.moe.experts=4",
    "model.moe.dense_layers=1",
    "model.layers=3",
    "data.micro_batch=2",
    "data.global_batch=4",
    "optim.lr=3e-3",
]
"""Experts of 3 x 2 blocks of 64 x 64 in each of their matrices, in two layers of three."""
HALF = "model.variants=[blocks64:50]"
EXCHANGED = 1.0  # of three living blocks one is exchanged at a constant density, at this share


def tensors(training: Any, matrix: Any) -> Iterator[tuple[str, Tensor, int]]:
    """(name, elements, place of the first one) of all that belongs to a matrix on this rank."""
    yield "weight", matrix.matrix.weight.detach().flatten(), 0
    for each, part in matrix._owned:
        yield "main", each.main.detach().flatten(), each.start
        for name, state in part.optimizer.state[each.main].items():
            yield name, state.detach().flatten(), each.start


def dead_elements(matrix: Any) -> Tensor:
    """bool, flattened, where a matrix in the order [gate; up] is dead."""
    living, rows = matrix.matrix.living, matrix.matrix.weight.size(1)
    lives = living.repeat_interleave(BLOCK, 1).repeat_interleave(BLOCK, 2)
    return ~lives.repeat(1, rows // lives.size(1), 1).flatten()


class Seen(dict[str, Any]):
    """`masks`: living blocks of both matrices of each layer after each step; `names`: tensors that
    were looked at; `wrong`: those with something in a dead block; `wanted`: steps that want all
    gradients, by number; `ended`: weights of the matrices after the last step."""


@contextmanager
def watched(rank: int) -> Iterator[Seen]:
    """Look at all masked tensors after each step."""
    from phalanx.extras.block_sparse import schedule, training

    seen = Seen(masks=[], names=set(), wrong=[], wanted=[])
    original = training.MaskedTraining.step
    announce = training.MaskedTraining._announce

    def step(self: Any, *given: Any, **named: Any) -> float:
        norm: float = original(self, *given, **named)
        seen["masks"].append([m.matrix.living.clone() for m in self._matrices])
        seen["ended"] = [m.matrix.weight.detach().clone() for m in self._matrices]
        for matrix in self._matrices:
            dead = dead_elements(matrix)
            for name, flat, start in tensors(self, matrix):
                seen["names"].add(name)
                if flat[dead[start : start + flat.numel()]].count_nonzero():
                    seen["wrong"].append((len(seen["masks"]), name))
        return norm

    def announced(self: Any) -> None:
        announce(self)
        if self.layers and self.layers[0].wants_all:
            seen["wanted"].append(self._scheduler.num_steps + 1)

    with (
        mock.patch.object(schedule, "EXCHANGED", EXCHANGED),
        mock.patch.object(training.MaskedTraining, "step", step),
        mock.patch.object(training.MaskedTraining, "_announce", announced),
    ):
        yield seen


class Multiplied:
    """A dense run whose experts multiply their weights by masks, which were recorded in a file.

    After each step weights and moments of dead blocks become zeros by loops over blocks; nothing of
    the variant is used.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @contextmanager
    def __call__(self, rank: int) -> Iterator[list[Tensor]]:
        from phalanx.kernels.expert_mlp.mlp_spec import MLPWeights
        from phalanx.moe import experts
        from phalanx.parallel.engine import Engine

        recorded, ended = torch.load(self.path), []
        steps, update = [0], Engine.step
        layers: list[Any] = []

        def of_weight(living: Tensor, weight: Tensor) -> Tensor:
            mask = torch.zeros_like(weight)
            _, rows, columns = living.shape
            for e, i, j in living.nonzero().tolist():
                for half in range(0, weight.size(1), rows * BLOCK):
                    at = half + i * BLOCK
                    mask[e, at : at + BLOCK, j * BLOCK : (j + 1) * BLOCK] = 1
            assert columns * BLOCK == weight.size(2)
            return mask

        def masks(layer: Any) -> tuple[Tensor, Tensor]:
            if not steps[0]:
                return torch.ones_like(layer.w1), torch.ones_like(layer.w2)
            at = 2 * layers.index(layer)
            first, second = recorded[steps[0] - 1][at : at + 2]
            return of_weight(first, layer.w1), of_weight(second, layer.w2)

        def weights(w1: Tensor, w2: Tensor, *biases: Any) -> Any:
            layer = next((x for x in layers if x.w1 is w1), None)
            if layer is None:
                return MLPWeights(w1, w2, *biases)
            first, second = masks(layer)
            return MLPWeights(w1 * first, w2 * second, *biases)

        def step(engine: Any, *given: Any, **named: Any) -> float:
            norm: float = update(engine, *given, **named)
            steps[0] += 1
            (part,) = engine.optimizer.chained_optimizers[1:]
            for layer in layers:
                for weight, mask in zip((layer.w1, layer.w2), masks(layer), strict=True):
                    state = part.optimizer.state[weight]
                    for each in (weight.detach(), state["exp_avg"], state["exp_avg_sq"]):
                        each.mul_(mask)
            ended[:] = [x.detach().clone() for layer in layers for x in (layer.w1, layer.w2)]
            return norm

        built = experts.Experts.__init__

        def init(self: Any, **named: Any) -> None:
            built(self, **named)
            layers.append(self)

        with (
            mock.patch.object(experts.Experts, "__init__", init),
            mock.patch.object(experts, "MLPWeights", weights),
            mock.patch.object(Engine, "step", step),
        ):
            yield ended
