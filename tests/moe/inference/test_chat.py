"""Chat templates of tokenizers, as prompts use them."""

import json
from pathlib import Path

from phalanx.moe.inference.chat import chat_of

TEMPLATE = """\
{%- for message in messages %}
{{- "<" + message.role + ">" }}
{%- if message.role == "assistant" %}{% generation %}{{ message.content }}{% endgeneration %}
{%- else %}{{ message.content }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ "<assistant>" }}{% endif %}"""
CHAT = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


def test_a_template_of_training_serves_prompts(tmp_path: Path) -> None:
    """`{% generation %}` marks what counts in a loss, and the default is that of several."""
    several = [{"name": "tools", "template": "x"}, {"name": "default", "template": TEMPLATE}]
    for chosen in (TEMPLATE, several):
        settings = {"chat_template": chosen, "eos_token": "<end>"}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
        chat = chat_of(str(tmp_path), None)
        assert chat is not None
        assert chat.text(CHAT) == "<user>a<assistant>b<assistant>"
