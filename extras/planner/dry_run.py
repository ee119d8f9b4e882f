"""`run.dry_run=true`: one page on memory and step time with any number of ranks, without a GPU."""

import math
from collections.abc import Iterator
from itertools import islice
from pkgutil import resolve_name

from phalanx.configs import capture
from phalanx.configs.arithmetic.accounting import (
    bf16_peak,
    flops_note,
    flops_per_token,
    fp8_peak,
)
from phalanx.configs.arithmetic.layers import has_experts
from phalanx.configs.formats import described, is_emulated, is_fp8
from phalanx.configs.knobs import changed, get, overrides, pluralize
from phalanx.configs.layout import (
    context_exchange,
    data_parallel_size,
    expert_parallel_size,
    micro_batches,
    replica_slots,
    stage_ranks,
)
from phalanx.configs.redact import redacted
from phalanx.configs.schema import Config
from phalanx.configs.tables.backends import attention_backend, expert_backend
from phalanx.configs.tables.capabilities import OVERLAP, SHARDED_LINE, ZERO3
from phalanx.configs.tables.machines import MEMORY_ERROR, Machine, machine_named
from phalanx.configs.tables.optimizers import HOST_STATES, MOMENTS
from phalanx.extras.planner import certainty, nearest
from phalanx.extras.planner.advice import opt_ins, suggestions
from phalanx.extras.planner.best import next_override
from phalanx.extras.planner.memory_options import memory_options
from phalanx.moe.data.blend import shown
from phalanx.moe.plan.cost.activations import Activations, sizes
from phalanx.moe.plan.cost.delayed_wgrad import (
    AUTO,
    OFF,
    ON,
    PAIRS,
    beside_exchanges,
    pairs_refusal,
    refusal,
    sums_to_products,
    waits,
)
from phalanx.moe.plan.cost.stages import (
    StageMemory,
    buffer_bytes,
    exchange_bytes,
    fits,
    fp8_place,
    host_needed,
    largest_factor,
    needed,
    row_memory,
    stage_memory,
)
from phalanx.moe.plan.cost.step_time import (
    BUSIEST,
    bound,
    busiest,
    network_seconds,
    step_time,
    with_natural_routing,
    with_own_kernels,
)
from phalanx.moe.plan.cost.traffic import costs, overlap_sms, received, row_bytes, traffic
from phalanx.moe.plan.cost.weights import fp8_copy_bytes
from phalanx.moe.plan.described import resolved
from phalanx.moe.plan.remedies import fp8_gain
from phalanx.moe.text import count, model_size, storage, work
from phalanx.parallel.dispatcher.costs import Links

_GIB = 2**30


def dry_run(cfg: Config, world: int) -> tuple[str, int]:
    """The page, and the exit code: 0 if the run fits, 2 if not.

    Raises ConfigError if a forced kernel cannot run on this machine model.
    """
    bodies, enough = sections(cfg, world)
    texts = {head: "".join(f"\n  {line}" for line in lines) for head, lines in bodies.items()}
    text = "\n\n".join(head + body for head, body in texts.items() if body)
    return redacted(text) + "\n", 0 if enough else 2


def sections(cfg: Config, world: int) -> tuple[dict[str, Iterator[str]], bool]:
    """Lines of the page by heading, computed when they are read, and whether the run fits."""
    machine = machine_named(cfg.run.machine)
    known = resolved(cfg, world, machine.node_gpus)
    available, enough = machine.room, fits(known, world, machine)
    bodies = {
        "Phalanx, dry run": _run(known, world, machine, cfg),
        "Process groups": _groups(known, world),
        f"Memory of a rank, by stage ({machine.name})": _memory(known, world, machine, available),
        "Activations to recompute or offload, each alone, cheapest per byte first": _options(
            known, world, machine
        ),
    }
    if has_experts(cfg.model):
        bodies["Experts of one layer"] = _experts(known, world)
    bodies["Expected step"] = _time(known, world, machine)
    if enough:
        optional = _opt_ins(cfg, world, machine, machine.safe_room)
        bodies["Off by default: costs accuracy or memory"] = optional
    else:
        advice = _advice(cfg, world, machine, machine.safe_room)
        bodies["Overrides that reduce memory, fastest first"] = advice
    bodies["In short"] = _short(cfg, known, world, machine, enough)
    if machine.only_memory:
        timed = ("Phal", "Activations", "Expected", "Off", "Overrides", "In short")
        bodies = {head: each for head, each in bodies.items() if not head.startswith(timed)}
        bodies["In short"] = islice(_short(cfg, known, world, machine, enough), 1)
    return bodies, enough


