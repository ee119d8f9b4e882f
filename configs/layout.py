"""How a configuration is laid out over ranks: resolved sizes, and the rules a layout must keep.

Ranks are tensor x context x pipeline x data. Within a stage the same ranks are also expert x expert
data: experts are spread over whatever ranks attention uses, and are never cut themselves.
"""

import math
import re
from collections.abc import Iterator

from configs.knobs import fault
from configs.schema import Config


def stage_ranks(cfg: Config, world: int) -> int:
    """Ranks of one pipeline stage: tensor x context x data, or expert x expert data."""
    return max(1, world // cfg.parallel.pipeline)


def data_parallel_size(cfg: Config, world: int) -> int:
    """Ranks that see different sequences."""
    p = cfg.parallel
    return max(1, world // (p.tensor * p.context * p.pipeline))


def expert_parallel_size(cfg: Config, world: int) -> int:
    """`parallel.expert`; 0 is the largest size up to 8 that divides experts and stage ranks."""
    if cfg.parallel.expert:
        return cfg.parallel.expert
    return largest_divisor(math.gcd(cfg.model.moe.experts, stage_ranks(cfg, world)), 8)


def micro_batches(cfg: Config, world: int) -> int:
    """Forward passes of a rank in one optimizer step."""
    return cfg.data.global_batch // (cfg.data.micro_batch * data_parallel_size(cfg, world))


def largest_divisor(n: int, at_most: int) -> int:
    """Largest divisor of `n` that is not above `at_most`."""
    return next(d for d in range(max(1, min(n, at_most)), 0, -1) if n % d == 0)


def layout_problems(cfg: Config, world: int) -> Iterator[str]:
    """Problems of the layout on `world` ranks, each with the override that fixes it."""
    yield from _world(cfg, world)
    yield from _tensor(cfg)
    yield from _experts(cfg, world)
    yield from _stages(cfg)
    yield from _sequence(cfg)


def _world(cfg: Config, world: int) -> Iterator[str]:
    p = cfg.parallel
    ranks = p.tensor * p.context * p.pipeline
    if world % ranks == 0:
        yield from _batch(cfg, world)
        return
    tensor = largest_divisor(world, p.tensor)
    context = largest_divisor(world // tensor, p.context)
    left = world // (tensor * context)
    even = left if p.pipeline_layout else math.gcd(left, cfg.model.layers)
    fits = {"tensor": tensor, "context": context, "pipeline": largest_divisor(even, p.pipeline)}
    fix = " ".join(f"parallel.{k}={v}" for k, v in fits.items() if v != getattr(p, k))
    yield (
        f"parallel.tensor={p.tensor} x context={p.context} x pipeline={p.pipeline} = {ranks} "
        f"does not divide {world} ranks; set {fix}"
    )


def _batch(cfg: Config, world: int) -> Iterator[str]:
    p, d = cfg.parallel, cfg.data
    once = d.micro_batch * data_parallel_size(cfg, world)
    if d.global_batch % once:
        replicas = data_parallel_size(cfg, world)
        reason = (
            f"is not a multiple of micro_batch={d.micro_batch} x {replicas} data parallel ranks"
        )
        yield fault(cfg, "data.global_batch", reason, _round_up(d.global_batch, once))
    elif p.virtual_pipeline > 1 and micro_batches(cfg, world) % p.pipeline:
        reason = (
            f"makes {micro_batches(cfg, world)} micro-batches, and virtual_pipeline needs "
            f"a multiple of pipeline={p.pipeline}"
        )
        yield fault(cfg, "data.global_batch", reason, _round_up(d.global_batch, once * p.pipeline))


def _tensor(cfg: Config) -> Iterator[str]:
    """Everything that tensor parallelism cuts."""
    size, m, a = cfg.parallel.tensor, cfg.model, cfg.model.attention
    cut = {"model.vocab_size": m.vocab_size, "model.attention.heads": a.heads}
    if m.moe.dense_layers:
        cut["model.dense_ffn"] = m.dense_ffn
    if m.moe.shared_ffn:
        cut["model.moe.shared_ffn"] = m.moe.shared_ffn
    if a.kind == "mla":
        cut["model.attention.kv_lora_rank + qk_rope_dim"] = a.kv_lora_rank + a.qk_rope_dim
        if a.q_lora_rank:
            cut["model.attention.q_lora_rank"] = a.q_lora_rank
    elif a.kv_heads % size and size % a.kv_heads:
        cut["model.attention.kv_heads"] = a.kv_heads
    fits = largest_divisor(math.gcd(*cut.values()), size)
    for name, value in cut.items():
        if value % size:
            yield fault(cfg, "parallel.tensor", f"does not divide {name}={value}", fits)


def _experts(cfg: Config, world: int) -> Iterator[str]:
    p, experts, stage = cfg.parallel, cfg.model.moe.experts, stage_ranks(cfg, world)
    size = expert_parallel_size(cfg, world)
    if experts % size or stage % size:
        reason = f"must divide model.moe.experts={experts} and the {stage} ranks of a stage"
        yield fault(cfg, "parallel.expert", reason, largest_divisor(math.gcd(experts, stage), size))
    elif p.dispatch == "local" and size > 1:
        reason = f"keeps tokens on their rank, and the experts are on {size} ranks"
        yield fault(cfg, "parallel.dispatch", reason, "alltoall")


def _stages(cfg: Config) -> Iterator[str]:
    p, m = cfg.parallel, cfg.model
    chunks = p.pipeline * p.virtual_pipeline
    if p.virtual_pipeline > 1 and p.pipeline == 1:
        yield fault(cfg, "parallel.virtual_pipeline", "needs more than one stage", 1)
    elif p.pipeline_layout:
        yield from _layout_text(cfg, chunks)
    elif m.layers % p.pipeline:
        reason = f"does not divide model.layers={m.layers}, and there is no pipeline_layout"
        yield fault(cfg, "parallel.pipeline", reason, largest_divisor(m.layers, p.pipeline))
    elif m.layers % chunks:
        reason = f"does not divide the {m.layers // p.pipeline} layers of a stage"
        fits = largest_divisor(m.layers // p.pipeline, p.virtual_pipeline)
        yield fault(cfg, "parallel.virtual_pipeline", reason, fits)


def _layout_text(cfg: Config, chunks: int) -> Iterator[str]:
    """Megatron-Core's language: `t*3` and `(tt|)*3` repeat, `|` ends a chunk, commas are noise."""
    m, path = cfg.model, "parallel.pipeline_layout"
    text = cfg.parallel.pipeline_layout.replace(",", "")
    for pattern in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
        text = re.sub(pattern, lambda match: match[1] * int(match[2]), text)
    if unknown := "".join(sorted(set(text) - set("EtmL|"))):
        yield fault(cfg, path, f"has letters {unknown}; known are E t m L |", "")
        return
    flat = text.replace("|", "")
    if flat != "E" + "t" * m.layers + "m" * m.mtp_layers + "L":
        held = ", ".join(f"{flat.count(letter)} {letter}" for letter in "EtmL")
        reason = f"must hold E, {m.layers} t, {m.mtp_layers} m and L in this order; it holds {held}"
        yield fault(cfg, path, reason, "")
    if text.count("|") + 1 != chunks:
        reason = f"has {text.count('|') + 1} chunks, and pipeline x virtual_pipeline is {chunks}"
        yield fault(cfg, path, reason, "")


def _sequence(cfg: Config) -> Iterator[str]:
    p, length = cfg.parallel, cfg.data.sequence_length
    # A context rank holds two chunks, so that the causal halves balance; sequence parallelism cuts
    # what a context rank holds.
    parts = math.lcm(2 * p.context, p.context * p.tensor) if p.context > 1 else p.tensor
    if length % parts:
        reason = f"is not a multiple of {parts}, with context={p.context} and tensor={p.tensor}"
        yield fault(cfg, "data.sequence_length", reason, _round_up(length, parts))


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
