"""Prompts of chats, by the template of a tokenizer."""

from collections.abc import Sequence
from pathlib import Path

from phalanx.moe.data.host_cache import DataError
from phalanx.moe.data.tokenizer.chat_template import (
    Message,
    Renderer,
    TemplateFault,
    find_template,
)


class Chat:
    """A chat template with the special tokens that it names; a DataError if it is none."""

    def __init__(self, template: str, tokens: dict[str, str]) -> None:
        try:
            self._template = Renderer(template, tokens)
        except TemplateFault as error:
            raise DataError(f"the chat template is no Jinja: {error}") from None

    def text(self, messages: Sequence[Message]) -> str:
        """The text of a chat up to where the assistant speaks.

        Raises:
            DataError: the template does not take the messages.
        """
        try:
            return self._template.render(messages, prompt=True)[0]
        except TemplateFault as error:
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
    file = Path(template).expanduser() if template else None
    text, tokens = find_template(file, folder)
    return None if text is None else Chat(text, tokens)
