"""Random combinations of knobs that must not change training, against one process.

`test_layouts` has each layout by itself; this finds errors of combinations, with recomputation,
replication, offloading or another optimizer. A seed draws until `configs.validate` accepts the
combination: rejected ones cost nothing, and accepted ones have to train.

    SEEDS=1000:1200 python -m pytest -m slow tests/end_to_end/layouts/test_random_layouts.py
"""

import copy
import functools
import os
import random
from typing import Any

import pytest

from phalanx.configs.knobs import put
from phalanx.configs.load import load
from phalanx.configs.schema import Config
from phalanx.configs.validate import ConfigError, validate
from tests.end_to_end.layouts.test_layouts import MODELS, agree
from tests.support.training import Trained, trained

pytestmark = [pytest.mark.dist, pytest.mark.slow]

NAMES = [name for name in MODELS if name != "balanced"]  # whose losses depend on the replicas
AGAIN = ["norm", "mla_up", "attention", "mlp", "expert_h", "moe", "full"]
"""Without `moe_act`, which needs Transformer Engine."""
MOVED = ["residual", "attention", "expert_h"]
OFTEN, SELDOM = 0.5, 0.25


def seeds() -> range:
    """Seeds of this session: twelve, or those in the environment."""
    first, last = os.environ.get("SEEDS", "0:12").split(":")
    return range(int(first), int(last))


@functools.cache
def alone(name: str, training: tuple[str, ...]) -> Trained:
    return trained(1, [*MODELS[name], *training])


def drawn(r: random.Random) -> tuple[str, tuple[str, ...], int, dict[str, Any]]:
    """A model, knobs that change its training, ranks, and knobs that do not."""
    name, ranks = r.choice(NAMES), r.choice([1, 2, 2, 4, 4])
    training = [f"data.global_batch={r.choice([4, 8])}"]
    training += ["optim.kind=muon"] * (r.random() < OFTEN)
    training += ["optim.max_logit_every=1"] * (r.random() < SELDOM)
    how: dict[str, Any] = {}
    for kind in ("tensor", "context", "pipeline"):
        if r.random() < OFTEN:
            how[f"parallel.{kind}"] = r.choice([2, 2, 4])
    if r.random() < SELDOM:
        how["parallel.virtual_pipeline"] = 2
    how["parallel.expert"] = r.choice([1, 2, 4])
    how["kernels.backend"] = r.choice(["auto", "torch", "torch", "megatron"])
    how["parallel.capacity_factor"] = r.choice([1.0, 1.25, 2.0, 16.0])
    for knob in ("distributed_optimizer", "overlap"):
        how[f"parallel.{knob}"] = r.random() < OFTEN
    if r.random() < OFTEN:
        how["parallel.expert_replication"] = r.choice([1, 2, 3])
    if r.random() < OFTEN:
        how["run.recompute"] = r.sample(AGAIN, r.choice([1, 1, 2, 3]))
    if r.random() < SELDOM:
        how["run.offload"] = r.sample(MOVED, r.choice([1, 2]))
    return name, tuple(training), ranks, how


@functools.cache
def loaded(name: str, training: tuple[str, ...]) -> Config:
    return load([*MODELS[name], *training, "run.device=cpu", "data=synthetic"])


def allowed(name: str, training: tuple[str, ...], ranks: int, how: dict[str, Any]) -> bool:
    cfg = copy.deepcopy(loaded(name, training))
    for path, value in how.items():
        put(cfg, path, value)
    try:
        validate(cfg, ranks)
    except ConfigError:
        return False
    return True


@pytest.mark.parametrize("seed", seeds())
def test_what_is_allowed_trains_as_one_process(seed: int) -> None:
    r = random.Random(seed)
    while not allowed(*(actual := drawn(r))):
        pass
    name, training, ranks, how = actual
    agree(trained(ranks, [*MODELS[name], *training], how), alone(name, training))
