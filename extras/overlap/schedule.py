"""Micro-batches of a step, with forward passes beside backward passes of other micro-batches.

    stream 0:  F0  B0 ------  F2  B2 ------
    stream 1:      F1         B1  F3         B3        B1 beside F2, B2 beside F3

The exchanges of one pass then run under the computation of the other (arXiv 2412.19437, section
3.2.1). `extras.overlap.slots` says which passes are beside each other, also with pipeline stages.
The host issues the backward pass of a slot, then its forward pass: without stages that is the order
of Megatron-Core's schedule, F0 B0 F1 B1 ... The i-th forward pass is on stream i % 2, its backward
pass too, as autograd runs it where its forward pass was; the two passes of a slot are always on
different streams. Each kind of pass comes in the order of Megatron-Core's schedules, so results are
theirs bit for bit, and a CUDA graph captures both streams as branches. Passes of a kind follow one
another by events: at most one forward and one backward pass run beside each other. On a CPU, which
has no streams, all follow one another.

After each slot pipeline stages send activations and gradients at once, on a third stream, which
waits for both passes, and which the passes of the next slot wait for. These depend on both passes
of this slot in any case. The memory of what arrives belongs to that stream. It is free when the
host has issued the backward pass that reads it, which the next transfer waits for.

A forward pass does a third of the work, and by itself would be over when half of the exchanges
beside it are still to come. So it follows the backward pass at two places of each layer: attention
starts with the backward pass of a layer, which sends gradients of sums first, and experts start
when the backward pass of experts is done, which then sends gradients of tokens. The k-th layer of
one pass is beside the k-th of the other, the last one of the chunk if that is the backward pass:

    backward:  sums'  EXPERTS'                tokens' ATTENTION'      ' is the gradient of
    forward:   ATTENTION      tokens          EXPERTS sums            lower case is an exchange

Kernels that wait for other ranks take few SMs: NCCL's, pushes on their reserved SMs
(`ExchangeOptions.two_passes`), and waits of one CTA. So those of both passes run at a time, and the
ones that compute end by themselves. Ranks issue passes in the same order, hence none waits for what
comes later on another rank. Shared state, and the reason that two passes at a time do not spoil it:

- Parameters, and FP8 copies of weights, which the first forward pass makes, are only read.
- Gradient buffers are written by backward passes alone, each on its own stream
  (`parallel.megatron.patches.accumulate_on_own_stream`), and reduced in the last one of a chunk.
- Counts, losses and biases of routers, and the largest attention logits, are written by forward
  passes alone, or, if layers are recomputed, by backward passes alone.
- The record of the budget of expert rows is written by forward passes alone.
- Counters of kernels that claim tiles belong to a stream, or to a launch of a graph
  (`kernels.sm90.jit.launch`); workspaces of cuBLAS belong to a stream, those of other kernels to a
  call. Transposes (`kernels.sm90.fp8.transpose_overlap`) are on a stream of backward passes.
- Tables that are computed once (rotary angles, masks) are made by a forward pass before the first
  backward pass ends, and every other pass waits for that one.
- Megatron-Core's scales of auxiliary losses are set by each forward pass, to the same value.
- Exchanges have a process group for each kind of pass, or buffers, flags and epochs
  (`extras.overlap.passes`); collectives of tensor ranks have a group and a buffer for each
  (`extras.overlap.tensor`).
- Activations belong to one micro-batch, and their memory to its stream, which frees it; emptied and
  recomputed ones too. Reports, inputs and gradients cross to the caller's stream, which is waited
  for at the start and waits for both at the end.
- Copies of offloaded activations are on streams of their own, which both passes share, and wait for
  what the other pass has read (`extras.overlap.offload`).
- Replicas of experts share buffers between micro-batches and are refused.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.pipeline_parallel import schedules
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.utils import get_model_config
from torch import Tensor

from phalanx.extras.overlap import offload, tensor
from phalanx.extras.overlap.slots import Pass, Slots
from phalanx.extras.overlap.streams import TRANSFERS, Arrived, Places, StageTransfers, Streams
from phalanx.kernels import wgrad_queue


class OverlappedSchedule:
    """Forward and backward passes of the micro-batches of one step, two at a time.

    `chunks` are this rank's, after `parallel.megatron.patches.accumulate_on_own_stream`.
    """

    def __init__(self, chunks: Sequence[DistributedDataParallel], device: torch.device) -> None:
        self._chunks, self._device, self._streams = list(chunks), device, Streams(device)
        tensor.separate(parallel_state.get_tensor_model_parallel_group())
        self._layers, self._experts = (Places(self._streams.event) for _ in range(2))
        for module in (module for chunk in chunks for module in chunk.modules()):
            if isinstance(module, TransformerLayer):
                module.register_forward_pre_hook(self._before_layer)
                module.register_forward_hook(self._after_layer)
            if isinstance(module, MoELayer):
                module.experts.register_forward_pre_hook(self._before_experts)

    def __call__(
        self,
        forward_step: Callable[..., Any],
        batches: Sequence[Iterator[Any]],
        *,
        microbatches: int,
        sequence: int,
        micro_batch: int,
    ) -> list[Any]:
        """Run all micro-batches and finish the gradients.

        Args:
            forward_step: (iterator, chunk) -> (output, loss function).
            batches: the micro-batches, an iterator for each chunk.
            sequence: tokens in a sequence, whole.
            micro_batch: sequences in a micro-batch.

        Returns:
            What the loss function reported, one entry per micro-batch, on the caller's stream;
                empty but on the last stage.
        """
        config, groups = get_model_config(self._chunks[0]), schedules._build_default_pg_collection()
        slots = Slots(groups.pp.rank(), groups.pp.size(), len(self._chunks), microbatches)
        transfers = StageTransfers(groups.pp, config.pipeline_dtype, self._device)
        (shape,) = schedules.get_tensor_shapes(
            seq_length=sequence,
            micro_batch_size=micro_batch,
            decoder_seq_length=None,
            config=config,
            tp_group=groups.tp,
            cp_group=groups.cp,
        )
        passes = _Passes(
            self._chunks, self._streams, slots, forward_step, batches, groups.cp.size()
        )
        self._layers.reached, self._experts.reached = [], []
        offload.begin_step(self._device)
        arrived = Arrived()
        for slot in range(len(slots)):
            output = gradient = None
            forward, backward = slots.forward(slot), slots.backward(slot)
            if backward is not None:
                gradient = passes.backward(backward, arrived.gradient)
            if forward is not None:
                with self._layers.follow(), self._experts.follow():
                    output = passes.forward(forward, arrived.input)
            if groups.pp.size() == 1:
                continue
            next_forward, next_backward = slots.forward(slot + 1), slots.backward(slot + 1)
            with passes.transfer():
                arrived = transfers(
                    shape,
                    output=output,
                    gradient=gradient,
                    awaits_input=next_forward is not None and not slots.first(next_forward),
                    awaits_gradient=next_backward is not None and not slots.last(next_backward),
                )
            if forward is not None:
                passes.sent(forward)
        passes.wait()
        config.finalize_model_grads_func(self._chunks, None, pg_collection=groups)
        return passes.reports

    def _before_layer(self, *_: Any) -> None:
        self._streams.wait(self._layers.next())

    def _after_layer(self, layer: torch.nn.Module, _: Any, output: tuple[Any, ...]) -> None:
        self._layers.note(output[0])

    def _before_experts(self, experts: torch.nn.Module, given: tuple[Any, ...]) -> None:
        self._streams.wait(self._experts.next())
        self._experts.note(given[0].rows_ND)


class _Passes:
    def __init__(
        self,
        chunks: Sequence[DistributedDataParallel],
        streams: Streams,
        slots: Slots,
        forward_step: Callable[..., Any],
        batches: Sequence[Iterator[Any]],
        context: int,
    ) -> None:
        self._chunks, self._streams, self._slots = chunks, streams, slots
        self._forward_step, self._batches = forward_step, batches
        self._config, self._context = get_model_config(chunks[0]), context
        self.reports: list[Any] = []  # of the loss function
        self._in_flight: dict[int, tuple[Tensor | None, Tensor]] = {}
        """Input and output of forward passes until their backward pass, by `Pass.number`."""
        self._forward_end = self._backward_end = self._transferred = streams.event()

    def forward(self, pass_: Pass, input_: Tensor | None) -> Tensor | None:
        """Output for the next stage; None on the last one."""
        interleaved, last = len(self._chunks) > 1, self._slots.last(pass_)
        with self._streams.on(pass_.number % 2):
            self._streams.wait(self._transferred, self._forward_end)
            output, _ = schedules.forward_step(
                self._forward_step,
                self._batches[pass_.chunk],
                self._chunks[pass_.chunk],
                self._slots.microbatches,
                input_,
                self.reports,
                self._config,
                self._context,
                is_first_microbatch=pass_.microbatch == 0,
                current_microbatch=pass_.microbatch,
                vp_stage=pass_.chunk if interleaved else None,
                is_last_stage=last,
            )
            self._forward_end = self._streams.event()
        self._in_flight[pass_.number] = input_, output
        return None if last else output

    def backward(self, pass_: Pass, gradient: Tensor | None) -> Tensor | None:
        """Gradient for the previous stage; None on the first one, as `gradient` is on the last."""
        input_, output = self._in_flight.pop(pass_.number)
        reduces = self._slots.reduces(pass_) or self._config.no_sync_func is None
        syncs = nullcontext() if reduces else self._chunks[pass_.chunk].no_sync()
        with self._streams.on(pass_.number % 2), syncs:
            self._streams.wait(self._transferred, self._backward_end)
            gradient = schedules.backward_step(input_, output, gradient, self._config)
            wgrad_queue.run_all()  # what no exchange has followed
            del output  # with its graph, whose nodes belong to this stream
            self._backward_end = self._streams.event()
        return gradient

    @contextmanager
    def transfer(self) -> Iterator[None]:
        """Inside, tensors of this slot are sent, and those of the next one received."""
        with self._streams.on(TRANSFERS):
            self.wait()
            yield
            self._transferred = self._streams.event()

    def sent(self, pass_: Pass) -> None:
        """Free the output of a forward pass, which has been sent; its graph is left."""
        if not self._slots.last(pass_):
            with self._streams.on(pass_.number % 2):  # which reuses it after the transfer
                _, output = self._in_flight[pass_.number]
                schedules.deallocate_output_tensor(output, self._config.deallocate_pipeline_outputs)

    def wait(self) -> None:
        self._streams.wait(self._forward_end, self._backward_end, self._transferred)
