"""Prompts of chats, by the template of a tokenizer or of a run's data."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from phalanx.moe.data.host_cache import DataError
from phalanx.moe.data.tokenizer.chat_template import (
    Message,
    Renderer,
    TemplateFault,
    find_template,
    template_of_data,
)
from phalanx.moe.data.tokenizer.codec import Codec

log = logging.getLogger(__name__)


class Chat:
    """A chat template with the special tokens that it names; a DataError if it is none."""

    def __init__(self, template: str, tokens: dict[str, str]) -> None:
        try:
            self._template = Renderer(template, tokens)
        except TemplateFault as error:
            raise DataError(f"the chat template is no Jinja: {error}") from None

    @property
    def unknown(self) -> list[str]:
        """Special tokens that the template names and that are not known."""
        return self._template.unknown

    def text(self, messages: Sequence[Message]) -> str:
        """The text of a chat up to where the assistant speaks.

        Raises:
            DataError: the template does not take the messages.
        """
        try:
            return self._template.render(messages, prompt=True)[0]
        except TemplateFault as error:
            raise DataError(f"the chat template does not take the messages: {error}") from None


def chat_of(
    tokenizer: str | None, template: str | None, common: Mapping[str, Any], codec: Codec
) -> Chat | None:
    """The chat template of a tokenizer or else of a run's data, or None if neither has one.

    Args:
        tokenizer: a tokenizer.json or its folder, or `bytes`; None is that of the data.
        template: file in place of both.
        common: of the checkpoint, for its configuration of the data.
        codec: tokenizer of the model, whose first end is the `eos_token` by default.

    Raises:
        DataError: a file cannot be read.
    """
    path = Path(tokenizer).expanduser() if tokenizer else None
    folder = path if path is None or path.is_dir() else path.parent
    file = Path(template).expanduser() if template else None
    text, tokens = find_template(file, folder)
    if codec.tokenizer is not None and codec.ends:
        end = codec.tokenizer.id_to_token(codec.ends[0])
        tokens = tokens if end is None else {"eos_token": end} | tokens
    if text is not None:
        return Chat(text, tokens)
    if (kept := template_of_data(common.get("config", {}).get("data", {}))) is None:
        return None
    chat = Chat(str(find_template(kept, None)[0]), tokens)
    if chat.unknown:
        log.warning(
            "%s names %s, which the data does not have: empty, unless --tokenizer FOLDER defines "
            "it in tokenizer_config.json",
            kept,
            ", ".join(chat.unknown),
        )
    return chat
