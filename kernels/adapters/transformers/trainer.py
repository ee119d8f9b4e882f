"""This project's kernels in the Trainer of transformers: a callback, and captured steps.

trainer = Trainer(model, args, train_dataset=data, callbacks=[UsePhalanx()])
captured(trainer)
trainer.train()
"""

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from transformers import Trainer, TrainerCallback, masking_utils

from phalanx.adapters.transformers.whole import Report, apply

_LOG = logging.getLogger(__name__)


class UsePhalanx(TrainerCallback):
    """`apply(model, **switches)` when a Trainer is made, before its optimizer and its wrappers.

    Attributes:
        report: what was applied, which is printed on the first rank.
    """

    report: Report | None = None

    def __init__(self, **switches: Any) -> None:
        self._switches = switches

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._apply(kwargs["model"], state)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """For a callback that was added later, and a model that is made when training begins."""
        if self.report is None or getattr(kwargs["model"], "_phalanx_report", None) is None:
            self._apply(kwargs["model"], state)

    def _apply(self, model: Any, state: Any) -> None:
        self.report = model.__dict__["_phalanx_report"] = apply(model, **self._switches)
        if state.is_world_process_zero:
            print(self.report, flush=True)


class Captured:
    """Training steps of a Trainer as CUDA graphs where they can be.

    Each shape of a batch has two graphs: one writes the gradients, for the first micro-batch after
    an update, and one adds to them. Each first runs eagerly once, as a step that counts. Graphs
    share memory, and gradients stay where the first graph has them: `zero_grad` may set them to
    None.

    Args:
        trainer: whose steps are captured.
        most: shapes that get graphs; batches of others run eagerly.

    Attributes:
        reasons: why steps have run eagerly, each of which is logged once.
        replays: how many steps were replayed.
    """

    def __init__(self, trainer: Trainer, most: int = 4) -> None:
        self.reasons: list[str] = []
        self.replays = 0
        self._trainer, self._most = trainer, most
        self._eager = trainer.training_step
        self._shapes: dict[Any, _Shape] = {}
        self._failed = False
        self._pool: Any = None
        self._stream: torch.cuda.Stream | None = None
        self._gradients: list[tuple[Any, Tensor]] = []  # parameters and where theirs are
        if why := self._refusal():
            self._note(why)

    def __call__(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """As the training step of the Trainer: its loss, detached."""
        given = dict(inputs)
        why = self._refusal() or self._unfit(given)
        if why is None:
            given = self._trainer._prepare_inputs(given)
            if (padding := given.get("attention_mask")) is not None:
                # One read of the host; without it attention needs no mask.
                if not bool(padding.all()):
                    why = "a batch has padding"
                else:
                    del given["attention_mask"]
        if why is not None:
            self._note(why)
            return self._run(model, inputs, num_items_in_batch)
        if num_items_in_batch is not None:
            device = self._trainer.args.device
            given["num_items_in_batch"] = torch.as_tensor(num_items_in_batch).to(device)
        return self._step(model, given)

    def _refusal(self) -> str | None:
        """Reason why no step can be captured, or None."""
        trainer = self._trainer
        args = trainer.args
        if args.device.type != "cuda":
            return f"CUDA graphs need a GPU, not {args.device.type}"
        if trainer.accelerator.num_processes > 1 or args.n_gpu > 1:
            return "ranks exchange gradients in hooks, which are not captured"
        if trainer.accelerator.scaler is not None:
            return "the scaling of fp16 reads the host: use bf16"
        if args.torch_empty_cache_steps is not None:
            return "torch_empty_cache_steps frees memory in a step"
        kept = (args.gradient_checkpointing_kwargs or {}).get("preserve_rng_state", True)
        if args.gradient_checkpointing and kept:
            return (
                "gradient checkpointing reads the state of random numbers: set "
                "gradient_checkpointing_kwargs={'preserve_rng_state': False}"
            )
        return "a capture has failed" if self._failed else None

    def _unfit(self, inputs: dict[str, Any]) -> str | None:
        """Reason why these inputs cannot be captured, or None."""
        others = [key for key, value in inputs.items() if not isinstance(value, Tensor)]
        if others:
            return f"{others[0]} of a batch is no tensor"
        if "position_ids" in inputs:
            return "a batch has position_ids, by which sequences may be packed"
        if self._key(inputs) not in self._shapes and len(self._shapes) >= self._most:
            return f"more than {self._most} shapes of batches: pad them, or drop the last one"
        return None

    def _key(self, inputs: dict[str, Any]) -> Any:
        # Its gradients are divided by this number, a constant of a graph, unless items are counted.
        steps = getattr(self._trainer, "current_gradient_accumulation_steps", 1)
        names = sorted(set(inputs) - {"attention_mask", "num_items_in_batch"})
        return steps, tuple((name, inputs[name].shape, inputs[name].dtype) for name in names)

    def _step(self, model: Any, given: dict[str, Tensor]) -> Tensor:
        parameters = [p for p in model.parameters() if p.requires_grad]
        adds = any(p.grad is not None for p in parameters)
        shape = self._shapes.setdefault(self._key(given), _Shape())
        if adds not in shape.warm:
            shape.warm.add(adds)
            return self._run(model, *_split(given))
        shape.copy(given)
        present = [p.grad for p in parameters]
        self._place(adds)
        if adds not in shape.graphs:
            try:
                shape.graphs[adds] = self._capture(model, shape, adds, parameters)
            except RuntimeError as error:
                for p, grad in zip(parameters, present, strict=True):
                    p.grad = grad
                self._failed = True
                self._note(f"the capture failed ({str(error).splitlines()[0]})")
                return self._run(model, *_split(given))
        graph, loss = shape.graphs[adds]
        graph.replay()
        self.replays += 1
        return loss.clone()

    def _capture(
        self, model: Any, shape: "_Shape", adds: bool, parameters: list[Any]
    ) -> tuple[Any, Tensor]:
        """A graph and its loss; nothing is computed yet."""
        zeroed = [] if adds else [grad for _, grad in self._gradients]

        def step() -> Tensor:
            if zeroed:  # in the first graph of another shape; the very first one writes
                torch._foreach_zero_(zeroed)
            with plain_positions():
                return self._eager(model, *_split(shape.inputs))

        self._pool = self._pool or torch.cuda.graph_pool_handle()
        recorded = record(step, self._pool, self._side())
        if not self._gradients:
            self._gradients = [(p, p.grad) for p in parameters if p.grad is not None]
        return recorded

    def _place(self, adds: bool) -> None:
        """Have parameters' gradients where the graphs have them, with the values if they count."""
        for p, grad in self._gradients:
            present, p.grad = p.grad, grad
            if adds and present is None:
                grad.zero_()
            elif adds and present is not grad:  # of a micro-batch that ran eagerly
                grad.copy_(present)

    def _run(self, model: Any, inputs: Any, items: Any) -> Tensor:
        """An eager step, on the stream of the captures."""
        if self._trainer.args.device.type != "cuda":
            return self._eager(model, inputs, items)
        side = self._side()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            loss = self._eager(model, inputs, items)
        torch.cuda.current_stream().wait_stream(side)
        loss.record_stream(torch.cuda.current_stream())
        return loss

    def _side(self) -> torch.cuda.Stream:
        self._stream = self._stream or torch.cuda.Stream()
        return self._stream

    def _note(self, why: str) -> None:
        if why not in self.reasons:
            self.reasons.append(why)
            _LOG.warning("captured: steps run eagerly, as %s", why)


def record(step: Callable[[], Tensor], pool: Any, stream: Any) -> tuple[Any, Tensor]:
    """A CUDA graph of a step, and its result."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, stream=stream):
        loss = step()
    return graph, loss


class _Shape:
    """Inputs of one shape, where graphs read them, and its graphs by whether they add."""

    def __init__(self) -> None:
        self.inputs: dict[str, Tensor] = {}
        self.graphs: dict[bool, tuple[Any, Tensor]] = {}
        self.warm: set[bool] = set()

    def copy(self, given: dict[str, Tensor]) -> None:
        if not self.inputs:
            self.inputs = {name: value.clone() for name, value in given.items()}
        for name, value in given.items():
            self.inputs[name].copy_(value)


def captured(trainer: Trainer, most: int = 4) -> Captured:
    """Have the forward and backward passes of a Trainer replayed as CUDA graphs where they can be.

    Call it before `trainer.train()`. Where steps cannot be captured, as on a CPU, they run as
    before, and the reason is logged once.
    """
    if isinstance(trainer.training_step, Captured):
        return trainer.training_step
    steps = Captured(trainer, most)
    trainer.training_step = steps  # type: ignore[method-assign]
    return steps


def _split(given: dict[str, Tensor]) -> tuple[dict[str, Tensor], Tensor | None]:
    inputs = dict(given)
    items = inputs.pop("num_items_in_batch", None)
    return inputs, items


@contextlib.contextmanager
def plain_positions() -> Iterator[None]:
    """Inside, positions that a model counts itself are not searched for packed sequences.

    In a capture transformers cannot look, and would build a mask, with which no fast attention
    runs.
    """
    with mock.patch.object(masking_utils, "find_packed_sequence_indices", return_value=None):
        yield
