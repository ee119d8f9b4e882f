"""Arithmetic of what ranks that share sequences exchange for core attention: rules and bytes.

It imports neither torch nor Megatron-Core. Bytes are per token of a rank and layer with core
attention, before tensor ranks share them out.
"""

from phalanx.configs.arithmetic.attention import head_dims
from phalanx.configs.formats import width
from phalanx.configs.schema import Config
from phalanx.configs.tables.machines import Machine
from phalanx.parallel.dispatcher.costs import Links


def heads(cfg: Config) -> tuple[int, int]:
    """Query heads, and key-value heads with those of which several tensor ranks have copies."""
    a = cfg.model.attention
    return a.heads, max(a.kv_heads, cfg.parallel.tensor) if a.kind == "gqa" else a.heads


def own_heads(cfg: Config) -> tuple[int, int]:
    """`heads` of a tensor rank."""
    query, key = heads(cfg)
    return query // cfg.parallel.tensor, max(1, key // cfg.parallel.tensor)


def copies(cfg: Config) -> int:
    """Context ranks that have the same key-value head, if they share out heads."""
    return max(1, cfg.parallel.context // own_heads(cfg)[1])


def chosen(cfg: Config) -> str:
    """`heads`, where documents would be uneven or fewer bytes are exchanged, if it can be."""
    query, key = own_heads(cfg)
    ranks = cfg.parallel.context
    if query % ranks or (key % ranks and ranks % key):
        return "keys"
    fewer = HEADS.bytes_sent(cfg) < KEYS.bytes_sent(cfg)
    return "heads" if cfg.data.document_mask or fewer else "keys"


class Exchange:
    """An exchange, by which R context ranks see what the others have."""

    def bytes_sent(self, cfg: Config) -> float:
        """Bytes that a rank sends in one forward pass."""
        raise NotImplementedError

    def sent(self, cfg: Config, machine: Machine) -> Links:
        """The same by NVLink and network."""
        raise NotImplementedError

    def saved(self, cfg: Config) -> int:
        """Bytes that a forward pass saves more than that of one rank."""
        raise NotImplementedError

    def backward(self, cfg: Config) -> int:
        """Bytes of gradients at once."""
        raise NotImplementedError


class _Keys(Exchange):
    """Keys and values of whole sequences on each rank."""

    def bytes_sent(self, cfg: Config) -> float:
        # A rank has the heads of all its tensor ranks' tokens.
        return float((cfg.parallel.context - 1) * _key_bytes(cfg))

    def sent(self, cfg: Config, machine: Machine) -> Links:
        """All of them are at the rate of the network if context ranks are on several nodes."""
        p, sent = cfg.parallel, self.bytes_sent(cfg)
        inside = p.tensor * p.context <= machine.node_gpus
        return Links(sent, 0.0) if inside else Links(0.0, sent)

    def saved(self, cfg: Config) -> int:
        """Gathered keys and values in place of own ones; results of chunks beside the whole."""
        return (cfg.parallel.context - 1) * _key_bytes(cfg) + _out_bytes(cfg)

    def backward(self, cfg: Config) -> int:
        """Gradients of gathered keys and values: of a chunk, in fp32 before, or three in sum."""
        queries, out = _query_bytes(cfg), _out_bytes(cfg)
        return 3 * cfg.parallel.context * _key_bytes(cfg) + queries + out


class _Heads(Exchange):
    """Some of the heads of whole sequences on each rank."""

    def bytes_sent(self, cfg: Config) -> float:
        """Queries, keys and values of other ranks' heads, and results of other ranks' tokens."""
        there = _query_bytes(cfg) + copies(cfg) * _key_bytes(cfg) + _out_bytes(cfg)
        return there * (1 - 1 / cfg.parallel.context)

    def sent(self, cfg: Config, machine: Machine) -> Links:
        p = cfg.parallel
        each = self.bytes_sent(cfg) / (p.context - 1)  # to each of the other ranks
        # Neighbouring context ranks are `parallel.tensor` ranks apart.
        near = min(p.context, max(1, machine.node_gpus // p.tensor))
        return Links(each * (near - 1), each * (p.context - near))

    def saved(self, cfg: Config) -> int:
        """Copies of keys and values, and results before and after the exchange."""
        return (copies(cfg) - 1) * _key_bytes(cfg) + _out_bytes(cfg)

    def backward(self, cfg: Config) -> int:
        """Gradients on both sides of the exchange, and in fp32 before."""
        exchanged = _query_bytes(cfg) + copies(cfg) * _key_bytes(cfg)
        return 3 * exchanged + 2 * _out_bytes(cfg)


KEYS, HEADS = _Keys(), _Heads()


def _key_bytes(cfg: Config) -> int:
    return heads(cfg)[1] * sum(head_dims(cfg.model.attention)) * width(cfg)


def _query_bytes(cfg: Config) -> int:
    a = cfg.model.attention
    return a.heads * head_dims(a)[0] * width(cfg)


def _out_bytes(cfg: Config) -> int:
    a = cfg.model.attention
    return a.heads * head_dims(a)[1] * width(cfg)
