"""Installed or from a checkout, from any folder, beside another package named `kernels`.

Hugging Face publishes a package `kernels`, which transformers imports for GPT-OSS. Here a wheel of
one file stands for it; ours must work with it, and must not take its name or its files.
"""

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from email import message_from_string
from pathlib import Path

import pytest

import phalanx
from phalanx.configs.records import own

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
        *("train", "train-tokenizer", "prepare-data", "convert-hf", "checkpoint"),
        *("build-kernels", "plot-run", "sample", "evaluate", "serve", "watch", "make-tasks"),
    )
}
CALLS = """
import contextlib, json, os, runpy, sys
*commands, calls = sys.argv[1:]
for command in commands:
    sys.argv = [command, "--help"]
    with contextlib.suppress(SystemExit):
        runpy.run_path(command, run_name="__main__")
    print("\f", end="")
for name, *words in json.loads(calls):
    sys.stdout.flush()
    if os.fork() == 0:  # with what was imported before
        sys.argv = [name, *words]
        run = runpy.run_path if os.sep in name else runpy.run_module
        run(name, run_name="__main__")
        sys.exit()
    assert os.wait()[1] == 0, name
    print("\f", end="")
"""
"""Print help of all commands, then call programs and modules, with a page of output each."""


def pip(*words: object) -> None:
    options = ["--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([sys.executable, "-m", "pip", *map(str, words), *options], check=True)


def top(name: str) -> str:
    """First folder of a file in a wheel."""
    return name.partition("/")[0]


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
    """A wheel of what git tracks, without compiled kernels."""
    folder = tmp_path_factory.mktemp("wheel")
    tree, out = folder / "tree", folder / "out"
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, stdout=subprocess.PIPE, check=True)
    for name in filter(None, listed.stdout.decode().split("\0")):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tree / name, follow_symlinks=False)
    pip("wheel", "--no-build-isolation", "--wheel-dir", out, tree)
    return next(out.glob("*.whl"))


def test_what_is_packed(wheel: Path) -> None:
    """All that trains and that is imported; no laboratory, tests or pages."""
    with zipfile.ZipFile(wheel) as packed:
        names = {*packed.namelist()}
        record = next(name for name in names if name.endswith(".dist-info/METADATA"))
        facts = message_from_string(packed.read(record).decode())
    assert {top(name) for name in names} == {"phalanx", top(record)}
    extras = {path.parent.name for path in (ROOT / "extras").glob("*/__init__.py")}
    files = [f"extras/{name}/__init__.py" for name in extras - {"jax"}]
    files += [
        "train.py",
        "kernels/api.py",
        "kernels/sm90/jit/runtime_calls.c",
        "configs/validate.py",
    ]
    files += ["adapters/transformers/experts.py", "jax/grouped_mlp.py"]
    files += ["scripts/slurm.sbatch", "scripts/evaluate.py"]
    assert {f"phalanx/{name}" for name in files} <= names
    copies = ("kernels/adapters", "extras/jax")
    left_out = ("scripts/lab", "tests", *copies, "docs/proof", "docs/cards")
    assert not any(name.startswith(tuple(f"phalanx/{x}/" for x in left_out)) for name in names)
    read = {f"measured/training/{name}.yaml" for name in own()} | {"published/training.yaml"}
    documents = {name for name in names if name.startswith("phalanx/docs/")}
    assert documents == {f"phalanx/docs/{name}" for name in read}  # a dry run compares with them
    always = [need for need in facts.get_all("Requires-Dist", []) if "extra ==" not in need]
    assert always == ["torch>=2.11"]
    assert {"compile", "train", "lab", "dev"} <= {*facts.get_all("Provides-Extra", [])}


def test_a_wheel_beside_another_kernels(wheel: Path, stranger: Path, tmp_path: Path) -> None:
    """They share no file (`test_what_is_packed`), so that the order does not matter."""
    site = tmp_path / "site"
    pip("install", "--no-compile", "--target", site, wheel, stranger)
    commands = [site / "bin" / name for name in sorted(COMMANDS)]
    dry = ["experiment=deepseek_v3_1024gpu", "parallel.world_size=1024", "run.dry_run=true"]
    runs = [["phalanx.configs.docs"], [str(site / "bin/phalanx-train"), *dry]]
    runs.append(["phalanx.train", *SMALL])
    given = [sys.executable, "-c", IMPORTS + CALLS, *commands, json.dumps(runs)]
    first, _, rest = call(given, tmp_path, site).partition("\n")
    *pages, knobs, estimate, trained, _ = rest.split("\f")
    owner, file = first.split()
    assert owner == "theirs" and Path(file) == site / "phalanx/kernels/registry.py"
    tops = {path.name for path in site.iterdir() if not path.name.endswith(".dist-info")}
    assert tops == {"phalanx", "kernels", "bin"}
    declared = {e.name for e in importlib.metadata.Distribution.at(_record(site)).entry_points}
    assert declared == COMMANDS
    for command, page in zip(commands, pages, strict=True):  # names what is there
        usage = f"usage: {command.name} "
        assert ("-m phalanx.train [group=option" if command.name[8:] == "train" else usage) in page
        assert not re.search(r"\.py\b|scripts/|docs/", page), page
    assert "docs/" not in knobs and "`run.steps`" in knobs
    record = importlib.metadata.Distribution.at(_record(site)).metadata
    assert record["Version"] == phalanx.__version__ and (site / "phalanx/py.typed").is_file()
    text = record.get_payload()
    assert text.startswith("# Phalanx as a package") and "phalanx-evaluate" in text
    links = re.findall(r"\]\(([^)]*)\)", text)
    assert links and all(link.startswith("https://") for link in links)
    assert "published" in estimate
    assert "done: step 1" in trained and (tmp_path / "runs").is_dir()


def _record(site: Path) -> Path:
    return next(site.glob("phalanx_moe-*.dist-info"))


def test_a_checkout_beside_another_kernels_from_another_folder(
    stranger: Path, tmp_path: Path
) -> None:
    site = tmp_path / "site"
    with zipfile.ZipFile(stranger) as pages:
        pages.extractall(site)
    first = "import sys; sys.path.insert(0, sys.argv[1])"
    imports = first + IMPORTS.replace(", phalanx.train", "")  # which the dry run imports
    owner, file = call([sys.executable, "-c", imports, ROOT], tmp_path, site).split()
    assert owner == "theirs" and Path(file).resolve() == ROOT / "kernels/registry.py"
    dry = call([sys.executable, ROOT / "train.py", *SMALL, "run.dry_run=true"], tmp_path, site)
    assert "tokens/s" in dry  # a whole run is in test_scripts
    call([sys.executable, ROOT / "scripts/prepare_data.py", "--help"], tmp_path, site)
