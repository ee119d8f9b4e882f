"""How far a few steps move what a model computes, by width: the coordinate check of muP.

If rates and initial scales suit every width, the mean absolute change of each kind of activation
after some steps does not depend on it (arXiv 2203.03466, appendix D.1).

Legend: T tokens, D hidden, E experts, F columns of fc1.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from phalanx.configs.load import load
from phalanx.configs.validate import validate
from phalanx.moe.layer import MoE
from phalanx.moe.model.transformer_layer import Layer
from phalanx.moe.router import balance
from phalanx.moe.router.logits import gate
from phalanx.moe.run.progress import TrainingData, datasets
from phalanx.moe.run.setup import setup
from phalanx.moe.run.step import Step
from phalanx.parallel.runtime import Runtime

KINDS = (
    *("embedding", "attention", "expert fc1", "experts"),
    *("router logits", "router update", "logits"),
)
"""`router update`: what the change of the router's weights alone adds to its logits."""
HEAD = 16  # channels of a head, at every width
Recorded = dict[str, list[Tensor]]  # outputs of each layer, by kind


def overrides(width: int, base: int, *more: str) -> list[str]:
    """Overrides of a tiny mixture, of `width` channels with rates of `base`; 0 for those given.

    Heads and experts are in proportion.
    """
    shape = {
        "hidden": width,
        "attention.heads": width // HEAD,
        "attention.kv_heads": max(1, width // HEAD // 2),
        "attention.head_dim": HEAD,
        "moe.ffn": 2 * width,
        "moe.experts": 4,
        "moe.router.aux_loss": 1e-2,
        "layers": 2,
        "init_std": 0.05,
    }
    return [
        *("model=tiny", "precision=fp32", "run.device=cpu", "run.save_interval=-1"),
        *("data.sequence_length=64", "data.micro_batch=8", "data.global_batch=8"),
        *("optim.schedule=constant", "optim.warmup_steps=0", "optim.lr=8e-3", "optim.min_lr=0"),
        *("optim.weight_decay=0", "run.steps=9"),
        *(f"model.{name}={value}" for name, value in shape.items()),
        *([f"model.variants=[mup:{base}]"] if base else []),
        *more,
    ]


def changes(given: Sequence[str], runtime: Runtime, steps: int) -> list[dict[str, float]]:
    """Mean absolute change of each of `KINDS` after 1 to `steps` steps.

    Trains a model of its own by the engine of a run, on one rank without a pipeline; the batch that
    is looked at comes before those of the steps.
    """
    cfg = load(given)
    validate(cfg, runtime.world)
    job = setup(cfg, runtime)
    compute, engine = Step(cfg, job), job.engine
    data = TrainingData(cfg, job, datasets(cfg, (steps + 1) * cfg.data.global_batch)[0])
    batches = data.loader.next_step()
    layers = [m for m in engine.modules[0].modules() if isinstance(m, MoE)]
    began = {layer: layer.router.weight.detach().clone() for layer in layers}

    def recorded() -> Recorded:
        engine.eval()
        with torch.no_grad(), _watched(engine.modules[0], began) as seen:
            compute(batches, balance.snapshot(engine.modules), forward_only=True)
        engine.train()
        return seen

    before, found = recorded(), list[dict[str, float]]()
    for _ in range(steps):
        read = data.loader.next_step()
        engine.zero_grad()
        compute.update(compute(read, balance.snapshot(engine.modules)).norm)
        found.append(_differences(before, recorded()))
    data.loader.close()
    return found


def slope(by_width: Mapping[int, float]) -> float:
    """Exponent of the width by which a size grows: least squares on logarithms."""
    points = [(math.log(width), math.log(size)) for width, size in by_width.items()]
    x, y = (sum(values) / len(points) for values in zip(*points, strict=True))
    return sum((a - x) * (b - y) for a, b in points) / sum((a - x) ** 2 for a, _ in points)


def _differences(before: Recorded, after: Recorded) -> dict[str, float]:
    return {
        kind: sum(
            float((a - b).abs().mean()) for a, b in zip(after[kind], before[kind], strict=True)
        )
        / len(before[kind])
        for kind in KINDS
    }


@contextmanager
def _watched(model: Any, routers: Mapping[MoE, Tensor]) -> Iterator[Recorded]:
    """Inside, forward passes of a model append their activations to the result.

    `routers` are the initial weights of the router of each layer.
    """
    seen: Recorded = defaultdict(list)

    def first(kind: str) -> Any:
        def hook(module: Any, given: Any, out: Any) -> None:
            seen[kind].append((out[0] if isinstance(out, tuple) else out).clone())

        return hook

    def of_experts(layer: MoE, given: Any, named: dict[str, Any], out: Any) -> None:
        x_TD, weight_ED = given[0].flatten(0, 1), layer.router.weight
        seen["router logits"].append(gate(x_TD, weight_ED, layer.router.bias))
        seen["router update"].append(gate(x_TD, weight_ED - routers[layer], None))
        seen["expert fc1"].append(torch.einsum("td,efd->tef", x_TD, layer.experts.w1))
        seen["experts"].append(out[0] - named["residual"])

    held = [
        model.embedding.register_forward_hook(first("embedding")),
        model.output_layer.register_forward_hook(first("logits")),
    ]
    for layer in (module for module in model.modules() if isinstance(module, Layer)):
        held.append(layer.self_attention.register_forward_hook(first("attention")))
        held.append(layer.mlp.register_forward_hook(of_experts, with_kwargs=True))
    try:
        yield seen
    finally:
        for each in held:
            each.remove()
