"""Recorded losses and frozen parameters of a run with sparse attention."""

from typing import Any

from torch import Tensor

from phalanx.configs.schema import Config
from phalanx.extras.sparse_attention.latent import SparseLatentAttention
from phalanx.extras.sparse_attention.options import understood
from phalanx.moe.model.max_logits import attention_layers
from phalanx.moe.router.balance import routers
from phalanx.parallel.engine import Engine
from phalanx.parallel.megatron.updated import parts, updated


def install(cfg: Config, engine: Engine) -> None:
    """Let losses of indexers be recorded beside the balancing losses of their layers' routers.

    Those of layers without experts are trained on and not recorded. In the warm-up all parameters
    but those of indexers are frozen.
    """
    for layer in attention_layers(engine.modules):
        for router in routers([layer]):
            layer.self_attention.statistics_of_layer.append(router.statistics)
    if understood(cfg.model.attention.sparse).warms_up:
        _freeze(engine)


def _freeze(engine: Engine) -> None:
    """Leave parameters that are not an indexer's out of gradient norm and updates.

    They keep their moments; those that have none begin with zeros, as a checkpoint expects.
    """
    learning = {
        id(parameter)
        for layer in attention_layers(engine.modules)
        if isinstance(layer.self_attention, SparseLatentAttention)
        for parameter in layer.self_attention.indexer.parameters()
    }
    held, frozen = parts(engine.optimizer), list[Tensor]()
    for part in held:
        frozen += [u.main for u in updated(part) if id(u.parameter) not in learning]
        for group in part.optimizer.param_groups:
            part.optimizer.init_state(group["params"])
    prepare = engine.optimizer.prepare_grads

    def prepared(*given: Any, **named: Any) -> Any:
        result = prepare(*given, **named)
        for main in frozen:
            main.grad = main.decoupled_grad = None  # type: ignore[attr-defined]
        return result

    engine.optimizer.prepare_grads = prepared
