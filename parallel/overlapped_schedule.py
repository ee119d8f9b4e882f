"""Micro-batches of a step, with the forward pass of each beside the backward pass of the last one.

    stream 0:  F0  B0 ------  F2  B2 ------
    stream 1:      F1         B1  F3         B3        B1 beside F2, B2 beside F3

The exchanges of one pass then run under the computation of the other (arXiv 2412.19437,
section 3.2.1, without its pipeline). The host issues all passes in the order of Megatron-Core's
schedule without pipeline stages: F0 B0 F1 B1 ... Only their streams differ: micro-batch i is on
stream i % 2, its backward pass too, as autograd runs it where its forward pass was. So results are
those of that schedule bit for bit, and a CUDA graph captures both streams as branches. On a CPU,
which has no streams, it is that schedule.

Forward passes follow one another, and so do backward passes, by events; and a stream has one
micro-batch at a time. At most one forward and one backward pass run beside each other.

A forward pass does a third of the work, and by itself would be over when half of the exchanges
beside it are still to come. So it follows the backward pass at two places of each layer: attention
starts with the backward pass of a layer, which sends gradients of sums first, and experts start
when the backward pass of experts is done, which then sends gradients of tokens. The k-th layer of
one pass is beside the k-th of the other, the last one of the model if that is the backward pass:

    backward:  sums'  EXPERTS'                tokens' ATTENTION'      ' is the gradient of
    forward:   ATTENTION      tokens          EXPERTS sums            lower case is an exchange

Nothing of one pass waits for the other inside a kernel: transports whose kernels fill the GPU and
wait for other ranks are refused (`configs.layout.not_overlappable`). Shared state, and the reason
that two passes at a time do not spoil it:

- Parameters, and FP8 copies of weights, which the first forward pass makes, are only read.
- Gradient buffers are written by backward passes alone, each on its own stream
  (`parallel.megatron.patches.accumulate_on_own_stream`), and reduced in the last one.
- Counts, losses and biases of routers, and the largest attention logits, are written by forward
  passes alone, or, if layers are recomputed, by backward passes alone.
- The record of the budget of expert rows is written by forward passes alone.
- Counters of kernels that claim tiles belong to a stream, or to a launch of a graph
  (`kernels.sm90.jit.arguments`); workspaces of cuBLAS belong to a stream, those of other kernels to
  a call. Transposes (`kernels.sm90.fp8.transpose_overlap`) are on a stream of backward passes.
- Tables that are computed once (rotary angles, masks) are made by a forward pass before the first
  backward pass ends, and every other pass waits for that one.
- Megatron-Core's scales of auxiliary losses are set by each forward pass, to the same value.
- Exchanges have a process group for each kind of pass (`parallel.dispatcher.passes.pass_groups`).
- Activations belong to one micro-batch, and their memory to its stream, which frees it; emptied and
  recomputed ones too. Reports, inputs and gradients cross to the caller's stream, which is waited
  for at the start and waits for both at the end.
- Offloaded activations and replicas of experts share buffers between micro-batches and are refused.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.pipeline_parallel import schedules
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.utils import get_model_config

from phalanx.kernels import wgrad_queue

Event = torch.cuda.Event | None
"""Event after work of a stream; None on a CPU."""


class OverlappedSchedule:
    """Forward and backward passes of the micro-batches of one step, two at a time.

    Args:
        chunk: the one model chunk of this rank, after
            `parallel.megatron.patches.accumulate_on_own_stream`.
        device: device of the chunk.
    """

    def __init__(self, chunk: DistributedDataParallel, device: torch.device) -> None:
        self._chunk, self._config = chunk, get_model_config(chunk)
        self._cuda = device.type == "cuda"
        self._streams = [torch.cuda.Stream(device) for _ in range(2)] if self._cuda else []
        self._layers, self._experts = _Places(self._event), _Places(self._event)
        for module in chunk.modules():
            if isinstance(module, TransformerLayer):
                module.register_forward_pre_hook(self._before_layer)
                module.register_forward_hook(self._after_layer)
            if isinstance(module, MoELayer):
                module.experts.register_forward_pre_hook(self._before_experts)

    def __call__(
        self, forward_step: Callable[..., Any], batches: Iterator[Any], microbatches: int
    ) -> list[Any]:
        """Run all micro-batches and finish the gradients.

        Args:
            forward_step: (iterator, chunk) -> (output, loss function).
            batches: the micro-batches.
            microbatches: their number.

        Returns:
            What the loss function reported, one entry per micro-batch, on the caller's stream.
        """
        config, reports = self._config, list[Any]()
        places = self._layers, self._experts
        for place in places:
            place.reached = []
        groups = schedules._build_default_pg_collection()
        no_sync = config.no_sync_func or nullcontext
        start = forward_end = backward_end = self._event()
        for i in range(microbatches):
            reduces = i + 1 == microbatches
            with self._on_stream(i), nullcontext() if reduces else no_sync():
                self._wait(start, forward_end)
                with places[0].follow(), places[1].follow():
                    output, _ = schedules.forward_step(
                        forward_step,
                        batches,
                        self._chunk,
                        microbatches,
                        None,
                        reports,
                        config,
                        groups.cp.size(),
                        is_first_microbatch=i == 0,
                        current_microbatch=i,
                    )
                forward_end = self._event()
                self._wait(backward_end)
                schedules.backward_step(None, output, None, config)
                wgrad_queue.run_all()  # what no exchange has followed
                del output  # with its graph, whose nodes belong to this stream
                backward_end = self._event()
        self._wait(forward_end, backward_end)
        config.finalize_model_grads_func([self._chunk], None, pg_collection=groups)
        return reports

    def _on_stream(self, i: int) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._streams[i % 2]) if self._cuda else nullcontext()

    def _event(self) -> Event:
        """Event after the work of the current stream so far."""
        return torch.cuda.current_stream().record_event() if self._cuda else None

    def _wait(self, *events: Event) -> None:
        """Have the current stream wait for events."""
        for event in events:
            if event is not None:
                torch.cuda.current_stream().wait_event(event)

    def _before_layer(self, *_: Any) -> None:
        self._wait(self._layers.next())

    def _after_layer(self, layer: torch.nn.Module, _: Any, output: tuple[Any, ...]) -> None:
        self._layers.note(output[0])

    def _before_experts(self, experts: torch.nn.Module, given: tuple[Any, ...]) -> None:
        self._wait(self._experts.next())
        self._experts.note(given[0].rows_ND)


class _Places:
    """A place in each layer at which forward passes wait for the backward pass beside them.

    Args:
        event: makes an event on the current stream.
    """

    def __init__(self, event: Callable[[], Event]) -> None:
        self._event = event
        self.reached: list[Event] = []
        """Events at the places of the backward pass that was issued last, in its order."""
        self._awaited: Iterator[Event] = iter(())

    @contextmanager
    def follow(self) -> Iterator[None]:
        """Inside is a forward pass; the backward pass that is issued next is its own."""
        self._awaited, self.reached = iter(self.reached), []
        try:
            yield
        finally:
            self._awaited = iter(())

    def next(self) -> Event:
        """Event that the next place of a forward pass waits for; None if there is none."""
        return next(self._awaited, None)

    def note(self, tensor: torch.Tensor) -> None:
        """Let the backward pass reach the place when it has the gradient of a tensor."""
        if tensor.requires_grad:
            tensor.register_hook(lambda _: self.reached.append(self._event()))
