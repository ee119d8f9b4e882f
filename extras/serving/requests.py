"""Requests of OpenAI's API, and its errors (https://platform.openai.com/docs/api-reference)."""

import json
import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


class BadRequest(ValueError):
    """A request that is not served.

    Args:
        message: one line.
        param: name of the field that is wrong, if it is one.
        code: OpenAI's name of the mistake, if it has one.
        status: of HTTP.
    """

    def __init__(
        self, message: str, param: str | None = None, code: str | None = None, status: int = 400
    ) -> None:
        super().__init__(message)
        self.param, self.code, self.status = param, code, status


def error_body(
    message: str, param: str | None = None, code: str | None = None, status: int = 400
) -> dict[str, Any]:
    """The body of an error's response."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    line = " ".join(message.split())
    return {"error": {"message": line, "type": kind, "param": param, "code": code}}


@dataclass(frozen=True)
class Wanted:
    """The contents of a request."""

    chat: bool
    prompts: tuple[str | tuple[int, ...], ...]  # texts or ids; empty for a chat
    messages: tuple[dict[str, Any], ...]
    count: int | None  # most tokens; None: as many as the context has
    temperature: float
    top_p: float
    top_k: int
    seed: int
    choices: int  # texts of each prompt
    stops: tuple[str, ...]
    stream: bool
    usage: bool  # the last event of a stream says how many tokens there were
    logprobs: int | None  # most likely tokens beside each; None: no probabilities


_MOST_LOGPROBS = 20
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "best_of": (None, 1),
    "echo": (None, False),
    "suffix": (None, ""),
    "logit_bias": (None, {}),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "tools": (None, []),
    "functions": (None, []),
    "response_format": (None, {"type": "text"}),
}
"""Fields that would change a text and are not served, with the values that change nothing."""


def parsed(body: bytes, *, chat: bool, model: str) -> Wanted:
    """The request in a body.

    Raises BadRequest if it is none, or of another `model`.
    """
    try:
        fields = json.loads(body)
        json.dumps(fields, ensure_ascii=False).encode()  # no surrogate that stands alone
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is no JSON of text: {error}") from None
    if not isinstance(fields, dict):
        raise BadRequest("the body is no JSON object")
    asked = fields.get("model")
    if asked is not None and asked != model:
        missing = f"the model {asked!r} does not exist; this server has {model!r}"
        raise BadRequest(missing, "model", "model_not_found", 404)
    for name, neutral in _NEUTRAL.items():
        if fields.get(name) not in neutral:
            raise BadRequest(f"{name} is not supported: leave it out", name)
    f = _Fields(fields)
    options = f.take("stream_options", dict, {})
    newer = "max_completion_tokens"
    most = newer if fields.get(newer) is not None else "max_tokens"
    count = f.number(most, int, None if chat else 16, least=1)
    temperature = f.number("temperature", float, 1.0, least=0, most=1e6)
    seed = f.number("seed", int, secrets.randbits(62), least=0, most=(1 << 63) - 1)
    return Wanted(
        chat=chat,
        prompts=() if chat else _prompts(f),
        messages=_messages(f) if chat else (),
        count=count,
        temperature=temperature,
        # Greedy choice is of one token, whatever the others are.
        top_p=f.number("top_p", float, 1.0, least=1e-9, most=1) if temperature else 1.0,
        top_k=f.number("top_k", int, 0, least=0) if temperature else 0,
        seed=seed,
        choices=f.number("n", int, 1, least=1),
        stops=_stops(f),
        stream=f.take("stream", bool, False),
        usage=options.get("include_usage") is True,
        logprobs=_logprobs(f, chat),
    )


class _Fields:
    """Fields of a request, read with their types; null is as good as none."""

    def __init__(self, fields: dict[str, Any]) -> None:
        self._fields = fields

    def take(self, name: str, kind: type, default: Any) -> Any:
        value = self._fields.get(name)
        if value is None:
            return default
        if not isinstance(value, kind):
            what = {bool: "true or false", dict: "an object", list: "a list"}[kind]
            raise BadRequest(f"{name} is {_shown(value)}; expected {what}", name)
        return value

    def number(
        self, name: str, kind: type, default: Any, *, least: float, most: float = math.inf
    ) -> Any:
        value = self._fields.get(name)
        if value is None:
            return default
        whole = kind is int
        fits = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
        if not (fits and least <= value <= most):
            what = "a whole number" if whole else "a number"
            upper = "" if most == math.inf else f" to {most:g}"
            raise BadRequest(
                f"{name} is {_shown(value)}; expected {what} from {least:g}{upper}", name
            )
        return kind(value)

    def get(self, name: str) -> Any:
        return self._fields.get(name)


def _prompts(f: _Fields) -> tuple[str | tuple[int, ...], ...]:
    prompt = f.get("prompt")
    if isinstance(prompt, str) or _is_ids(prompt):
        prompt = [prompt]
    if not (
        isinstance(prompt, list)
        and prompt
        and all(isinstance(p, str) or _is_ids(p) for p in prompt)
    ):
        what = "a text, a list of texts, or token ids"
        raise BadRequest(f"prompt is {_shown(prompt)}; expected {what}", "prompt")
    return tuple(p if isinstance(p, str) else tuple(p) for p in prompt)


def _is_ids(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(i, int) and not isinstance(i, bool) for i in value)
    )


def _messages(f: _Fields) -> tuple[dict[str, Any], ...]:
    messages = f.take("messages", list, [])
    if not messages:
        raise BadRequest("messages is empty; expected what was said so far", "messages")
    return tuple(_message(m, f"messages[{number}]") for number, m in enumerate(messages))


def _message(message: Any, where: str) -> dict[str, Any]:
    if not (isinstance(message, dict) and isinstance(message.get("role"), str)):
        raise BadRequest(f"{where} is no object with role and content", where)
    content = message.get("content")
    if isinstance(content, list):  # parts, of which texts are read
        parts = [p["text"] for p in content if isinstance(p, dict) and type(p.get("text")) is str]
        if len(parts) < len(content):
            raise BadRequest(f"{where}.content has parts that are no text", f"{where}.content")
        content = "".join(parts)
    if not isinstance(content, str):
        raise BadRequest(f"{where}.content is {_shown(content)}; expected a text", where)
    return message | {"content": content}


def _stops(f: _Fields) -> tuple[str, ...]:
    stop = f.get("stop")
    stops = [stop] if isinstance(stop, str) else [] if stop is None else stop
    if not (isinstance(stops, list) and all(isinstance(s, str) and s for s in stops)):
        raise BadRequest(f"stop is {_shown(stop)}; expected a text or several, not empty", "stop")
    return tuple(stops)


def _logprobs(f: _Fields, chat: bool) -> int | None:
    if not chat:
        return f.number("logprobs", int, None, least=0, most=_MOST_LOGPROBS)  # type: ignore[no-any-return]
    top = f.number("top_logprobs", int, 0, least=0, most=_MOST_LOGPROBS)
    return top if f.take("logprobs", bool, False) else None


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:40]}..."
