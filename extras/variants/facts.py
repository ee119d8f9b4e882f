"""Arithmetic and limits of the variants of a model: parameters, FLOPs, bytes; without torch."""

import re
from collections.abc import Iterator

from phalanx.configs.arithmetic.layers import has_experts, of_variants
from phalanx.configs.formats import width
from phalanx.configs.knobs import listed, repair, visible
from phalanx.configs.schema import Config, ModelConfig
from phalanx.configs.tables.backends import expert_backend
from phalanx.configs.tables.capabilities import VARIANTS
from phalanx.moe.saved_tensors import TokenCounts

_KNOB = "model.variants"


def problems(cfg: Config) -> Iterator[str]:
    """Problems of a configuration with variants; repairs `cfg` on the way."""
    yield from _texts(cfg)
    for variant in of_variants(cfg.model):
        yield from variant.problems(cfg)


def _texts(cfg: Config) -> Iterator[str]:
    """Texts of `model.variants` that are no name and size, or a second one of a name."""
    seen = set[str]()
    for text in list(cfg.model.variants):
        name, _, size = text.partition(":")
        if name not in VARIANTS:
            reason = f"which is not {listed([f'{each}:<size>' for each in VARIANTS])}"
        elif not re.fullmatch("[1-9][0-9]{0,6}", size, re.ASCII):
            reason = f"whose size is no number above 0, as in {name}:64"
        elif name in seen:
            reason = f"a second {name}"
        else:
            seen.add(name)
            continue
        left = list(cfg.model.variants)
        del left[len(left) - 1 - left[::-1].index(text)]
        yield repair(cfg, _KNOB, f"has {visible(text)!r}, {reason}", left)


class Variant:
    """A variant of some size."""

    name = ""  # its key in `configs.tables.capabilities.VARIANTS`
    mlp = ""  # path of the class in place of `moe.layer.MoE`
    begins = ""
    """Path of `(cfg: Config, chunks) -> overrides of the optimizer's groups`, which may change the
    initial weights of bare model chunks."""
    trains = ""  # path of `(cfg: Config, engine: Engine) -> lines of the start page`

    def __init__(self, size: int) -> None:
        self.size = size

    def expert_hidden(self, m: ModelConfig) -> int:
        """Channels of the tokens that routed experts read."""
        return m.hidden

    def matrices(self, m: ModelConfig) -> list[tuple[int, int]]:
        """(rows, columns) of the matrices that it adds to a layer with experts."""
        return []

    def saved_bytes(self, cfg: Config, counts: TokenCounts) -> int:
        """Bytes that it adds to what a layer with experts saves for its backward pass."""
        return 0

    def problems(self, cfg: Config) -> Iterator[str]:
        """Problems of a configuration with it; repairs `cfg` on the way."""
        reason = f"is not possible with {_KNOB}={self.name}"
        if cfg.parallel.tensor > 1:
            yield repair(cfg, "parallel.tensor", reason, 1)

    def _left_out(self, cfg: Config) -> list[str]:
        return [text for text in cfg.model.variants if text.partition(":")[0] != self.name]


class Latent(Variant):
    """Experts that read and write `size` channels (`extras.variants.latent`)."""

    name = "latent"
    mlp = "phalanx.extras.variants.latent:LatentMoE"

    def expert_hidden(self, m: ModelConfig) -> int:
        return self.size

    def matrices(self, m: ModelConfig) -> list[tuple[int, int]]:
        return [(self.size, m.hidden), (m.hidden, self.size)]

    def saved_bytes(self, cfg: Config, counts: TokenCounts) -> int:
        """The projected tokens, and the sums of the experts before they are projected back."""
        return 2 * counts.local_tokens * self.size * width(cfg)

    def problems(self, cfg: Config) -> Iterator[str]:
        m = cfg.model
        if not has_experts(m):
            reason = "needs experts, and model.moe.experts is 0"
            yield repair(cfg, _KNOB, reason, self._left_out(cfg))
        elif self.size >= m.hidden:
            reason = f"has a latent width that is not below hidden={m.hidden}"
            yield repair(cfg, _KNOB, reason, self._left_out(cfg))
        else:
            yield from super().problems(cfg)
            if expert_backend(cfg.kernels.backend).layer:
                reason = f"has no such experts ({_KNOB}={self.name})"
                yield repair(cfg, "kernels.backend", reason, "auto")
