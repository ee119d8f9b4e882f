"""Results of pure functions of a configuration, kept by the values of the knobs that they read.

A search estimates thousands of configurations that differ in a few knobs, and asks each estimate
a dozen times for the same numbers.
"""

import functools
import marshal
from collections.abc import Callable
from operator import attrgetter
from typing import Any, Concatenate

from phalanx.configs.knobs import knobs
from phalanx.configs.schema import Config
from phalanx.configs.tables.machines import machine_named

STAGES = (
    *("model", "data.sequence_length", "parallel.pipeline"),
    *("parallel.virtual_pipeline", "parallel.pipeline_layout"),
)
"""Knobs on which the layers of pipeline stages depend."""
GROUPS = (
    *("data.micro_batch", "parallel.tensor", "parallel.context", "parallel.expert"),
    *("parallel.expert_replication", "parallel.capacity_factor", "run.device", "run.machine"),
    *("parallel.dispatch", "parallel.save_x", "parallel.comm_sms"),
    *("parallel.overlap_microbatches", "data.document_mask"),
)
"""Knobs on which ranks and their exchanges depend besides."""
LAYERS = (
    *("model", "data.sequence_length", *GROUPS, "parallel.pipeline", "precision", "kernels"),
    *("run.recompute", "run.offload"),
)
"""Knobs on which activations of a layer depend."""
SHARDS = (
    *("parallel.tensor", "parallel.context", "parallel.expert"),
    *("optim", "parallel.distributed_optimizer", "parallel.grad_dtype", "parallel.overlap"),
)
"""Knobs on which weights, gradients and states of the optimizer depend besides."""
STEP = (
    *(*STAGES, *GROUPS, *SHARDS, "precision", "kernels", "data.global_batch"),
    *("data.document_mask", "data.max_documents", "run.recompute", "run.offload", "run.graph"),
    *("run.eval_interval", "run.sample_every", "run.record_routing", "run.tasks"),
)
"""Knobs on which memory and time of a step depend, besides `parallel.delay_wgrad`."""
_MOST = 512  # results of a function, of which all are dropped when there are more


def remembered[**P, R](
    *read: str,
) -> Callable[[Callable[Concatenate[Config, P], R]], Callable[Concatenate[Config, P], R]]:
    """Keep the results of a function whose first argument is a configuration.

    Results are shared, so that nobody may change them; other arguments have to be hashable.

    Args:
        read: knobs, or sections with all of their knobs, on which the result depends. With
            `run.machine` it depends on the machine of that name.
    """

    def decorated(f: Callable[Concatenate[Config, P], R]) -> Callable[Concatenate[Config, P], R]:
        found: dict[Any, R] = {}
        values, on_machine = functools.cache(lambda: _getter(read)), "run.machine" in read

        @functools.wraps(f)
        def call(cfg: Config, *args: P.args, **kwargs: P.kwargs) -> R:
            machine = machine_named(cfg.run.machine) if on_machine else None
            key = (marshal.dumps(values()(cfg), 2), machine, args, *kwargs.items())
            if (result := found.get(key)) is None:
                result = f(cfg, *args, **kwargs)
                if len(found) >= _MOST:
                    found.clear()
                found[key] = result
            return result

        return call

    return decorated


def _getter(read: tuple[str, ...]) -> Callable[[Config], Any]:
    """Values of some knobs and of all knobs in some sections, in lists and tuples."""
    owners: dict[str, list[str]] = {}
    for path in knobs():
        if path in read or path.startswith(tuple(f"{each}." for each in read)):
            owner, _, name = path.rpartition(".")
            owners.setdefault(owner, []).append(name)
    parts = [(attrgetter(owner), attrgetter(*names)) for owner, names in owners.items()]
    return lambda cfg: [values(section(cfg)) for section, values in parts]
