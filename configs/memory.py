"""Rules of `run.recompute` and `run.offload`."""

from collections.abc import Iterator

from phalanx.configs.arithmetic.layers import has_experts
from phalanx.configs.knobs import listed, repair
from phalanx.configs.schema import Config
from phalanx.configs.tables.activation_memory import CONTAINS
from phalanx.configs.tables.backends import EXPERT_BACKENDS, expert_backend

_AGAINST: dict[str, tuple[str, ...]] = {
    "residual": (),
    "attention": ("mla_up", "attention", "full"),
    "expert_h": ("expert_h", "moe", "full"),
}
"""Parts that are recomputed and would be moved as well."""
_NO_EXPERTS = "needs experts, and model.moe.experts is 0"


def memory_problems(cfg: Config) -> Iterator[str]:
    """Names that repeat, contradict each other, or are of another model or backend."""
    r = cfg.run
    for path, names in (("run.recompute", r.recompute), ("run.offload", r.offload)):
        if len(set(names)) < len(names):
            yield repair(cfg, path, "names one twice", list(dict.fromkeys(names)))
    for whole, parts in CONTAINS.items():
        if whole in r.recompute and (beside := [n for n in r.recompute if n in parts]):
            left = [n for n in r.recompute if n not in parts]
            yield repair(cfg, "run.recompute", f"has {beside[0]} in {whole} already", left)
    for name, reason in _impossible(cfg).items():
        if name in r.recompute:
            left = [n for n in r.recompute if n != name]
            yield repair(cfg, "run.recompute", f"has {name}, which {reason}", left)
    for name in list(r.offload):
        again = [n for n in _AGAINST[name] if n in r.recompute]
        reason = f"would be moved and computed again (run.recompute={again[0]})" if again else ""
        if name == "expert_h" and not has_experts(cfg.model):
            reason = _NO_EXPERTS
        elif name == "expert_h" and name not in expert_backend(cfg.kernels.backend).recomputes:
            reason = _not_of(cfg.kernels.backend)
        if name == "attention" and cfg.parallel.context > 1:
            reason = "is gathered from other ranks with parallel.context above 1"
        if reason:
            left = [n for n in r.offload if n != name]
            yield repair(cfg, "run.offload", f"has {name}, which {reason}", left)


def _impossible(cfg: Config) -> dict[str, str]:
    found = {}
    if cfg.model.attention.kind != "mla":
        found["mla_up"] = "is of model.attention.kind=mla"
    if not has_experts(cfg.model):
        found |= dict.fromkeys(("expert_h", "moe", "moe_act"), _NO_EXPERTS)
        return found
    names = expert_backend(cfg.kernels.backend).recomputes
    if "expert_h" not in names:
        found["expert_h"] = _not_of(cfg.kernels.backend)
    if "moe_act" not in names:
        others = [name for name, facts in EXPERT_BACKENDS.items() if "moe_act" in facts.recomputes]
        found["moe_act"] = f"is of kernels.backend={listed(others)}; these experts always do it"
    return found


def _not_of(backend: str) -> str:
    return f"is not of {expert_backend(backend).maker}'s experts (kernels.backend={backend})"
