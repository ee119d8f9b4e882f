"""compare_throughput: points, statistics, rows of failures, a stopped sweep, and a real one."""

import gzip
import importlib.util
import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from phalanx.configs.load import load
from phalanx.configs.validate import ConfigError
from phalanx.kernels import registry
from phalanx.moe.report.loggers import read
from phalanx.scripts.lab import compare_throughput
from phalanx.scripts.lab.compare import launch, losses, machine, report, sweep
from phalanx.scripts.lab.compare.launch import Launch, figures, reason, traced, window
from phalanx.scripts.lab.compare.points import Point, expand
from phalanx.scripts.lab.compare.results import Run, rows
from phalanx.scripts.output.pictures import common_title
from tests.support import runs
from tests.support.runs import SMALL

SCRIPT = Path(compare_throughput.__file__)
TORCHRUN = """
import json, os, signal, subprocess, sys, time
from pathlib import Path

given = dict(word.split("=", 1) for word in sys.argv if "=" in word)
folder, kernels = Path(given["run.dir"], given["run.name"]), given.get("kernels", "")
beside = Path(__file__).parent
with (beside / "order").open("a") as file:
    file.write(given["run.name"] + "\\n")
if (beside / "stop").exists():
    (beside / "stop").unlink()
    os.kill(os.getppid(), signal.SIGTERM)
    time.sleep(60)
if kernels == "auto":
    print("[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.")
    sys.exit(1)
if kernels == "megatron":
    child = subprocess.Popen(["sleep", "60"], start_new_session=True)
    (beside / "child").write_text(str(child.pid))
    time.sleep(60)
assert not folder.exists()
folder.mkdir()
rate = {"reference": 100.0, "torch": 200.0}.get(kernels, 50.0)
with (folder / "metrics.jsonl").open("w") as file:
    for step in range(1, int(given["run.steps"]) + 1):
        record = {"step": step, "loss": 5 - step / 100, "tokens_per_second_per_gpu": rate + step,
                  "tflops_per_gpu": 2.5, "step_time": 0.1, "memory": 7.0, "reruns": 0}
        file.write(json.dumps(record) + "\\n")
"""
"""Stands in for torchrun, by its kernels: runs, is out of memory, or hangs."""


