"""The routing of a trained model, written to a file that other runs replay (run.record_routing).

After the last step the model evaluates the batches of that step once more, and rank 0 collects the
choices of every router for the tokens of all ranks, in the order of ranks.
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
from phalanx.configs.redact import redacted
from phalanx.configs.schema import Config
from phalanx.configs.validate import ConfigError
from phalanx.moe.job import Job
from phalanx.moe.router import balance
from phalanx.moe.router.recording import MOST_TOKENS, Ids, layer_name, write
from phalanx.moe.run.step import Batch, Step
from phalanx.parallel.fault.agreement import Failed, gather, on_main


def record_routing(cfg: Config, job: Job, compute: Step, batches: list[Batch], step: int) -> str:
    """Write `run.record_routing` and return a line for the run's events. Collective.

    The `batches` are those of the last step. Raises ConfigError if the file cannot be written.
    """
    engine = job.engine
    engine.eval()
    with torch.no_grad(), _recording(engine.modules) as recorded:
        compute(batches, balance.snapshot(engine.modules), forward_only=True)
    engine.train()
    share = MOST_TOKENS // (dist.get_world_size() // job.groups.pipeline)
    # A pass that was repeated for lack of rows is recorded twice; the last one counts.
    chunks = {name: torch.cat(x[-len(batches) :])[:share] for name, x in recorded.items()}
    by_rank = gather({name: x.cpu().numpy().astype(np.uint16) for name, x in chunks.items()})
    names = sorted({name for layers in by_rank for name in layers}, key=_order)
    ids = {name: np.concatenate([x[name] for x in by_rank if name in x]) for name in names}
    path, experts = Path(cfg.run.record_routing), cfg.model.moe.experts
    name = redacted(cfg.model.name)
    try:
        facts = on_main(lambda: write(path, ids, model=name, experts=experts, step=step))
    except Failed as failed:
        raise ConfigError(
            f"the routing was not written to run.record_routing={path}: {failed}; all steps are "
            "done: train one more with a file that can be written"
        ) from None
    ranks = job.groups.pg.ep.size()
    return (
        f"recorded the routing of {pluralize(f'{facts.tokens:,}', 'token')} in "
        f"{pluralize(len(names), 'layer')} to {path}: {loads(ids, experts, ranks)}"
    )


def loads(ids: dict[str, Ids], experts: int, ranks: int) -> str:
    """Load of a recorded routing as a phrase."""
    count_LE = np.stack([np.bincount(x.ravel(), minlength=experts) for x in ids.values()])
    expert = (count_LE.max(1) / count_LE.mean(1)).max()
    rank_LR = count_LE.reshape(len(ids), ranks, -1).sum(2)
    phrase = f"the busiest expert has {expert:.2f} x the mean"
    if ranks > 1:
        rank = (rank_LR.max(1) / rank_LR.mean(1)).mean()
        phrase += (
            f", the busiest of {pluralize(ranks, 'rank')} {rank:.2f} x, on average over layers"
        )
    return phrase


@contextmanager
def _recording(chunks: list[torch.nn.Module]) -> Iterator[dict[str, list[Tensor]]]:
    recorded: dict[str, list[Tensor]] = {}
    handles = []

    def record(router: Any, _: Any, routed: tuple[Tensor, Tensor]) -> None:
        name = layer_name(router.layer_number, router.is_mtp_layer)
        recorded.setdefault(name, []).append(routed[0][:, : router.top_k])

    try:
        handles += [router.register_forward_hook(record) for router in balance.routers(chunks)]
        yield recorded
    finally:
        for handle in handles:
            handle.remove()


def _order(name: str) -> tuple[bool, int]:
    kind, number = name.split(".")
    return kind != "layer", int(number)
