"""One call for a whole model of transformers: `apply`."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedModel
from transformers.trainer_utils import unwrap_peft_model

from phalanx.adapters.transformers.attention import FA4, fa4_refusal
from phalanx.adapters.transformers.losses import fuse_loss
from phalanx.adapters.transformers.modules import NAME, experts_of, is_dispatched
from phalanx.adapters.transformers.norms import fuse_norms
from phalanx.adapters.transformers.rotary import fuse_rotary
from phalanx.adapters.transformers.routers import fuse_routers
from phalanx.configs.knobs import pluralize

SWITCHES = ("experts", "norms", "rotary", "router", "loss", "attention")
_OWN_ATTENTION = ("sdpa", "eager", FA4)  # which `auto` replaces


@dataclass
class Report:
    """Parts of a model that `apply` has replaced or left; it prints as a table."""

    model: str
    applied: dict[str, str] = field(default_factory=dict)  # by switch: to what
    left: dict[str, str] = field(default_factory=dict)  # by switch: why

    def __str__(self) -> str:
        rows = [f"phalanx in {self.model}"]
        for name in SWITCHES:
            parts = [self.applied.get(name), self.left.get(name) and f"left: {self.left[name]}"]
            if any(parts):
                rows.append(f"  {name:<10} {'; '.join(filter(None, parts))}")
        return "\n".join(rows)


def apply(
    model: Any,
    *,
    experts: bool | str = "auto",
    norms: bool | str = "auto",
    rotary: bool | str = "auto",
    router: bool | str = "auto",
    loss: bool | str = "auto",
    attention: bool | str = "auto",
) -> Report:
    """Have a model, or each new model of a class, computed by this project's kernels.

    Parameters, state dicts and saved models stay those of transformers. Call it before a model is
    compiled or sharded, and before or after adapters of PEFT are added. It may be repeated.

    Args:
        model: a model of transformers, also inside one of PEFT, or its class.
        experts: `experts_implementation="phalanx"`.
        norms: RMSNorms by `fuse_norms`.
        rotary: rotation of queries and keys in one pass, for all models of this file's classes.
        router: choice of experts by `router_topk`.
        loss: in training with labels no logits: the output's are None.
        attention: causal attention by flash-attn-4.

    Each is `auto`, where possible, True, an error where it is not, or False.

    Raises:
        ValueError: a switch is True, and the model has no such part or it cannot run here.
    """
    switches: dict[str, Any] = dict(
        experts=experts, norms=norms, rotary=rotary, router=router, loss=loss, attention=attention
    )
    for name, value in switches.items():
        if value not in (True, False, "auto"):
            raise ValueError(f"{name}={value!r} is unknown: use True, False or 'auto'")
    if isinstance(model, type):
        return _apply_to_class(model, switches)
    whole = unwrap_peft_model(model)
    if not isinstance(whole, PreTrainedModel):
        raise ValueError(
            f"{type(model).__name__} is no model of transformers, nor its class: give the model "
            "itself, before it is compiled or wrapped"
        )
    report = Report(type(whole).__name__)
    for name, value in switches.items():
        if value is False:
            continue
        done, why = _PARTS[name](whole, insisted=value is True)
        if done:
            report.applied[name] = done
        if why:
            report.left[name] = why
        if value is True and not done:
            raise ValueError(f"{report.model}: {name}=True is impossible: {why}")
    return report


def _experts(model: Any, *, insisted: bool) -> tuple[str, str]:
    if not any(is_dispatched(module) for module in model.modules()):
        return "", "it has no experts that transformers dispatches"
    before = model.get_experts_implementation()
    try:
        model.set_experts_implementation(NAME)
    except ValueError as refusal:
        model.set_experts_implementation(before)
        return "", str(refusal)
    return pluralize(len(experts_of(model)), "module"), ""


def _norms(model: Any, *, insisted: bool) -> tuple[str, str]:
    fused = fuse_norms(model)
    number = sum(type(module).__name__.endswith("RMSNorm") for module in model.modules())
    why = f"{number - fused} are not torch's function" if number > fused else ""
    if not fused:
        return "", f"no RMSNorm of it is torch's function ({number} are others)"
    return f"{fused} of {pluralize(number, 'module')}", why


def _rotary(model: Any, *, insisted: bool) -> tuple[str, str]:
    found = ", ".join(fuse_rotary(model))
    return found, "" if found else "no function of its file rotates pairs as the kernel does"


def _router(model: Any, *, insisted: bool) -> tuple[str, str]:
    fused, others = fuse_routers(model)
    why = f"{', '.join(others)}: router_topk has no such choice" if others else ""
    if not fused:
        return "", why or "it has no router that returns logits, weights and experts"
    return pluralize(fused, "module"), why


def _loss(model: Any, *, insisted: bool) -> tuple[str, str]:
    why = fuse_loss(model)
    return ("", why) if why else ("without logits in training", "")


def _attention(model: Any, *, insisted: bool) -> tuple[str, str]:
    present = model.config._attn_implementation
    if not insisted and present not in _OWN_ATTENTION:
        return "", f"attn_implementation={present!r} was chosen"
    if why := fa4_refusal(model):
        return "", why
    if not model._can_set_attn_implementation():
        return "", "transformers cannot change its attention"
    model.set_attn_implementation(FA4)
    return "flash-attn-4", ""


_PARTS: dict[str, Callable[..., tuple[str, str]]] = dict(
    experts=_experts, norms=_norms, rotary=_rotary, router=_router, loss=_loss, attention=_attention
)


def _apply_to_class(kind: type, switches: dict[str, Any]) -> Report:
    """Apply the switches to each model that is made or loaded from now on."""
    if not issubclass(kind, PreTrainedModel):
        raise ValueError(f"{kind.__name__} is no class of models of transformers")
    whole: Any = kind
    made, loaded = whole.__init__, whole.from_pretrained.__func__

    @functools.wraps(made)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        # A model that is being loaded has no values yet.
        if type(self).__init__ is init and not any(p.is_meta for p in self.parameters()):
            apply(self, **switches)

    @functools.wraps(loaded)
    def from_pretrained(cls: type, *args: Any, **kwargs: Any) -> Any:
        built = loaded(cls, *args, **kwargs)
        apply(built[0] if isinstance(built, tuple) else built, **switches)
        return built

    for name, value in (("__init__", init), ("from_pretrained", classmethod(from_pretrained))):
        setattr(kind, name, value)
    on = [name for name, value in switches.items() if value is not False]
    return Report(f"each new {kind.__name__}", dict.fromkeys(on, "where it is made"))
