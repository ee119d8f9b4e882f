"""All of a training step on the device but the update: micro-batches in, a few totals out.

The totals of all ranks are one small tensor, which the host reads once: loss, gradient norm, load
of the experts, overflow of their row budget, largest attention logits, whether any rank was asked
to stop. Nothing before that read waits for the device, so that a CUDA graph can replay it
(`run.graph`), and nothing after it: the host reports a step and prepares the next while the device
makes the update. A step that overflowed is computed again with more rows.
"""

import math
import time
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from megatron.core.utils import get_batch_on_this_cp_rank

from phalanx.configs.schema import Config
from phalanx.moe.model.loss import foretold
from phalanx.moe.model.packed import packed
from phalanx.moe.router import balance
from phalanx.moe.training.setup import Job
from phalanx.parallel.cuda_graph import CaptureFailed, Inputs, StepGraph
from phalanx.parallel.engine import max_over_world, sum_over_world
from phalanx.parallel.fault.activity import moving
from phalanx.parallel.memory.offload import offloader

Batch = dict[str, torch.Tensor]
_SUMS = 5
"""Numbers that ranks add up, before the time of each rank and the load of the experts."""


class Rerun(NamedTuple):
    """Why a step was run again, and with what."""

    needed: float
    """Rows that the experts needed, over the rows of balanced routing."""
    capacity_factor: float
    """Capacity factor of the rerun and of the steps after it."""


class Totals(NamedTuple):
    """Totals of a step over all ranks, identical on every rank."""

    loss: float
    mtp_loss: float
    norm: float
    """Gradient norm before clipping; 0 without gradients."""
    stopping: bool
    """A rank was asked to stop."""
    reruns: tuple[Rerun, ...]
    late: torch.Tensor
    """Seconds that each rank took until its device had the step: fp64 [ranks], on the host."""
    load: torch.Tensor
    """Of the routers since the last reset, for `balance.Collector.read`; without gradients none."""
    max_logits: torch.Tensor
    """Largest attention logit of each layer, fp64, on the host; -inf unless they were due."""


