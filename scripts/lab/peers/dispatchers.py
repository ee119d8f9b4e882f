"""Packages by which other stacks exchange tokens: their rates over the network, as published.

NCCL's all-to-all sends a row for each expert of a token. DeepEP and HybridEP send a token once to
each node with one of its experts, and pass it on inside the node. Their benchmarks divide all rows
of a token by the time, those of its own node included: the network carries `1 - 1 / nodes` of the
printed rate.
"""

from dataclasses import dataclass

from phalanx.configs.schema import Config
from phalanx.configs.tables.machines import Machine
from phalanx.extras.baseline.rules import exchange_costs
from phalanx.moe.plan.cost.exchange import Exchange
from phalanx.moe.plan.cost.traffic import nodes, reach, resends
from phalanx.parallel.dispatcher.costs import Links


@dataclass(frozen=True)
class PeerDispatcher:
    """A package and its printed rates."""

    source: str
    printed_gbs: dict[int, float]
    """Rate by number of nodes of eight GPUs, in bf16: the mean of dispatch and combine."""
    sms: int  # SMs that its kernels take

    def network_gbs(self, nodes: int) -> float:
        """Rate over the network of one GPU, in units of 1e9 bytes a second, for at least 2 nodes.

        Between and beyond the benchmarks it is that of the nearest number below.
        """
        measured = max(n for n in self.printed_gbs if n <= nodes)
        return self.printed_gbs[measured] * (1 - 1 / measured)


DISPATCHERS: dict[str, PeerDispatcher] = {
    "hybridep": PeerDispatcher(
        # Kernel time with 16 SMs on H100s: 71.71 and 62.95, 57.69 and 57.46, 49.97 and 49.77 GB/s.
        # The recipes set 32 SMs.
        source="https://github.com/deepseek-ai/DeepEP/blob/41cad94/docs/README_Hybrid-EP.md",
        printed_gbs={2: 67.3, 4: 57.6, 8: 49.9},
        sms=32,
    ),
    "deepep": PeerDispatcher(
        # Version 1 on H800s with the same network: 43 and 43, 58 and 57, 51 and 50 GB/s.
        source="https://github.com/deepseek-ai/DeepEP/blob/0297fc8/docs/legacy.md",
        printed_gbs={2: 43.0, 4: 57.5, 8: 50.5},
        sms=24,
    ),
}
"""Packages by the name that records have in `stack.dispatcher`."""

_SMS = 132  # SMs of a Hopper GPU


ALLTOALL = "alltoall"  # NCCL's, of Megatron-Core and torchtitan
_ALLTOALL_SMS = 24  # NCCL's channels take about as many as DeepEP


def exchange_of(
    cfg: Config, world: int, machine: Machine, name: str, overlap: bool, alltoall: float
) -> Exchange:
    """Seconds of a token in one MoE layer by the package with this name.

    An all-to-all reaches the part `alltoall` of the rates of links.
    """
    if name != ALLTOALL:
        return peer_exchange(cfg, world, machine, DISPATCHERS[name], overlap)
    rows = exchange_costs(cfg, reach(cfg, world)).there
    sent: Links = 2 * cfg.model.hidden * rows
    near, far = sent.near / machine.node_gbs, sent.far / machine.network_gbs
    once = 2 * max(near, far) / (1e9 * alltoall)
    again = once if resends(cfg) else 0.0
    return Exchange(once, once + again, hidden=overlap, taken=_ALLTOALL_SMS / _SMS)


def peer_exchange(
    cfg: Config, world: int, machine: Machine, dispatcher: PeerDispatcher, overlap: bool
) -> Exchange:
    """Seconds of a token in one MoE layer by another stack's package.

    Links inside a node have the machine's rate. With `overlap` exchanges are beside another
    micro-batch.
    """
    rows, over = reach(cfg, world).once_a_node, nodes(cfg, world)
    network = dispatcher.network_gbs(over) if over > 1 else machine.network_gbs
    near, far = machine.node_gbs * 1e9, network * 1e9
    sent: Links = 2 * cfg.model.hidden * rows
    once = 2 * max(sent.near / near, sent.far / far)  # dispatch and combine
    again = once if resends(cfg) else 0.0
    return Exchange(once, once + again, hidden=overlap, taken=dispatcher.sms / _SMS)
