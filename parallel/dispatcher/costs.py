"""What a transport sends and holds, in rows of the hidden size: estimates without ranks or GPUs.

Every transport states its own (`parallel.dispatcher.transport_class.Dispatcher.costs`), of one MoE
layer, one micro-batch and one rank; `moe.estimate` turns rows into bytes and seconds.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Links:
    """Rows or bytes of a token that leave GPUs, on average over the GPUs that pass it on."""

    near: float
    """Over the links inside a node."""
    far: float
    """Over the network, to GPUs of other nodes."""

    def __add__(self, other: "Links") -> "Links":
        return Links(self.near + other.near, self.far + other.far)

    def __rmul__(self, factor: float) -> "Links":
        return Links(factor * self.near, factor * self.far)

    @property
    def total(self) -> float:
        """Of both."""
        return self.near + self.far


NOTHING = Links(0.0, 0.0)


@dataclass(frozen=True)
class Reach:
    """An expert-parallel group, and how many of its ranks an average token wants."""

    ranks: int
    nodes: int
    """That its ranks, which are neighbours, are on."""
    tokens: int
    """Of a rank."""
    wanted_ranks: float
    """Ranks that hold one of the token's experts, its own included."""
    other_nodes: float
    """Nodes other than the token's own that hold one of its experts."""
    pushes: bool
    """Ranks of a node can write to each other's memory."""
    keep: bool
    """`parallel.save_x=keep`: received tokens are kept for the backward pass, not sent again."""

    rows_back: int = 1
    """Rows of a token that a rank sends back by themselves, for each of its slots where experts are
    cloned; 1: their sum."""

    @property
    def node_ranks(self) -> float:
        """Of the group on one node, on average."""
        return self.ranks / self.nodes

    @property
    def received(self) -> int:
        """Rows that a rank has room for, one for every token of the group."""
        return self.ranks * self.tokens

    @property
    def once_a_rank(self) -> Links:
        """A row from the token's rank straight to each rank that wants it."""
        hit, ranks = self.wanted_ranks, self.ranks
        return Links(hit * (self.node_ranks - 1) / ranks, hit * (1 - 1 / self.nodes))

    @property
    def once_a_node(self) -> Links:
        """A row to one GPU of each node that wants it, and from there to the ranks that do."""
        size = self.node_ranks
        return Links(self.wanted_ranks * (size - 1) / size, self.other_nodes)


@dataclass(frozen=True)
class Costs:
    """Of a transport, for a `Reach`."""

    there: Links = NOTHING
    """Rows of a token on the way to its experts; gradients come back the same way."""
    back: Links = NOTHING
    """Rows of a token on the way back."""
    again: Links = NOTHING
    """Rows of a token that are sent a second time in the backward pass."""
    kept: int = 0
    """Rows that a rank keeps for the backward pass."""
    backward: int = 0
    """Rows that its backward pass holds on top."""
    buffers: int = 0
    """Received rows and their routing that receive buffers outside torch's allocator have room for,
    whatever the load, shared by all layers."""
    exposed: float = 1.0
    """Part of the time on the links inside a node that is waited for where `parallel.comm_sms` are
    set aside; 1: nothing overlaps."""
    pipelined: bool = False
    """Rows are passed on inside a node as they arrive from the network: the slower of the two
    counts alone."""
