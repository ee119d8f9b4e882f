"""Tokens of prompts, and text of new tokens as they come: whole characters, up to a stop string."""

from collections.abc import Sequence

from phalanx.moe.data.tokenizer.codec import Codec

_BEFORE = 16  # tokens that are decoded with new ones, for decoders that join tokens


def started(codec: Codec, prompt: str, *, alone: bool) -> list[int]:
    """Ids of a prompt, preceded by an end-of-document token if one is known.

    `alone`: in training no document attends to the one before it. Raises ValueError without any
    token.
    """
    ids = [*codec.ends[: 0 if alone else 1], *codec.encode(prompt)]
    if not ids and alone:
        raise ValueError("with data.document_mask nothing predicts a first token: give --prompt")
    if not ids:
        raise ValueError("nothing tells which token begins a document: give --prompt or --eod")
    return ids


class TextStream:
    """The text of a sequence.

    A character is given when all of its bytes are known, and a text that may be the start of a stop
    string when it turns out not to be. The stop string is not given.

    Args:
        before: ids of the prompt, whose text is not given.
        stops: strings that end the text; none is empty.
    """

    def __init__(self, codec: Codec, before: Sequence[int], stops: Sequence[str] = ()) -> None:
        self._codec, self._stops = codec, stops
        self._before, self._new = list(before)[-_BEFORE:], list[int]()
        self._held = ""
        self.stopped = False

    def add(self, token: int) -> str:
        """Text that is certain with one more token."""
        self._new.append(token)
        text = self._codec.continuation(self._before, self._new)
        if text.endswith("\ufffd"):  # bytes of a character that may go on
            return ""
        return self._release(text)

    def end(self) -> str:
        """The rest of the text, after the last token."""
        if self.stopped:
            return ""
        text = self._release(self._codec.continuation(self._before, self._new))
        held, self._held = self._held, ""
        return text + held

    def _release(self, text: str) -> str:
        self._before, self._new = [*self._before, *self._new][-_BEFORE:], []
        text = self._held + text
        found = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """Number of last characters of the text with which the stop string begins."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
