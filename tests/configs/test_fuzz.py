"""Random command lines, YAML files and values: a mistake is a ConfigError, never a traceback.

Every case is a function of its number. `slow` runs all of them.
"""

import contextlib
import io
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from phalanx.configs import load as loading
from phalanx.configs.bounds import choices
from phalanx.configs.knobs import knobs, put, sections
from phalanx.configs.load import GROUPS, compose, from_argv, load, options
from phalanx.configs.schema import Config
from phalanx.configs.schema.run import PhaseConfig
from phalanx.configs.validate import ConfigError, validate
from phalanx.moe.run.check import check

PATHS = [*knobs(), *sections()]
WORDS = [
    *[
        "",
        " ",
        "0",
        "1",
        "-1",
        "2",
        "3",
        "7",
        "64",
        "1e9",
        "1e400",
        "-0.0",
        "nan",
        "inf",
        ".5",
        "0x10",
    ],
    *[
        "true",
        "no",
        "null",
        "None",
        "[]",
        "[1]",
        "[1,2]",
        "[0.7,a,0.3,b]",
        "{}",
        "{a: 1}",
        "[[",
        "}",
    ],
    *[
        "'a b'",
        '"x',
        "'",
        "\\",
        "a=b",
        "=",
        "${run.name}",
        "${oc.env:HOME}",
        "${nope:1}",
        "${",
        "$}",
    ],
    *[
        "???",
        "~",
        "+",
        "++",
        "@",
        "/",
        "..",
        "../..",
        "a/b",
        "é",
        "\x00",
        "\n",
        "\t",
        "\ud800",
        "💥",
    ],
    *["memory://", "memory://x", "nope://x/y", "gs://b/x", "s3://", "s3://a:b@c/d", "file:///x"],
    *["Et|(tt|)*2mL", "((((", "|" * 9, "98,2", "1,2,3,4", "-1,2", "9" * 400, "1_000", "1e-400"],
    *[
        "range(1,3)",
        "choice(1,2)",
        "glob(*)",
        "int(3)",
        "sort(1,2)",
        "shuffle(a)",
        "a,b",
        "!!python",
    ],
]
MARKS = list("=+~@.,:/[]{}()'\"\\$ \t\n#&*!|>%?-_0aé\x00")


def word(rng: random.Random) -> str:
    if rng.random() < 0.8:
        return rng.choice(WORDS)
    return "".join(rng.choices(MARKS, k=rng.randrange(1, 12)))


def override(rng: random.Random) -> str:
    key = rng.choice(PATHS)
    if rng.random() < 0.3:
        key = rng.choice(
            [rng.choice(GROUPS), word(rng), key[:-1], f"{key}.{word(rng)}", key.upper()]
        )
    value = word(rng)
    if rng.random() < 0.4:
        names = [*choices().get(key, ()), *(options(key) if key in GROUPS else ())]
        value = rng.choice(names or ["8"])
    text = (
        rng.choice(["", "", "", "", "+", "++", "~", "--", "-"])
        + key
        + rng.choice("=====: ")
        + value
    )
    if rng.random() < 0.2:
        spot = rng.randrange(len(text) + 1)
        text = text[:spot] + rng.choice(MARKS) + text[spot:]
    return text


def command_line(rng: random.Random, folder: Path) -> bool:
    """Return whether it was refused."""
    args = [override(rng) for _ in range(rng.choice([1, 1, 1, 2, 5]))]
    out, err = io.StringIO(), io.StringIO()
    world = mock.patch.dict(os.environ, WORLD_SIZE=str(rng.choice([1, 2, 8, 1024])))
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), world:
            code = check(from_argv(["--check", *args]))
    except SystemExit as end:
        code = int(str(end.code))
        assert code in (0, 2)
    lines = err.getvalue().splitlines()
    wrong = [line for line in lines if line.startswith("error: ")]
    assert out.getvalue() == "" and code in (0, 2, 44) and bool(wrong) == (code != 0)
    assert all(len(line) > 10 for line in lines)
    return code != 0


def values(rng: random.Random, folder: Path) -> bool:
    """Values of the right types, as a config from elsewhere may hold them."""
    cfg = Config()
    for path in rng.sample(list(knobs()), rng.choice([1, 2, 4, 12])):
        put(cfg, path, value(rng, path, knobs()[path].type))
    try:
        validate(cfg, rng.choice([1, 2, 3, 8, 1024]))
    except ConfigError as error:
        assert all(len(line) > 10 for line in str(error).splitlines())
        return True
    return False


