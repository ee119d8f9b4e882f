"""bench_kernels without a GPU: arguments, statistics, files, and every suite on stand-ins.

Suites run on a clock of the CPU. Where they call kernels, the launches are stand-ins, while checks
of arguments, choices of tiles and the sums over them are the real ones; `mlp` and `layer` compute
their numbers with the torch backend.
"""

import json
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

pytest.importorskip("cutlass")

from phalanx.kernels.expert_mlp.mlp_spec import MLPSpec
from phalanx.kernels.sm90.gemm import tiles
from phalanx.kernels.sm90.jit.pointers import arguments_of
from phalanx.scripts import bench_kernels
from phalanx.scripts.bench import (
    fp8,
    fp8_gemms,
    host,
    layer,
    measure,
    mlp,
    operations,
    problems,
    records,
    shapes,
    tune,
)
from phalanx.scripts.bench.measure import Bench, Sides
from phalanx.scripts.bench.records import Record
from tests.scripts.stopwatch import CPU, Stopwatch

MODULES = [
    "experts.grouped_gemm",
    "experts.fc1_act",
    "experts.fc2_dgrad_dact",
    "experts.wgrad",
    "experts.combine",
    "experts.bias_grad",
    "experts.dprob",
    "routing.plan",
    "routing.topk",
    "jit.arguments",
    "jit.launch",
    "fp8.grouped_gemm",
    "fp8.fc1_act",
    "fp8.fc2_dgrad_dact",
    "fp8.wgrad",
]


def bench(**options) -> Bench:
    return Bench(Stopwatch(), 2, **options)


@pytest.fixture
def launched(monkeypatch):
    """Kernels that are not run: names and configurations of what would have been launched."""
    seen = []

    def launch(kernel, config, **arguments):
        pointers, integers = arguments_of(kernel)
        assert arguments.keys() == {*pointers, *integers}
        assert all(isinstance(arguments[name], int) for name in integers)
        if kernel.__name__ == "PlanKernel":
            for name in [*pointers][2:]:
                arguments[name].zero_()
        seen.append((kernel.__name__, config))

    def check(device, name, tensor, dtype, shape):
        if tensor is not None:
            assert tensor.dtype == dtype and tensor.is_contiguous(), name
            assert shape is None or tensor.shape == shape, (name, tensor.shape, shape)

    stand_ins = dict(
        launch=launch, check=check, sms=lambda _: 132, counter_of=lambda _: torch.zeros(1).int()
    )
    modules = [import_module(f"phalanx.kernels.sm90.{name}") for name in MODULES]
    for module in [*modules, operations]:
        for name, stand_in in stand_ins.items():
            if callable(getattr(module, name, None)):
                monkeypatch.setattr(module, name, stand_in)
    return seen


def topk(logits, *, top_k, **_):
    best = logits.float().sort(dim=1, descending=True, stable=True)
    return best.indices[:, :top_k].int(), best.values[:, :top_k].softmax(1)


def topk_backward(dprob, idx, prob, logits, **_):
    chosen = prob * (dprob - (prob * dprob).sum(1, keepdim=True))
    return torch.zeros_like(logits).scatter_(1, idx.long(), chosen.to(logits.dtype))


def sonic_layer(x, router, w1, b1, w2, b2, K, stream, kind, inference):
    """SonicMoE's arguments: w1 [2F, D, E] with gate and up rows in turn, w2 [D, F, E]."""
    assert b1 is None and b2 is None and not inference
    best = (x @ router.T).float().sort(dim=1, descending=True, stable=True)
    prob, out = best.values[:, :K].softmax(1), 0.0
    for e in range(w1.shape[2]):
        h = (x @ w1[..., e].T).float()
        a = (torch.nn.functional.silu(h[:, ::2]) * h[:, 1::2]).to(x.dtype)
        weight = (prob * (best.indices[:, :K] == e)).sum(1, keepdim=True)
        out = out + weight * (a @ w2[..., e].T).float()
    return (out.to(x.dtype),)


