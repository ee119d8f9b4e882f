"""`run.dry_run=true`: what a run would take on any number of ranks, on one page, without a GPU."""

from collections.abc import Iterator

from configs.layout import data_parallel_size, expert_parallel_size, micro_batches, stage_ranks
from configs.machines import MACHINES, Machine
from configs.redact import redacted
from configs.schema import Config
from moe.accounting import active_parameters, flops_per_token, parameters
from moe.estimate.activations import sizes
from moe.estimate.advice import needed, suggestions
from moe.estimate.memory import Memory, exchange_bytes, stage_memory
from moe.estimate.pipeline import bubble
from moe.estimate.resolve import resolved
from moe.estimate.rows import buffer_bytes, row_memory
from moe.estimate.timing import step_time
from moe.estimate.traffic import traffic
from moe.units import count, storage, work

_GIB = 2**30
_PEAK = 989.0  # TFLOP/s of either GPU, dense bf16


def dry_run(cfg: Config, world: int) -> tuple[str, int]:
    """The page, and the exit code: 0 if the run fits, 2 if not.

    Args:
        cfg: valid on `world` ranks.
        world: ranks, of this launch or `parallel.world_size`.

    Raises:
        ConfigError: a forced kernel cannot run on this machine model.
    """
    machine = MACHINES[cfg.run.machine]
    known = resolved(cfg, world, machine.node_gpus)
    room = int((machine.memory_gib - machine.reserved_gib) * _GIB)
    fits = needed(known, world) <= room
    sections = [
        ("Phalanx, dry run", _run(known, world, machine)),
        ("Process groups", _groups(known, world)),
        (f"Memory of a rank, by stage ({machine.name})", _memory(known, world, machine)),
        ("Experts of one layer", _experts(known, world)),
        ("Expected step", _time(known, world, machine)),
    ]
    if not fits:
        sections.append(("It does not fit. What would help", _advice(cfg, world, machine, room)))
    text = "\n\n".join("\n".join([head, *("  " + x for x in body)]) for head, body in sections)
    return redacted(text) + "\n", 0 if fits else 2


def _run(cfg: Config, world: int, machine: Machine) -> Iterator[str]:
    m, d, k = cfg.model, cfg.data, cfg.kernels
    flops = flops_per_token(m, d.sequence_length)
    total, active = parameters(m).total, active_parameters(m).total
    yield f"model     {m.name}: {count(total)} parameters, {count(active)} active a token"
    yield f"work      {work(flops)} a token at sequence {d.sequence_length} (Megatron convention)"
    yield f"ranks     {world} x {machine.name}, {cfg.run.precision}"
    yield f"kernels   experts {k.backend}, attention {k.attention}, norm {k.norm}"
    yield (
        f"batch     {d.global_batch} = {d.micro_batch} x {micro_batches(cfg, world)} micro-batches"
        f" x {data_parallel_size(cfg, world)} ranks"
    )


