"""From hidden states to the experts of every token: scores, top-k, probabilities, balancing.

First of the four steps of an MoE layer. Logits, scores and probabilities are fp32; the choice has
no gradient and ties go to the lower expert, on every device. The host reads no value. Balancing
losses follow Megatron-Core's formulas and are added to the gradient of the probabilities.

Legend: T tokens of this rank (s * B of hidden [s, B, D]), E experts, K experts per token, G groups,
C slots for the experts of a token: K, or with token rounding more.
"""

from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from phalanx.configs.bounds import choices
from phalanx.configs.schema import RouterConfig
from phalanx.configs.tables.backends import expert_backend
from phalanx.kernels.routing.balance import (
    KeepsPrecision,
    balance_loss,
    count_choices,
    count_choices_per_sequence,
    z_loss,
)
from phalanx.kernels.routing.topk_scores import choice_scores, choose, probabilities
from phalanx.moe.router import fused_topk, token_rounding
from phalanx.moe.router.balance import Recorder, Statistics
from phalanx.moe.router.forced import ForcedBalance, Replay
from phalanx.moe.router.logits import gate, loss_scores


def check(options: RouterConfig, *, experts: int, top_k: int) -> None:
    """Raise ValueError, naming the override, for routing that is impossible or would not learn."""
    at, o, known = "model.moe.router", options, choices()
    for name in ("score", "softmax_over", "rounding"):
        if (value := getattr(o, name)) not in (modes := known[f"{at}.{name}"]):
            raise ValueError(f"unknown {at}.{name}={value}: set it to one of {', '.join(modes)}")
    if not 1 <= top_k <= experts:
        raise ValueError(f"model.moe.top_k={top_k} must be between 1 and the {experts} experts")
    if o.score == "softmax" and o.softmax_over == "topk" and top_k == 1:
        raise ValueError(
            f"{at}.softmax_over=topk with model.moe.top_k=1 makes every probability 1, "
            f"which has no gradient: set {at}.softmax_over=all"
        )
    if o.bias_rate and o.score != "sigmoid":
        raise ValueError(f"{at}.bias_rate={o.bias_rate} needs {at}.score=sigmoid, not {o.score}")
    if experts % o.groups:
        raise ValueError(f"{at}.groups={o.groups} does not divide the {experts} experts")
    if o.rounding_tile < 1:
        raise ValueError(f"{at}.rounding_tile={o.rounding_tile} must be at least 1")
    if o.rounding != "none" and fused_topk.forces_choice(o):
        knob = "force_balance" if o.force_balance else "replay"
        raise ValueError(f"{at}.{knob} chooses experts itself: set {at}.rounding=none")
    if not 1 <= o.group_topk <= o.groups:
        raise ValueError(f"{at}.group_topk={o.group_topk} must be 1 to {at}.groups={o.groups}")
    reachable = o.group_topk * (experts // o.groups)
    if top_k > reachable:
        raise ValueError(
            f"model.moe.top_k={top_k} experts cannot come from {o.group_topk} of "
            f"{o.groups} groups with {reachable} experts in all: raise {at}.group_topk"
        )


def forced_choice(
    options: RouterConfig, *, experts: int, top_k: int
) -> ForcedBalance | Replay | None:
    """Module that chooses experts in place of the router; None if the router chooses."""
    if options.replay:
        return Replay(options.replay)
    return ForcedBalance(options, experts=experts, top_k=top_k) if options.force_balance else None


class Router(KeepsPrecision, MegatronModule):
    """Router of one MoE layer.

    Megatron-Core's `finalize_model_grads` finds `expert_bias` and `local_tokens_per_expert` by
    name: once per step it moves the bias by the sign of the imbalance and clears the counts.

    Args:
        config: Megatron-Core's config of the model.
        options: routing and balancing.
        top_k: experts per token, K.
        pg_collection: process groups.
        is_mtp_layer: the layer belongs to multi-token prediction.
        backend: backend of the experts; with `fused`, `moe.router.fused_topk` routes if it supports
            the options. Counts and losses have kernels on every GPU (`moe.router.balance`).

    Raises:
        ValueError: impossible routing, with the override that fixes it.
    """

    config: TransformerConfig
    expert_bias: Tensor | None
    local_tokens_per_expert: Tensor | None
    global_tokens_per_expert: Tensor | None

    def __init__(
        self,
        *,
        config: TransformerConfig,
        options: RouterConfig,
        top_k: int,
        pg_collection: ProcessGroupCollection,
        is_mtp_layer: bool = False,
        backend: str = "torch",
    ) -> None:
        super().__init__(config=config)
        self.num_experts = config.num_moe_experts
        self.top_k, self.options = top_k, options
        check(options, experts=self.num_experts, top_k=top_k)
        self.slots = token_rounding.slots(options, experts=self.num_experts, top_k=top_k)
        reason = fused_topk.unsupported(options, experts=self.num_experts, top_k=top_k)
        self.fused = expert_backend(backend).fuses_router and reason is None
        self.is_mtp_layer = is_mtp_layer
        self.layer_number: int | None = None
        self.tp_group, self.ep_group = pg_collection.tp, pg_collection.ep
        self.replica, self.world = pg_collection.tp_cp, pg_collection.tp_dp_cp

        self.weight = self._parameter(self.num_experts, config.hidden_size)
        self.bias = self._parameter(self.num_experts) if config.add_bias_linear else None
        self.statistics = Statistics(self.num_experts)
        self.forced = forced_choice(options, experts=self.num_experts, top_k=top_k)
        self._counter("local_tokens_per_expert", bool(options.bias_rate))
        self._counter("global_tokens_per_expert", bool(options.global_aux_loss))
        bias = torch.zeros(self.num_experts, dtype=torch.float32, device=self.weight.device)
        self.register_buffer("expert_bias", bias if options.bias_rate else None)

    def _parameter(self, *shape: int) -> torch.nn.Parameter:
        config = self.config
        p = torch.empty(shape, dtype=config.params_dtype, device=torch.cuda.current_device())
        if config.perform_initialization:
            config.init_method(p)
        parameter: Any = torch.nn.Parameter(p)
        parameter.sequence_parallel = config.sequence_parallel
        return cast(torch.nn.Parameter, parameter)

    def _counter(self, name: str, wanted: bool) -> None:
        zeros = torch.zeros(self.num_experts, dtype=torch.int64, device=self.weight.device)
        self.register_buffer(name, zeros if wanted else None, persistent=False)

    def set_layer_number(self, layer_number: int) -> None:
        """1-based number of the layer, within its kind (decoder or prediction)."""
        self.layer_number = layer_number
        if isinstance(self.forced, Replay):
            self.forced.load_layer(layer_number, self.is_mtp_layer)

    def reset_global_aux_loss_tracker(self) -> None:
        """Start the counts of a new global batch; Megatron-Core calls it once per step."""
        if self.global_tokens_per_expert is not None:
            self.global_tokens_per_expert.zero_()

    def forward(self, hidden_SBD: Tensor) -> tuple[Tensor, Tensor]:
        """Route every token.

        Args:
            hidden_SBD: this rank's part of B sequences, [s, B, D], bf16 or fp32.

        Returns:
            Global expert ids [T, C] int32, best first, and their probabilities [T, C] fp32, where C
            is `slots.width`: K, or more with rounding. An empty slot has id -1 and probability 0.
        """
        logits_TE = gate(hidden_SBD.flatten(0, 1), self.weight, self.bias)
        o, K, kept_TC = self.options, self.top_k, None
        if self.fused and self.forced is not None:
            first = self.ep_group.rank() * logits_TE.size(0)
            idx_TC, prob_TC = fused_topk.forced(logits_TE, self.forced.table, first, o)
        elif self.fused:
            idx_TC, prob_TC = fused_topk.topk(logits_TE, self.expert_bias, o, K)
        else:
            idx_TC = self._choose(logits_TE.detach())
            kept_TC = self._keep(logits_TE.detach(), idx_TC)
            prob_TC = probabilities(logits_TE, idx_TC, o, kept_TK=kept_TC, top_k=K)
        idx_TK = idx_TC[:, :K]
        if self.training and torch.is_grad_enabled():
            prob_TC = self._balance(logits_TE, idx_TK, prob_TC, sequences=hidden_SBD.size(1))
        if kept_TC is not None:
            idx_TC = idx_TC.masked_fill(~kept_TC, -1)
        return idx_TC.to(torch.int32), prob_TC

    @torch.no_grad()
    def _keep(self, logits_TE: Tensor, idx_TC: Tensor) -> Tensor | None:
        """Mask of the candidates that count; None without rounding, where all do."""
        o = self.options
        if o.rounding == "none":
            return None
        if not self.training:  # a token's experts must not depend on the other tokens
            slot_C = torch.arange(idx_TC.size(1), device=idx_TC.device)
            return (slot_C < self.top_k).expand_as(idx_TC)
        score_TE = logits_TE.sigmoid() if o.score == "sigmoid" else logits_TE.softmax(-1)
        return token_rounding.keep(
            idx_TC,
            score_TE.gather(1, idx_TC),
            top_k=self.top_k,
            experts=self.num_experts,
            tile=o.rounding_tile,
            mode=o.rounding,
        )

    @torch.no_grad()
    def _choose(self, logits_TE: Tensor) -> Tensor:
        o = self.options
        if self.forced is not None:
            tokens = logits_TE.size(0)
            return self.forced(tokens, self.ep_group.rank() * tokens)
        score_TE = choice_scores(logits_TE, o, self.expert_bias, o.group_topk < o.groups)
        return choose(score_TE, self.top_k, o.groups, o.group_topk, width=self.slots.width)

    @property
    def _choice_is_shaped(self) -> bool:
        """True if the choice can differ from the K largest logits."""
        o = self.options
        forced = fused_topk.forces_choice(o)
        return bool(o.bias_rate or forced or o.group_topk < o.groups)

    def _balance(
        self, logits_TE: Tensor, idx_TK: Tensor, prob_TC: Tensor, sequences: int
    ) -> Tensor:
        """Count the choices; return probabilities whose gradient includes the balancing losses'.

        Called only with gradients enabled, so that recomputation does not count twice.
        """
        if not (logits_TE.is_cuda and logits_TE.dtype == torch.float32):
            count_E = self._count(idx_TK)
            shares = self._losses(logits_TE, idx_TK, count_E, sequences)
            return self._attach(prob_TC, shares)
        record = Recorder(
            self.options,
            self.statistics,
            self.local_tokens_per_expert,
            self.global_tokens_per_expert,
            self.replica,
            self.world,
            self.config.calculate_per_token_loss,
        )
        judged_TK = self._judged(logits_TE) if record.balances else None
        loss = record(logits_TE, idx_TK, judged_TK, sequences)
        return prob_TC if loss is None else MoEAuxLossAutoScaler.apply(prob_TC, loss)

    def _judged(self, logits_TE: Tensor) -> Tensor | None:
        """Choices that the losses are computed of: the best scores, without bias, groups or force.

        None if they are the router's choices.
        """
        if not self._choice_is_shaped:
            return None
        best = fused_topk.best if self.fused else choose
        return best(logits_TE.detach(), self.top_k)

    @torch.no_grad()
    def _count(self, idx_TK: Tensor) -> Tensor:
        count_E = count_choices(idx_TK, self.num_experts)
        self.statistics.add_counts(count_E)
        if self.local_tokens_per_expert is not None:
            self.local_tokens_per_expert += count_E
        return count_E

    def _losses(
        self, logits_TE: Tensor, idx_TK: Tensor, count_E: Tensor, sequences: int
    ) -> dict[str, Tensor]:
        """This rank's shares of the balancing losses that have a coefficient, before it."""
        o, ranks, shares = self.options, self.replica.size(), dict[str, Tensor]()
        if o.z_loss:
            shares["z_loss"] = z_loss(logits_TE) / ranks
        if not (o.aux_loss or o.seq_aux_loss or o.global_aux_loss):
            return shares
        if (judged_TK := self._judged(logits_TE)) is not None:
            idx_TK = judged_TK
            count_E = count_choices(idx_TK, self.num_experts)
        score_TE = loss_scores(logits_TE, o.score)
        if o.aux_loss:
            count_1E = _sum_over(count_E[None], self.replica)
            shares["aux_loss"] = balance_loss(score_TE, count_1E, ranks=ranks)
        if o.seq_aux_loss:
            count_BE = count_choices_per_sequence(idx_TK, self.num_experts, sequences)
            count_BE = _sum_over(count_BE, self.replica)
            shares["seq_aux_loss"] = balance_loss(score_TE, count_BE, ranks=ranks)
        if o.global_aux_loss:
            # Choices of all replicas and micro-batches so far, scores of this micro-batch.
            assert self.global_tokens_per_expert is not None
            self.global_tokens_per_expert += _sum_over(count_E, self.world)
            count_1E = self.global_tokens_per_expert[None]
            shares["global_aux_loss"] = balance_loss(score_TE, count_1E, ranks=ranks)
        return shares

    def _attach(self, prob_TK: Tensor, shares: dict[str, Tensor]) -> Tensor:
        """Probabilities whose gradient includes that of the losses."""
        if not shares:
            return prob_TK
        for name, share in shares.items():
            self.statistics.add_loss(name, share)
        loss = torch.stack([getattr(self.options, name) * s for name, s in shares.items()]).sum()
        if self.config.calculate_per_token_loss:  # the schedule then divides gradients by tokens
            loss = loss * (prob_TK.size(0) * self.replica.size())
        return MoEAuxLossAutoScaler.apply(prob_TK, loss)


def _sum_over(count: Tensor, group: dist.ProcessGroup) -> Tensor:
    if group.size() == 1:
        return count
    total = count.clone()
    dist.all_reduce(total, group=group)
    return total
