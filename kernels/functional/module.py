"""The expert MLP of an MoE layer as a plain torch module, for models that are not Megatron-Core's.

It plans, runs the experts and sums; the router is the caller's. All experts are on this device, so
no token is dropped and nothing is read on the host, except for the checks of PHALANX_DEBUG=1.

Legend: T tokens, K experts per token, L experts, D hidden, F expert width, H = 2F for gated
activations and F for others.
"""

from typing import Any, Unpack

import torch
from torch import Tensor, nn

from phalanx.kernels.expert_mlp.activation import Activation
from phalanx.kernels.expert_mlp.expert_plan import check_expert_ids, is_debugging
from phalanx.kernels.functional.experts import grouped_experts, resolve_backend
from phalanx.kernels.functional.options import (
    KernelOptions,
    activation_named,
    check_backend,
    check_module_options,
    check_parameters,
    check_tensor,
)


class ExpertParameters(nn.Module):
    """Base of modules with experts: w1 [L, H, D], w2 [L, D, F], and b1 [L, H], b2 [L, D] or None.

    `where`: device and dtype.
    """

    def __init__(
        self,
        experts: int,
        hidden: int,
        ffn: int,
        activation: Activation,
        *,
        bias: bool,
        where: dict[str, Any],
    ) -> None:
        super().__init__()
        width = activation.width(ffn)
        self.w1 = nn.Parameter(torch.empty(experts, width, hidden, **where))
        self.w2 = nn.Parameter(torch.empty(experts, hidden, ffn, **where))
        self.b1 = nn.Parameter(torch.empty(experts, width, **where)) if bias else None
        self.b2 = nn.Parameter(torch.empty(experts, hidden, **where)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Each expert's layers as `torch.nn.Linear` draws them: uniform within fan_in^-1/2."""
        for weight, bias in ((self.w1, self.b1), (self.w2, self.b2)):
            bound = weight.shape[-1] ** -0.5
            nn.init.uniform_(weight, -bound, bound)
            if bias is not None:
                nn.init.uniform_(bias, -bound, bound)


class GroupedMLP(ExpertParameters):
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

    Parameters, by their names in the state dict: w1 [L, 2F, D] as [gate; up], or [L, F, D] without
    a gate; w2 [L, D, F]; with `bias` b1 [L, 2F or F] and b2 [L, D].

    Args:
        experts, hidden, ffn, top_k: L, D, F and K.
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
        check_parameters(sizes, bias, device, dtype)
        if min(experts, hidden, ffn, top_k) < 1 or top_k > experts:
            raise ValueError(
                f"experts={experts}, hidden={hidden}, ffn={ffn}, top_k={top_k}: sizes must be "
                "positive, and top_k at most experts"
            )
        check_backend(backend)
        check_module_options(options)
        kind = activation_named(activation)
        where = dict(device=device, dtype=dtype)
        super().__init__(experts, hidden, ffn, kind, bias=bias, where=where)
        self.experts, self.hidden, self.ffn, self.top_k = experts, hidden, ffn, top_k
        self.activation, self.backend, self.options = kind, backend, options

    def forward(self, x: Tensor, topk_idx: Tensor, topk_prob: Tensor) -> Tensor:
        """Weighted sum of each token's experts.

        Args:
            x: [..., D] in the parameters' dtype. Under torch.autocast it and the parameters have
                any dtypes but fp64, and are cast in each call.
            topk_idx: [..., K] integers, experts of each token from 0 to L - 1; -1 for none. Any
                other id counts as none too, unless PHALANX_DEBUG=1 is set: then it is an error, at
                the price of a wait for the device in every call.
            topk_prob: [..., K] their weights, used in fp32.

        Returns:
            [..., D] in x's dtype, under torch.autocast in that of autocast.

        Raises:
            ValueError: shapes, dtypes or devices that do not fit, or a backend that cannot run
                here; with PHALANX_DEBUG=1 an id that is not from -1 to L - 1, with its index.
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
        return grouped_experts(
            x,
            topk_idx,
            topk_prob,
            self.w1,
            self.w2,
            self.b1,
            self.b2,
            activation=self.activation,
            backend=self.backend,
            **self.options,
        )

    @property
    def resolved_backend(self) -> str:
        """Backend of a call with tokens on the parameters' device and of their or autocast's dtype.

        Raises ValueError if it cannot run there; `resolve_backend` also says why it is that one.
        """
        return resolve_backend(
            self.w1,
            self.w1,
            self.w2,
            self.top_k,
            activation=self.activation,
            backend=self.backend,
            **self.options,
        ).backend

    def extra_repr(self) -> str:
        return (
            f"experts={self.experts}, hidden={self.hidden}, ffn={self.ffn}, top_k={self.top_k}, "
            f"activation={self.activation.kind}, bias={self.b1 is not None}, backend={self.backend}"
        )
