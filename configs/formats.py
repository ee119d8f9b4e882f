"""Meaning of `precision` for everything else: bytes, layers that follow a recipe, and its rules.

Others ask here and do not compare names of recipes.
"""

from collections.abc import Iterator
from dataclasses import fields
from pkgutil import resolve_name

from phalanx.configs.knobs import listed, repair
from phalanx.configs.schema import Config, PrecisionConfig
from phalanx.configs.tables.backends import EXPERT_BACKENDS, expert_backend
from phalanx.configs.tables.recipes import RECIPES, RecipeFacts
from phalanx.configs.tables.transports import TRANSPORTS

BLOCK = 128  # channels that share a scale


def recipe_facts(cfg: Config) -> RecipeFacts:
    """Facts of the recipe of the run."""
    return RECIPES[cfg.precision.recipe]


def is_microscaling(recipe: str) -> bool:
    """Return whether a recipe has blocks along the contraction, which Blackwell multiplies."""
    return recipe in RECIPES and RECIPES[recipe].microscaling


def is_fp8(cfg: Config) -> bool:
    """Linear layers multiply FP8 in blocks of 128."""
    return recipe_facts(cfg).fp8_blocks


def multiplies_fp8(cfg: Config) -> bool:
    """GEMMs of the experts read FP8 in blocks of 128; otherwise weights have no FP8 copies."""
    multiplied = expert_backend(cfg.kernels.backend).multiplies
    return is_fp8(cfg) and cfg.precision.recipe in multiplied


def is_emulated(cfg: Config) -> bool:
    """Experts multiply the values of a recipe in bf16, which costs time."""
    return quantizes(cfg) and expert_backend(cfg.kernels.backend).emulates


def quantizes(cfg: Config) -> bool:
    """Operands of linear layers are quantized by a recipe."""
    return bool(recipe_facts(cfg).build)


def in_bf16(cfg: Config) -> bool:
    """Weights and activations are bf16, and optimizer states have fp32 masters beside them."""
    return recipe_facts(cfg).bf16


def width(cfg: Config) -> int:
    """Bytes of an element of weights and activations."""
    return 2 if in_bf16(cfg) else 4


def grad_width(cfg: Config) -> int:
    """Bytes of an element of accumulated gradients."""
    return 2 if cfg.parallel.grad_dtype == "bf16" else 4


def quantized_layer(cfg: Config, layer: int) -> bool:
    """Return whether a layer follows the recipe of the run.

    Layers are numbered from 0 over all stages, those of multi-token prediction last.
    """
    p, layers = cfg.precision, cfg.model.layers
    last = layers - p.bf16_last_layers <= layer < layers
    return quantizes(cfg) and layer >= p.bf16_first_layers and not last


def resident_layers(cfg: Config) -> tuple[int, int]:
    """Number of layers that keep FP8 copies of weights between two updates, and of all layers.

    Layers of multi-token prediction count as one. `precision.weights=auto` counts as `resident`.
    """
    wanted, layers = cfg.precision.weights, cfg.model.layers + (cfg.model.mtp_layers > 0)
    if isinstance(wanted, str):
        return 0 if wanted == "scratch" else layers, layers
    return min(wanted, layers), layers


def is_resident(cfg: Config, layer: int) -> bool:
    """Return whether a layer is one of `resident_layers`, spread evenly over pipeline stages."""
    kept, layers = resident_layers(cfg)
    return (layer + 1) * kept // layers > layer * kept // layers


def quantizes_dense(cfg: Config) -> bool:
    """Linear layers other than the routed experts follow the recipe, if there is one."""
    return cfg.precision.dense == "fp8" and not expert_backend(cfg.kernels.backend).own_fp8


def rows_in_fp8(cfg: Config) -> bool:
    """Tokens and gradients travel to the experts in FP8.

    `auto` does not where weight gradients need them in bf16, or what they travel by.
    """
    p, wanted = cfg.precision, cfg.parallel.dispatch
    if p.dispatch != "auto":
        return p.dispatch == "fp8"
    # A backend's own dispatcher is not one of TRANSPORTS
    if expert_backend(cfg.kernels.backend).own_exchange or not is_fp8(cfg):
        return False
    return p.wgrad == "fp8" and (wanted == "auto" or TRANSPORTS[wanted].fp8)