def _run(cfg: Config, world: int, machine: Machine, asked: Config) -> Iterator[str]:
    """Lines on a resolved config; `asked` still has what the user left to `auto`."""
    m, d, k = cfg.model, cfg.data, cfg.kernels
    flops = flops_per_token(m, d.sequence_length)
    yield f"model     {model_size(m)}"
    if ids := shown(cfg):
        yield f"vocab     {ids}"
    convention = f"Megatron convention{flops_note(cfg)}"
    yield f"work      {work(flops)} per token at sequence {d.sequence_length} ({convention})"
    yield f"ranks     {world} x {machine.name}, {described(cfg)}"
    routed = has_experts(m)
    mlps = f"{'experts' if routed else 'MLPs'} {k.backend}"
    yield f"kernels   {mlps}, attention {k.attention}, norm {k.norm}"
    if is_fp8(cfg):
        if routed:
            yield f"weights   {_copies(cfg, world)}"
        if (gain := fp8_gain(asked, world, machine)) is not None:
            yield f"speed     {gain.backend} {gain.reason}"
    elif is_emulated(cfg):
        emulation = f"{k.backend} multiplies {cfg.precision.recipe} values in bf16"
        yield f"emulated  {emulation}; the time to quantize them is not counted"
    yield f"graph     {_graph(cfg)}"
    sms = overlap_sms(cfg, world)
    if routed:
        yield f"overlap   {f'exchanges on {sms} SMs, experts on the rest' if sms else 'off'}"
    if cfg.parallel.overlap_microbatches == "on":
        yield f"          the next micro-batch {resolve_name(OVERLAP.gain)(cfg, world, machine)}"
    if beside_exchanges(cfg):
        yield "wgrads    beside exchanges of the backward pass"
    if cfg.parallel.pipeline > 1:
        yield f"stages    {_stages(cfg, world, machine, asked.parallel.delay_wgrad)}"
    if PAIRS in (asked.parallel.delay_wgrad, cfg.parallel.delay_wgrad):
        yield f"pairs     {_pairs(cfg, world, machine)}"
    if cfg.parallel.context > 1 and not attention_backend(cfg.kernels.attention).layer:
        yield f"context   ranks that share a sequence exchange {_CONTEXT[context_exchange(cfg)]}"
    yield (
        f"batch     {d.global_batch} = {d.micro_batch} x "
        f"{pluralize(micro_batches(cfg, world), 'micro-batch')} x "
        f"{pluralize(data_parallel_size(cfg, world), 'rank')}"
    )


_CONTEXT = {
    "keys": "keys: each has those of whole sequences",
    "heads": "heads: each has some of them, of whole sequences",
}
"""Words for an exchange of core attention (docs/long_context.md)."""


def _copies(cfg: Config, world: int) -> str:
    copies = max(fp8_copy_bytes(cfg, world))
    if not copies:
        return f"no FP8 copies: {cfg.kernels.backend} experts multiply FP8 values in bf16"
    return f"FP8 copies of weights {fp8_place(cfg)}, {storage(copies)}"


def _graph(cfg: Config) -> str:
    if cfg.run.graph == capture.CAPTURED:
        return cfg.run.graph
    return f"{cfg.run.graph}: {capture.not_capturable(cfg) or f'run.graph={cfg.run.graph}'}"


def _stages(cfg: Config, world: int, machine: Machine, wanted: str) -> str:
    """Place of weight gradients, and seconds for which stages wait with it.

    `wanted` is `parallel.delay_wgrad` as set.
    """
    off = step_time(changed(cfg, {"parallel.delay_wgrad": OFF}), world, machine).waiting
    if waits(cfg):
        on = step_time(cfg, world, machine).waiting
        taken = f"; auto takes {cfg.parallel.delay_wgrad}" if wanted == AUTO else ""
        return f"weight gradients wait for transfers: bubble {on:.3f} s, not {off:.3f} s{taken}"
    reason = refusal(cfg)
    if not reason:
        reason = "operands would not fit" if wanted == AUTO else f"parallel.delay_wgrad={wanted}"
    return f"weight gradients in the backward pass, bubble {off:.3f} s: {reason}"


