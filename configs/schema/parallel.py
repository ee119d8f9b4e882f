"""Layout of ranks, exchanges of tokens and buffers."""

from dataclasses import dataclass

from phalanx.configs.fields import knob
from phalanx.configs.tables.capabilities import ZERO3
from phalanx.configs.tables.transports import TRANSPORTS


@dataclass
class ParallelConfig:
    """Layout of ranks. Data parallelism takes the ranks that the other sizes leave."""

    world_size: int = 0
    """Number of ranks to lay out; 0 takes the number that the launcher started.

    Set it to check a layout, or to estimate it with `run.dry_run`, without its machines. There, and
    without a launcher, 0 takes the number that `experiment` is for, by its name.
    """
    tensor: int = knob(1, at_least=1)
    """Tensor-parallel size of attention and dense MLPs; above 1 with sequence parallelism."""
    pipeline: int = knob(1, at_least=1)
    """Number of pipeline stages."""
    virtual_pipeline: int = knob(1, at_least=1)
    """Number of model chunks per pipeline stage (interleaved schedule)."""
    pipeline_layout: str = ""
    """Pipeline layout of Megatron-Core, as in `Et|(tt|)*30mL`; empty balances the work of stages.

    The letters are E embedding, t transformer layer, m multi-token prediction and L loss; | ends a
    stage.
    """
    context: int = knob(1, at_least=1)
    """Context-parallel size: the number of ranks that share a sequence (docs/long_context.md); in
    linear attention they share out key and value heads."""
    expert: int = 0
    """Expert-parallel size: the number of ranks that the experts of a layer are spread over.

    The default of 0 takes the largest size up to 8 that divides the number of experts and the ranks
    of a pipeline stage.
    """
    dispatch: str = knob("auto", choices=("auto", TRANSPORTS))
    """Transport between tokens and experts, an entry of configs/tables/transports.py.

    `auto` takes the best that can run. All ranks of a group use the same transport, and the start
    page says which and why.
    """
    save_x: str = knob("redispatch", choices=("redispatch", "keep"))
    """How `symm` provides received tokens to the backward pass: `redispatch` resends them.

    `keep` holds them in memory instead. `hier` resends them inside a node, not over the network.
    """
    comm_sms: int | str = knob("auto", choices=("auto",))
    """Number of SMs that `symm` uses to exchange tokens while the fused experts run on the others.

    `auto` is 16 where `symm` meets fused experts, and 0 elsewhere; 0 exchanges on all SMs, without
    overlap. `local` and `alltoall` refuse a number. If `parallel.dispatch=auto` chooses one of
    them, or the experts are not fused, the start page says that it has no effect.
    """
    overlap_microbatches: str = knob("auto", choices=("auto", "on", "off"))
    """Run the forward pass of a micro-batch beside the backward pass of another one.

    Tokens of one are exchanged while the GPU computes the other (docs/dispatch.md). Results are the
    same bit for bit; activations of two micro-batches are in memory, with pipeline stages those of
    up to twice as many as otherwise. `auto` is `on` with `alltoall` and `hier`, without `tensor`
    and `run.offload`, where `run.dry_run` expects a shorter step and has memory for it.
    """
    capacity_factor: float = knob(1.5, at_least=1)
    """Rows of the expert buffers, as a multiple of the rows under perfectly balanced routing.

    Blocks of rows that `hier` sends between nodes have 0.48 of the excess: 1.24 x at 1.5. A step
    that needs more rows is rerun with larger buffers; no token is dropped.
    """
    expert_replication: int | str = knob(0, choices=("auto",), formerly="parallel.clones")
    """Replica slots of a rank for copies of other ranks' hot experts, micro-batch by micro-batch.

    With uneven routing ranks then share their rows, and results are the same bit for bit
    (docs/dispatch.md). 0 makes no copies, and neither does `auto`: they cost a step more than they
    save where ranks are nearly even. A number of slots works with `symm` and `alltoall`, and with
    `hier` in each node by itself. `save_x=keep` keeps the replicas' weights.
    """
    distributed_optimizer: bool | str = knob(True, choices=(ZERO3,))
    """Shard optimizer states over data-parallel ranks, with `zero3` layers too (docs/memory.md)."""
    overlap: bool = True
    """Overlap gradient reduction and parameter gathering with computation."""
    delay_wgrad: str = knob("auto", choices=("auto", "on", "off", "pairs"))
    """Weight gradients while a pipeline stage would wait: `on`, `off`, `pairs` or `auto`.

    A stage then sends the gradient of its input before it computes those of its weights, and keeps
    their operands until then (docs/design.md); results are the same bit for bit. Without stages
    they run beside exchanges of `alltoall` and `hier`, unless it is `off`. `pairs` also
    computes those of the experts for two micro-batches in one pass over their fp32 sums, which pays
    if experts have few rows, and without stages too. A sum is then rounded once for both, so that
    results differ in the last bits. `auto` takes with pipeline stages what pays and fits into
    memory.
    """
    grad_dtype: str = knob("fp32", choices=("fp32", "bf16"))
    """Dtype in which gradients are accumulated and reduced: `fp32` or `bf16`."""
    timeout: int = knob(600, at_least=1)
    """Seconds after which a collective that has not finished ends the run."""
