"""Times of one attention layer whose sequence ranks share, by each way to exchange it.

    torchrun --standalone --nproc-per-node 2 -m phalanx.scripts.lab.context.bench
    torchrun --standalone --nproc-per-node 2 -m phalanx.scripts.lab.context.bench --documents
    torchrun --standalone --nproc-per-node 2 -m phalanx.scripts.lab.context.bench --device cpu \\
      --lengths 64 128

Heads are those of Qwen3-30B-A3B. A row has the median milliseconds of forward and backward passes,
the slowest rank's, the TFLOP/s of a GPU over both, and the peak of memory; results and gradients of
each way are compared with those of `keys`. Ways:

    alone      the attention of `heads` without its exchange
    keys       all keys and values on each rank (`extras.context.keys`)
    heads      some heads of whole sequences on each rank (`extras.context.heads`)
    ring       keys and values from rank to rank (`ring`)
    te p2p     Transformer Engine's ring, and its exchange of heads, if it is installed
    te a2a

With `--documents` the sequence has documents of the embedded corpus, as `balance` draws them: then
`keys` by `flex` and `heads` by `fa4`. FLOPs are counted as of one document in any case.

Legend: S positions of a rank, B batch of 1, H query heads, G key-value heads, d channels.
"""

import argparse
import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.extras.context.exchange import dealt
from phalanx.scripts.lab.context.ring import Flash, Plain, ring_attention

H, G, D = 32, 4, 128  # of Qwen3-30B-A3B
Way = Callable[..., Tensor]  # (q [S, 1, H, d], k, v) -> [S, 1, H * d]


def core(exchange: str, backend: str, group: Any) -> Any:
    """Core attention of a rank, as a layer has it."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    from phalanx.moe.model.attention import core_attention

    sizes = dict(num_layers=1, hidden_size=H * D, num_attention_heads=H, num_query_groups=G)
    config = TransformerConfig(
        **sizes, kv_channels=D, attention_dropout=0.0, context_parallel_size=group.size()
    )
    one = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    groups = SimpleNamespace(tp=one, cp=group)
    spec = core_attention(backend, exchange=exchange)
    return spec.module(config, 1, pg_collection=groups, **spec.params)


def alone(backend: str, ranks: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A rank's share of the heads at as many positions as a whole sequence has."""
    from phalanx.kernels.core_attention.core import attention

    q, k, v = (x.reshape(ranks * len(x), 1, -1, x.shape[-1]).permute(1, 2, 0, 3) for x in (q, k, v))
    out = attention(q, k, v, scale=D**-0.5, backend=backend)
    return out.permute(2, 0, 1, 3).reshape(-1, 1, H * D)


def by_ring(group: Any, kernel: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(0, 1).contiguous() for x in (q, k, v))
    return ring_attention(q, k, v, group, kernel).transpose(0, 1).flatten(2)


def by_transformer_engine(group: Any, kind: str) -> Way:
    import transformer_engine.pytorch as te

    ranks, stream = list(range(group.size())), torch.cuda.Stream()
    layer = te.DotProductAttention(
        *(H, D), num_gqa_groups=G, attn_mask_type="causal", attention_dropout=0.0
    )
    layer.set_context_parallel_group(group, ranks, stream, kind)
    return lambda q, k, v: layer(q, k, v, qkv_format="sbhd").view(len(q), 1, -1)


def ways(device: str, group: Any, packed: Any) -> Iterator[tuple[str, Callable[[], Way]]]:
    """Name and maker of each way."""
    gpu = device == "cuda"
    backend = "fa4" if gpu else "sdpa"
    if packed is not None:
        given = {"packed_seq_params": packed}
        yield "keys", lambda: partial(core("keys", "flex" if gpu else "sdpa", group), **given)
        yield "heads", lambda: partial(core("heads", backend, group), **given)
        return
    yield "keys", lambda: core("keys", backend, group)
    yield "heads", lambda: core("heads", backend, group)
    yield "ring", lambda: partial(by_ring, group, Flash() if gpu else Plain())
    yield "alone", lambda: partial(alone, backend, group.size())
    if gpu:
        for kind in ("p2p", "a2a"):
            yield f"te {kind}", partial(by_transformer_engine, group, kind)