def _pairs(cfg: Config, world: int, machine: Machine) -> str:
    """Number of micro-batches whose weight gradients experts compute in a pass, and why."""
    if reason := pairs_refusal(cfg, world):
        return f"weight gradients of one micro-batch at a time: {reason}"
    ratio = sums_to_products(cfg, world, machine)
    alone = step_time(changed(cfg, {"parallel.delay_wgrad": ON}), world, machine).total
    return (
        "experts compute weight gradients of two micro-batches in one pass; for one, memory would "
        f"need {ratio:.2f} x the time of products, and a step {alone:.3f} s"
    )


def _groups(cfg: Config, world: int) -> Iterator[str]:
    """Sizes of the groups and rank 0's peers, in Megatron-Core's order of dimensions."""
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


def _memory(cfg: Config, world: int, machine: Machine, available: int) -> Iterator[str]:
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
        parts = (w.parameter_bytes, w.gradient_bytes, w.device_states, m.saved)
        cells += [storage(x) for x in (*parts, _backward(m), m.peak)]
        yield f"{i} {name}".ljust(16) + "".join(f"{c:>12}" for c in cells)
    if cfg.parallel.distributed_optimizer in ZERO3:
        yield resolve_name(SHARDED_LINE)(cfg, world)
    if worst.weights.padding_bytes:
        pads = ", ".join(storage(stages[i].weights.padding_bytes) for i in sorted(shown))
        owners = f"{cfg.optim.kind.capitalize()}'s ranks"
        yield f"the peaks include {pads} of buffer padding, as {owners} own whole matrices"
    if worst.waiting:
        waiting = storage(worst.waiting)
        yield f"backward includes {waiting} of operands of weight gradients that wait"
    if worst.validation:
        yield (
            f"the peak includes {storage(worst.validation)} for validations, which cannot use the "
            "memory of captured steps"
        )
    if exchange := exchange_bytes(cfg, world):
        yield (
            f"receive buffers of {cfg.parallel.dispatch}, outside of torch's memory: "
            f"{storage(exchange)}"
        )
    yield (
        f"stage {worst.stage} needs {storage(_with_reserve(worst.peak + exchange, machine))} of "
        f"{machine.memory_gib} GiB with {machine.reserved_gib} GiB for CUDA and NCCL: "
        f"{_verdict(cfg, world, machine)}"
    )


def _backward(m: StageMemory) -> int:
    """All that is neither states of the optimizer nor saved activations."""
    return m.backward + m.waiting + m.validation + m.cached


def _options(cfg: Config, world: int, machine: Machine) -> Iterator[str]:
    """Savings and cost of each name of `run.recompute` and `run.offload` alone."""
    yield "alone".ljust(28) + "saves".rjust(12) + "time per step".rjust(16)
    total = step_time(cfg, world, machine).total
    for option in memory_options(cfg, world, machine):
        chosen = option.name in get(cfg, option.knob)
        text = f"{option.knob}={option.name}".ljust(28) + storage(option.saved).rjust(12)
        text += f"{option.seconds:.3f} s".rjust(16) + f"{option.seconds / total:5.1%}".rjust(8)
        yield text + "  set" * chosen
    run = cfg.run
    if len(run.recompute) + len(run.offload) > 1:
        none = changed(cfg, {"run.recompute": [], "run.offload": []})
        saved = needed(none, world) - needed(cfg, world)
        more = total - step_time(none, world, machine).total
        text = "all that are set, together".ljust(28) + storage(saved).rjust(12)
        yield text + f"{more:.3f} s".rjust(16) + f"{more / total:5.1%}".rjust(8)
    if MOMENTS[cfg.optim.moments].hosted:
        yield from resolve_name(HOST_STATES).lines(cfg, world, machine)
    if host := host_needed(cfg, world):
        verdict = "" if host <= machine.host_room else ": does not fit; set run.recompute instead"
        yield (
            f"host memory of a rank {storage(host)} of {machine.host_gib:g} GiB (assumed), copied "
            f"at {machine.host_gbs:g} GB/s each way (assumed){verdict}"
        )


def _verdict(cfg: Config, world: int, machine: Machine) -> str:
    enough = needed(cfg, world) <= machine.room
    factor = largest_factor(cfg, world, machine.room if enough else machine.safe_room)
    if factor is None:
        return f"does not fit{', not even with balanced experts' * has_experts(cfg.model)}"
    if factor == math.inf:
        return f"fits{' with any routing' * has_experts(cfg.model)}"
    if not expert_backend(cfg.kernels.backend).row_budget:
        return f"fits, up to {factor:g} x the balanced rows"
    verdict = "fits, up to" if enough else "does not fit; it would with"
    return f"{verdict} parallel.capacity_factor={factor:g}"


