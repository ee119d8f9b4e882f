"""Chat templates: text of conversations, by the rules of transformers' `apply_chat_template`.

They are Jinja, rendered in jinja2's immutable sandbox with trimmed blocks, `{% generation %}`, loop
controls, `raise_exception`, `strftime_now` and a `tojson` that keeps characters
(https://huggingface.co/docs/transformers/chat_templating). transformers itself takes seconds to
import.
"""

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, cast

import jinja2
import jinja2.ext
from jinja2 import meta, nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from phalanx.moe.data.documents import chat_template_beside
from phalanx.moe.data.host_cache import DataError
from phalanx.moe.data.tokenizer.special_tokens import json_object, prefixes

Message = dict[str, Any]
Span = tuple[int, int]
"""First character and end of a part of a text."""

_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_REASONING = ("reasoning_content", "thinking", "reasoning")


class TemplateFault(ValueError):
    """A text that is no template, or a conversation that it refuses; the message is one line."""

    def __init__(self, error: Exception) -> None:
        super().__init__(" ".join(str(error).split()))


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


class Renderer:
    """A chat template, compiled once; for one thread.

    Args:
        text: of the template.
        tokens: `bos_token`, `eos_token` and so on, as the template names them.

    Raises:
        TemplateFault: the text is no template.
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
            named = meta.find_undeclared_variables(self._environment.parse(text))
        except jinja2.TemplateError as error:
            raise TemplateFault(error) from None
        self.unknown = sorted(n for n in named if n.endswith("_token") and n not in tokens)
        """Special tokens that the template names and nobody defines: their text is empty."""

    def render(
        self, messages: Sequence[Message], tools: Any = None, *, prompt: bool = False
    ) -> tuple[str, list[Span]]:
        """Text of a conversation, and the parts that the template marks by `{% generation %}`.

        Args:
            messages: each with `role` and `content`.
            tools: schemas of functions, as JSON objects.
            prompt: end with what begins an answer (`add_generation_prompt`).

        Raises:
            TemplateFault: the template raises an error.
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
            raise TemplateFault(error) from None
        return "".join(blocks), list(spans)


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


def template_of_data(data: Mapping[str, Any]) -> Path | None:
    """The chat template that is kept next to a run's data section, that of the first source."""
    files = map(chat_template_beside, prefixes(data))
    return next((file for file in files if file.is_file()), None)


def find_template(
    file: Path | None, folder: Path | None, called: str = "chat template"
) -> tuple[str | None, dict[str, str]]:
    """Text of a chat template, or None, and the special tokens that it may name.

    Args:
        file: in place of the template beside the tokenizer.
        folder: of the tokenizer: chat_template.jinja is before tokenizer_config.json.
        called: what the template is called in an error.

    Raises:
        DataError: a file cannot be read.
    """
    settings = {} if folder is None else json_object(folder / "tokenizer_config.json")
    texts = {k: v.get("content") if isinstance(v, dict) else v for k, v in settings.items()}
    named = ((k, v) for k, v in texts.items() if k.endswith("_token") and isinstance(v, str))
    beside = None if folder is None else folder / "chat_template.jinja"
    chosen = file or (beside if beside is not None and beside.is_file() else None)
    if chosen is None:
        own = settings.get("chat_template")
        if isinstance(own, list):  # several, by name
            own = {each.get("name"): each.get("template") for each in own}.get("default")
        return own if isinstance(own, str) else None, dict(named)
    try:
        return chosen.read_text("utf-8"), dict(named)
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise DataError(f"{called} {chosen} cannot be read: {why}") from None
