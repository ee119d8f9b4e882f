"""Seconds of the exchange of expert tokens, and the part of them that computation hides."""

from dataclasses import dataclass

from phalanx.configs.schema import Config
from phalanx.configs.tables.backends import expert_backend
from phalanx.configs.tables.machines import Machine
from phalanx.moe.estimate.traffic import costs, overlap_sms, traffic
from phalanx.parallel.dispatcher.costs import Links


@dataclass(frozen=True)
class Exchange:
    """Dispatch and combine of one token in one MoE layer, in seconds."""

    forward: float
    backward: float
    hidden: bool
    """The forward pass of a micro-batch runs beside the backward pass of the one before it."""
    taken: float = 0.0
    """Part of a GPU that hidden exchanges take from the computation beside them."""

    @property
    def total(self) -> float:
        """Seconds of both passes, hidden or not."""
        return self.forward + self.backward

    def exposed(self, seconds: float, computing: float, micro_batches: int) -> float:
        """Seconds by which a step is longer because of this exchange.

        Without overlap that is all of it. With overlap those of the first forward and the last
        backward pass are exposed. Between them the exchanges of a backward pass are hidden by a
        forward pass, a third of the work, and the other way round; the computation beside them is
        slower by what they take of the GPU.

        Args:
            seconds: all exchanges of a micro-batch on a stage.
            computing: all other work of a micro-batch.
            micro_batches: number per step.
        """
        if not self.hidden:
            return micro_batches * seconds
        forward, backward = (
            seconds * t / (self.total or 1.0) for t in (self.forward, self.backward)
        )
        exposed = max(0.0, backward - computing / 3, forward - computing * 2 / 3)
        exposed += self.taken * (seconds - exposed)
        return seconds + (micro_batches - 1) * exposed


def own_exchange(cfg: Config, world: int, machine: Machine) -> Exchange:
    """The exchange of `parallel.dispatch`; `cfg` has resolved kernels."""
    sent = traffic(cfg, world)
    forward, backward = (_crossing(cfg, world, machine, x) for x in (sent.forward, sent.backward))
    return Exchange(forward, backward, hidden=cfg.parallel.overlap_microbatches == "on")


def _crossing(cfg: Config, world: int, machine: Machine, sent: Links) -> float:
    """Seconds of a token's bytes, without those that overlap the experts of the same layer."""
    near, far = sent.near / (machine.node_gbs * 1e9), sent.far / (machine.network_gbs * 1e9)
    transport = costs(cfg, world)
    if overlap_sms(cfg, world):
        near *= transport.exposed
    if transport.pipelined and not expert_backend(cfg.kernels.backend).stock_layer:
        return max(near, far)
    return near + far
