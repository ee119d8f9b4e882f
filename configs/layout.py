"""How a configuration is laid out over ranks: resolved sizes, and the rules a layout must keep.

Ranks are tensor x context x pipeline x data. Within a stage the same ranks are also expert x expert
data; experts are never cut themselves.
"""

import math
import re
from collections.abc import Iterator
from itertools import islice
from pkgutil import resolve_name
from typing import Any

from phalanx.configs.arithmetic.accounting import head_flops, layer_flops
from phalanx.configs.arithmetic.batch_sizes import parse
from phalanx.configs.arithmetic.layers import has_experts, mixer_layers, mixer_of, mlp_layers
from phalanx.configs.arithmetic.stages import balanced, layer_seconds
from phalanx.configs.knobs import changed, copied, get, pluralize, repair
from phalanx.configs.remembered import STAGES, remembered
from phalanx.configs.schema import Config, DataConfig, OptimConfig
from phalanx.configs.tables.backends import attention_backend, expert_backend
from phalanx.configs.tables.capabilities import CHOSEN_EXCHANGE, CONTEXT_EXCHANGES, ZERO3
from phalanx.configs.tables.transports import (
    MAX_REPLICATED_EXPERTS,
    MAX_REPLICATION_RANKS,
    TRANSPORTS,
)


