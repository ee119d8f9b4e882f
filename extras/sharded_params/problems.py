"""Settings that sharded parameters do not go with, each with the override that fixes it."""

from collections.abc import Iterator

from phalanx.configs.knobs import repair
from phalanx.configs.schema import Config
from phalanx.configs.tables.backends import expert_backend
from phalanx.configs.tables.optimizers import OPTIMIZERS

_PATH = "parallel.distributed_optimizer"


def problems(cfg: Config) -> Iterator[str]:
    """Problems of a configuration with sharded parameters; repairs `cfg` on the way."""
    p = cfg.parallel
    only = f"is not possible with {_PATH}={p.distributed_optimizer}"
    if OPTIMIZERS[cfg.optim.kind].whole_matrices:
        reason = f"shards matrices, which optim.kind={cfg.optim.kind} updates whole"
        yield repair(cfg, _PATH, reason, True)
        return
    if expert_backend(cfg.kernels.backend).layer:
        reason = f"does not know the layer of kernels.backend={cfg.kernels.backend}"
        yield repair(cfg, _PATH, reason, True)
        return
    if not p.overlap:
        yield repair(cfg, "parallel.overlap", f"{only}, which gathers beside computation", True)
    if p.expert_replication not in (0, "auto"):
        yield repair(cfg, "parallel.expert_replication", f"{only}", 0)
    if cfg.optim.ema:
        yield repair(cfg, "optim.ema", f"{only}", 0)
