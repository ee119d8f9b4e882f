"""Can forward and backward of a step be captured as one CUDA graph? One answer for all who ask."""

from phalanx.configs.arithmetic.layers import has_experts, mixer_layers, mixer_of
from phalanx.configs.formats import quantizes
from phalanx.configs.schema import Config
from phalanx.configs.tables.backends import attention_backend, expert_backend
from phalanx.configs.tables.transports import TRANSPORTS

CAPTURED, EAGER = "full_iteration", "off"
WARM_STEPS = 2  # eager steps before the capture: lazy initialisations of libraries


def not_capturable(cfg: Config) -> str | None:
    """Why the steps of a run cannot be captured; None if they can.

    An `auto` of kernels, transport or device that is not resolved yet refuses nothing.
    """
    k, p, r = cfg.kernels, cfg.parallel, cfg.run
    transport, attention = TRANSPORTS.get(p.dispatch), attention_backend(k.attention)
    if r.device == "cpu":
        return "needs CUDA"
    counts = has_experts(cfg.model) or quantizes(cfg)  # else Megatron-Core's own MLPs
    if expert_backend(k.backend).host_counts and counts:
        return f"{k.backend} experts count their rows on the host"
    if not attention.graph:
        return f"kernels.attention={k.attention} is for checks of eager steps"
    if p.context > 1 and not attention.graph_over_ranks:
        return f"kernels.attention={k.attention} passes keys and values from rank to rank"
    for name in mixer_layers(cfg.model):
        if reason := mixer_of(name).not_capturable(cfg):
            return reason
    if transport is not None and not transport.graph:
        return f"parallel.dispatch={p.dispatch} counts rows on the host"
    return None


def forced_graph_error(reason: str) -> str:
    """The message where `full_iteration` is forced and cannot be."""
    return f"run.graph={CAPTURED} cannot run: {reason}; set run.graph=auto"


def resolved_graph(cfg: Config) -> str:
    """Return `run.graph` with `auto` resolved, of a `cfg` as `not_capturable` takes it."""
    if cfg.run.graph != "auto":
        return cfg.run.graph
    return CAPTURED if not_capturable(cfg) is None else EAGER
