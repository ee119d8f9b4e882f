"""The README against the tree: paths exist, commands compose, tables say what the code says."""

import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from phalanx import train
from phalanx.configs import load as loading
from phalanx.configs.knobs import knobs, sections
from phalanx.configs.load import GROUPS, load, options
from phalanx.configs.records import launch
from phalanx.configs.schema import ModelConfig
from phalanx.configs.validate import validate
from phalanx.moe.estimate.accounting import active_parameters, flops_per_token, parameters
from phalanx.moe.report.metrics import heading
from phalanx.scripts import plot_losses, prepare_data, record_anchor, timeline
from tests.support.runs import SMALL, records, run

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PROSE = re.sub(r"```.*?```", "", README, flags=re.DOTALL)
FLOW = (
    "embedding", "attention", "router", "dispatch", "plan", "experts", "fc1, activation, fc2",
    "combine", "loss", "backward", "optimizer", "checkpoint",
)  # fmt: skip


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def commands() -> list[str]:
    """Command lines of the shell blocks, and those in the text."""
    joined = "\n".join(blocks("bash")).replace("\\\n", " ")
    inline = re.findall(r"`((?:python|torchrun|bash) [^`]+)`", PROSE)
    return [text for text in (*joined.splitlines(), *inline) if text.strip()]


COMMANDS = commands()
STARTS = {"train.py", "scripts/train.sh", "scripts/slurm.sbatch"}
TRAIN = [text for text in COMMANDS if STARTS & set(shlex.split(text, comments=True))]


def rows(first_header: str) -> list[list[str]]:
    """Cells of the table whose header row starts with this cell."""
    body = README.split(f"| {first_header} |", 1)[1].split("\n\n", 1)[0].splitlines()[2:]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in body]


