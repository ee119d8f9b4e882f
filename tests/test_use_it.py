"""The examples of the pages as they are written, where no package is found that the page lacks.

docs/use_it.md and docs/package.md need torch alone, others the extra of a framework too.
"""

import importlib.metadata
import json
import os
import socket
import subprocess
import tomllib
from pathlib import Path

import pytest

from tests import installed_alone
from tests.support.pages import ROOT, TEXTS, blocks

ALONE = dict(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
"""Environment of a job of one rank."""
EXAMPLES = """
import os, runpy, sys
import phalanx.kernels.api
codes = {}
for example in sys.argv[1:]:
    if (child := os.fork()) == 0:
        runpy.run_path(example)
        os._exit(0)  # not by the interpreter's end, where a thread of gloo that is late aborts
    codes[example] = os.wait()[1]
print(*[example for example, code in codes.items() if code])
print(*sorted({name.partition(".")[0] for name in sys.modules}))
"""
"""Runs programs in forks after an import, and prints those that failed and what was imported."""
PAGES = {
    "docs/use_it.md": (),
    "docs/package.md": (),
    "docs/adapters.md": ("transformers",),
    "docs/jax.md": ("jax",),
}
"""Pages, and the extras that they name."""


def environment(**more: str) -> dict[str, str]:
    """Environment of a program on the CPU."""
    return os.environ | {"CUDA_VISIBLE_DEVICES": "", **more}


def sections(page: str) -> dict[str, str]:
    """The code of each section that has some, by its title."""
    parts = (part.partition("\n") for part in f"\n{TEXTS[page]}".split("\n## "))
    code = {title.strip("# "): "\n".join(blocks("python", text)) for title, _, text in parts}
    return {title: text for title, text in code.items() if text}


def requirements(extras: tuple[str, ...]) -> list[str]:
    """Requirements of the package with these extras, as pip knows them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    more = [line for extra in extras for line in project["optional-dependencies"][extra]]
    return [*project["dependencies"], *more]


def test_all_pages_with_examples_are_run() -> None:
    # Pieces of files, which test_additions follows; a client of a server, as that of
    # tests/extras/serving; and downloads.
    others = {"docs/models.md", "docs/looking.md", "docs/scores.md"}
    assert {page for page in TEXTS if sections(page)} - others == {*PAGES}
    titles = {"Experts as a function", "Experts as a module", "Expert parallelism"}
    assert titles <= {*sections("docs/use_it.md")}


@pytest.mark.parametrize("page", PAGES)
def test_examples_run(page: str, tmp_path: Path) -> None:
    site = tmp_path / "site"
    try:
        installed_alone.link_into(site, *requirements(PAGES[page]))
    except importlib.metadata.PackageNotFoundError as missing:
        pytest.skip(f"needs {missing.name}")
    titles = {}
    for number, (title, code) in enumerate(sections(page).items()):
        titles[example := str(tmp_path / f"example_{number}.py")] = title
        Path(example).write_text(code)
    driver = tmp_path / "driver.py"
    driver.write_text(EXAMPLES)
    done = subprocess.run(
        installed_alone.command(driver, site, *titles),
        cwd=tmp_path,
        env=environment(**ALONE),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    failed, modules = done.stdout.splitlines()[-2:]
    assert not failed, json.dumps([titles[one] for one in failed.split()]) + done.stderr
    assert "phalanx" in modules.split()
    if not PAGES[page]:
        assert "numpy" not in modules.split()


def test_expert_parallelism_over_two_ranks_needs_torch_alone(tmp_path: Path) -> None:
    """With ranks to agree with, which one rank has not."""
    installed_alone.link_into(tmp_path / "site", "torch")
    example = tmp_path / "example.py"
    end = "\nimport os, sys\nprint('numpy' in sys.modules, flush=True)\nos._exit(0)"
    example.write_text(sections("docs/use_it.md")["Expert parallelism"] + end)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    ranks = [
        subprocess.Popen(
            installed_alone.command(example, tmp_path / "site"),
            cwd=tmp_path,
            env=environment(**ALONE | dict(RANK=rank, WORLD_SIZE="2", MASTER_PORT=port)),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in "01"
    ]
    for process in ranks:
        out, err = process.communicate(timeout=600)
        assert process.returncode == 0 and out == "False\n", err
