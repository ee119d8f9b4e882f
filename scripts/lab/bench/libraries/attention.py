"""Core attention of the published models: flash-attn-4 against the other backends that can run it.

Layouts are the trainer's: q, k and v [S, B, heads, channels], output
[S, B, H * v]. `TE` is what `kernels.attention=te` runs; with sinks, cuDNN with our sink
gradient. Passes run in CUDA graphs; `host` is the host time of an eager call.

Legend: S positions, B batch, H query heads, G key-value heads, d channels of query and key, v of
value.
"""

import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from phalanx.kernels.core_attention import core, sinks
from phalanx.scripts.lab.bench.libraries.compared import Operation, Row, compare
from phalanx.scripts.lab.bench.libraries.libraries import Sizes, drawn
from phalanx.scripts.lab.bench.timing import Bench, reason

_CALLS = 30


class Layer(NamedTuple):
    """An attention layer."""

    B: int
    H: int
    G: int
    d: int
    v: int
    window: int = 0
    sinks: bool = False


LAYERS = {
    "Qwen3": Layer(2, 32, 4, 128, 128),
    "GPT-OSS full": Layer(2, 64, 8, 64, 64, sinks=True),
    "GPT-OSS window": Layer(2, 64, 8, 64, 64, window=128, sinks=True),
    "Moonlight": Layer(2, 16, 16, 192, 128),
    "DeepSeek-V3": Layer(1, 128, 128, 192, 128),
}


def attention(bench: Bench, sizes: Sizes) -> Iterator[list[Row]]:
    """Every layer against every library."""
    for model, layer in LAYERS.items():
        case = _Case(layer, sizes.positions, bench.clock.device)
        operation = f"attention, {model}, {sizes.positions} x {layer.B}"
        for library, make in case.libraries().items():
            yield compare(bench, operation, library, case.ours, make)
            yield [_host(bench, operation, library, case.ours, make)]
        del case
        bench.clock.free()


class _Case:
    def __init__(self, layer: Layer, S: int, device: torch.device) -> None:
        B, H, G, d, v, *_ = self.layer = layer
        shapes = ((S, B, H, d), (S, B, G, d), (S, B, G, v))
        self.tensors = [drawn(*s, device=device, seed=n) for n, s in enumerate(shapes)]
        if layer.sinks:
            self.tensors.append(drawn(H, device=device, seed=3))
        self.dout = drawn(S, B, H * v, device=device, seed=4)

    def libraries(self) -> dict[str, Callable[[], Operation]]:
        """Libraries that can run this layer, with the function that builds each side."""
        builders = {"TE": self.te, "FlexAttention": lambda: self._by("flex")}
        if not self.layer.window and not self.layer.sinks:
            builders["PyTorch SDPA"] = lambda: self._by("sdpa")
        return builders

    def ours(self) -> Operation:
        return self._by("fa4")

    def te(self) -> Operation:
        layer = self.layer
        scale, window = layer.d**-0.5, min(layer.window, len(self.dout))
        if layer.sinks:
            return self._of(lambda *x: sinks.attention(*x, scale=scale, window=window).flatten(2))
        from transformer_engine.pytorch import DotProductAttention

        return self._of(
            DotProductAttention(
                layer.H,
                (layer.d, layer.v),
                num_gqa_groups=layer.G,
                attention_dropout=0.0,
                attn_mask_type="causal",
                qkv_format="sbhd",
                softmax_scale=scale,
            )
        )

    def _by(self, backend: str) -> Operation:
        layer = self.layer

        def call(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None = None) -> Tensor:
            o_BHSv = core.attention(
                *(x.permute(1, 2, 0, 3) for x in (q, k, v)),
                scale=layer.d**-0.5,
                window=layer.window,
                sinks_H=sink,
                backend=backend,
            )
            return o_BHSv.permute(2, 0, 1, 3).flatten(2).contiguous()

        return self._of(call)

    def _of(self, call: Callable[..., Tensor]) -> Operation:
        leaves = [t.clone().requires_grad_() for t in self.tensors]
        return Operation(lambda: [call(*leaves)], leaves, [self.dout])


def _host(
    bench: Bench,
    operation: str,
    library: str,
    make_ours: Callable[[], Operation],
    make_theirs: Callable[[], Operation],
) -> Row:
    times: list[float | None] = []
    notes = []
    for make in (make_ours, make_theirs):
        try:
            times.append(_host_ms(bench, make().both))
        except Exception as error:
            times.append(None)
            notes.append(reason(error))
    ours, theirs = times
    return Row(operation, library, "host", ours, theirs, None, "; ".join(notes))


def _host_ms(bench: Bench, call: Callable[[], object]) -> float:
    """Median host milliseconds of a call that does not synchronize."""
    for _ in range(3):
        call()
    taken = []
    for _ in range(_CALLS):
        bench.clock.wait()
        begin = time.perf_counter()
        call()
        taken.append(time.perf_counter() - begin)
    bench.clock.wait()
    return sorted(taken)[len(taken) // 2] * 1e3
