"""`scripts/lab/proof/run_experiments.py` with a program in place of train.py."""

import tarfile
from pathlib import Path

import pytest

from phalanx.configs.load import load
from phalanx.scripts.lab.proof import experiments, run_experiments
from phalanx.scripts.lab.proof.experiments import read_plan

LISTS = Path(run_experiments.__file__).parent
NAMES = ["experiments", "longer", "variants", "widths"]

TRAIN = """
import json, os, signal, sys, time
from pathlib import Path
given = dict(each.split("=", 1) for each in sys.argv[1:])
if "run.dry_run" in given:
    print("  step 0.010 s: 1,000 tokens/s/GPU")
    sys.exit()
folder = Path(given["run.dir"], given["run.name"])
with open(folder.parent / "order.txt", "a") as file:
    print(given["run.name"], given["optim.lr"], os.environ["CUDA_VISIBLE_DEVICES"], file=file)
if given["run.name"] in os.environ.get("FAILING", ""):
    sys.exit("no luck")
steps = int(given["run.steps"])
if given["run.name"] == os.environ.get("SLOW"):
    if given.get("run.save_interval") == "0":
        def save(*_):
            (folder / "metrics.jsonl").write_text(json.dumps({"event": "summary", "at": 50}))
            (folder / "config.yaml").write_text("optim: {lr: " + given["optim.lr"] + "}")
            sys.exit()
        signal.signal(signal.SIGTERM, save)
    time.sleep(60)
if given["run.name"] == os.environ.get("ENDING"):  # it ends once another has begun
    row = {"step": steps - 1, "step_time": 0.01}
    (folder / "metrics.jsonl").write_text(json.dumps(row) + "\\n")
    begun = lambda: (folder.parent / "order.txt").read_text().split().count("0")
    before, end = begun(), time.monotonic() + 20
    while begun() == before:
        if time.monotonic() > end:
            sys.exit("nobody came")
        time.sleep(0.05)
bits = {"model=dense": 3.0, "model=moe": 2.0}["model=" + given["model"]]
bits += abs(float(given["optim.lr"]) - 2e-3)
rows = [{"step": steps, "valid_bits_per_byte": bits}, {"event": "summary", "at": steps}]
(folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\\n" for row in rows))
"""

YAML = """
common: ["data.blend=[{corpus}/train]"]
steps: 80
sweep:
  steps: 20
  assumed: "5e-4"
  overrides: [run.seed=1]
  models:
    dense: {overrides: [model=dense], rates: ["1e-3", "2e-3"]}
    moe: {overrides: [model=moe], rates: ["1e-3", "2e-3"]}
experiments:
  - {name: one, model: dense, overrides: [run.seed=1]}
  - {name: two, model: moe, overrides: [run.seed=1]}
tiny: {steps: 4, overrides: []}
"""


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "list.yaml").write_text(YAML)
    (tmp_path / "corpus").mkdir()
    monkeypatch.setattr(experiments, "_TRAIN", tmp_path / "train.py")
    paths = [str(tmp_path / "corpus"), str(tmp_path / "results")]
    return [*paths, "--list", str(tmp_path / "list.yaml"), "--copy", str(tmp_path / "copy")]


def order(tmp_path: Path) -> list[list[str]]:
    return [line.split() for line in (tmp_path / "results/order.txt").read_text().splitlines()]


