"""The transports of tokens to experts: one entry each, with the class that does all the rest.

Classes are named by import path, so that reading the table does not import torch.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class TransportFacts:
    """Properties of a transport that the rules of a configuration ask for."""

    implementation: str  # subclass of `transport_class.Dispatcher`, `module:class`
    meaning: str  # description for the documentation, in Markdown
    auto: bool = True  # `auto` takes the first transport of the table that can run and has this
    one_rank: bool = False  # all experts on one rank, where `auto` takes it
    takes_sms: bool = False  # the number of SMs that exchange can be set
    graph: bool = True  # it can be captured in a CUDA graph: the host waits for nothing
    replicated: str = ""  # `module:class` with `parallel.expert_replication`
    inside: tuple[str, ...] = ()
    """Transports inside each node, of which the first that can run replicates experts. The ranks
    then refuse nothing themselves, and groups only what `parallel.dispatcher.nodes.refuse` does."""
    overlaps_microbatches: bool = False  # exchanges of two passes may be in flight
    collective: bool = False  # by NCCL or gloo; weight gradients hide it in backward passes
    fp8: bool = False  # rows in FP8 (`precision.dispatch`), which `auto` must take

    @property
    def over_nodes(self) -> bool:
        return bool(self.inside)

    @property
    def replicates_experts(self) -> bool:
        """True if it, or the transport inside its nodes, can replicate experts."""
        return bool(self.replicated) or self.over_nodes


MAX_REPLICATED_EXPERTS, MAX_REPLICATION_RANKS = 512, 8
"""Most experts of a layer, and most ranks that share them, of which some can be replicated."""

AUTO_SMS = 16  # number of SMs that `auto` takes for pushes, as in docs/performance.md

TRANSPORTS: dict[str, TransportFacts] = {
    "local": TransportFacts(
        "phalanx.parallel.dispatcher.base:Local",
        "nothing is sent; needs `parallel.expert` = 1",
        one_rank=True,
        fp8=True,
    ),
    "symm": TransportFacts(
        "phalanx.parallel.dispatcher.symm:Symm",
        "pushes each token once to a GPU's memory over NVLink: bf16, one node, Hopper",
        takes_sms=True,
        replicated="phalanx.extras.replication.symm:ReplicatedSymm",
        overlaps_microbatches=True,
        fp8=True,
    ),
    "hier": TransportFacts(
        "phalanx.extras.between_nodes.hierarchical:Hier",
        "sends it once to each node with one of its experts, and inside by `symm` or `alltoall`",
        takes_sms=True,
        inside=("symm", "alltoall"),
        overlaps_microbatches=True,
        collective=True,
        fp8=True,
    ),
    "alltoall": TransportFacts(
        "phalanx.parallel.dispatcher.alltoall:AllToAll",
        "dense collectives of gloo or NCCL, which run everywhere",
        replicated="phalanx.extras.replication.alltoall:ReplicatedAllToAll",
        overlaps_microbatches=True,
        collective=True,
        fp8=True,
    ),
}
"""Facts keyed by the value of `parallel.dispatch`, best first; `auto` is not among them."""