def _with_reserve(size: int, machine: Machine) -> int:
    return size + int(machine.reserved_gib * _GIB)


def _experts(cfg: Config, world: int) -> Iterator[str]:
    s, t = sizes(cfg, world), traffic(cfg, world)
    tokens = received(cfg, world)
    yield f"received  {tokens} tokens, {storage(tokens * row_bytes(cfg))}"
    factor, (budget, worst) = cfg.parallel.capacity_factor, row_memory(cfg, world)
    budgeted = expert_backend(cfg.kernels.backend).row_budget
    load = f"capacity_factor {factor:g}" if budgeted else "balanced"
    cases = {load: budget} | ({"all tokens to one rank": worst} if worst != budget else {})
    for case, m in cases.items():
        yield (
            f"rows      {m.rows} ({case}): {storage(m.layer)} of saved activations per layer, "
            f"{storage(m.rank)} in total; dispatch buffers {storage(buffer_bytes(cfg, world))}"
        )
    if replicas := replica_slots(cfg, world):
        act, one_sided = Activations(cfg, world), costs(cfg, world).buffers
        layer = act.replica_memory()
        size = act.replica_slot_bytes() if one_sided else layer.saved + layer.backward
        scope = "of all layers" if one_sided else "in the backward pass of a layer"
        yield (
            f"replicas  {replicas} replica slots: {storage(size)} for weights and gradients {scope}"
        )
    yield (
        f"sent      {cfg.parallel.dispatch}: a token has experts on {t.ranks:.2f} ranks of "
        f"{t.nodes:.2f} nodes on average, at most {pluralize(t.most_nodes, 'node')}"
    )
    for name, rows in (("dispatch", t.dispatch), ("combine", t.combine)):
        yield (
            f"{name:<10}{rows.far:.2f} rows per token over the network, "
            f"{rows.near:.2f} inside nodes"
        )
    yield (
        f"bytes     per token {_bytes(t.forward)} forward, {_bytes(t.backward)} backward; "
        f"{storage(int(t.forward.total * s.local_tokens))} and "
        f"{storage(int(t.backward.total * s.local_tokens))} per micro-batch"
    )


def _bytes(sent: Links) -> str:
    network = f" ({sent.far / 1e3:.1f} over the network)" if sent.far else ""
    return f"{sent.total / 1e3:.1f} kB{network}"


def _time(cfg: Config, world: int, machine: Machine) -> Iterator[str]:
    d, t = cfg.data, step_time(cfg, world, machine)
    own = with_own_kernels(cfg, machine)
    yield (
        f"machine   {_tflops(own, is_fp8(cfg))}, "
        f"{own.attention_tflops:.0f} attention; {machine.memory_gbs:.0f} GB/s memory, "
        f"{machine.node_gbs:.4g} node, {machine.network_gbs:.4g} network"
    )
    for name, seconds in vars(t).items():
        if seconds:
            yield f"{name:<12}{seconds:9.3f} s{seconds / t.total:6.0%}"
    tokens = d.global_batch * d.sequence_length / world
    flops = flops_per_token(cfg.model, d.sequence_length)
    best, exchanged = bound(cfg, world, machine), ""
    if t.exchange:
        exchanged = f", {cfg.parallel.dispatch} exchanges {_overlapped(cfg, world)}"
    rate, best_rate = (_rate(tokens / seconds, flops) for seconds in (t.total, best.seconds))
    left_out = "other delays" if cfg.run.graph == capture.CAPTURED else "wait for the host"
    yield (
        f"step {t.total:.3f} s: {rate} ({_utilisation(cfg, tokens / t.total * flops, machine)}): "
        f"{f'balanced experts{exchanged}, ' if has_experts(cfg.model) else ''}no {left_out}"
    )
    yield (
        f"at best {best.seconds:.3f} s: {best_rate} in {cfg.precision.recipe}: {best.limit} alone, "
        "everything else overlapped, with any transport"
    )
    yield from certainty.lines(cfg, world, machine, tokens / t.total)
    if (busy := network_seconds(cfg, world, machine) / t.total) > certainty.BUSY:
        yield f"network busy for {busy:.0%} of the step: slower if it shares links with other jobs"
    if (load := busiest(cfg, world)) > 1:
        natural = with_natural_routing(t, load).total
        yield (
            f"natural routing: {tokens / natural:,.0f} tokens/s/GPU with {load:.2f} times the mean "
            f"rows on the busiest rank, {_measured(cfg)}"
        )
    yield from nearest.lines(cfg, world, machine.name)


