"""A tokenizer, templates and chats for the tests of supervised rows."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from phalanx.scripts import prepare_data

SPECIAL = ["<|endoftext|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
END = "<|end|>"

PLAIN = """\
{%- for message in messages -%}
<|{{ message['role'] }}|>
{{ message['content'] }}<|end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|assistant|>
{% endif -%}
"""
"""In the style of ChatML."""

MARKED = """\
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}
<|assistant|>
{% generation %}{{ message.content | trim }}<|end|>{% endgeneration %}

{% else -%}
<|{{ message.role }}|>
{{ message.content }}<|end|>
{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>
{% endif -%}
"""
"""The same with marks of what an assistant writes."""


def chat(*turns: str, system: str = "") -> list[dict[str, Any]]:
    """Messages of a user and an assistant in turn."""
    said = [{"role": "system", "content": system}] if system else []
    return [
        *said,
        *({"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(turns)),
    ]


CHATS = [
    chat("What is 1 + 1?", "Two."),
    chat("Hello", "Hi!", "  And in Chinese?", "你好 🙂\n", system="Be <short> & kind."),
    chat("a", "b " * 20, "c", "", "d", "\n\nindented"),
]


def write_tokenizer(folder: Path) -> str:
    """A byte-level BPE with the special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=[AddedToken(token, special=True) for token in SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [message["content"] for messages in CHATS for message in messages]
    tokenizer.train_from_iterator(texts * 5, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    return str(folder / "tokenizer.json")


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    text = "".join(json.dumps(row) + "\n" for row in rows)
    if not path.is_file() or path.read_text() != text:  # its time is part of a preparation
        path.write_text(text)
    return path


def prepare(folder: Path, name: str, rows: Sequence[dict[str, Any]], *options: object) -> str:
    """Prefix of rows that prepare_data.py writes; they are chats unless options say otherwise."""
    tokenizer = folder / "tokenizer/tokenizer.json"
    given = [write_rows(folder / f"{name}.jsonl", rows), "--output", folder / name, *options]
    if "--tokenizer" not in options:
        given += [
            "--tokenizer",
            tokenizer if tokenizer.is_file() else write_tokenizer(folder / "tokenizer"),
        ]
    defaults = {"--workers": 1, "--sequence-length": 64, "--eod": END, "--rows": "messages"}
    for option, value in defaults.items():
        given += [] if option in options else [option, value]
    if not {"pairs", "--chat-template"} & set(map(str, options)):
        (folder / "chat.jinja").write_text(PLAIN)
        given += ["--chat-template", folder / "chat.jinja"]
    assert prepare_data.main(list(map(str, given))) == 0
    return str(folder / name)
