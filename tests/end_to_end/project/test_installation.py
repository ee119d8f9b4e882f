"""Installed or from a checkout, from any folder, beside another package named `kernels`.

Hugging Face publishes a package `kernels`, which transformers imports for GPT-OSS. Here a wheel of
one file stands for it; ours must work with it, and must not take its name or its files.
"""

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import phalanx

ROOT = Path(__file__).resolve().parents[3]
SMALL = ["run.steps=1", "run.save_interval=-1", "data=synthetic", "data.sequence_length=32"]
SMALL += ["data.global_batch=2", "data.micro_batch=1", "model.hidden=32", "model.layers=1"]
IMPORTS = """
import kernels, phalanx.kernels.registry, phalanx.train
print(kernels.OWNER, phalanx.kernels.registry.__file__)
"""
COMMANDS = {
    f"phalanx-{name}"
    for name in (
        *("train", "prepare-data", "convert-hf", "checkpoint", "build-kernels", "compare"),
        *("plot-losses", "plot-run", "make-routing", "routing-load", "sample", "evaluate"),
        "timeline",
    )
}
HELP = """
import contextlib, runpy, sys
for command in sys.argv[1:]:
    sys.argv = [command, "--help"]
    with contextlib.suppress(SystemExit):
        runpy.run_path(command, run_name="__main__")
    print("\f", end="")
"""
"""Help of all commands in one process, a page each."""


def pip(*words: object) -> None:
    options = ["--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([sys.executable, "-m", "pip", *map(str, words), *options], check=True)


def call(command: list[object], folder: Path, path: Path) -> str:
    """Standard output of a command in a folder, where `path` and installed packages are found."""
    finished = subprocess.run(
        [str(word) for word in command],
        cwd=folder,
        env=_environment() | {"PYTHONPATH": str(path)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert finished.returncode == 0, f"{command}\n{finished.stdout}{finished.stderr}"
    return finished.stdout


def _environment() -> dict[str, str]:
    ours = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "PYTHONPATH")
    return {name: value for name, value in os.environ.items() if name not in ours}


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel with a package `kernels` that is not ours."""
    wheel = tmp_path_factory.mktemp("stranger") / "kernels-9.9-py3-none-any.whl"
    record = "kernels-9.9.dist-info"
    with zipfile.ZipFile(wheel, "w") as pages:
        pages.writestr("kernels/__init__.py", 'OWNER = "theirs"\n')
        pages.writestr(f"{record}/METADATA", "Metadata-Version: 2.1\nName: kernels\nVersion: 9.9\n")
        pages.writestr(f"{record}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        pages.writestr(f"{record}/RECORD", "")
    return wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    ).stdout.split()
    for name in listed:  # a build in the checkout would leave folders there
        source, target = ROOT / name, folder / "source" / name
        if source.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target, follow_symlinks=False)
    pip("wheel", "--no-build-isolation", "--wheel-dir", folder, folder / "source")
    return next(folder.glob("phalanx-*.whl"))


@pytest.mark.parametrize("first", ["ours", "theirs"])
def test_a_wheel_beside_another_kernels(
    first: str, wheel: Path, stranger: Path, tmp_path: Path
) -> None:
    site = tmp_path / "site"
    order = [wheel, stranger] if first == "ours" else [stranger, wheel]
    for package in order:
        pip("install", "--target", site, package)
    owner, file = call([sys.executable, "-c", IMPORTS], tmp_path, site).split()
    assert owner == "theirs" and Path(file) == site / "phalanx/kernels/registry.py"
    tops = {path.name for path in site.iterdir() if not path.name.endswith(".dist-info")}
    assert tops == {"phalanx", "kernels", "bin"}
    if first == "theirs":
        return
    declared = {e.name for e in importlib.metadata.Distribution.at(_record(site)).entry_points}
    assert declared == COMMANDS
    commands = [site / "bin" / name for name in sorted(COMMANDS)]
    pages = call([sys.executable, "-c", HELP, *commands], tmp_path, site).split("\f")[:-1]
    for command, page in zip(commands, pages, strict=True):  # names what is there
        usage = f"usage: {command.name} "
        assert ("-m phalanx.train [group=option" if command.name[8:] == "train" else usage) in page
        assert not re.search(r"\.py\b|scripts/|docs/", page), page
    knobs = call([sys.executable, "-m", "phalanx.configs.docs"], tmp_path, site)
    assert "docs/" not in knobs and "`run.steps`" in knobs
    record = importlib.metadata.Distribution.at(_record(site)).metadata
    assert record["Version"] == phalanx.__version__ and (site / "phalanx/py.typed").is_file()
    text = record.get_payload()
    assert text.startswith("# Phalanx as a package") and "phalanx-evaluate" in text
    links = re.findall(r"\]\(([^)]*)\)", text)
    assert links and all(link.startswith("https://") for link in links)
    dry = ["experiment=deepseek_v3_1024gpu", "parallel.world_size=1024", "run.dry_run=true"]
    assert "published" in call([site / "bin/phalanx-train", *dry], tmp_path, site)
    out = call([sys.executable, "-m", "phalanx.train", *SMALL], tmp_path, site)
    assert "done: step 1" in out and (tmp_path / "runs").is_dir()


def _record(site: Path) -> Path:
    return next(site.glob("phalanx-*.dist-info"))


def test_a_checkout_beside_another_kernels_from_another_folder(
    stranger: Path, tmp_path: Path
) -> None:
    site = tmp_path / "site"
    pip("install", "--target", site, stranger)
    first = "import sys; sys.path.insert(0, sys.argv[1])"
    owner, file = call([sys.executable, "-c", first + IMPORTS, ROOT], tmp_path, site).split()
    assert owner == "theirs" and Path(file).resolve() == ROOT / "kernels/registry.py"
    out = call([sys.executable, ROOT / "train.py", *SMALL], tmp_path, site)
    assert "done: step 1" in out
    call([sys.executable, ROOT / "scripts/prepare_data.py", "--help"], tmp_path, site)
