"""The factors of `scales` on a model that has its initial weights, and on its optimizer's groups.

All of them are numbers of this start: a checkpoint has weights and moments alone, as any other.
"""

from collections.abc import Sequence
from typing import cast

import torch
from megatron.core.optimizer import ParamKey
from megatron.core.optimizer.optimizer_config import ParamWithNamePredicate
from megatron.core.optimizer_param_scheduler import ParamGroupOverride

from phalanx.configs.arithmetic.layers import has_experts
from phalanx.configs.schema import Config
from phalanx.extras.transfer.scales import (
    EXPERT_FC1,
    EXPERT_FC2,
    FINAL_NORM,
    HIDDEN,
    ROUTER,
    Scale,
    base,
    kind_of,
    scales,
)
from phalanx.kernels.registry import Choice
from phalanx.parallel.engine import Engine


@torch.no_grad()
def begin(cfg: Config, chunks: Sequence[torch.nn.Module]) -> dict[ParamKey, ParamGroupOverride]:
    """Scale the initial weights of bare model chunks in place.

    Returns:
        What the groups of the optimizer have in place of `cfg.optim`, the same on all ranks.

    Raises:
        ValueError: a matrix has no rule.
    """
    factors = scales(cfg)
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            kind = kind_of(name, parameter.dim())
            if kind == FINAL_NORM:  # the factor on the logits, also where the embedding makes them
                parameter.fill_(factors[kind].initial - cfg.model.norm_zero_centered)
            elif factors[kind].initial != 1:
                parameter.mul_(factors[kind].initial)
    return {
        _key(kind): cast(ParamGroupOverride, fields)
        for kind, scale in factors.items()
        if (fields := _fields(cfg, kind, scale))
    }


def lines(cfg: Config, engine: Engine) -> list[Choice]:
    """Line of the start page."""
    found = scales(cfg)
    shown = {"hidden weights": HIDDEN}
    if has_experts(cfg.model):
        shown |= {"router": ROUTER, "fc1 of experts": EXPERT_FC1, "fc2": EXPERT_FC2}
    rates = ", ".join(f"{name} {found[kind].rate:.3g}" for name, kind in shown.items())
    reason = f"rates are of width {base(cfg)['mup']}: times {rates}; hidden weights begin with "
    reason += f"{found[HIDDEN].initial:.3g} of its deviation"
    return [Choice("widths", "mup", reason)]


def _key(kind: str) -> ParamKey:
    def is_of(parameter: torch.nn.Parameter, name: str) -> bool:
        return kind_of(name, parameter.dim()) == kind

    # Predicates are told apart by their names.
    return ParamKey(with_name_predicate=ParamWithNamePredicate(name=f"mup_{kind}", fn=is_of))


def _fields(cfg: Config, kind: str, scale: Scale) -> dict[str, float]:
    o, fields = cfg.optim, dict[str, float]()
    if scale.rate != 1:
        fields |= {"max_lr": o.lr * scale.rate, "min_lr": o.min_lr * scale.rate}
    if scale.decay != 1:  # so that rate times decay stays; those of norms and biases are 0 anyway
        fields["wd_mult"] = scale.decay
    if scale.eps != 1:
        fields["eps"] = o.eps * scale.eps
    return fields
