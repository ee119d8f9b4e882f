"""The routing of a trained model, written to a file that other runs replay (run.record_routing).

After the last step the batches of that step go through the model once more, in evaluation mode, and
what every router chooses goes to rank 0: the tokens of all ranks, in the order of ranks.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.configs.knobs import pluralize
from phalanx.configs.schema import Config
from phalanx.moe.router import balance
from phalanx.moe.router.recording import MOST_TOKENS, Ids, layer_name, write
from phalanx.moe.training.setup import Job
from phalanx.moe.training.step import Batch, Step
from phalanx.parallel.fault.agreement import gather, on_main


def record_routing(cfg: Config, job: Job, compute: Step, batches: list[Batch], step: int) -> str:
    """Write `run.record_routing`. All ranks call it together.

    Args:
        cfg: of the run.
        job, compute: of this rank.
        batches: of the last step.
        step: its number.

    Returns:
        A line for the run's events.

    Raises:
        Failed: the file cannot be written.
    """
    engine = job.engine
    engine.eval()
    with torch.no_grad(), _listening(engine.modules) as heard:
        compute(batches, balance.snapshot(engine.modules), forward_only=True)
    engine.train()
    share = MOST_TOKENS // (dist.get_world_size() // job.groups.pipeline)
    # A pass that was run again for want of rows is heard twice.
    chunks = {name: torch.cat(of[-len(batches) :])[:share] for name, of in heard.items()}
    everyone = gather({name: of.cpu().numpy().astype(np.uint16) for name, of in chunks.items()})
    names = sorted({name for of in everyone for name in of}, key=_order)
    ids = {name: np.concatenate([of[name] for of in everyone if name in of]) for name in names}
    path, experts = Path(cfg.run.record_routing), cfg.model.moe.experts
    facts = on_main(lambda: write(path, ids, model=cfg.model.name, experts=experts, step=step))
    ranks = job.groups.pg.ep.size()
    return (
        f"recorded the routing of {pluralize(f'{facts.tokens:,}', 'token')} in "
        f"{pluralize(len(names), 'layer')} to {path}: {loads(ids, experts, ranks)}"
    )


def loads(ids: dict[str, Ids], experts: int, ranks: int) -> str:
    """How even a recorded routing is, in words."""
    count_LE = np.stack([np.bincount(of.ravel(), minlength=experts) for of in ids.values()])
    expert = (count_LE.max(1) / count_LE.mean(1)).max()
    rank_LR = count_LE.reshape(len(ids), ranks, -1).sum(2)
    said = f"the busiest expert has {expert:.2f} x the mean"
    if ranks > 1:
        rank = (rank_LR.max(1) / rank_LR.mean(1)).mean()
        said += f", the busiest of {pluralize(ranks, 'rank')} {rank:.2f} x, on average over layers"
    return said


@contextmanager
def _listening(chunks: list[torch.nn.Module]) -> Iterator[dict[str, list[Tensor]]]:
    """Choices [T, K] of every router that runs inside, by the name of its layer."""
    heard: dict[str, list[Tensor]] = {}
    handles = []

    def hear(router: Any, _: Any, routed: tuple[Tensor, Tensor]) -> None:
        name = layer_name(router.layer_number, router.is_mtp_layer)
        heard.setdefault(name, []).append(routed[0][:, : router.top_k])

    try:
        handles += [router.register_forward_hook(hear) for router in balance.routers(chunks)]
        yield heard
    finally:
        for handle in handles:
            handle.remove()


def _order(name: str) -> tuple[bool, int]:
    kind, number = name.split(".")
    return kind != "layer", int(number)
