"""bench_dispatch on gloo ranks: the whole program, its checks, routing, and targets."""

import contextlib
import io
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from phalanx.moe.router.forced import ForcedBalance  # noqa: F401  (imported once for all ranks, which are forked)
from phalanx.parallel.dispatcher import alltoall
from phalanx.parallel.megatron import cpu
from phalanx.scripts.lab import bench_dispatch
from phalanx.scripts.lab.bench import models, records, routing, timing
from phalanx.scripts.lab.bench.clocks import Cpu
from phalanx.scripts.lab.bench.dispatch import exchange
from phalanx.scripts.lab.bench.dispatch.whole import exposed, fitting, targeted
from phalanx.scripts.lab.bench.models import DEEPSEEK, FLASH, GPT_OSS, QWEN3, TINY
from phalanx.scripts.lab.bench.timing import Bench, Case
from tests.lab.bench.test_timing import timings_with
from tests.support.distributed import run_distributed
from tests.support.scheduling import slow
from tests.support.torchrun import Torchrun

CPU = torch.device("cpu")
PASSES = {"forward", "backward"}


def program(arguments: list[str]) -> tuple[int, str]:
    """Exit code and output of `main` on a rank of `run_distributed`."""
    out = io.StringIO()
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(out),
        mock.patch.object(timing, "WARM_ROUNDS", 1),
    ):
        code = bench_dispatch.main([*arguments, "--device", "cpu", "--rounds", "2"])
    return code, out.getvalue()


