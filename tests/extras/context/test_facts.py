"""Bytes of an exchange beside those that core attention allocates and sends."""

import itertools
from collections.abc import Callable
from pkgutil import resolve_name
from typing import Any
from unittest import mock

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from phalanx.configs.knobs import changed
from phalanx.configs.load import load
from phalanx.configs.schema import Config
from phalanx.configs.tables.capabilities import CONTEXT_EXCHANGES
from phalanx.configs.tables.machines import MACHINES
from phalanx.extras.context.facts import HEADS, KEYS
from phalanx.moe.plan.cost.exchange import keys_traffic
from phalanx.moe.plan.cost.stages import stage_memory
from phalanx.moe.plan.described import resolved
from tests.moe.model.test_attention import config, core, install
from tests.support.distributed import run_distributed

S, H, G, D = 256, 16, 4, 32  # tokens of a rank, heads, channels of a head


class _Kernel(torch.autograd.Function):
    """Saves, and allocates in the backward pass, what flash-attn-4 does."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = q.new_zeros(q.size(2), q.size(0), q.size(1), v.size(-1)).permute(1, 2, 0, 3)
        ctx.save_for_backward(q, k, v, out, torch.zeros(q.shape[:3]))
        return out

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor, ...]:
        q, k, v, *_ = ctx.saved_tensors
        dout = dout.contiguous()
        sums = [torch.zeros(x.shape, dtype=torch.float32) for x in (q, k, v)]
        grads = tuple(torch.zeros(x.shape, dtype=x.dtype) for x in (q, k, v))
        del sums
        return grads


def peak(run: Callable[[], None]) -> int:
    """Most bytes of the host that `run` has at a time, of those that it allocates."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as found:
        run()
    assert found.profiler is not None and found.profiler.kineto_results is not None
    events = found.profiler.kineto_results.events()
    changes = [(e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"]
    return max(itertools.accumulate(size for _, size in sorted(changes)))


def _bytes(exchange: str, ranks: int) -> tuple[int, int]:
    """Saved bytes of a forward pass, result included; the peak of gradients; bytes sent there."""
    install()
    from phalanx.extras.context import heads
    from phalanx.moe.model import attention
    from phalanx.parallel.groups import create

    pg = create(context=ranks).pg
    fields = dict(num_attention_heads=H, num_query_groups=G, kv_channels=D, hidden_size=H * D)
    module = core(config(context_parallel_size=ranks, **fields), pg, exchange=exchange)
    made = [torch.zeros(S, 1, n, D, dtype=torch.bfloat16) for n in (H, G, G)]
    local = [x.requires_grad_() for x in made]
    saved: dict[int, int] = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        saved[x.untyped_storage()._cdata] = x.untyped_storage().nbytes()
        return x

    def kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **_: Any) -> torch.Tensor:
        return _Kernel.apply(q, k, v)

    with (
        mock.patch.object(attention, "attention", kernel),
        mock.patch.object(heads, "attention", kernel),
        torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x),
    ):
        out = module(*local)
    saved[out.untyped_storage()._cdata] = out.untyped_storage().nbytes()
    upstream = torch.zeros_like(out)
    return sum(saved.values()), peak(lambda: out.backward(upstream))


def facts(exchange: str, ranks: int) -> tuple[Any, Config]:
    sizes = f"{{heads: {H}, kv_heads: {G}, head_dim: {D}}}"
    cfg = load(["model=tiny", f"model.attention={sizes}", f"parallel.context={ranks}"])
    return resolve_name(CONTEXT_EXCHANGES[exchange].facts), cfg


@pytest.mark.dist
@pytest.mark.parametrize("exchange", ["keys", "heads"])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_bytes_are_those_of_core_attention(exchange: str, ranks: int) -> None:
    """Eight ranks are more than the key-value heads; with `keys` the last chunk needs most."""
    (alone, _), (found, cfg) = run_distributed(_bytes, 1, "", 1)[0], facts(exchange, ranks)
    for saved, _ in (own := run_distributed(_bytes, ranks, exchange, ranks)):
        assert saved - alone == S * found.saved(cfg)
    assert max(most for _, most in own) == S * found.backward(cfg)


MACHINE = MACHINES["h200"]


@pytest.mark.parametrize("exchange", ["keys", "heads"])
@pytest.mark.parametrize(("ranks", "near"), [(4, 4), (8, 8), (16, 8)])
def test_bytes_are_those_that_are_sent(exchange: str, ranks: int, near: int) -> None:
    """Channels of what a rank needs from others, counted token by token."""
    found, cfg = facts(exchange, ranks)
    sent = found.sent(cfg, MACHINE)
    if exchange == "keys":
        assert sent.near + sent.far == (ranks - 1) * 2 * G * D * 2
        assert (sent.far > 0) == (ranks > near)
        return
    copies = max(1, ranks // G)
    for_one = (H // ranks) * D * 2 + 2 * (G * copies // ranks) * D  # queries, result; keys, values
    assert sent.near == pytest.approx((near - 1) * for_one * 2)
    assert sent.far == pytest.approx((ranks - near) * for_one * 2)


def test_heads_are_fewer_bytes_where_keys_are_many() -> None:
    """Latent attention has keys of every head: gathering them is what eight ranks send most."""
    cfg = load(["experiment=deepseek_v3_phases_256gpu", "parallel.context=8"])
    assert KEYS.bytes_sent(cfg) == pytest.approx(4 * HEADS.bytes_sent(cfg))
    traffic = keys_traffic(cfg, MACHINE)
    assert traffic.near + traffic.far == pytest.approx(2 * HEADS.bytes_sent(cfg))
    again = keys_traffic(changed(cfg, {"run.recompute": ["attention"]}), MACHINE)
    assert again.near == pytest.approx(1.5 * traffic.near)


def test_dry_runs_know_the_exchange() -> None:
    """Documents make eight ranks share out heads, of which two have the same keys."""
    at = ["experiment=qwen3_30b_8gpu", "parallel.context=8", "data.sequence_length=131072"]
    keys, heads = (
        stage_memory(resolved(load([*at, f"data.document_mask={mask}"]), 8, 8), 8)[0].saved
        for mask in ("false", "true")
    )
    tokens, layers, key = 131072 // 8, 48, 2 * 4 * 128 * 2
    assert keys - heads == tokens * layers * (7 * key - key)
