"""AdamW as Megatron-Core's distributed optimizer checkpoints it: `step` lives in the group.

Transformer Engine's FusedAdam takes the same time but can neither be captured in a CUDA graph nor
have averages of weights. With torch.optim.AdamW Megatron-Core 0.19.2 shares one loaded `step`
tensor among all parameters, which then counts once per parameter: a resumed run is not exact.
"""

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer.param_layout import FullParamLayout
from megatron.core.transformer.transformer_config import TransformerConfig

from phalanx.configs.schema import OptimConfig
from phalanx.kernels.elementwise.adam import Update, update_
from phalanx.parallel.megatron.param_gather import ParamGather

_FUSED_ADAM_ONLY = {
    *("exp_avg_dtype", "exp_avg_sq_dtype", "master_weights", "master_weight_dtype"),
    "store_param_remainders",
}
"""How FusedAdam keeps its state. Here `moments` and the parameters' own dtypes decide."""


class AdamW(torch.optim.Optimizer):
    """Decoupled weight decay Adam (arXiv 1711.05101) on torch's fused multi-tensor kernel.

    Parameters are fp32 (Megatron-Core's master copies); moments are fp32, or bf16 by
    `kernels.elementwise.adam`. With bf16 moments and `use_decoupled_grad` parameters may be bf16
    weights: their state has a `remainder`, int16, which makes master copies of them and begins as
    0. Gradients are then fp32 or bf16, in the attribute `decoupled_grad`. `adam_w_mode=False` is
    L2-regularised Adam. The signature is the used part of FusedAdam's, and `moments`.

    Raises:
        TypeError: a keyword that neither this nor FusedAdam's state has.
        ValueError: moments of another dtype, or in bf16 with L2 regularisation; or decoupled
            gradients without moments in bf16.
    """

    own_state = ""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
        capturable: bool = False,
        moments: torch.dtype = torch.float32,
        use_decoupled_grad: bool = False,
        **dtypes: Any,
    ) -> None:
        if unknown := sorted(dtypes.keys() - _FUSED_ADAM_ONLY):
            raise TypeError(f"this AdamW has no {', '.join(unknown)}")
        if capturable:
            raise ValueError("this AdamW counts steps on the host: see `prepare`")
        if moments not in (torch.float32, torch.bfloat16):
            raise ValueError(f"this AdamW keeps moments in fp32 or bf16, not {moments}")
        if moments == torch.bfloat16 and not adam_w_mode:
            raise ValueError("moments in bf16 are for decoupled weight decay only")
        if use_decoupled_grad and moments != torch.bfloat16:
            raise ValueError("decoupled gradients are for moments in bf16 only")
        self._grad = "decoupled_grad" if use_decoupled_grad else "grad"
        self.moments = moments
        self.clip_coef = 1.0  # factor of gradients as they are read, with moments in bf16
        self._numbers: dict[int, StepNumbers] = {}  # by the places of the groups
        self._fused = torch._fused_adamw_ if adam_w_mode else torch._fused_adam_
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))

    # torch's decorator of these imports TorchDynamo and TorchInductor, 3 s of every start.
    add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)
    state_dict = inspect.unwrap(torch.optim.Optimizer.state_dict)
    load_state_dict = inspect.unwrap(torch.optim.Optimizer.load_state_dict)
    zero_grad = inspect.unwrap(torch.optim.Optimizer.zero_grad)

    def prepare(self) -> None:
        """Count a step, and bring its numbers to the device.

        `step` does this itself, but not while a CUDA graph of it is captured: it is called before
        the capture and every replay.
        """
        for i, group in enumerate(self.param_groups):
            if not group["params"]:
                continue
            group["step"] = group.get("step", 0) + 1
            self._numbers[i] = self._step_numbers(group, self._numbers.get(i))

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        if not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
            self.prepare()
        for i, group in enumerate(self.param_groups):
            params = [p for p in group["params"] if getattr(p, self._grad, None) is not None]
            if params:
                self.init_state(params)
                self._update(group, params, self._numbers[i])

    def _step_numbers(self, group: dict[str, Any], last: "StepNumbers | None") -> "StepNumbers":
        update = Update(
            lr=group["lr"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            step=group["step"],
            clip_coef=self.clip_coef,
        )
        numbers = torch.tensor([*update.per_step, update.lr, update.step], dtype=torch.float32)
        device = group["params"][0].device
        if device.type == "cpu":
            return StepNumbers(update, update.lr, update.decay, update.clip_coef, numbers[5])
        on_device = torch.empty_like(numbers, device=device) if last is None else last.all_numbers
        assert on_device is not None
        # The allocator keeps pinned memory until it is copied, so the host does not wait.
        on_device.copy_(numbers.pin_memory(), non_blocking=True)
        decay, _, _, clip_coef, lr, step = on_device
        update = replace(update, on_device=on_device[:4])
        return StepNumbers(update, lr, decay, clip_coef, step, on_device)

    def _update(
        self, group: dict[str, Any], params: list[torch.Tensor], numbers: "StepNumbers"
    ) -> None:
        if self.moments == torch.bfloat16:
            for p in params:
                grad, state = getattr(p, self._grad), self.state[p]
                moments, remainder = (state["exp_avg"], state["exp_avg_sq"]), state.get("remainder")
                update_(p, grad, *moments, numbers.update, remainder)
            return
        if not params:
            return
        self._fused(
            params,
            cast(list[torch.Tensor], [p.grad for p in params]),
            [self.state[p]["exp_avg"] for p in params],
            [self.state[p]["exp_avg_sq"] for p in params],
            [],
            [numbers.step] * len(params),
            lr=numbers.lr,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
        )

    def init_state(self, params: Iterable[torch.Tensor]) -> None:
        """Zero moments, and remainders of bf16 weights, for those of `params` that have none."""
        for p in params:
            if next(iter(self._moments_of(p))) not in self.state[p]:
                dtypes = dict.fromkeys(self._moments_of(p), self.moments)
                if p.dtype == torch.bfloat16:
                    dtypes["remainder"] = torch.int16
                self.state[p] |= {k: torch.zeros_like(p, dtype=d) for k, d in dtypes.items()}

    def _moments_of(self, p: torch.Tensor) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq")


class StepNumbers(NamedTuple):
    """Numbers of a parameter group that differ from step to step.

    Floats on a CPU; on a GPU fp32 [], at the same addresses in every step, for CUDA graphs.
    """

    update: Update
    lr: float | torch.Tensor
    decay: float | torch.Tensor
    clip_coef: float | torch.Tensor
    step: torch.Tensor
    all_numbers: torch.Tensor | None = None  # storage of all of them on a GPU


class Setup:
    """The part of the engine that depends on the optimizer: AdamW here, others in subclasses.

    The engine calls the methods in this order, and `kind` is built by Megatron-Core.
    """

    kind: type[AdamW] = AdamW

    def __init__(self, optim: OptimConfig, config: TransformerConfig) -> None:
        self.optim, self.config = optim, config

    def mark(self, chunk: torch.nn.Module) -> None:
        """Note on the parameters of a bare chunk how they are updated."""

    def layout(
        self, chunk: torch.nn.Module, ddp: DistributedDataParallelConfig, *, one_bucket: bool
    ) -> FullParamLayout | None:
        """Offsets of a chunk's parameters in the buffers of a sharded optimizer.

        None for those of Megatron-Core. With `one_bucket` the wrapper gets `disable_bucketing`.
        """
        return None

    def wrapped(self, chunk: torch.nn.Module) -> None: ...

    def options(self) -> dict[str, Any]:
        """Keyword arguments of `kind`; the process groups exist."""
        return {}

    def built(self, optimizer: Any) -> None: ...

    def gather(self, chunks: Sequence[DistributedDataParallel]) -> ParamGather:
        return ParamGather(chunks)


def install(
    moments: torch.dtype,
    kind: type[AdamW] = AdamW,
    **options: Any,
) -> None:
    """Have the optimizers that Megatron-Core builds from now on use this AdamW, or `kind`."""
    import megatron.core.optimizer as optimizer
    import megatron.core.optimizer.distrib_optimizer as distributed

    optimizer.Adam = functools.partial(kind, moments=moments, **options)
    optimizer.USING_PYTORCH_OPTIMIZER = False
    distributed.HAVE_APEX_OR_TE = distributed.USING_APEX_OPTIMIZER = True
