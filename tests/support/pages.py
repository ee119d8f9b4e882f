"""README.md, other pages of the root and docs/ for tests: code blocks, commands, tables, links."""

import re
import shlex
from pathlib import Path

from phalanx.configs.records import launch

ROOT = Path(__file__).resolve().parents[2]
PATHS = (*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md")))
TEXTS = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in PATHS}
"""Text of every page, by its path from the root of the repository."""
README = TEXTS["README.md"]
_STARTS = {"train.py", "scripts/train.sh", "scripts/slurm.sbatch"}


def prose(text: str) -> str:
    """A page without its code blocks."""
    return re.sub(r"```.*?```", "", text, flags=re.DOTALL)


def without_blocks(text: str) -> str:
    """A page with empty lines in place of its code blocks, so that lines keep their numbers."""
    return re.sub(r"```.*?```", lambda m: "\n" * m[0].count("\n"), text, flags=re.DOTALL)


def unbreakable(line: str) -> bool:
    """A row of a table, or a line whose longest link leaves no place to break it."""
    return line.startswith("|") or bool(re.fullmatch(r"\W*\[[^\]]*\]\([^)]*\)\W*", line))


def blocks(language: str, text: str | None = None) -> list[str]:
    """Code blocks of a language: of one page, or of all pages."""
    every = "\n".join(TEXTS.values()) if text is None else text
    return re.findall(rf"```{language}\n(.*?)```", every, re.DOTALL)


def commands(text: str | None = None) -> list[str]:
    """Command lines of the shell blocks, and those in the prose."""
    every = "\n".join(TEXTS.values()) if text is None else text
    joined = "\n".join(blocks("bash", every)).replace("\\\n", " ")
    inline = re.findall(r"`((?:python|torchrun|bash) [^`]+)`", prose(every))
    return [line for line in (*joined.splitlines(), *map(_one_line, inline)) if line.strip()]


def training_commands() -> list[str]:
    """Commands of all pages that start train.py, each once."""
    found = [line for line in commands() if _STARTS & set(shlex.split(line, comments=True))]
    return list(dict.fromkeys(found))


def ranks_and_overrides(command: str) -> tuple[int, list[str]]:
    """Ranks and overrides of a training command."""
    words = shlex.split(command, comments=True)
    if "scripts/train.sh" in words:  # two processes where there is no GPU
        return 2, words[words.index("scripts/train.sh") + 1 :]
    if "scripts/slurm.sbatch" in words:
        per_node = re.search(r"--gpus-per-node=(\d+)", (ROOT / "scripts/slurm.sbatch").read_text())
        assert per_node is not None
        at = words.index("scripts/slurm.sbatch")
        return int(words[words.index("--nodes") + 1]) * int(per_node[1]), words[at + 1 :]
    return launch(command)


def rows(page: str, first_header: str) -> list[list[str]]:
    """Cells of the table of a page whose header row starts with this cell."""
    body = TEXTS[page].split(f"| {first_header} |", 1)[1].split("\n\n", 1)[0].splitlines()[2:]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in body]


def links(page: str) -> list[str]:
    """Relative targets of links and pictures, as written."""
    found = re.findall(r"\]\((?!https?:)([^)\s]+)\)", prose(TEXTS[page]))
    return sorted(set(found))


def target(page: str, link: str) -> tuple[Path, str]:
    """File or folder, and heading, that a link of a page points to."""
    path, _, anchor = link.partition("#")
    return ((ROOT / page).parent / path if path else ROOT / page).resolve(), anchor


def anchors(page: str) -> set[str]:
    """Anchors of the headings of a page, as code hosts form them."""
    headings = re.findall(r"^#+ (.*)$", prose(TEXTS[page]), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def _one_line(text: str) -> str:
    """Inline code without line breaks of the page."""
    return " ".join(text.split())
