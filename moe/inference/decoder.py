"""A model that reads prompts once and then computes one token of each sequence at a time.

On a GPU a forward pass of one token is a few hundred small kernels, whose launches take the host
longer than the kernels take. So from the third token on it is replayed as one CUDA graph, which
holds as long as number and size of sequences stay.

Legend: B sequences, S tokens of the longest prompt, V vocabulary.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.configs.schema import ModelConfig
from phalanx.moe.inference.cache import NewTokens, new_tokens
from phalanx.moe.inference.cached_attention import install

_EAGER = 2  # tokens before the capture, in which kernels are compiled and buffers allocated
_STEP = 256  # a graph serves sequences of up to a multiple of it


class Decoder:
    """Sequences of a model, all in step; one batch at a time.

    Args:
        m: of the model.
        model: built and loaded; its attention layers get caches, which its other users do not
            notice.
        read: logits [B, S or more, V] of tokens [B, S], as without a cache.
        finite: fp32 of a tensor with a name; raises if a number is NaN or infinite.
        graphs: replay tokens as a CUDA graph.
    """

    def __init__(
        self,
        m: ModelConfig,
        model: nn.Module,
        read: Callable[[Tensor], Tensor],
        finite: Callable[[Tensor, str], Tensor],
        *,
        graphs: bool,
    ) -> None:
        self._model, self._read, self._finite, self.graphs = model, read, finite, graphs
        inner: Any = getattr(model, "module", model)
        self._reading = install(inner.decoder.layers, m)
        self._as_is = {"fp32_output": False} if inner is not model else {}
        self._device = next(model.parameters()).device
        self._capacity = self._longest = 0
        self._graph: _Graph | None = None

    def read(self, prompts: Sequence[Sequence[int]], capacity: int) -> Tensor:
        """Begin a batch of sequences with prompts; logits of the token after each, fp32 [B, V].

        `capacity` is the largest number of tokens that a sequence will have.
        """
        lengths = [len(prompt) for prompt in prompts]
        assert min(lengths) > 0 and max(lengths) <= capacity
        tokens_BS = torch.zeros(len(prompts), max(lengths), dtype=torch.int64)
        for row, prompt in enumerate(prompts):
            tokens_BS[row, : len(prompt)] = torch.tensor(prompt)
        if self.graphs:
            capacity += -capacity % _STEP
        length_B = torch.tensor(lengths, device=self._device)
        self._longest = max(lengths)
        if self._graph is not None and self._graph.shape != (len(prompts), capacity):
            self._graph = None  # its caches are replaced
        self._capacity, self._reading.capacity = capacity, capacity
        self._reading.length_B = length_B
        try:
            logits_BSV = self._read(tokens_BS)
        finally:
            self._reading.length_B = None
        last_BV = logits_BSV[torch.arange(len(prompts), device=self._device), length_B - 1]
        return self._finite(last_BV, "logits")

    def next(self, tokens: Sequence[int], positions: Sequence[int]) -> Tensor:
        """Logits of the token after a new one of each sequence, fp32 [B, V].

        Positions are counted from 0 and below the capacity. Each is the one behind the last of its
        sequence; what a sequence says after any other is undefined, and others do not notice.
        """
        token_B, position_B = (torch.tensor(x, device=self._device) for x in (tokens, positions))
        if not self.graphs:
            self._longest = max(self._longest, max(positions) + 1)
            new = new_tokens(position_B, self._capacity, filled=self._longest)
            return self._finite(self._forward(token_B, new), "logits")
        if self._graph is None:
            self._graph = _Graph(self._forward, len(tokens), self._capacity, self._device)
        return self._finite(self._graph(token_B, position_B), "logits")

    @torch.no_grad()
    def _forward(self, token_B: Tensor, new: NewTokens) -> Tensor:
        # One process never needs more expert rows than the tokens have: no budget is checked.
        logits_1BV: Tensor = self._model(
            token_B[None], new.position_T[None], None, packed_seq_params=new, **self._as_is
        )
        return logits_1BV[0]


class _Graph:
    """The forward pass of new tokens: eager at first, then captured."""

    def __init__(
        self,
        forward: Callable[[Tensor, NewTokens], Tensor],
        sequences: int,
        capacity: int,
        device: torch.device,
    ) -> None:
        self.shape = sequences, capacity
        self._forward = forward
        self._token_B = torch.zeros(sequences, dtype=torch.int64, device=device)
        self._new = new_tokens(torch.zeros_like(self._token_B), capacity)
        self._stream = torch.cuda.Stream(device)  # of the tokens before the capture
        self._eager, self._graph, self._logits_BV = _EAGER, torch.cuda.CUDAGraph(), self._token_B

    def __call__(self, token_B: Tensor, position_B: Tensor) -> Tensor:
        """Logits [B, V], which the next call overwrites."""
        self._token_B.copy_(token_B)
        self._new.position_T.copy_(position_B)
        if self._eager:
            self._eager -= 1
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                logits_BV = self._forward(self._token_B, self._new)
            torch.cuda.current_stream().wait_stream(self._stream)
            if not self._eager:
                torch.cuda.synchronize()
                with torch.cuda.graph(self._graph):
                    self._logits_BV = self._forward(self._token_B, self._new)
            return logits_BV
        self._graph.replay()
        return self._logits_BV
