"""A whole layer of experts: router, balancing, routed experts, and a shared expert.

Legend: T tokens, E experts, K experts per token, D hidden, F expert width.
"""

from typing import Any, Unpack

import torch
import torch.distributed as dist
import torch.nn.functional as F_
from torch import Tensor, nn

from phalanx.kernels.expert_mlp.activation import Activation
from phalanx.kernels.functional.experts import ExpertGroup, SortedRows, TopK, experts
from phalanx.kernels.functional.module import ExpertModule
from phalanx.kernels.functional.options import KernelOptions, check_floats, check_sizes
from phalanx.kernels.functional.router import RouterOptions, router_topk
from phalanx.kernels.routing.balance import KeepsPrecision, balance_loss, count_choices, z_loss

_Where = dict[str, Any]  # device and dtype of parameters


class MoEOptions(KernelOptions, total=False):
    """Keyword arguments of `MoE`, beside those of the kernels."""

    router: RouterOptions
    """Score, normalize, scale, groups and so on."""
    aux_coef: float
    """Coefficient of the Switch loss E * sum_i f_i P_i, which is 1 of balanced experts (arXiv
    2101.03961); 0 by default."""
    z_coef: float
    """Coefficient of the mean square of the logits' logsumexp (arXiv 2202.08906); 0 by default."""
    bias_rate: float
    """Step of a bias in the choice alone, by which `update_bias` evens the load (arXiv
    2408.15664); 0 by default: there is no bias."""
    shared_ffn: int
    """Width of the shared expert; 0 by default: there is none."""
    shared_gate: bool
    """Multiply the shared expert by sigmoid(x @ shared_gate^T), as Qwen2-MoE; false by default."""
    bias: bool
    """Biases in both layers of the experts; false by default."""
    group: ExpertGroup | None
    """Ranks that share the routed experts (`phalanx.parallel.expert_parallel`)."""


_DEFAULTS: dict[str, Any] = dict(
    router={},
    aux_coef=0.0,
    z_coef=0.0,
    bias_rate=0.0,
    shared_ffn=0,
    shared_gate=False,
    bias=False,
    group=None,
)


