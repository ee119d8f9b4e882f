"""Checks of a composed configuration: every problem at once, each with the override that fixes it.

First every knob by itself (`bounds`), then the rules between knobs (here) and those of the layout
(`layout`), each read with the problems before it repaired. Needs no machine.
"""

import difflib
from collections.abc import Iterator, Mapping
from pkgutil import resolve_name
from typing import Any

from phalanx.configs import capture
from phalanx.configs.addresses import flaw, is_address
from phalanx.configs.arithmetic import batch_sizes
from phalanx.configs.arithmetic.accounting import core_layers
from phalanx.configs.arithmetic.batch_sizes import in_steps, samples_after
from phalanx.configs.arithmetic.data_stages import is_number, stage_problems
from phalanx.configs.arithmetic.layers import candidates, has_experts, mixer_layers, mixer_of
from phalanx.configs.bounds import bound_problems
from phalanx.configs.formats import in_bf16, is_fp8, precision_problems, quantizes
from phalanx.configs.inject import inject_problems
from phalanx.configs.knobs import copied, get, overrides, pluralize, repair
from phalanx.configs.layout import (
    data_parallel_size,
    expert_parallel_size,
    fit_to_ranks,
    key_ranks,
    largest_divisor,
    layout_line,
    layout_problems,
    logit_interval,
    micro_batches,
    not_overlappable,
    ranks_of_experiment,
    ranks_that_fit,
    wsd_decay_steps,
)
from phalanx.configs.memory import memory_problems
from phalanx.configs.schema import Config
from phalanx.configs.tables.activations import ACTIVATIONS
from phalanx.configs.tables.backends import attention_backend, expert_backend, norm_backend
from phalanx.configs.tables.capabilities import SHARDED_PROBLEMS, VARIANT_PROBLEMS, ZERO3
from phalanx.configs.tables.layers import MIXERS
from phalanx.configs.tables.machines import MACHINES, machine_named
from phalanx.configs.tables.optimizers import MOMENTS, OPTIMIZERS
from phalanx.configs.tables.transports import TRANSPORTS

__all__ = [
    "ConfigError",
    "data_parallel_size",
    "expert_parallel_size",
    "is_valid",
    "micro_batches",
    "validate",
]

_TAKEN_CODES = (1, 2, 43, 44, 45, 130)  # train.py lists them

_OF_EXPERTS = {
    "model.moe.shared_ffn": 0,
    "model.moe.shared_gate": False,
    "model.moe.router.bias_rate": 0,
    "model.moe.router.aux_loss": 0,
    "model.moe.router.seq_aux_loss": 0,
    "model.moe.router.global_aux_loss": 0,
    "model.moe.router.z_loss": 0,
    "model.moe.router.rounding": "none",
    "model.moe.router.force_balance": False,
    "model.moe.router.replay": "",
    "precision.dispatch": "auto",
    "precision.hidden": "bf16",
    "precision.weights": "auto",
    "parallel.expert": 0,
    "parallel.expert_replication": 0,
    "parallel.overlap_microbatches": "auto",
    "run.record_routing": "",
}
"""Knobs that are of experts alone, with the value that a dense model has."""
_NO_EFFECT = {
    "precision.dispatch": ("bf16",),
    "parallel.expert": (1,),
    "parallel.expert_replication": ("auto",),
    "parallel.overlap_microbatches": ("off",),
}
"""Further values that a dense model may have."""

_BETA_OF_BF16 = 0.99
_POSITIONS = 2**24  # longest sequence: rotary embedding rounds later positions, in fp32
_OF_ALL = "a folder for all of a run is run.dir"


class ConfigError(ValueError):
    """Problems of a configuration, one a line."""


