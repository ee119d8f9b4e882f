"""Rows of the hidden size that a transport sends and holds: estimates without ranks or GPUs.

Every transport states its costs (`parallel.dispatcher.transport_class.Dispatcher.costs`) for one
MoE layer, one micro-batch and one rank; `moe.plan.page` turns rows into bytes and seconds.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Links:
    """Rows or bytes of a token that leave GPUs, on average over the GPUs that pass it on."""

    near: float  # rows or bytes over the links inside a node
    far: float  # rows or bytes over the network, to GPUs of other nodes

    def __add__(self, other: "Links") -> "Links":
        return Links(self.near + other.near, self.far + other.far)

    def __rmul__(self, factor: float) -> "Links":
        return Links(factor * self.near, factor * self.far)

    @property
    def total(self) -> float:
        """Sum over both kinds of links."""
        return self.near + self.far


NOTHING = Links(0.0, 0.0)


@dataclass(frozen=True)
class GroupTopology:
    """An expert-parallel group, and the ranks and nodes that an average token goes to."""

    ranks: int
    nodes: int  # number of nodes that its ranks, which are neighbours, span
    tokens: int  # number of tokens of a rank
    wanted_ranks: float
    """Number of ranks that hold one of the token's experts, its own rank included."""
    other_nodes: float  # number of nodes, without the token's own, that hold one of its experts
    block: int  # number of rows in a block of a rank's tokens for one node, which is static
    pushes: bool  # true if ranks of a node can write to each other's memory
    keep: bool
    """True with `parallel.save_x=keep`: received tokens are saved for backward, not resent."""

    rows_back: int = 1  # rows of a token that a rank sends back: 1, their sum, or one per expert id

    @property
    def node_ranks(self) -> float:
        """Number of ranks of the group on one node, on average."""
        return self.ranks / self.nodes

    @property
    def received(self) -> int:
        """Number of rows in a receive buffer: one for every token of the group."""
        return self.ranks * self.tokens

    @property
    def received_blocks(self) -> int:
        """Number of rows that a rank of `hier` receives: the blocks of all ranks for its node."""
        return self.ranks * self.block

    @property
    def once_a_rank(self) -> Links:
        """A row from the token's rank directly to each rank with one of its experts."""
        hit, ranks = self.wanted_ranks, self.ranks
        return Links(hit * (self.node_ranks - 1) / ranks, hit * (1 - 1 / self.nodes))

    @property
    def once_a_node(self) -> Links:
        """A row to one GPU of each node with one of its experts, and from there to the ranks."""
        size = self.node_ranks
        return Links(self.wanted_ranks * (size - 1) / size, self.other_nodes)


@dataclass(frozen=True)
class TransportCosts:
    """Costs of a transport for a `GroupTopology`."""

    there: Links = NOTHING
    """Rows of a token on the way to its experts; gradients come back the same way."""
    back: Links = NOTHING  # rows of a token on the way back
    resent: Links = NOTHING  # rows of a token that are resent in the backward pass
    saved: int = 0  # rows that a rank saves for the backward pass
    backward: int = 0  # rows that its backward pass holds beyond the saved ones
    buffers: int = 0
    """Rows, with routing, of receive buffers outside torch's allocator, shared by all layers."""
    exposed: float = 1.0
    """Exposed part of the time on links inside a node with reserved SMs; 1: no overlap."""
    pipelined: bool = False
    """True if rows are forwarded inside a node as they arrive: the slower link counts alone."""