@pytest.fixture
def with_example_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The configuration folder with the YAML of the README in it."""
    folder = tmp_path / "configs"
    shutil.copytree(loading.FOLDER, folder, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    (example,) = blocks("yaml")
    name = OmegaConf.create(example).name
    assert f"`configs/model/{name}.yaml`" in PROSE
    (folder / "model" / f"{name}.yaml").write_text(example)
    monkeypatch.setattr(loading, "FOLDER", folder)
    yield


def ranks_and_overrides(command: str) -> tuple[int, list[str]]:
    words = shlex.split(command, comments=True)
    if "scripts/train.sh" in words:  # two processes where there is no GPU
        return 2, words[words.index("scripts/train.sh") + 1 :]
    if "scripts/slurm.sbatch" in words:
        per_node = re.search(r"--gpus-per-node=(\d+)", (ROOT / "scripts/slurm.sbatch").read_text())
        assert per_node is not None
        at = words.index("scripts/slurm.sbatch")
        return int(words[words.index("--nodes") + 1]) * int(per_node[1]), words[at + 1 :]
    return launch(command)


@pytest.mark.parametrize("target", sorted(set(re.findall(r"\]\((?!https?:)([^)#]+)\)", README))))
def test_linked_files_exist(target: str) -> None:
    assert (ROOT / target).exists()


@pytest.mark.parametrize("anchor", sorted(set(re.findall(r"\]\(#([^)]+)\)", README))))
def test_linked_headings_exist(anchor: str) -> None:
    headings = re.findall(r"^#+ (.*)$", README, re.MULTILINE)
    assert anchor in [heading.lower().replace(" ", "-") for heading in headings]


def test_scripts_that_commands_name_exist() -> None:
    named = set(re.findall(r"(?:scripts|tests)/[\w/]+\.\w+|\btrain\.py\b", "\n".join(COMMANDS)))
    assert {"train.py", "scripts/train.sh", "scripts/test.sh", "scripts/slurm.sbatch"} <= named
    assert [name for name in sorted(named) if not (ROOT / name).is_file()] == []


@pytest.mark.usefixtures("with_example_model")
@pytest.mark.parametrize("command", TRAIN)
def test_training_commands_are_valid(command: str) -> None:
    ranks, overrides = ranks_and_overrides(command)
    if {"--help", "--cfg"} & set(overrides):
        with pytest.raises(SystemExit) as left:
            loading.from_argv(overrides, ranks)
        assert left.value.code == 0
        return
    validate(load([word for word in overrides if word != "--check"]), ranks)


@pytest.mark.dist
def test_the_example_of_resuming_has_one_curve(tmp_path: Path) -> None:
    """Its three commands, of a smaller model: the learning rate never jumps."""
    small = [text for text in SMALL if not text.startswith("optim.")]
    example = [text for text in COMMANDS if "run.name=again" in text]
    for at, command in enumerate(example):
        ranks, overrides = ranks_and_overrides(command)
        given = [*small, "model.attention.head_dim=8", "data=synthetic", *overrides]
        main = run(ranks, [*given, f"run.dir={tmp_path}"])[0]
        assert main.code == 0 and "the learning rate" not in main.out, main.err
        assert (f"done: step {10 * at + 10}, resumed from step {10 * at}," in main.out) == (at > 0)
    rates = [record["lr"] for record in records(tmp_path / "again")]
    peak = rates.index(max(rates))
    assert len(rates) == 30 and rates == sorted(rates[:peak]) + sorted(rates[peak:], reverse=True)
    assert rates[-1] == pytest.approx(load([]).optim.min_lr)


def test_commands_of_other_scripts_are_understood() -> None:
    checked = 0
    for words in map(shlex.split, COMMANDS):
        for script in (prepare_data, record_anchor, timeline, plot_losses):
            name = f"scripts/{Path(script.__file__).name}"
            if name in words:
                args = script.parser().parse_args(words[words.index(name) + 1 :])
                if "command" in args:
                    ranks, overrides = launch(args.command)
                    validate(load(overrides), ranks)
                checked += 1
    assert checked == 4


def test_the_timeline_is_of_the_trace_that_the_line_before_writes() -> None:
    at = next(i for i, text in enumerate(COMMANDS) if "scripts/timeline.py" in text)
    _, overrides = ranks_and_overrides(COMMANDS[at - 1])
    run = load(overrides).run
    first, last = run.profile
    trace = f"{run.dir}/{run.name}/trace_{first}_{last}.json.gz"
    assert trace in shlex.split(COMMANDS[at]) and last <= run.steps


def test_map_names_every_step_in_order() -> None:
    steps = [row[0] for row in rows("step")]
    assert [step for step in steps if step in FLOW] == list(FLOW)
    assert all("](" in row[2] for row in rows("step"))


def test_every_large_model_is_listed_with_its_numbers() -> None:
    table = {row[0].strip("`"): row[1:] for row in rows("`model=`")}
    assert set(table) == {name for name in options("model") if not name.startswith("tiny")}
    for name, cells in table.items():
        model = load([f"model={name}"]).model
        total, active = parameters(model, mtp=False).total, active_parameters(model).total
        flops = flops_per_token(model, 4096)
        assert cells == [f"{total / 1e9:.1f} B", f"{active / 1e9:.1f} B", f"{flops / 1e9:.1f}"]


def test_example_model_is_the_published_one() -> None:
    (example,) = blocks("yaml")
    tree = OmegaConf.merge(OmegaConf.structured(ModelConfig), OmegaConf.create(example))
    model = OmegaConf.to_object(tree)
    assert isinstance(model, ModelConfig)
    assert f"{parameters(model).total / 1e9:.1f} B, as published" in README
    assert round(parameters(model).total / 1e9, 1) == 46.7


def test_every_kernel_option_is_listed() -> None:
    assert sorted(row[0].strip("`") for row in rows("`kernels=`")) == options("kernels")


def test_every_experiment_named_exists() -> None:
    named = set(re.findall(r"experiment=(\w+)", README)) | set(re.findall(r"`(\w+_8gpu)`", README))
    assert named and named <= set(options("experiment"))


def test_knobs_in_the_text_exist() -> None:
    text = PROSE.split("<!-- knobs -->")[0]
    named = set(re.findall(rf"`((?:{'|'.join(GROUPS)})\.[a-z_.]+)", text))
    known = {*knobs(), *sections()}
    assert named and sorted(name for name in named if name not in known) == []


def test_exit_codes_are_those_of_train() -> None:
    codes = re.findall(r"(?:^|, |: )(\d+) [a-z]", train.__doc__ or "")
    assert [row[0] for row in rows("exit code of a rank")] == codes


def test_console_excerpt_has_the_columns_of_today() -> None:
    shown = blocks("text")[0].splitlines()
    record = {
        "step": 1, "loss": 1.0, "grad_norm": 1.0, "lr": 1e-3, "tokens_per_second_per_gpu": 1.0,
        "step_time": 1.0, "memory": 1.0, "load_max": 1.0, "load_p95": 1.0, "dead_experts": 0,
    }  # fmt: skip
    assert heading(record, 20) in shown
    assert sum(bool(re.match(r" ?\d+/20 ", text)) for text in shown) >= 5
    assert f"without the override it takes {load([]).run.steps} steps" in README


def test_continuous_integration_runs_the_test_command() -> None:
    assert "scripts/test.sh" in (ROOT / ".ci/run").read_text()
    assert "pytest" in (ROOT / "scripts/test.sh").read_text()
    assert "bash scripts/test.sh" in "\n".join(COMMANDS)
