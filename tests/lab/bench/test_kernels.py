"""bench_kernels on a CPU: arguments, every suite on a small shape, and the tuning of tiles.

`mlp` and `fp8` compute with the torch backend; launches of sm90 kernels are checked and not run.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass")

from phalanx.kernels.sm90.gemm import tiles
from phalanx.scripts.lab import bench_kernels
from phalanx.scripts.lab.bench import loads, problems, records, shapes
from phalanx.scripts.lab.bench.clocks import Cpu
from phalanx.scripts.lab.bench.kernels import layer, mlp, operations, tune
from phalanx.scripts.lab.bench.records import Record, Report
from phalanx.scripts.lab.bench.timing import Bench

Launches = list[tuple[str, Any]]
CPU = torch.device("cpu")
SMALL = (256, 128, 64, 4)


def run(suite: str, *shapes_: shapes.Shape, **options: Any) -> list[Record]:
    """Records of a suite, as the script collects them."""
    report = Report(None, {})
    bench_kernels.run(Bench(Cpu(), 2, **options), {suite: shapes_}, report)
    return report.records


class Load:
    """A background load that ends too early on 16 SMs."""

    gigabytes_per_second = 100.0

    def __init__(self, programs: int, ms: float) -> None:
        self.programs, self.running = programs, 0

    def start(self) -> None:
        self.running += 1

    def join(self, end: Any) -> None:
        self.running -= 1

    def shortest_lead(self) -> float:
        assert self.running == 0
        return -1.0 if self.programs == 16 else 0.5


SUITES = {
    "mlp": (SMALL, "torch", {"ours": 4, "ours, fp32 +=": 2, "torch": 4, "check": 1, "te": 1}),
    "fp8": (SMALL, "torch", {"bf16": 2, "fp8": 2, "check": 1, "te": 1}),
    "layer": ((96, 128, 64, 8, 3), "fused", {"ours": 4, "ours, public functions": 4, "sonic": 1}),
    "host": ((64, 128, 64, 8, 2), "fused", {"ours": 17, "torch": 1}),
    "skew": (SMALL, "fused", None),
    "gather": (SMALL, "fused", {"contiguous": 4, "gathered": 4}),
    "wgrad_pairs": (
        SMALL,
        "fused",
        {"two passes": 2, "one pass": 2, "fp8, two passes": 2, "fp8, one pass": 2},
    ),
    "fp8_gemms": (SMALL, "fused", {"bf16": 6, "fp8": 6}),
}
"""Shape, backend, and number of records of each side."""


@pytest.mark.parametrize("suite", SUITES)
def test_a_suite_runs(suite: str, launches: Launches) -> None:
    shape, backend, sides = SUITES[suite]
    made = run(suite, shape, backend=backend, peers=("torch", "te", "sonic"))
    assert not [r.note for r in made if r.failed]
    assert all(r.suite == suite and r.shape == shape for r in made)
    if sides is not None:
        assert {s: sum(r.side == s for r in made) for s in {r.side for r in made}} == sides
    for r in made:
        if r.side in ("te", "sonic"):  # neither is installed
            assert r.ms is None and "ModuleNotFoundError" in r.note


def test_launches_of_suites(launches: Launches) -> None:
    """Rows are gathered and contiguous, weight gradients in both formats, a layer is complete."""
    run("gather", SMALL, (64, 128, 64, 8, 2))
    assert {c.loop.gather for name, c in launches if name in ("Fc1Kernel", "DgradKernel")} == {
        True,
        False,
    }
    maths = [c.math for name, c in launches if name == "WgradKernel"]
    assert {math.gathered for math in maths} >= {None, 0, 1}
    launches.clear()
    run("fp8_gemms", SMALL)
    maths = [c.math for name, c in launches if name == "WgradKernel"]
    assert {type(math).__name__ for math in maths} == {"Contraction", "Fp8Contraction"}
    launches.clear()
    run("wgrad_pairs", SMALL)
    pairs = [c for name, c in launches if name == "WgradPairKernel"]
    assert {getattr(c.math, "gathered", "fp8") for c in pairs} == {0, 1, "fp8"}
    names = [name for name, _ in launches]
    assert names.count("WgradKernel") == 2 * len(pairs) and all(c.fp32_out and c.add for c in pairs)
    launches.clear()
    layer.warm(Bench(Cpu(), 1), [(96, 128, 64, 8, 3)])
    names = [name for name, _ in launches]
    assert names.count("WgradKernel") == 2 and names.count("CombineKernel") == 2
    assert {"TopkKernel", "TopkGradientKernel", "PlanKernel", "GatherKernel"} <= set(names)


def test_margins(launches: Launches) -> None:
    made = operations.margins(Bench(Cpu(), 2), SMALL, Load)
    by_side = {(r.side, r.pass_name): r for r in made}
    assert len(made) == 4 * (5 + 4)
    for name in ("rows", "fc1_act", "fc2_dgrad_dact", "wgrad"):
        assert by_side["0 free", name].bar is None
        assert by_side["8 free", name].bar == pytest.approx(0.97 * 124 / 132)
        assert by_side["32 occupied", name].goal == pytest.approx(0.93 * 100 / 132)
        assert "copies 100 GB/s" in by_side["8 occupied", name].note
        assert by_side["16 occupied", name].failed
    assert sum(r.failed for r in made) == 4


def test_ratios_and_rates_of_mlp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(shapes.MLP, SMALL, shapes.Bars((1e-9, 1e9), (1e-9, 1e9)))
    made = {(r.side, r.pass_name): r for r in run("mlp", SMALL, backend="torch", peers=("torch",))}
    ours, peer = made["ours", "forward"], made["torch", "forward"]
    assert ours.ratio == pytest.approx(peer.ms / ours.ms)
    assert ours.tflops == pytest.approx(6 * 256 * 128 * 64 / ours.ms * 1e-9)
    assert ours.verdict == "goal" and "dw2" in made["check", "relative error"].note
    timings = Bench(Cpu(), 1).timings("mlp", (1,))
    for error, failed in ((0.01, False), (0.03, True), (float("nan"), True)):
        assert mlp.verdict(timings, "check", [("y", error)]).failed == failed


def test_another_result_of_a_layer_is_a_failure() -> None:
    timings = Bench(Cpu(), 1).timings("layer", (1,))
    expected = [torch.randn(64, 8, dtype=torch.bfloat16) for _ in range(5)]
    assert not layer.compared(timings, "ours", expected, expected).failed
    other = [x.clone() for x in expected]
    other[0][:8] = 0
    record = layer.compared(timings, "ours", other, expected)
    assert record.failed and "12.5% of the tokens are different" in record.note


def test_a_shape_that_fails_is_a_record_and_the_next_one_runs(launches: Launches) -> None:
    made = run("skew", (256, 128, 63, 4), SMALL)
    failed = [r for r in made if r.failed]
    assert failed and all(r.shape[2] == 63 for r in failed)
    assert any(r.ms for r in made if r.shape[2] == 64)


def test_routings() -> None:
    assert problems.balanced(10, 4) == [3, 3, 2, 2]
    for counts in (problems.dirichlet(4096, 8), problems.drawn(4096, 8, shapes.ZIPF)):
        assert sum(counts) == 4096 and min(counts) >= 0
    ranked = sorted(problems.drawn(200_000, 4, 0.6), reverse=True)
    assert ranked == pytest.approx([200_000 * (i**-0.6) / 2.612 for i in (1, 2, 3, 4)], rel=0.03)
    index = problems.index_of([3, 0, 5], 5, CPU)
    assert index[3:].tolist() == [0, 1, 2, 3, 4] and index.dtype == torch.int32


def test_copies_last_long_enough_but_not_for_ever() -> None:
    assert loads.passes_for(5.0, 2.5) == 4000 and loads.passes_for(1e-9, 1.0) == 16
    assert loads.passes_for(1e9, 1.0) == 400_000


def test_bars_of_margins() -> None:
    assert shapes.margin_bar(33, 132) == pytest.approx(0.97 * 0.75)
    assert shapes.occupied_bars(33, 132) == pytest.approx((0.93 * 0.97 * 0.75, 0.93 * 0.75))


# --- the script -----------------------------------------------------------------------------------


def test_arguments() -> None:
    args = bench_kernels.arguments([])
    assert args.suites == list(bench_kernels.RUNS) and args.peers == () and args.rounds == 20
    args = bench_kernels.arguments(["layer", "gather", "--peers", "all", "--shape", "24576"])
    assert args.suites == ["gather", "layer"] and args.peers == ("torch", "te", "sonic")
    assert args.selected["layer"] == ((24576, 1536, 256, 128, 8),) and not args.demanded
    args = bench_kernels.arguments(["mlp", "--shape", "128,64,64,2", "--peers", "torch"])
    assert args.selected == {"mlp": ((128, 64, 64, 2),)} and args.demanded


@pytest.mark.parametrize(
    ("argv", "error"),
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
def test_bad_arguments(argv: list[str], error: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench_kernels.arguments(argv)
    assert error in capsys.readouterr().err.splitlines()[-1]


def test_the_script(
    launches: Launches,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench_kernels.main(["skew"]) == 1
    assert "there is none" in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "H200")
    monkeypatch.setattr(bench_kernels, "Gpu", Cpu)
    path = tmp_path / "out.json"
    argv = ["skew", "gather", "--shape", "256,128,64,4", "--rounds", "2", "--json", str(path)]
    assert bench_kernels.main(argv) == 0
    out = capsys.readouterr().out
    assert out.startswith("device H200, torch ") and out.splitlines()[-1].endswith("0 failures")
    run_facts, made = records.read(path)
    assert run_facts["command"] == " ".join(argv) and run_facts["after"] == {}
    assert {r.suite for r in made} == {"skew", "gather"}
    assert bench_kernels.main(["skew", "--shape", "256,128,63,4", "--rounds", "1"]) == 1


# --- --tune ---------------------------------------------------------------------------------------


def test_relative_times() -> None:
    measured = {"a": [1.0, 2.0, 3.0], "b": [1.1, 2.0, 3.6], "c": [0.9, 4.0, 6.0]}
    assert tune.relative(measured) == {"a": 1.0, "b": 1.2, "c": 2.0}


def test_the_table_of_tiles_is_rewritten_in_its_format(tmp_path: Path) -> None:
    table = tiles.table()
    assert tune.to_text(table) == tiles.PATH.read_text()
    path, new = tmp_path / "tiles.json", {kind: dict(entry) for kind, entry in table.items()}
    new["grouped_gemm"] = {"co256": 1.0, "pp192": 1.02}
    tune.update(path, new)
    assert json.loads(path.read_text()) == new and list(tmp_path.iterdir()) == [path]
    lines = tune.changes(table, new)
    assert len(lines) == len(table) and 'now {"co256": 1.0, "pp192": 1.02}' in lines[0]
    assert all(line.endswith("unchanged") for line in lines[1:])


def test_every_tile_of_every_kind_is_measured(
    launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = (tune.Problem(256, 768, 64, 4), tune.Problem(128, 768, 128, 2))
    monkeypatch.setattr(tune, "cases_of", lambda _: small)
    for kind, listed in tiles.table().items():
        launches.clear()
        made, entry = tune.kind(Bench(Cpu(), 2), kind)
        assert set(entry) == set(listed) and min(entry.values()) == 1.0
        assert not any(r.failed for r in made)
        loops = {config.loop for _, config in launches}
        assert {(x.columns, x.pingpong) for x in loops} == {
            (tiles.TILES[t].columns, tiles.TILES[t].pingpong) for t in listed
        }
        assert {x.gather for x in loops} == {"gathered" in kind}


def test_shapes_for_tuning_suit_all_tiles_and_their_kind() -> None:
    for kind in tiles.table():
        for case in tune.cases_of(kind):
            assert all(case.N % tile.columns == 0 for tile in tiles.TILES.values())
            if "gathered" in kind:
                name = kind.split(" ")[0]
                assert tiles.kind(name, gather=True, depth=case.K) == kind


def test_tuning_writes_unless_dry(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "tiles.json"
    monkeypatch.setattr(tiles, "PATH", path)
    monkeypatch.setattr(tune, "kind", lambda _, kind: ([], {"pp128": 1.0}))
    bench = Bench(Cpu(), 1)
    bench_kernels.tune(bench, Report(None, {}), dry=True)
    assert not path.exists() and "was left as it is" in capsys.readouterr().out
    bench_kernels.tune(bench, Report(None, {}), dry=False)
    assert set(json.loads(path.read_text())) == set(tiles.table())
