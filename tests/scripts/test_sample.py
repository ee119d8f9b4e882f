"""sample.py and evaluate.py as a person starts them, on tiny checkpoints that the test trains."""

import json
import math
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch

from phalanx.moe.data.tokenizer.codec import Codec
from phalanx.moe.hf.source import SourceFolder
from phalanx.moe.inference.scoring import Score
from phalanx.moe.report import progress
from phalanx.parallel.object_store import place
from phalanx.scripts import convert_hf, evaluate, sample
from tests.scripts.test_convert_hf import qwen3
from tests.support import s3
from tests.support.tiny_runs import command, step_of, train, untrained
from tests.support.tokenizers import llama

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one rank with two checkpoints; they have learned that text is mostly spaces."""
    folder = tmp_path_factory.mktemp("runs")
    return train(folder, "one", 1, "run.steps=12", "run.save_interval=6")


def test_the_scripts_have_help() -> None:
    for script, option in ((sample, "--tokenizer"), (evaluate, "--tokenizer"), (convert_hf, "")):
        given = [sys.executable, str(script.__file__), "--help"]
        output = subprocess.run(given, capture_output=True, text=True, timeout=60)
        assert output.returncode == 0 and option in output.stdout and not output.stderr


def test_text_is_the_same_for_a_checkpoint_of_two_ranks(run: Path) -> None:
    split = untrained(run.parent, "two", 2, step_of(run, 12), "run.steps=13", "parallel.expert=2")
    drawing = ["--temperature", "1", "--top-p", "0.95", "--no-stop", "--tokens", "40"]
    for options in (["--prompt", "def ", "--tokens", "12"], ["--prompt", "im", *drawing]):
        one, two = (command(sample.main, folder, *options) for folder in (run, split))
        assert one.code == two.code == 0 and one.out == two.out
        assert one.out.startswith(options[1]) and len(one.out) > 14
        assert "step 12\n" in one.err and "step 13\n" in two.err
        assert "12 tokens, " in one.err or "40 tokens, " in one.err
    earlier = command(sample.main, run, *options, "--step", "6")
    assert earlier.code == 0 and earlier.out != one.out and "step 6\n" in earlier.err
    other = command(sample.main, step_of(run, 12), *options, "--seed", "1", "--prompt", "x")
    assert other.code == 0 and other.out != one.out
    lines = [line for line in other.err.splitlines() if line.endswith("tokens/s")]
    assert len(lines) == 2  # of two prompts
    assert other.out.startswith("-- text 1 of 2\nim") and "\n-- text 2 of 2\nx" in other.out
    assert "-- text" not in earlier.out
    bytes_alone = command(sample.main, run, "--prompt", "x\udcff", "--tokens", "1")
    assert bytes_alone.code == 0 and bytes_alone.out.startswith("x\ufffd"), "not UTF-8"


def test_prompts_together_have_the_texts_that_each_has(run: Path) -> None:
    """With a context of 16 tokens, beyond which the texts grow."""
    given = [word for text in ("def ", "im", "") for word in ("--prompt", text)]
    given += ["--tokens", "20", "--no-stop", "--temperature", "1", "--top-k", "9"]
    together, apart, plain = (
        command(sample.main, run, *given, *how) for how in ([], ["--batch", "1"], ["--no-cache"])
    )
    assert together.code == apart.code == plain.code == 0
    assert together.out == apart.out == plain.out and "-- text 3 of 3\n" in plain.out
    assert together.err.count("-- 20 tokens, ") == 3
    _, first, second = together.out.split("-- text ")[:3]
    stop = first.splitlines()[1][8:10]
    short = command(sample.main, run, *given[2:4], *given[6:], "--seed", "1", "--stop", "\udcff")
    assert short.out == second.partition("\n")[2], "a text has the seed of its number"
    ended = command(sample.main, run, *given[:2], *given[6:], "--stop", stop, "--stop", "unseen")
    text = first.partition("\n")[2].removesuffix("\n")
    assert ended.out == f"{text[: text.index(stop, 4)]}\n" and "-- 20 tokens" not in ended.err


def _reached(at: str, main: Callable[[Sequence[str]], int], argv: Sequence[str]) -> int:
    with s3.credentials(at):
        return main(argv)


def test_a_checkpoint_that_was_copied_to_an_object_store(run: Path) -> None:
    copied = place(f"s3://{s3.BUCKET}/sample/copied")
    with s3.credentials(s3.endpoint()):
        for file in step_of(run, 12).iterdir():
            (copied / file.name).upload(file)
    main = partial(_reached, s3.endpoint(), sample.main)
    for options in ([], ["--no-verify"]):
        given = ["--prompt", "def ", "--tokens", "12", *options]
        one = command(sample.main, step_of(run, 12), *given)
        two = command(main, copied, *given)
        assert one.code == two.code == 0 and one.out == two.out, two.err
    with s3.credentials(s3.endpoint()):
        (copied / "__0_0.distcp").write(b"")
    damaged = command(main, copied, *given)
    assert damaged.code == 2 and "__0_0.distcp has 0 bytes, not" in damaged.err
    none = command(main, f"s3://{s3.BUCKET}/sample/none", *given)
    assert none.code == 2 and "has no checkpoint" in none.err and len(none.err.splitlines()) == 1


def test_files_are_scored_and_a_longer_context_helps(run: Path, tmp_path: Path) -> None:
    (tmp_path / "spaces.txt").write_text(" " * 100)
    (tmp_path / "letters.txt").write_text("qxzj" * 25)
    files, out = [tmp_path / "spaces.txt", tmp_path / "letters.txt"], tmp_path / "out.json"
    output = command(evaluate.main, run, *files, "--json", out)
    assert output.code == 0, output.err
    head, *rows = [line.split() for line in output.out.splitlines()]
    assert head == ["file", "tokens", "bytes", "loss", "perplexity", "bits/byte"]
    assert [row[1:3] for row in rows] == [["101", "100"], ["101", "100"], ["202", "200"]]
    actual = json.loads(out.read_text())
    spaces, letters = (actual["files"][str(path)] for path in files)
    assert spaces["loss"] < 3 < letters["loss"] and rows[2][0] == "all"
    assert float(rows[2][3]) == pytest.approx((spaces["loss"] + letters["loss"]) / 2, abs=1e-4)
    assert actual["step"] == 12 and actual["context"] == 16
    one = command(evaluate.main, run, files[1], "--context", "1", "--batch", "3", "--json", out)
    assert one.code == 0 and json.loads(out.read_text())["context"] == 1


@pytest.mark.extras  # records its routing
def test_a_replayed_routing_that_is_gone_is_told(run: Path, tmp_path: Path) -> None:
    recorded = tmp_path / "routing"
    train(run.parent, "recorded", 1, "run.steps=1", f"run.record_routing={recorded}")
    given = ["run.steps=1", f"model.moe.router.replay={recorded}"]
    replaying = train(run.parent, "replaying", 1, *given)
    recorded.unlink()
    output = command(sample.main, replaying, "--prompt", "x")
    loading, line = output.err.splitlines()
    assert output.code == 2 and loading.startswith("-- loading ")
    assert line.startswith(f"sample: {recorded} cannot be read: there is no such file; ")
    assert output.err.endswith("(model.moe.router.replay): restore it\n")


def test_documents_of_a_run_that_masks_them_are_scored_alone(run: Path, tmp_path: Path) -> None:
    masked = train(run.parent, "masked", 1, "run.steps=6", "data.document_mask=true")
    texts = ["def main(self):", "of", "import os, sys\n"]
    losses, tokens = [], []
    for name, kept in (("a", texts[:1]), ("b", texts[1:2]), ("c", texts[2:]), ("all", texts)):
        file, out = tmp_path / f"{name}.jsonl", tmp_path / f"{name}.json"
        file.write_text("\n".join(json.dumps({"text": text}) for text in kept))
        output = command(evaluate.main, masked, file, "--json", out, "--context", "64")
        assert output.code == 0, output.err
        (actual,) = json.loads(out.read_text())["files"].values()
        losses.append(actual["loss"])
        tokens.append(actual["tokens"])
    assert tokens == [15, 2, 15, 32]
    alone = sum(x * n for x, n in zip(losses[:3], tokens[:3], strict=True))
    assert losses[3] * 32 == pytest.approx(alone, rel=1e-5)
    began = command(sample.main, masked)
    assert began.code == 2 and began.err.endswith("nothing predicts a first token: give --prompt\n")
    assert command(sample.main, masked, "--prompt", "def ", "--tokens", "2").code == 0


def test_mistakes_are_one_line_with_the_way_out(run: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "step_00000012"
    damaged.mkdir()
    for path in step_of(run, 12).iterdir():
        (damaged / path.name).write_bytes(path.read_bytes())
    shard = max(damaged.glob("*.distcp"), key=lambda path: path.stat().st_size)
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    (tmp_path / "text.txt").write_text("text")
    torn = tmp_path / "torn" / "checkpoints" / "step_00000003"
    torn.mkdir(parents=True)
    for main, given, why in (
        (sample.main, [tmp_path / "none"], "none has no checkpoint: give the folder of a run"),
        (sample.main, [run, "--step", "7"], "one has no checkpoint of step 7, but of 6, 12"),
        (sample.main, [step_of(run, 6), "--step", "6"], "is one checkpoint: give its run"),
        (sample.main, [run, "--tokens", "0"], "--tokens 0: must be at least 1"),
        (sample.main, [run, "--top-p", "2"], "--top-p 2.0: must be above 0"),
        (sample.main, [run, "--tokenizer", "none.json"], "tokenizer none.json does not exist"),
        (sample.main, [tmp_path / "torn"], "torn is whole: python scripts/checkpoint.py list"),
        (sample.main, [damaged], "contents changed; choose another --step"),
        (sample.main, [run, "--device", "cuda"], "--device cuda: torch sees no GPU here"),
        (evaluate.main, [run, tmp_path / "x.txt"], "x.txt does not exist; expected .jsonl"),
        (evaluate.main, [run, tmp_path / "text.txt", "--batch", "-1"], "--batch -1: must be"),
        (evaluate.main, [run, tmp_path / "text.txt", "--json", tmp_path / "x/y"], "no folder"),
        (evaluate.main, [run, tmp_path / "text.txt", "--json", tmp_path], "is a folder: name a"),
        (evaluate.main, [run, "s3://bucket/x.txt"], "is an address; evaluate copies"),
        (sample.main, [run, "--seed", "-1"], "--seed -1: must be a number from 0"),
        (sample.main, [run, "--batch", "0"], "--batch 0: must be at least 1"),
        (sample.main, [run, "--stop", ""], "--stop: an empty text is everywhere"),
        (sample.main, [run, "--top-k", "3"], "--top-k 3: needs a --temperature above 0"),
        (sample.main, [run, "--chat"], "has a chat template: give --tokenizer FOLDER with one"),
    ):
        output = command(main, *given)
        assert output.code == 2 and why in output.err and not output.out, output
        (line,) = output.err.splitlines()[-1:]
        assert line.startswith(("sample: ", "evaluate: ")) and "Traceback" not in output.err


def test_a_model_that_is_no_number_has_no_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = qwen3(tmp_path / "theirs", vocab_size=256)
    name = "model.layers.1.self_attn.o_proj.weight"

    def read(self: SourceFolder, asked: str, rows: tuple[int, int]) -> torch.Tensor:
        return self._values(asked, *rows) * (math.nan if asked == name else 1)

    with monkeypatch.context() as m:  # as an import of before let it pass
        m.setattr(SourceFolder, "read", read)
        assert convert_hf.main(["import", str(folder), str(tmp_path / "step")]) == 0
    (tmp_path / "text.txt").write_text("text")
    tokens = ["--tokenizer", "bytes", "--context", "8"]
    for main, more in (
        (sample.main, ["--prompt", "x"]),
        (sample.main, ["--prompt", "x", "--temperature", "1"]),
        (evaluate.main, [tmp_path / "text.txt", "--json", tmp_path / "out.json"]),
    ):
        output = command(main, tmp_path / "step", *more, *tokens)
        assert output.code == 2 and "nan" not in output.out, output
        line = output.err.splitlines()[-1]
        assert "step has weights that are NaN or infinite, such as decoder.layers.1.self_" in line
        assert line.endswith(": choose an earlier checkpoint")
    assert not (tmp_path / "out.json").exists()


def test_special_tokens_are_text_in_files_and_tokens_in_prompts(tmp_path: Path) -> None:
    folder = qwen3(tmp_path / "theirs", vocab_size=312)
    assert convert_hf.main(["import", str(folder), str(tmp_path / "step")]) == 0
    llama().save(str(tmp_path / "tokenizer.json"))
    given = [tmp_path / "step", "--tokenizer", tmp_path / "tokenizer.json", "--eod", "</s>"]
    given += ["--context", "32", "--tokens", "3", "--prompt", "a</s>b</s>"]
    outputs = {}
    for choice in ("special", "plain"):
        told = f"-- special tokens in the prompt, taken as {choice}: 2 '</s>'"
        outputs[choice] = command(sample.main, *given, "--special-text", choice)
        assert outputs[choice].code == 0 and told in outputs[choice].err.splitlines()
    default = command(sample.main, *given)
    assert default.out == outputs["special"].out != outputs["plain"].out
    refused = command(sample.main, *given, "--special-text", "error")
    assert refused.code == 2 and "sample: the special token '</s>' in the text at" in refused.err
    (tmp_path / "t.jsonl").write_text(json.dumps({"text": "a</s>b</s>"}))
    given = [tmp_path / "step", tmp_path / "t.jsonl", *given[1:7], "--json", tmp_path / "out.json"]
    tokens = {}
    for choice in ("special", "plain"):
        told = f"t.jsonl: special tokens spelled, taken as {choice}: 2 '</s>'\n"
        output = command(evaluate.main, *given, "--special-text", choice)
        assert output.code == 0 and told in output.err
        report = json.loads((tmp_path / "out.json").read_text())
        (scores,) = report["files"].values()
        tokens[choice] = scores["tokens"]
        assert report["special_text"] == choice
    codec = Codec(llama(), (2,))
    assert tokens == {"special": 5, "plain": len(codec.encode("a</s>b</s>")) + 1}
    assert command(evaluate.main, *given).err.count("taken as plain: 2 '</s>'") == 1
    refused = command(evaluate.main, *given, "--special-text", "error")
    assert refused.code == 2 and "t.jsonl:1: the special token '</s>' in the text" in refused.err


def test_numbers_of_a_score_are_json() -> None:
    actual = evaluate.content(Score(8000.0, 10, 3))
    assert actual["loss"] == 800.0 and actual["perplexity"] is None
    json.dumps(actual, allow_nan=False)


def _told_at_once(main: Callable[[Sequence[str]], int], argv: Sequence[str]) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(progress, "_EVERY", 0.0)
        return main(argv)


def test_progress_is_told_where_there_is_no_terminal(run: Path, tmp_path: Path) -> None:
    """A line for every long operation."""
    (tmp_path / "text.txt").write_text("text" * 100)
    output = command(partial(_told_at_once, evaluate.main), run, tmp_path / "text.txt")
    assert output.code == 0 and "\r" not in output.err and "\x1b" not in output.err
    first, *lines = output.err.splitlines()
    assert first.startswith(f"-- loading {run}")
    for what in ("verifying: 100%", "reading: 400B", "predicting: 100%"):
        assert any(line.startswith(what) for line in lines), (what, lines)
    quick = command(evaluate.main, run, tmp_path / "text.txt")
    assert quick.err == f"{first}\n", "nothing took ten seconds"
