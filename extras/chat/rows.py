"""Supervised rows of JSON records: ids, and which of them count in a loss.

`messages` become what `apply_chat_template` of transformers makes of them, with nothing added; what
counts is said in `ChatTemplate.answers`. Of a pair the prompt and the answer are encoded apart, so
that a prompt has the ids that it has when a model is asked, and the answer and the token that ends
it count.

Legend: N tokens of a row.
"""

import json
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np

from phalanx.extras.chat.template import ChatTemplate, RefusedChat
from phalanx.moe.data.documents import Supervised, Tokenization
from phalanx.moe.data.tokenizer.chat_template import Message
from phalanx.moe.data.tokenizer.encoder import SPECIAL, encoder_of, load_tokenizer

Row = tuple[np.ndarray, np.ndarray]
"""Ids, unsigned integers [N], and tokens that count, bool [N]."""
ANSWERS = ("completion", "response", "answer")
"""Keys of the answer of a pair, as TRL and Axolotl have them; the first that a record has."""


class RowEncoder:
    """Conversion of records, JSON objects as text, to rows.

    Args:
        recipe: tokenizer, end token and treatment of special tokens.
        chosen: kind of rows, and their length.
    """

    def __init__(self, recipe: Tokenization, chosen: Supervised) -> None:
        self._recipe, self._chosen = recipe, chosen
        self._encoder = encoder_of(recipe.tokenizer, (recipe.eod,), recipe.special_text)
        self.row = lru_cache(maxsize=1)(self._row)
        """The row of a record. Raises RefusedChat."""
        if chosen.rows == "messages":
            self._tokenizer = load_tokenizer(recipe.tokenizer)
            self._end = str(self._tokenizer.id_to_token(recipe.eod))
            self._template = ChatTemplate(chosen.template, chosen.tokens)

    def refused(self, record: str) -> tuple[str, str] | None:
        """Kind of fault and its place if a record gives no row."""
        try:
            self.row(record)
        except RefusedChat as error:
            reason, _, detail = str(error).partition(": ")
            return reason, f": {detail}" if detail else ""
        return None

    def _row(self, record: str) -> Row:
        fields = json.loads(record)
        make = self._of_messages if self._chosen.rows == "messages" else self._of_pair
        ids, counted = make(fields)
        counted[:1] = False  # nothing of its row predicts it
        if not counted.any():
            raise RefusedChat("no token counts")
        if (ids[counted] == self._recipe.eod).all():  # a model would learn to say nothing
            raise RefusedChat("no token of an answer counts but the one that ends it")
        return ids, counted

    def _of_messages(self, fields: dict[str, Any]) -> Row:
        messages = fields.get("messages")
        if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
            raise RefusedChat(f"no list 'messages': the row has {', '.join(fields) or 'no keys'}")
        for number, message in enumerate(messages, 1):
            if not isinstance(message.get("role"), str):
                raise RefusedChat(f"message {number} has no role")
        if self._recipe.special_text != SPECIAL:
            self._check_plain(messages)
        text, spans = self._template.answers(messages, fields.get("tools"), self._end)
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        counted = np.zeros(len(encoding.ids), bool)
        for first, end in spans:
            start, last = encoding.char_to_token(first), encoding.char_to_token(end - 1)
            if start is not None and first < end:
                counted[start : len(counted) if last is None else last + 1] = True
        return np.array(encoding.ids, np.uint32), counted

    def _check_plain(self, messages: list[Message]) -> None:
        """Refuse special tokens that messages spell: the text of a template has others."""
        for text in _texts(messages):
            if found := self._encoder.spelled(text):
                raise RefusedChat(
                    f"the special token {found[0][0]!r} in a message: --special-text special "
                    "makes it a token"
                )

    def _of_pair(self, fields: dict[str, Any]) -> Row:
        key = next((key for key in ANSWERS if key in fields), ANSWERS[0])
        asked, answer = fields.get("prompt"), fields.get(key)
        if not isinstance(asked, str) or not isinstance(answer, str):
            keys = ", ".join(fields) or "no keys"
            raise RefusedChat(f"no texts 'prompt' and '{key}': the row has {keys}")
        for text in (asked, answer):
            if fault := self._encoder.refused(text):
                raise RefusedChat("".join(fault))
        before, said = self._encoder.encode([asked, answer])
        ids = np.concatenate([before, said, [self._recipe.eod]]).astype(np.uint32)
        return ids, np.arange(len(ids)) >= len(before)


def _texts(part: Any) -> Iterator[str]:
    if isinstance(part, str):
        yield part
    for each in part.values() if isinstance(part, dict) else part if isinstance(part, list) else ():
        yield from _texts(each)
