"""run.inject: which texts are faults, and which faults a run can have."""

import shlex

import pytest

from phalanx.configs.inject import KINDS, Fault, parse
from phalanx.configs.load import load
from phalanx.configs.validate import ConfigError, validate


def refused(word: str, ranks: int, *more: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        validate(load([word, *more]), ranks)
    return str(caught.value).splitlines()


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_with_and_without_a_rank(kind: str) -> None:
    assert parse(f"{kind}@7") == Fault(kind, 7) and str(Fault(kind, 7)) == f"{kind}@7"
    assert parse(f"{kind}@7:rank12") == Fault(kind, 7, 12)
    assert str(Fault(kind, 7, 12)) == f"{kind}@7:rank12"
    validate(load([f"run.inject={kind}@7:rank1"]), 2)


@pytest.mark.parametrize(
    "text",
    ["nan", "nan@", "nan@0", "nan@-1", "nan@07", "nan@7:1", "nan@7:rank", "@7", "nan@7 ", ""],
)
def test_what_has_another_form(text: str) -> None:
    with pytest.raises(ValueError, match="as in kill@12:rank0"):
        parse(text)


def test_the_faults_need_no_brackets() -> None:
    expected = ["nan@7", "hang@9:rank1", "kill@12:rank0"]
    for value in ("nan@7,hang@9:rank1,kill@12:rank0", "[nan@7,hang@9:rank1,kill@12:rank0]"):
        assert load([f"run.inject={value}"]).run.inject == expected
    assert load(["run.inject=nan@7"]).run.inject == ["nan@7"]
    assert load(["run.inject=none"]).run.inject == []
    assert load(["run.recompute=norm,mlp"]).run.recompute == ["norm", "mlp"]


@pytest.mark.parametrize(
    ("value", "ranks", "why"),
    [
        ("boom@7", 2, "'boom@7', which is of no known kind, which are nan, spike,"),
        ("nan@81", 2, "'nan@81', which comes after the last step (run.steps=80)"),
        ("nan@7:rank2", 2, "'nan@7:rank2', which names no rank of this run, whose last is rank 1"),
        ("hang@7", 1, "'hang@7', which would last for ever, as no other rank watches"),
        ("nan@7,nan@7", 2, "'nan@7', which is twice"),
        ("7", 2, "expected a list"),
    ],
)
def test_a_fault_that_cannot_be_is_one_line(value: str, ranks: int, why: str) -> None:
    (line,) = refused(f"run.inject={value}", ranks)
    assert line.startswith("run.inject=") and why in line


def test_what_a_message_advises_is_valid() -> None:
    lines = refused("run.inject=nan@7,hang@9:rank3,nan@7,kill@400,boom@1", 2)
    assert len(lines) == 4
    validate(load(shlex.split(lines[-1].rpartition("; set ")[2])), 2)


def test_a_long_run_refuses_them_unless_forced() -> None:
    (line,) = refused("run.inject=nan@7", 1, "run=pretrain")
    assert "run.allow_inject=false (of run=pretrain) refuses it" in line
    validate(load(["run=pretrain", "run.inject=nan@7", "run.allow_inject=true"]), 1)
    validate(load(["run=pretrain"]), 1)
    for option in ("default", "bench"):
        validate(load([f"run={option}", "run.inject=nan@7"]), 1)
