"""What linear attention sends between context ranks: heads for tokens, and back.

Between its projections a rank has some heads over whole sequences (`parallel.context`); that is as
much to keep and to compute as all heads over its own tokens, but for these two exchanges.
"""

from phalanx.configs.formats import width
from phalanx.configs.linear_attention import HEAD_DIM, input_dim
from phalanx.configs.machines import Machine
from phalanx.configs.schema import Config
from phalanx.parallel.dispatcher.costs import Links


def heads_traffic(cfg: Config, machine: Machine) -> Links:
    """Bytes of one layer and one token, forward and backward; tensor ranks each have a part of a
    sequence's tokens."""
    p, a = cfg.parallel, cfg.model.linear_attention
    # Outputs of the input projection there, inputs of the output projection back; gradients take
    # the same ways, and so does all that is computed again.
    passes = 3 if "full" in cfg.run.recompute else 2
    sent = passes * (input_dim(a) + a.value_heads * HEAD_DIM) * width(cfg)
    # Context ranks are as many ranks apart as tensor parallelism has.
    near = min(p.context, max(1, machine.node_gpus // p.tensor))
    return Links(sent * (near - 1) / p.context, sent * (p.context - near) / p.context)


def heads_seconds(cfg: Config, machine: Machine) -> float:
    """Of the same; nothing runs beside it."""
    sent = heads_traffic(cfg, machine)
    return sent.near / (machine.node_gbs * 1e9) + sent.far / (machine.network_gbs * 1e9)
