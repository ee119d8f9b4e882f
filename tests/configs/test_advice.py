"""Advice in messages of the configuration: the command line accepts it, and the error is gone."""

import ast
import re
import subprocess
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from phalanx.configs import capture
from phalanx.configs.knobs import get, knobs, overrides, put
from phalanx.configs.load import GROUPS, compose, load
from phalanx.configs.validate import ConfigError, validate
from phalanx.parallel.checkpoint.start import CheckpointMismatch, compare
from tests.support.advice import advised, tried

ROOT = Path(__file__).resolve().parents[2]

TEXTS = [
    *["98,2", "a b", "it's", 'say "x"', "back\\slash", "end\\", "$HOME", "${run.name}", "`id`"],
    *["*", "[a]", "{a}", "~", "#no", "a;b", "a&b", "(x", "true", "None", "null", "007", "1e3"],
    *["0.7", ".5", "nan", "é", "=", "a=b", "", " ", "s3://bucket/a,b", "Et|(tt|)*30mL", "1_000"],
]


def shell(line: str) -> list[str]:
    """The words of a line, by a real shell in a folder of its own."""
    done = subprocess.run(
        ["bash", "-c", f"printf '%s\\0' {line}"], capture_output=True, text=True, check=True
    )
    return done.stdout.split("\0")[:-1]


def test_every_value_survives_shell_and_parser(tmp_path: Path) -> None:
    (tmp_path / "n").write_text("a file that [norm] matches")
    values: list[dict[str, Any]] = [{"run.project": text} for text in TEXTS]
    values += [{"data.blend": [text, "x"]} for text in TEXTS if text.strip()]
    values += [{"data.blend": []}, {"run.recompute": ["norm"]}, {"run.profile": [3, 4]}]
    values += [{"optim.lr": 1e-5}, {"run.steps": 7}, {"optim.ema": 0.5}]
    values += [{"parallel.comm_sms": "auto"}, {"parallel.comm_sms": 16}]
    lines = [overrides(each) for each in values]
    words = shell(f"$(cd {tmp_path})" + " ".join(lines))
    assert len(words) == len(values)
    for word, each in zip(words, values, strict=True):
        ((path, value),) = each.items()
        assert get(load([word]), path) == value, word
    assert shell(overrides({"run.steps": 7, "data.split": "98,2"})) == [
        "run.steps=7",
        'data.split="98,2"',
    ]


