"""Time and memory of sparse attention in torch, beside dense attention, for one layer.

    python -m phalanx.scripts.lab.bench.sparse_attention --lengths 8192 32768 131072
    python -m phalanx.scripts.lab.bench.sparse_attention --device cpu --lengths 512 1024 --heads 8

Sizes are those of DeepSeek-V3.2's attention, of one sequence without its projections; of GLM-5 with
`--model glm_5`. A line of JSON for each length and side: median milliseconds of the calls behind
the first, and the peak of memory above what is held before, in GiB. Sides:

    dense              causal attention to all keys, forward and backward, by `--backend`
    select             scores of all keys and the best of them; forward alone
    chosen             attention to the chosen keys, forward and backward
    loss               the indexer's loss over the chosen keys, with its gradients
    sparse             select, chosen and loss in turn
    warm-up            the indexer's loss over all keys, with its gradients
    tilelang           attention to the chosen keys by Megatron-Core, forward and backward; needs
                       the package tilelang and Hopper

Legend: S positions, H heads, d channels of query and key, v of value, r of the latent, c of a query
in absorbed form; J heads and e channels of the indexer, K chosen keys.
"""

import argparse
import importlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from phalanx.configs.load import load
from phalanx.extras.sparse_attention.attend import attend
from phalanx.extras.sparse_attention.loss import loss_of_chosen, loss_of_visible
from phalanx.extras.sparse_attention.options import understood
from phalanx.extras.sparse_attention.selection import Index, select
from phalanx.kernels.core_attention import core
from phalanx.scripts.lab.bench.timing import reason


class Layer:
    """Random inputs of one attention layer, [1, S, ...], made when they are asked for."""

    def __init__(self, args: argparse.Namespace, length: int) -> None:
        model = load([f"model={args.model}"]).model
        self.a, self.s, self.S = model.attention, understood(model.attention.sparse), length
        self.H, self.device = args.heads or self.a.heads, torch.device(args.device)
        self.dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        self.d = self.a.qk_nope_dim + self.a.qk_rope_dim
        self.scale, self.backend = self.d**-0.5, args.backend

    def drawn(self, *shape: int, grad: bool = True) -> Tensor:
        x = torch.empty(1, self.S, *shape, dtype=self.dtype, device=self.device)
        return x.normal_(generator=torch.Generator(self.device).manual_seed(1)).requires_grad_(grad)

    def index(self) -> Index:
        s = self.s
        return Index(self.drawn(s.heads, s.dim), self.drawn(s.dim), self.drawn(s.heads))

    def dense(self) -> Callable[[], Any]:
        q, k = self.drawn(self.H, self.d), self.drawn(self.H, self.d)
        v = self.drawn(self.H, self.a.v_dim)
        dout = self.drawn(self.H, self.a.v_dim, grad=False)

        def call() -> Any:
            heads = (x.transpose(1, 2) for x in (q, k, v))
            out = core.attention(*heads, scale=self.scale, backend=self.backend)
            return torch.autograd.grad(out, (q, k, v), dout.transpose(1, 2))

        return call

    def select(self) -> Callable[[], Any]:
        index = self.index()
        return lambda: select(index, None, top_k=self.s.top_k)

    def _absorbed(self) -> tuple[Tensor, Tensor, Tensor]:
        c = self.a.kv_lora_rank + self.a.qk_rope_dim
        dout = self.drawn(self.H, self.a.kv_lora_rank, grad=False)
        return self.drawn(self.H, c), self.drawn(c), dout

    def chosen(self) -> Callable[[], Any]:
        q, kv, dout = self._absorbed()
        keys = select(self.index(), None, top_k=self.s.top_k)

        def call() -> Any:
            out, _ = attend(q, kv, keys, scale=self.scale, values=self.a.kv_lora_rank)
            return torch.autograd.grad(out, (q, kv), dout)

        return call

    def loss(self) -> Callable[[], Any]:
        index = self.index()
        keys = select(index, None, top_k=self.s.top_k)
        target = torch.rand(keys.shape, device=self.device).masked_fill(keys < 0, 0)
        target /= target.sum(-1, keepdim=True)
        return lambda: torch.autograd.grad(loss_of_chosen(index, keys, target), tuple(index))

    def sparse(self) -> Callable[[], Any]:
        (q, kv, dout), index = self._absorbed(), self.index()

        def call() -> None:
            keys = select(index, None, top_k=self.s.top_k)
            out, p = attend(q, kv, keys, scale=self.scale, values=self.a.kv_lora_rank)
            loss = loss_of_chosen(index, keys, p)
            torch.autograd.grad(loss, tuple(index))
            torch.autograd.grad(out, (q, kv), dout)

        return call

    def warm_up(self) -> Callable[[], Any]:
        q, k, index = self.drawn(self.H, self.d), self.drawn(self.H, self.d), self.index()

        def call() -> Any:
            loss = loss_of_visible(index, q, k, None, scale=self.scale)
            return torch.autograd.grad(loss, tuple(index))

        return call

    def tilelang(self) -> Callable[[], Any]:
        importlib.import_module("tilelang")
        from megatron.core.transformer.experimental_attention_variant.ops import tilelang_dsa

        q, kv, dout = self._absorbed()
        keys = select(self.index(), None, top_k=self.s.top_k)
        rank = self.a.kv_lora_rank

        def call() -> Any:
            out = tilelang_dsa.run_fused_absorbed_sparse_attention(
                q.transpose(0, 1), kv.transpose(0, 1)[:, :, None], keys, self.scale, rank
            )
            if out is None:
                raise ValueError("the kernels do not take these sizes")
            return torch.autograd.grad(out, (q, kv), dout.transpose(0, 1).view_as(out))

        return call


