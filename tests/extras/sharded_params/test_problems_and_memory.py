"""Refusals of sharded parameters, and the bytes that they take."""

from collections.abc import Sequence
from pkgutil import resolve_name

import pytest
import torch.distributed as dist

from phalanx.configs.load import load
from phalanx.configs.tables.capabilities import SHARDED_LINE
from phalanx.configs.tables.machines import machine_named
from phalanx.configs.validate import ConfigError, validate
from phalanx.moe.plan.cost.step_time import step_time
from phalanx.moe.plan.cost.weights import stage_weights
from tests.support.distributed import run_distributed
from tests.support.training import pretended_nodes

ZERO3 = "parallel.distributed_optimizer=zero3"


@pytest.mark.parametrize(
    ("override", "fix"),
    [
        ("optim.kind=muon", "set parallel.distributed_optimizer=true"),
        ("kernels=megatron", "set parallel.distributed_optimizer=true"),
        ("parallel.overlap=false", "set parallel.overlap=true"),
        ("parallel.overlap_microbatches=on", "set parallel.overlap_microbatches=auto"),
        ("parallel.expert_replication=2", "set parallel.expert_replication=0"),
        ("optim.ema=0.9", "set optim.ema=0"),
        ("parallel.distributed_optimizer=zero2", "set parallel.distributed_optimizer=zero3"),
    ],
)
def test_one_line_names_what_fixes_it(override: str, fix: str) -> None:
    cfg = load(["model=tiny", "run.device=cpu", ZERO3, override])
    with pytest.raises(ConfigError) as error:
        validate(cfg, 2)
    (line,) = str(error.value).split("\n")
    assert line.endswith(fix), line


def _on_uneven_nodes() -> str:
    from phalanx.moe.run.setup import setup
    from phalanx.parallel.runtime import start

    cfg = load(["model=tiny", "run.device=cpu", "parallel.expert=1", f"{ZERO3}_node"])
    with pretended_nodes(3), pytest.raises(ConfigError) as error:
        setup(cfg, start(seed=1, timeout=60, deterministic=False))
    return str(error.value)


@pytest.mark.dist
def test_nodes_have_to_be_alike() -> None:
    for line in run_distributed(_on_uneven_nodes, 4):
        assert "nodes hold 3, 1 ranks" in line
        assert line.endswith("set parallel.distributed_optimizer=zero3")


def _held(overrides: list[str]) -> tuple[int, int]:
    """Bytes of weights and of gradients on this rank: distinct storages."""
    from phalanx.moe.run.setup import setup
    from phalanx.parallel.runtime import start

    cfg = load(overrides)
    job = setup(cfg, start(seed=1, timeout=60, deterministic=False))
    parameters = [p for module in job.engine.modules for p in module.parameters()]
    found = []
    for kind in ("param_data", "grad_data"):
        tensors = [p.main_grad if kind == "grad_data" else p.data for p in parameters]
        for chunk in job.engine.chunks:
            buffers = (*chunk.buffers, *chunk.expert_parallel_buffers)
            tensors += [getattr(buffer, kind) for buffer in buffers]
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors}
        found.append(sum(storage.nbytes() for storage in storages.values()))
    return found[0], found[1]


@pytest.mark.dist
@pytest.mark.parametrize("more", [["parallel.expert=1"], ["parallel.expert=2"]])
def test_a_rank_has_the_bytes_of_the_estimate(more: list[str]) -> None:
    """Within a part in a hundred: it does not know of padding, and shards vectors too."""
    overrides = ["model=tiny_deepseek", "model.layers=6", "model.hidden=128", "run.device=cpu"]
    overrides += ["precision=bf16", "data.global_batch=8", "data.micro_batch=4", *more]
    cfg = load([*overrides, "parallel.world_size=2", "kernels.backend=torch", ZERO3])
    (estimate,) = stage_weights(cfg, 2)
    plain = load([*overrides, "parallel.world_size=2", "kernels.backend=torch"])
    (unsharded,) = stage_weights(plain, 2)
    for weights, grads in run_distributed(_held, 2, [*overrides, ZERO3]):
        assert weights == pytest.approx(estimate.parameter_bytes, rel=0.01)
        assert grads == pytest.approx(estimate.gradient_bytes, rel=0.01)
        assert weights < unsharded.parameter_bytes and grads < unsharded.gradient_bytes


