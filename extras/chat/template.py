"""Chat templates: text of a conversation, and the parts of it that an assistant writes.

Templates are rendered by the rules of transformers' `apply_chat_template`: jinja2 in its immutable
sandbox, with trimmed blocks, `{% generation %}`, loop controls, `raise_exception`, `strftime_now`
and a `tojson` that keeps characters. transformers itself takes seconds to import in each worker.
"""

import json
import re
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, cast

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from phalanx.moe.data.host_cache import DataError
from phalanx.moe.data.tokenizer.special_tokens import json_object

Message = dict[str, Any]
Span = tuple[int, int]
"""First character and end of a part of a text."""

_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_REASONING = ("reasoning_content", "thinking", "reasoning")
_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")


class RefusedChat(ValueError):
    """A conversation that gives no row; the message says why, without its place."""


class _Generation(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}`: notes where its text is, in `spans`."""

    tags = {"generation"}  # noqa: RUF012  (as jinja2 declares it)

    def __init__(self, environment: jinja2.Environment) -> None:
        super().__init__(environment)
        environment.extend(blocks=[], spans=[])

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return nodes.CallBlock(self.call_method("_noted"), [], [], body).set_lineno(line)

    def _noted(self, caller: Any) -> str:
        text, environment = str(caller()), cast(Any, self.environment)
        start = len("".join(environment.blocks))
        environment.spans.append((start, start + len(text)))
        return text


class ChatTemplate:
    """A chat template, compiled once.

    Args:
        text: of the template.
        tokens: `bos_token`, `eos_token` and so on, as the template names them.

    Raises:
        DataError: the text is no template.
    """

    def __init__(self, text: str, tokens: dict[str, str]) -> None:
        self._tokens, self.marks = tokens, _GENERATION.search(text) is not None
        self._environment: Any = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
        )
        self._environment.filters["tojson"] = _tojson
        self._environment.globals |= {"raise_exception": _refuse, "strftime_now": _now}
        try:
            self._template = self._environment.from_string(text)
        except jinja2.TemplateError as error:
            raise DataError(f"--chat-template cannot be read: {error}") from None

    def render(
        self, messages: Sequence[Message], tools: Any = None, *, prompt: bool = False
    ) -> tuple[str, list[Span]]:
        """Text of a conversation, and the parts that the template marks by `{% generation %}`.

        Args:
            messages: each with `role` and `content`.
            tools: schemas of functions, as JSON objects.
            prompt: end with what begins an answer (`add_generation_prompt`).

        Raises:
            RefusedChat: the template raises an error.
        """
        blocks, spans = self._environment.blocks, self._environment.spans
        blocks.clear(), spans.clear()
        named = dict(messages=[_reasoned(m) for m in messages], tools=tools, documents=None)
        try:
            for block in self._template.generate(
                **named, add_generation_prompt=prompt, **self._tokens
            ):
                blocks.append(block)
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise RefusedChat(f"the template refuses it: {' '.join(str(error).split())}") from None
        return "".join(blocks), list(spans)

    def answers(
        self, messages: Sequence[Message], tools: Any = None, end: str = ""
    ) -> tuple[str, list[Span]]:
        """Text of a conversation, and the parts of it that count in a loss.

        They are those that the template marks by `{% generation %}`. Without such marks they are
        turns of the assistant: from the end of what asks for it (`add_generation_prompt`) through
        the first `end`, the token that ends a turn.

        Raises:
            RefusedChat: the template raises an error, no turn of an assistant is in it, a turn does
                not end with `end`, or is written otherwise when others follow.
        """
        turns = [i for i, message in enumerate(messages) if message.get("role") == "assistant"]
        if not turns:
            raise RefusedChat("no turn of the assistant")
        text, spans = self.render(messages, tools)
        if self.marks:
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


def _reasoned(message: Message) -> Message:
    """A message with its reasoning under the names that templates read, as transformers does it."""
    texts = (message[name] for name in _REASONING if message.get(name) is not None)
    if (text := next(texts, None)) is None:
        return message
    return {"thinking": text, **message, "reasoning_content": text}


def _tojson(
    x: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def read_template(path: str, tokenizer: str) -> tuple[str, dict[str, str]]:
    """Text of a chat template, and the special tokens that it may name.

    Args:
        path: jinja file; empty for the template beside the tokenizer.
        tokenizer: path of tokenizer.json, beside which tokenizer_config.json names the tokens.

    Raises:
        DataError: there is no template, or it is none.
    """
    folder = Path(tokenizer).parent
    settings = json_object(folder / "tokenizer_config.json")
    named = {name: settings.get(name) for name in _TOKENS}
    tokens = {k: v.get("content") if isinstance(v, dict) else v for k, v in named.items()}
    known = {k: v for k, v in tokens.items() if isinstance(v, str)}
    text = _text(Path(path) if path else folder / "chat_template.jinja", settings, bool(path))
    if text is None:
        raise DataError(
            f"there is no chat template beside {tokenizer}: give --chat-template FILE, a jinja file"
        )
    ChatTemplate(text, known)  # its errors
    return text, known


def _text(file: Path, settings: dict[str, Any], given: bool) -> str | None:
    try:
        return file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        if given:
            raise DataError(f"--chat-template {file} cannot be read: {error}") from None
    own = settings.get("chat_template")
    if isinstance(own, list):  # several, by name
        own = {each.get("name"): each.get("template") for each in own}.get("default")
    return own if isinstance(own, str) else None