class Stand:
    """Calls of the script, with a torchrun of milliseconds."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.out = folder, folder / "out"
        (folder / "torchrun.py").write_text(TORCHRUN)

    def __call__(self, *overrides: str, steps: int = 4, options: tuple[str, ...] = ()) -> int:
        launcher = f"{shlex.quote(sys.executable)} {self.folder}/torchrun.py {{command}}"
        own = ["--device", "cpu", "--steps", str(steps), "--out", str(self.out)]
        return compare_throughput.main([*own, "--launcher", launcher, *options, *overrides])

    def order(self) -> list[str]:
        """Runs that were started, as point.repeat."""
        words = (self.folder / "order").read_text().split()
        return [f"{int(w.split('_')[1])}.{w.split('_')[3]}" for w in words]

    def rows(self) -> list[dict]:
        return json.loads((self.out / "throughput.json").read_text())["rows"]


@pytest.fixture
def stand(tmp_path: Path) -> Stand:
    return Stand(tmp_path)


def metrics(path: Path, losses: list[float | None], **more: list[float]) -> Path:
    with path.open("w") as file:
        for i, loss in enumerate(losses):
            record = {"step": i + 1, "loss": loss, "step_time": 1.0, "memory": 9.0 - i}
            record |= {"tokens_per_second_per_gpu": 10.0 * i, "tflops_per_gpu": float(i)}
            file.write(json.dumps(record | {k: v[i] for k, v in more.items()}) + "\n")
        file.write(json.dumps({"event": "summary", "at": len(losses)}) + "\n")
    return path


def test_points_are_hydras_product():
    points = expand(["model=tiny", "kernels=megatron,torch", "run.graph=off,full_iteration"])
    assert [p.label for p in points] == [
        "kernels=megatron run.graph=off",
        "kernels=megatron run.graph=full_iteration",
        "kernels=torch run.graph=off",
        "kernels=torch run.graph=full_iteration",
    ]
    assert points[1].overrides == ("model=tiny", "kernels=megatron", "run.graph=full_iteration")
    text = ["parallel.tensor=range(1,5,2)", "optim.lr=choice(1e-3,2e-3)", "data.blend=[a,b]"]
    assert [p.label for p in expand(text)] == [
        f"parallel.tensor={tensor} optim.lr={lr}" for tensor in (1, 3) for lr in (0.001, 0.002)
    ]
    assert all(p.overrides[2] == "data.blend=[a,b]" for p in expand(text))
    assert [p.label for p in expand(["kernels=glob(t*)"])] == ["kernels=te", "kernels=torch"]
    labels = [p.label for p in expand(["precision=bf16,fp8_block", "kernels=torch"])]
    assert labels == ["precision=bf16", "precision=fp8_block"]
    assert expand(["run=bench"]) == [Point("as given", ())]
    assert expand(["torch"]) == [Point("as given", ("torch",))]  # for configs.load to explain


@pytest.mark.parametrize(
    ("text", "output"),
    [
        ("run.steps=10,20", "use --steps"),
        ("run=pretrain", "a comparison sets run itself"),
        ("run.resume=auto", "leave it out"),
        ("optim.lr=interval(0,1)", "has no list of values"),
        ("kernels=glob(x*)", "matches nothing"),
        ("kernels=torch,torch", "two points are the same"),
    ],
)
def test_what_cannot_be_compared_is_refused(text, output):
    with pytest.raises(ConfigError, match=output):
        expand(["model=tiny", text])


def test_the_last_ten_steps_count_or_the_second_half():
    assert list(window(50)) == list(range(41, 51)) and list(window(20)) == list(range(11, 21))
    assert list(window(4)) == [3, 4] and list(window(3)) == [2, 3] and list(window(2)) == [2]


def test_figures_of_a_run(tmp_path):
    path = metrics(tmp_path / "m", [5.0, 4.5, 4.0, 3.5], reruns=[1, 2, 2, 4])
    actual = figures(path, 4)
    assert actual["tokens_per_second_per_gpu"] == 25 and actual["tflops_per_gpu"] == 2.5
    assert actual["loss"] == 3.5 and actual["memory"] == 9 and actual["reruns"] == 2
    assert "mfu" not in actual
    with pytest.raises(ValueError, match="ended after step 4 of 6"):
        figures(path, 6)
    with pytest.raises(ValueError, match="not finite at step 4"):
        figures(metrics(path, [5.0, 4.5, 4.0, None]), 4)
    with pytest.raises(ValueError, match="ended after step 0"):
        figures(tmp_path / "none", 4)


def run(point: int, repeat: int, rate: float, loss: float, **more: float) -> Run:
    base = {"tokens_per_second_per_gpu": rate, "tflops_per_gpu": 2 * rate, "memory": 1.0 + repeat}
    base |= {"memory_total": 140.0, "loss": loss, "reruns": 0}
    return Run(point, repeat, base | more)


def test_rows_compare_with_the_first_point():
    runs = [run(0, 0, 100, 4.0), run(1, 0, 210, 4.03), run(2, 0, 150, 4.1)]
    runs += [run(0, 1, 104, 4.0), run(1, 1, 198, 4.04, reruns=3), Run(2, 1, {}, "lost")]
    first, fast, other, left = rows("abcd", runs, tolerance=0.01)
    assert first.tokens_per_second_per_gpu == 102 and first.tflops_per_gpu == 204
    assert first.tokens_per_second_per_gpu_sd == pytest.approx(8**0.5)
    assert (first.speedup, first.loss_difference, first.memory) == (1.0, 0.0, 2.0)
    assert fast.speedup == 2.0 and fast.loss_difference == pytest.approx(0.035)
    assert not fast.loss_differs and fast.notes == ["3 counted steps ran twice (row budget)"]
    assert other.loss_differs and other.tokens_per_second_per_gpu_sd is None and other.runs == 1
    assert other.notes == [
        "faster, but with another loss: more than 1.00% from the first point's",
        "FAILED: lost",
    ]
    assert left.runs == 0 and left.notes == ["not run yet"] and left.speedup is None
    slow = rows("ab", [run(0, 0, 100, 4.0), run(1, 0, 90, 3.9)], 0.01)[1]
    assert slow.loss_differs and slow.notes[0].startswith("another loss")
    assert rows("ab", [Run(0, 0, {}, "lost"), run(1, 0, 9, 4)], 0.01)[1].speedup is None


def test_table_has_the_columns_that_someone_fills():
    facts = {"steps": 50, "unit": "GPU", "tolerance": 0.01, "command": "python x"}
    text = report.markdown(facts, rows("ab", [run(0, 0, 12345, 4.0), run(1, 0, 2e4, 3.0)], 0.01))
    head, rule, first, second = [line for line in text.splitlines() if line.startswith("|")]
    names = "point runs tokens/s/GPU speed-up TFLOP/s/GPU peak_GiB loss to_first note"
    assert [cell.strip().replace(" ", "_") for cell in head.split("|")[1:-1]] == names.split()
    assert len({line.rindex("|", 0, -1) for line in (head, rule, first, second)}) == 1
    assert "12,345" in first and "-1.0000 (!)" in second and "steps 41 to 50 of 50" in text
    more = run(0, 0, 1, 1.0, mfu=0.301, exposed_communication=0.25)
    text = report.markdown(facts, rows("a", [more, run(0, 1, 2, 1.0)], 0.01))
    within = run(0, 0, 1, 1.0, tokens_per_second_per_gpu_sd=0.5e3)
    text_within = report.markdown(facts, rows("a", [within], 0.01))
    assert "+- steps" in text_within and " 500 |" in text_within and "+- runs" not in text_within
    assert "MFU |" in text and "30.1%" in text and "exposed comm." in text and "25.0%" in text
    loads = [dict(load_max=2.0, rank_load=1.1, dead_experts=n) for n in (3, 5)]
    two = [run(0, n, 1, 1.0, **more) for n, more in enumerate(loads)]
    text = report.markdown(facts, rows("a", two, 0.01))
    (head, _, row) = [line for line in text.splitlines() if line.startswith("|")]
    cells = dict(zip(*([c.strip() for c in line.split("|")] for line in (head, row)), strict=True))
    assert (cells["load max"], cells["of ranks"], cells["dead"]) == ("2.00", "1.10", "4")
    assert "load max is that of the busiest expert over the mean" in text
    cpu = Run(0, 0, {"tokens_per_second_per_gpu": 1, "tflops_per_gpu": 1, "memory": 1, "loss": 1})
    cpu.figures["reruns"] = 0
    assert "TFLOP" not in report.markdown(facts | {"unit": "rank"}, rows("a", [cpu], 0.01))


LOG = """W1121 x.py] noise
error: out of memory: data.micro_batch=4: lower it (CUDA out of memory)
Traceback (most recent call last):
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
  exitcode  : 1 (pid: 13829)
