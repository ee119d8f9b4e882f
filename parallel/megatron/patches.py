"""Changes of Megatron-Core's objects, one function each, with what it would do without.

Names of Megatron-Core 0.19.2; `parallel.megatron.imports` refuses others.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import OptimizerConfig
from megatron.core.pipeline_parallel import p2p_communication
from torch import Tensor

from phalanx.kernels import wgrad_queue
from phalanx.kernels.expert_mlp import main_grad
from phalanx.kernels.expert_mlp.main_grad import facts_of


@contextmanager
def results_to(queue: Any) -> Iterator[None]:
    """Inside, checkpoint saves that are planned take their writer's results from `queue`.

    Megatron-Core would start a server process, which imports the main script again, to bring them.
    All that it calls of the queue is `get_nowait`.
    """
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    filesystem_async._results_queue = queue
    try:
        yield
    finally:
        filesystem_async._results_queue = None


@contextmanager
def shards_from(reader: Callable[[Any], Any]) -> Iterator[None]:
    """Inside, checkpoints are read by `reader(folder)`, in place of torch's FileSystemReader."""
    from megatron.core.dist_checkpointing import serialization
    from megatron.core.dist_checkpointing.strategies import torch as strategy

    original, users = strategy._get_filesystem_reader, (serialization, strategy)
    for user in users:
        user._get_filesystem_reader = lambda folder, *_, **__: reader(folder)
    try:
        yield
    finally:
        for user in users:
            user._get_filesystem_reader = original


@contextmanager
def one_group_of_each_rank() -> Iterator[None]:
    """Inside, all process groups of one rank alone are the same group.

    Megatron-Core makes up to twenty of them, and NCCL a communicator of each, with memory on the
    GPU. Nothing is ever sent in them.
    """
    make: Callable[..., Any] = dist.new_group
    alone: dict[int, Any] = {}

    def new_group(ranks: Sequence[int] | None = None, *given: Any, **named: Any) -> Any:
        if ranks is None or len(ranks) != 1:
            return make(ranks, *given, **named)
        if ranks[0] not in alone:
            alone[ranks[0]] = make(ranks, *given, **named)
        return alone[ranks[0]]

    dist.new_group = new_group
    try:
        yield
    finally:
        dist.new_group = make


def shift_within_documents() -> None:
    """Have multi-token prediction shift tokens, labels and masks of packed documents on the device.

    Megatron-Core loops over bounds that it reads on the host. What it is given here as
    `packed_seq_params` has `last_T`, bool [T], where a document ends: nothing is shifted there.
    """
    from megatron.core.transformer import multi_token_prediction

    def shifted(
        x_1T: Tensor, shifts: int, dims: int, packed_seq_params: Any, cp_group: Any = None
    ) -> tuple[Tensor, Tensor]:
        assert shifts == dims == -1
        if cp_group is None or cp_group.size() == 1:
            next_1T = x_1T.roll(-1, -1).masked_fill(packed_seq_params.last_T, 0)
            return next_1T, next_1T.sum()
        x_BS = x_1T.view(packed_seq_params.sequences, -1)
        next_BS, _ = multi_token_prediction.roll_tensor(x_BS, cp_group=cp_group)
        next_1T = next_BS.view(1, -1).masked_fill(packed_seq_params.last_T, 0)
        return next_1T, next_1T.sum()

    multi_token_prediction._roll_tensor_packed_seq = shifted


def losses_ahead_by(function: Callable[..., Tensor]) -> None:
    """Have models compute multi-token prediction's losses by `function`, not `process_mtp_loss`."""
    from megatron.core.models.gpt import gpt_model

    gpt_model.process_mtp_loss = function


def without_masters(settings: OptimizerConfig) -> None:
    """Have a distributed optimizer store no fp32 masters.

    `parallel.megatron.adam` stores the bits that bf16 weights lack. Set after the checks of
    OptimizerConfig, which ask for FusedAdam.
    """
    settings.use_precision_aware_optimizer = True
    settings.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = True


def replace_first_gradients(chunk: DistributedDataParallel) -> None:
    """Have the first gradient of a step replace the last step's, where the experts write them all.

    Megatron-Core would clear most of the gradients before each step.
    """
    for buffer in chunk.expert_parallel_buffers:
        writes = (facts_of(p).adds_to_main_grad for p in buffer.params)
        taken = (main_grad.takes(p) for p in buffer.params)
        if all(writes) and all(taken) and not buffer.extra_main_grads:
            buffer.reset = partial(main_grad.replace_next, buffer.params)


def accumulate_on_own_stream(chunk: DistributedDataParallel) -> None:
    """Have each backward pass add its gradients on the stream of its own forward pass.

    Megatron-Core keeps the graph nodes that accumulate gradients, with the stream on which the
    wrapper was made: gradients of other streams would be handed over to it, and a CUDA graph would
    hold the memory of all of them. Without its nodes each forward pass makes new ones; the
    parameters keep the hooks.
    """
    chunk.grad_accs.clear()
    for parameter in chunk.module.parameters():
        if parameter.requires_grad:
            hook = chunk._make_backward_post_hook(parameter)
            parameter.register_post_accumulate_grad_hook(hook)


def reduce_in_order(chunk: DistributedDataParallel) -> None:
    """Have gradients arrive for their reduction in the queue of weight gradients.

    Megatron-Core would start the reduction of a bucket when autograd returns the last of its
    gradients, which may still be in the queue.
    """
    for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
        group.register_grad_ready = partial(_arrive, group, group.register_grad_ready)


def _arrive(group: Any, register: Callable[..., None], *given: Any) -> None:
    if group.is_last_microbatch:  # otherwise nothing would happen, now; it may be the last later
        wgrad_queue.submit(partial(register, *given), follows=given[:1])


@contextmanager
def during_transfers(work: Callable[[], None]) -> Iterator[None]:
    """Inside, `work` is called between the start of a pipeline stage's transfers and their end.

    Before a transfer that only receives it is called first: nobody waits for its start, and NCCL's
    kernel, which waits on some SMs, would keep the persistent kernels of `work` from ending.
    """
    names = ("_p2p_ops", "_batched_p2p_ops")
    originals = [getattr(p2p_communication, name) for name in names]

    def started(start: Callable[..., Any], **given: Any) -> Any:
        sends = any(given[f"tensor_send_{to}"] is not None for to in ("prev", "next"))
        if not sends:
            work()
        requests = start(**given)
        if sends:
            work()
        return requests

    for name, original in zip(names, originals, strict=True):
        setattr(p2p_communication, name, partial(started, original))
    try:
        yield
    finally:
        for name, original in zip(names, originals, strict=True):
            setattr(p2p_communication, name, original)


def scale_in_loss(chunks: Sequence[DistributedDataParallel]) -> Callable[[Any], Any] | None:
    """Return the factor of losses for Megatron-Core, in place of a scaling of gradients.

    It divides by the number of data parallel ranks in a pass over all gradients; the same factor
    on the loss costs nothing, and for powers of two has the same bits. None where buckets differ.
    """
    buffers = [b for chunk in chunks for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    buckets = [bucket for buffer in buffers for bucket in buffer.buckets]
    factors = {bucket.gradient_scaling_factor for bucket in buckets}
    if len(factors) != 1 or factors == {1.0}:
        return None
    (factor,) = factors
    for bucket in buckets:
        bucket.gradient_scaling_factor = 1.0
    return lambda loss: loss * factor