def test_runs_take_the_rate_of_the_sweep_and_are_not_repeated(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command += ["--seconds", "1000", "--gpus", "1"]
    assert run_experiments.main(command) == 0
    swept = [[f"sweep_{m}_{rate}", rate, "0"] for m in ("dense", "moe") for rate in RATES]
    assert order(tmp_path) == [*swept, ["one", "2e-3", "0"], ["two", "2e-3", "0"]]
    with tarfile.open(tmp_path / "copy/results.tar.gz") as archive:
        names = archive.getnames()
    assert "results/two/metrics.jsonl" in names and "results/two/output.txt" in names
    assert run_experiments.main(command) == 0
    assert len(order(tmp_path)) == 6
    assert "no run is left" in capsys.readouterr().out


RATES = ("1e-3", "2e-3")


@pytest.mark.parametrize(("ahead", "code"), [("5", 0), ("0", 1)])
def test_the_next_run_may_start_ahead(
    ahead: str, code: int, command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENDING", "sweep_dense_1e-3")
    if code:
        monkeypatch.setattr(experiments, "START", 0.0)
        text = (tmp_path / "train.py").read_text()
        (tmp_path / "train.py").write_text(text.replace("monotonic() + 20", "monotonic() + 1"))
    command += ["--seconds", "1000", "--gpus", "1", "--ahead", ahead]
    assert run_experiments.main(command) == code
    assert len(order(tmp_path)) == 6


def test_a_failed_run_does_not_hold_up_the_others(
    command: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("FAILING", "sweep_dense_2e-3 two")
    assert run_experiments.main([*command, "--seconds", "1000", "--gpus", "2"]) == 1
    rates = {name: rate for name, rate, _ in order(tmp_path)}
    assert len(rates) == 6 and {gpu for _, _, gpu in order(tmp_path)} == {"0", "1"}
    assert rates["one"] == "1e-3"  # the only run of its sweep that is complete
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("failed: ") and "sweep_dense_2e-3" in last and "two" in last


def test_what_does_not_fit_is_not_begun(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_experiments.main([*command, "--seconds", "10", "--gpus", "2"]) == 0
    assert not (tmp_path / "results/order.txt").exists()
    assert "not begun for want of time: sweep_dense_1e-3, " in capsys.readouterr().out


def test_the_plan_adds_up_expected_times(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_experiments.main([*command, "--seconds", "75", "--gpus", "2", "--plan"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    short, long = experiments.START + 20 * 0.01 / 0.8, experiments.START + 80 * 0.01 / 0.8
    ends = [short, short, 2 * short, 2 * short, 2 * short + long, 2 * short + long]
    assert [float(row[3]) for row in rows[1:7]] == [float(f"{end:.0f}") for end in ends]
    fit = [len(row) == 4 for row in rows[1:7]]
    assert fit == [True] * 4 + [False] * 2
    assert not (tmp_path / "results").exists()


def test_a_run_that_outlasts_the_limit_is_ended_and_runs_again(
    command: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(experiments, "START", 0.0)
    monkeypatch.setenv("SLOW", "sweep_dense_1e-3")
    assert run_experiments.main([*command, "--seconds", "3", "--gpus", "1"]) == 0
    out = capsys.readouterr().out
    assert "sweep_dense_1e-3: ended by the limit, not complete, after" in out
    assert "failed" not in out
    monkeypatch.delenv("SLOW")
    assert run_experiments.main([*command, "--seconds", "1000", "--gpus", "1"]) == 0
    assert [name for name, *_ in order(tmp_path)][:2] == ["sweep_dense_1e-3"] * 2


def test_a_run_that_saves_goes_on_in_the_next_call_at_its_rate(
    command: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    command += ["--seconds", "1000", "--gpus", "1"]
    two = "  - {name: two, model: moe, overrides: [run.seed=1]}\n"
    (tmp_path / "list.yaml").write_text(YAML.replace(two, ""))
    assert run_experiments.main(command) == 0
    saving = two.replace(
        "overrides: [run.seed=1]", "steps: 900000, overrides: [run.save_interval=0]"
    )
    (tmp_path / "list.yaml").write_text(YAML.replace(two, saving))
    monkeypatch.setattr(run_experiments, "_SAVING", 994.0)
    monkeypatch.setenv("SLOW", "two")
    assert run_experiments.main(command) == 0
    out = capsys.readouterr().out
    assert "goes on in another call" in out and "two: ended by the limit, not complete" in out
    assert order(tmp_path)[-1] == ["two", "2e-3", "0"]
    monkeypatch.delenv("SLOW")
    (tmp_path / "results/sweep_moe_2e-3/metrics.jsonl").unlink()
    assert run_experiments.main(command) == 0
    assert "two              899950" in capsys.readouterr().out
    assert [row[0] for row in order(tmp_path)[-2:]] == ["sweep_moe_2e-3", "two"]
    assert float(order(tmp_path)[-1][1]) == 2e-3
    assert (tmp_path / "results/two/config.yaml").exists()


def test_a_run_waits_for_all_of_its_sweep(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saving = "{name: one, model: dense, overrides: [run.save_interval=0]}"
    text = YAML.replace("{name: one, model: dense, overrides: [run.seed=1]}", saving)
    (tmp_path / "list.yaml").write_text(text.replace("steps: 20", "steps: 900000"))
    assert run_experiments.main([*command, "--seconds", "1000", "--gpus", "1"]) == 0
    assert not (tmp_path / "results/order.txt").exists()
    assert "not begun for want of time: sweep_dense_1e-3, " in capsys.readouterr().out


def test_a_rate_at_an_end_of_its_sweep_is_told(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = YAML.replace('[model=moe], rates: ["1e-3", ', '[model=moe], rates: ["1e-3", "3e-3", ')
    (tmp_path / "list.yaml").write_text(text)
    assert run_experiments.main([*command, "--seconds", "1000", "--gpus", "1"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert "one: begins on GPU 0 at optim.lr=2e-3, an end of its sweep" in out
    assert "two: begins on GPU 0 at optim.lr=2e-3" in out


def test_mistakes_are_one_line(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bad.yaml").write_text("common: [")
    corpus, *rest = [*command, "--seconds", "10"]
    for given, why in (
        ([f"{corpus}2", *rest], "corpus2: scripts/lab/corpus/make_corpus.py makes a corpus"),
        ([corpus, *rest, "--gpus", "0"], "--gpus 0: must be at least 1"),
        ([corpus, *rest, "--list", f"{tmp_path}/none.yaml"], "none.yaml: [Errno 2] No such file"),
        ([corpus, *rest, "--list", f"{tmp_path}/bad.yaml"], "bad.yaml: while parsing"),
    ):
        assert run_experiments.main(given) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("run_experiments: ") and why in line
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize("tiny", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_every_experiment_of_the_lists_is_a_valid_run(
    name: str, tiny: bool, tmp_path: Path
) -> None:
    plan = read_plan(LISTS / f"{name}.yaml", tmp_path, tiny)
    names = [each.name for each in plan.experiments]
    assert len(set(names)) == len(names)
    differing = {
        tuple(e for e in each.command("1e-3") if "seed=" not in e): each
        for each in plan.experiments
    }
    for each in differing.values():
        cfg = load(each.command("1e-3")[2:])
        assert (cfg.run.steps, cfg.optim.lr, cfg.optim.min_lr) == (each.steps, 1e-3, 1e-4)
        assert cfg.data.blend == [f"{tmp_path}/train"]
        assert not each.rate or cfg.run.steps % cfg.run.eval_interval == 0  # bits at its end
        assert cfg.run.save_interval == (0 if "long" in each.name else -1)
        assert each.model in each.name
        assert (cfg.optim.kind == "muon") == ("muon" in each.name)
        assert (cfg.precision.recipe == "fp8_block") == ("fp8" in each.name)
    last = plan.experiments[-1]
    assert plan.rate(last, tmp_path) == (last.rate or plan.assumed)


def test_results_of_the_lists_may_lie_in_one_folder(tmp_path: Path) -> None:
    plans = [read_plan(LISTS / f"{name}.yaml", tmp_path, False) for name in NAMES]
    names = [each.name for plan in plans for each in plan.experiments]
    assert len(set(names)) == len(names)
