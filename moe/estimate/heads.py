"""Traffic of linear attention between context ranks: all-to-all from tokens to heads, and back.

Between its projections a rank has some of the heads over full sequences (`parallel.context`). It
saves and computes as much as with all heads over its own tokens; only these exchanges are added.
"""

from phalanx.configs.formats import width
from phalanx.configs.linear_attention import HEAD_DIM, input_dim
from phalanx.configs.schema import Config
from phalanx.configs.tables.machines import Machine
from phalanx.parallel.dispatcher.costs import Links


def heads_traffic(cfg: Config, machine: Machine) -> Links:
    """Bytes of one layer and one token, forward and backward.

    Tensor ranks each have a part of a sequence's tokens.
    """
    p, a = cfg.parallel, cfg.model.linear_attention
    # Outputs of the input projection to heads, inputs of the output projection back to tokens;
    # gradients take the same exchanges in reverse, and recomputation repeats the forward ones.
    passes = 3 if "full" in cfg.run.recompute else 2
    sent = passes * (input_dim(a) + a.value_heads * HEAD_DIM) * width(cfg)
    # Neighbouring context ranks are `parallel.tensor` ranks apart.
    near = min(p.context, max(1, machine.node_gpus // p.tensor))
    return Links(sent * (near - 1) / p.context, sent * (p.context - near) / p.context)


def heads_seconds(cfg: Config, machine: Machine) -> float:
    """Seconds of that traffic, which nothing overlaps."""
    sent = heads_traffic(cfg, machine)
    return sent.near / (machine.node_gbs * 1e9) + sent.far / (machine.network_gbs * 1e9)
