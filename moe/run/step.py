"""The device work of a training step except the update: from micro-batches to a few totals.

The totals of all ranks are one small tensor, which the host reads once: loss, gradient norm, load
of the experts, overflow of their row budget, largest attention logits, stop requests. Nothing
before that read waits for the device, so that a CUDA graph can replay it (`run.graph`), and nothing
after it: the host reports a step and prepares the next one while the device computes the update. A
step that overflowed is repeated with more rows.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, cast

import torch
from megatron.core.utils import get_batch_on_this_cp_rank

from phalanx.configs.arithmetic.batch_sizes import model_input
from phalanx.configs.capture import CAPTURED
from phalanx.configs.schema import Config
from phalanx.configs.tables.optimizers import MOMENTS
from phalanx.moe.job import Job
from phalanx.moe.labels import (
    Batch,
    Labels,
    count_labels,
    make_labels,
    mean_loss,
    sample_losses,
)
from phalanx.moe.model.loss import LossContext
from phalanx.moe.model.packed import packed
from phalanx.moe.router import balance
from phalanx.moe.totals import PEAKS, Sums, Totals, totals_of, unpack
from phalanx.parallel.cuda_graph import CaptureFailed, Inputs, StepGraph, UpdateGraphs
from phalanx.parallel.dispatcher.capacity import Growth
from phalanx.parallel.dispatcher.transport import load_counts
from phalanx.parallel.engine import max_over_world, sum_over_world
from phalanx.parallel.fault.activity import heartbeat
from phalanx.parallel.memory.offload import offloader

LogitReport = Callable[[torch.Tensor, Batch], dict[str, torch.Tensor]]


class Step:
    """Device work of the steps of a job.

    Args:
        cfg: validated config.
        job: job whose gradients are computed.
    """

    def __init__(self, cfg: Config, job: Job) -> None:
        self.cfg, self.job = cfg, job
        begin = job.runtime.connections.begin
        self.graph = StepGraph(self.forward_backward, begin) if job.plan.captured else None
        captured = job.plan.captured and not MOMENTS[cfg.optim.moments].hosted
        self._updates = UpdateGraphs() if captured else None  # copies outlast a hosted update
        self.capture_failure: CaptureFailed | None = None
        """Failure after which `run.graph=auto` computes eager steps; None if there was none."""
        self.update_failure: CaptureFailed | None = None
        """Failure after which it updates eagerly."""
        self._stop = torch.zeros((), device=job.runtime.device)
        self._grad_factor = torch.ones((), device=job.runtime.device) if cfg.run.inject else None
        """Factor of this rank's gradients, in runs that inject faults."""
        self.repeated = 0.0
        """Seconds of the last step that it spent on computations that were then repeated."""
        world = job.runtime.world
        self._ready_seconds_R = torch.zeros(world, dtype=torch.float64, device=job.runtime.device)
        self._launch_time = 0.0
        """Seconds that the last step took to launch; 0 on a CPU, where that includes the
        computation, and with pipeline stages, where it includes waits for each other."""
        model = job.engine.modules, job.engine.config, job.groups.pg
        self.collector = balance.Collector(*model, load_counts(job.plan.transports))
        self._labels_of: dict[int, Labels] = {}
        """Labels of a step without masks, by its number of micro-batches."""
        self.sample_losses: torch.Tensor | None = None
        """Sum of the losses of each sample, and labels that count, of this rank in the last
        forward-only step: fp32 [2, samples]; None on all but one of the ranks with the same
        samples."""

    def __call__(
        self,
        batches: list[Batch],
        before: list[torch.Tensor],
        *,
        stop: bool = False,
        waited: float = 0.0,
        measure_logits: bool = False,
        grad_factor: float = 1.0,
        forward_only: bool = False,
    ) -> Totals:
        """Compute a step, and repeat it while experts need more rows than they have.

        Args:
            batches: micro-batches, on the host or the device.
            before: result of `balance.snapshot` before the step.
            stop: this rank was asked to stop.
            waited: seconds for which this rank waited for its data.
            measure_logits: measure the largest attention logits, in a run that records them.
            grad_factor: factor of this rank's gradients, in a run with `run.inject`.
            forward_only: compute losses alone, of a model in evaluation mode.

        Raises:
            CaptureFailed: the step cannot be captured, and `run.graph` forces it.
        """
        engine, budget, world = self.job.engine, self.job.budget, self.job.runtime.world
        inputs = [self.context_shard(batch) for batch in batches]
        captured = 0 if self.graph is None or forward_only else self.graph.micro_batches
        if captured not in (0, len(inputs)):
            self.drop_graph()  # the size of the global batch has changed
        self._unmasked_labels(len(inputs))
        compute = self._forward if forward_only else self.graph or self.forward_backward
        self._stop.fill_(stop)
        if self._grad_factor is not None:
            self._grad_factor.fill_(grad_factor)
        if (tops := self.job.max_logits) is not None:
            tops.begin(measure_logits)
        late = waited + self._launch_time
        self._ready_seconds_R[self.job.runtime.rank].fill_(late)  # `=` would wait for a copy
        reruns: list[Growth] = []
        self.repeated = 0.0
        while True:
            started = time.perf_counter()
            try:
                totals = compute(inputs)
            except CaptureFailed as failure:
                if self.cfg.run.graph == CAPTURED:
                    raise
                self._disable_graph(failure)
                balance.restore(engine.modules, before)
                compute = self.forward_backward
                continue
            if totals.is_cuda:
                self._launch_time = time.perf_counter() - started
            peaks, sums, rest = unpack(_read(totals))  # the one host read of the step
            if not budget.exceeded(peaks):
                layers = tops.layers if tops is not None and not forward_only else 0
                return totals_of(sums, rest, tuple(reruns), ranks=world, layers=layers)
            self.repeated += time.perf_counter() - started
            reruns += self.enlarge()
            balance.restore(engine.modules, before)

    def update(self, norm: float) -> None:
        """Update parameters and learning rate after a step.

        Args:
            norm: global gradient norm of the step.

        Raises:
            CaptureFailed: the update cannot be captured, and `run.graph` forces it.
        """
        graphs = self._updates
        if graphs is None or self.graph is None:
            self.job.engine.step(norm)
            return
        try:
            self.job.engine.step(norm, partial(graphs, pool=self.graph.pool))
        except CaptureFailed as failure:
            if self.cfg.run.graph == CAPTURED:
                raise
            self.update_failure, self._updates = failure, None
            graphs.drop()
            self.job.engine.update()

    def report_logits(
        self, inputs: Sequence[Batch], report: LogitReport, *, sequence: int, micro_batch: int
    ) -> list[dict[str, torch.Tensor]]:
        """Run an eager forward pass of `inputs`; return what `report` makes of each one's logits.

        `inputs` are the `context_shard` of micro-batches of `micro_batch` sequences of `sequence`
        tokens. `report` takes the logits [B, S, V] of this rank's part, and the micro-batch. On all
        ranks, of which those without the last pipeline stage have no reports.
        """
        engine = self.job.engine
        forward = partial(_logits, report, engine.config.bf16)
        sizes = dict(microbatches=len(inputs), sequence=sequence, micro_batch=micro_batch)
        batches = [iter(inputs) for _ in engine.chunks]
        return list(engine.forward_backward(forward, batches, **sizes, forward_only=True))

    @property
    def graphs(self) -> int:
        """Number of graphs captured and not dropped."""
        return sum(held.count for held in (self.graph, self._updates) if held is not None)

    def close(self) -> None:
        """Release the graphs after the last step, before process groups are destroyed."""
        self.drop_graph()

    def enlarge(self) -> list[Growth]:
        """Enlarge the budget after an overflow, and drop the graphs and buffers of other sizes."""
        grown = self.job.budget.grow()
        self.drop_graph()
        if any(growth.between_nodes for growth in grown):
            # Blocks are what the transport inside a node sends, whose buffers have their size.
            self.job.runtime.connections.release()
        return grown

    def drop_graph(self) -> None:
        """Drop the graphs, as after a change of buffer sizes; the next step is captured."""
        self.drop_updates()
        if self.graph is not None:
            self.graph.drop()

    def drop_updates(self) -> None:
        """Drop the graphs of the update, as when the optimizer's tensors have been replaced."""
        if self._updates is not None:
            self._updates.drop()

    def _disable_graph(self, failure: CaptureFailed) -> None:
        """Continue with eager steps, and clear what the failed capture has left behind."""
        self.capture_failure, self.graph = failure, None
        self.job.engine.abandon_step()
        offloader(self.job.runtime.device).abandon()

    def context_shard(self, batch: Batch) -> Batch:
        """A micro-batch on the device, reduced to this context rank's part of its sequences.

        A new dict, once per step: Megatron-Core writes the parts into the dict that it receives,
        and a rerun, a graph and every model chunk of a stage use the same inputs.
        """
        groups, device = self.job.groups, self.job.runtime.device
        inputs = {name: t.to(device, non_blocking=True) for name, t in batch.items()}
        if groups.context == 1:
            return inputs
        if "loss_mask" not in inputs:
            return get_batch_on_this_cp_rank(inputs, False, groups.pg.cp)
        # Facts on packed documents that do not follow from this rank's part.
        full = {"whole": inputs["position_ids"], "whole_mask": inputs["loss_mask"]}
        inputs["last"] = full["whole"].roll(-1, 1) == 0
        return get_batch_on_this_cp_rank(inputs, False, groups.pg.cp) | full

    def _unmasked_labels(self, microbatches: int) -> Labels:
        """Labels of a step without masks; made once, as a capture cannot copy from the host."""
        if microbatches not in self._labels_of:
            data, device = self.cfg.data, self.job.runtime.device
            samples = microbatches * data.micro_batch * self.job.groups.data
            lengths = (data.sequence_length - k for k in range(1 + self.cfg.model.mtp_layers))
            number_K = torch.tensor([samples * max(0, n) for n in lengths], device=device)
            self._labels_of[microbatches] = make_labels(number_K, microbatches * self._ranks)
        return self._labels_of[microbatches]

    @property
    def _ranks(self) -> int:
        """Number of ranks over which Megatron-Core averages losses and gradients."""
        return self.job.groups.data * self.job.groups.context

    def _labels(self, inputs: Inputs) -> Labels:
        """Labels that count in a step. Collective with masks."""
        if "loss_mask" not in inputs[0]:
            return self._unmasked_labels(len(inputs))
        parts, kinds = len(inputs) * self._ranks, 1 + self.cfg.model.mtp_layers
        return count_labels(inputs, kinds, parts, self.job.groups.pg.dp)

    def _forward(self, inputs: Inputs) -> torch.Tensor:
        labels = self._labels(inputs)
        reports = self._microbatches(inputs, labels, forward_only=True)
        first = reports and self.job.groups.pg.tp.rank() == 0
        self.sample_losses = torch.cat([r["samples"] for r in reports], 1) if first else None
        return self._totals(reports, labels, None)

    def forward_backward(self, inputs: Inputs) -> torch.Tensor:
        """Totals of a step with gradients, on the device; see `_totals`."""
        engine = self.job.engine
        engine.zero_grad()
        if self.job.max_logits is not None:
            self.job.max_logits.reset()
        labels = self._labels(inputs)
        reports = self._microbatches(inputs, labels)
        if self._grad_factor is not None:
            engine.scale_gradients(self._grad_factor)
        return self._totals(reports, labels, engine.grad_squares())

    def _microbatches(
        self, inputs: Inputs, labels: Labels, forward_only: bool = False
    ) -> list[Any]:
        sequence, micro_batch = model_input(self.cfg.data)
        return self.job.engine.forward_backward(
            partial(self.forward_step, microbatches=len(inputs), mean_K=labels.mean_K),
            [iter(inputs) for _ in self.job.engine.chunks],
            microbatches=len(inputs),
            sequence=sequence,
            micro_batch=micro_batch,
            forward_only=forward_only,
        )

    def forward_step(
        self,
        batches: Iterator[Batch],
        chunk: torch.nn.Module,
        *,
        microbatches: int,
        mean_K: torch.Tensor,
    ) -> tuple[Any, Any]:
        """Output of a chunk for the next micro-batch, and its loss function.

        The signature is that of Megatron-Core's schedules.

        Args:
            batches: micro-batches of the step that are left.
            chunk: a model chunk.
            microbatches: number of micro-batches of the step.
            mean_K: mean number of labels of a micro-batch (`Labels.mean_K`).
        """
        heartbeat()
        batch = next(batches)
        labels, mask = batch["labels"], batch.get("loss_mask")
        mean, report = mean_K[0], mean_loss if chunk.training else sample_losses
        gradient = partial(self._loss_gradient, labels, microbatches, mean, mask)
        losses = LossContext(gradient, mean_K[1:])
        if self.cfg.data.document_mask:
            output = self._packed(batch, chunk, losses)
        else:
            tokens, positions = batch["tokens"], batch["position_ids"]
            output = chunk(tokens, positions, None, labels=labels, loss_mask=mask, losses=losses)
        return output, partial(report, mean=mean, mask_BS=mask, ahead=losses.losses_ahead)

    def _loss_gradient(
        self,
        labels: torch.Tensor,
        microbatches: int,
        mean: torch.Tensor,
        mask_BS: torch.Tensor | None,
    ) -> torch.Tensor:
        """Gradient that `mean_loss` and the schedules give each loss that counts, fp32 []."""
        scale = self.job.engine.config.grad_scale_func or (lambda loss: loss)
        factor = scale(1.0) / microbatches
        if mask_BS is None:
            value = factor / labels.numel()
            return torch.full((), value, dtype=torch.float32, device=labels.device)
        return factor / mean

    def _packed(self, batch: Batch, chunk: torch.nn.Module, losses: LossContext) -> Any:
        """Output of a chunk for sequences of packed documents, which the model sees as one."""
        names = ("tokens", "position_ids", "labels", "loss_mask")
        flat = {name: batch[name].reshape(1, -1) for name in names}
        places, ranks = self.job.plan.document_slots, self.job.groups.context
        return chunk(
            flat["tokens"],
            flat["position_ids"],
            None,
            labels=flat["labels"],
            loss_mask=flat["loss_mask"],
            losses=losses,
            packed_seq_params=packed(
                batch["position_ids"],
                places=places,
                ranks=ranks,
                whole_BS=batch.get("whole"),
                last_BS=batch.get("last"),
            ),
        )

    def _totals(
        self,
        reports: list[dict[str, torch.Tensor]],
        labels: Labels,
        grad_squares: torch.Tensor | None,
    ) -> torch.Tensor:
        """Totals of all ranks in one tensor, fp64 on the device (`moe.totals.unpack`).

        They are the largest used shares of the parts of the budget, `Sums`, the time of each rank,
        and after a backward pass the load of the experts and the largest attention logit of each
        layer, if the run records them.
        """
        flat, sums = Sums.zeros(self.job.runtime.device)
        if reports:  # last pipeline stage
            sums.loss.copy_(torch.stack([r["loss"] for r in reports]).mean())
            sums.ranks.fill_(1)  # an assignment copies from the host and cannot be captured
            if "ahead" in reports[0]:
                ahead_K = cast(torch.Tensor, sum(r["ahead"] for r in reports))
                nonempty = (labels.number_K[1:] > 0).sum()
                sums.mtp_loss.copy_(ahead_K.sum() / nonempty / len(reports))
            sums.labels.copy_(labels.number_K[0])
        sums.stopping.copy_(self._stop)
        summed, largest, logits = [flat, self._ready_seconds_R], [self.job.budget.record()], []
        tops = None if grad_squares is None else self.job.max_logits
        if grad_squares is not None:
            sums.grad_squares.copy_(grad_squares)
            summed.append(self.collector.table().flatten())
        if tops is not None:
            largest.append(tops.flat())
        most = max_over_world(torch.cat(largest))
        if tops is not None:
            logits = [tops.put(most[PEAKS:])]
        return torch.cat((most[:PEAKS], sum_over_world(torch.cat(summed)), *logits))


def _logits(
    report: LogitReport, bf16: bool, batches: Iterator[Batch], chunk: Any
) -> tuple[Any, Any]:
    """Forward step for Megatron-Core's schedules, whose loss is 0 of one label."""
    batch = next(batches)
    heartbeat()
    # By default the wrapper of bf16 models makes an fp32 copy of all logits.
    options = {"fp32_output": False} if bf16 else {}

    def reported(logits_BSV: torch.Tensor) -> tuple[Any, Any, dict[str, torch.Tensor]]:
        count = torch.ones((), dtype=torch.int32, device=logits_BSV.device)
        return torch.zeros_like(count, dtype=torch.float32), count, report(logits_BSV, batch)

    return chunk(batch["tokens"], batch["position_ids"], None, **options), reported


def _read(totals: torch.Tensor) -> torch.Tensor:
    """Copy of the totals on the host, through pinned memory.

    A copy to pageable memory would wait inside the driver and block all other calls to it,
    including those of the post-mortem if the device hangs.
    """
    if not totals.is_cuda:
        return totals.clone()
    host = torch.empty_like(totals, device="cpu", pin_memory=True)
    host.copy_(totals, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()
    copied.synchronize()
    return host
