"""Vocabulary of a model that takes it from the data (`model.vocab_size=0`).

Imports neither torch nor Megatron-Core, so that checking a command line is fast.
"""

import math
from pathlib import Path

from phalanx.configs.schema import Config
from phalanx.moe.data.blend import PADDING, check_tokenizers, opened, parse_blend
from phalanx.moe.data.host_cache import DataError
from phalanx.moe.data.remote_files import beside
from phalanx.moe.data.token_files import Sidecar


def fill(cfg: Config) -> None:
    """Set a `model.vocab_size` of 0 to that of the tokenizer of `data.blend`.

    Raises:
        DataError: the data has no description, or cannot be read.
    """
    if cfg.model.vocab_size:
        return
    prefixes, _ = parse_blend(cfg.data)
    described = _described(cfg, prefixes)
    if not described:
        for prefix in prefixes:
            opened(prefix, cfg.data)  # its errors matter more
        raise DataError(
            f"the vocabulary of {prefixes[0]}.bin is unknown, as {prefixes[0]}.json is missing; "
            "set model.vocab_size to the number of ids of its tokenizer"
        )
    multiple = math.lcm(PADDING, max(1, cfg.parallel.tensor))
    cfg.model.vocab_size = -(-_ids(described) // multiple) * multiple


def shown(cfg: Config) -> str:
    """`512, of which 400 are ids of wiki/tokenizer.json`; empty if the data has no description.

    Raises:
        DataError: the data has more ids, or several tokenizers.
    """
    if cfg.data.source != "indexed":
        return ""
    described = _described(cfg, parse_blend(cfg.data)[0])
    if not described:
        return ""
    check_tokenizers(described, cfg.model.vocab_size)
    name = described[0][1].tokenizer
    return f"{cfg.model.vocab_size:,}, of which {_ids(described):,} are ids of {name}"


def _ids(described: list[tuple[str, Sidecar]]) -> int:
    return max(sidecar.vocab_size for _, sidecar in described)


def _described(cfg: Config, prefixes: list[str]) -> list[tuple[str, Sidecar]]:
    """(prefix, description) of the pairs that have one."""
    paths = [(prefix, Path(f"{beside(prefix, cfg.data.cache)}.json")) for prefix in prefixes]
    return [(prefix, Sidecar.read(path)) for prefix, path in paths if path.is_file()]
