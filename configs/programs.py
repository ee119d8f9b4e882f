"""How the project's programs are called here: scripts of a checkout, or commands of a package.

`here` turns names of scripts in manuals and errors into what exists on this machine. Imports
nothing of the project; `command` imports what it runs.
"""

import argparse
import functools
import importlib
import itertools
import re
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from typing import NoReturn

DISTRIBUTION = "phalanx-moe"
"""Name of this project where packages are installed from; it is imported as `phalanx`."""
COMMANDS = {
    script: f"phalanx-{script.replace('_', '-')}"
    for script in (
        *("train", "train_tokenizer", "prepare_data", "convert_hf", "checkpoint"),
        *("build_kernels", "plot_run", "sample", "evaluate", "serve", "watch", "make_tasks"),
    )
}
"""Installed command of a script, as in pyproject.toml."""
_ROOT = Path(__file__).resolve().parents[1]
_SCRIPT = re.compile(rf"(python )?(scripts/)?\b({'|'.join(COMMANDS)})\.py\b")
_DOCS = re.compile(r" ?\((see )?docs/[^()]*\)")


def command() -> int:
    """Run the installed command that this process is, by its name; returns its exit code."""
    scripts = {name: script for script, name in COMMANDS.items()}
    script = scripts[Path(sys.argv[0]).name]
    try:
        code: int = importlib.import_module(f"phalanx.scripts.{script}").main()
    except ModuleNotFoundError as missing:
        leave_without(missing)
    return code


def leave_without(missing: ModuleNotFoundError) -> NoReturn:
    """Exit with a line that says which package is missing, and what installs it."""
    if (missing.name or "?").startswith("phalanx"):
        raise missing
    fix = f"`pip install '{DISTRIBUTION}[train]'` installs what pretraining needs"
    if not installed():
        fix = (
            "start with `bash scripts/train.sh`, which makes .venv, or `source .venv/bin/activate` "
            "where it is made"
        )
    sys.exit(f"error: {sys.executable} has no package {missing.name}: {fix}")


def installed() -> bool:
    """Return whether to name console commands: this process is one, or no checkout is around it."""
    return Path(sys.argv[0]).name in COMMANDS.values() or not _checkout()


def here(text: str) -> str:
    """A text that names `scripts/NAME.py`, `NAME.py` and `(docs/...)`, by what is here."""
    if not installed():
        return text
    text = re.sub(r"(torchrun [^\n]*?)\btrain\.py", r"\1-m phalanx.train", text)
    return _SCRIPT.sub(lambda found: COMMANDS[found[3]], _DOCS.sub("", text))


def parser(
    script: str, manual: str | None, *, epilog: str | None = None
) -> argparse.ArgumentParser:
    """Return the parser of a script; its usage line has the name that it was called by."""
    return argparse.ArgumentParser(
        prog=here(f"{script}.py"),
        description=here(manual or ""),
        epilog=here(epilog) if epilog else None,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def install(*packages: str) -> str:
    """The command that installs some of the project's requirements, optional ones too."""
    wanted = dict.fromkeys(r for r in requirements() if _name(r) in packages)
    return " ".join(["pip install", *(f"'{r}'" for r in wanted or packages)])


@functools.cache
def requirements() -> tuple[str, ...]:
    """Return the requirements of this project and its extras; none if they are unknown."""
    if _checkout():
        project = tomllib.loads((_ROOT / "pyproject.toml").read_text("utf-8"))["project"]
        extras = project["optional-dependencies"].values()
        return (*project["dependencies"], *itertools.chain(*extras))
    try:
        found = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        return ()
    return tuple(requirement.split(";")[0].strip() for requirement in found)


def _name(requirement: str) -> str:
    return re.split(r"[\[=<>!~; ]", requirement, maxsplit=1)[0]


def _checkout() -> bool:
    return (_ROOT / "pyproject.toml").is_file()
