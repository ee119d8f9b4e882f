"""Responses of OpenAI's API, whole or in chunks."""

from collections.abc import Sequence
from typing import Any

from phalanx.extras.serving.engine import Part, Token
from phalanx.extras.serving.requests import Wanted


class Reply:
    """The response to a request.

    Args:
        identity: of the response.
        model: name of the model.
        created: seconds since 1970.
    """

    def __init__(self, identity: str, model: str, created: int, wanted: Wanted) -> None:
        self.wanted = wanted
        kind = "chat.completion" if wanted.chat else "text_completion"
        self._base = {"id": identity, "created": created, "model": model}
        self._whole = self._base | {"object": kind}
        self._chunk = self._base | {"object": f"{kind}.chunk" if wanted.chat else kind}
        self._offsets: dict[int, int] = {}

    def whole(self, parts: Sequence[Part], prompt_tokens: int, tokens: int) -> dict[str, Any]:
        """The response of all parts."""
        by_choice: dict[int, list[Part]] = {}
        for part in parts:
            by_choice.setdefault(part.choice, []).append(part)
        choices = []
        for number, own in sorted(by_choice.items()):
            text = "".join(part.text for part in own)
            spoken: dict[str, Any] = {"text": text}
            if self.wanted.chat:
                spoken = {"message": {"role": "assistant", "content": text, "refusal": None}}
            choices.append(self._choice(number, spoken, own, own[-1].finish))
        usage = {"usage": _usage(prompt_tokens, tokens)}
        return self._whole | {"choices": choices} | usage

    def opening(self) -> list[dict[str, Any]]:
        """Chunks before the first part: a chat says who speaks."""
        if not self.wanted.chat:
            return []
        delta = {"delta": {"role": "assistant", "content": ""}, "finish_reason": None}
        return [
            self._chunk | {"choices": [{"index": number, "logprobs": None, **delta}]}
            for number in range(self.wanted.choices)
        ]

    def chunk(self, part: Part) -> dict[str, Any] | None:
        """The chunk of a part, or None if it says nothing."""
        if not (part.text or part.token or part.finish):
            return None
        spoken: dict[str, Any] = {"text": part.text}
        if self.wanted.chat:
            spoken = {"delta": {"content": part.text} if part.text else {}}
        choice = self._choice(part.choice, spoken, [part], part.finish)
        return self._chunk | {"choices": [choice]}

    def usage_chunk(self, prompt_tokens: int, tokens: int) -> dict[str, Any]:
        return self._chunk | {"choices": [], "usage": _usage(prompt_tokens, tokens)}

    def _choice(
        self, number: int, spoken: dict[str, Any], parts: Sequence[Part], finish: str | None
    ) -> dict[str, Any]:
        tokens = [part.token for part in parts if part.token is not None]
        logprobs: dict[str, Any] | None = None
        if self.wanted.logprobs is not None and self.wanted.chat:
            logprobs = {"content": [_of_chat(token) for token in tokens], "refusal": None}
        elif self.wanted.logprobs is not None:
            logprobs = self._of_completion(number, tokens)
        return {"index": number, **spoken, "logprobs": logprobs, "finish_reason": finish}

    def _of_completion(self, number: int, tokens: Sequence[Token]) -> dict[str, Any]:
        offsets = []
        for token in tokens:
            offsets.append(self._offsets.get(number, 0))
            self._offsets[number] = offsets[-1] + len(token.text)
        return {
            "tokens": [token.text for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [dict(reversed(token.top)) for token in tokens],
            "text_offset": offsets,
        }


def _of_chat(token: Token) -> dict[str, Any]:
    return _entry(token.text, token.logprob) | {
        "top_logprobs": [_entry(text, logprob) for text, logprob in token.top]
    }


def _entry(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


def _usage(prompt_tokens: int, tokens: int) -> dict[str, int]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": tokens,
        "total_tokens": prompt_tokens + tokens,
    }
