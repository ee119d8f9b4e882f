"""Modules with the parameters of experts, over `kernels.functional.experts.experts`.

Legend: K experts per token, E experts, L of this rank (E without a group), D hidden, F expert
width, H = 2F for gated activations and F for others.
"""

from typing import Any, Unpack, cast

import torch
from torch import Tensor, nn

from phalanx.kernels.expert_mlp.activation import Activation
from phalanx.kernels.expert_mlp.expert_plan import check_expert_ids, is_debugging
from phalanx.kernels.functional.experts import ExpertGroup, TopK, experts, resolve_backend
from phalanx.kernels.functional.options import (
    ExpertOptions,
    KernelOptions,
    activation_named,
    check_backend,
    check_module_options,
    check_parameters,
    check_tensor,
)


class ExpertModule(nn.Module):
    """Base of modules with experts: w1 [L, H, D], w2 [L, D, F], and b1 [L, H], b2 [L, D] or None.

    Args:
        sizes: experts, hidden, ffn, top_k: E, D, F and K.
        where: device and dtype of the parameters.
        options: `KernelOptions`, and a backend.
        group: ranks that share the experts.

    Raises:
        ValueError: invalid sizes, or an unknown activation, backend or recipe.
    """

    group: ExpertGroup | None = None

    def __init__(
        self,
        sizes: dict[str, int],
        activation: str | Activation,
        bias: bool,
        where: dict[str, Any],
        options: dict[str, Any],
        group: ExpertGroup | None = None,
    ) -> None:
        super().__init__()
        check_parameters(sizes, bias, **where)
        E, hidden, ffn, top_k = sizes.values()
        ranks = 1 if group is None else group.size
        if min(sizes.values()) < 1 or top_k > E or E % ranks:
            fits = "and top_k at most experts"
            if group is not None:
                fits = f"{fits[4:]}, and experts a multiple of the group's {ranks} ranks"
            given = ", ".join(f"{name}={size}" for name, size in sizes.items())
            raise ValueError(f"{given}: sizes must be positive, {fits}")
        backend = options.pop("backend", "auto")
        check_backend(backend)
        check_module_options(cast(KernelOptions, options))
        self.group, self.experts, self.top_k = group, E, top_k
        self.activation, self.backend, self.options = activation_named(activation), backend, options
        local, width = E // ranks, self.activation.width(ffn)
        self.w1 = nn.Parameter(torch.empty(local, width, hidden, **where))
        self.w2 = nn.Parameter(torch.empty(local, hidden, ffn, **where))
        self.b1 = nn.Parameter(torch.empty(local, width, **where)) if bias else None
        self.b2 = nn.Parameter(torch.empty(local, hidden, **where)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Each expert's layers as `torch.nn.Linear` draws them: uniform within fan_in^-1/2."""
        for weight, bias in ((self.w1, self.b1), (self.w2, self.b2)):
            bound = weight.shape[-1] ** -0.5
            nn.init.uniform_(weight, -bound, bound)
            if bias is not None:
                nn.init.uniform_(bias, -bound, bound)

    def forward(self, x: Tensor, topk_idx: Tensor, topk_prob: Tensor) -> Tensor:
        """Weighted sum of each token's experts, on any rank of the group, which is collective.

        Arguments, result and errors are those of `grouped_experts`.
        """
        weights = self.w1, self.w2, self.b1, self.b2
        return experts(x, TopK(topk_idx, topk_prob), weights, self._options(), self.group)

    def _options(self) -> ExpertOptions:
        chosen: Any = dict(self.options, activation=self.activation, backend=self.backend)
        return cast(ExpertOptions, chosen)

    @property
    def resolved_backend(self) -> str:
        """Backend of a call with tokens on the parameters' device and of their or autocast's dtype.

        Raises ValueError if it cannot run there; `resolve_backend` also says why it is that one.
        """
        options = self._options()
        return resolve_backend(self.w1, self.w1, self.w2, self.top_k, **options).backend

    def extra_repr(self) -> str:
        local, hidden, ffn = self.w2.shape
        shared = "" if self.group is None else f" ({local} of this rank)"
        return (
            f"experts={self.experts}{shared}, hidden={hidden}, ffn={ffn}, top_k={self.top_k}, "
            f"activation={self.activation.kind}, bias={self.b1 is not None}"
        )


class GroupedMLP(ExpertModule):
    """out = sum over the K experts e of a token of prob[e] * MLP_e(x).

    MLP_e(x) = act(x @ w1[e]^T + b1[e]) @ w2[e]^T + b2[e].

    >>> import torch
    >>> from phalanx.kernels.functional.module import GroupedMLP
    >>> experts = GroupedMLP(experts=8, hidden=64, ffn=128, top_k=2)
    >>> router = torch.nn.Linear(64, 8)
    >>> x = torch.randn(4, 16, 64)
    >>> topk_prob, topk_idx = router(x).softmax(-1).topk(2)
    >>> experts(x, topk_idx, topk_prob).shape
    torch.Size([4, 16, 64])

    Parameters, by their names in the state dict: w1 [E, 2F, D] as [gate; up], or [E, F, D] without
    a gate; w2 [E, D, F]; with `bias` b1 [E, 2F or F] and b2 [E, D].

    Args:
        experts, hidden, ffn, top_k: E, D, F and K.
        activation: its kind, or with constants an `Activation`.
        bias: biases in both layers of the experts.
        backend: `reference`, `torch`, `fused`, `cudnn`, or `auto`: the best for the input's device.
        device, dtype: of the parameters.
        options: recipe, accumulate and margins, as in `kernels.functional.options.KernelOptions`.

    Raises:
        ValueError: invalid sizes, or an unknown activation, backend or recipe.
    """

    def __init__(
        self,
        experts: int,
        hidden: int,
        ffn: int,
        top_k: int,
        activation: str | Activation = "swiglu",
        bias: bool = False,
        backend: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Unpack[KernelOptions],
    ) -> None:
        sizes = dict(experts=experts, hidden=hidden, ffn=ffn, top_k=top_k)
        where = dict(device=device, dtype=dtype)
        super().__init__(sizes, activation, bias, where, dict(options, backend=backend))
        self.hidden, self.ffn = hidden, ffn

    def forward(self, x: Tensor, topk_idx: Tensor, topk_prob: Tensor) -> Tensor:
        """Weighted sum of each token's experts, as `grouped_experts`.

        An id is an expert from 0 to E - 1, or -1 for none. Any other counts as none too, unless
        PHALANX_DEBUG=1 is set: then it is a ValueError with its index, at the price of a wait for
        the device in every call.
        """
        given = dict(x=x, topk_idx=topk_idx, topk_prob=topk_prob)
        for name, value in given.items():
            check_tensor(name, value)
        want = (*x.shape[:-1], self.top_k)
        if x.shape[-1:] != (self.hidden,) or topk_idx.shape != want or topk_prob.shape != want:
            raise ValueError(
                f"expected x [..., {self.hidden}] and topk_idx, topk_prob [..., {self.top_k}], "
                f"not {list(x.shape)}, {list(topk_idx.shape)} and {list(topk_prob.shape)}"
            )
        if is_debugging() and not topk_idx.is_floating_point():
            check_expert_ids(topk_idx, self.experts)
        return super().forward(x, topk_idx, topk_prob)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, backend={self.backend}"
