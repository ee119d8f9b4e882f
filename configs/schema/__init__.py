"""Every knob of Phalanx: typed, with its documentation directly under the field.

The YAML groups (model/, kernels/, precision/, parallel/, data/, optim/, run/, experiment/) only set
values of these dataclasses. `configs.validate` checks a composed configuration as a whole. The
tables of docs/configuration.md are generated from these files, so a field without a docstring
fails the tests.
"""

from dataclasses import dataclass, field

from phalanx.configs.schema.data import DataConfig
from phalanx.configs.schema.kernels import KernelsConfig, SmMarginConfig
from phalanx.configs.schema.model import (
    AttentionConfig,
    LinearAttentionConfig,
    ModelConfig,
    MoEConfig,
    RouterConfig,
    YarnConfig,
)
from phalanx.configs.schema.optim import OptimConfig
from phalanx.configs.schema.parallel import ParallelConfig
from phalanx.configs.schema.precision import PrecisionConfig
from phalanx.configs.schema.run import PhaseConfig, RunConfig

__all__ = [
    "AttentionConfig",
    "Config",
    "DataConfig",
    "KernelsConfig",
    "LinearAttentionConfig",
    "MoEConfig",
    "ModelConfig",
    "OptimConfig",
    "ParallelConfig",
    "PhaseConfig",
    "PrecisionConfig",
    "RouterConfig",
    "RunConfig",
    "SmMarginConfig",
    "YarnConfig",
]


@dataclass
class Config:
    """The whole configuration of a run, as composed by Hydra."""

    model: ModelConfig = field(default_factory=ModelConfig)
    """Architecture."""
    kernels: KernelsConfig = field(default_factory=KernelsConfig)
    """Implementations."""
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    """Number formats."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    """Layout."""
    data: DataConfig = field(default_factory=DataConfig)
    """Tokens."""
    optim: OptimConfig = field(default_factory=OptimConfig)
    """Optimizer."""
    run: RunConfig = field(default_factory=RunConfig)
    """Run."""
