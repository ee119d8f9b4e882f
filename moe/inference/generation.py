"""Text of a model: a batch of prompts goes on token by token, as long as each wants.

Legend: B sequences, V vocabulary.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from phalanx.moe.data.tokenizer.codec import Codec
from phalanx.moe.inference.text import TextStream

if TYPE_CHECKING:
    from phalanx.moe.inference.predictor import Predictor


@dataclass(frozen=True)
class NextToken:
    """A token that was chosen for a sequence."""

    row: int  # of the sequence, counted from 0
    token: int
    logits_V: Tensor  # from which it was chosen, fp32 on the device
    ends: bool  # it ends the text, and is no part of it
    last: bool  # the sequence is as long as it may be


class Batch:
    """Sequences that begin with prompts; iterate over their tokens once.

    Each token is yielded as soon as it is chosen. A sequence ends after `count` tokens, with a
    token of `ends`, or when `stop` is called for it. The model sees at most the last `context`
    tokens. Where a text grows beyond them all positions move, so that every further token takes a
    forward pass of all.

    Args:
        prompts: at least one token each.
        choose: for each sequence, the choice of a token by its logits, fp32 [V].
        count: most tokens of a sequence.
        context: most tokens that the model sees.
        ends: tokens that end a text.
        cache: keep keys and values; without, every token takes a forward pass of all.
    """

    def __init__(
        self,
        predictor: "Predictor",
        prompts: Sequence[Sequence[int]],
        choose: Sequence[Callable[[Tensor], int]],
        count: int,
        *,
        context: int,
        ends: Collection[int] = (),
        cache: bool = True,
    ) -> None:
        self._predictor, self._choose, self._count = predictor, choose, count
        self._ids = [list(prompt) for prompt in prompts]
        self._context, self._ends, self._cache = context, ends, cache
        self._going = set(range(len(prompts)))

    def stop(self, row: int) -> None:
        """End a sequence."""
        self._going.discard(row)

    def __iter__(self) -> Iterator[NextToken]:
        ids, context, predictor = self._ids, self._context, self._predictor
        seen = [row[-context:] for row in ids]
        capacity = min(context, max(map(len, seen)) + self._count)
        logits_BV = predictor.decoder.read(seen, capacity) if self._cache else None
        for made in range(1, self._count + 1):
            for row in sorted(self._going):
                if logits_BV is None or (len(ids[row]) > context and made > 1):
                    logits_V = predictor.next_logits(torch.tensor([ids[row][-context:]]))
                else:
                    logits_V = logits_BV[row]
                token = self._choose[row](logits_V)
                ends, last = token in self._ends, made == self._count
                ids[row].append(token)
                if ends or last:
                    self.stop(row)
                yield NextToken(row, token, logits_V, ends, last)
            within = [row for row in self._going if len(ids[row]) <= context]
            if self._cache and within:
                # Other sequences are computed too, and not looked at.
                positions = [min(len(row) + made, capacity) - 1 for row in seen]
                logits_BV = predictor.decoder.next([row[-1] for row in ids], positions)


@dataclass(frozen=True)
class Piece:
    """The part of a text that a token adds."""

    new: NextToken
    text: str
    """Empty while a character is not complete, or a stop string may have begun."""
    finish: Literal["stop", "length"] | None  # why the text ends here


def texts(
    batch: Batch, codec: Codec, prompts: Sequence[Sequence[int]], stops: Sequence[str] = ()
) -> Iterator[Piece]:
    """The texts of a batch, each up to an end, a stop string or its last token."""
    streams = [TextStream(codec, prompt, stops) for prompt in prompts]
    for new in batch:
        stream = streams[new.row]
        text = "" if new.ends else stream.add(new.token)
        stop = new.ends or stream.stopped
        if stop or new.last:
            batch.stop(new.row)
            text += stream.end()
        finish: Literal["stop", "length"] | None = None
        if stop or stream.stopped:
            finish = "stop"
        elif new.last:
            finish = "length"
        yield Piece(new, text, finish)