def validate(
    cfg: Config,
    world_size: int,
    experiment: str = "",
    *,
    any_ranks: bool = False,
    laid_out: bool = True,
) -> None:
    """Raise ConfigError with every problem of `cfg`, which stays as it is, on `world_size` ranks.

    Args:
        world_size: ranks; `parallel.world_size`, where set, is laid out instead.
        experiment: that the command line took. On another number of ranks than its own all problems
            of the layout are one, whose overrides together give a layout, unless its own ranks have
            them too.
        any_ranks: nothing is started, so that another number of ranks is as good a remedy.
        laid_out: False leaves out the problems of the layout, which is going to be another one.
    """
    cfg = copied(cfg)
    rules = (
        bound_problems,
        _attention,
        _mixers,
        _variants,
        _dense,
        _router,
        _experts,
        _data,
        _blend,
        stage_problems,
        batch_sizes.problems,
        _documents,
        _optim,
        _run,
        _recorded,
        memory_problems,
        _folders,
        _addresses,
        _graph,
        _exchange,
        _kernels,
        precision_problems,
    )
    problems = [problem for rule in rules for problem in rule(cfg)]
    world_size = cfg.parallel.world_size or world_size
    before, own = copied(cfg), ranks_of_experiment(experiment)
    of_layout = list(layout_problems(cfg, world_size)) if laid_out else []
    if of_layout and own not in (0, world_size):
        of_any_number = set(layout_problems(copied(before), own))
        of_number = not of_any_number.issuperset(of_layout)
        if of_number and (fitted := fit_to_ranks(before, world_size)) is not None:
            of_layout = [_resized(before, fitted, world_size, experiment, any_ranks)]
    elif of_layout and any_ranks and (ranks := ranks_that_fit(before, world_size)):
        of_layout = [_misfit(before, world_size, ranks)]
    problems += [*of_layout, *inject_problems(cfg, world_size)]
    if problems:
        raise ConfigError("\n".join(problems))


def _resized(
    cfg: Config, fitted: Mapping[str, Any], world: int, experiment: str, any_ranks: bool
) -> str:
    """The line on an experiment whose layout does not fit a number of ranks."""
    own = ranks_of_experiment(experiment)
    made_for = f"is for {pluralize(own, 'rank')} ({layout_line(cfg, own)}), not {world}"
    there, here = overrides({"parallel.world_size": own}), overrides(fitted)
    if any_ranks:
        return f"experiment={experiment} {made_for}: set {there}, or {here} to fit {world}"
    return (
        f"experiment={experiment} {made_for}: set {here} to fit {world}, or start {own}; "
        f"run.dry_run=true {there} estimates it on {own} without them"
    )


def _misfit(cfg: Config, world: int, ranks: int) -> str:
    """The line on a layout that fits other numbers of ranks."""
    p, sizes = cfg.parallel, ("tensor", "context", "pipeline", "expert")
    parts = [f"parallel.{name}={size}" for name in sizes if (size := getattr(p, name)) > 1]
    wanted = overrides({"parallel.world_size": ranks})
    there = " x ".join(parts) or "the batch"
    return f"{there} does not fit {pluralize(world, 'rank')}; set {wanted}"


def is_valid(cfg: Config, world_size: int) -> bool:
    """Return whether `validate` finds no problem."""
    try:
        validate(cfg, world_size)
    except ConfigError:
        return False
    return True


def _attention(cfg: Config) -> Iterator[str]:
    a, at = cfg.model.attention, "model.attention"
    if a.kind == "gqa" and a.heads % a.kv_heads:
        fits = largest_divisor(a.heads, a.kv_heads)
        yield repair(cfg, f"{at}.kv_heads", f"does not divide heads={a.heads}", fits)
    rotated = f"{at}.head_dim" if a.kind == "gqa" else f"{at}.qk_rope_dim"
    if get(cfg, rotated) % 2:
        yield repair(cfg, rotated, "must be even to be rotated", get(cfg, rotated) + 1)
    if a.kind == "mla":
        grouped = dict(window=0, sinks=False, qk_norm=False, qkv_bias=False, rotary_dim=0)
        grouped["output_gate"] = False
        for knob, off in grouped.items():
            if getattr(a, knob):
                yield repair(cfg, f"{at}.{knob}", "is of gqa, and kind is mla", off)
    yield from _heads(cfg)
    if a.yarn.beta_fast < a.yarn.beta_slow:
        reason = f"is below beta_slow={a.yarn.beta_slow}"
        yield repair(cfg, f"{at}.yarn.beta_fast", reason, 32 * a.yarn.beta_slow)


def _heads(cfg: Config) -> Iterator[str]:
    a, at = cfg.model.attention, "model.attention"
    if a.kind == "gqa" and a.rotary_dim:
        if a.rotary_dim > a.head_dim:
            yield repair(cfg, f"{at}.rotary_dim", f"is more than head_dim={a.head_dim}", 0)
        elif a.rotary_dim % 2:
            reason = "must be even to be rotated"
            yield repair(cfg, f"{at}.rotary_dim", reason, a.rotary_dim + 1)
        if a.yarn.factor > 1 and a.rotary_dim < a.head_dim:
            reason = f"is not possible with YaRN (yarn.factor={a.yarn.factor})"
            yield repair(cfg, f"{at}.rotary_dim", reason, 0)
    if a.qk_norm_over == "projection":
        if not a.qk_norm:
            yield repair(cfg, f"{at}.qk_norm_over", "needs qk_norm=true", "head")
        elif cfg.parallel.tensor > 1:
            reason = f"would split the heads that {at}.qk_norm_over=projection normalises together"
            yield repair(cfg, "parallel.tensor", reason, 1)


