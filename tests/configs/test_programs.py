"""Names of programs in manuals and errors: scripts of a checkout, commands of a package."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from phalanx.configs import programs

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is an installed command."""
    monkeypatch.setattr(sys, "argv", ["/usr/bin/phalanx-sample", "--help"])


def test_every_command_has_its_script() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = dict(programs.COMMANDS)
    expected = {names.pop("train"): "phalanx.train:command"}
    assert all((ROOT / f"scripts/{script}.py").is_file() for script in names)
    expected |= dict.fromkeys(names.values(), "phalanx.configs.programs:command")
    assert project["scripts"] == expected


def test_a_command_without_the_extra_says_what_installs_it() -> None:
    start = (
        "import sys; sys.argv = ['/usr/bin/phalanx-sample', 'runs/NAME'];"
        "from phalanx.configs import programs; sys.exit(programs.command())"
    )
    bare = [sys.executable, "-S", "-c", start]  # without site-packages
    finished = subprocess.run(bare, cwd=ROOT, capture_output=True, text=True)
    (line,) = finished.stderr.splitlines()
    assert finished.returncode == 1
    assert line.startswith(f"error: {sys.executable} has no package ")
    assert line.endswith("`pip install 'phalanx-moe[train]'` installs what pretraining needs")


TEXTS = [
    (
        "    python scripts/plot_run.py runs/NAME [--plot PNG]",
        "    phalanx-plot-run runs/NAME [--plot PNG]",
    ),
    ("  convert_hf.py import X y", "  phalanx-convert-hf import X y"),
    ("for prepare_data.py --bytes,", "for phalanx-prepare-data --bytes,"),
    (
        "usage: torchrun --nproc-per-node N train.py [group=option ...]",
        "usage: torchrun --nproc-per-node N -m phalanx.train [group=option ...]",
    ),
    ("Example: train.py run=bench", "Example: phalanx-train run=bench"),
    ("read from there (docs/data.md). Without", "read from there. Without"),
    ("my_sample.py, sample.python and docs/", "my_sample.py, sample.python and docs/"),
]


@pytest.mark.parametrize(("script", "installed"), TEXTS)
def test_a_checkout_has_scripts(script: str, installed: str) -> None:
    assert programs.here(script) == script


@pytest.mark.parametrize(("script", "installed"), TEXTS)
def test_a_command_names_commands(script: str, installed: str, command: None) -> None:
    assert programs.here(script) == installed


def test_usage_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    assert programs.parser("plot_run", "x").format_usage().startswith("usage: plot_run.py ")
    monkeypatch.setattr(sys, "argv", ["/usr/bin/phalanx-plot-run"])
    assert programs.parser("plot_run", "x").format_usage().startswith("usage: phalanx-plot-run ")


def test_packages_are_those_that_the_project_needs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    te, plots = "'transformer-engine[pytorch,core_cu13]==2.20.2'", "'matplotlib>=3.11.2,<4'"
    assert programs.install("transformer-engine") == f"pip install {te}"
    assert programs.install("matplotlib") == f"pip install {plots}"
    programs.requirements.cache_clear()
    monkeypatch.setattr(programs, "_ROOT", tmp_path)  # no checkout
    wanted = ["torch==2.11.0", 'matplotlib>=3.11.2,<4; extra == "dev"']
    monkeypatch.setattr(programs.metadata, "requires", lambda name: wanted)
    assert programs.installed() and programs.install("matplotlib") == f"pip install {plots}"
    programs.requirements.cache_clear()
