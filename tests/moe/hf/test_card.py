"""An export that others load: text by transformers, and a card with what is on record."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from phalanx.moe.versions import code
from phalanx.scripts import convert_hf, prepare_data, sample
from tests.scripts.test_convert_hf import qwen3
from tests.support.tiny_runs import command, step_of, train

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on two corpora of bytes, with checkpoints of steps 3 and 6 and validations."""
    folder = tmp_path_factory.mktemp("runs")
    for name in ("a", "b"):
        rows = [json.dumps({"text": f"{name} text {n} " * 20}) + "\n" for n in range(40)]
        (folder / f"{name}.jsonl").write_text("".join(rows))
        given = [str(folder / f"{name}.jsonl"), "--output", str(folder / name), "--bytes"]
        assert prepare_data.main([*given, "--workers", "1"]) == 0
    return train(
        folder,
        "one",
        1,
        *("run.steps=6", "run.save_interval=3", "data=indexed"),
        *("run.eval_interval=2", "run.eval_batches=1", "data.split='80,20'"),
        f"data.blend=[3,{folder}/a,1,{folder}/b]",
    )


def export(*words: Any) -> None:
    assert convert_hf.main(["export", *map(str, words)]) == 0


def table(text: str, title: str) -> dict[str, list[str]]:
    """Rows of a table of a card, by their first cells."""
    section = text.split(f"## {title}\n")[1].split("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("|")]
    return {row[0]: row[1:] for row in rows[2:]}


def test_transformers_goes_on_as_sample_does(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    export(run, out, "--shard-size", "40KB", "--dtype", "fp32")
    shards = sorted(out.glob("*.safetensors"))
    held = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(shards) > 3 and {file.name for file in shards} == set(held.values())
    assert max(file.stat().st_size for file in shards) < 50_000
    tokenizer = AutoTokenizer.from_pretrained(out)
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    assert GenerationConfig.from_pretrained(out).eos_token_id == tokenizer.eos_token_id == 0
    prompt = "a text 3 "
    ids = torch.tensor([[0, *tokenizer(prompt).input_ids]])
    new = model.generate(ids, max_new_tokens=24, do_sample=False, pad_token_id=0)[0, ids.size(1) :]
    said = command(sample.main, run, "--prompt", prompt, "--tokens", "24", "--context", "64")
    assert said.code == 0 and said.out == f"{prompt}{tokenizer.decode(new)}\n"


def test_a_card_has_what_is_on_record(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    export(step_of(run, 3), out)
    text = (out / "README.md").read_text()
    _, front, body = text.split("---\n", 2)
    assert yaml.safe_load(front) == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["phalanx", "mixtral", "mixture-of-experts"],
    }
    assert body.startswith("\n# one\n")
    model, training = table(text, "Model"), table(text, "Training")
    stored = AutoModelForCausalLM.from_pretrained(out)
    assert model["parameters"] == [f"{sum(p.numel() for p in stored.parameters()):,}"]
    assert model["experts"] == ["8, of which a token uses 2"]
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if "loss" in record and record.get("step", 9) <= 3]
    assert training["step"] == ["3"] and training["tokens"] == [f"{steps[-1]['tokens']:,}"]
    mean = sum(record["loss"] for record in steps) / 3
    assert training["training loss, mean of 3 steps"] == [f"{mean:.4f}"]
    (valid,) = (r for r in records if "valid_loss" in r and r.get("step") == 2)
    assert training["validation loss after step 2"] == [f"{valid['valid_loss']:.4f}"]
    assert training["layout"] == ["1 rank"] and training["precision"] == ["fp32"]
    made = table(text, "Made with")
    assert made["torch"] == [torch.__version__]
    assert made.get("commit of Phalanx", [code()[0]])[0].startswith(code()[0])
    data = table(text, "Data")
    assert data.keys() == {"a", "b"} and "| data | tokens | share | documents | token" in text
    tokens, share, documents, tokenizer, digest = data["a"]
    assert (share, documents, tokenizer) == ("75.0%", "40", "bytes") and len(digest) > 16
    described = json.loads((run.parent / "a.json").read_text())
    assert tokens == f"{described['tokens']:,}" and data["b"][-1] != digest
    assert "unknown" not in text and "None" not in text


def test_what_is_not_known_has_no_row(run: Path, tmp_path: Path) -> None:
    """A checkpoint without its run and its data; and an imported model, that nobody trained."""
    moved, hidden = tmp_path / "step", tmp_path / "hidden"
    shutil.copytree(step_of(run, 6), moved)
    hidden.mkdir()
    kept = list(run.parent.glob("[ab].*"))
    for file in kept:
        file.rename(hidden / file.name)
    try:
        export(moved, tmp_path / "out")
    finally:
        for file in kept:
            (hidden / file.name).rename(file)
    text = (tmp_path / "out" / "README.md").read_text()
    assert "\n# tiny\n" in text and "| step | 6 |" in text and "Made with" not in text
    assert table(text, "Data") == {"a": ["75.0%"], "b": ["25.0%"]}
    assert "valid" not in text
    folder = qwen3(tmp_path / "theirs")
    assert convert_hf.main(["import", str(folder), str(tmp_path / "imported")]) == 0
    export(tmp_path / "imported", tmp_path / "back")
    text = (tmp_path / "back" / "README.md").read_text()
    assert "## Model" in text and "## Training" not in text and "## Data" not in text


def test_a_chat_template_of_ones_own(run: Path, tmp_path: Path) -> None:
    template = tmp_path / "mine.jinja"
    template.write_text("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}")
    export(run, tmp_path / "out", "--chat-template", template)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    said = [{"role": "user", "content": "hi"}]
    text = tokenizer.apply_chat_template(said, tokenize=False)
    assert text == "<user>hi"
    given = [run, "--tokenizer", tmp_path / "out", "--prompt", "hi", "--chat", "--tokens", "1"]
    ours = command(sample.main, *given)
    assert ours.code == 2 and "is not that of the data" in ours.err
    ours = command(sample.main, run, "--chat-template", template, *given[3:])
    plain = command(sample.main, run, "--prompt", "<user>hi", "--tokens", "1", "--no-stop")
    assert ours.code == plain.code == 0 and ours.out.startswith("hi")
    missing = tmp_path / "none"
    words = ["export", str(run), str(tmp_path / "other"), "--chat-template", str(missing)]
    assert convert_hf.main(words) == 1 and not (tmp_path / "other").exists()


@pytest.mark.parametrize("size", ["0", "5TB", "many", "-1GB"])
def test_a_size_that_is_none(size: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        convert_hf.main(["export", "run", "out", f"--shard-size={size}"])
    assert "expected a size, such as 500MB or 5GB" in capsys.readouterr().err