def _mixers(cfg: Config) -> Iterator[str]:
    for name in mixer_layers(cfg.model):
        yield from mixer_of(name).problems(cfg)


def _variants(cfg: Config) -> Iterator[str]:
    if cfg.model.variants:
        yield from resolve_name(VARIANT_PROBLEMS)(cfg)


def _dense(cfg: Config) -> Iterator[str]:
    """Knobs that would have an effect on experts, of a model that has none."""
    if has_experts(cfg.model):
        return
    for path, off in _OF_EXPERTS.items():
        value = get(cfg, path)
        if value not in (off, *_NO_EFFECT.get(path, ())):
            yield repair(cfg, path, "needs experts, and model.moe.experts is 0", off)
    backend = cfg.kernels.backend
    if is_fp8(cfg) and expert_backend(backend).own_fp8:
        reason = f"is of experts alone with kernels.backend={backend}, and the model has none"
        yield repair(cfg, "precision.recipe", reason, "bf16")
    elif quantizes(cfg) and cfg.precision.dense != "fp8":
        reason = f"leaves nothing in {cfg.precision.recipe}: model.moe.experts is 0"
        yield repair(cfg, "precision.dense", reason, "fp8")


def _router(cfg: Config) -> Iterator[str]:
    m, r, at = cfg.model.moe, cfg.model.moe.router, "model.moe.router"
    if not has_experts(cfg.model):
        return
    if m.top_k > m.experts:
        yield repair(cfg, "model.moe.top_k", f"is more than experts={m.experts}", m.experts)
    if m.experts % r.groups:
        fits = largest_divisor(m.experts, r.groups)
        yield repair(cfg, f"{at}.groups", f"does not divide experts={m.experts}", fits)
    if r.group_topk > r.groups:
        yield repair(cfg, f"{at}.group_topk", f"is more than groups={r.groups}", r.groups)
    in_reach = r.group_topk * (m.experts // r.groups)
    if in_reach < m.top_k:
        fits = -(-m.top_k * r.groups // m.experts)
        reason = f"leaves {pluralize(in_reach, 'expert')} to choose top_k={m.top_k} from"
        yield repair(cfg, f"{at}.group_topk", reason, fits)
    if r.bias_rate and r.score != "sigmoid":
        yield repair(cfg, f"{at}.bias_rate", f"needs score=sigmoid, not {r.score}", 0)
    if r.replay and r.force_balance:
        yield repair(cfg, f"{at}.force_balance", "is not possible with replay", False)
    backend, d, p = cfg.kernels.backend, cfg.data, cfg.parallel
    most = candidates(r.rounding, m.top_k, in_reach)
    rows = d.micro_batch * d.sequence_length * most // (p.context * p.tensor * m.experts)
    few = f"{rows} tokens to give to each expert, fewer than rounding_tile={r.rounding_tile}"
    for what, wrong in (
        ("force_balance", r.force_balance),
        ("replay", r.replay),
        (f"kernels.backend={backend}", expert_backend(backend).own_router),
        (few, rows < r.rounding_tile),
    ):
        if r.rounding != "none" and wrong:
            yield repair(cfg, f"{at}.rounding", f"is not possible with {what}", "none")
    if r.softmax_over == "topk" and r.score != "softmax":
        yield repair(cfg, f"{at}.softmax_over", f"needs score=softmax, not {r.score}", "all")
    if r.softmax_over == "topk" and m.top_k == 1:
        reason = "gives one expert (top_k=1) the weight 1, from which the router learns nothing"
        yield repair(cfg, f"{at}.softmax_over", reason, "all")


def _experts(cfg: Config) -> Iterator[str]:
    m = cfg.model.moe
    if m.dense_layers > cfg.model.layers:
        reason = f"is more than layers={cfg.model.layers}"
        yield repair(cfg, "model.moe.dense_layers", reason, cfg.model.layers)
    if m.shared_gate and not m.shared_ffn:
        reason = "needs shared experts, and model.moe.shared_ffn is 0"
        yield repair(cfg, "model.moe.shared_gate", reason, False)
    if m.shared_ffn and cfg.model.bias:
        yield repair(cfg, "model.bias", "is not possible with shared experts (shared_ffn)", False)
    if not ACTIVATIONS[m.activation].gated:
        for knob in ("activation_limit", "activation_offset"):
            if getattr(m, knob):
                reason = f"needs a gated activation, not {m.activation}"
                yield repair(cfg, f"model.moe.{knob}", reason, 0)


def _data(cfg: Config) -> Iterator[str]:
    d, r = cfg.data, cfg.run
    if d.source == "embedded" and 0 < cfg.model.vocab_size < 256:
        yield repair(cfg, "model.vocab_size", "is too small for bytes (data.source=embedded)", 256)
    if d.sequence_length > _POSITIONS:
        reason = f"is more than {_POSITIONS:,}, up to which fp32 tells positions apart"
        yield repair(cfg, "data.sequence_length", reason, _POSITIONS)
    parts = d.split.split(",")
    if len(parts) > 3 or not all(map(is_number, parts)) or not float(parts[0]):
        yield repair(cfg, "data.split", "must be weights of training and validation", "98,2")
    elif r.eval_interval and not d.validation and not (len(parts) > 1 and float(parts[1])):
        reason = f"validates on nothing, with data.split={d.split}"
        yield repair(cfg, "run.eval_interval", reason, 0)
    if r.sample_every and d.source == "synthetic":
        reason = "goes on with text, and random tokens (data.source=synthetic) are none"
        yield repair(cfg, "run.sample_every", reason, 0)


def _blend(cfg: Config) -> Iterator[str]:
    d, form = cfg.data, ["0.7", "prefix", "0.3", "other"]
    if d.source != "indexed" and d.blend:
        reason = f"is not read with data.source={d.source}"
        yield repair(cfg, "data.blend", reason, "indexed", at="data.source")
    if d.source != "indexed" and d.validation:
        yield repair(cfg, "data.validation", f"is not read with data.source={d.source}", [])
    if d.source != "indexed":
        return
    if not d.blend:
        reason = "names no .bin/.idx files, and data.source=indexed"
        yield repair(cfg, "data.blend", reason, ["prefix"])
    for path in ("data.blend", "data.validation"):
        entries = get(cfg, path)
        weighted = [is_number(item) for item in entries]
        if any(weighted) and weighted != [True, False] * (len(entries) // 2):
            yield repair(cfg, path, "must be prefixes, or weights and prefixes in turn", form)
        elif any(weighted) and not any(map(float, entries[::2])):
            yield repair(cfg, path, "gives no prefix a weight above 0", form)


def _documents(cfg: Config) -> Iterator[str]:
    d, path = cfg.data, "data.document_mask"
    if d.document_mask and d.source == "synthetic":
        reason = "needs documents, and random tokens (data.source=synthetic) have none"
        yield repair(cfg, path, reason, False)
    if d.max_documents and not d.document_mask:
        yield repair(cfg, "data.max_documents", f"needs {path}=true", 0)
    if not d.document_mask:
        return
    if cfg.model.moe.router.seq_aux_loss and d.micro_batch > 1:
        reason = (
            f"is more than one sequence, of which {path}=true makes one, and "
            "model.moe.router.seq_aux_loss is of each"
        )
        yield repair(cfg, "data.micro_batch", reason, 1)
    attention = attention_backend(cfg.kernels.attention)
    if attention.documents and not attention.documents_over_ranks and key_ranks(cfg) > 1:
        reason = f"has no documents in sequences that ranks share ({path}=true, parallel.context)"
        reason += ", unless they can share out heads"
        yield repair(cfg, "kernels.attention", reason, "auto")
    if not attention.documents:
        reason = f"has no documents that end inside a sequence ({path}=true)"
        yield repair(cfg, "kernels.attention", reason, "auto")


def _graph(cfg: Config) -> Iterator[str]:
    if cfg.run.graph == capture.CAPTURED and (reason := capture.not_capturable(cfg)):
        yield repair(cfg, "run.graph", f"cannot run: {reason}", "auto")


def _exchange(cfg: Config) -> Iterator[str]:
    p = cfg.parallel
    transport = TRANSPORTS.get(p.dispatch)  # none yet with auto
    if p.comm_sms not in (0, "auto") and transport is not None and not transport.takes_sms:
        reason = f"has no effect with parallel.dispatch={p.dispatch}, beside which nothing can run"
        yield repair(cfg, "parallel.comm_sms", reason, "auto")
    if p.overlap_microbatches == "on" and (refusal := not_overlappable(cfg)):
        yield repair(cfg, "parallel.overlap_microbatches", f"cannot run: {refusal}", "auto")
    if p.distributed_optimizer in ZERO3:
        yield from resolve_name(SHARDED_PROBLEMS)(cfg)


def _optim(cfg: Config) -> Iterator[str]:
    o = cfg.optim
    if o.min_lr > o.lr:
        yield repair(cfg, "optim.min_lr", f"is above lr={o.lr}", o.lr)
    if o.decay_tokens and o.decay_steps:
        reason = f"is not possible with decay_tokens={o.decay_tokens:g}, which says the same"
        yield repair(cfg, "optim.decay_steps", reason, 0)
    yield from _schedule(cfg)
    a, ranks = cfg.model.attention, cfg.parallel.tensor
    facts = OPTIMIZERS[o.kind]
    if facts.whole_matrices and a.kind == "gqa" and ranks > a.kv_heads:
        reason = f"cuts one head's keys and values (model.attention.kv_heads={a.kv_heads}), which "
        reason += f"optim.kind={o.kind} updates whole"
        yield repair(cfg, "parallel.tensor", reason, a.kv_heads)
    if o.qk_clip and cfg.model.attention.qk_norm:
        reason = "rescales weights in front of a norm that undoes it (model.attention.qk_norm=true)"
        yield repair(cfg, "optim.qk_clip", reason, 0)
    if not core_layers(cfg.model):
        only = " and ".join(MIXERS[name].meaning for name in mixer_layers(cfg.model))
        reason = f"is of attention logits, and all layers have {only}, which has none"
        for knob in ("max_logit_every", "qk_clip"):
            if getattr(o, knob):
                yield repair(cfg, f"optim.{knob}", reason, 0)
    over_ranks = attention_backend(cfg.kernels.attention).max_logits_over_ranks
    if logit_interval(o) and not over_ranks and cfg.parallel.context > 1:
        reason = (
            "leaves out the largest logits (optim.qk_clip, optim.max_logit_every) of sequences "
            f"split by parallel.context={cfg.parallel.context}"
        )
        yield repair(cfg, "kernels.attention", reason, "auto")
    if MOMENTS[o.moments].hosted:
        reason = f"is impossible with states in host memory (optim.moments={o.moments})"
        plain: dict[str, Any] = {"optim.ema": 0.0, "optim.qk_clip": 0.0}
        plain |= {"parallel.distributed_optimizer": True}
        # With fp32 moments Megatron-Core makes fp32 copies of all gradients in bf16.
        plain |= {} if MOMENTS[o.moments].bf16 else {"parallel.grad_dtype": "fp32"}
        yield from (repair(cfg, k, reason, v) for k, v in plain.items() if get(cfg, k) != v)
    if MOMENTS[o.moments].bf16:
        for knob in facts.decay_rates:
            # A step at 0.999 takes off less than half a unit in the last place of bf16: nothing.
            if getattr(o, knob) > _BETA_OF_BF16:
                reason = f"is above {_BETA_OF_BF16}, where moments={o.moments} rounds decay away"
                yield repair(cfg, f"optim.{knob}", reason, _BETA_OF_BF16)


def _schedule(cfg: Config) -> Iterator[str]:
    """Yield the problems of a learning rate whose warm-up and decay meet."""
    o, data = in_steps(cfg.optim, cfg.data), cfg.data
    wsd, warmup = o.schedule == "WSD", o.warmup_steps

    def knob(name: str, steps: int) -> tuple[str, float]:
        if getattr(o, f"{name}_tokens"):
            tokens = samples_after(data, steps) * data.sequence_length
            return f"optim.{name}_tokens", float(tokens)
        return f"optim.{name}_steps", steps

    if 0 < o.decay_steps <= warmup:
        reason = f"ends within the warm-up of {pluralize(warmup, 'step')}"
        path, fits = knob("decay", warmup + 1 + (warmup // 9 if wsd else 0))
        yield repair(cfg, path, reason, fits)
    end = in_steps(cfg.optim, data).decay_steps or cfg.run.steps - cfg.run.schedule_begin
    if wsd and warmup > (room := end - wsd_decay_steps(end)):
        reason = (
            f"reaches into the last tenth of {pluralize(end, 'step')}, in which schedule=WSD decays"
        )
        path, fits = knob("warmup", room)
        yield repair(cfg, path, reason, fits)


def _run(cfg: Config) -> Iterator[str]:
    r = cfg.run
    if r.name in ("", ".", "..") or "/" in r.name:
        yield repair(cfg, "run.name", "must be the name of one folder", cfg.model.name)
    try:
        machine_named(r.machine)
    except ValueError as error:
        near = difflib.get_close_matches(r.machine.lower(), MACHINES, n=1)
        yield repair(cfg, "run.machine", str(error), next(iter(near), "h200"))
    if not r.resume:
        yield repair(cfg, "run.resume", "must be auto, never or a checkpoint", "auto")
    if r.requeue_code > 255 or r.requeue_code in _TAKEN_CODES:
        yield repair(cfg, "run.requeue_code", "must be a code below 256 that no error has", 85)
    if r.profile and (len(r.profile) != 2 or not 1 <= r.profile[0] <= r.profile[1] <= r.steps):
        last = min(r.steps, 12)
        reason = f"must be [first,last] within steps 1 to {r.steps}"
        yield repair(cfg, "run.profile", reason, [max(1, last - 2), last])


def _recorded(cfg: Config) -> Iterator[str]:
    backend = cfg.kernels.backend
    if cfg.run.record_routing and expert_backend(backend).own_router:
        reason = f"is not possible with kernels.backend={backend}"
        yield repair(cfg, "run.record_routing", reason, "")


def _folders(cfg: Config) -> Iterator[str]:
    """Object stores are no folders; a knob that takes one would make a folder of that name."""
    fits = {"run.dir": "runs", "data.cache": ""}
    fits |= {"run.record_routing": "", "model.moe.router.replay": ""}
    for path, value in fits.items():
        if is_address(get(cfg, path)):
            reason = "is an address; only folders of a (mounted) file system can be used"
            if path == "run.dir":
                reason += ", and run.checkpoints takes an address for checkpoints alone"
            yield repair(cfg, path, reason, value)
    if not cfg.run.dir:
        yield repair(cfg, "run.dir", "must be a folder", "runs")


def _addresses(cfg: Config) -> Iterator[str]:
    for path in ("run.checkpoints", "run.resume"):
        value = get(cfg, path)
        if path == "run.checkpoints" and value and not is_address(value):
            yield repair(cfg, path, f"is no address, as in s3://bucket/runs; {_OF_ALL}", "")
        elif is_address(value) and (found := flaw(value)):
            reason, meant = found
            if path == "run.checkpoints" and not is_address(meant):
                reason, meant = f"{reason}: {_OF_ALL}", ""
            yield repair(cfg, path, reason, meant)
    for path in ("data.blend", "data.validation"):
        entries = get(cfg, path)
        flaws = {item: fault for item in entries if is_address(item) and (fault := flaw(item))}
        for reason, _ in list(flaws.values())[:1]:
            better = [flaws[item][1] if item in flaws else item for item in entries]
            yield repair(cfg, path, f"has an address that {reason}", better)


def _kernels(cfg: Config) -> Iterator[str]:
    """Choices that no machine can serve; what this machine can is the kernel registry's answer."""
    k, r = cfg.kernels, cfg.run
    lookups = {"backend": expert_backend, "attention": attention_backend, "norm": norm_backend}
    for knob, lookup in lookups.items():
        if r.device == "cpu" and lookup(getattr(k, knob)).cuda:
            yield repair(cfg, f"kernels.{knob}", "needs CUDA, and run.device is cpu", "auto")
    if in_bf16(cfg):
        return
    experts = expert_backend(k.backend)  # after repairs
    if experts.bf16_on_cuda and (experts.cuda or r.device == "cuda"):
        reason = f"is too much for kernels.backend={k.backend}, which needs bf16 on CUDA"
        yield repair(cfg, "precision.recipe", reason, "bf16")
        return
    for knob, lookup in lookups.items():
        if lookup(getattr(k, knob)).bf16:
            yield repair(cfg, f"kernels.{knob}", "needs bf16, and precision is fp32", "auto")
    if cfg.parallel.grad_dtype == "bf16":
        yield repair(cfg, "parallel.grad_dtype", "would round the gradients of fp32", "fp32")
