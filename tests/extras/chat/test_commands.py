"""The commands of docs/chat.md with a tiny model: from a corpus to answers of a chat model."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from phalanx.extras.serving.program import _Opener
from phalanx.scripts import convert_hf, evaluate, prepare_data, sample, serve, train_tokenizer
from phalanx.scripts.lab.corpus import make_questions
from tests.support.runs import SMALL, records, run
from tests.support.tiny_runs import command, step_of

pytestmark = pytest.mark.dist

TEMPLATE = Path(__file__).resolve().parents[3] / "extras/chat/chat.jinja"
GLOSSES = {
    "entity": "that which exists",
    "thing": "a separate object",
    "cause": "what makes things happen",
    "person": "a human being",
    "act": "something that people do",
    "river": "a stream of water",
}
"""The corpus, in the form of WordNet's files."""
SPECIAL = ["<|endoftext|>", "<|user|>", "<|assistant|>", "<|end|>"]


def called(main: Any, *argv: object) -> str:
    """Output of a command that must end well."""
    result = command(main, *argv)
    assert result.code == 0, result.err
    return result.out


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pretrained model, and one that answers questions."""
    folder = tmp_path_factory.mktemp("chat")
    lines = [
        f"0000{number:04} 03 n 01 {word} 0 003 ~ 00001930 n 0000 | {gloss}; as it is said"
        for number, (word, gloss) in enumerate(GLOSSES.items())
    ]
    rows = [{"text": "\n".join(lines), "domain": "english"} for _ in range(20)]
    corpus = folder / "train.jsonl"
    corpus.write_text("".join(json.dumps(row) + "\n" for row in rows))
    specials = [word for token in SPECIAL for word in ("--special", token)]
    tokenizer = folder / "tokenizer/tokenizer.json"
    size = ["--size", 300]
    assert train_tokenizer.main([*map(str, [corpus, *size, *specials, "--output", tokenizer])]) == 0
    by = ["--tokenizer", tokenizer, "--workers", 1]

    def prepared(name: str, *given: object) -> None:
        words = [*given, *by, "--output", folder / name]
        assert prepare_data.main([str(word) for word in words]) == 0

    prepared("text", corpus, "--eod", "<|endoftext|>")
    questions = folder / "questions.jsonl"
    assert make_questions.main([str(corpus), "--output", str(questions)]) == 0
    chats = ["--rows", "messages", "--chat-template", TEMPLATE, "--sequence-length", 64]
    prepared("chats", questions, *chats, "--eod", "<|end|>")
    train(folder, "base", "text", "run.steps=10")
    newest = folder / "base/checkpoints/step_00000010"
    supervised = ["run.steps=100", "data.document_mask=true", f"run.resume={newest}"]
    out = train(folder, "chat", "chats", *supervised)
    assert re.search(r"changed since the checkpoint: .*data\.blend \S+ -> ", out)
    assert re.search(r"\n  labels  tokens that count in the loss: \d\d\.\d% of chats\n", out)
    return folder


def train(folder: Path, name: str, data: str, *more: str) -> str:
    small = [text for text in SMALL if not text.startswith("model.vocab_size")]
    given = [*small, "model=tiny", "model.attention.head_dim=8", "precision=fp32", *more]
    given += ["data=indexed", f"data.blend=[{folder / data}]", f"data.cache={folder}/cache"]
    given += ["data.split=1", "data.sequence_length=64", "optim.decay_steps=100"]
    given += [f"run.dir={folder}", f"run.name={name}", "run.log_interval=1"]
    main, *_ = run(1, given)
    assert main.code == 0, main.err
    return main.out + main.err


def asked(word: str) -> str:
    return f'What does "{word}" mean?'


def test_a_pretrained_model_learns_to_answer(folder: Path) -> None:
    losses = [record for record in records(folder / "chat") if "loss" in record]
    assert losses[0]["loss"] > 1 and losses[-1]["loss"] < 0.05
    assert all(0 < record["labels"] < 8 * 64 / 2 for record in losses)
    given = [word for known in GLOSSES for word in ("--prompt", asked(known))]
    result = command(sample.main, folder / "chat", "--chat", *given, "--tokens", 24)
    assert result.code == 0 and "special tokens in the prompt" not in result.err, result.err
    for word, gloss in GLOSSES.items():
        assert f"\n{asked(word)}\n{gloss}\n" in result.out, result.out


def test_a_prompt_may_spell_the_template(folder: Path) -> None:
    """Its special tokens are tokens, and answers are those of --chat."""
    prompt = f"<|user|>\n{asked('river')}<|end|>\n<|assistant|>\n"
    out = called(sample.main, folder / "chat", "--prompt", prompt, "--tokens", 24)
    assert out.removeprefix(prompt).removesuffix("<|end|>\n").strip() == GLOSSES["river"]
    refused = command(sample.main, folder / "base", "--chat", "--prompt", asked("river"))
    assert refused.code == 2
    assert "neither the tokenizer nor the run's data has a chat template: give" in refused.err


def served(argv: Sequence[str]) -> int:
    """Print a chat as `serve.py` gives it to the model."""
    with _Opener(serve.parser().parse_args(argv))(Path(argv[0])) as model:
        assert model.chat is not None
        print(model.chat.text([{"role": "user", "content": "a"}]), end="")
    return 0


def test_a_server_finds_the_template(folder: Path) -> None:
    newest = step_of(folder / "chat", 100)
    assert called(served, newest, "--device", "cpu") == "<|user|>\na<|end|>\n<|assistant|>\n"


def test_questions_are_not_learned(folder: Path) -> None:
    """The tokens that the loss mask leaves out stay unlikely."""
    texts = folder / "texts.jsonl"
    rows = [
        f"<|user|>\n{asked(word)}<|end|>\n<|assistant|>\n{gloss}<|end|>\n"
        for word, gloss in GLOSSES.items()
    ]
    texts.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    scores = folder / "scores.json"
    whole = ["--special-text", "special", "--json", scores]
    called(evaluate.main, folder / "chat", folder / "chats", texts, *whole)
    by_file = json.loads(scores.read_text())["files"]
    answers, all_tokens = (by_file[str(folder / name)] for name in ("chats", "texts.jsonl"))
    assert answers["loss"] < 0.05 and all_tokens["loss"] > 2


def test_an_export_answers_in_transformers(folder: Path) -> None:
    exported = folder / "exported"
    out = called(convert_hf.main, "export", folder / "chat", exported)
    assert "with its chat template" in out
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(exported)
    model = AutoModelForCausalLM.from_pretrained(exported)
    assert tokenizer.eos_token == "<|end|>"
    for word, gloss in GLOSSES.items():
        messages = [{"role": "user", "content": asked(word)}]
        given = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
        ids = model.generate(**given, max_new_tokens=24, do_sample=False)
        said = tokenizer.decode(ids[0, given["input_ids"].shape[1] :])
        assert said == f"{gloss}<|end|>"
