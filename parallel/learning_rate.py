"""The learning rate over a run, by Megatron-Core's scheduler, and what resuming does to it.

Steps count optimizer steps from 1.
"""

from dataclasses import asdict, dataclass, fields
from types import SimpleNamespace
from typing import Any

from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from phalanx.configs.arithmetic.batch_sizes import in_steps
from phalanx.configs.knobs import overrides
from phalanx.configs.layout import wsd_decay_steps
from phalanx.configs.schema import DataConfig, OptimConfig
from phalanx.parallel.checkpoint.saved_knobs import understood

_DIGITS = ".3g"


class _Scheduler(OptimizerParamScheduler):
    """Megatron-Core's, with an `inverse-square-root` that comes down to `min_lr` as others do.

    Megatron-Core's own is still far above it at the last step of the decay, and drops after it.
    """

    def get_lr(self, param_group: dict[str, Any]) -> float:
        done, last, warmup = self.num_steps, self.lr_decay_steps, self.lr_warmup_steps
        if self.lr_decay_style != "inverse-square-root" or done <= warmup:
            return float(super().get_lr(param_group))
        own = {"max_lr": self.max_lr, "min_lr": self.min_lr} | param_group
        high, low = float(own["max_lr"]), float(own["min_lr"])
        if done >= last:
            return low
        first, now, end = (n**-0.5 for n in (max(warmup, 1), done, last))
        return low + (high - low) * (now - end) / (first - end)


@dataclass(frozen=True)
class Curve:
    """Learning rate of every step: the knobs of `optim` with defaults resolved."""

    lr: float
    min_lr: float
    warmup_steps: int
    decay_steps: int
    schedule: str

    @classmethod
    def of(cls, optim: OptimConfig, steps: int) -> "Curve":
        decay = max(optim.decay_steps or steps, 1)
        return cls(
            lr=optim.lr,
            min_lr=min(optim.min_lr, optim.lr),
            warmup_steps=min(optim.warmup_steps, decay - 1),
            decay_steps=decay,
            schedule=optim.schedule,
        )

    def scheduler(self, optimizer: Any, weight_decay: float = 0.0) -> OptimizerParamScheduler:
        return _Scheduler(
            optimizer,
            init_lr=0.0,
            max_lr=self.lr,
            min_lr=self.min_lr,
            lr_warmup_steps=self.warmup_steps,
            lr_decay_steps=self.decay_steps,
            lr_decay_style=self.schedule,
            start_wd=weight_decay,
            end_wd=weight_decay,
            wd_incr_steps=self.decay_steps,
            wd_incr_style="constant",
            wsd_decay_steps=wsd_decay_steps(self.decay_steps),
            lr_wsd_decay_style="cosine",
            use_checkpoint_opt_param_scheduler=False,
            override_opt_param_scheduler=True,
        )

    def at(self, step: int) -> float:
        scheduler = self.scheduler(SimpleNamespace(param_groups=[]))
        scheduler.step(step)
        return float(scheduler.get_lr({}))


def change(saved: dict[str, Any], optim: OptimConfig, steps: int, done: int) -> str:
    """A line on how a resumed run departs from its learning rate, and what keeps that; or empty.

    Args:
        saved: configuration of the checkpoint, as a plain nested dict.
        optim: this run's optimizer, with warm-up and decay in steps.
        done: steps done at the checkpoint.
    """
    known = understood(saved).values
    if "optim.lr" not in known or "run.steps" not in known or done >= steps:
        return ""
    names = {f.name: known.get(f"optim.{f.name}") for f in fields(OptimConfig)}
    before = OptimConfig(**{name: value for name, value in names.items() if value is not None})
    data = {f.name: known.get(f"data.{f.name}") for f in fields(DataConfig)}
    read = DataConfig(**{name: value for name, value in data.items() if value is not None})
    before = in_steps(before, read)
    old, new = Curve.of(before, known["run.steps"]), Curve.of(optim, steps)
    was, now = (format(curve.at(done + 1), _DIGITS) for curve in (old, new))
    if was == now:
        return ""
    reasons = []
    if old.decay_steps != new.decay_steps and not (before.decay_steps or optim.decay_steps):
        reasons = [f"optim.decay_steps follows run.steps ({old.decay_steps} -> {new.decay_steps})"]
    elif old.decay_steps != new.decay_steps:
        reasons = [f"optim.decay_steps {old.decay_steps} -> {new.decay_steps}"]
    for name in ("lr", "min_lr", "warmup_steps", "schedule"):
        if (a := getattr(before, name)) != (b := getattr(optim, name)):
            reasons.append(f"optim.{name} {a} -> {b}")
    departs = [name for name, value in asdict(old).items() if value != getattr(new, name)]
    kept = {f"optim.{name}": getattr(old, name) for name in sorted(departs)}
    for name in ("warmup", "decay"):
        if f"{name}_steps" in departs and getattr(optim, f"{name}_tokens"):
            kept[f"optim.{name}_tokens"] = 0.0
    keep = overrides(kept)
    return (
        f"the learning rate of step {done + 1} goes from {was} to {now}, because "
        f"{', '.join(reasons)}: set {keep} to keep the old curve"
    )
