"""Rules and numbers of block-sparse experts, entries of `VARIANTS`; without torch."""

from collections.abc import Iterator

from phalanx.configs.arithmetic.layers import has_experts
from phalanx.configs.knobs import pluralize, repair
from phalanx.configs.schema import Config, ModelConfig
from phalanx.configs.tables.backends import expert_backend
from phalanx.configs.tables.capabilities import MASKS, ZERO3
from phalanx.configs.tables.optimizers import MOMENTS, OPTIMIZERS
from phalanx.extras.block_sparse.schedule import Schedule, living_blocks
from phalanx.extras.variants.facts import Variant

_KNOB = "model.variants"


class Blocks(Variant):
    """Experts of which `size` percent of the blocks live (`extras.block_sparse.masks`).

    Dead blocks are stored as zeros, which dense kernels multiply too: counts are those without.
    """

    trains = "phalanx.extras.block_sparse.training:install"
    block = 0  # rows and columns of a block

    @property
    def density(self) -> float:
        """Share of blocks that live in the end."""
        return self.size / 100

    def blocks(self, m: ModelConfig) -> int:
        """Blocks of each of the matrices of an expert; a gate and its linear half are one."""
        return (m.moe.ffn // self.block) * (m.hidden // self.block)

    def living(self, m: ModelConfig) -> int:
        """Number of blocks of a matrix that live in the end."""
        return living_blocks(self.blocks(m), self.density)

    def schedule(self, steps: int) -> Schedule:
        return Schedule(self.density, steps)

    def problems(self, cfg: Config) -> Iterator[str]:
        m, texts = cfg.model, cfg.model.variants
        left = self._left_out(cfg)
        before = texts[: texts.index(f"{self.name}:{self.size}")]
        others = [text for text in texts if text.startswith("latent:")]
        others += [text for text in before if text.startswith(MASKS)]
        if not has_experts(m):
            yield repair(cfg, _KNOB, "needs experts, and model.moe.experts is 0", left)
            return
        if others:
            yield repair(cfg, _KNOB, f"has {self.name} beside {others[0]}", left)
            return
        if self.size > 100:
            reason = f"has {self.size} percent of living blocks; they are 1 to 100"
            yield repair(cfg, _KNOB, reason, [*left, f"{self.name}:100"])
        if m.moe.ffn % self.block or m.hidden % self.block:
            reason = f"has blocks of {self.block}, of which hidden={m.hidden} and "
            reason += f"moe.ffn={m.moe.ffn} are no multiples"
            fits = m.moe.ffn % 64 == m.hidden % 64 == 0
            yield repair(cfg, _KNOB, reason, [*left, *[f"blocks64:{self.size}"] * fits])
            return
        yield from super().problems(cfg)
        reason = f"does not follow masks of blocks ({_KNOB}={self.name})"
        if expert_backend(cfg.kernels.backend).layer:
            yield repair(cfg, "kernels.backend", reason, "auto")
        if OPTIMIZERS[cfg.optim.kind].whole_matrices:
            whole = f"moves matrices as a whole, dead blocks too ({_KNOB}={self.name})"
            yield repair(cfg, "optim.kind", whole, "adamw")
        if MOMENTS[cfg.optim.moments].hosted:
            value = "bf16" if MOMENTS[cfg.optim.moments].bf16 else "fp32"
            yield repair(cfg, "optim.moments", reason, value)
        if cfg.parallel.distributed_optimizer in ZERO3:
            yield repair(cfg, "parallel.distributed_optimizer", reason, True)

    def note(self, m: ModelConfig) -> str:
        """Words on the start page behind the FLOPs, which are those of dense matrices."""
        blocks = pluralize(self.blocks(m), "block")
        return f", dense: {self.living(m)} of {blocks} live in the end"


class Blocks64(Blocks):
    """Blocks of 64 x 64."""

    name = "blocks64"
    mlp = "phalanx.extras.block_sparse.layer:BLOCKS_64"
    block = 64


class Blocks128(Blocks):
    """Blocks of 128 x 128."""

    name = "blocks128"
    mlp = "phalanx.extras.block_sparse.layer:BLOCKS_128"
    block = 128
