"""AdamW as Megatron-Core's distributed optimizer checkpoints it: `step` lives in the group.

Used where Transformer Engine's FusedAdam is absent. With torch.optim.AdamW Megatron-Core 0.19.2
shares one loaded `step` tensor among all parameters, which then counts once per parameter, so a
resumed run is not exact.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch


class AdamW(torch.optim.Optimizer):
    """Decoupled weight decay Adam (arXiv 1711.05101) on torch's fused multi-tensor kernel.

    Parameters and gradients are fp32 (Megatron-Core's master copies), moments fp32.
    `adam_w_mode=False` is L2-regularised Adam. The signature is the part of FusedAdam's that
    Megatron-Core uses.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
        capturable: bool = False,
    ) -> None:
        if capturable:
            raise ValueError("this AdamW counts steps on the host: it cannot be captured")
        self._fused = torch._fused_adamw_ if adam_w_mode else torch._fused_adam_
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if not group["params"]:
                continue
            group["step"] = group.get("step", 0) + 1
            for p in params:
                if not self.state[p]:
                    self.state[p] = {n: torch.zeros_like(p) for n in ("exp_avg", "exp_avg_sq")}
            for same_device in _by_device(params):
                step = torch.tensor(float(group["step"]), device=same_device[0].device)
                self._fused(
                    same_device,
                    [p.grad for p in same_device],
                    [self.state[p]["exp_avg"] for p in same_device],
                    [self.state[p]["exp_avg_sq"] for p in same_device],
                    [],
                    [step] * len(same_device),
                    lr=group["lr"],
                    beta1=group["betas"][0],
                    beta2=group["betas"][1],
                    weight_decay=group["weight_decay"],
                    eps=group["eps"],
                    amsgrad=False,
                    maximize=False,
                )


def _by_device(params: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    groups: dict[torch.device, list[torch.Tensor]] = {}
    for p in params:
        groups.setdefault(p.device, []).append(p)
    return list(groups.values())


def install() -> bool:
    """Give Megatron-Core this AdamW where it would fall back to torch's; True if it did."""
    import megatron.core.optimizer as optimizer
    import megatron.core.optimizer.distrib_optimizer as distributed

    if not optimizer.USING_PYTORCH_OPTIMIZER:
        return False
    optimizer.Adam, optimizer.USING_PYTORCH_OPTIMIZER = AdamW, False
    distributed.HAVE_APEX_OR_TE = distributed.USING_APEX_OPTIMIZER = True
    return True