def measured(
    way: Way, inputs: list[Tensor], upstream: Tensor, calls: int
) -> tuple[list[Tensor], tuple[float, float]]:
    """Result and gradients, and seconds of both passes: the median, of the slowest rank."""
    times, found = [], list[Tensor]()
    for _ in range(2 + calls):
        local = [x.detach().requires_grad_() for x in inputs]
        marks = [_now(inputs[0])]
        out = way(*local)
        marks.append(_now(inputs[0]))
        grads = torch.autograd.grad(out, local, upstream)
        marks.append(_now(inputs[0]))
        found = [out.detach(), *grads]
        times.append([b - a for a, b in itertools.pairwise(marks)])
    medians = [statistics.median(each) for each in zip(*times[2:], strict=True)]
    slowest = torch.tensor(medians, device=inputs[0].device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return found, (slowest[0].item(), slowest[1].item())


def _now(x: Tensor) -> float:
    if x.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter()


def documents(length: int, ranks: int, device: torch.device) -> Any:
    """A sequence of documents, as a rank's `Packed`."""
    from phalanx.moe.data.packing import positions
    from phalanx.moe.model.packed import packed
    from phalanx.scripts.lab.context.balance import embedded_lengths, sequences

    row = next(sequences(embedded_lengths(), length, seed=1))
    whole = torch.from_numpy(positions(np.array(row))).to(device)[None]
    mine = own_places(length, ranks).to(device)
    last = (whole.roll(-1, 1) == 0)[:, mine]
    how = dict(whole_BS=whole, last_BS=last) if ranks > 1 else {}
    return packed(whole[:, mine], places=len(row), ranks=ranks, **how)


def own_places(length: int, ranks: int) -> Tensor:
    chunks, rank = torch.arange(length).chunk(2 * ranks), dist.get_rank()
    return torch.cat([chunks[n] for n in dealt(ranks)[2 * rank : 2 * rank + 2]])


def difference(found: list[Tensor], wanted: list[Tensor]) -> float:
    """Largest relative norm of a difference."""
    return max(
        ((a.float() - b.float()).norm() / b.float().norm()).item()
        for a, b in zip(found, wanted, strict=True)
    )


def peak_gib(device: torch.device) -> float:
    """Most memory of PyTorch since the last reset, inputs and compared results included."""
    return torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0


def rows(args: argparse.Namespace, group: Any, device: torch.device) -> Iterator[str]:
    ranks = group.size()
    for length in args.lengths:
        mine = own_places(length, ranks)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        generator = torch.Generator(device).manual_seed(dist.get_rank())
        *inputs, upstream = (
            torch.randn(len(mine), 1, *shape, dtype=dtype, device=device, generator=generator)
            for shape in ((H, D), (G, D), (G, D), (H * D,))
        )
        packed = documents(length, ranks, device) if args.documents else None
        flops = 3 * 4 * length * (length + 1) / 2 * H * D / ranks
        wanted: list[Tensor] = []
        for name, make in ways(device.type, group, packed):
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            try:
                found, seconds = measured(make(), inputs, upstream, args.calls)
            except Exception as error:  # the other ways still count
                yield f"{length:>9,}  {name:<8}  failed: {str(error).splitlines()[0][:120]}"
                continue
            wanted = wanted or found
            apart = f"{difference(found, wanted):.1e}" if name != "alone" else "-"
            forward, backward = (f"{1e3 * each:>9.2f}" for each in seconds)
            rate, peak = f"{flops / sum(seconds) / 1e12:>8.1f}", f"{peak_gib(device):>6.2f}"
            yield f"{length:>9,}  {name:<8} {forward} {backward} {rate} {peak}  {apart}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[32768, 131072])
    parser.add_argument("--calls", type=int, default=5)
    parser.add_argument("--documents", action="store_true")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    args = parser.parse_args()
    device = torch.device(args.device)
    if args.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        from phalanx.parallel.megatron.cpu import install

        install()
        dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        print(
            "   tokens  way       forward  backward  TFLOP/s    GiB  difference   (ms)", flush=True
        )
    for row in rows(args, dist.group.WORLD, device):
        if dist.get_rank() == 0:
            print(row, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