@pytest.mark.dist
def test_torchrun_starts_it(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    command = ["scripts/lab/bench_dispatch.py", "exchange", "--device", "cpu", "--rounds", "2"]
    with Torchrun(2, [*command, "--json", str(path)], tmp_path / "printed") as launch:
        assert launch.wait() == 0, launch.err()
    lines = launch.out().splitlines()
    assert sum("alltoall, random" in line for line in lines) == 4  # once, not by every rank
    assert lines[-1].endswith("0 failures")
    assert all(len(r.ranks) == 2 for r in records.read(path)[1] if r.ms is not None)


@pytest.mark.dist
def test_the_whole_program_on_two_ranks(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    (code, out), other = run_distributed(program, 2, ["--json", str(path)])
    assert code == 0 and other == (0, "")
    assert out.startswith("device CPU, torch ") and out.splitlines()[-1].endswith("0 failures")
    run_facts, made = records.read(path)
    assert run_facts["ranks"] == "2" and run_facts["gpus"] == 0
    assert run_facts["models"] == {
        "32,64,64,8,2": "tiny",
        "32,64,128,8,2": "tiny, biases",
        "32,128,64,8,2": "tiny, ungated",
    }
    assert {r.suite for r in made} == set(bench_dispatch.RUNS)
    timed = [r for r in made if r.ms is not None and r.pass_name != "exposed"]
    assert all(len(r.ranks) == 2 and r.mode == "eager" for r in timed)
    assert all(abs(max(r.ranks) - r.ms) < 1e-3 for r in timed if r.ms)
    rows: dict[str, set[tuple[str, str]]] = {}
    for r in timed:
        rows.setdefault(r.suite, set()).add((r.side, r.pass_name))
        assert f"  {r.side}" in out and f" {r.pass_name} " in out
    sides = {f"alltoall, {kind}" for kind in routing.KINDS}
    ends = {"dispatch", "dispatch backward", "combine", "combine backward"}
    assert rows["exchange"] == {(side, name) for side in sides for name in ends}
    assert rows["plan"] == {(f"EP {n}, {kind}", "plan") for n in (2, 8) for kind in routing.KINDS}
    alone = {("experts alone, random", name) for name in PASSES}
    parts = {("alltoall, random", name) for name in ("dispatch", "combine")}
    assert rows["layer"] == {(side, name) for side in sides for name in PASSES} | alone | parts
    assert rows["flash"] == {(side, "forward") for side in sides}
    skewed = ("alltoall, one rank", "experts alone, one rank")
    assert rows["skew"] == {(side, name) for side in skewed for name in PASSES}
    assert {r.suite for r in made if r.met is not None} == {"skew"}
    notes = {r.suite: r.note for r in made if r.suite in ("wire", "scaling")}
    assert notes == {
        "wire": "needs CUDA",
        "scaling": "needs an even number of ranks above 2, not 2",
    }


class _Exchange:
    """An exchange over gloo that gathers the tokens of all ranks; wrong with 24 SMs on rank 1."""

    def __init__(
        self, connections: Any, group: Any, tokens: int, hidden: int, slots: int, options: Any
    ) -> None:
        self.sms = options.comm_sms

    def start(self, x: torch.Tensor, idx: torch.Tensor, side: torch.Tensor, local: int) -> Any:
        assert side.numel() * 4 == 2 * idx.numel() * 4 and local == 4
        rows = x.new_empty(dist.get_world_size() * len(x), x.shape[1])
        dist.all_gather_into_tensor(rows, x)
        return rows.roll(1, 0) if self.sms == 24 and dist.get_rank() == 1 else rows

    def wait(self, sent: Any) -> None: ...

    def rows(self, sent: torch.Tensor) -> torch.Tensor:
        return sent


class _Load:
    """A GEMM that ends too early if it leaves 32 SMs on rank 1."""

    gigabytes_per_second = 0.0

    def __init__(self, model: Any, tokens: int, sms: int, ms: float) -> None:
        self.sms = sms
        assert ms > 0

    def start(self) -> None: ...

    def join(self, end: Any) -> None: ...

    def shortest_lead(self) -> float:
        return -1.0 if self.sms == 32 and dist.get_rank() == 1 else 1.0


def _wire() -> list[records.Record]:
    cpu.install()
    with pytest.MonkeyPatch.context() as p:
        p.setattr(exchange, "refuse", lambda *_: None)
        p.setattr(exchange, "exchange_of", _Exchange)
        p.setattr(exchange, "Gemms", _Load)
        return exchange.wire(Bench(Cpu(), 2), TINY, 32)


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
        (f"{kind}, {way}", name)
        for kind in routing.UNEVEN
        for way in ways
        for name in ("forward", "both")
    }
    assert all("load 2.00" in r.note for r in replicated if r.side.startswith("one rank"))
    assert all("load 1.00" in r.note for r in replicated if r.side.startswith("balanced"))
    judged = {(r.side, r.pass_name): r.bar for r in replicated if r.bar}
    assert len(judged) == 4 and judged["one rank, 2 slots", "both"] == 0.6667
    balanced = {r.pass_name: r.ms for r in replicated if r.side == f"balanced, {ways[0]}"}
    assert all(r.ratio == pytest.approx(balanced[r.pass_name] / r.ms, rel=1e-2) for r in replicated)
    of_rows = {(r.side, r.bar) for r in made if r.suite == "rows"}
    bars = {"bf16": None, "bf16, then FP8": None, "FP8": 1.7}
    dispatched = {(f"{way}, {k}", bar) for way, bar in bars.items() for k in routing.KINDS}
    assert of_rows == dispatched | {(f"layer, rows in {way}", None) for way in ("bf16", "FP8")}


@pytest.mark.dist
def test_pairs_against_all_ranks() -> None:
    (code, out), *others = run_distributed(program, 4, ["scaling", "--dispatch", "alltoall"])
    assert code == 0 and "of 2 bars met" in out and out.count("0.900") == 2
    for size in (2, 4):
        for kind in routing.KINDS:
            assert f"alltoall, {size} ranks, {kind}" in out
    assert others == [(0, "")] * 3


def _over_nodes(node_gpus: int, arguments: list[str]) -> tuple[int, str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PHALANX_NODE_GPUS", str(node_gpus))
        patch.setenv("PHALANX_WIRE", "1e7,1e-3")
        return program(arguments)


@pytest.mark.dist
@pytest.mark.parametrize(("ranks", "node_gpus"), [(4, 2), *slow((2, 1))])
def test_rail(ranks: int, node_gpus: int, tmp_path: Path) -> None:
    """Two nodes: blocks for half of the tokens of a limited one have the capacity of a run."""
    path = tmp_path / "out.json"
    options = ["rail", "--tokens", "512", "--json", str(path)]
    (code, _), *others = run_distributed(_over_nodes, ranks, node_gpus, options)
    assert code == 0 and others == [(0, "")] * (ranks - 1)
    _, made = records.read(path)
    parts = ("dispatch", "combine", "plan", "pack", "exchange", "unpack", "pack and unpack")
    by = {(r.side, r.pass_name): r for r in made}
    assert by.keys() == {(kind, part) for kind in routing.OVER_NODES for part in parts}
    for kind, rows in zip(routing.OVER_NODES, (499, 499, 318), strict=True):
        # Rows of 64 channels in bf16 to one node, and ids and probabilities of two experts.
        exchange, routed = (1e3 * (1e-3 + rows * size / 1e7) for size in (2 * 64, 2 * 2 * 4))
        for part, ms in (
            ("dispatch", exchange + routed),
            ("combine", exchange),
            ("exchange", exchange),
        ):
            record = by[kind, part]
            assert f"expected {ms:.3f} ms" in record.note
            assert record.ms >= 0.99 * ms and record.ratio == pytest.approx(
                ms / record.ms, rel=0.01
            )
        assert f"{rows * 128 / 1e6:.4g} MB of a GPU cross" in by[kind, "exchange"].note
        exact, expected = 11 / 14, 0.5
        wanted = expected if kind == "half of the nodes" else exact
        found = re.fullmatch(
            r"(\S+) rows a token \(expected (\S+)\), (\S+) in blocks, .*", by[kind, "dispatch"].note
        )
        counted, modelled, in_blocks = map(float, found.groups())
        assert abs(counted - wanted) < 0.1 and modelled == round(wanted, 2)
        assert in_blocks == round(rows / 512, 2)


@pytest.mark.dist
@pytest.mark.parametrize(("ranks", "node_gpus"), [(4, 2), *slow((2, 1))])
def test_between(ranks: int, node_gpus: int, tmp_path: Path) -> None:
    """The exposed part is what the layer takes longer than its experts, over its exchanges."""
    path = tmp_path / "out.json"
    options = ["between", "--json", str(path)]
    (code, out), *others = run_distributed(_over_nodes, ranks, node_gpus, options)
    assert code == 0 and others == [(0, "")] * (ranks - 1)
    assert out.splitlines()[-1] == "0 of 0 bars met, 0 missed, 0 failures"
    _, made = records.read(path)
    by = {(r.side, r.pass_name): r for r in made}
    ends = [f"{end}{suffix}" for end in ("dispatch", "combine") for suffix in ("", " backward")]
    sides = {"hier", "alltoall"}
    timed = {(side, name) for side in sides for name in (*PASSES, *ends)}
    alone = {("experts alone, random", name) for name in PASSES}
    shares = {(side, f"exposed, {name}") for side in sides for name in ("forward", "both")}
    assert by.keys() == timed | alone | shares
    for side in sides:
        # Rows of 64 channels in bf16, routing of two experts, gradients of their probabilities.
        rows, routed, of_prob = 32 * 64 * 2, 32 * 2 * 4 * 2, 32 * 2 * 4
        wire = 1e3 * (6e-3 + (4 * rows + routed + of_prob) / 1e7)
        passed = {
            name: sum(by[side, f"{end}{name}"].ms for end in ("dispatch", "combine"))
            for name in ("", " backward")
        }
        total = passed[""] + passed[" backward"]
        assert total > 0.9 * wire
        share, exchanges = _share(by[side, "exposed, both"].note)
        assert exchanges == pytest.approx(total, abs=0.01)
        layer = by[side, "forward"].ms + by[side, "backward"].ms
        waited = layer - sum(by["experts alone, random", name].ms for name in PASSES)
        assert share == pytest.approx(waited / total, abs=0.02)
        share, exchanges = _share(by[side, "exposed, forward"].note)
        assert exchanges == pytest.approx(passed[""], abs=0.01)


def _share(note: str) -> tuple[float, float]:
    """Exposed part, and milliseconds of exchanges."""
    found = re.fullmatch(r"(\S+) of (\S+) ms of exchanges", note)
    assert found is not None, note
    return float(found[1]), float(found[2])


@pytest.mark.dist
@pytest.mark.parametrize("suite", ["rail", "between"])
def test_exchanges_between_nodes_need_nodes(suite: str) -> None:
    ((code, out), _) = run_distributed(program, 2, [suite])
    assert code == 0
    assert "all ranks are on one node: PHALANX_NODE_GPUS=1 makes a node of each GPU" in out


def _wrong_on_the_last_rank(arguments: list[str]) -> tuple[int, str]:
    real = alltoall.AllToAll.combine
    dispatchers: list[Any] = []

    def combine(self: Any, *args: Any) -> torch.Tensor:
        dispatchers.append(self)  # the first computes the reference
        out_TD = real(self, *args)
        wrong = self is not dispatchers[0] and dist.get_rank() == dist.get_world_size() - 1
        return out_TD.roll(1, 0) if wrong else out_TD

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(alltoall.AllToAll, "combine", combine)
        return program(arguments)


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
def test_one_rank_measures_suites_without_exchange() -> None:
    ((code, out),) = run_distributed(program, 1, [])
    assert code == 0 and out.splitlines()[-1] == "0 of 0 bars met, 0 missed, 0 failures"
    assert out.count("needs several ranks") >= 2 and "EP 8, random" in out
    assert "local, balanced" in out and "alltoall" not in out


# --- targets --------------------------------------------------------------------------------------


def test_a_target_becomes_a_ratio() -> None:
    timings = timings_with({("a", "forward"): [1.0, 2.0]})
    (record,) = timings.record(targeted(Case("a", "forward", flops=7e11), 280))
    assert (record.ms, record.tflops, record.ratio) == (2.0, 350, 1.25) and record.met
    assert record.note == "asked 280 TFLOP/s"


def test_rate_on_the_wire_is_that_of_the_slowest_link() -> None:
    timings = timings_with({("16 SMs", "random"): [1.0, 2.0], ("8 SMs", "random"): [1.0, 1.0]})
    (record,) = exchange._rate(timings, "16 SMs", "random", [600_000_000, 800_000_000], True)
    assert record.gbs == 400 and record.ratio == pytest.approx(400 / 330) and record.met
    (record,) = exchange._rate(timings, "8 SMs", "random", [600_000_000, 800_000_000], True)
    assert record.gbs == 600 and record.bar is None


def test_exposed_share() -> None:
    times = {
        ("a", "forward"): [10.0, 9.0],
        ("alone", "forward"): [8.0, 9.5],
        ("a", "dispatch"): [1.0, 1.5],
        ("a", "combine"): [0.5, 0.5],
    }
    (record,) = exposed(timings_with(times), "a", "alone", True)
    assert record.ms == 0.5 and record.ratio == pytest.approx(0.4 / 0.25) and record.met
    assert record.note == "0.25 of both exchanges, asked 0.4"
    del times["a", "combine"]
    assert exposed(timings_with(times), "a", "alone", True) == []


def test_operations_of_a_layer() -> None:
    rows = 8192 * 8
    assert QWEN3.flops(8192, "forward") == 6 * rows * 2048 * 768
    assert QWEN3.flops(8192, "backward") == 12 * rows * 2048 * 768
    assert FLASH.flops(4096, "forward") == 4 * 4096 * 2 * 2048 * 2048


def test_layers_of_suites() -> None:
    assert models.cases("layer", None, tiny=False) == [
        (model, 8192) for model in (DEEPSEEK, QWEN3, GPT_OSS)
    ]
    assert [t for _, t in models.cases("flash", None, tiny=False)] == [4096, 8192, 16384]
    assert models.cases("flash", 512, tiny=False) == [(FLASH, 512)]
    assert models.cases("between", None, tiny=False) == [(DEEPSEEK, 4096)]
    assert models.cases("skew", 16, tiny=True) == [(TINY, 16)]


def test_experts_are_halved_until_they_fit() -> None:
    bench: Any = SimpleNamespace(ranks=2)
    gigabyte = 1 << 30
    assert fitting(bench, DEEPSEEK, 141 * gigabyte) == DEEPSEEK
    assert fitting(bench, DEEPSEEK, 64 * gigabyte).experts == 128
    assert fitting(bench, DEEPSEEK, gigabyte).experts >= DEEPSEEK.top_k


# --- routing --------------------------------------------------------------------------------------


def test_routing() -> None:
    cpu.install()
    drawn = [routing.routed("random", 40, 8, 3, rank=rank, device=CPU) for rank in (0, 1)]
    assert not torch.equal(*drawn) and drawn[0].dtype == torch.int32
    assert all(len(set(row)) == 3 for row in drawn[0].tolist())
    balanced = [routing.routed("balanced", 40, 8, 3, rank=rank, device=CPU) for rank in (0, 1)]
    assert torch.cat(balanced).flatten().bincount().tolist() == [30] * 8
    sums = routing.probabilities(4, 3, rank=1, device=CPU).sum(1)
    assert torch.equal(sums.round(decimals=5), torch.ones(4))


def test_routing_over_nodes() -> None:
    """Weights are n ** -0.6, and half of four nodes are two."""
    sizes: dict[str, Any] = dict(nodes=4, rank=1, device=CPU)
    zipf = routing.over_nodes("Zipf 0.6", 4096, 32, 1, **sizes)
    share_E = torch.bincount(zipf.flatten(), minlength=32).sort(descending=True).values / 4096
    weights = torch.arange(1.0, 33) ** -0.6
    assert (share_E - weights / weights.sum()).abs().max() < 0.02
    half = routing.over_nodes("half of the nodes", 256, 32, 6, **sizes)
    assert (half.sort(1).values.diff(dim=1) > 0).all()  # distinct experts
    reached = torch.zeros(256, 4).scatter_(1, half.long() // 8, 1.0)
    assert (reached.sum(1) <= 2).all() and (reached.sum(0) > 100).all()


def test_bytes_of_a_dispatch_are_those_of_distinct_other_ranks() -> None:
    idx = torch.tensor([[0, 1], [2, 3], [4, 7], [2, 6]], dtype=torch.int32)
    # Of rank 1 of 4, with experts 2 and 3: to rank 0; none; to ranks 2 and 3; to rank 3.
    sent = routing.bytes_sent(idx, 100, experts=8, rank=1, ranks=4)
    assert sent == 4 * 2 * 100 + 3 * 8 * idx.numel()


def _on_ranks() -> tuple[float, dict[str, torch.Tensor]]:
    rank = dist.get_rank()
    idx = [[0, 1], [0, 2]] if rank == 0 else [[1, 0], [3, 2]]
    load = routing.fullest(torch.tensor(idx, dtype=torch.int32), 4, dist.group.WORLD)
    uneven = {k: routing.uneven(k, 4096, 32, 4, rank=rank, device=CPU) for k in routing.UNEVEN}
    return load, uneven


@pytest.mark.dist
def test_uneven_routing_and_the_most_loaded_rank() -> None:
    ranks = run_distributed(_on_ranks, 2)
    assert [load for load, _ in ranks] == [5 / 4] * 2
    for kind in routing.UNEVEN:
        idx = torch.cat([uneven[kind] for _, uneven in ranks])
        assert idx.dtype == torch.int32
        assert (idx.sort(1).values.diff(dim=1) > 0).all(), kind  # distinct experts
        share_E = torch.bincount(idx.flatten(), minlength=32) / len(idx)
        largest = share_E.max()
        if kind == "balanced":
            assert (share_E == 4 / 32).all()
        elif kind == "random":
            assert largest < 0.15
        elif kind == "one rank":
            assert share_E[:16].sum() == 4 and largest < 0.3
        elif kind == "half to one expert":
            assert share_E.argmax() == 1 and abs(largest - (0.5 + 0.5 * 4 / 32)) < 0.03
        else:  # the two most wanted, of weights 1 and 1 / 2
            first, second = share_E.topk(2).values
            assert 0.4 < second < first < 0.85 and share_E.min() < 0.06


# --- the script -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "error"),
    [
        (["fast"], "fast: a suite is one of wire"),
        (["--dispatch", "symm,nccl"], "--dispatch nccl: a transport is one of symm, alltoall"),
        (["--rounds", "0"], "--rounds 0: must be at least 1"),
        (["--tokens", "-1"], "--tokens -1: must be at least 1"),
        (["--comm-sms", "-1"], "--comm-sms -1: must be at least 0"),
    ],
)
def test_bad_arguments(argv: list[str], error: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench_dispatch.arguments(argv)
    assert error in capsys.readouterr().err.splitlines()[-1]


def test_missing_devices(
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
