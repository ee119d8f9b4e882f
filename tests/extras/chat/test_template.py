"""Templates are rendered as transformers renders them, and what counts in a loss is defined."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from phalanx.extras.chat.rows import RowEncoder
from phalanx.extras.chat.template import ChatTemplate, RefusedChat, read_template
from phalanx.moe.data.documents import Supervised, Tokenization
from phalanx.moe.data.host_cache import DataError
from phalanx.moe.data.text_rows import Reading
from tests.extras.chat.chats import CHATS, END, MARKED, PLAIN, chat, write_tokenizer

CHAT = Path(__file__).resolve().parents[3] / "extras/chat/chat.jinja"
EDGES = """\
{%- macro shown(text) %}[{{ text }}]{% endmacro -%}
{{ bos_token }}{% if tools %}{{ tools | tojson(indent=2) }}{% endif %}
{% set ns = namespace(last=-1) %}
{% for m in messages %}
    {% if m.role == 'tool' %}{% continue %}{% endif %}
    {% set ns.last = loop.index0 %}
    {% if m.reasoning_content is defined %}<think>{{ m.reasoning_content }}</think>{% endif %}
    {{ m | tojson }} {{ shown(m.content) }}{{ '"<&>"' | tojson }}
    {% if loop.index > 3 %}{% break %}{% endif %}
{% endfor %}
{{ ns.last }} {{ dict(a=1) | tojson }}{% if add_generation_prompt %}>{% endif %}
"""
"""A template with the parts of jinja2 that published ones use."""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def fast(tokenizer: str) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_file=tokenizer, bos_token="<|endoftext|>", eos_token=END
    )


def encoder(tokenizer: str, template: str, end: str = END) -> RowEncoder:
    eod = Tokenizer.from_file(tokenizer).token_to_id(end)
    chosen = Supervised("messages", 4096, "drop", template)
    recipe = Tokenization(tokenizer, eod, "uint16", Reading(), "plain", chosen)
    return RowEncoder(recipe, chosen)


TOOLS = [{"type": "function", "function": {"name": "add", "description": 'a < b & "c"'}}]
THOUGHTS = [
    {"role": "user", "content": "1 + 1", "extra": [1, 2.5, None, True]},
    {"role": "tool", "content": "2"},
    {"role": "assistant", "content": "2", "thinking": "easy"},
    {"role": "user", "content": "ü\n"},
    {"role": "assistant", "content": "3", "reasoning": "hard"},
]


@pytest.mark.parametrize("messages", [*CHATS, THOUGHTS])
@pytest.mark.parametrize("text", [PLAIN, MARKED, EDGES], ids=["plain", "marked", "edges"])
@pytest.mark.parametrize("prompt", [False, True])
def test_text_is_that_of_transformers(
    fast: Any, text: str, messages: list[dict[str, Any]], prompt: bool
) -> None:
    template = ChatTemplate(text, {"bos_token": "<|endoftext|>", "eos_token": END})
    for tools in (None, TOOLS):
        expected = fast.apply_chat_template(
            messages, tools, chat_template=text, tokenize=False, add_generation_prompt=prompt
        )
        assert template.render(messages, tools, prompt=prompt)[0] == expected


@pytest.mark.parametrize("messages", CHATS)
@pytest.mark.parametrize("text", [PLAIN, MARKED], ids=["plain", "marked"])
def test_ids_and_marks_are_those_of_transformers(
    fast: Any, tokenizer: str, text: str, messages: list[dict[str, Any]]
) -> None:
    expected = fast.apply_chat_template(
        messages,
        chat_template=text,
        return_dict=True,
        return_assistant_tokens_mask=text == MARKED,
    )
    ids, counted = encoder(tokenizer, text).row(json.dumps({"messages": messages}))
    assert ids.tolist() == expected["input_ids"]
    if text == MARKED:
        assert counted.astype(int).tolist() == expected["assistant_masks"]
    # What counts is what the assistant says and the token that ends its turn, nothing else.
    said = [m["content"].strip() if text == MARKED else m["content"] for m in messages]
    answers = [t + END for m, t in zip(messages, said, strict=True) if m["role"] == "assistant"]
    decoded = Tokenizer.from_file(tokenizer).decode(ids[counted].tolist(), False)
    assert decoded == "".join(answers)


def test_what_a_template_cannot_do_is_refused() -> None:
    def refusal(text: str, messages: list[dict[str, Any]]) -> str:
        with pytest.raises(RefusedChat) as error:
            ChatTemplate(text, {}).answers(messages, end=END)
        return str(error.value)

    one, two = chat("a", "b"), chat("a", "b", "c", "d")
    assert refusal(PLAIN, one[:1]) == "no turn of the assistant"
    assert refusal("{{ raise_exception('only one system message') }}", one) == (
        "the template refuses it: only one system message"
    )
    assert refusal("{{ messages[9].content.x() }}", one).startswith("the template refuses it: ")
    assert refusal(PLAIN.replace(END, "!"), one) == (
        "the template does not end message 2 with --eod <|end|>"
    )
    # As templates do that leave the thoughts of earlier turns out.
    last = PLAIN.replace("['content'] }}", "['content'] if loop.last or message.role == 'user' }}")
    assert refusal(last, two).startswith(
        "the template writes message 2 otherwise when others follow; mark what counts by "
    )
    assert ChatTemplate(last, {}).answers(one, end=END)[1]
    with pytest.raises(RefusedChat, match="unsafe"):
        ChatTemplate("{{ messages.__class__.__mro__ }}", {}).render(one)
    with pytest.raises(RefusedChat):
        ChatTemplate("{{ messages.append(1) }}", {}).render(one)


def test_templates_are_found(tmp_path: Path) -> None:
    tokenizer = write_tokenizer(tmp_path)
    with pytest.raises(DataError, match="there is no chat template beside .*tokenizer.json: give"):
        read_template("", tokenizer)
    settings = tmp_path / "tokenizer_config.json"
    settings.write_text('{"chat_template": "one{{ eos_token }}", "eos_token": {"content": "<e>"}}')
    assert read_template("", tokenizer) == ("one{{ eos_token }}", {"eos_token": "<e>"})
    settings.write_text('{"chat_template": [{"name": "default", "template": "two"}]}')
    assert read_template("", tokenizer) == ("two", {})
    (tmp_path / "chat_template.jinja").write_text("three")
    assert read_template("", tokenizer)[0] == "three"
    (tmp_path / "own.jinja").write_text("{% for %}")
    with pytest.raises(DataError, match="--chat-template cannot be read: "):
        read_template(str(tmp_path / "own.jinja"), tokenizer)
    with pytest.raises(DataError, match="--chat-template .*none.jinja cannot be read: "):
        read_template(str(tmp_path / "none.jinja"), tokenizer)


@pytest.mark.parametrize("content", [None, 5, [{"type": "text", "text": "b"}]])
def test_the_plain_template_writes_texts_alone(content: Any) -> None:
    """Jinja would write None, or a list as Python spells it, and the model would learn that."""
    template = ChatTemplate(CHAT.read_text(), {})
    text, _ = template.answers(chat("a", "b", "c"))
    assert text == "<|user|>\na<|end|>\n<|assistant|>\nb<|end|>\n<|user|>\nc<|end|>\n"
    for messages in (
        [*chat("a"), {"role": "assistant", "content": content}],
        [*chat("a"), {"role": "assistant"}],
    ):
        with pytest.raises(RefusedChat, match="message 2 has no text as its content"):
            template.answers(messages)


def test_a_marked_turn_ends_with_the_token_that_ends_texts() -> None:
    """Else samples, which end at that token, would go on behind an answer."""
    template = ChatTemplate(MARKED, {})
    assert template.answers(CHATS[0], end=END) == template.answers(CHATS[0])
    with pytest.raises(RefusedChat, match=r"ends no turn with --eod <\|endoftext\|>"):
        template.answers(CHATS[0], end="<|endoftext|>")