@pytest.mark.parametrize(
    ("mistake", "advice"),
    [
        (["data.split=98,2"], 'data.split="98,2"'),
        (["run.name=a b'c"], 'run.name="a b\'c"'),
        (["run.dir=x(y"], 'run.dir="x(y"'),
        (["data.blend=a,b"], "data.blend=[a,b]"),
        (["run.profile=5,6"], "run.profile=[5,6]"),
        (["data.blend=[a, b", "c]"], "data.blend=[a,b]"),
        (["run.profile=[1, 2"], "run.profile=[1,2]"),
        (["run.steps", "5"], "run.steps=5"),
        (["run.steps", "=", "5"], "run.steps=5"),
        (["run.steps"], "run.steps=100"),
        (["run.steps=many"], "run.steps=100"),
        (["run.recompute={}"], "run.recompute=[norm,mla_up]"),
        (["run.steps=1,2"], "run.steps=100"),
        (["run.precision=fp32"], "precision=fp32"),
        (["model=tiny_deepsek"], "model=tiny_deepseek"),
    ],
)
def test_a_mistake_names_what_the_command_line_takes(mistake: list[str], advice: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load(mistake)
    found = advised(str(refused.value))
    assert [advice] in found, str(refused.value)
    for words in found:
        load(words)


def test_an_unknown_corpus_is_answered_with_data_of_ones_own() -> None:
    with pytest.raises(ConfigError) as refused:
        load(["data=wiki"])
    line = str(refused.value).replace("<prefix>", "data/wiki")
    words = re.search(r"your own: (\S+) '(\S+)'", line)
    assert words and load(list(words.groups())).data.blend == ["data/wiki"]


def test_a_forced_graph() -> None:
    given = ["kernels.backend=reference"]
    line = capture.forced_graph_error(capture.not_capturable(load(given)) or "")
    assert advised(line) == [["run.graph=auto"]]
    with pytest.raises(ConfigError):
        validate(load([*given, "run.graph=full_iteration"]), 1)
    tried([*given, "run.graph=full_iteration"], ["run.graph=auto"])


SAVED = ["data=indexed", "data.blend=[0.5,a,0.5,b c]", "data.split='1,1'"]


@pytest.mark.parametrize(
    "now",
    [
        ["data.split='98,2'"],
        ["data.source=embedded"],
        ["data.sequence_length=64", "data.seed=7", "model.layers=2"],
        ["precision=fp32"],
        ["model.moe.router.score=sigmoid", "model.moe.router.bias_rate=1e-3"],
        ["model.attention.qk_norm=true", "model.norm_eps=1e-3"],
    ],
)
def test_another_configuration_than_the_checkpoint_s(now: list[str]) -> None:
    """Values as typed, and as the YAML of a checkpoint."""
    saved = asdict(load([*SAVED[:1], "data.blend=[0.5,a,0.5,'b c']", *SAVED[2:]]))
    given = [*SAVED[:1], "data.blend=[0.5,a,0.5,'b c']", *SAVED[2:], *now]
    with pytest.raises(CheckpointMismatch) as refused:
        compare(saved, asdict(load(given)))
    message = str(refused.value)
    (alternative,) = advised(message)
    compare(saved, asdict(tried(given, alternative)))
    assert "run.resume=never" in message and load(["run.resume=never"])


def test_repairs_are_spelled_for_a_shell() -> None:
    """Values that hold what Hydra or a shell would take apart."""
    cfg = load(["data=indexed", "data.blend=[a]", "data.split='x'"])
    put(cfg, "data.blend", ["1", "a b", "c,d"])
    with pytest.raises(ConfigError) as refused:
        validate(cfg, 1)
    words = [word for each in advised(str(refused.value)) for word in each]
    assert words == ['data.split="98,2"', "data.blend=[0.7,prefix,0.3,other]"]


# --- what the sources say literally -----------------------------------------------------------

_LITERAL = re.compile(r"(?<![\w.\[<`])([a-z_]+(?:\.[a-z_0-9]+)*)=(?!=)([^\s,;:)`?]+)")


_OPEN = re.compile(r"""[\0<>.'"]$|\0|\.\.\.|<|^N$""")


def messages(tree: ast.AST) -> Iterator[str]:
    """Texts of a module outside docstrings; in place of what is filled in there is a \\0."""
    docs = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    parts = {
        id(part)
        for node in ast.walk(tree)
        if isinstance(node, ast.JoinedStr)
        for part in node.values
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            filled = [v.value if isinstance(v, ast.Constant) else "\0" for v in node.values]
            yield "".join(map(str, filled))
        elif (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in docs | parts
        ):
            yield node.value


def literals(text: str) -> set[str]:
    """Overrides in a text that are whole: nothing in them is filled in or left open."""
    return {
        f"{name}={value}"
        for name, value in _LITERAL.findall(text)
        if (name in knobs() or name in GROUPS) and not _OPEN.search(value)
    }


def test_every_override_in_a_message_is_accepted() -> None:
    words = set()
    for folder in ("configs", "moe", "parallel", "kernels", "scripts"):
        for path in (ROOT / folder).rglob("*.py"):
            source = path.read_text(encoding="utf-8")
            if literals(source):
                words |= set().union(*map(literals, messages(ast.parse(source))))
    assert len(words) > 40
    for word in sorted(words):
        try:
            compose([word])
        except ConfigError as error:
            raise AssertionError(f"a message says {word}: {error}") from None