def stage_ranks(cfg: Config, world: int) -> int:
    """Ranks of one pipeline stage: tensor x context x data, or expert x expert data."""
    return max(1, world // cfg.parallel.pipeline)


def data_parallel_size(cfg: Config, world: int) -> int:
    """Ranks that see different sequences."""
    p = cfg.parallel
    return max(1, world // (p.tensor * p.context * p.pipeline))


def expert_parallel_size(cfg: Config, world: int) -> int:
    """`parallel.expert`, 1 if dense; 0: the largest up to 8 that divides experts and ranks."""
    if cfg.parallel.expert:
        return cfg.parallel.expert
    if not has_experts(cfg.model):
        return 1
    return largest_divisor(math.gcd(cfg.model.moe.experts, stage_ranks(cfg, world)), 8)


def may_be_uneven(cfg: Config, world: int) -> bool:
    """True if a router deals tokens to ranks, which may then have different numbers of rows."""
    sent = has_experts(cfg.model) and expert_parallel_size(cfg, world) > 1
    return sent and not cfg.model.moe.router.force_balance


def replicas(cfg: Config, world: int) -> tuple[int, int]:
    """Number of ranks that have the same dense parameters, and the same experts."""
    dense = data_parallel_size(cfg, world) * cfg.parallel.context
    return dense, stage_ranks(cfg, world) // expert_parallel_size(cfg, world)


def optimizer_shards(cfg: Config, world: int) -> tuple[int, int]:
    """Number of parts of the optimizer's state for the same: one without a sharded optimizer."""
    return replicas(cfg, world) if cfg.parallel.distributed_optimizer else (1, 1)


def context_exchange(cfg: Config) -> str:
    """Key of `CONTEXT_EXCHANGES`: the exchange of context ranks for core attention."""
    alone = cfg.parallel.context == 1 or attention_backend(cfg.kernels.attention).layer
    return "keys" if alone else str(resolve_name(CHOSEN_EXCHANGE)(cfg))


def key_ranks(cfg: Config) -> int:
    """Ranks with a part of the queries each; 1: kernels of attention have whole sequences."""
    return 1 if CONTEXT_EXCHANGES[context_exchange(cfg)].whole else cfg.parallel.context


def micro_batches(cfg: Config, world: int) -> int:
    """Forward passes of a rank in one optimizer step."""
    return cfg.data.global_batch // (cfg.data.micro_batch * data_parallel_size(cfg, world))


def replica_slots(cfg: Config, world: int) -> int:
    """Replica slots of a rank: `parallel.expert_replication`.

    None where `auto` is left to the transport, or experts are on one rank.
    """
    wanted = cfg.parallel.expert_replication
    return 0 if isinstance(wanted, str) or expert_parallel_size(cfg, world) == 1 else wanted


def document_places(data: DataConfig) -> int:
    """`data.max_documents`; 0 is a 32nd of the tokens of a sequence, at least 16."""
    return data.max_documents or max(16, data.sequence_length // 32)


def logit_interval(optim: OptimConfig) -> int:
    """Steps from one measurement of the largest attention logits to the next; 0 is never."""
    return optim.max_logit_every or int(optim.qk_clip > 0)


def wsd_decay_steps(steps: int) -> int:
    """Steps at the end of so many in which the schedule `WSD` decays."""
    return max(steps // 10, 1)


def largest_divisor(n: int, at_most: int) -> int:
    """Largest divisor of `n` that is not above `at_most`."""
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return max((d for s in small for d in (s, n // s) if d <= at_most), default=1)


@remembered(*STAGES)
def pipeline_chunks(cfg: Config) -> list[str]:
    """Contents of each model chunk, in the letters of `parallel.pipeline_layout`.

    Chunk i is on stage i % pipeline. Without a layout the work is balanced.
    """
    p, m = cfg.parallel, cfg.model
    if p.pipeline_layout:
        return _unrolled(p.pipeline_layout)
    flops = layer_flops(m, cfg.data.sequence_length)
    last = head_flops(m) + sum(flops[m.layers :])
    count = p.pipeline * p.virtual_pipeline
    parts = ["t" * n for n in balanced(tuple(flops[: m.layers]), last, p.pipeline, count)]
    parts[0] = "E" + parts[0]
    parts[-1] += "m" * m.mtp_layers + "L"
    return parts


def stage_shares(cfg: Config) -> list[float]:
    """Part of the work of all layers that each pipeline stage has, by FLOPs."""
    m = cfg.model
    work = iter(layer_seconds(layer_flops(m, cfg.data.sequence_length)))
    loads = [0.0] * cfg.parallel.pipeline
    for i, letters in enumerate(pipeline_chunks(cfg)):
        layers = sum(islice(work, letters.count("t") + letters.count("m")))
        loads[i % len(loads)] += layers + letters.count("L") * head_flops(m)
    return [load / sum(loads) for load in loads]


def ranks_of_experiment(experiment: str) -> int:
    """Ranks that an experiment is laid out for, by its name as in `qwen3_30b_8gpu`; else 0."""
    found = re.search(r"_([0-9]+)gpu$", experiment)
    return int(found[1]) if found else 0


def fit_to_ranks(cfg: Config, world: int) -> dict[str, Any] | None:
    """Values by knob with which `cfg`, which stays as it is, fits `world` ranks; None if none fits.

    Parallel sizes stay as near to its own as they can, in steps of 2, and none grows; of sets that
    are as near the one with the fewest values is taken.
    """
    found = []
    for values in _layouts(cfg, world):
        others = {path: value for path, value in values.items() if get(cfg, path) != value}
        apart = {path: _doublings(get(cfg, path), values[path]) for path in _SIZES}
        found.append((sum(apart.values()), len(others), apart["parallel.pipeline"], others))
    for *_, others in sorted(found, key=lambda each: each[:3]):
        if not list(layout_problems(changed(cfg, others), world)):
            return others
    return None


def ranks_that_fit(cfg: Config, world: int) -> int:
    """The fewest ranks above `world` that the layout fits, else the most below; 0 if none."""
    p = cfg.parallel
    replica, found = p.tensor * p.context * p.pipeline, 0
    # So many replicas have ranks for all experts, whatever else divides them.
    for replicas in range(1, 2 * max(p.expert, -(-world // replica)) + 1):
        if not list(layout_problems(copied(cfg), replica * replicas)):
            found = replica * replicas
            if found >= world:
                break
    return found


def layout_line(cfg: Config, world: int) -> str:
    """The sizes of a layout in words."""
    p = cfg.parallel
    return (
        f"tensor {p.tensor} x context {p.context} x pipeline {p.pipeline} x data "
        f"{data_parallel_size(cfg, world)}, experts over {expert_parallel_size(cfg, world)}"
    )


_SIZES = ("parallel.tensor", "parallel.context", "parallel.pipeline", "parallel.expert")


def _layouts(cfg: Config, world: int) -> Iterator[dict[str, Any]]:
    """Parallel sizes whose product divides `world`, stages to go with them, and the batch."""
    p, d = cfg.parallel, cfg.data
    for tensor in _divisors(world, p.tensor):
        for context in _divisors(world // tensor, p.context):
            for pipeline in _divisors(world // (tensor * context), p.pipeline):
                most = math.gcd(cfg.model.moe.experts, world // pipeline)
                experts = _divisors(most, p.expert) if p.expert else [0]
                data = world // (tensor * context * pipeline)
                for chunks, text in _stagings(cfg, pipeline):
                    once = d.micro_batch * data * (pipeline if chunks > 1 else 1)
                    for expert in experts:
                        sizes = (tensor, context, pipeline, expert)
                        yield dict(zip(_SIZES, sizes, strict=True)) | {
                            "parallel.virtual_pipeline": chunks,
                            "parallel.pipeline_layout": text,
                            "data.global_batch": _round_up(d.global_batch, once),
                            "data.batch_warmup": _warmup(cfg, once),
                        }


def _stagings(cfg: Config, pipeline: int) -> Iterator[tuple[int, str]]:
    p, layers = cfg.parallel, cfg.model.layers
    if p.pipeline_layout:
        chunks = len(_unrolled(p.pipeline_layout))
        if chunks % pipeline == 0 and (pipeline > 1 or chunks == 1):
            yield chunks // pipeline, p.pipeline_layout
    for size in {p.virtual_pipeline, 1} if pipeline > 1 else {1}:
        if layers >= pipeline * size:
            yield size, ""


def _divisors(n: int, most: int) -> list[int]:
    return [size for size in range(1, most + 1) if n % size == 0]


def _doublings(a: int, b: int) -> float:
    return abs(math.log2(a / b)) if a and b else 0.0


def layout_problems(cfg: Config, world: int) -> Iterator[str]:
    """Problems of the layout on `world` ranks; repairs `cfg` on the way."""
    for rule in (_tensor, _ranks, _stages, _experts, _sequence, _batch):
        yield from rule(cfg, world)


def _tensor(cfg: Config, world: int) -> Iterator[str]:
    size, m, a = cfg.parallel.tensor, cfg.model, cfg.model.attention
    cut = {"model.vocab_size": m.vocab_size, "model.attention.heads": a.heads, "world_size": world}
    if mlp_layers(m)[0]:
        cut["model.dense_ffn"] = m.dense_ffn
    if m.moe.shared_ffn:
        cut["model.moe.shared_ffn"] = m.moe.shared_ffn
    if a.kind == "mla":
        cut["model.attention.kv_lora_rank + qk_rope_dim"] = a.kv_lora_rank + a.qk_rope_dim
        if a.q_lora_rank:
            cut["model.attention.q_lora_rank"] = a.q_lora_rank
    for name in mixer_layers(m):
        cut |= mixer_of(name).heads(m)
    if a.kind == "gqa" and size % a.kv_heads:  # several ranks may each have a copy of one head
        cut["model.attention.kv_heads"] = a.kv_heads
    if wrong := [f"{name}={value}" for name, value in cut.items() if value % size]:
        fits = largest_divisor(math.gcd(*cut.values()), size)
        yield repair(cfg, "parallel.tensor", f"does not divide {', '.join(wrong)}", fits)


def _ranks(cfg: Config, world: int) -> Iterator[str]:
    p = cfg.parallel
    left = world // p.tensor
    if left % p.context:
        reason = f"does not divide {pluralize(world, 'rank')} / tensor={p.tensor} = {left}"
        yield repair(cfg, "parallel.context", reason, largest_divisor(left, p.context))
    yield from _shared_heads(cfg, left)
    left //= p.context
    if left % p.pipeline:
        split = f"(tensor={p.tensor} x context={p.context})"
        reason = f"does not divide {pluralize(world, 'rank')} / {split}"
        yield repair(cfg, "parallel.pipeline", reason, _fewer_stages(cfg, left))


def _shared_heads(cfg: Config, ranks: int) -> Iterator[str]:
    """Heads that tensor ranks and the context ranks of `ranks` share out."""
    p = cfg.parallel
    size = p.tensor * p.context
    cut = {
        knob: heads
        for name in mixer_layers(cfg.model)
        for knob, heads in mixer_of(name).heads(cfg.model).items()
    }
    wrong = [f"{knob}={heads}" for knob, heads in cut.items() if heads % size]
    if wrong:
        fits = math.gcd(ranks, *(heads // p.tensor for heads in cut.values()))
        reason = f"x tensor={p.tensor} does not divide {', '.join(wrong)}"
        yield repair(cfg, "parallel.context", reason, largest_divisor(fits, p.context))


def _fewer_stages(cfg: Config, ranks: int) -> int:
    p, layers = cfg.parallel, cfg.model.layers
    return largest_divisor(ranks, p.pipeline if p.pipeline_layout else min(p.pipeline, layers))


def _stages(cfg: Config, world: int) -> Iterator[str]:
    p, m = cfg.parallel, cfg.model
    yield from _one_stage(cfg)
    if p.pipeline_layout:
        yield from _layout_text(cfg)
    if p.pipeline_layout:
        return
    if m.layers < p.pipeline:
        reason = f"is more than model.layers={m.layers}"
        fits = _fewer_stages(cfg, world // (p.tensor * p.context))
        yield repair(cfg, "parallel.pipeline", reason, fits)
        yield from _one_stage(cfg)
    if m.layers < p.pipeline * p.virtual_pipeline:
        reason = f"x pipeline={p.pipeline} is more than model.layers={m.layers}"
        yield repair(cfg, "parallel.virtual_pipeline", reason, m.layers // p.pipeline)


def _one_stage(cfg: Config) -> Iterator[str]:
    if cfg.parallel.virtual_pipeline > 1 and cfg.parallel.pipeline == 1:
        yield repair(cfg, "parallel.virtual_pipeline", "needs more than one stage", 1)


def _layout_text(cfg: Config) -> Iterator[str]:
    """Megatron-Core's language: `t*3` and `(tt|)*3` repeat, `|` ends a chunk, commas are noise."""
    m, p, path = cfg.model, cfg.parallel, "parallel.pipeline_layout"
    parts = _unrolled(p.pipeline_layout)
    flat, chunks = "".join(parts), len(parts)
    if unknown := "".join(sorted(set(flat) - set("EtmL"))):
        yield repair(cfg, path, f"has unknown letters {unknown}; E t m L | are known", "")
    elif flat != "E" + "t" * m.layers + "m" * m.mtp_layers + "L":
        held = ", ".join(f"{flat.count(letter)} {letter}" for letter in "EtmL")
        reason = f"must hold E, {m.layers} t, {m.mtp_layers} m and L in this order; it holds {held}"
        yield repair(cfg, path, reason, "")
    elif chunks != p.pipeline * p.virtual_pipeline:
        reason = f"has {pluralize(chunks, 'chunk')}; pipeline={p.pipeline} x virtual_pipeline"
        yield repair(cfg, path, f"{reason}={p.virtual_pipeline} is another number", "")
    else:
        yield from _prediction_chunk(cfg, parts)


def _unrolled(text: str) -> list[str]:
    text = text.replace(",", "")
    for pattern in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
        text = re.sub(pattern, lambda match: match[1] * int(match[2]), text)
    return text.split("|")


def _prediction_chunk(cfg: Config, chunks: list[str]) -> Iterator[str]:
    """Prediction layers bring a copy of the embedding, of which Megatron-Core syncs one a stage."""
    p, path = cfg.parallel, "parallel.pipeline_layout"
    holders = [i for i, chunk in enumerate(chunks) if "m" in chunk]
    first = len(chunks) - p.pipeline + 1 if p.virtual_pipeline > 1 else 0
    if len(holders) > 1:
        yield repair(cfg, path, "spreads the m over chunks; one must hold them all", "")
    elif holders and holders[0] < first:
        reason = f"has m in chunk {holders[0] + 1}; with virtual_pipeline={p.virtual_pipeline} "
        yield repair(cfg, path, f"{reason}it must be in the last {p.pipeline - 1}", "")


def _experts(cfg: Config, world: int) -> Iterator[str]:
    p, experts, stage = cfg.parallel, cfg.model.moe.experts, stage_ranks(cfg, world)
    size = expert_parallel_size(cfg, world)
    if experts % size or stage % size:
        reason = (
            f"must divide model.moe.experts={experts} and the {pluralize(stage, 'rank')} of a stage"
        )
        fits = largest_divisor(math.gcd(experts, stage), size)
        yield repair(cfg, "parallel.expert", reason, fits)
    size = expert_parallel_size(cfg, world)
    if p.dispatch != "auto" and TRANSPORTS[p.dispatch].one_rank and size > 1:
        reason = f"keeps tokens on their rank, and the experts are on {size} ranks"
        yield repair(cfg, "parallel.dispatch", reason, "alltoall")
    yield from _replication(cfg, size)


def _replication(cfg: Config, ranks: int) -> Iterator[str]:
    p, path, experts = cfg.parallel, "parallel.expert_replication", cfg.model.moe.experts
    if p.expert_replication in (0, "auto"):
        return
    transport = TRANSPORTS.get(p.dispatch)  # none yet with auto
    # The ranks of a node are known when the transport is (parallel.dispatcher.transport).
    group_shares = transport is not None and not transport.over_nodes
    if not expert_backend(cfg.kernels.backend).replicates:
        reason = f"is not possible with kernels.backend={cfg.kernels.backend}"
        yield repair(cfg, path, reason, 0)
    elif transport is not None and not transport.replicates_experts:
        can = " or ".join(name for name, facts in TRANSPORTS.items() if facts.replicates_experts)
        reason = f"is not possible with parallel.dispatch={p.dispatch}, only with {can}"
        yield repair(cfg, path, reason, 0)
    elif group_shares and (ranks > MAX_REPLICATION_RANKS or experts > MAX_REPLICATED_EXPERTS):
        most = f"{MAX_REPLICATED_EXPERTS} experts on {MAX_REPLICATION_RANKS} ranks"
        yield repair(cfg, path, f"serves {most}, not {experts} on {ranks}", 0)


def _sequence(cfg: Config, world: int) -> Iterator[str]:
    p, length = cfg.parallel, cfg.data.sequence_length
    # A context rank holds two chunks, so that the causal halves balance; sequence parallelism cuts
    # what a context rank holds.
    parts = math.lcm(2 * p.context, p.context * p.tensor) if p.context > 1 else p.tensor
    if length % parts:
        reason = f"is not a multiple of {parts}, with context={p.context} and tensor={p.tensor}"
        yield repair(cfg, "data.sequence_length", reason, _round_up(length, parts))


def _batch(cfg: Config, world: int) -> Iterator[str]:
    p, d, path = cfg.parallel, cfg.data, "data.global_batch"
    replicas = data_parallel_size(cfg, world)
    once = d.micro_batch * replicas
    if d.global_batch % once:
        ranks = pluralize(replicas, "data parallel rank")
        reason = f"is no multiple of micro_batch={d.micro_batch} x {ranks}"
        yield repair(cfg, path, reason, _round_up(d.global_batch, once))
    if p.virtual_pipeline > 1 and micro_batches(cfg, world) % p.pipeline:
        reason = (
            f"makes {pluralize(micro_batches(cfg, world), 'micro-batch')}, and virtual_pipeline "
            f"needs a multiple of pipeline={p.pipeline}"
        )
        yield repair(cfg, path, reason, _round_up(d.global_batch, once * p.pipeline))
    once *= p.pipeline if p.virtual_pipeline > 1 else 1
    if any(each.size % once for each in map(parse, d.batch_warmup)):
        parts = f"micro_batch={d.micro_batch} x {pluralize(replicas, 'data parallel rank')}"
        parts += f" x pipeline={p.pipeline}" if p.virtual_pipeline > 1 else ""
        reason = f"has a size that is no multiple of {parts}"
        yield repair(cfg, "data.batch_warmup", reason, _warmup(cfg, once))


def _warmup(cfg: Config, once: int) -> list[str]:
    """`data.batch_warmup` with sizes rounded up to multiples of `once`."""
    sizes = (text.partition(":") for text in cfg.data.batch_warmup)
    return [f"{_round_up(int(size), once)}:{tokens}" for size, _, tokens in sizes]


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def not_overlappable(cfg: Config) -> str | None:
    """Reason that a forward pass cannot run beside another micro-batch's backward pass, or None.

    An `auto` of kernels or transport that is not resolved yet refuses nothing.
    """
    p, transport = cfg.parallel, TRANSPORTS.get(cfg.parallel.dispatch)
    if not has_experts(cfg.model):
        return "a dense model exchanges no tokens"
    if expert_backend(cfg.kernels.backend).own_exchange:
        return f"kernels.backend={cfg.kernels.backend} has its own exchanges"
    if transport is not None and not (transport.one_rank or transport.overlaps_microbatches):
        return f"parallel.dispatch={p.dispatch} has one exchange for both passes"
    if p.context > 1:
        return f"parallel.context={p.context} has one communicator for both passes"
    if p.expert_replication not in (0, "auto"):
        return f"parallel.expert_replication={p.expert_replication} has one communicator for both"
    if p.distributed_optimizer in ZERO3:
        return f"distributed_optimizer={p.distributed_optimizer} has buffers of layers for one pass"
    return None