@pytest.fixture
def sonic(monkeypatch):
    """A package of SonicMoE's names, and our router in tensor code."""
    functional = ModuleType("sonicmoe.functional")
    functional.moe_TC_softmax_topk_layer = sonic_layer
    enums = ModuleType("sonicmoe.enums")
    enums.ActivationType = SimpleNamespace(SWIGLU="swiglu")
    package = ModuleType("sonicmoe")
    package.__version__ = "0"
    for module in (package, functional, enums):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))
    monkeypatch.setattr(layer, "topk", topk)
    monkeypatch.setattr(layer, "topk_backward", topk_backward)
    return functional


def by_side(made: list[Record]) -> dict[tuple[str, str, str], Record]:
    return {(r.side, r.pass_name, r.mode): r for r in made}


def test_bars_are_what_is_asked():
    assert {s: (*b.must, *b.goal) for s, b in shapes.LAYER.items()} == {
        (24576, 1536, 256, 128, 8): (1.05, 1.05, 1.20, 1.15),
        (32768, 4096, 256, 256, 16): (1.03, 1.03, 1.12, 1.10),
        (32768, 2048, 768, 128, 8): (1.04, 1.04, 1.12, 1.10),
        (32768, 2048, 512, 512, 10): (1.10, 1.06, 1.22, 1.15),
        (32768, 4096, 2048, 64, 4): (0.98, 0.98, 1.03, 1.03),
    }
    assert {s: (*b.must, *b.goal) for s, b in shapes.MLP.items()} == {
        (65536, 7168, 2048, 32): (1.08, 1.08, 1.15, 1.15),
        (32768, 2880, 2880, 4): (1.15, 1.25, 1.3, 1.5),
        (32768, 2880, 2880, 32): (1.20, 1.30, 1.3, 1.6),
        (65536, 2048, 768, 16): (1.20, 1.25, 1.3, 1.6),
    }
    assert shapes.margin_bar(33, 132) == pytest.approx(0.97 * 0.75)
    assert shapes.occupied_bars(33, 132) == pytest.approx((0.93 * 0.97 * 0.75, 0.93 * 0.75))


def test_arguments():
    args = bench_kernels.arguments([])
    assert args.suites == list(bench_kernels.RUNS) and args.peers == () and args.rounds == 20
    args = bench_kernels.arguments(["layer", "gather", "--peers", "all", "--shape", "24576"])
    assert args.suites == ["gather", "layer"] and args.peers == ("torch", "te", "sonic")
    assert args.selected["layer"] == ((24576, 1536, 256, 128, 8),) and not args.demanded
    args = bench_kernels.arguments(["mlp", "--shape", "128,64,64,2", "--peers", "torch"])
    assert args.selected == {"mlp": ((128, 64, 64, 2),)} and args.demanded


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["fast"], "fast: a suite is one of mlp"),
        (["--peers", "torch,megablocks"], "a peer is one of"),
        (["--shape", "1,x"], "--shape"),
        (["mlp", "--shape", "5"], "no suite that was named has such a shape"),
        (["--rounds", "0"], "must be at least 1"),
        (["--warm", "-1"], "seconds, below 60"),
        (["--dry"], "--dry: goes with --tune"),
        (["mlp", "--tune"], "runs no suite"),
    ],
)
def test_bad_arguments_are_refused_in_a_line(argv, said, capsys):
    with pytest.raises(SystemExit):
        bench_kernels.arguments(argv)
    assert said in capsys.readouterr().err.splitlines()[-1]


def test_statistics():
    values = [float(v) for v in range(11)]
    assert measure.time_of(values) == (5, 1, 9)
    assert measure.percentile([3.0], 0.9) == 3
    assert measure.backward_time([5.0, 7, 9], [1.0, 2, 3]) == (5, pytest.approx(4.2), 5.8)


