"""README and docs against the tree: links lead somewhere, commands compose, tables are true."""

import ast
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from phalanx import train
from phalanx.configs import load as loading
from phalanx.configs.arithmetic.accounting import active_parameters, flops_per_token, parameters
from phalanx.configs.bounds import choices
from phalanx.configs.knobs import has_fields, knobs, sections
from phalanx.configs.layout import ranks_of_experiment
from phalanx.configs.load import GROUPS, load, options
from phalanx.configs.records import own
from phalanx.configs.schema import ModelConfig
from phalanx.configs.validate import validate
from phalanx.moe.report.metrics import heading
from phalanx.moe.text import count
from phalanx.scripts import (
    check_cluster,
    checkpoint,
    convert_hf,
    evaluate,
    make_tasks,
    plot_run,
    prepare_data,
    sample,
    serve,
    watch,
)
from tests.support import pages
from tests.support.pages import (
    README,
    ROOT,
    TEXTS,
    blocks,
    commands,
    prose,
    ranks_and_overrides,
    rows,
)
from tests.support.runs import SMALL, records, run

COMMANDS = commands()
LINKS = [(page, link) for page in TEXTS for link in pages.links(page)]
PARSERS = {
    "check_cluster": check_cluster.arguments,
    "checkpoint": checkpoint.parser().parse_args,
    "convert_hf": convert_hf.parser().parse_args,
    "evaluate": evaluate.parser().parse_args,
    "make_tasks": make_tasks.parser().parse_args,
    "plot_run": plot_run.parser().parse_args,
    "prepare_data": prepare_data.parser().parse_args,
    "sample": sample.parser().parse_args,
    "serve": serve.parser().parse_args,
    "watch": watch.parser().parse_args,
}
FLOW = (
    "embedding", "attention", "router", "dispatch", "plan", "experts", "fc1, activation, fc2",
    "combine", "loss", "backward", "optimizer", "checkpoint",
)  # fmt: skip


