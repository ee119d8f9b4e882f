"""The numbers of a mixer that configurations and estimates ask for."""

import functools
from collections.abc import Iterator
from pkgutil import resolve_name
from typing import Any, cast

from phalanx.configs.schema import Config, ModelConfig
from phalanx.configs.tables.layers import MIXERS


class Mixer:
    """Arithmetic of a mixer (`configs.tables.layers`), without torch.

    The defaults are those of a mixer without such a part or limit.
    """

    core = False  # it has core attention: its queries see the keys of all context ranks

    def matrices(self, m: ModelConfig) -> list[tuple[int, int]]:
        """(inputs, outputs) of its projections; that of the output comes last."""
        raise NotImplementedError

    def input_parts(self, m: ModelConfig) -> list[tuple[int, int]]:
        """(number, outputs) of matrices that the first projection joins; empty if it is one."""
        return []

    def vectors(self, m: ModelConfig) -> int:
        """Number of its parameters beside projections and norms."""
        return 0

    def norms(self, m: ModelConfig) -> int:
        """Elements of its norms."""
        return 0

    def products(self, m: ModelConfig) -> int:
        """Multiply-adds of a token beside projections and core attention."""
        return 0

    def heads(self, m: ModelConfig) -> dict[str, int]:
        """Heads that tensor and context ranks share out, by knob."""
        return {}

    def exchanged_channels(self, m: ModelConfig) -> int:
        """Channels of a token that context ranks exchange between tokens and heads, in and out."""
        return 0

    def problems(self, cfg: Config) -> Iterator[str]:
        """Problems of a configuration with it; repairs `cfg` on the way."""
        return iter(())

    def not_capturable(self, cfg: Config) -> str | None:
        """Reason why a CUDA graph cannot capture it, or None."""
        return None

    def not_in_fp8_of_megatron(self, m: ModelConfig) -> str | None:
        """Reason why Megatron-Core takes no FP8 recipe for a model with it, or None."""
        return None

    def megatron_fields(self, m: ModelConfig) -> dict[str, Any]:
        """Fields of Megatron-Core's TransformerConfig."""
        return {}

    def weights(self, m: ModelConfig) -> int:
        """Elements of its projections."""
        return sum(inputs * outputs for inputs, outputs in self.matrices(m))

    def parameters(self, m: ModelConfig) -> int:
        """Number of its parameters without norms."""
        return self.weights(m) + self.vectors(m)


@functools.cache
def mixer_of(name: str) -> Mixer:
    """The arithmetic of a mixer by its name in `configs.tables.layers`."""
    return cast(Mixer, resolve_name(MIXERS[name].counts)())