"""


@pytest.mark.parametrize(
    ("log", "code", "output"),
    [
        (LOG, 1, "out of memory: data.micro_batch=4: lower it (CUDA out of memory)"),
        (
            "error: the other ranks are gone: x\n[rank1]: error: no file (rank 1)\n",
            1,
            "no file (rank 1)",
        ),
        ("ValueError: a\n[rank3]: torch.OutOfMemoryError: CUDA out of memory.", 1, "torch.OutOf"),
        ("x.ChildFailedError: \n  exitcode  : -9 (pid: 3)\n", 1, "a rank was killed by signal 9"),
        ("x.ChildFailedError: \n  exitcode  : 45 (pid: 3)\n", 1, "a rank ended with 45"),
        ("", -15, "the launcher was killed by signal 15"),
        ("12: error: no room\n", 1, "no room"),
        ("srun: job 3 is gone", 7, "the launcher ended with 7"),
        ("error: " + "x" * 500, 1, "x" * 197 + "..."),
    ],
)
def test_reason_is_a_line(log, code, output):
    assert reason(log, code).startswith(output) and len(reason(log, code)) <= 200


def test_repeats_take_turns_and_failures_are_rows(stand, capsys):
    sweeps = ("kernels=reference,auto,torch", "parallel.tensor=1,16")
    assert stand(*sweeps, options=("--repeat", "3", "--nproc", "1")) == 1
    assert stand.order() == ["1.1", "3.1", "5.1", "1.2", "5.2", "1.3", "5.3"]
    out = capsys.readouterr().out
    refused = [line.split(",")[0] for line in out.splitlines()[:3]]
    assert refused == [f"kernels={k} parallel.tensor=16" for k in ("reference", "auto", "torch")]
    actual = stand.rows()
    assert [row["runs"] for row in actual] == [3, 0, 0, 0, 3, 0]
    assert actual[4]["tokens_per_second_per_gpu"] == 203.5
    assert actual[4]["speedup"] == pytest.approx(203.5 / 103.5)
    assert actual[2]["notes"] == [
        "FAILED: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.; "
        "see point_03_repeat_1.log"
    ]
    assert "CUDA out" in (stand.out / "runs/point_03_repeat_1.log").read_text()
    for row in actual[1::2]:
        assert "parallel.tensor=16" in row["notes"][0] and len(row["notes"]) == 1
    assert "kernels=torch parallel.tensor=1, repeat 3: 204 tokens/s/rank, loss 4.9600" in out
    assert (stand.out / "throughput.md").read_text().strip() in out


def test_kernels_that_this_machine_lacks_are_refused_before_a_run(monkeypatch):
    monkeypatch.setattr(machine, "gpu_capability", lambda: (9, 0))
    monkeypatch.setattr(registry, "installed", frozenset)
    cfg = load(["model=tiny", "kernels=megatron", "precision=fp8_block"])
    assert "needs Transformer Engine" in machine.unsupported(cfg, 1, "auto")
    assert machine.unsupported(load(["model=tiny", "kernels=torch"]), 1, "auto") == ""
    assert "needs CUDA" in machine.unsupported(load(["model=tiny", "kernels=fused"]), 1, "cpu")
    monkeypatch.setattr(machine, "gpu_capability", lambda: None)  # nothing is known of the GPUs
    assert machine.unsupported(cfg, 1, "auto") == ""


def test_a_stopped_sweep_goes_on_and_another_command_is_refused(stand, capsys):
    (stand.folder / "stop").touch()
    began = time.monotonic()  # the stand-in sleeps for a minute
    assert stand("kernels=reference,torch") == 130
    assert "2 runs to go" in capsys.readouterr().err and time.monotonic() - began < 40
    assert stand("kernels=reference,torch") == 0
    assert stand.order() == ["1.1", "1.1", "2.1"]
    (stand.out / "runs/point_01_repeat_1.json").unlink()
    assert stand("kernels=reference,torch") == 0 and stand.order()[3:] == ["1.1"]
    assert stand("kernels=reference,torch", options=("--repeat", "2")) == 0
    assert stand.order()[4:] == ["1.2", "2.2"] and [row["runs"] for row in stand.rows()] == [2, 2]
    before = (stand.out / "throughput.json").read_bytes()
    capsys.readouterr()
    assert stand("kernels=reference,torch", steps=6) == 2
    assert "(steps changed)" in capsys.readouterr().err
    assert stand("kernels=torch,reference") == 2 and "(points changed)" in capsys.readouterr().err
    assert (stand.out / "throughput.json").read_bytes() == before and len(stand.order()) == 6


def test_a_folder_has_one_sweep_at_a_time(stand, capsys):
    stand.out.mkdir()
    with sweep.lock(stand.out / "lock") as descriptor:
        left = subprocess.Popen(["sleep", "60"], pass_fds=[descriptor])
    try:  # the lock is held by what a sweep left behind
        assert stand("kernels=torch") == 2
        assert "is in use" in capsys.readouterr().err
    finally:
        left.kill()
        left.wait()
    assert stand("kernels=torch") == 0


def test_a_run_that_hangs_is_ended_with_all_it_started(stand, monkeypatch):
    wait, child = launch._wait, stand.folder / "child"

    def from_when_it_hangs(process, timeout, tick):
        while not child.exists():
            assert process.poll() is None
            time.sleep(0.02)
        return wait(process, timeout, tick)

    monkeypatch.setattr(launch, "_wait", from_when_it_hangs)
    monkeypatch.setattr(launch, "GRACE", 2.0)  # the child does not hear of the signal
    assert stand("kernels=megatron", options=("--timeout", "1")) == 1
    (row,) = stand.rows()
    assert row["notes"] == ["FAILED: not done after 1 s (--timeout); see point_01_repeat_1.log"]
    number = int(child.read_text())
    assert not psutil.pid_exists(number) or psutil.Process(number).status() == "zombie"


def test_a_trace_tells_what_exchanges_are_waited_for(tmp_path):
    assert traced(tmp_path) == {}
    trace = tmp_path / "trace_39_39.json.gz"
    trace.write_bytes(b"no trace")
    assert traced(tmp_path) == {}
    events = (("PushKernel", 0, 300), ("Fc1Kernel", 200, 600), ("ncclDevKernel", 900, 100))
    records = [
        {"ph": "X", "cat": "kernel", "name": n, "ts": b, "dur": d, "args": {"stream": 7}}
        for n, b, d in events
    ]
    with gzip.open(trace, "wt") as file:
        json.dump({"traceEvents": records}, file)
    assert traced(tmp_path) == {"exposed_communication": pytest.approx(0.3)}


def test_a_step_before_those_that_count_is_traced(tmp_path):
    profile = "run.profile=[39,39]"
    assert profile in Launch(2, 50, traced=True).overrides([], tmp_path / "x")
    assert profile not in Launch(2, 50).overrides([], tmp_path / "x")
    assert profile not in Launch(2, 50, traced=True).overrides(["run.profile=[]"], tmp_path / "x")
    few = Launch(2, 8, traced=True).overrides([], tmp_path / "x")  # before a graph is replayed
    assert not any("profile" in word for word in few)


def test_commands(capsys, tmp_path):
    common = ["--dry", "--nproc", "4", "kernels=torch,fused", "--out", str(tmp_path / "a b")]
    assert compare_throughput.main([*common, "--repeat", "2"]) == 0
    lines = [shlex.split(line) for line in capsys.readouterr().out.splitlines()]
    assert len(lines) == 4 and not (tmp_path / "a b").exists()
    assert lines[1][lines[1].index("--nproc-per-node") + 1] == "4" and "--nnodes" not in lines[1]
    assert {"kernels=fused", "run=bench", "run.steps=50", "run.name=point_02_repeat_1"} <= {
        *lines[1]
    }
    assert f"run.dir='{tmp_path / 'a b' / 'runs'}'" in lines[1]

    nodes = Launch(8, 50, nnodes=2, endpoint="node0:29500", launcher="srun -N 2 {command}")
    words = nodes.command(["kernels=torch"], tmp_path / "x")
    assert words[:4] == ["srun", "-N", "2", sys.executable]
    assert words[words.index("--nnodes") + 1] == "2"
    assert words[words.index("--rdzv-endpoint") + 1] == "node0:29500" and nodes.ranks == 16
    inside = Launch(8, 50, launcher="bash -c 'cd /x; {command}'").command([], tmp_path / "a b")
    assert inside[:2] == ["bash", "-c"] and len(inside) == 3
    assert shlex.split(inside[2])[-2] == f"run.dir={tmp_path}"


@pytest.mark.parametrize(
    ("argv", "output"),
    [
        (["--steps", "1"], "must be at least 2"),
        (["--repeat", "0"], "must be at least 1"),
        (["--nnodes", "2"], "need --launcher"),
        (["--launcher", "env"], "must contain {command}"),
        (["--launcher", "no-such-program {command}"], "there is no no-such-program here"),
        (["--launcher", "bash -c ' {command}"], "No closing quotation"),
        (["--from-json", "x.json", "kernels=torch"], "leave the overrides out"),
    ],
)
def test_bad_options_are_refused_in_a_line(argv, output, capsys):
    with pytest.raises(SystemExit, match="2"):
        compare_throughput.main(argv)
    assert output in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("overrides", "output"),
    [
        (["kernels=torch,torhc"], "kernels=torhc: no such option; did you mean kernels=torch?"),
        (["torch"], "torch: expected <knob>=<value>"),
        (["model=gpt_oss_20b"], "21 B parameters are too many for CPU processes"),
        (["data.global_batch=7,9"], "data.global_batch=9 is no multiple"),
    ],
)
def test_bad_overrides_start_nothing(stand, overrides, output, capsys):
    assert stand(*overrides) == 2
    assert output in capsys.readouterr().err and not stand.out.exists()


def test_earlier_results_are_shown_again(stand, capsys, monkeypatch):
    assert stand("kernels=reference,torch") == 0
    table = (stand.out / "throughput.md").read_text()
    (stand.out / "throughput.md").unlink()
    path = stand.out / "throughput.json"
    capsys.readouterr()
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert compare_throughput.main(["--from-json", str(path)]) == 0
    out = capsys.readouterr().out
    assert out.startswith(table) and "no chart: a picture needs matplotlib" in out
    assert table.startswith("tiny, bf16, sequence 256, batch 32, embedded data, on 2 CPU processes")
    assert (stand.out / "throughput.md").read_text() == table
    content = path.read_text()
    path.write_text(content.replace('"tolerance": 0.01', '"tolerance": NaN'))
    assert path.read_text() != content
    assert compare_throughput.main(["--from-json", str(path)]) == 2
    assert "NaN is no result" in capsys.readouterr().err
    path.write_text("[]")
    assert compare_throughput.main(["--from-json", str(path)]) == 2
    assert compare_throughput.main(["--from-json", str(path) + "x"]) == 2
    assert capsys.readouterr().err.count("compare_throughput: ") == 2


@pytest.mark.parametrize(
    ("facts", "output"),
    [
        ({"what": "tiny, sequence 256", "hardware": "2 x H200"}, "tiny, sequence 256, on 2 x H200"),
        ({"hardware": "2 x H200"}, "2 x H200"),  # results of before
    ],
)
def test_tables_and_charts_say_of_what_and_where(facts, output, tmp_path, figures):
    table = rows(["a"], [run(0, 0, 100, 4.0)], 0.01)
    facts = {"unit": "GPU", "steps": 50, "tolerance": 0.01, "command": "x"} | facts
    assert report.plot(tmp_path / "x.png", facts, table) == ""
    assert figures[0].axes[0].get_title() == output
    assert report.markdown(facts, table).startswith(output)


def test_what_points_have_in_common_is_named(tmp_path):
    swept = sweep.Sweep(
        tmp_path, expand(["model=tiny,tiny_gpt_oss", "data.sequence_length=64,128"]), 1,
        Launch(1, 4, device="cpu"), timeout=1, commit="",
    )  # fmt: skip
    swept.check()
    assert common_title(swept.facts) == "tiny or tiny_gpt_oss, bf16, batch 32, embedded data"
    assert common_title([{}]) == common_title([]) == ""


def test_chart(tmp_path, figures):
    runs = [run(0, 0, 100, 4.0), run(0, 1, 90, 4.0), run(1, 0, 200, 3.0), Run(2, 0, {}, WHY)]
    runs[2].figures["tokens_per_second_per_gpu_sd"] = 11.0
    table = rows(["a=1 b=2", "c=3", "d"], runs, 0.01)
    path = tmp_path / "x.png"
    assert report.plot(path, {"unit": "GPU"}, table) == ""
    assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5000
    axes = figures[0].axes[0]
    lengths = [round(abs(b - a), 1) for ((a, _), (b, _)) in axes.collections[0].get_segments()]
    assert lengths == [round(2 * 50**0.5, 1), 22.0, 0.0], "over two runs, and within one"
    assert axes.get_xlabel() == (
        "tokens/s/GPU (bars: standard deviation over runs, or over the steps of a single run)"
    )
    reason = axes.texts[2].get_text()
    assert " ".join(reason.split()) == f"FAILED: {WHY}" and reason.count("\n") >= 1
    assert "no point has a result" in report.plot(path, {"unit": "GPU"}, table[2:])


WHY = "kernels.backend=megatron cannot run here: " + "needs this and that, " * 6 + "set x=y"


POINT = [text for text in SMALL if not text.startswith("run.")]
POINT += ["data=synthetic", "model=tiny", "model.attention.head_dim=8"]
OPTIONS = ["--device", "cpu", "--nproc", "1", "--steps", "4"]


@pytest.fixture
def trains_here(monkeypatch):
    """The trainer answers commands in a rank of this session."""

    def train(command, folder, *, steps, **_):
        place = command.index(os.path.relpath(launch.TRAIN))
        (rank,) = runs.run(1, command[place + 1 :])
        assert rank.code == 0, rank.err
        return figures(folder / "metrics.jsonl", steps), ""

    monkeypatch.setattr(sweep, "run", train)


@pytest.mark.dist
def test_a_run_on_the_cpu(trains_here, tmp_path):
    own = [*OPTIONS, "--out", str(tmp_path)]
    assert compare_throughput.main([*own, "kernels=torch", *POINT]) == 0
    actual, steps = measured(tmp_path)
    (row,) = actual["rows"]
    assert row["runs"] == 1 and row["speedup"] == 1 and actual["facts"]["unit"] == "rank"
    assert row["loss"] > 4 and row["memory"] > 0.1
    rates = [step["tokens_per_second_per_gpu"] for step in steps[2:4]]
    assert row["tokens_per_second_per_gpu"] == pytest.approx(sum(rates) / 2)


@pytest.mark.dist
def test_recipes_over_the_same_data_and_their_curves(trains_here, tmp_path, capsys):
    """One command trains a tiny model by every recipe and draws the losses."""
    recipes = ["bf16", "fp8_block", "mxfp8", "nvfp4"]
    own = [*OPTIONS, "--losses", "--out", str(tmp_path)]
    given = ["kernels=torch", *POINT, f"precision={','.join(recipes)}"]
    assert compare_throughput.main([*own, *given]) == 0
    actual = [
        [record["loss"] for record in read(path / "metrics.jsonl")]
        for path in sorted((tmp_path / "runs").glob("point_*_repeat_1"))
    ]
    first = actual[0]
    # Those of FP8 may be the same: with powers of two as scales blocks hardly matter.
    assert len({tuple(one) for one in actual}) >= 3 and actual[3] not in actual[:3]
    for one in actual:  # the same weights and tokens to begin with
        assert one[0] == pytest.approx(first[0], rel=0.01) and len(one) == 4
    head, *rows = capsys.readouterr().out.split("steps")[-1].splitlines()
    assert [f"precision={name}" in head for name in recipes] == [True] * 4
    assert [float(row.split()[1]) for row in rows[:4]] == pytest.approx(first, abs=1e-4)
    assert float(rows[0].split()[-1]) == pytest.approx(actual[3][0] - first[0], abs=1e-4)
    if importlib.util.find_spec("matplotlib"):
        assert (tmp_path / "losses.png").read_bytes().startswith(b"\x89PNG")


def test_no_curves_of_points_that_failed(tmp_path):
    folders = [tmp_path / "runs" / name for name in "ab"]
    lost = [Run(0, 0, {}, "lost"), Run(1, 0, {}, "lost")]
    assert losses.show(folders, ["a", "b"], lost, "") == "no losses: no point has a result"
    for folder in folders:
        folder.mkdir(parents=True)
        metrics(folder / "metrics.jsonl", [5.0, 4.0])
    text = losses.show(folders, ["a", "b"], [lost[0], run(1, 0, 10, 4.0)], "two")
    assert "b" in text.splitlines()[0].split() and "a" not in text.splitlines()[0].split()


@pytest.mark.slow
@pytest.mark.dist
def test_two_configurations_on_the_cpu(tmp_path):
    """In processes of their own, as a person starts them."""
    command = [sys.executable, str(SCRIPT), *OPTIONS, "--out", str(tmp_path)]
    environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    finished = subprocess.run(
        [*command, "kernels=reference,torch", *POINT],
        cwd=SCRIPT.parents[2],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    actual, _ = measured(tmp_path)
    reference, torch = actual["rows"]
    assert reference["runs"] == torch["runs"] == 1
    # the oracle and the library compute the same, in bf16
    assert reference["loss"] > 4 and abs(torch["loss_difference"]) < 0.05
    assert torch["speedup"] == pytest.approx(
        torch["tokens_per_second_per_gpu"] / reference["tokens_per_second_per_gpu"]
    )


def measured(folder):
    """Output of a sweep, and steps of the first point."""
    assert not list(folder.glob("runs/*/checkpoints/*"))
    actual = json.loads((folder / "throughput.json").read_text())
    return actual, read(folder / "runs/point_01_repeat_1/metrics.jsonl")