@pytest.fixture(scope="module")
def example_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The configuration folder with the YAML of docs/models.md in it."""
    folder = tmp_path_factory.mktemp("example") / "configs"
    shutil.copytree(loading.FOLDER, folder, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    (example,) = (text for text in blocks("yaml") if not text.startswith("run:"))
    name = OmegaConf.create(example).name
    assert f"`configs/model/{name}.yaml`" in prose(TEXTS["docs/models.md"])
    (folder / "model" / f"{name}.yaml").write_text(example)
    return folder


@pytest.fixture
def with_example_model(example_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "FOLDER", example_folder)


def test_readme_is_one_page() -> None:
    assert len(README.splitlines()) <= 200


@pytest.mark.parametrize(("page", "link"), LINKS)
def test_links_lead_to_files_and_headings(page: str, link: str) -> None:
    path, anchor = pages.target(page, link)
    assert path.exists() and path.is_relative_to(ROOT)
    if anchor:
        assert anchor in pages.anchors(str(path.relative_to(ROOT)))


def test_every_page_can_be_reached_from_the_readme() -> None:
    reached, following = set(), ["README.md"]
    while following:
        page = following.pop()
        if page not in reached:
            reached.add(page)
            paths = [pages.target(page, link)[0] for link in pages.links(page)]
            following += [str(p.relative_to(ROOT)) for p in paths if p.suffix == ".md"]
    assert reached == set(TEXTS)


def test_a_link_to_nothing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "# A page\n[a](gone.md) [b](#a-page) [c](#gone)\n```text\n[d](gone.py)\n```\n"
    monkeypatch.setitem(TEXTS, "docs/new.md", text)
    assert pages.links("docs/new.md") == ["#a-page", "#gone", "gone.md"]
    assert pages.target("docs/new.md", "gone.md#x") == (ROOT / "docs/gone.md", "x")
    assert pages.anchors("docs/new.md") == {"a-page"}


def test_scripts_that_commands_name_exist() -> None:
    named = set(re.findall(r"(?:scripts|tests)/[\w/]+\.\w+|\btrain\.py\b", "\n".join(COMMANDS)))
    assert {"train.py", "scripts/train.sh", "scripts/test.sh", "scripts/slurm.sbatch"} <= named
    assert [name for name in sorted(named) if not (ROOT / name).is_file()] == []


def test_launches_on_one_host_are_not_in_each_others_way() -> None:
    """Without `--standalone` all use the same port, which only the first gets."""
    folders = [ROOT / name for name in ("docs", "scripts", "configs")]
    files = [path for folder in folders for path in folder.rglob("*.*") if path.is_file()]
    files = [p for p in files if p.suffix in (".md", ".py", ".sh", ".yaml")]
    files = [p for p in files if "measured" not in p.parts]  # what was run, as it was
    lines = [
        line
        for path in (*files, ROOT / "README.md", ROOT / "train.py")
        for line in path.read_text("utf-8").splitlines()
        if re.search(r'torchrun"? .*--nproc-per-node', line)
    ]
    assert len(lines) > 30 and any("$ranks" in line for line in lines)
    assert [line for line in lines if ("--standalone" in line) == ("--nnodes" in line)] == []


@pytest.mark.usefixtures("with_example_model")
@pytest.mark.parametrize("command", pages.training_commands())
def test_training_commands_are_valid(command: str) -> None:
    ranks, overrides = ranks_and_overrides(command)
    if {"--help", "--cfg"} & set(overrides):
        with pytest.raises(SystemExit) as left:
            loading.from_argv(overrides, ranks)
        assert left.value.code == 0
        return
    cfg = load([word for word in overrides if word != "--check"])
    own = [ranks_of_experiment(word.partition("experiment=")[2]) for word in overrides]
    validate(cfg, max(own) if cfg.run.dry_run and max(own) else ranks)


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
    checked = set()
    for line in COMMANDS:
        words = shlex.split(line, comments=True)
        for name, parse in PARSERS.items():
            if f"scripts/{name}.py" in words:
                parse(words[words.index(f"scripts/{name}.py") + 1 :])
                checked.add(name)
    assert checked == set(PARSERS)


def test_modules_that_commands_run_exist() -> None:
    lines = [shlex.split(line, comments=True) for line in COMMANDS]
    modules = {words[2] for words in lines if words[:2] == ["python", "-m"]} - {"pytest"}
    assert "phalanx.configs.docs" in modules
    for name in modules:
        path = ROOT / name.replace(".", "/")
        file = path / "__main__.py" if path.is_dir() else path.with_suffix(".py")
        tree = ast.parse(file.read_text())
        assert any(isinstance(node, ast.If) for node in tree.body), f"{name} does nothing"


def test_the_timeline_is_of_the_trace_that_the_line_before_writes() -> None:
    at = next(i for i, text in enumerate(COMMANDS) if "scripts/lab/timeline.py" in text)
    _, overrides = ranks_and_overrides(COMMANDS[at - 1])
    run = load(overrides).run
    first, last = run.profile
    trace = f"{run.dir}/{run.name}/trace_{first}_{last}.json.gz"
    assert trace in shlex.split(COMMANDS[at]) and last <= run.steps


def test_the_example_of_the_package_runs() -> None:
    (example,) = blocks("python", TEXTS["docs/package.md"])
    names: dict[str, Any] = {}
    exec(compile(example, "docs/package.md", "exec"), names)
    assert tuple(names["out"].shape) == (16, 64)


def test_diagram_names_every_step_in_order_and_its_file() -> None:
    (diagram,) = blocks("mermaid", TEXTS["docs/design.md"])
    nodes = re.findall(r'\["([^"<]+)<br>([^"]+)"\]', diagram)
    assert [step for step, _ in nodes if step in FLOW] == list(FLOW)
    assert [path for _, path in nodes if not (ROOT / path).exists()] == []


def test_map_of_the_readme_names_every_folder_of_code() -> None:
    named = {row[0].split("]")[0].strip("[") for row in rows("README.md", "folder")}
    folders = {path.parent.name for path in ROOT.glob("[!.]*/*.py")}
    assert {"configs", "kernels", "moe", "parallel", "scripts", "tests"} <= folders
    assert folders | {"extras"} <= named


@pytest.mark.extras
def test_every_large_model_is_listed_with_its_numbers() -> None:
    table = {row[0].strip("`"): row[1:] for row in rows("docs/models.md", "`model=`")}
    assert set(table) == {name for name in options("model") if not name.startswith("tiny")}
    for name, cells in table.items():
        model = load([f"model={name}"]).model
        total, active = parameters(model, mtp=False).total, active_parameters(model).total
        flops = flops_per_token(model, 4096)
        assert cells == [count(total), count(active), f"{flops / 1e9:.1f}"]


def test_example_model_is_the_published_one() -> None:
    (example,) = (text for text in blocks("yaml") if not text.startswith("run:"))
    tree = OmegaConf.merge(OmegaConf.structured(ModelConfig), OmegaConf.create(example))
    model = OmegaConf.to_object(tree)
    assert isinstance(model, ModelConfig)
    assert f"{parameters(model).total / 1e9:.1f} B, as published" in TEXTS["docs/models.md"]
    assert round(parameters(model).total / 1e9, 1) == 16.4


def test_every_kernel_option_is_listed() -> None:
    listed = [row[0].strip("`") for row in rows("docs/kernels.md", "`kernels=`")]
    assert sorted(listed) == options("kernels")


def test_every_transport_is_listed() -> None:
    listed = [row[0].strip("`") for row in rows("docs/dispatch.md", "`parallel.dispatch=`")]
    assert sorted(listed) == sorted(choices()["parallel.dispatch"])


def test_every_experiment_named_exists() -> None:
    text = "\n".join(TEXTS.values())
    named = set(re.findall(r"experiment=(\w+)", text)) | set(re.findall(r"`(\w+_8gpu)`", text))
    assert named and named <= set(options("experiment"))


def test_knobs_in_the_text_exist() -> None:
    past = ("CHANGELOG.md", "docs/measured/")  # name the knobs of their time
    text = "\n".join(prose(TEXTS[page]) for page in TEXTS if not page.startswith(past))
    named = set(re.findall(rf"`((?:{'|'.join(GROUPS)})\.[a-z_.\d]+)", text))
    fields = {path for path in named if has_fields(path.rpartition(".")[0])}
    assert named and sorted(named - fields - {*knobs(), *sections()}) == []


def test_linked_numbers_are_those_of_the_records() -> None:
    """Tokens per second that link to a record, and in tables of both the TFLOP/s after them."""
    actual = own()
    linked = re.compile(r"\[([\d,]+)\]\([\w./]*training/(\w+)\.yaml\)(?: \| (\d+) \|)?")
    seen = [match for text in TEXTS.values() for match in linked.findall(text)]
    assert len(seen) > 10
    for rate, name, tflops in seen:
        assert rate == f"{actual[name].tokens_per_second_per_gpu:,.0f}", name
        assert tflops in ("", f"{actual[name].tflops_per_gpu:.0f}"), name


def test_exit_codes_are_those_of_train() -> None:
    codes = re.findall(r"^ +(\d+)  \S", train.__doc__ or "", re.MULTILINE)
    assert [row[0] for row in rows("docs/operations.md", "exit code of a rank")] == codes
    assert {"2", "43", "45"} < set(codes)


def test_console_excerpt_has_the_columns_of_today() -> None:
    shown = blocks("text", README)[0].splitlines()
    record = {
        "step": 1, "loss": 1.0, "grad_norm": 1.0, "lr": 1e-3, "tokens_per_second_per_gpu": 1.0,
        "step_time": 1.0, "memory": 1.0, "load_max": 1.0, "load_p95": 1.0, "dead_experts": 0,
    }  # fmt: skip
    assert heading(record, 20) in shown
    assert sum(bool(re.match(r" ?\d+/20 ", text)) for text in shown) >= 4 and len(shown) <= 10
    page = " ".join(README.split())
    assert "This is `bash scripts/train.sh run.steps=20` on " in page
    assert f"without the override it takes {load([]).run.steps} steps" in page
    assert "rerun" not in "".join(shown)


def test_continuous_integration_runs_the_test_command() -> None:
    assert "scripts/test.sh" in (ROOT / ".ci/run").read_text()
    assert (ROOT / ".ci/nightly").read_text().endswith('scripts/test.sh" --all --lab\n')
    assert "pytest" in (ROOT / "scripts/test.sh").read_text()
    assert "bash scripts/test.sh" in "\n".join(COMMANDS)
