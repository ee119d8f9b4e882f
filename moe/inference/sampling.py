"""Which token follows: the most likely, or one that is drawn."""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class Sampler:
    """Chooses a token by its logits; a ValueError if temperature, share or seed is out of range."""

    temperature: float = 0.0  # divides the logits; 0 takes the most likely token
    top_p: float = 1.0
    """Total probability of the tokens that are drawn from (nucleus sampling, arXiv 1904.09751)."""
    seed: int = 0
    top_k: int = 0  # tokens that are drawn from; 0 is no limit
    _random: torch.Generator = field(default_factory=torch.Generator, repr=False)

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"--temperature {self.temperature}: must be 0 (greedy) or above")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"--top-p {self.top_p}: must be above 0 and at most 1")
        if self.top_p < 1 and not self.temperature:
            raise ValueError(f"--top-p {self.top_p}: needs a --temperature above 0, such as 1")
        if self.top_k < 0:
            raise ValueError(f"--top-k {self.top_k}: must be 0 (no limit) or above")
        if self.top_k and not self.temperature:
            raise ValueError(f"--top-k {self.top_k}: needs a --temperature above 0, such as 1")
        if not 0 <= self.seed < 1 << 63:
            raise ValueError(f"--seed {self.seed}: must be a number from 0 to 2^63 - 1")
        self._random.manual_seed(self.seed)

    def __call__(self, logits_V: Tensor) -> int:
        """The chosen token; logits are fp32 [V], on any device."""
        if not self.temperature:
            return int(logits_V.argmax())
        below_V = logits_V.double() - logits_V.max()  # the largest is 0 at any temperature
        prob_V, order_V = (below_V / self.temperature).softmax(-1).sort(descending=True)
        if self.top_k:
            prob_V, order_V = prob_V[: self.top_k], order_V[: self.top_k]
            prob_V = prob_V / prob_V.sum()
        # The token that crosses the limit belongs to the nucleus.
        prob_V = prob_V.where(prob_V.cumsum(-1) - prob_V < self.top_p, 0).cpu()
        return int(order_V[torch.multinomial(prob_V, 1, generator=self._random)[0]])
