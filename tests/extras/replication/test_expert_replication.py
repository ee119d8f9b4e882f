"""Training with expert replication: same steps as without, and its report."""

from pathlib import Path

import pytest
import torch

from phalanx.configs.tables.machines import CPU_RANKS
from phalanx.extras.replication.options import ReplicationOptions, copy_costs
from phalanx.moe.router.recording import layer_name, read_facts, read_layer, write
from phalanx.scripts.lab.recorded_load import recorded_load
from tests.extras.between_nodes.test_hierarchical import SIZE
from tests.support.distributed import run_distributed
from tests.support.runs import TINY, records, run
from tests.support.scheduling import mostly_slow, slow
from tests.support.training import Trained, _loaded, _train, pretended_nodes, trained

pytestmark = pytest.mark.dist

COMMAND = [*TINY, "data=synthetic"]
SHAPE = ["model.moe.shared_ffn=16", "data.sequence_length=64", "run.steps=3", "optim.lr=1e-3"]
CHANGES = {
    "bf16": ["kernels=torch"],
    "rows in bf16": ["kernels=reference", "precision=fp8_block", "precision.dispatch=bf16"],
    "rows in FP8": ["kernels=reference", "precision=fp8_block", "parallel.dispatch=alltoall"],
    "computed again": ["kernels=torch", "run.recompute=moe", "parallel.save_x=keep"],
}


