"""Megatron-Core's data parallel wrapper, optimizer, schedule and learning rate, as one object.

It knows nothing of the model but its chunks, and nothing of the loss but its function.
"""

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pkgutil import resolve_name
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import (
    OptimizerConfig,
    ParamKey,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.optimizer_param_scheduler import ParamGroupOverride
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig

from phalanx.configs.schema import OptimConfig, ParallelConfig
from phalanx.configs.tables.capabilities import OVERLAP, ZERO3
from phalanx.configs.tables.optimizers import HOST_STATES, MOMENTS, OPTIMIZERS
from phalanx.kernels import wgrad_queue
from phalanx.kernels.elementwise.sums import square_sum
from phalanx.kernels.expert_mlp import fp8
from phalanx.parallel.learning_rate import Curve
from phalanx.parallel.megatron import adam, patches
from phalanx.parallel.megatron.param_gather import gather_once
from phalanx.parallel.megatron.updated import Averages, Factors, after_updates, parts

type RunUpdate = Callable[[Hashable, Callable[[], None], Callable[[], None]], None]
"""Runs an update (`parallel.cuda_graph.UpdateGraphs`): decision, update, preparation."""


class Diverged(RuntimeError):
    """Loss or gradients are not finite; the parameters are still those of the last good step."""


class Engine:
    """Model chunks of this rank, ready to train.

    Args:
        chunks: bare model chunks, already initialised. Weight decay spares vectors, biases and
            parameters with a true attribute `no_weight_decay`.
        parallel: overlap, optimizer sharding and gradient dtype.
        optim: kind of optimizer, the dtype of moments, and schedule.
        overlap_microbatches: forward passes run beside backward passes of other micro-batches.
        wgrads: events for which weight gradients wait.
    """

    def __init__(
        self,
        config: TransformerConfig,
        chunks: Sequence[torch.nn.Module],
        *,
        parallel: ParallelConfig,
        optim: OptimConfig,
        steps: int,
        device: torch.device,
        overlap_microbatches: bool = False,
        wgrads: wgrad_queue.Waiting = wgrad_queue.AT_ONCE,
        overrides: Mapping[ParamKey, ParamGroupOverride] = {},  # of the optimizer's groups
        state_room: int = 0,  # bytes of the device that states in host memory may fill
    ) -> None:
        self.config = config
        self._wgrads = wgrads
        self.modules = list(chunks)
        sharded, moments = parallel.distributed_optimizer, MOMENTS[optim.moments]
        kind = resolve_name(ZERO3.get(str(sharded), OPTIMIZERS[optim.kind].implementation))
        if moments.hosted:
            kind = resolve_name(HOST_STATES).hosted(kind, state_room)
        setup: adam.Setup = kind(optim, config)
        for chunk in self.modules:
            setup.mark(chunk)
        wrapped = [Float16Module(config, c) if config.bf16 else c for c in chunks]
        ddp = DistributedDataParallelConfig(
            grad_reduce_in_fp32=parallel.grad_dtype == "fp32",
            overlap_grad_reduce=parallel.overlap,
            overlap_param_gather=parallel.overlap and bool(sharded),
            use_distributed_optimizer=bool(sharded),
            check_for_nan_in_grad=False,
        )
        self.chunks = []
        for i, c in enumerate(wrapped):
            given: dict[str, Any] = {"disable_bucketing": i > 0}
            layout = setup.layout(c.to(device), ddp, one_bucket=i > 0) if sharded else None
            if layout is not None:
                given["full_param_layout"] = layout
            self.chunks.append(DistributedDataParallel(config, ddp, c.to(device), **given))
            setup.wrapped(c)
        for chunk in self.chunks:
            patches.replace_first_gradients(chunk)
            if overlap_microbatches:  # before the optimizer, whose views of fp32 weights hold nodes
                patches.accumulate_on_own_stream(chunk)
            patches.reduce_in_order(chunk)
        config.grad_scale_func = patches.scale_in_loss(self.chunks)
        settings = OptimizerConfig(
            optimizer="adam",
            lr=optim.lr,
            min_lr=optim.min_lr,
            weight_decay=optim.weight_decay,
            adam_beta1=optim.beta1,
            adam_beta2=optim.beta2,
            adam_eps=optim.eps,
            clip_grad=optim.clip_grad,
            bf16=config.bf16,
            params_dtype=config.params_dtype,
            use_distributed_optimizer=bool(sharded),
            overlap_param_gather=ddp.overlap_param_gather,
        )
        if config.bf16 and sharded and moments.bf16:
            patches.without_masters(settings)
        dtype = torch.bfloat16 if moments.bf16 else torch.float32
        adam.install(dtype, setup.kind, **setup.options())
        self._clips_in_update = moments.bf16  # so does AdamW with moments in bf16
        self._clip_coef = torch.ones((), device=device)
        self._scales_gradients = False  # the update begins with a pass that clips
        self._rescales: Callable[[], bool] = lambda: False
        undecayed = {ParamKey(attr="no_weight_decay"): ParamGroupOverride(wd_mult=0.0)}
        self.optimizer = get_megatron_optimizer(
            settings,
            self.chunks,
            config_overrides=get_standard_config_overrides(settings) | undecayed | overrides,
            use_gloo_process_groups=False,
        )
        setup.built(self.optimizer)
        self._gather = setup.gather(self.chunks if ddp.overlap_param_gather else [])
        if sharded and not ddp.overlap_param_gather:
            gather_once(self.optimizer)
        self._averages = Averages(self.optimizer, optim.ema) if optim.ema else None
        curve = Curve.of(optim, steps)
        self.scheduler = curve.scheduler(self.optimizer, optim.weight_decay)
        self._clip = optim.clip_grad
        self._device = device
        self._forward_backward = get_forward_backward_func()
        one = len(self.chunks) == 1
        config.finalize_model_grads_func = _finalize
        if parallel.overlap:
            no_sync = [c.no_sync for c in self.chunks]
            config.no_sync_func = no_sync[0] if one else no_sync
            if not one:
                config.grad_sync_func = [partial(_reduce, c) for c in self.chunks]
        self._overlapped: Callable[..., list[Any]] | None = None
        if overlap_microbatches:
            self._overlapped = resolve_name(OVERLAP.schedule)(self.chunks, device)

    @property
    def lr(self) -> float:
        return next(float(g["lr"]) for g in self.optimizer.param_groups if g["default_config"])

    def rescale_after_updates(
        self,
        parameters: Sequence[torch.Tensor],
        factors: Factors,
        now: Callable[[], bool],
    ) -> None:
        """Have updates followed by `after_updates` of `parameters`, if `now()` says so."""
        after_updates(self.optimizer, parameters, factors)
        self._rescales = now

    def zero_grad(self) -> None:
        """Clear gradients before a step, or before the rerun of one."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        self._gather.invalidate()  # a graph gathers all parameters, whatever has before

    def abandon_step(self) -> None:
        for chunk in self.chunks:
            for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
                group.grad_reduce_handle = None
        self._gather.abandon()

    def forward_backward(
        self,
        forward_step: Callable[..., Any],
        batches: Sequence[Iterator[Any]],
        *,
        microbatches: int,
        sequence: int,
        micro_batch: int,
        forward_only: bool = False,
    ) -> list[dict[str, torch.Tensor]]:
        """Run all micro-batches of a step; gradients are reduced when it returns.

        Args:
            forward_step: (iterator, chunk) -> (output, loss function), as the schedules call it.
            batches: one iterator of micro-batches per chunk.
            sequence: tokens in a sequence, whole.
            micro_batch: sequences in a micro-batch.

        Returns:
            What the loss function reported, one dict per micro-batch; empty but on the last stage.
        """
        parameters = [p for module in self.modules for p in module.parameters()]
        queued = nullcontext() if forward_only else _queued(self._wgrads)
        with fp8.within_a_step(parameters), queued, self._gather.meanwhile():
            if self._overlapped is not None and not forward_only:
                return self._overlapped(
                    forward_step,
                    batches,
                    microbatches=microbatches,
                    sequence=sequence,
                    micro_batch=micro_batch,
                )
            return self._forward_backward(
                forward_step_func=forward_step,
                data_iterator=list(batches) if len(self.chunks) > 1 else batches[0],
                model=self.chunks if len(self.chunks) > 1 else self.chunks[0],
                num_microbatches=microbatches,
                seq_length=sequence,
                micro_batch_size=micro_batch,
                forward_only=forward_only,
            )

    @torch.no_grad()
    def scale_gradients(self, factor: torch.Tensor) -> None:
        """Multiply this rank's reduced gradients by a scalar on the device."""
        for chunk in self.chunks:
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
                buffer.grad_data.mul_(factor)

    @torch.no_grad()
    def grad_squares(self) -> torch.Tensor:
        """This rank's share of the squared gradient norm, fp64 scalar; all ranks' sum to it.

        Hands the reduced gradients to the optimizer. No host read and no collective: the share
        joins the loss in the one vector that is summed and read per step, and a NaN or Inf on any
        rank makes that sum not finite on all of them, before any is updated.
        """
        self.optimizer.prepare_grads()
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for part in parts(self.optimizer):
            if grads := part.get_grads_for_grad_norm():
                # Ranks outside the group hold copies of the same gradients.
                copies = dist.get_world_size() / part.get_grad_stats_parallel_group().size()
                total += square_sum(grads) / copies
        return total

    def step(self, norm: float | None = None, run: "RunUpdate | None" = None) -> float:
        """Clip, update parameters and learning rate; returns the norm before clipping.

        Args:
            norm: global gradient norm, if `grad_squares` of this step has been read already.
            run: runs the update, as from a CUDA graph; None calls it.

        Raises:
            Diverged: the norm is not finite. Nothing was changed.
            CaptureFailed: as `run` does. The learning rate is that of the step; `update` is left.
        """
        if norm is None:
            norm = math.sqrt(float(sum_over_world(self.grad_squares())))
        if not math.isfinite(norm):
            raise Diverged(f"the gradient norm is {norm}; lower optim.lr or check the data")
        self.scheduler.step(1)
        coef = min(1.0, self._clip / (norm + 1e-6)) if self._clip > 0 else 1.0
        self._scales_gradients = coef < 1.0 and not self._clips_in_update
        if self._clips_in_update:
            for part in parts(self.optimizer):
                part.optimizer.clip_coef = coef
        else:
            self._clip_coef.fill_(coef)
        self._gather.invalidate()  # replays note nothing, validation has
        if run is None:
            self.update()
        else:
            run((self._scales_gradients, self._rescales()), self.update, self._prepare)
        return norm

    def skip(self) -> None:
        """Leave out the update of a step; the learning rate goes on as after any other."""
        self.scheduler.step(1)

    @torch.no_grad()
    def update(self) -> None:
        if self._scales_gradients:
            for part in parts(self.optimizer):
                if grads := [p.grad for p in part.get_parameters() if p.grad is not None]:
                    torch._foreach_mul_(grads, self._clip_coef)
        self.optimizer.step_with_ready_grads()
        if self._averages is not None:
            self._averages.update()

    def _prepare(self) -> None:
        for part in parts(self.optimizer):
            part.optimizer.prepare()

    def train(self) -> None:
        for chunk in self.chunks:
            chunk.train()

    def eval(self) -> None:
        for chunk in self.chunks:
            chunk.eval()

    def parameter_bytes(self) -> tuple[int, int]:
        count = [(p.numel(), p.element_size()) for c in self.modules for p in c.parameters()]
        return sum(n for n, _ in count), sum(n * b for n, b in count)


@contextmanager
def _queued(wgrads: wgrad_queue.Waiting) -> Iterator[None]:
    """Inside, weight gradients wait as `wgrads` tells."""
    with wgrad_queue.opened(wgrads) as queue:
        transfers = patches.during_transfers(queue.run_older)
        with nullcontext() if wgrads.held is None else transfers:
            yield


def _finalize(*given: Any, **named: Any) -> None:
    wgrad_queue.run_all()
    finalize_model_grads(*given, **named)


def _reduce(chunk: DistributedDataParallel, _: Any) -> None:
    """Start to reduce the gradients of a chunk, after those that wait."""
    wgrad_queue.submit(chunk.start_grad_sync, follows=chunk.parameters())


def max_over_world(values: torch.Tensor) -> torch.Tensor:
    """All-reduce a vector to the largest value of any rank, in place."""
    dist.all_reduce(values, op=dist.ReduceOp.MAX)
    return values


def sum_over_world(values: torch.Tensor) -> torch.Tensor:
    """All-reduce a small vector of step metrics over every rank, in place."""
    dist.all_reduce(values)
    return values
