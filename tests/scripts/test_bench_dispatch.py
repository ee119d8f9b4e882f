"""bench_dispatch without a GPU: the whole program on gloo ranks, what it counts and compares."""

import contextlib
import io
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from phalanx.moe.router.forced_balance import ForcedBalance  # noqa: F401  (imported once for all ranks, which are forked)
from phalanx.parallel.dispatcher import alltoall
from phalanx.parallel.megatron import cpu
from phalanx.scripts import bench_dispatch
from phalanx.scripts.bench import exchange as suites
from phalanx.scripts.bench import models, records, routing
from phalanx.scripts.bench import whole as _whole  # noqa: F401
from phalanx.scripts.bench.exchange import _rate
from phalanx.scripts.bench.measure import Key
from phalanx.scripts.bench.models import DEEPSEEK, FLASH, GPT_OSS, QWEN3, TINY
from phalanx.scripts.bench.ranks import Cpus, RankBench, RankSides, attempt
from phalanx.scripts.bench.whole import exposed, fitting, rate
from tests.support.distributed import run_distributed
from tests.support.torchrun import Torchrun

CPU = torch.device("cpu")
PASSES = {"forward", "backward"}


def program(arguments: list[str]) -> tuple[int, str]:
    """Exit code and output of `main` on a rank of `run_distributed`."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        code = bench_dispatch.main([*arguments, "--device", "cpu", "--rounds", "2"])
    return code, out.getvalue()


@pytest.mark.dist
def test_torchrun_starts_it(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    command = ["scripts/bench_dispatch.py", "exchange", "--device", "cpu", "--rounds", "2"]
    with Torchrun(2, [*command, "--json", str(path)], tmp_path / "printed") as launch:
        assert launch.wait() == 0, launch.err()
    lines = launch.out().splitlines()
    assert sum("alltoall, random" in line for line in lines) == 4  # once, not by every rank
    assert lines[-1].endswith("0 failures")
    assert all(len(r.ranks) == 2 for r in records.read(path)[1] if r.ms is not None)


@pytest.mark.dist
def test_the_whole_program_on_two_ranks(tmp_path: Path) -> None:
    path, picture = tmp_path / "out.json", tmp_path / "out.png"
    options = ["--json", str(path), "--plot", str(picture)]
    (code, out), other = run_distributed(program, 2, options)
    assert code == 0 and other == (0, "")
    assert out.startswith("device CPU, torch ") and out.splitlines()[-1].endswith("0 failures")
    known, made = records.read(path)
    assert known["ranks"] == "2" and known["gpus"] == 0 and known["torch"] == torch.__version__
    assert known["models"] == {
        "32,64,64,8,2": "tiny",
        "32,64,128,8,2": "tiny, biases",
        "32,128,64,8,2": "tiny, ungated",
    }
    assert {r.suite for r in made} == set(bench_dispatch.RUNS)
    timed = [r for r in made if r.ms is not None and r.pass_name != "exposed"]
    assert all(len(r.ranks) == 2 and r.mode == "eager" for r in timed)
    assert all(abs(max(r.ranks) - r.ms) < 1e-3 for r in timed if r.ms)
    found: dict[str, set[tuple[str, str]]] = {}
    for r in timed:
        found.setdefault(r.suite, set()).add((r.side, r.pass_name))
        assert f"  {r.side}" in out and f" {r.pass_name} " in out
    both = {f"alltoall, {kind}" for kind in routing.KINDS}
    ends = {"dispatch", "dispatch backward", "combine", "combine backward"}
    assert found["exchange"] == {(side, pass_name) for side in both for pass_name in ends}
    assert found["plan"] == {
        (f"EP {ranks}, {kind}", "plan") for ranks in (2, 8) for kind in routing.KINDS
    }
    alone = {("experts alone, random", pass_name) for pass_name in PASSES}
    parts = {("alltoall, random", pass_name) for pass_name in ("dispatch", "combine")}
    assert found["layer"] == {(s, w) for s in both for w in PASSES} | alone | parts
    assert found["flash"] == {(side, "forward") for side in both}
    sides = ("alltoall, one rank", "experts alone, one rank")
    assert found["skew"] == {(side, pass_name) for side in sides for pass_name in PASSES}
    judged = [r for r in made if r.met is not None]
    assert {r.suite for r in judged} == {"skew"} and picture.stat().st_size > 1000
    notes = {r.suite: r.note for r in made if r.suite in ("wire", "scaling")}
    assert notes == {
        "wire": "needs CUDA",
        "scaling": "needs an even number of ranks above 2, not 2",
    }


class _Exchange:
    """Stands in for one over NVLink: tokens of all ranks by gloo."""

    def __init__(self, group: Any, tokens: int, hidden: int, slots: int, options: Any) -> None:
        self.sms = options.comm_sms

    def start(self, x: torch.Tensor, idx: torch.Tensor, side: torch.Tensor, local: int) -> Any:
        assert side.numel() * 4 == 2 * idx.numel() * 4 and local == 4
        rows = x.new_empty(dist.get_world_size() * len(x), x.shape[1])
        dist.all_gather_into_tensor(rows, x)
        return rows.roll(1, 0) if self.sms == 24 and dist.get_rank() == 1 else rows

    def wait(self, sent: Any) -> None: ...

    def rows(self, sent: torch.Tensor) -> torch.Tensor:
        return sent


class _Company:
    gigabytes_per_second = 0.0

    def __init__(self, model: Any, tokens: int, sms: int, ms: float) -> None:
        self.sms, self.runs = sms, 0
        assert ms > 0

    def start(self) -> None:
        self.runs += 1

    def join(self, end: Any) -> None:
        self.runs -= 1

    def shortest_lead(self) -> float:
        assert self.runs == 0
        return -1.0 if self.sms == 32 and dist.get_rank() == 1 else 1.0


def _wire() -> list[records.Record]:
    cpu.install()
    patch = pytest.MonkeyPatch()
    with patch.context() as p:
        p.setattr(suites, "refuse", lambda *_: None)
        p.setattr(suites, "exchange_of", _Exchange)
        p.setattr(suites, "_gemms", _Company)
        return suites.wire(RankBench(Cpus(), 2), TINY, 32)


@pytest.mark.dist
def test_wire() -> None:
    made, other = run_distributed(_wire, 2)
    assert [r.note for r in made if r.failed] == [r.note for r in other if r.failed]
    for kind in routing.KINDS:
        by = {r.side: r for r in made if r.pass_name == kind}
        assert {side for side, r in by.items() if r.ms} == {
            *(f"{sms} SMs" for sms in ("8", "16", "32", "all")),
            *(f"{sms} SMs, beside a GEMM" for sms in (8, 16)),
        }
        assert by["24 SMs"].note == "rank 1: wrong bits in rows" and by["24 SMs"].failed
        late = by["32 SMs, beside a GEMM"]
        assert late.failed and late.note == "the GEMM ended before the push"
        timed = [r for r in by.values() if r.ms]
        # 32 tokens of 64 channels at most, and their routing, to the other rank.
        assert all(r.gbs and r.gbs <= (32 * 128 + 8 * 64) / r.ms * 1e-6 + 0.1 for r in timed)


@pytest.mark.dist
def test_replication_and_rows(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    options = ["replication", "rows", "--dispatch", "alltoall", "--json", str(path)]
    (code, out), other = run_distributed(program, 2, options)
    assert code == 0 and other == (0, "") and out.splitlines()[-1].endswith("0 failures")
    _, made = records.read(path)
    replicated = [r for r in made if r.suite == "replication"]
    ways = ("without replication", "2 slots", "2 slots, any")  # 2 of 4 local experts spread all
    assert {(r.side, r.pass_name) for r in replicated} == {
        (f"{kind}, {way}", pass_name)
        for kind in routing.UNEVEN
        for way in ways
        for pass_name in ("forward", "both")
    }
    assert all("load 2.00" in r.note for r in replicated if r.side.startswith("one rank"))
    assert all("load 1.00" in r.note for r in replicated if r.side.startswith("balanced"))
    judged = {(r.side, r.pass_name): r.bar for r in replicated if r.bar}
    assert len(judged) == 4 and judged["one rank, 2 slots", "both"] == 0.6667
    balanced = {r.pass_name: r.ms for r in replicated if r.side == "balanced, without replication"}
    assert all(r.ratio == pytest.approx(balanced[r.pass_name] / r.ms, rel=1e-2) for r in replicated)
    of_rows = {(r.side, r.bar) for r in made if r.suite == "rows"}
    bars = {"bf16": None, "bf16, then FP8": None, "FP8": 1.7}
    dispatched = {(f"{way}, {k}", bar) for way, bar in bars.items() for k in routing.KINDS}
    assert of_rows == dispatched | {(f"layer, rows in {way}", None) for way in ("bf16", "FP8")}


def _uneven() -> dict[str, torch.Tensor]:
    rank = dist.get_rank()
    return {k: routing.uneven(k, 4096, 32, 4, rank=rank, device=CPU) for k in routing.UNEVEN}


@pytest.mark.dist
def test_uneven_routing() -> None:
    found = run_distributed(_uneven, 2)
    for kind in routing.UNEVEN:
        both = torch.cat([ranks[kind] for ranks in found])
        assert both.dtype == torch.int32
        assert (both.sort(1).values.diff(dim=1) > 0).all(), kind  # distinct experts
        share_E = torch.bincount(both.flatten(), minlength=32) / len(both)
        most = share_E.max()
        if kind == "balanced":
            assert (share_E == 4 / 32).all()
        elif kind == "random":
            assert most < 0.15
        elif kind == "one rank":
            assert share_E[:16].sum() == 4 and most < 0.3
        elif kind == "half to one expert":
            assert share_E.argmax() == 1 and abs(most - (0.5 + 0.5 * 4 / 32)) < 0.03
        else:  # the two most wanted, of weights 1 and 1 / 2
            first, second = share_E.topk(2).values
            assert 0.4 < second < first < 0.85 and share_E.min() < 0.06


@pytest.mark.dist
def test_pairs_against_all_ranks() -> None:
    (code, out), *others = run_distributed(program, 4, ["scaling", "--dispatch", "alltoall"])
    assert code == 0 and "of 2 bars met" in out and out.count("0.900") == 2
    for size in (2, 4):
        for kind in routing.KINDS:
            assert f"alltoall, {size} ranks, {kind}" in out
    assert others == [(0, "")] * 3


def _wrong_on_the_last_rank(arguments: list[str]) -> tuple[int, str]:
    real = alltoall.AllToAll.combine
    exact: list[Any] = []

    def combine(self: Any, *given: Any) -> torch.Tensor:
        exact.append(self)  # the first is what others are compared with
        out_TD = real(self, *given)
        wrong = self is not exact[0] and dist.get_rank() == dist.get_world_size() - 1
        return out_TD.roll(1, 0) if wrong else out_TD

    alltoall.AllToAll.combine = combine  # type: ignore[method-assign]
    try:
        return program(arguments)
    finally:
        alltoall.AllToAll.combine = real  # type: ignore[method-assign]


@pytest.mark.dist
def test_wrong_results_have_no_time_and_are_failures(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    results = run_distributed(_wrong_on_the_last_rank, 2, ["flash", "--json", str(path)])
    assert [code for code, _ in results] == [1, 1]
    _, made = records.read(path)
    wrong = [r for r in made if r.side == "alltoall, random"]
    assert [(r.failed, r.ms, r.note) for r in wrong] == [(True, None, "rank 1: wrong bits in out")]


@pytest.mark.dist
def test_a_transport_that_was_named_has_to_run() -> None:
    ((code, out),) = run_distributed(program, 1, ["flash", "--dispatch", "symm"])
    assert code == 1 and "FAILED  parallel.dispatch=symm cannot run" in out


@pytest.mark.dist
def test_one_rank_measures_what_needs_no_other() -> None:
    ((code, out),) = run_distributed(program, 1, [])
    assert code == 0 and out.splitlines()[-1] == "0 of 0 bars met, 0 missed, 0 failures"
    assert out.count("needs several ranks") >= 2 and "EP 8, random" in out
    assert "local, balanced" in out and "alltoall" not in out


def _sides() -> tuple[Any, ...]:
    bench = RankBench(Cpus(), 3)
    sides, rank = bench.sides("layer", (1,)), dist.get_rank()

    def fails() -> None:
        if rank == 1:
            raise ValueError("no such memory")

    sides.take("a", "forward", lambda: time.sleep(0.002 + 0.01 * rank))
    sides.take("b", "forward", fails)
    sides.run()
    shape = (1,)
    raised = attempt(bench, lambda: [] if rank == 0 else fails() or [], "plan", shape)
    (record,) = sides.record("a", "forward")
    return record, sides.skipped, raised, [key.side for key in sides.times]


@pytest.mark.dist
def test_the_slowest_rank_counts_and_what_fails_on_one_takes_part_on_none() -> None:
    for record, skipped, raised, sides in run_distributed(_sides, 2):
        assert record.ms == pytest.approx(record.ranks[1], abs=1e-3) and record.ms >= 12
        assert 2 <= record.ranks[0] < record.ranks[1]
        assert sides == ["a"]
        (one,) = skipped
        assert one.failed and one.note == "rank 1: ValueError: no such memory"
        assert [r.note for r in raised] == ["rank 1: ValueError: no such memory"]


def _sides_of(times: dict[tuple[str, str], list[float]]) -> RankSides:
    """Sides of two ranks with these medians."""
    bench: Any = SimpleNamespace(mode="graph", ranks=2)
    sides = RankSides(bench, "layer", (1,))
    sides._of_ranks = [
        {Key(side, pass_name): [values[rank]] * 3 for (side, pass_name), values in times.items()}
        for rank in range(2)
    ]
    return sides


def test_what_is_asked_becomes_a_ratio() -> None:
    sides = _sides_of({("a", "forward"): [1.0, 2.0], ("a", "both"): [5.0, 5.0]})
    (record,) = rate(sides, "a", "forward", 700_000_000_000, 280)
    assert (record.ms, record.tflops, record.ratio) == (2.0, 350, 1.25) and record.met
    assert record.ranks == (1.0, 2.0) and record.note == "asked 280 TFLOP/s"
    (backward,) = rate(sides, "a", "backward", 10, None)
    assert backward.ms == 4.0 and backward.ranks == (4.0, 3.0) and backward.met is None
    assert rate(sides, "b", "forward", 10, 1) == []


def test_rate_on_the_wire_is_that_of_the_slowest_link() -> None:
    sides = _sides_of({("16 SMs", "random"): [1.0, 2.0], ("8 SMs", "random"): [1.0, 1.0]})
    (record,) = _rate(sides, "16 SMs", "random", [600_000_000, 800_000_000], True)
    assert record.gbs == 400 and record.ratio == pytest.approx(400 / 330) and record.met
    assert "400 GB/s" in records.table([record])
    (record,) = _rate(sides, "8 SMs", "random", [600_000_000, 800_000_000], True)
    assert record.gbs == 600 and record.bar is None


def test_exposed_share() -> None:
    times = {
        ("a", "forward"): [10.0, 9.0],
        ("alone", "forward"): [8.0, 9.5],
        ("a", "dispatch"): [1.0, 1.5],
        ("a", "combine"): [0.5, 0.5],
    }
    (record,) = exposed(_sides_of(times), "a", "alone", True)
    assert record.ms == 0.5 and record.ratio == pytest.approx(0.4 / 0.25) and record.met
    assert record.note == "0.25 of both exchanges, asked 0.4"
    del times["a", "combine"]
    assert exposed(_sides_of(times), "a", "alone", True) == []


def test_operations_of_a_layer() -> None:
    rows = 8192 * 8
    assert QWEN3.flops(8192, "forward") == 6 * rows * 2048 * 768
    assert QWEN3.flops(8192, "backward") == 12 * rows * 2048 * 768
    assert FLASH.flops(4096, "forward") == 4 * 4096 * 2 * 2048 * 2048


def test_cases_are_those_that_are_asked_for() -> None:
    assert models.cases("layer", None, tiny=False) == [
        (model, 8192) for model in (DEEPSEEK, QWEN3, GPT_OSS)
    ]
    assert [t for _, t in models.cases("flash", None, tiny=False)] == [4096, 8192, 16384]
    assert models.cases("flash", 512, tiny=False) == [(FLASH, 512)]
    assert models.cases("skew", 16, tiny=True) == [(TINY, 16)]


def test_experts_are_halved_until_they_fit() -> None:
    bench: Any = SimpleNamespace(ranks=2)
    gigabyte = 1 << 30
    assert fitting(bench, DEEPSEEK, 141 * gigabyte) == DEEPSEEK
    assert fitting(bench, DEEPSEEK, 64 * gigabyte).experts == 128
    assert fitting(bench, DEEPSEEK, gigabyte).experts >= DEEPSEEK.top_k


def test_routing() -> None:
    cpu.install()
    drawn = [routing.routed("random", 40, 8, 3, rank=rank, device=CPU) for rank in (0, 1)]
    assert not torch.equal(*drawn) and drawn[0].dtype == torch.int32
    assert all(len(set(row)) == 3 for row in drawn[0].tolist())
    both = [routing.routed("balanced", 40, 8, 3, rank=rank, device=CPU) for rank in (0, 1)]
    assert torch.cat(both).flatten().bincount().tolist() == [30] * 8
    assert torch.equal(
        routing.probabilities(4, 3, rank=1, device=CPU).sum(1).round(decimals=5), torch.ones(4)
    )


def test_bytes_of_a_dispatch_are_those_of_distinct_other_ranks() -> None:
    idx = torch.tensor([[0, 1], [2, 3], [4, 7], [2, 6]], dtype=torch.int32)
    # Of rank 1 of 4, with experts 2 and 3: to rank 0; none; to ranks 2 and 3; to rank 3.
    sent = routing.bytes_sent(idx, 100, experts=8, rank=1, ranks=4)
    assert sent == 4 * 2 * 100 + 3 * 8 * idx.numel()


def _fullest() -> float:
    idx = [[0, 1], [0, 2]] if dist.get_rank() == 0 else [[1, 0], [3, 2]]
    return routing.fullest(torch.tensor(idx, dtype=torch.int32), 4, dist.group.WORLD)


@pytest.mark.dist
def test_room_is_for_the_fullest_rank() -> None:
    assert run_distributed(_fullest, 2) == [5 / 4] * 2


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["fast"], "fast: a suite is one of wire"),
        (["--dispatch", "symm,nccl"], "--dispatch nccl: a transport is one of symm, alltoall"),
        (["--rounds", "0"], "--rounds 0: must be at least 1"),
        (["--tokens", "-1"], "--tokens -1: must be at least 1"),
        (["--comm-sms", "-1"], "--comm-sms -1: must be at least 0"),
    ],
)
def test_bad_arguments_are_refused_in_a_line(
    argv: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        bench_dispatch.arguments(argv)
    assert said in capsys.readouterr().err.splitlines()[-1]


def test_devices_that_are_not_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench_dispatch.main(["plan"]) == 1
    assert "there is none: --device cpu" in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "2")
    assert bench_dispatch.main(["plan"]) == 1
    assert "this host has 2 GPUs, and there is a rank 2" in capsys.readouterr().err


def test_json_has_what_others_do_not_need(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    made = [
        records.Record("wire", (1,), "a", "b", ms=2.0, gbs=330.04, ranks=(1.5, 2.0)),
        records.Record("mlp", (1,), "a", "b", ms=2.0),
    ]
    records.write(path, {}, made)
    first, second = json.loads(path.read_text())["records"]
    assert first["gbs"] == 330 and first["ranks"] == [1.5, 2.0]
    assert not {"gbs", "ranks"} & set(second)
    assert records.read(path)[1][1] == made[1]
