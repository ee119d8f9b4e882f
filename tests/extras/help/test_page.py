"""`train.py --help <names>`: groups, sections and knobs, and names that are none of these."""

import pytest

from phalanx.configs.docs import field_docs
from phalanx.configs.knobs import get, knobs, sections, written
from phalanx.configs.load import GROUPS, from_argv, load, options
from phalanx.configs.validate import ConfigError
from phalanx.extras.help.page import page


def told(argv: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as left:
        from_argv(argv)
    out, err = capsys.readouterr()
    assert isinstance(left.value.code, int)
    return left.value.code, out, err


@pytest.mark.parametrize("group", GROUPS)
def test_a_group_has_its_options_and_all_of_its_knobs(
    group: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, text, err = told(["--help", group], capsys)
    assert (code, err) == (0, "")
    lines, defaults = text.splitlines(), load([])
    assert all(any(line.split()[:1] == [name] for line in lines) for name in options(group))
    own = [path for path in knobs() if path.startswith(f"{group}.")]
    assert [line[2:] for line in lines if line.startswith(f"  {group}.")] == [
        f"{path}={written(get(defaults, path))}" for path in own
    ]
    assert max(map(len, lines)) <= 100


def test_every_section_and_knob_has_a_text() -> None:
    words = {path: doc.split() for path, doc in field_docs().items()}
    for path in knobs():
        assert page([path]).split()[1:][: len(words[path])] == words[path]
    for section in sections():
        assert f"Knobs of {section}" in page([section])


def test_a_knob_has_its_default_whole_meaning_and_values(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, text, _ = told(["optim.schedule", "--help", "run.steps=7"], capsys)
    assert code == 0 and text.startswith("optim.schedule=cosine\n  Decay of the learning rate:")
    assert "over the last tenth of" in text and "Values: cosine, linear, constant," in text


def test_several_names_come_one_after_the_other(capsys: pytest.CaptureFixture[str]) -> None:
    _, text, _ = told(["-h", "optim.lr", "run.steps"], capsys)
    assert text == page(["optim.lr"]) + "\n" + page(["run.steps"])


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("optm", "did you mean optim?"),
        ("lr", "did you mean optim.lr?"),
        ("model.attn", "no such group or knob"),
        ("xyzzy", "(groups: model, kernels, precision, parallel, data, optim, run, experiment)"),
    ],
)
def test_an_unknown_name_is_one_line_with_the_near_ones(
    name: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = told(["--help", name], capsys)
    (line,) = err.splitlines()
    assert (code, out) == (2, "")
    assert line.startswith(f"error: --help {name}: no such group or knob") and meant in line


def test_all_unknown_names_are_told() -> None:
    with pytest.raises(ConfigError) as error:
        page(["optm", "optim", "datta"])
    assert [line.split()[1] for line in str(error.value).splitlines()] == ["optm:", "datta:"]