def _measured(cfg: Config) -> str:
    if cfg.model.name in BUSIEST:
        return "as measured in steps 41 to 50 from scratch"
    least, most = min(BUSIEST.values()), max(BUSIEST.values())
    return f"the median of {len(BUSIEST)} other models from scratch ({least:.2f} to {most:.2f})"


def _rate(tokens: float, flops: float) -> str:
    return f"{tokens:,.0f} tokens/s/GPU, {tokens * flops / 1e12:.0f} TFLOP/s/GPU"


def _tflops(m: Machine, fp8: bool) -> str:
    dense, experts = f"{m.dense_tflops:.0f} TFLOP/s GEMM", f"{m.expert_tflops:.0f} experts"
    if fp8:
        dense += f" ({m.dense_fp8_tflops:.0f} in FP8)"
        experts += f" ({m.expert_fp8_tflops:.0f})"
    return f"{dense}, {m.head_tflops:.0f} output layer, {experts}"


def _utilisation(cfg: Config, flops: float, machine: Machine) -> str:
    """Utilisation relative to the dense peak of bf16, in FP8 runs also to that of FP8."""
    bf16, fp8 = (flops / 1e12 / (peak(machine.name) or math.inf) for peak in (bf16_peak, fp8_peak))
    return f"mfu {bf16:.0%} of bf16, {fp8:.0%} of FP8" if is_fp8(cfg) else f"mfu {bf16:.0%}"


def _overlapped(cfg: Config, world: int) -> str:
    if cfg.parallel.overlap_microbatches == "on":
        return "overlapped with another micro-batch"
    if overlap_sms(cfg, world):
        return "partly overlapped with experts"
    if beside_exchanges(cfg):
        return "of the backward pass overlapped with weight gradients"
    return "not overlapped with experts"


def _opt_ins(cfg: Config, world: int, machine: Machine, available: int) -> Iterator[str]:
    for override, more, effect in opt_ins(cfg, world, machine, available):
        yield f"{override}: {storage(abs(more))} {'more' if more > 0 else 'less'}; {effect}"


def _advice(cfg: Config, world: int, machine: Machine, available: int) -> Iterator[str]:
    found = suggestions(cfg, world, machine, available)
    for each in found:
        verdict = "fits" if each.size <= available else "not enough"
        size = storage(_with_reserve(each.size, machine))
        yield f"{each.overrides}: {each.tokens:,.0f} tokens/s/GPU, {size}, {verdict}"
    if not any(each.size <= available for each in found):
        yield "no set of them is enough: use more ranks (parallel.world_size) or a smaller model"


def _short(cfg: Config, known: Config, world: int, machine: Machine, enough: bool) -> Iterator[str]:
    size = storage(_with_reserve(needed(known, world), machine))
    verdict = "fits" if enough else "does not fit"
    if enough and needed(known, world) > machine.safe_room:
        verdict += f", with less than {MEMORY_ERROR:.0%} to spare, the error of this estimate"
    yield f"memory    {size} of {machine.memory_gib} GiB: {verdict}"
    step = step_time(known, world, machine)
    tokens = cfg.data.global_batch * cfg.data.sequence_length / world
    natural = with_natural_routing(step, busiest(known, world)).total
    slower = f", {tokens / natural:,.0f} with natural routing" if natural > step.total else ""
    yield f"speed     {tokens / step.total:,.0f} tokens/s/GPU{slower}"
    best = next_override(cfg, world, machine, step.total if enough else None)
    every = "run.dry_run=search looks at all layouts"
    if best is None:
        yield f"next      nothing near is faster{' and fits' * (not enough)}; {every}"
    else:
        rate = f"{best.tokens:,.0f} tokens/s/GPU in {storage(_with_reserve(best.size, machine))}"
        rate += (
            f", network busy for {best.busy:.0%} of the step" if best.busy > certainty.BUSY else ""
        )
        yield f"next      {overrides(best.changes)}: {rate}; {every}"
