"""Chats as text, by the template of a tokenizer.

Templates are Jinja, rendered in a sandbox with what transformers offers them
(https://huggingface.co/docs/transformers/chat_templating).
"""

import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from phalanx.moe.data.host_cache import DataError

TEMPLATE = "chat_template.jinja"  # beside a tokenizer.json
SETTINGS = "tokenizer_config.json"


class Chat:
    """A chat template with the special tokens that it names.

    Args:
        tokens: texts of special tokens by name, as `bos_token`.
    """

    def __init__(self, template: str, tokens: dict[str, str]) -> None:
        from jinja2 import TemplateSyntaxError, ext
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        world = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[ext.loopcontrols]
        )
        world.filters["tojson"] = _to_json
        world.globals["raise_exception"] = _refuse
        world.globals["strftime_now"] = lambda how: datetime.now().strftime(how)
        try:
            self._template = world.from_string(template)
        except TemplateSyntaxError as error:
            raise DataError(f"the chat template is no Jinja: {error}") from None
        self._tokens = tokens

    def text(self, messages: Sequence[dict[str, Any]]) -> str:
        """The text of a chat up to where the assistant speaks.

        Args:
            messages: each with `role` and `content`.

        Raises:
            DataError: the template does not take them.
        """
        from jinja2 import TemplateError

        try:
            return self._template.render(
                messages=list(messages), add_generation_prompt=True, **self._tokens
            )
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            raise DataError(f"the chat template does not take the messages: {error}") from None


def chat_of(tokenizer: str | None, template: str | None) -> Chat | None:
    """The chat template of a tokenizer, or None if it has none.

    Args:
        tokenizer: a tokenizer.json or its folder, or `bytes`.
        template: file in place of that beside the tokenizer.

    Raises:
        DataError: a file cannot be read.
    """
    path = Path(tokenizer).expanduser() if tokenizer else None
    folder = path if path is None or path.is_dir() else path.parent
    settings = {}
    if folder is not None and (folder / SETTINGS).is_file():
        try:
            settings = json.loads((folder / SETTINGS).read_text())
        except (OSError, ValueError) as error:
            raise DataError(f"{folder / SETTINGS} cannot be read: {error}") from None
    file = Path(template).expanduser() if template else folder and folder / TEMPLATE
    if file is not None and (template or file.is_file()):
        try:
            source = file.read_text()
        except (OSError, UnicodeDecodeError) as error:
            why = getattr(error, "strerror", None) or error
            raise DataError(f"chat template {file} cannot be read: {why}") from None
    elif isinstance(settings.get("chat_template"), str):
        source = settings["chat_template"]
    else:
        return None
    return Chat(source, dict(_special_tokens(settings)))


def _special_tokens(settings: dict[str, Any]) -> list[tuple[str, str]]:
    found = []
    for name, value in settings.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            found.append((name, text))
    return found


def _to_json(value: Any, **options: Any) -> str:
    return json.dumps(value, **({"ensure_ascii": False} | options))


def _refuse(message: str) -> None:
    from jinja2 import TemplateError

    raise TemplateError(message)
