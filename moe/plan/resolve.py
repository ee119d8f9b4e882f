"""From a configuration and facts about ranks to a plan: an ordered table of rules.

Each rule replaces one `auto` of the configuration by a value, for which it may use the values of
the rules before it, and adds its lines of the start page. Rules are pure: they ask no device, no
library and no other rank. All ranks have the same facts, so that their plans are equal.

What one rank cannot do, none does. Where GPUs differ, rates are those of the slowest, and memory is
that of the rank which has least.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pkgutil import resolve_name

from phalanx.configs import capture
from phalanx.configs.arithmetic.layers import has_experts, mixer_layers
from phalanx.configs.capture import WARM_STEPS
from phalanx.configs.formats import (
    is_emulated,
    is_fp8,
    multiplies_fp8,
    quantizes_on_arrival,
    recipe_facts,
)
from phalanx.configs.knobs import changed, copied
from phalanx.configs.layout import expert_parallel_size
from phalanx.configs.schema import Config
from phalanx.configs.tables.backends import attention_backend, expert_backend
from phalanx.configs.tables.capabilities import OVERLAP, REPLICATION
from phalanx.configs.tables.layers import MIXERS
from phalanx.configs.tables.machines import Machine, with_margin
from phalanx.configs.validate import ConfigError
from phalanx.kernels import registry
from phalanx.kernels.expert_mlp.mlp_spec import Margins
from phalanx.kernels.registry import Choice, KernelUnavailable
from phalanx.moe.model.kernel_facts import facts as kernel_facts
from phalanx.moe.plan.cost.delayed_wgrad import (
    OFF,
    ON,
    PAIRS,
    beside_exchanges,
    pairs,
    possible,
    waits,
)
from phalanx.moe.plan.cost.pipeline import reason_in_turn
from phalanx.moe.plan.cost.stages import (
    USABLE,
    chooses_fp8_weights,
    fp8_place,
    fp8_weights,
    needed,
    stage_memory,
    with_growth,
)
from phalanx.moe.plan.facts import Device, JobFacts, RankFacts
from phalanx.moe.plan.plan import Lines, Plan
from phalanx.moe.router.fused_topk import unsupported
from phalanx.moe.text import storage
from phalanx.parallel.dispatcher.exchange import SymmOptions
from phalanx.parallel.dispatcher.transport import (
    choices,
    exchange_options,
    other_groups,
    own_exchange,
    replication_off,
    sms_of,
)
from phalanx.parallel.dispatcher.transport import resolve as resolve_transport
from phalanx.parallel.dispatcher.transport_class import Rank, Transport


class Draft:
    """A plan in the making: what rules have decided so far."""

    def __init__(self, asked: Config, facts: JobFacts) -> None:
        self.asked = asked
        """Configuration as the user set it."""
        self.facts = facts
        self.cfg = copied(asked)
        """Configuration in which rules replace `auto`."""
        self.other_mixer: tuple[str, ...] = ()
        self.transports: list[Transport] = []
        self.exchanges: list[SymmOptions] = []
        self.kernel_facts: dict[Device, registry.Facts] = {}
        """Facts on which the choice of kernels for a device depends."""
        self.lines: dict[str, Lines] = {}
        """Lines by the name of their place on the start page."""

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.facts.world

    def say(self, place: str, *lines: Choice) -> None:
        """Put lines in a place of the start page."""
        self.lines[place] = lambda: lines


def resolve(cfg: Config, facts: JobFacts) -> Plan:
    """The plan of a run.

    Args:
        cfg: valid on the number of ranks.
        facts: facts of all ranks.

    Raises:
        ConfigError: a forced choice cannot run on some rank, with the reason and an override.
    """
    draft = decided(cfg, facts)
    known = draft.cfg
    memory = stage_memory(known, facts.world) if waits(known) else None
    held = [None if memory is None else memory[i].held for i in range(known.parallel.pipeline)]
    return Plan(
        cfg=known,
        world=facts.world,
        other_mixer=draft.other_mixer,
        transports=tuple(draft.transports),
        exchanges=tuple(draft.exchanges),
        nodes=facts.nodes,
        held=tuple(held),
        hides_exchanges=beside_exchanges(known),
        pairs=pairs(known, facts.world),
        margins=_margins(draft),
        _lines=tuple(draft.lines[place] for place in PAGE if place in draft.lines),
    )


def decided(cfg: Config, facts: JobFacts, *, delays: bool = True) -> Draft:
    """The decisions of all rules; without `delays` no weight gradient waits, whatever is set."""
    draft = Draft(cfg, facts)
    for rule in RULES:
        if delays or rule is not delayed_wgrad:
            rule(draft)
    if not delays:
        draft.cfg.parallel.delay_wgrad = OFF
    return draft


def kernels(draft: Draft) -> None:
    """Backends of experts, attention and norms that all ranks can run."""
    cfg, k, e = draft.cfg, draft.cfg.kernels, draft.cfg.model.moe
    if cfg.run.device == "cuda" and draft.facts.kind != "cuda":
        raise ConfigError("run.device=cuda: torch sees no GPU here; set run.device=auto")
    experts = _backend(draft, "grouped_mlp", k.backend)
    reason = unsupported(e.router, experts=e.experts, top_k=e.top_k)
    if expert_backend(experts.backend).fuses_router and reason is not None:
        experts = replace(experts, reason=f"{experts.reason}; routing by torch: {reason}")
    if e.experts and (path := expert_backend(experts.backend).described):
        packages = frozenset.intersection(*(d.packages for d in draft.facts.devices))
        experts = replace(experts, reason=f"{experts.reason}; {resolve_name(path)(packages)}")
    chosen = [
        experts,
        _backend(draft, "attention", k.attention),
        _backend(draft, "norm", k.norm),
    ]
    for name in (name for name in mixer_layers(cfg.model) if MIXERS[name].backends):
        forced = attention_backend(k.attention).other_mixers
        mixer = Choice(name, forced, f"kernels.attention={k.attention}")
        if forced == "auto":
            mixer = _backend(draft, name, forced)
        draft.other_mixer = (mixer.backend,)
        chosen.append(mixer)
    k.backend, k.attention, k.norm = (choice.backend for choice in chosen[:3])
    cfg.run.device = draft.facts.kind
    cfg.run.machine = draft.facts.machine_key or cfg.run.machine
    draft.say("kernels", *chosen)


def _backend(draft: Draft, op: str, wanted: str) -> Choice:
    """Choice for an operation on all ranks: that of the devices which can do least."""
    found = {d: _on_device(draft, op, wanted, d) for d in draft.facts.devices}
    if len({choice.backend for choice in found.values()}) == 1:
        return next(iter(found.values()))
    order = registry.order(op)
    least = max(found, key=lambda d: order.index(found[d].backend))
    choice, first = found[least], draft.facts.devices[least]
    for device in found:
        _on_device(draft, op, choice.backend, device)
    return replace(choice, reason=f"{choice.reason} (rank {first})")


def _on_device(draft: Draft, op: str, wanted: str, device: Device) -> Choice:
    if device not in draft.kernel_facts:
        draft.kernel_facts[device] = kernel_facts(
            draft.asked,
            draft.world,
            device=device.kind,
            capability=device.capability,
            packages=device.packages,
            compiles=device.compiles,
        )
    try:
        return registry.resolve(op, wanted, draft.kernel_facts[device])
    except KernelUnavailable as error:
        why = "; dry runs estimate Hopper's kernels alone" if draft.asked.run.dry_run else ""
        raise ConfigError(f"{error}{why}") from error


def transport(draft: Draft) -> None:
    """Transport of each expert-parallel group, with expert replication."""
    cfg, p = draft.cfg, draft.cfg.parallel
    expert, wanted = expert_parallel_size(cfg, draft.world), p.dispatch
    backend = cfg.kernels.backend
    owned = bool(expert_backend(backend).own_exchange)
    if owned and wanted != "auto":  # its own dispatcher, whatever is set
        draft.transports = [own_exchange(backend, wanted)] * (draft.world // expert)
        return
    try:
        groups = _groups(draft, expert, wanted, replicates=not owned)
    except ValueError as error:
        raise ConfigError(f"{draft.facts.where}{error}") from error
    p.dispatch, p.expert_replication = groups[0].name, groups[0].replica_slots
    draft.transports = [own_exchange(backend, wanted)] * len(groups) if owned else groups


def _groups(draft: Draft, expert: int, wanted: str, *, replicates: bool) -> list[Transport]:
    """The transport of each group, of `expert` consecutive ranks."""
    facts = draft.facts
    kinds, firsts = facts.groups(expert)
    # Thousands of ranks have the same few groups.
    found = facts.kept((expert, wanted), lambda: [_chosen(wanted, each) for each in firsts])
    if replicates:
        found = [
            _replicating(draft, each, expert if each.inside is None else _of_first_node(members))
            for each, members in zip(found, firsts, strict=True)
        ]
    every = [found[kind] for kind in kinds]
    if len(found) == 1:
        return every
    members_of = (range(i * expert, (i + 1) * expert) for i in range(len(every)))
    groups = dict(zip(map(tuple, members_of), every, strict=True))
    return [
        replace(each, reason=each.reason + other_groups(groups, ranks))
        for ranks, each in groups.items()
    ]


def _chosen(wanted: str, members: Sequence[RankFacts]) -> Transport:
    ranks = [Rank(r.rank, r.host, r.node, dict(r.device.refusals)) for r in members]
    return resolve_transport(wanted, ranks)


def _of_first_node(members: Sequence[RankFacts]) -> int:
    """Number of ranks on the node of the first one."""
    return sum(r.node == members[0].node for r in members)


def _replicating(draft: Draft, chosen: Transport, ranks: int) -> Transport:
    """The transport with `parallel.expert_replication` among so many ranks."""
    if draft.cfg.parallel.expert_replication in (0, "auto"):
        return chosen
    rates = {device.copy_rates for device in draft.facts.devices}
    rule: Callable[..., Transport] = resolve_name(REPLICATION.rule)
    return rule(draft.cfg, chosen, world=draft.world, ranks=ranks, rates=rates)


def communication_sms(draft: Draft) -> None:
    """SMs of exchanges."""
    cfg = draft.cfg
    wanted, backend, quantizes = (
        cfg.parallel.comm_sms,
        cfg.kernels.backend,
        quantizes_on_arrival(cfg),
    )
    draft.exchanges = _of_each(
        draft.transports, lambda each: exchange_options(cfg.parallel, each, backend, quantizes)
    )
    cfg.parallel.comm_sms = sms_of(wanted, draft.transports[0], backend, quantizes)


def _of_each[T, R](values: Sequence[T], f: Callable[[T], R]) -> list[R]:
    """`f` of all values, of which thousands are the same."""
    if values.count(values[0]) == len(values):
        return [f(values[0])] * len(values)
    return [f(each) for each in values]


def graph(draft: Draft) -> None:
    """Capture of steps in a CUDA graph."""
    wanted, reason = draft.cfg.run.graph, capture.not_capturable(draft.cfg)
    setting = "auto" if wanted == "auto" else f"run.graph={wanted}"
    if wanted == capture.CAPTURED and reason:
        raise ConfigError(capture.forced_graph_error(reason))
    draft.cfg.run.graph = capture.resolved_graph(draft.cfg)
    if draft.cfg.run.graph == capture.CAPTURED:
        setting += f"; captured after {WARM_STEPS} eager steps, which takes seconds"
    elif wanted != capture.EAGER:
        setting += f"; not {capture.CAPTURED}: {reason}"
    draft.say("graph", Choice("graph", draft.cfg.run.graph, setting))


def emulation(draft: Draft) -> None:
    """Line on a recipe that kernels only emulate; it decides nothing."""
    cfg, recipe, backend = draft.cfg, draft.cfg.precision.recipe, draft.cfg.kernels.backend
    experts = expert_backend(backend)
    if recipe in experts.multiplies and experts.dense and cfg.precision.dense == "fp8":
        reason = "routed experts multiply it; other layers its values in bf16, which is slower; "
        draft.say(
            "emulation", Choice(recipe, "emulated", f"{reason}precision.dense=bf16 avoids that")
        )
    elif recipe_facts(cfg).microscaling and is_emulated(cfg):
        reason = f"{backend} multiplies its values in bf16, which is slower"
        draft.say("emulation", Choice(recipe, "emulated", reason))


def weights_in_fp8(draft: Draft) -> None:
    """Layers that keep FP8 copies of their weights."""
    cfg = draft.cfg
    if not is_fp8(cfg):
        return
    wanted, backend, chooses = cfg.precision.weights, cfg.kernels.backend, chooses_fp8_weights(cfg)
    cfg.precision.weights = fp8_weights(cfg, draft.world, draft.facts.tightest.free)
    if not has_experts(cfg.model):
        return
    if chooses:
        known = copied(cfg)  # later rules change it
        draft.lines["fp8"] = lambda: [_copies_line(known, draft.facts)]
        return
    if not multiplies_fp8(cfg):
        place, reason = "none", f"{backend} experts multiply values of FP8 in bf16"
    elif own := expert_backend(backend).own_fp8:
        place, reason = "resident", own
    else:
        draft.say("fp8", Choice("fp8 weights", fp8_place(cfg), f"precision.weights={wanted}"))
        return
    unused = f"{reason}; precision.weights={wanted} is not in effect"
    draft.say(
        "fp8", Choice("fp8 weights", place, f"auto; {reason}" if wanted == "auto" else unused)
    )


def _copies_line(cfg: Config, facts: JobFacts) -> Choice:
    """Line on FP8 copies that `auto` keeps."""
    grown, room = with_growth(cfg, facts.world), int(USABLE * facts.tightest.free)
    need = needed(changed(grown, {"precision.weights": "resident"}), facts.world)
    reason = f"auto; with resident weights {storage(need)} of {storage(room)} would be needed"
    if grown is not cfg:
        reason += f" at capacity_factor {grown.parallel.capacity_factor:g}"
    return Choice("fp8 weights", fp8_place(cfg), reason + _of_rank(facts))


def _of_rank(facts: JobFacts) -> str:
    """Clause on the rank with the least free memory, where others have more."""
    tightest = facts.tightest
    return f" on rank {tightest.rank}" if any(r.free > tightest.free for r in facts.ranks) else ""


def overlap(draft: Draft) -> None:
    """Passes of two micro-batches beside each other."""
    cfg, wanted = draft.cfg, draft.cfg.parallel.overlap_microbatches
    machine = draft.facts.machine
    free = draft.facts.tightest.free if draft.facts.kind == "cuda" else machine.room
    value, reason = microbatch_overlap(cfg, draft.world, machine, with_margin(free))
    cfg.parallel.overlap_microbatches = value
    if value == "on" or wanted != "auto":
        name = "overlap" if value == "on" else "in turn"
        draft.lines["overlap"] = lambda: [Choice("micro-batches", name, reason())]
    if value == "on":
        sms = draft.asked.parallel.comm_sms
        two_pass_options: Callable[[SymmOptions, int | str], SymmOptions]
        two_pass_options = resolve_name(OVERLAP.exchanges)
        draft.exchanges = _of_each(draft.exchanges, lambda each: two_pass_options(each, sms))


def microbatch_overlap(
    cfg: Config, world: int, machine: Machine, available: int
) -> tuple[str, Callable[[], str]]:
    """Value of `parallel.overlap_microbatches` without `auto`, and its reason, in clauses."""
    wanted = cfg.parallel.overlap_microbatches
    setting = "auto" if wanted == "auto" else f"parallel.overlap_microbatches={wanted}"
    reason = reason_in_turn(cfg, world)
    if reason is not None:
        return "off", lambda: "; ".join(filter(None, (setting, reason)))
    effect = resolve_name(OVERLAP.gain)(cfg, world, machine)
    if wanted == "auto" and not effect.worthwhile:
        return "off", lambda: f"{setting}; not worth it: {effect}"
    if wanted == "auto" and effect.needed > available:
        short = f"{storage(effect.needed)} of {storage(available)} would be needed"
        return "off", lambda: f"{setting}; {short}: {effect}"
    return "on", lambda: f"{setting}; {effect}"


def exchanges(draft: Draft) -> None:
    """Lines on transport and replication of the first group; it decides nothing."""
    cfg, first = draft.cfg, draft.transports[0]
    if wanted := draft.asked.parallel.expert_replication:
        line: Callable[[int | str, Transport], Choice] = replication_off
        if first.replica_slots:
            line = resolve_name(REPLICATION.line)
        draft.lines["replication"] = lambda: [line(wanted, first)]
    if has_experts(cfg.model):
        draft.lines["transport"] = lambda: choices(
            first,
            draft.asked.parallel,
            backend=cfg.kernels.backend,
            shared=cfg.model.moe.shared_ffn > 0,
            quantizes=quantizes_on_arrival(cfg),
            two_passes=cfg.parallel.overlap_microbatches == "on",
        )


_WAITS = {
    ON: "while a stage would wait for transfers",
    PAIRS: "while a stage would wait for transfers, those of experts for two micro-batches at once",
}
"""When weight gradients are computed, by the value of `parallel.delay_wgrad`."""


def delayed_wgrad(draft: Draft) -> None:
    """When weight gradients are computed."""
    cfg, facts, wanted = draft.cfg, draft.facts, draft.cfg.parallel.delay_wgrad
    setting = f"parallel.delay_wgrad={wanted}"
    (*better, least), reason = possible(cfg, draft.world, facts.machine)
    free = with_margin(facts.tightest.free)
    each = {value: changed(cfg, {"parallel.delay_wgrad": value}) for value in better}
    value = next((v for v in better if needed(each[v], draft.world) <= free), least)
    if beside_exchanges(cfg) and least != PAIRS:
        why = f"; {setting}; {reason}" if wanted == PAIRS else ""
        line = Choice("wgrad", "overlap", f"exchanges of the backward pass{why}")
        draft.say("wgrad", line)
    elif cfg.parallel.pipeline > 1 or wanted == PAIRS:
        if better:
            draft.lines["wgrad"] = lambda: [_wgrad_line(cfg, facts, value, better)]
        else:
            draft.say(
                "wgrad", Choice("wgrad", value, f"{setting}; {reason}" if reason else setting)
            )
    cfg.parallel.delay_wgrad = value


def _wgrad_line(cfg: Config, facts: JobFacts, value: str, better: Sequence[str]) -> Choice:
    """Line on a choice of `auto`, with the operands of its value, or of the smallest refused."""
    if facts.kind == "cpu":
        return Choice("wgrad", value, f"auto; {_WAITS[value]}")
    told = value if value in better else better[-1]
    need = needed(changed(cfg, {"parallel.delay_wgrad": told}), facts.world)
    room = with_margin(facts.tightest.free)
    memory = f"with their operands {storage(need)} of {storage(room)} would be needed"
    when = f"{_WAITS[value]}; " if value in better else ""
    return Choice("wgrad", value, f"auto; {when}{memory}{_of_rank(facts)}")


def background_saves(draft: Draft) -> None:
    """Checkpoints that are written in the background."""
    if draft.cfg.run.async_save == "auto":
        draft.cfg.run.async_save = "on" if draft.facts.kind == "cuda" else "off"


def _margins(draft: Draft) -> Margins:
    """SMs that kernels leave free: as set, and those of exchanges beside two passes."""
    margin = draft.cfg.kernels.sm_margin
    margins = Margins(margin.forward, margin.dgrad, margin.wgrad)
    beside = draft.cfg.parallel.overlap_microbatches == "on"
    return margins.at_least(draft.exchanges[0].comm_sms if beside else 0)


RULES: tuple[Callable[[Draft], None], ...] = (
    kernels,
    transport,
    communication_sms,
    graph,
    emulation,
    weights_in_fp8,
    overlap,
    exchanges,
    delayed_wgrad,
    background_saves,
)
"""Rules in the order in which they decide."""

PAGE = ("kernels", "emulation", "fp8", "transport", "overlap", "replication", "wgrad", "graph")
"""Places of the start page, in order."""