def test_a_large_model_needs_a_small_part_of_the_memory() -> None:
    experiment = ["experiment=moonlight_8gpu", "parallel.expert=1", "run.machine=h200"]
    experiment += ["kernels.backend=fused", "parallel.dispatch=local", "kernels.attention=fa4"]
    plain, sharded = load(experiment), load([*experiment, ZERO3])
    (whole,), (part,) = stage_weights(plain, 8), stage_weights(sharded, 8)
    assert part.parameter_bytes < 0.35 * whole.parameter_bytes
    assert part.gradient_bytes < 0.35 * whole.gradient_bytes
    assert part.optimizer_bytes == whole.optimizer_bytes


@pytest.mark.parametrize(
    ("model", "world", "said"),
    [
        ("tiny parallel.expert=1", 4, "experts over 4 ranks; all else of layers over 4 ranks"),
        (
            "tiny parallel.expert=2",
            2,
            "all else of layers over 2 ranks; no two ranks have the same experts, which stay whole",
        ),
        ("tiny_dense", 2, "layers over 2 ranks"),
        ("tiny_dense", 1, "no two ranks have the same layers, which stay whole"),
    ],
)
def test_the_dry_run_says_what_is_sharded(model: str, world: int, said: str) -> None:
    cfg = load([*f"model={model}".split(), ZERO3])
    assert resolve_name(SHARDED_LINE)(cfg, world) == f"sharded: {said}"


def test_a_step_takes_longer_as_on_two_h200s() -> None:
    """docs/measured/training/two_h200s.txt: 0.4409 s of 0.4209 s unsharded."""
    run = ["experiment=moonlight_8gpu", "run=bench", "model.layers=8", "parallel.expert=1"]
    run += ["data.micro_batch=4", "data.global_batch=16", "optim.moments=bf16"]
    run += ["kernels.backend=fused", "parallel.dispatch=local", "kernels.attention=fa4"]
    machine = machine_named("h200")
    whole, sharded = (step_time(load([*run, *more]), 2, machine).total for more in ([], [ZERO3]))
    assert sharded / whole == pytest.approx(0.4409 / 0.4209, abs=0.02)
    assert sharded > 1.02 * whole


def test_a_stage_without_layers_has_nothing_to_shard() -> None:
    layout = ["model=tiny", "parallel.pipeline=2", "parallel.pipeline_layout='E|t*4L'"]
    layout += ["parallel.expert=1"]
    (embedding, layers), (sharded, parts) = (
        stage_weights(load([*layout, *more]), 8) for more in ([], [ZERO3])
    )
    assert sharded == embedding and parts.parameter_bytes < layers.parameter_bytes


def _reads(on_hosts: Sequence[str], broken: Sequence[int]) -> tuple[bool, bool]:
    """Whether ranks would read each other's shards over NCCL: those of all, and of a half."""
    from phalanx.extras.sharded_params import peers

    rank = dist.get_rank()
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "get_backend", lambda group: "nccl")
        patch.setattr(peers, "reaches_peers", lambda: rank not in broken)
        patch.setattr(peers, "names_here", lambda rank: (on_hosts[rank], ""))
        return peers.reachable(dist.group.WORLD), peers.reachable(halves[rank // 2])


@pytest.mark.dist
@pytest.mark.parametrize(
    ("on_hosts", "broken", "whole", "halves"),
    [
        ("aaaa", [], True, [True, True]),
        ("aabb", [], False, [True, True]),  # gathered by NCCL over hosts
        ("abab", [], False, [False, False]),
        ("aaaa", [3], False, [True, False]),
    ],
)
def test_ranks_of_a_group_read_shards_if_all_of_them_can(
    on_hosts: str, broken: list[int], whole: bool, halves: list[bool]
) -> None:
    answers = run_distributed(_reads, 4, on_hosts, broken)
    assert answers == [(whole, halves[rank // 2]) for rank in range(4)]