def test_sides_take_turns_with_the_cache_flushed():
    """In another order every round, the same on all ranks."""
    b, order = bench(), []
    sides = Sides(b, "mlp", (1,))
    for name in "ab":
        sides.add(name, "forward", lambda name=name: order.append(name), modes=("eager",))
    sides.add("c", "forward", lambda: 1 / 0)
    sides.run()
    rounds = ["".join(order[i : i + 2]) for i in range(2, 12, 2)]
    assert len(order) == 12 and b.clock.flushes == 10
    assert {"".join(sorted(r)) for r in rounds} == {"ab"} and len({*rounds}) == 2
    first = order.copy()
    order.clear()
    sides.run()
    assert order == first[2:]
    assert len(sides.times[measure.Key("a", "forward", "eager")]) == 2
    [skipped] = sides.skipped
    assert skipped.failed and "division by zero" in skipped.note


def test_json_keeps_everything_and_a_line_per_result(tmp_path):
    made = [
        Record("mlp", (1, 2), "ours", "forward", "eager", 1.25, 1, 1.5, 600.5, 1.1, 1.0, 1.2),
        Record("mlp", (1, 2), "te", "", "eager", note="not installed", failed=True),
    ]
    path = tmp_path / "runs" / "a.json"
    records.write(path, {"device": "H200"}, made)
    assert records.read(path) == ({"device": "H200"}, made)
    assert len(path.read_text().splitlines()) == 5
    assert json.loads(path.read_text())["records"][0]["met"] is True
    path.write_text("[]")
    with pytest.raises(ValueError, match="not a file of this script"):
        records.read(path)


def test_verdicts_and_table():
    def judged(ratio):
        return Record("mlp", (8, 4), "ours", "forward", ms=2.0, ratio=ratio, bar=1.1, goal=1.3)

    assert [judged(r).verdict for r in (1.05, 1.1, 1.3)] == ["missed", "met", "goal"]
    text = records.table([judged(1.2), Record("host", (1,), "x", "y", note="why", failed=True)])
    lines = text.splitlines()
    assert lines[1] == "mlp 8,4" and "2.0000" in lines[3] and lines[3].endswith("met")
    assert lines[-1].endswith("FAILED  why")
    assert records.summary([judged(1.2), judged(1.0)]) == "1 of 2 bars met, 1 missed, 0 failures"


def test_earlier_results_are_shown_and_plotted_if_possible(tmp_path, capsys, monkeypatch):
    path = tmp_path / "a.json"
    records.write(path, {}, [Record("mlp", (8,), "ours", "forward", ms=1.0, ratio=1.2, bar=1.1)])
    assert bench_kernels.main(["--from-json", str(path)]) == 0
    assert "mlp 8" in capsys.readouterr().out
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert bench_kernels.main(["--from-json", str(path), "--plot", str(tmp_path / "a.png")]) == 1
    assert capsys.readouterr().err == "no plot: matplotlib is not installed\n"
    assert bench_kernels.main(["--from-json", str(tmp_path / "none.json")]) == 1


def test_routings_have_all_rows():
    assert problems.balanced(10, 4) == [3, 3, 2, 2]
    for counts in (problems.dirichlet(4096, 8), problems.drawn(4096, 8, shapes.ZIPF)):
        assert sum(counts) == 4096 and min(counts) >= 0
    ranked = sorted(problems.drawn(200_000, 4, 0.6), reverse=True)
    assert ranked == pytest.approx([200_000 * (i**-0.6) / 2.612 for i in (1, 2, 3, 4)], rel=0.03)
    index = problems.index_of([3, 0, 5], 5, CPU)
    assert index[3:].tolist() == [0, 1, 2, 3, 4] and index.dtype == torch.int32


