"""Optimizers whose states wait in pinned host memory, and are updated on the GPU.

`hosted` makes of an optimizer's `Setup` one whose moments and master copies are in host memory. An
update takes parameters in batches, some elements at a time (`AdamW`) or the matrices that are made
orthogonal together (`Muon`): their states are copied to the device, changed there by the same
kernels, and copied back (`extras.host_states.stream`). So all results have the bits of states on
the GPU, and checkpoints find the states where they always are, if on the host.

Hosted of a parameter are its moments, and its master copy: the bits that a bf16 weight lacks of it,
or all of it in fp32 (`param`), whose tensor in Megatron-Core's groups becomes empty. Weights and
gradients stay on the device.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.optimizer import distrib_optimizer
from megatron.core.optimizer.distrib_optimizer import copy_optimizer_param_metadata
from torch import Tensor

from phalanx.extras.host_states.memory import zeros
from phalanx.extras.host_states.stream import ELEMENTS, Job, Stream, aligned
from phalanx.parallel.megatron.adam import AdamW, Setup
from phalanx.parallel.megatron.updated import parts, updated

MASTER = "param"
"""Name of a master copy among the states, as in checkpoints."""

type Range = tuple[Tensor, int, int]  # elements [start, stop) of a parameter, flattened


@dataclass(eq=False)
class _Part:
    """Elements [start, stop) of a parameter, and their states on the host."""

    parameter: Tensor
    start: int
    stop: int
    states: dict[str, Tensor]
    weight: Tensor | None  # the same elements of a bf16 weight whose master copy is hosted

    @property
    def tensors(self) -> list[Tensor]:
        """States as bytes."""
        return [t.view(torch.uint8) for t in self.states.values()]


@dataclass(eq=False)
class _Batch:
    """Parts that are updated at a time."""

    group: int
    parts: list[_Part]
    job: Job


class HostStates(AdamW):
    """States in host memory, of the optimizer that is the next base class."""

    _batches: list[_Batch]
    stream: Stream

    def host(self, weights: Mapping[Tensor, Tensor]) -> list[Job]:
        """Move all state to host memory; returns what a step copies, in order.

        `weights` has the bf16 weights, flattened, of master copies in fp32.
        """
        self._batches = []
        batches = [
            (i, ranges)
            for i, group in enumerate(self.param_groups)
            for ranges in self._ranges(group["params"])
        ]
        ordered = [p for _, ranges in batches for p, *_ in ranges]
        ordered += [p for group in self.param_groups for p in group["params"]]
        self._allocate(list(dict.fromkeys(ordered)), weights)
        for i, ranges in batches:
            held = []
            for p, start, stop in ranges:
                states = {k: t.view(-1)[start:stop] for k, t in self.state[p].items()}
                weight = weights[p][start:stop] if p in weights else None
                held.append(_Part(p, start, stop, states, weight))
            self._batches.append(_Batch(i, held, Job([t for part in held for t in part.tensors])))
        return [batch.job for batch in self._batches]

    def init_state(self, params: Iterable[Tensor]) -> None:
        """All state exists. Whoever asks for it reads or writes it on the host."""
        self.stream.settle()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        self.prepare()
        for batch in self._batches:
            with self.stream.on_device(batch.job) as memory:
                blocks = iter(memory)
                held = [(part, [next(blocks) for _ in part.states]) for part in batch.parts]
                copies = {
                    part: self._copy(part, states)
                    for part, states in held
                    if getattr(part.parameter, self._grad, None) is not None  # else frozen
                }
                group = self.param_groups[batch.group]
                self._update(group, list(copies.values()), self._numbers[batch.group])
                for part, copy in copies.items():
                    del self.state[copy]
                    if part.weight is not None:
                        part.weight.copy_(copy)

    def _copy(self, part: _Part, blocks: list[Tensor]) -> Tensor:
        """Tensor that is updated in place of a part, its gradient and its states on the device."""
        held = zip(part.states.items(), blocks, strict=True)
        states = {name: block.view(t.dtype) for (name, t), block in held}
        here = slice(part.start, part.stop)
        copy = states.pop(MASTER, None)
        if copy is None:
            copy = part.parameter.detach().view(-1)[here]
        setattr(copy, self._grad, getattr(part.parameter, self._grad).view(-1)[here])
        if note := getattr(self, "part_of", None):
            note(copy, part.parameter)
        self.state[copy] = states
        return copy

    def _ranges(self, params: list[Tensor]) -> Iterator[list[Range]]:
        of_kind: Any = getattr(self, "batches", None)
        return packed(params) if of_kind is None else of_kind(params, packed)

    def _allocate(self, params: list[Tensor], weights: Mapping[Tensor, Tensor]) -> None:
        wanted = [(p, k, d) for p in params for k, d in self._dtypes(p, weights).items()]
        sizes = [p.numel() * dtype.itemsize for p, _, dtype in wanted]
        cuda = any(p.is_cuda for p in params)
        memory = zeros(sum(map(aligned, sizes)), pinned=cuda, owner=self)
        begin = 0
        for (p, name, dtype), size in zip(wanted, sizes, strict=True):
            held = memory[begin : begin + size].view(dtype).view(p.shape)
            if name == MASTER:
                held.copy_(weights[p].view(p.shape))
            self.state[p][name] = held
            begin += aligned(size)

    def _dtypes(self, p: Tensor, weights: Mapping[Tensor, Tensor]) -> dict[str, torch.dtype]:
        dtypes = dict.fromkeys(self._moments_of(p), self.moments)
        if p.dtype == torch.bfloat16:
            dtypes["remainder"] = torch.int16
        return dtypes | ({MASTER: torch.float32} if p in weights else {})


def packed(params: Iterable[Tensor]) -> Iterator[list[Range]]:
    """Ranges of parameters in order, of `ELEMENTS` or less at a time."""
    waiting, size = list[Range](), 0
    for p in params:
        for start in range(0, p.numel(), ELEMENTS):
            stop = min(start + ELEMENTS, p.numel())
            if waiting and size + stop - start > ELEMENTS:
                yield waiting
                waiting, size = [], 0
            waiting.append((p, start, stop))
            size += stop - start
    if waiting:
        yield waiting


def hosted(setup: type[Setup], room: int) -> type[Setup]:
    """The setup of the same optimizer with states in host memory.

    `room`: bytes of the GPU for states that stay there.
    """

    class Hosted(setup):  # type: ignore[misc, valid-type]
        kind = type(f"Hosted{setup.kind.__name__}", (HostStates, setup.kind), {})

        def options(self) -> dict[str, Any]:
            distrib_optimizer.copy_optimizer_param_metadata = _made
            return super().options()

        def built(self, optimizer: Any) -> None:
            distrib_optimizer.copy_optimizer_param_metadata = copy_optimizer_param_metadata
            super().built(optimizer)
            _move(optimizer, room)

    return Hosted


def _made(made: Tensor, parameter: Tensor) -> None:
    """Called by Megatron-Core for parts of weights, and for master copies once they are made.

    These are emptied one by one, since the device need not have room for all of them.
    """
    copy_optimizer_param_metadata(made, parameter)
    if made.dtype != parameter.dtype:
        made.untyped_storage().resize_(0)


def _move(optimizer: Any, room: int) -> None:
    """Host the states of a chain of optimizers, which take turns at one stream."""
    jobs, device = list[Job](), torch.device("cpu")
    for part in parts(optimizer):
        weights = {
            u.main: u.parameter.detach().view(-1)[u.start : u.stop]
            for u in updated(part)
            if u.main.dtype != u.parameter.dtype
        }
        jobs += part.optimizer.host(weights)
        if weights:
            part._copy_main_params_to_model_params = lambda: None  # a step does
            part._copy_model_params_to_main_params = partial(_reload, part.optimizer, weights)
        held = (p for group in part.optimizer.param_groups for p in group["params"])
        device = next((p.device for p in held), device)  # a group may have none
    stream = Stream(jobs, device, room)
    for part in parts(optimizer):
        part.optimizer.stream = stream


def _reload(
    optimizer: HostStates, weights: Mapping[Tensor, Tensor], state_dict: None = None
) -> None:
    """Make master copies of the weights. Nobody gives a state dict."""
    optimizer.stream.settle()
    for main, weight in weights.items():
        optimizer.state[main][MASTER].copy_(weight)
