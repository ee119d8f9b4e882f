"""The vocabulary of a model that leaves it to the data (`model.vocab_size=0`).

Imports neither torch nor Megatron-Core, so that a command line is checked in a moment.
"""

import math
from pathlib import Path

from phalanx.configs.schema import Config
from phalanx.moe.data.blend import PADDING, check_tokenizers, opened, parse_blend
from phalanx.moe.data.host_cache import DataError
from phalanx.moe.data.remote_files import beside
from phalanx.moe.data.token_files import Sidecar


def fill(cfg: Config) -> None:
    """Set `model.vocab_size`, if it is 0, by the tokenizer of `data.blend`.

    Raises:
        DataError: nothing tells it, or the data cannot be read.
    """
    if cfg.model.vocab_size:
        return
    prefixes, _ = parse_blend(cfg.data.blend)
    described = _described(cfg, prefixes)
    if not described:
        for prefix in prefixes:
            opened(prefix, cfg.data)  # whose errors matter more
        raise DataError(
            f"nothing tells the vocabulary of {prefixes[0]}.bin, for want of {prefixes[0]}.json "
            "beside it; set model.vocab_size to the number of ids of its tokenizer"
        )
    multiple = math.lcm(PADDING, max(1, cfg.parallel.tensor))
    cfg.model.vocab_size = -(-_ids(described) // multiple) * multiple


def shown(cfg: Config) -> str:
    """`512, of which 400 are ids of wiki/tokenizer.json`; empty where the data does not tell.

    Raises:
        DataError: the data has more ids, or several tokenizers.
    """
    if cfg.data.source != "indexed":
        return ""
    described = _described(cfg, parse_blend(cfg.data.blend)[0])
    if not described:
        return ""
    check_tokenizers(described, cfg.model.vocab_size)
    name = described[0][1].tokenizer
    return f"{cfg.model.vocab_size:,}, of which {_ids(described):,} are ids of {name}"


def _ids(described: list[tuple[str, Sidecar]]) -> int:
    return max(sidecar.vocab_size for _, sidecar in described)


def _described(cfg: Config, prefixes: list[str]) -> list[tuple[str, Sidecar]]:
    """Pairs by prefix that have a description beside them."""
    paths = [(prefix, Path(f"{beside(prefix, cfg.data.cache)}.json")) for prefix in prefixes]
    return [(prefix, Sidecar.read(path)) for prefix, path in paths if path.is_file()]