def value(rng: random.Random, path: str, kind: object) -> object:
    number = rng.choice([0, 1, -1, 2, 3, 5, 8, 64, 100, 4096, 2**31, 2**63, -(2**40), 10**30])
    if kind is int:
        return number
    if kind is float:
        odd = [float("nan"), float("inf"), -float("inf"), 1e-320, 1e308, -0.0]
        return rng.choice([float(number), number / 7, *odd])
    if kind is bool:
        return rng.random() < 0.5
    if kind == list[int]:
        return [rng.randrange(-3, 200) for _ in range(rng.randrange(4))]
    if kind == list[PhaseConfig]:
        return [PhaseConfig(word(rng), steps=number) for _ in range(rng.randrange(3))]
    if kind == list[str]:
        return [word(rng) for _ in range(rng.randrange(5))]
    if kind == dict[str, Any]:
        names = rng.choice([["phase", "top_k", "dim", "loss"], [word(rng), word(rng)]])
        return {name: rng.choice([number, word(rng), 0.5]) for name in names[rng.randrange(3) :]}
    return rng.choice([*choices().get(path, ()), word(rng), word(rng)])


def yaml_file(rng: random.Random, folder: Path) -> bool:
    """A file of a group, damaged or made up, that the command line chooses."""
    group = rng.choice([g for g in GROUPS if g != "kernels"])
    text = (folder / group / f"{rng.choice(options(group))}.yaml").read_text()
    for _ in range(rng.randrange(1, 5)):
        lines, act = text.splitlines() or [""], rng.randrange(5)
        spot = rng.randrange(len(lines))
        if act == 0:
            lines[spot] = lines[spot].partition(":")[0] + ": " + word(rng)
        elif act == 1:
            lines.insert(
                spot, " " * rng.randrange(5) + word(rng) + rng.choice([":", ": ", ""]) + word(rng)
            )
        elif act == 2:
            del lines[spot]
        elif act == 3:
            lines[spot] = rng.choice("  \t-") + lines[spot]
        else:
            cut = rng.randrange(len(lines[spot]) + 1)
            lines[spot] = lines[spot][:cut] + rng.choice(MARKS) + lines[spot][cut:]
        text = "\n".join(lines) + "\n"
    path = folder / group / "fuzz.yaml"
    path.write_text(text, encoding="utf-8", errors="surrogatepass")
    loading._of_groups.cache_clear()  # the file has had the same name before
    try:
        cfg = load([f"{group}=fuzz"])
        compose([f"{group}=fuzz"]).yaml()
        validate(cfg, 2)
    except ConfigError as error:
        assert str(error).strip()
        return True
    finally:
        path.unlink()
    return False


def fuzz(kind: Callable[[random.Random, Path], bool], cases: range, folder: Path) -> int:
    """How many of the cases were refused."""
    refused = 0
    for number in cases:
        try:
            refused += kind(random.Random(f"{kind.__name__} {number}"), folder)
        except BaseException as error:
            raise AssertionError(f"case {number} of {kind.__name__}") from error
    return refused


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the YAML files that the loader reads."""
    shutil.copytree(loading.FOLDER, tmp_path / "configs")
    monkeypatch.setattr(loading, "FOLDER", tmp_path / "configs")
    return tmp_path / "configs"


KINDS = [(command_line, 200), (values, 1000), (yaml_file, 25)]


@pytest.mark.parametrize(("kind", "cases"), KINDS)
@pytest.mark.extras
def test_random_input_is_refused_or_taken(
    kind: Callable[[random.Random, Path], bool], cases: int, folder: Path
) -> None:
    refused = fuzz(kind, range(cases), folder)
    assert 0 < refused < cases


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "cases"), [(command_line, 4000), (values, 34000), (yaml_file, 2000)]
)
def test_much_random_input_is_refused_or_taken(
    kind: Callable[[random.Random, Path], bool], cases: int, folder: Path
) -> None:
    refused = fuzz(kind, range(cases), folder)
    print(f"{kind.__name__}: {cases} cases, {refused} refused")
    assert 0 < refused < cases