def quantizes_on_arrival(cfg: Config) -> bool:
    """Experts make FP8 of tokens that travel in bf16: they begin when all tokens are there."""
    own_exchange = expert_backend(cfg.kernels.backend).own_exchange
    return is_fp8(cfg) and not rows_in_fp8(cfg) and not own_exchange


def fp8_row(channels: int, parts: int = 1) -> int:
    """Bytes of a row in FP8 with its fp32 scales; blocks start anew in each of the parts."""
    return channels + 4 * parts * -(-(channels // parts) // BLOCK)


def described(cfg: Config) -> str:
    """`bf16`, or `fp8_block (hidden fp8, bf16_first_layers 1)`: switches away from the defaults."""
    p, default = cfg.precision, PrecisionConfig()
    names = [f.name for f in fields(p) if f.name not in ("recipe", "weights")]
    switched = [f"{n} {getattr(p, n)}" for n in names if getattr(p, n) != getattr(default, n)]
    return f"{p.recipe} ({', '.join(switched)})" if switched else p.recipe


def precision_problems(cfg: Config) -> Iterator[str]:
    """Problems of `precision` with itself, kernels and transport; repairs `cfg` on the way."""
    yield from _switches(cfg)
    if quantizes(cfg):
        yield from _layers(cfg)
    backend, recipe = cfg.kernels.backend, cfg.precision.recipe
    facts = expert_backend(backend)
    runs = facts.emulates or recipe in facts.multiplies
    if recipe_facts(cfg).microscaling and not runs:
        reason = f"has no {recipe}, which {_runs(recipe)}"
        yield repair(cfg, "kernels.backend", reason, "auto")
    elif is_fp8(cfg) and facts.problems:
        yield from resolve_name(facts.problems)(cfg)
    elif multiplies_fp8(cfg) and cfg.precision.wgrad == "bf16":
        emulates = next(name for name, other in EXPERT_BACKENDS.items() if other.emulates)
        reason = f"is not possible with kernels.backend={backend}, but with "
        yield repair(cfg, "precision.wgrad", f"{reason}kernels.backend={emulates}", "fp8")
    yield from _rows(cfg)


def _runs(recipe: str) -> str:
    entries = EXPERT_BACKENDS.items()
    multiply = [name for name, facts in entries if recipe in facts.multiplies]
    emulate = sorted(name for name, facts in entries if facts.emulates)
    return f"{listed(multiply)} multiplies, and {listed(emulate)} emulate"


def _rows(cfg: Config) -> Iterator[str]:
    """Yield the reason against rows in FP8. All transports that `auto` takes carry them."""
    wanted = cfg.parallel.dispatch
    if cfg.precision.dispatch == "fp8" and wanted != "auto" and not TRANSPORTS[wanted].fp8:
        carry = [name for name, facts in TRANSPORTS.items() if facts.fp8 and not facts.one_rank]
        reason = f"cannot travel by parallel.dispatch={wanted}, only by {', '.join(carry)}"
        yield repair(cfg, "precision.dispatch", reason, "auto")


def _switches(cfg: Config) -> Iterator[str]:
    own = recipe_facts(cfg).switches
    for f in fields(cfg.precision):
        of = [recipe for recipe, facts in RECIPES.items() if f.name in facts.switches]
        given = getattr(cfg.precision, f.name)
        unset = given == f.default or (f.name, given) == ("dispatch", "bf16")  # of older runs
        if of and f.name not in own and not unset:
            reason = f"is a switch of {listed(of)}, and precision is {cfg.precision.recipe}"
            yield repair(cfg, f"precision.{f.name}", reason, f.default)


def _layers(cfg: Config) -> Iterator[str]:
    p, layers = cfg.precision, cfg.model.layers
    for name in ("bf16_first_layers", "bf16_last_layers"):
        if p.bf16_first_layers + p.bf16_last_layers >= layers and getattr(p, name):
            others = p.bf16_first_layers + p.bf16_last_layers - getattr(p, name)
            form = "FP8" if is_fp8(cfg) else p.recipe
            reason = f"leaves none of model.layers={layers} in {form}"
            yield repair(cfg, f"precision.{name}", reason, max(0, layers - 1 - others))
