"""Text generation, token by token; the model reads the full context for each new token.

Legend: V vocabulary.
"""

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class Sampler:
    """Chooses a token by its logits.

    Raises:
        ValueError: a temperature, share or seed out of range.
    """

    temperature: float = 0.0  # divides the logits; 0 takes the most likely token
    top_p: float = 1.0
    """Total probability of the most likely tokens, from which one is drawn (nucleus sampling,
    arXiv 1904.09751)."""
    seed: int = 0
    _random: torch.Generator = field(default_factory=torch.Generator, repr=False)

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"--temperature {self.temperature}: must be 0 (greedy) or above")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"--top-p {self.top_p}: must be above 0 and at most 1")
        if self.top_p < 1 and not self.temperature:
            raise ValueError(f"--top-p {self.top_p}: needs a --temperature above 0, such as 1")
        if not 0 <= self.seed < 1 << 63:
            raise ValueError(f"--seed {self.seed}: must be a number from 0 to 2^63 - 1")
        self._random.manual_seed(self.seed)

    def __call__(self, logits_V: Tensor) -> int:
        """The chosen token; logits are fp32 [V], on any device."""
        if not self.temperature:
            return int(logits_V.argmax())
        below_V = logits_V.double() - logits_V.max()  # the largest is 0 at any temperature
        prob_V, order_V = (below_V / self.temperature).softmax(-1).sort(descending=True)
        # The token that crosses the limit belongs to the nucleus.
        prob_V = prob_V.where(prob_V.cumsum(-1) - prob_V < self.top_p, 0).cpu()
        return int(order_V[torch.multinomial(prob_V, 1, generator=self._random)[0]])


def generate(
    next_token: Callable[[list[int]], int],
    prompt: Sequence[int],
    count: int,
    *,
    context: int,
    ends: Collection[int] = (),
) -> Iterator[int]:
    """At most `count` tokens after a prompt, each as soon as it is known.

    Args:
        next_token: chooses the token after its argument.
        prompt: at least one token.
        count: maximum number of new tokens.
        context: maximum number of last tokens that `next_token` receives.
        ends: tokens that end a text; they are not yielded.
    """
    ids = list(prompt)
    for _ in range(count):
        token = next_token(ids[-context:])
        if token in ends:
            return
        ids.append(token)
        yield token
