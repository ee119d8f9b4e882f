"""The examples of docs/use_it.md and docs/adapters.md as they are written, section by section."""

import re
from pathlib import Path

import pytest

from tests.support.pages import TEXTS, blocks
from tests.support.torchrun import Program

SECTIONS = {
    title: code
    for page in ("docs/use_it.md", "docs/adapters.md")
    for title, *text in (part.split("\n") for part in TEXTS[page].split("\n## ")[1:])
    if (code := "\n".join(blocks("python", "\n".join(text))))
}
ALONE = dict(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
"""Environment of a job of one rank."""


def test_there_are_examples() -> None:
    assert {
        "Experts as a function",
        "Experts as a module",
        "Expert parallelism",
        "transformers",
    } <= {*SECTIONS}


END = "\nimport os\nos._exit(0)"
"""Ends a program without the interpreter's end, where a thread of gloo that is late aborts it."""


@pytest.mark.parametrize("title", SECTIONS)
def test_examples_run(title: str, tmp_path: Path) -> None:
    example = tmp_path / "example.py"
    example.write_text(SECTIONS[title] + END)
    program = Program([str(example)], tmp_path, ALONE)
    code = program.wait()
    missing = re.search(r"ModuleNotFoundError: No module named '(?!phalanx)(\w+)", program.err())
    if missing:
        pytest.skip(f"needs {missing[1]}")
    assert code == 0, program.err()