def test_mlp_compares_with_those_who_are_there(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    shape = (256, 128, 64, 4)
    monkeypatch.setitem(shapes.MLP, shape, shapes.Bars((1e-9, 1e9), (1e-9, 1e9)))
    b = bench(peers=("torch", "te"), backend="torch")
    made = by_side(mlp.suite(b, shape))
    check = made.pop(("check", "relative error", ""))
    assert not check.failed and "dw2" in check.note
    skipped = made.pop(("te", "", "eager"))
    assert "transformer_engine" in skipped.note and not skipped.failed
    for mode in ("eager", "graph"):
        ours, peer = made["ours", "forward", mode], made["torch", "forward", mode]
        assert ours.ratio == pytest.approx(peer.ms / ours.ms)
        assert ours.tflops == pytest.approx(6 * 256 * 128 * 64 / ours.ms * 1e-9)
        assert ours.verdict == "goal" and made["ours", "backward", mode].verdict in ("missed", "")
    assert ("ours, fp32 +=", "backward", "graph") in made


def test_fp8_is_compared_with_bf16(monkeypatch):
    shape = (256, 128, 64, 4)
    monkeypatch.setitem(shapes.FP8, shape, shapes.Bars((1e-9, 1e-9), (1e9, 1e9)))
    found = by_side(fp8.suite(bench(backend="torch"), shape))
    check = found.pop(("check", "relative error", ""))
    assert not check.failed and "dw2" in check.note
    assert {pass_name for _, pass_name, _ in found} == {"forward", "backward"}
    bf16, eight = (found[side, "forward", "graph"] for side in ("bf16", "fp8"))
    assert eight.ratio == pytest.approx(bf16.ms / eight.ms) and eight.met and bf16.ratio is None
    assert eight.tflops == pytest.approx(6 * 256 * 128 * 64 / eight.ms * 1e-9)


def test_a_peer_in_fp8_is_compared_over_both_passes(monkeypatch):
    shape = (256, 128, 64, 4)
    b = bench(peers=("te",), backend="torch")
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    assert "transformer_engine" in by_side(fp8.suite(b, shape))["te", "both", "graph"].note

    def theirs(p):
        leaves = [p.x_SD, p.w1, p.w2]
        return fp8.mlp(p, MLPSpec(problems.SWIGLU, "torch")), leaves

    monkeypatch.setattr(fp8, "transformer_engine", theirs)
    monkeypatch.setitem(shapes.FP8_TE, shape, (1e-9, 1e9))
    found = by_side(fp8.suite(b, shape))
    ours, peer = found["fp8", "both", "graph"], found["te", "both", "graph"]
    assert ours.ratio == pytest.approx(peer.ms / ours.ms) and ours.met and peer.ratio is None
    assert ours.tflops == pytest.approx(18 * 256 * 128 * 64 / ours.ms * 1e-9)


def test_rounds_that_warm_up_do_not_count():
    calls = []
    sides = bench(warm=0.02).sides("mlp", (1,))
    sides.add("ours", "forward", lambda: calls.append(1), modes=("eager",))
    sides.run()
    (times,) = sides.times.values()
    assert len(times) == 2 and len(calls) > 1 + measure.WARM_ROUNDS + 2


def test_wrong_results_fail():
    sides = bench().sides("mlp", (1,))
    assert not mlp.verdict(sides, "check", [("y", 0.01)]).failed
    assert mlp.verdict(sides, "check", [("y", 0.03)]).failed
    assert mlp.verdict(sides, "check", [("y", float("nan"))]).failed


def test_layer_is_sonics(sonic):
    made = layer.suite(bench(peers=("sonic",), backend="torch"), (96, 128, 64, 8, 3))
    assert not any(r.failed for r in made), [r.note for r in made if r.failed]
    checks = [r for r in made if r.side.startswith("check")]
    assert [r.side for r in checks] == ["check of ours", "check of ours, public functions"]
    assert all(name in r.note for r in checks for name in ("out", "dx", "drouter", "dw1", "dw2"))
    sides = by_side(made)
    for mode in ("eager", "graph"):
        assert sides["ours", "forward", mode].ratio is not None
        assert ("sonic", "forward", mode) in sides


def test_layer_notices_another_result(sonic, monkeypatch):
    def wrong(*args):
        return (sonic_layer(*args)[0].roll(1, 0),)

    monkeypatch.setattr(sonic, "moe_TC_softmax_topk_layer", wrong)
    made = layer.suite(bench(peers=("sonic",), backend="torch"), (96, 128, 64, 8, 3))
    assert [r.failed for r in made if r.side.startswith("check")] == [True, True]


def test_layer_and_host_pass_what_kernels_take(launched):
    layer.warm(bench(), [(96, 128, 64, 8, 3)])
    names = [name for name, _ in launched]
    assert names.count("WgradKernel") == 2 and names.count("CombineKernel") == 2
    assert {"TopkKernel", "TopkGradientKernel", "PlanKernel", "GatherKernel"} <= set(names)
    made = host.suite(bench(), shapes.SUITES["host"][0])
    assert not any(r.failed for r in made), [r.note for r in made if r.failed]
    assert {r.mode for r in made} == {"host"} and len(made) == 18


class BackgroundLoad:
    gigabytes_per_second = 100.0

    def __init__(self, programs, ms):
        self.programs, self.ms, self.running = programs, ms, 0

    def start(self):
        self.running += 1

    def join(self, end):
        self.running -= 1

    def shortest_lead(self):
        return -1.0 if self.programs == 16 else 0.5


def test_margins(launched):
    made = operations.margins(bench(), (256, 128, 64, 4), BackgroundLoad)
    sides = by_side(made)
    assert len(made) == 4 * (5 + 4)
    for name in ("rows", "fc1_act", "fc2_dgrad_dact", "wgrad"):
        assert sides["0 free", name, "graph"].bar is None
        assert sides["8 free", name, "graph"].bar == pytest.approx(0.97 * 124 / 132)
        assert sides["32 occupied", name, "graph"].goal == pytest.approx(0.93 * 100 / 132)
        assert sides["16 occupied", name, "graph"].failed
    assert sum(r.failed for r in made) == 4


def test_copies_last_as_long_as_told_and_not_for_ever():
    background_load = pytest.importorskip("triton") and import_module(
        "phalanx.scripts.bench.background_load"
    )
    assert (
        background_load.passes_for(5.0, 2.5) == 4000 and background_load.passes_for(1e-9, 1.0) == 16
    )
    assert background_load.passes_for(1e9, 1.0) == 400_000


def test_skew(launched):
    made = by_side(operations.skew(bench(), (256, 128, 64, 4)))
    assert {side for (side, *_), r in made.items() if r.bar is not None} == {"zipf"}
    assert made["zipf", "forward", "graph"].bar == 0.95
    assert made["drawn evenly", "forward", "graph"].ratio is not None
    assert not any(r.failed for r in made.values())


@pytest.mark.parametrize("shape", [(256, 128, 64, 4), (64, 128, 64, 8, 2)])
def test_gather(launched, shape):
    made = by_side(operations.gather(bench(), shape))
    assert not any(r.failed for r in made.values()), made
    gathered = [r for r in made.values() if r.side == "gathered"]
    assert len(gathered) == 4 and all(r.bar == 0.93 for r in gathered)
    loops = {c.loop.gather for name, c in launched if name in ("Fc1Kernel", "DgradKernel")}
    assert loops == {True, False}
    assert {c.gathered for name, c in launched if name == "WgradKernel"} >= {None, 0, 1}


def test_gemms_in_fp8(launched):
    made = by_side(fp8_gemms.suite(bench(), (256, 128, 64, 4)))
    assert not any(r.failed for r in made.values()), made
    ours = [r for r in made.values() if r.side.startswith("fp8")]
    assert len(ours) == 8 and all(r.ratio is not None for r in ours)
    named = {name for name, _ in launched}
    assert {f"Fp8{kind}Kernel" for kind in ("GroupedGemm", "Fc1", "Dgrad", "Wgrad")} < named
    assert {c.vector for name, c in launched if name == "Fp8WgradKernel"} == {True, False}


def test_relative_times():
    measured = {"a": [1.0, 2.0, 3.0], "b": [1.1, 2.0, 3.6], "c": [0.9, 4.0, 6.0]}
    assert tune.relative(measured) == {"a": 1.0, "b": 1.2, "c": 2.0}


def test_table_is_written_as_it_was_and_differences_are_told(tmp_path):
    table = tiles.table()
    assert tune.to_text(table) == tiles.PATH.read_text()
    path, new = tmp_path / "tiles.json", {kind: dict(entry) for kind, entry in table.items()}
    new["grouped_gemm"] = {"co256": 1.0, "pp192": 1.02}
    tune.update(path, new)
    assert json.loads(path.read_text()) == new and list(tmp_path.iterdir()) == [path]
    said = tune.changes(table, new)
    assert len(said) == len(table) and 'now {"co256": 1.0, "pp192": 1.02}' in said[0]
    assert all(line.endswith("unchanged") for line in said[1:])


def test_every_tile_of_every_kind_is_measured(launched, monkeypatch):
    small = (tune.Case(256, 768, 64, 4), tune.Case(128, 768, 128, 2))
    monkeypatch.setattr(tune, "cases_of", lambda _: small)
    for kind, listed in tiles.table().items():
        launched.clear()
        made, entry = tune.kind(bench(), kind)
        assert set(entry) == set(listed) and min(entry.values()) == 1.0
        assert not any(r.failed for r in made)
        loops = {config.loop for _, config in launched}
        assert {(x.columns, x.pingpong) for x in loops} == {
            (tiles.TILES[t].columns, tiles.TILES[t].pingpong) for t in listed
        }
        assert {x.gather for x in loops} == {"gathered" in kind}


def test_shapes_for_tuning_suit_all_tiles_and_their_kind():
    for kind in tiles.table():
        for case in tune.cases_of(kind):
            assert all(case.N % tile.columns == 0 for tile in tiles.TILES.values())
            if "gathered" in kind:
                name = kind.split(" ")[0]
                assert tiles.kind(name, gather=True, depth=case.K) == kind


def test_tuning_writes_unless_dry(launched, monkeypatch, tmp_path, capsys):
    path = tmp_path / "tiles.json"
    monkeypatch.setattr(tiles, "PATH", path)
    monkeypatch.setattr(tune, "kind", lambda _, kind: ([], {"pp128": 1.0}))
    args = SimpleNamespace(json=None)
    bench_kernels.tune(bench(), bench_kernels.Report(args), dry=True)
    assert not path.exists() and "was left as it is" in capsys.readouterr().out
    bench_kernels.tune(bench(), bench_kernels.Report(args), dry=False)
    assert set(json.loads(path.read_text())) == set(tiles.table())


def test_a_shape_that_fails_is_a_row_and_the_next_one_runs(launched, tmp_path, capsys):
    path: Path = tmp_path / "out.json"
    report = bench_kernels.Report(SimpleNamespace(json=path))
    chosen = {"skew": ((256, 128, 63, 4), (256, 128, 64, 4))}
    bench_kernels.run(bench(), chosen, report)
    failed = [r for r in report.records if r.failed]
    assert failed and all(r.shape[2] == 63 for r in failed)
    assert any(r.ms for r in report.records if r.shape[2] == 64)
    assert records.read(path)[1][0].shape == (256, 128, 63, 4)
    assert "FAILED" in capsys.readouterr().out


def test_the_whole_script(launched, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench_kernels.main(["skew"]) == 1
    assert "there is none" in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "H200")
    monkeypatch.setattr(bench_kernels, "Gpu", Stopwatch)
    path = tmp_path / "out.json"
    argv = ["skew", "gather", "--shape", "256,128,64,4", "--rounds", "2", "--json", str(path)]
    assert bench_kernels.main(argv) == 0
    out = capsys.readouterr().out
    assert out.startswith("device H200, torch ") and out.splitlines()[-1].endswith("0 failures")
    known, made = records.read(path)
    assert known["command"] == " ".join(argv) and known["after"] == {}
    assert {r.suite for r in made} == {"skew", "gather"}
    assert bench_kernels.main(["skew", "--shape", "256,128,63,4", "--rounds", "1"]) == 1