SIDES = {
    "dense": Layer.dense,
    "select": Layer.select,
    "chosen": Layer.chosen,
    "loss": Layer.loss,
    "sparse": Layer.sparse,
    "warm-up": Layer.warm_up,
    "tilelang": Layer.tilelang,
}


def measured(make: Callable[[], Callable[[], Any]], device: torch.device, calls: int) -> Any:
    """Median and all times of the calls behind the first, and the memory that they take."""
    on_gpu, seconds = device.type == "cuda", list[float]()
    call = make()
    if on_gpu:
        torch.cuda.synchronize()
    held = torch.cuda.memory_allocated() if on_gpu else 0
    for number in range(1 + calls):
        if on_gpu and number == 1:
            torch.cuda.reset_peak_memory_stats()
        started = time.perf_counter()
        call()
        if on_gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    found = {"ms": round(1e3 * statistics.median(seconds[1:]), 3)}
    if on_gpu:
        found["gib"] = round((torch.cuda.max_memory_allocated() - held) / 2**30, 2)
    return found | {"all_ms": [round(1e3 * s, 3) for s in seconds[1:]]}


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default="deepseek_v32", help="option of configs/model")
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192, 32768, 131072])
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument(
        "--heads", type=int, default=0, help="heads of attention, if not the model's"
    )
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--backend", default="", help="of dense attention: fa4 on a GPU, else sdpa")
    parser.add_argument("--calls", type=int, default=3)
    args = parser.parse_args(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no GPU: --device cpu")
    args.backend = args.backend or ("fa4" if args.device == "cuda" else "sdpa")
    for length in args.lengths:
        layer = Layer(args, length)
        for side in args.sides:
            record = {"model": args.model, "length": length, "heads": layer.H, "side": side}
            try:
                record |= measured(lambda: SIDES[side](layer), layer.device, args.calls)  # noqa: B023
            except Exception as error:
                record["failed"] = reason(error)
            print(json.dumps(record), flush=True)
            if layer.device.type == "cuda":
                torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
