"""Chat templates of tokenizers and of a run's data, as prompts use them."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models

from phalanx.moe.data.tokenizer.codec import Codec
from phalanx.moe.inference.chat import chat_of

TEMPLATE = """\
{%- for message in messages %}
{{- "<" + message.role + ">" }}
{%- if message.role == "assistant" %}{% generation %}{{ message.content }}{% endgeneration %}
{%- else %}{{ message.content }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ "<assistant>" }}{% endif %}"""
CHAT = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
BYTES = Codec(None, (0,))
WORDS = Codec(Tokenizer(models.WordLevel({"<a>": 0, "<end>": 1}, "<a>")), (1,))


def test_a_template_of_training_serves_prompts(tmp_path: Path) -> None:
    """`{% generation %}` marks what counts in a loss, and the default is that of several."""
    several = [{"name": "tools", "template": "x"}, {"name": "default", "template": TEMPLATE}]
    for chosen in (TEMPLATE, several):
        settings = {"chat_template": chosen, "eos_token": "<end>"}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
        chat = chat_of(str(tmp_path), None, {}, BYTES)
        assert chat is not None
        assert chat.text(CHAT) == "<user>a<assistant>b<assistant>"


def test_the_template_of_the_data_comes_last(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its `eos_token` is that of the data; one that nobody knows is empty, with a warning."""
    blend = ["0.5", str(tmp_path / "a"), "0.5", str(tmp_path / "b")]
    common = {"config": {"data": {"source": "indexed", "blend": blend}}}
    assert chat_of(None, None, common, WORDS) is None
    (tmp_path / "b.chat_template.jinja").write_text("{{ bos_token }}data{{ eos_token }}")
    chat = chat_of(None, None, common, WORDS)
    assert chat is not None and chat.text(CHAT) == "data<end>"
    assert "b.chat_template.jinja names bos_token, which the data does not have" in caplog.text
    caplog.clear()
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    (folder / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": "</s>"}')
    chat = chat_of(str(folder), None, common, WORDS)
    assert chat is not None and chat.text(CHAT) == "<s>data</s>"
    assert not caplog.text
    (folder / "chat_template.jinja").write_text("tokenizer")
    (tmp_path / "own.jinja").write_text("own")
    for file, want in ((None, "tokenizer"), (str(tmp_path / "own.jinja"), "own")):
        chat = chat_of(str(folder), file, common, WORDS)
        assert chat is not None and chat.text(CHAT) == want
