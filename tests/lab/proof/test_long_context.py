"""long_context.py and its needles: contexts, answers, losses by position, tables and picture."""

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from phalanx.scripts import prepare_data
from phalanx.scripts.lab.proof import long_context, plot_long_context
from phalanx.scripts.lab.proof.needles import CODES, DEPTHS, FORMS, Question, ask, questions
from tests.support import tiny_runs

PAGE = Path(__file__).resolve().parents[3] / "docs/proof/long_context.md"
TEXT = np.frombuffer(b"int f(void);\n" * 400, np.uint8)
CONTEXT = 1024


def drawn(seed: int = 1, repeats: int = 1) -> list[Question]:
    options: Any = dict(context=CONTEXT, repeats=repeats, seed=seed)
    return list(questions(TEXT, lambda text: list(text.encode()), 0, **options))


def lines_with_codes(prompt: Sequence[int]) -> list[str]:
    return [line for line in bytes(prompt).decode().splitlines() if line[-2:].strip(".").isdigit()]


class Reader:
    """A model of bytes that finds the code, or takes that of the first line of codes."""

    def __init__(self, *, finds: bool) -> None:
        self.decoder, self.finds = self, finds

    def read(self, prompts: list[list[int]], capacity: int) -> Tensor:
        (prompt,) = prompts
        assert len(prompt) < capacity <= CONTEXT
        asked = bytes(prompt).decode().rpartition("\n")[2]
        lines = lines_with_codes(prompt)
        right = [line for line in lines if line.startswith(asked)][0]
        other = [line for line in lines if line != right][0]
        line = right if self.finds else other
        self.code, self.next_position = " " + line.rstrip(".").rpartition(" ")[2], len(prompt)
        return self._logits(0)

    def next(self, tokens: list[int], positions: list[int]) -> Tensor:
        assert positions == [self.next_position]
        self.next_position += 1
        return self._logits(self.next_position - self.begin)

    def _logits(self, place: int) -> Tensor:
        if place == 0:
            self.begin = self.next_position
        logits = torch.zeros(1, 256)
        logits[0, ord(self.code[place])] = 9.0
        return logits


def test_a_context_has_each_code_once_and_asks_for_one() -> None:
    found = drawn()
    assert [(q.form, q.depth) for q in found] == [(form, d) for form in FORMS for d in DEPTHS]
    for question in found:
        whole = len(question.prompt) + len(question.answers[0])
        assert whole == CONTEXT and question.prompt[0] == 0
        lines = lines_with_codes(question.prompt)
        asked = bytes(question.prompt).decode().rpartition("\n")[2]
        (right,) = [line for line in lines if line.startswith(asked + " ")]
        codes = [bytes(answer).decode() for answer in question.answers]
        assert right.removeprefix(asked).rstrip(".") == codes[0]
        assert sorted(codes) == sorted(" " + x.rstrip(".").rpartition(" ")[2] for x in lines)
        assert len(lines) == CODES == len({code[:2] for code in codes})
        place = bytes(question.prompt).index(right.encode()) / CONTEXT
        assert place == pytest.approx(question.depth, abs=0.25)


def test_the_seed_decides_the_contexts() -> None:
    assert drawn() == drawn() != drawn(seed=2)
    assert len(drawn(repeats=3)) == 3 * len(DEPTHS) * len(FORMS)


@pytest.mark.parametrize("finds", [True, False])
def test_an_answer_is_right_if_the_model_finds_the_code(finds: bool) -> None:
    model: Any = Reader(finds=finds)
    for question in drawn():
        answer = ask(model, question)
        assert (answer.chosen, answer.exact) == (finds, finds)
        right = math.log(math.exp(9) + 255) - 9
        assert (answer.nats == pytest.approx(6 * right, rel=1e-3)) == finds


def test_codes_that_no_token_tells_apart_are_refused() -> None:
    same = Question("define", 0.5, [1], [[5, 6], [5, 7], [5, 6, 8]])
    with pytest.raises(ValueError, match="do not differ in one token"):
        ask(Reader(finds=True), same)  # type: ignore[arg-type]


def test_a_short_context_or_text_is_refused() -> None:
    options: Any = dict(repeats=1, seed=1)
    for ids, context, message in ((TEXT, 256, "too short for 8"), (TEXT[:9], CONTEXT, "has 9")):
        with pytest.raises(ValueError, match=message):
            list(questions(ids, lambda t: list(t.encode()), 0, context=context, **options))


def test_losses_are_means_of_ranges_of_positions() -> None:
    seen = []

    def losses(tokens_BS: Tensor, labels_BS: Tensor) -> Tensor:
        seen.append(tuple(tokens_BS.shape))
        assert (tokens_BS.flatten()[1:] == labels_BS.flatten()[:-1]).all()
        return labels_BS.float()

    rows = np.stack([np.arange(65), 2 * np.arange(65)])
    model: Any = SimpleNamespace(losses=losses)
    for size, shape in ((64, (1, 64)), (16, (4, 16))):
        means = long_context.by_position(model, rows, size, lambda n: None)
        assert means == [1.5 * (4 * i + 2.5) for i in range(long_context.RANGES)]
        assert seen[-1] == shape


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    """Bytes of four documents, of which two have 1,024 tokens."""
    texts = ["x = 1\n" * n for n in (300, 9, 100, 200)]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    given = [str(tmp_path / "t.jsonl"), "--bytes", "--workers", "1"]
    assert prepare_data.main([*given, "--output", str(tmp_path / "long")]) == 0
    return tmp_path / "long"