class Step:
    """Computes the steps of a job.

    Args:
        cfg: validated config.
        job: whose gradients are computed.
    """

    def __init__(self, cfg: Config, job: Job) -> None:
        self.cfg, self.job = cfg, job
        self.graph = StepGraph(self.forward_backward) if job.captured else None
        self.capture_failure: CaptureFailed | None = None
        """Reason for which `run.graph=auto` gave up the graph; steps are eager from then on."""
        self._stop = torch.zeros((), device=job.runtime.device)
        self._spoil = torch.ones((), device=job.runtime.device) if cfg.run.inject else None
        """Factor of this rank's gradients, in runs that inject faults."""
        world = job.runtime.world
        self._late_R = torch.zeros(world, dtype=torch.float64, device=job.runtime.device)
        self._launched = 0.0
        """Seconds that the last step took to launch; 0 on a CPU, which computes meanwhile, and
        between pipeline stages, which wait for each other meanwhile."""
        self.collector = balance.Collector(job.engine.modules, job.engine.config, job.groups.pg)
        self.sample_losses: torch.Tensor | None = None
        """fp32 [samples] of this rank in the last forward-only step; None but on the last stage."""

    def __call__(
        self,
        batches: list[Batch],
        before: list[torch.Tensor],
        *,
        stop: bool = False,
        waited: float = 0.0,
        measure_logits: bool = False,
        spoil: float = 1.0,
        forward_only: bool = False,
    ) -> Totals:
        """Compute a step, again while experts need more rows than they have.

        Args:
            batches: micro-batches, on the host or the device.
            before: what `balance.snapshot` gave before the step.
            stop: this rank was asked to stop.
            waited: seconds for which this rank waited for its data.
            measure_logits: this step's largest attention logits are due, of a run that has them.
            spoil: factor of this rank's gradients, of a run with `run.inject`.
            forward_only: losses alone, of a model in evaluation mode.

        Raises:
            CaptureFailed: the step cannot be captured, and `run.graph` forces it.
        """
        engine, budget, world = self.job.engine, self.job.budget, self.job.runtime.world
        inputs = [self.own_part(batch) for batch in batches]
        compute = self._forward if forward_only else self.graph or self.forward_backward
        self._stop.fill_(stop)
        if self._spoil is not None:
            self._spoil.fill_(spoil)
        if (tops := self.job.max_logits) is not None:
            tops.begin(measure_logits)
        self._late_R[self.job.runtime.rank].fill_(waited + self._launched)  # `=` waits for a copy
        reruns: list[Rerun] = []
        while True:
            began = time.perf_counter()
            try:
                totals = compute(inputs)
            except CaptureFailed as failure:
                if self.cfg.run.graph != "auto":
                    raise
                self._give_up_graph(failure)
                balance.restore(engine.modules, before)
                compute = self.forward_backward
                continue
            if totals.is_cuda and self.job.groups.pipeline == 1:
                self._launched = time.perf_counter() - began
            read = _read(totals)  # the one host read of the step
            peak, loss, ranks, mtp_loss, stopping, squares = read[: 1 + _SUMS].tolist()
            if not budget.exceeded(peak):
                losses, norm = (loss / ranks, mtp_loss / ranks), math.sqrt(squares)
                layers = tops.layers if tops is not None and not forward_only else 0
                rest = read[1 + _SUMS :]
                late_R, load, logits = rest.split([world, len(rest) - world - layers, layers])
                return Totals(*losses, norm, stopping > 0, tuple(reruns), late_R, load, logits)
            reruns.append(Rerun(budget.grow(), budget.capacity_factor))
            self.drop_graph()
            balance.restore(engine.modules, before)

    def close(self) -> None:
        """No further step is coming; process groups can be destroyed after it."""
        self.drop_graph()

    def drop_graph(self) -> None:
        """Buffers have another size: capture the next step anew."""
        if self.graph is not None:
            self.graph.drop()

    def _give_up_graph(self, failure: CaptureFailed) -> None:
        """Go on with eager steps, of which the failed capture must have left nothing behind."""
        self.capture_failure, self.graph = failure, None
        self.job.engine.abandon_step()
        offloader(self.job.runtime.device).abandon()
        MTPLossLoggingHelper.clean_metrics_in_tracker()

    def own_part(self, batch: Batch) -> Batch:
        """A micro-batch on the device, of its sequences what this context rank trains on.

        Once per step, and in a dict of its own: Megatron-Core writes the parts into the one that it
        is given, and a rerun, a graph and every model chunk of a stage take the same inputs.
        """
        groups, device = self.job.groups, self.job.runtime.device
        inputs = {name: t.to(device, non_blocking=True) for name, t in batch.items()}
        if groups.context == 1:
            return inputs
        if "loss_mask" not in inputs:
            return get_batch_on_this_cp_rank(inputs, False, groups.pg.cp)
        # Of packed documents, what a rank cannot tell by its own part.
        labels_B = inputs["loss_mask"].sum(1) / groups.context
        whole_BS = inputs["position_ids"]
        inputs["last"] = whole_BS.roll(-1, 1) == 0
        own = get_batch_on_this_cp_rank(inputs, False, groups.pg.cp)
        return own | {"labels_B": labels_B, "whole": whole_BS}

    def _forward(self, inputs: Inputs) -> torch.Tensor:
        reports = self._microbatches(inputs, forward_only=True)
        self.sample_losses = torch.cat([r["samples"] for r in reports]) if reports else None
        return self._totals(reports, None)

    def forward_backward(self, inputs: Inputs) -> torch.Tensor:
        """All of a step on the device but the update; see `_totals`."""
        engine = self.job.engine
        engine.zero_grad()
        if self.job.max_logits is not None:
            self.job.max_logits.reset()
        reports = self._microbatches(inputs)
        if self._spoil is not None:
            engine.scale_gradients(self._spoil)
        return self._totals(reports, engine.grad_squares())

    def _microbatches(self, inputs: Inputs, forward_only: bool = False) -> list[Any]:
        data = self.cfg.data
        return self.job.engine.forward_backward(
            partial(self.forward_step, microbatches=len(inputs)),
            [iter(inputs) for _ in self.job.engine.chunks],
            microbatches=len(inputs),
            sequence=data.sequence_length * (data.micro_batch if data.document_mask else 1),
            micro_batch=1 if data.document_mask else data.micro_batch,
            forward_only=forward_only,
        )

    def forward_step(
        self, batches: Iterator[Batch], chunk: torch.nn.Module, *, microbatches: int
    ) -> tuple[Any, Any]:
        """Loss of the next of so many micro-batches in a chunk, as Megatron-Core's schedules ask
        for it."""
        moving()
        batch = next(batches)
        counted, labels = _counted(batch), batch["labels"]
        report = partial(mean_loss if chunk.training else sample_losses, **counted)
        with foretold(partial(self._loss_gradient, labels, microbatches, **counted), labels):
            if self.cfg.data.document_mask:
                return self._packed(batch, chunk), report
            output = chunk(batch["tokens"], batch["position_ids"], None, labels=labels)
            return output, report

    def _loss_gradient(
        self,
        labels: torch.Tensor,
        microbatches: int,
        mask_BS: torch.Tensor | None = None,
        labels_B: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """What `mean_loss` and the schedules make the gradient of each loss that counts, fp32."""
        scale = self.job.engine.config.grad_scale_func or (lambda loss: loss)
        factor = scale(1.0) / microbatches
        if mask_BS is None:
            each = factor / labels.numel()
            return torch.full((), each, dtype=torch.float32, device=labels.device)
        count = (mask_BS if labels_B is None else labels_B).sum()
        return factor / _at_least_one(count).float()

    def _packed(self, batch: Batch, chunk: torch.nn.Module) -> Any:
        """Output of a chunk for sequences of packed documents, which to the model are one."""
        names = ("tokens", "position_ids", "labels", "loss_mask")
        one = {name: batch[name].reshape(1, -1) for name in names}
        places, ranks = self.job.places, self.job.groups.context
        return chunk(
            one["tokens"],
            one["position_ids"],
            None,
            labels=one["labels"],
            loss_mask=one["loss_mask"],
            packed_seq_params=packed(
                batch["position_ids"],
                places=places,
                ranks=ranks,
                whole_BS=batch.get("whole"),
                last_BS=batch.get("last"),
            ),
        )

    def _totals(
        self, reports: list[dict[str, torch.Tensor]], grad_squares: torch.Tensor | None
    ) -> torch.Tensor:
        """Of all ranks, fp64 on the device.

        The largest share of the budget of expert rows; then sums: loss, ranks that have one, loss
        of multi-token prediction, ranks asked to stop, squared gradient norm; the time of each
        rank; and after a backward pass the load of the experts, and the largest attention logit of
        each layer, if the run has them.
        """
        totals = torch.zeros(_SUMS, dtype=torch.float64, device=self.job.runtime.device)
        if reports:  # last pipeline stage
            totals[0] = torch.stack([r["loss"] for r in reports]).mean()
            totals[1].fill_(1)  # a copy of a number could not be captured
            mtp = MTPLossLoggingHelper.tracker.get("loss_values")
            if mtp is not None:
                totals[2] = mtp.mean() / len(reports) * self.job.mtp_weight
                MTPLossLoggingHelper.clean_metrics_in_tracker()
        totals[3] = self._stop
        summed, largest, logits = [totals, self._late_R], [self.job.budget.record()[None]], []
        tops = None if grad_squares is None else self.job.max_logits
        if grad_squares is not None:
            totals[4] = grad_squares
            summed.append(self.collector.table().flatten())
        if tops is not None:
            largest.append(tops.flat())
        most = max_over_world(torch.cat(largest))
        if tops is not None:
            logits = [tops.put(most[1:])]
        return torch.cat((most[:1], sum_over_world(torch.cat(summed)), *logits))


def _read(totals: torch.Tensor) -> torch.Tensor:
    """On the host, by way of pinned memory.

    A copy to other memory would wait inside the driver, and everyone else who asks it with it: if
    the device hangs, the post-mortem.
    """
    if totals.is_cuda:
        there = totals
        totals = torch.empty_like(there, device="cpu", pin_memory=True)
        totals.copy_(there, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        arrived.synchronize()
        return totals
    return totals.clone()


def mean_loss(
    loss_BS: torch.Tensor,
    mask_BS: torch.Tensor | None = None,
    labels_B: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Sum, count and report of a micro-batch; Megatron-Core divides the sum by the count.

    Args:
        loss_BS: of each token; in any shape of as many if there is a mask.
        mask_BS: bool: which tokens count; None counts all.
        labels_B: tokens that count in each sequence, the mean over ranks that share it: the mean of
            their results is then that over all tokens that count. None if it is not shared.
    """
    if mask_BS is not None:
        total = (loss_BS.float().view(mask_BS.shape) * mask_BS).sum()
        count = mask_BS.sum().clamp(min=1).int()
        if labels_B is not None:
            total = total * (count / _at_least_one(labels_B.sum()))
        return total, count, {"loss": total.detach() / count}
    total = loss_BS.float().sum()
    count = torch.full((), loss_BS.numel(), dtype=torch.int32, device=loss_BS.device)
    return total, count, {"loss": total.detach() / loss_BS.numel()}


def sample_losses(
    loss_BS: torch.Tensor,
    mask_BS: torch.Tensor | None = None,
    labels_B: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """As `mean_loss`, with the mean loss of each sample's tokens on this rank in the report."""
    total, count, report = mean_loss(loss_BS, mask_BS, labels_B)
    if mask_BS is None:
        return total, count, report | {"samples": loss_BS.float().mean(1)}
    loss_BS = loss_BS.float().view(mask_BS.shape) * mask_BS
    labels_B = mask_BS.sum(1) if labels_B is None else labels_B
    return total, count, report | {"samples": loss_BS.sum(1) / _at_least_one(labels_B)}


def _counted(batch: Batch) -> dict[str, Any]:
    """What `mean_loss` counts a micro-batch by, if not all its tokens count."""
    if "loss_mask" not in batch:
        return {}
    return dict(mask_BS=batch["loss_mask"], labels_B=batch.get("labels_B"))


def _at_least_one(labels: torch.Tensor) -> torch.Tensor:
    """Where no token counts, of whose losses the sum is 0."""
    return labels.where(labels > 0, 1)
