"""Values of every `auto` on Hopper GPUs with all optional packages."""

from phalanx.configs import capture
from phalanx.configs.formats import quantizes_on_arrival
from phalanx.configs.knobs import copied
from phalanx.configs.layout import expert_parallel_size
from phalanx.configs.schema import Config
from phalanx.configs.tables.backends import is_stock
from phalanx.configs.tables.machines import MACHINES
from phalanx.configs.tables.transports import TRANSPORTS
from phalanx.configs.validate import ConfigError
from phalanx.kernels.registry import KernelUnavailable, resolve
from phalanx.moe.estimate.gains.microbatch_overlap import microbatch_overlap
from phalanx.moe.estimate.memory import delay_wgrad, fp8_weights
from phalanx.moe.model.kernel_facts import hopper_facts
from phalanx.parallel.dispatcher.replication.choice import with_replication
from phalanx.parallel.dispatcher.replication.options import CopyCosts
from phalanx.parallel.dispatcher.transport import class_of, planned, sms_of


def resolved(cfg: Config, world: int, node_gpus: int) -> Config:
    """A copy without `auto` in kernels, exchanges, graph, FP8 and delayed weight gradients.

    Raises:
        ConfigError: no Hopper GPU can run a choice, or no group has that number of ranks.
    """
    cfg, machine = _with_transport(cfg, world, node_gpus), MACHINES[cfg.run.machine]
    if cfg.run.graph == capture.CAPTURED and (reason := capture.not_capturable(cfg)):
        raise ConfigError(capture.forced_graph_error(reason))
    cfg.run.graph = capture.resolved_graph(cfg)
    cfg.precision.weights = fp8_weights(cfg, world, machine.room)
    overlap = microbatch_overlap(cfg, world, machine, machine.safe_room)
    cfg.parallel.overlap_microbatches = overlap.value
    cfg.parallel.delay_wgrad = delay_wgrad(cfg, world, machine)
    return cfg


def _with_transport(cfg: Config, world: int, node_gpus: int) -> Config:
    """A copy with kernels, transport and SMs."""
    cfg = copied(cfg)
    k, comm_sms = cfg.kernels, cfg.parallel.comm_sms
    expert = expert_parallel_size(cfg, world)
    hopper = hopper_facts(cfg, world, also=["transformer_engine"])
    try:
        k.backend = resolve("grouped_mlp", k.backend, hopper).backend
        k.attention = resolve("attention", k.attention, hopper).backend
        k.norm = resolve("norm", k.norm, hopper).backend
    except KernelUnavailable as error:
        raise ConfigError(str(error)) from error
    cfg.run.device = "cuda"
    if is_stock(k.backend) and cfg.parallel.dispatch != "auto":  # it has its own dispatcher
        cfg.parallel.comm_sms = 0 if comm_sms == "auto" else comm_sms
        return cfg
    refusals = {name: class_of(name).refuse_dtype(hopper.dtype) for name in TRANSPORTS}
    try:
        # Ranks of an expert-parallel group are consecutive, and start at a node.
        plan = planned(
            cfg.parallel.dispatch,
            ranks=expert,
            node_ranks=node_gpus,
            refusals=refusals,
        )
        plan = with_replication(
            cfg.parallel.expert_replication,
            plan,
            ranks=expert if plan.inside is None else node_gpus,
            local=cfg.model.moe.experts // expert,
            costs=CopyCosts(0, 0),
            keep=False,
        )
    except ValueError as error:
        raise ConfigError(f"on nodes of {node_gpus} GPUs {error}") from error
    cfg.parallel.dispatch = plan.name
    replication = (plan.inside or plan).replication
    cfg.parallel.expert_replication = 0 if replication is None else replication.slots
    cfg.parallel.comm_sms = sms_of(comm_sms, plan, k.backend, quantizes_on_arrival(cfg))
    return cfg