def test_documents_that_are_long_enough_are_read_from_their_begin(pair: Path) -> None:
    rows, ids = long_context.documents(str(pair), 0, CONTEXT, 9)
    assert rows.shape == (2, CONTEXT + 1) and len(ids) == 6 * 609 + 4
    for row in rows:
        assert bytes(row.tolist()) == (b"\0" + b"x = 1\n" * 171)[: CONTEXT + 1]
    assert len(long_context.documents(str(pair), 0, CONTEXT, 1)[0]) == 1
    with pytest.raises(ValueError, match="no document of 4096 tokens"):
        long_context.documents(str(pair), 0, 4096, 9)


def report(step: int, trained: int, loss: dict[str, list[float]], chosen: int) -> dict[str, Any]:
    needles = [
        {"context": c, "form": f, "depth": d, "chosen": i < chosen, "exact": i < 1, "nats": 2.0}
        for c in (8, 32)
        for f in FORMS
        for i, d in enumerate(DEPTHS)
    ]
    about = {"checkpoint": "x", "step": step, "trained_context": trained, "documents": 3}
    return about | {"context": 32, "short": 8, "loss": loss, "needles": needles}


def test_tables_and_picture_compare_checkpoints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], figures: list[Any]
) -> None:
    flat, steep = [math.log(4)] * 16, [math.log(4)] * 4 + [math.log(64)] * 12
    paths = [tmp_path / "before.json", tmp_path / "after.json"]
    paths[0].write_text(json.dumps(report(5, 8, {"whole": steep, "pieces": flat}, 3)))
    paths[1].write_text(json.dumps(report(9, 32, {"whole": flat, "pieces": flat}, 9)))
    picture = tmp_path / "p.png"
    assert plot_long_context.main([*map(str, paths), "--plot", str(picture)]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert " ".join(rows[1].split()) == "step 5, trained at 8 whole 32 4 64 64"
    assert " ".join(rows[4].split()) == "step 9, trained at 32 pieces of 8 4 4 4 4"
    assert " ".join(rows[7].split()) == "step 5, trained at 8 8 sentence 9 33.3% 11.1% 2.00"
    assert " ".join(rows[14].split()) == "step 9, trained at 32 32 define 9 100.0% 11.1% 2.00"
    assert " ".join(rows[-3].split()).endswith("at 8 32 100.0% 0.0% 0.0% 33.3% 0.0% 0.0%")
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    left, chosen, exact = figures[0].axes
    assert [list(line.get_ydata())[-1] for line in left.lines] == pytest.approx([64, 4, 4, 4])
    assert len(left.lines[0].get_ydata()) == 16 and len(left.lines[1].get_ydata()) == 4
    (first, *_), (last, *_) = chosen.containers[0], exact.containers[3]
    assert list(first.get_ydata()) == [1.0, 0.0, 0.0]
    assert list(first.get_xdata()) == pytest.approx([32 * far for far in (0.8, 0.5, 0.2)])
    assert list(last.get_ydata()) == pytest.approx([1 / 3, 0.0, 0.0])


def test_bars_end_where_a_share_is_a_deviation_away() -> None:
    """Wilson's interval: at its ends p the share is sqrt(p (1 - p) / n) from p."""
    for share, number in ((0.0, 30), (14 / 30, 30), (1.0, 45)):
        below, above = plot_long_context._bar(share, number)
        for end in (share - below, share + above):
            deviation = math.sqrt(max(0.0, end * (1 - end)) / number)
            assert abs(share - end) == pytest.approx(deviation, abs=1e-9)
        assert below + above > 0.02


def test_the_page_has_the_tables_of_its_files(capsys: pytest.CaptureFixture[str]) -> None:
    files = [str(PAGE.with_name(f"long_context_{name}.json")) for name in ("before", "after")]
    assert plot_long_context.main(files) == 0
    rows = [re.split("  +", row.strip()) for row in capsys.readouterr().out.splitlines()]
    page = [[cell.strip() for cell in row.split("|")[1:-1]] for row in PAGE.read_text().split("\n")]
    shown = [row for row in rows if row[0].startswith("step")]
    assert len(shown) == 16 and [row for row in shown if row not in page] == []


def test_files_of_different_measurements_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other, none = (tmp_path / f"{name}.json" for name in "abc")
    loss = {"whole": [1.0] * 16, "pieces": [1.0] * 16}
    one.write_text(json.dumps(report(5, 8, loss, 3)))
    other.write_text(json.dumps(report(5, 8, loss, 3) | {"documents": 4}))
    none.write_text("{}")
    for path, message in ((other, "of other documents"), (none, "no file of long_context.py")):
        assert plot_long_context.main([str(one), str(path)]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.dist
def test_a_checkpoint_is_measured(tmp_path: Path, pair: Path) -> None:
    run = tiny_runs.train(tmp_path, "a", 1, "run.steps=1", "model.layers=1")
    out = tmp_path / "a.json"
    given = [run, pair, "--context", CONTEXT, "--short", 512, "--repeats", 1, "--json", out]
    done = tiny_runs.command(long_context.main, *given)
    assert done.code == 0, done.err
    assert f"{out}: step 1, 2 documents, 36 needles" in done.out
    found = json.loads(out.read_text())
    whole, pieces = found["loss"]["whole"], found["loss"]["pieces"]
    assert len(whole) == long_context.RANGES
    assert whole[:8] == pytest.approx(pieces[:8], rel=1e-5) and whole[8:] != pieces[8:]
    assert {(n["context"], n["form"]) for n in found["needles"]} == {
        (c, form) for c in (512, CONTEXT) for form in FORMS
    }
    assert plot_long_context.main([str(out)]) == 0
    wrong = tiny_runs.command(long_context.main, *given[:4], "--short", 500, "--json", out)
    assert wrong.code == 2 and "must be a multiple" in wrong.err
