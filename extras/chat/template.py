"""Chat templates of training data: which parts of a text an assistant writes."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from phalanx.moe.data.host_cache import DataError
from phalanx.moe.data.tokenizer.chat_template import (
    Message,
    Renderer,
    Span,
    TemplateFault,
    find_template,
)


class RefusedChat(ValueError):
    """A conversation that gives no row; the message says why, without its place."""


class ChatTemplate(Renderer):
    """A chat template that also says which parts of a text count in a loss.

    Raises DataError for a text that is no template, RefusedChat for a conversation that it refuses.
    """

    def __init__(self, text: str, tokens: dict[str, str]) -> None:
        try:
            super().__init__(text, tokens)
        except TemplateFault as error:
            raise DataError(f"--chat-template cannot be read: {error}") from None

    def render(
        self, messages: Sequence[Message], tools: Any = None, *, prompt: bool = False
    ) -> tuple[str, list[Span]]:
        """As `Renderer`; raises RefusedChat."""
        try:
            return super().render(messages, tools, prompt=prompt)
        except TemplateFault as error:
            raise RefusedChat(f"the template refuses it: {error}") from None

    def answers(
        self, messages: Sequence[Message], tools: Any = None, end: str = ""
    ) -> tuple[str, list[Span]]:
        """Text of a conversation, and the parts of it that count in a loss.

        They are those that the template marks by `{% generation %}`. Without such marks they are
        turns of the assistant: from the end of what asks for it (`add_generation_prompt`) through
        the first `end`, the token that ends a turn.

        Raises:
            RefusedChat: the template raises an error, no turn of an assistant is in it, a turn does
                not end with `end` (with marks none does), or is written otherwise when others
                follow.
        """
        turns = [i for i, message in enumerate(messages) if message.get("role") == "assistant"]
        if not turns:
            raise RefusedChat("no turn of the assistant")
        text, spans = self.render(messages, tools)
        if self.marks:
            if spans and end not in text[spans[0][0] :]:
                raise RefusedChat(f"the template ends no turn with --eod {end}: give its own")
            return text, spans
        for i in turns:
            before, _ = self.render(messages[:i], tools, prompt=True)
            through, _ = self.render(messages[: i + 1], tools)
            if not (through.startswith(before) and text.startswith(through)):
                raise RefusedChat(
                    f"the template writes message {i + 1} otherwise when others follow; mark what "
                    "counts by {% generation %} in it"
                )
            at = through.find(end, len(before)) if end else -1
            if at < 0:
                raise RefusedChat(f"the template does not end message {i + 1} with --eod {end}")
            spans.append((len(before), at + len(end)))
        return text, spans


def read_template(path: str, tokenizer: str) -> tuple[str, dict[str, str]]:
    """Text of a chat template, and the special tokens that it may name.

    Args:
        path: jinja file; empty for the template beside the tokenizer.
        tokenizer: path of tokenizer.json, beside which tokenizer_config.json names the tokens.

    Raises:
        DataError: there is no template, or it is none.
    """
    file = Path(path) if path else None
    text, known = find_template(file, Path(tokenizer).parent, "--chat-template")
    if text is None:
        raise DataError(
            f"there is no chat template beside {tokenizer}: give --chat-template FILE, a jinja file"
        )
    ChatTemplate(text, known)  # its errors
    return text, known