class Router(KeepsPrecision):
    """The experts of each token and their weights, and losses that balance the experts.

    Logits are x @ weight^T in fp32, whatever the dtype of x.
    """

    bias: Tensor | None
    counts: Tensor

    def __init__(
        self, hidden: int, num_experts: int, top_k: int, chosen: dict[str, Any], where: _Where
    ) -> None:
        super().__init__()
        for name in ("aux_coef", "z_coef", "bias_rate"):
            value = chosen[name]
            if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0:
                raise ValueError(f"{name} must be a number from 0 on, not {value!r}")
        self.top_k, self.options = top_k, chosen["router"]
        self.aux_coef, self.z_coef = chosen["aux_coef"], chosen["z_coef"]
        self.bias_rate = chosen["bias_rate"]
        if self.bias_rate and self.options.get("score", "softmax") != "sigmoid":
            raise ValueError("bias_rate is for router={'score': 'sigmoid'}: set that, or aux_coef")
        # All other options are checked where they are used, by a call.
        router_topk(torch.zeros(1, num_experts), top_k, **{**self.options, "backend": "torch"})
        self.weight = nn.Parameter(torch.empty(num_experts, hidden, **where))
        zeros = torch.zeros(num_experts, device=where["device"])
        self.register_buffer("bias", zeros if self.bias_rate else None)
        self.register_buffer("counts", zeros.to(torch.int64), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As `torch.nn.Linear`: uniform within hidden^-1/2."""
        bound = self.weight.shape[1] ** -0.5
        nn.init.uniform_(self.weight, -bound, bound)

    def forward(self, x_TD: Tensor) -> tuple[TopK, dict[str, Tensor]]:
        with torch.autocast(x_TD.device.type, enabled=False):
            logits_TE = F_.linear(x_TD.float(), self.weight.float())
            routing = TopK(*router_topk(logits_TE, self.top_k, self.bias, **self.options))
            losses = dict[str, Tensor]()
            if not (self.training and torch.is_grad_enabled()):
                return routing, losses
            count_E = count_choices(routing.idx, len(self.weight))
            with torch.no_grad():
                self.counts += count_E
            if not len(x_TD):  # means of nothing
                nothing = logits_TE.sum()
                return routing, {n: nothing for n in ("aux", "z") if getattr(self, f"{n}_coef")}
            if self.aux_coef:
                score_TE = self._scores(logits_TE)
                losses["aux"] = self.aux_coef * balance_loss(score_TE, count_E[None], ranks=1)
            if self.z_coef:
                losses["z"] = self.z_coef * z_loss(logits_TE)
        return routing, losses

    def _scores(self, logits_TE: Tensor) -> Tensor:
        """Scores of all experts, whose sum over them is 1."""
        if self.options.get("score", "softmax") == "softmax":
            return logits_TE.softmax(-1)
        scores_TE = logits_TE.sigmoid()
        return scores_TE / scores_TE.sum(-1, keepdim=True)


class MoE(nn.Module):
    """Router, routed experts and an optional shared expert; a layer returns (out, losses).

    out = sum over the K experts e that the router chose of prob[e] * MLP_e(x) + MLP_shared(x).
    `losses` has the balancing losses of this call by name, fp32 with gradients, already multiplied
    by their coefficients: add their sum to the loss. It is empty without gradients and in `eval()`.

    >>> import torch
    >>> from phalanx import MoE
    >>> layer = MoE(hidden=64, ffn=32, num_experts=8, top_k=2, aux_coef=0.01, shared_ffn=32)
    >>> out, losses = layer(torch.randn(4, 16, 64))
    >>> out.shape, list(losses)
    (torch.Size([4, 16, 64]), ['aux'])

    Losses are of the tokens of this call on this rank.

    State: `router.weight` [E, D], `router.bias` [E] in fp32 if there is a `bias_rate`; `experts`,
    and `shared` of one expert, with w1, w2 and biases as `GroupedMLP`; `shared_gate` [1, D].

    Args:
        hidden, ffn, num_experts, top_k: D, F, E and K.
        activation, backend, device, dtype: as of `GroupedMLP`.
        options: `MoEOptions`.

    Raises:
        TypeError: an option that does not exist.
        ValueError: invalid sizes or options, or of a call x that is not [..., D].
    """

    def __init__(
        self,
        hidden: int,
        ffn: int,
        num_experts: int,
        top_k: int,
        activation: str | Activation = "swiglu",
        backend: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Unpack[MoEOptions],
    ) -> None:
        super().__init__()
        chosen: dict[str, Any] = _DEFAULTS | dict(options)
        of_kernels = {name: chosen.pop(name) for name in options if name not in _DEFAULTS}
        of_kernels["backend"] = backend
        shared_ffn, gated, bias = (chosen[n] for n in ("shared_ffn", "shared_gate", "bias"))
        check_sizes(shared_ffn=shared_ffn)
        if gated and not shared_ffn:
            raise ValueError("shared_gate=True needs a shared expert: set shared_ffn")
        where: _Where = dict(device=device, dtype=dtype)
        sizes = dict(experts=num_experts, hidden=hidden, ffn=ffn, top_k=top_k)
        group = chosen["group"]
        self.experts = ExpertModule(sizes, activation, bias, where, dict(of_kernels), group)
        self.shared: ExpertModule | None = None
        if shared_ffn:
            alone = dict(experts=1, hidden=hidden, ffn=shared_ffn, top_k=1)
            self.shared = ExpertModule(alone, activation, bias, where, dict(of_kernels))
        self.shared_gate = nn.Parameter(torch.zeros(1, hidden, **where)) if gated else None
        self.router = Router(hidden, num_experts, top_k, chosen, where)

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        check_floats("x", x, channels=True)
        hidden = self.router.weight.shape[1]
        if x.shape[-1] != hidden:
            raise ValueError(f"expected x [..., {hidden}], not {list(x.shape)}")
        x_TD = x.reshape(-1, hidden)
        routing, losses = self.router(x_TD)
        out_TD = self.experts(x_TD, *routing)
        if self.shared is not None:
            out_TD = out_TD + self._shared(x_TD, self.shared)
        return out_TD.view(x.shape), losses

    def _shared(self, x_TD: Tensor, shared: ExpertModule) -> Tensor:
        everyone = x_TD.new_full((1,), x_TD.shape[0], dtype=torch.int32)
        weights = shared.w1, shared.w2, shared.b1, shared.b2
        out_TD = experts(x_TD, SortedRows(everyone), weights, shared._options())
        if self.shared_gate is None:
            return out_TD
        return F_.linear(x_TD, self.shared_gate).sigmoid() * out_TD

    @torch.no_grad()
    def update_bias(self, group: dist.ProcessGroup | None = None) -> None:
        """Move the bias of each expert by `bias_rate` towards an even load, and forget the counts.

        Call it after an optimizer step, of which the calls in training mode were counted. With
        torch.distributed initialised the counts are summed over `group`, by default all ranks.
        """
        if self.router.bias is None:
            raise ValueError("this layer has no bias: set bias_rate")
        counts = self.router.counts
        if dist.is_initialized():
            dist.all_reduce(counts, group=group)
        # E times the distance from the mean, in integers.
        over = counts * len(counts) - counts.sum()
        self.router.bias -= self.router.bias_rate * over.sign()
        counts.zero_()