def _groups(cfg: Config, world: int) -> Iterator[str]:
    """Sizes and the ranks that rank 0 meets, in Megatron-Core's order of dimensions."""
    p, expert = cfg.parallel, expert_parallel_size(cfg, world)
    data, stage = data_parallel_size(cfg, world), stage_ranks(cfg, world)
    rows = [
        ("tensor", p.tensor, 1),
        ("context", p.context, p.tensor),
        ("data", data, p.tensor * p.context),
        ("pipeline", p.pipeline, stage),
        ("expert", expert, 1),
        ("expert-data", stage // expert, expert),
    ]
    yield f"{'group':<12} {'size':>5}  ranks with rank 0"
    for name, size, step in rows:
        ranks = [str(i * step) for i in range(min(size, 8))] + ["..."] * (size > 8)
        yield f"{name:<12} {size:>5}  {', '.join(ranks)}"


def _memory(cfg: Config, world: int, machine: Machine) -> Iterator[str]:
    stages = stage_memory(cfg, world)
    worst = max(stages, key=lambda m: m.peak)
    shown = {0: "embedding", len(stages) - 1: "output"} if len(stages) > 1 else {0: "only"}
    if worst.stage not in shown:
        shown[worst.stage] = "largest"
    columns = ("parameters", "weights", "gradients", "optimizer", "activations", "backward", "peak")
    yield "stage".ljust(16) + "".join(f"{c:>12}" for c in columns)
    for i, name in sorted(shown.items()):
        m = stages[i]
        w = m.weights
        cells = [count(w.dense + w.expert)]
        parts = (w.parameter_bytes, w.gradient_bytes, w.optimizer_bytes, m.saved)
        cells += [storage(x) for x in (*parts, m.backward + m.cached, m.peak)]
        yield f"{i} {name}".ljust(16) + "".join(f"{c:>12}" for c in cells)
    exchange, even = exchange_bytes(cfg, world), worst.peak
    if exchange:
        yield (
            f"receive buffers of {cfg.parallel.dispatch}, beside torch's memory: "
            f"{storage(exchange)}"
        )
    total = even + exchange + int(machine.reserved_gib * _GIB)
    verdict = "fits" if total <= machine.memory_gib * _GIB else "does not fit"
    yield (
        f"stage {worst.stage} needs {storage(total)} of {machine.memory_gib} GiB with "
        f"{machine.reserved_gib} GiB for CUDA and NCCL: {verdict}"
    )
    yield _uneven(cfg, world, machine, total - even)


def _uneven(cfg: Config, world: int, machine: Machine, beside: int) -> str:
    """If all tokens of an expert-parallel group went to one rank."""
    s = sizes(cfg, world)
    if s.rows >= s.worst_rows:
        return "no routing needs more: the experts have rows for every case"
    worst: Memory = max(stage_memory(cfg, world, s.worst_rows), key=lambda m: m.peak)
    total = worst.peak + beside
    verdict = "fits" if total <= machine.memory_gib * _GIB else "does not fit"
    return f"all tokens of a group to one rank: {storage(total)}, {verdict}"


def _experts(cfg: Config, world: int) -> Iterator[str]:
    s, t = sizes(cfg, world), traffic(cfg, world)
    row = cfg.model.hidden * (2 if cfg.run.precision == "bf16" else 4)
    yield f"received  {s.received} tokens, {storage(s.received * row)}"
    factor, (given, worst) = cfg.parallel.capacity_factor, row_memory(cfg, world)
    load = "balanced" if cfg.kernels.backend == "megatron" else f"capacity_factor {factor:g}"
    cases = {load: given} | ({"all tokens to one rank": worst} if worst != given else {})
    for case, m in cases.items():
        yield (
            f"rows      {m.rows} ({case}): {storage(m.layer)} of activations kept a layer, "
            f"{storage(m.rank)} in all; dispatch buffers {storage(buffer_bytes(cfg, world))}"
        )
    yield (
        f"sent      {cfg.parallel.dispatch}: a token has experts on {t.ranks:.2f} ranks on "
        f"average, and its row goes {t.copies:.2f} times to others, "
        f"{t.crossings:.2f} of them to other nodes"
    )
    yield (
        f"bytes     {t.forward / 1e3:.1f} kB a token forward, {t.backward / 1e3:.1f} kB backward; "
        f"{storage(int(t.forward * s.local_tokens))} and "
        f"{storage(int(t.backward * s.local_tokens))} a micro-batch"
    )


def _time(cfg: Config, world: int, machine: Machine) -> Iterator[str]:
    d, t = cfg.data, step_time(cfg, world, machine)
    yield (
        f"machine   {machine.dense_tflops:.0f} TFLOP/s GEMM, {machine.expert_tflops:.0f} experts, "
        f"{machine.attention_tflops:.0f} attention; {machine.memory_gbs:.0f} GB/s memory, "
        f"{machine.node_gbs:.0f} node, {machine.network_gbs:.0f} network"
    )
    for name, seconds in vars(t).items():
        if seconds:
            yield f"{name:<12}{seconds:9.3f} s{seconds / t.total:6.0%}"
    yield f"pipeline bubble {bubble(cfg, world):.1%} of the work"
    rate = d.global_batch * d.sequence_length / world / t.total
    tflops = rate * flops_per_token(cfg.model, d.sequence_length) / 1e12
    yield (
        f"step {t.total:.3f} s: {rate:,.0f} tokens/s/GPU, {tflops:.0f} TFLOP/s/GPU "
        f"(mfu {tflops / _PEAK:.0%}), at best: balanced experts, nothing else in the way"
    )


def _advice(cfg: Config, world: int, machine: Machine, room: int) -> Iterator[str]:
    found = suggestions(cfg, world, machine)
    for overrides, size in found:
        verdict = "fits" if size <= room else "not enough alone"
        yield f"{overrides}: {storage(size + int(machine.reserved_gib * _GIB))}, {verdict}"
    if not any(size <= room for _, size in found):
        yield "none is enough alone: combine them, or use more ranks"