@pytest.fixture(scope="module")
def uneven(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An override that replays routing in which two thirds of the tokens take one expert."""
    path = tmp_path_factory.mktemp("routing") / "uneven"
    scores = torch.rand(2, 512, 8, generator=torch.Generator().manual_seed(0))
    scores[:, :, 1] += (scores[:, :, 0] < 0.6).float()
    of = {layer_name(n + 1, False): s.topk(2).indices.numpy() for n, s in enumerate(scores)}
    write(path, of, model="tiny", experts=8, step=0)
    return f"model.moe.router.replay={path}"


def of(ranks: int, *overrides: str) -> Trained:
    return trained(ranks, [*COMMAND, *SHAPE, f"parallel.expert={ranks}", *overrides])


def check(got: Trained, want: Trained) -> None:
    """Same forward pass; steps differ only by the order of sums of expert gradients."""
    assert got.steps[0]["loss"] == want.steps[0]["loss"]
    assert got.series("loss") == pytest.approx(want.series("loss"), rel=1e-3)
    assert got.series("grad_norm") == pytest.approx(want.series("grad_norm"), rel=1e-2)
    assert got.series("load_max") == pytest.approx(want.series("load_max"), rel=0.05)
    assert got.valid_loss == pytest.approx(want.valid_loss, rel=1e-3)
    assert got.after.keys() == want.after.keys(), "replicas are no parameters"
    for name, value in want.after.items():
        assert got.after[name].shape == value.shape
        change = (value - want.before[name]).norm()
        assert (got.after[name] - value).norm() <= 0.1 * change + 1e-3 * value.norm(), name


@mostly_slow("name", CHANGES, "computed again")
def test_two_ranks(name: str, uneven: str) -> None:
    got, want = (
        of(2, *CHANGES[name], uneven, "parallel.expert_replication=2"),
        of(2, *CHANGES[name], uneven),
    )
    check(got, want)
    for step in got.steps:
        assert 0 < step["replicas"] <= 4
        assert 1 <= step["rank_load_with_replicas"] < step["rank_load_without_replicas"] <= 2
        assert step["rank_load"] <= step["rank_load_without_replicas"] + 1e-9
    assert not {"replicas", "rank_load_with_replicas", "rank_load_without_replicas"} & set(
        want.steps[0]
    )
    # The step's load is that of its choices, whoever computes them.
    assert got.steps[0]["rank_load"] == pytest.approx(want.steps[0]["rank_load"], abs=1e-6)


@mostly_slow("slots", [0, 2], 2)
def test_a_replay_has_the_load_that_was_counted_before(slots: int, uneven: str) -> None:
    """It fits into the counted rows, but not into a hundredth less."""
    costs = copy_costs(CPU_RANKS, weights=3 * 128 * 256, width=2, keep=False)  # of model=tiny
    facts = read_facts(path := uneven.partition("=")[2])
    want = recorded_load(
        {name: read_layer(path, name) for name in facts.layers},
        facts.experts,
        ranks=2,
        tokens=4 * 64,
        replication=ReplicationOptions(slots, costs.copy, least=costs.any),
    )
    assert want.micro_batches == 1 and want.capacity_factor > 1
    common = ["kernels=torch", "run.steps=1", uneven, f"parallel.expert_replication={slots}"]
    factors = want.capacity_factor, want.capacity_factor - 0.01
    got, tight = (of(2, *common, f"parallel.capacity_factor={f:.2f}").steps[-1] for f in factors)
    assert got["load_max"] == pytest.approx(want.load_max)
    rank_load = got["rank_load_with_replicas"] if slots else got["rank_load"]
    assert rank_load == pytest.approx(want.busiest_rank)
    assert got.get("replicas", 0) == want.replicas and (want.replicas > 0) == (slots > 0)
    assert got["reruns"] == 0 and tight["reruns"] > 0


@pytest.mark.slow
def test_token_rounding() -> None:
    rounded = ["kernels=torch", "model.moe.router.rounding=up", "data.sequence_length=256"]
    got, want = of(2, *rounded, "parallel.expert_replication=2"), of(2, *rounded)
    check(got, want)
    assert max(got.series("replicas")) > 0


def over_nodes(overrides: list[str]) -> list[dict[str, float]]:
    """Steps on ranks that act as nodes of two."""
    with pretended_nodes(SIZE):
        return [step for step in _train(_loaded(*overrides)).records if "grad_norm" in step]


def test_over_nodes(uneven: str) -> None:
    """Each node replicates on its own, and the busiest rank is that of the group."""
    given = [
        *COMMAND,
        *SHAPE,
        "parallel.expert=4",
        "kernels=torch",
        "parallel.dispatch=hier",
        uneven,
    ]
    given += ["data.global_batch=16", "run.eval_interval=0"]
    got, want = (
        run_distributed(over_nodes, 4, [*given, f"parallel.expert_replication={n}"])[0]
        for n in (1, 0)
    )
    assert len(got) == 3 and got[0]["loss"] == want[0]["loss"]
    for a, b in zip(got, want, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-3)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-2)
        assert 0 < a["replicas"] <= 4
        assert 1 <= a["rank_load_with_replicas"] < a["rank_load_without_replicas"]
        # Of the only micro-batch, whose routing is replayed.
        assert a["rank_load"] == pytest.approx(b["rank_load"], rel=1e-6)


def test_four_ranks_need_fewer_rows() -> None:
    """A buffer that is too small without replication is large enough with it."""
    tight = ["kernels=torch", "parallel.capacity_factor=1.25", "data.global_batch=16"]
    got, want = of(4, *tight, "parallel.expert_replication=2"), of(4, *tight)
    check(got, want)
    assert want.steps[-1]["reruns"] > got.steps[-1]["reruns"] == 0


def test_what_a_run_tells_and_its_checkpoint(tmp_path: Path) -> None:
    """A run without replication resumes from it and evaluates to the same loss."""
    common = [*COMMAND, *SHAPE, "parallel.expert=2", "kernels=torch", f"run.dir={tmp_path}"]
    common += ["run.eval_interval=3", "run.eval_batches=1"]
    main, _ = run(2, [*common, "parallel.expert_replication=2"])
    assert main.code == 0
    output = " ".join(main.out.split())
    assert (
        "replication 2 slots parallel.expert_replication=2 a copy costs 27 rows weights are resent"
        in output
    )
    evaluated = records(tmp_path / "run")[-1]["valid_loss"]
    more = ["run.steps=4", "run.resume=auto", "run.eval_interval=1"]
    main, _ = run(2, [*common, *more])
    assert main.code == 0 and "resumed from step 3" in main.out and "replication" not in main.out
    assert records(tmp_path / "run")[2]["valid_loss"] == evaluated


@pytest.mark.parametrize(
    ("overrides", "output"),
    [
        (
            ["parallel.expert_replication=auto"],
            "replication off auto alltoall does not hide the exchange of replicas",
        ),
        *slow(
            (
                ["parallel.expert=1", "parallel.expert_replication=2"],
                "replication off all experts are on one rank",
            )
        ),
    ],
)
def test_where_nothing_is_replicated(overrides: list[str], output: str, tmp_path: Path) -> None:
    main, _ = run(2, [*COMMAND, *SHAPE, "run.steps=1", *overrides, f"run.dir={tmp_path}"])
    assert main.code == 0 and output in " ".join(main.out.split())
