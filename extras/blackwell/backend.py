"""nvidia-cudnn-frontend's fused grouped GEMMs as a backend of the expert MLP, in bf16.

An adapter and nothing more. Rows are gathered into blocks of 256 per expert, whose padding is 0; h
and its gradient have their channels in the order of `extras.blackwell.interleave`, weights too if
they are stored so; otherwise a reordered copy is made for each use.

cuDNN sums the gradient of a probability over column tiles by atomic additions in fp32, and in bf16
has no other way, so its last bits may differ from run to run. All other sums have a fixed order.

Shape legend as in `kernels.expert_mlp.backend`.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from phalanx.extras.blackwell import library
from phalanx.extras.blackwell.glu import epilogue
from phalanx.extras.blackwell.interleave import Interleaved
from phalanx.extras.blackwell.library import ones
from phalanx.extras.blackwell.limits import ROWS
from phalanx.extras.blackwell.padding import ends, gathered, real
from phalanx.kernels.expert_mlp.backend import HiddenGrads, PlanSize, UnquantizedMixin, put
from phalanx.kernels.expert_mlp.calls import (
    BiasGradCall,
    Fc1Call,
    Fc2DgradCall,
    Linear,
    Operand,
    RowsCall,
    WgradCall,
)
from phalanx.kernels.expert_mlp.expert_plan import ExpertPlan
from phalanx.kernels.expert_mlp.sort_pairs import gather_pairs, sort_pairs
from phalanx.kernels.expert_mlp.torch_grouped import Grouped, expert_of_row
from phalanx.kernels.launch_options import DEFAULT, LaunchOptions
from phalanx.kernels.sm90_limits import COMBINE_SLOTS

_ACTIVATION_BYTES = 32
"""Alignment that cuDNN requires of recomputed activations; new tensors on GPUs have it."""


class CuDNN(UnquantizedMixin):
    """`kernels.expert_mlp.backend.Backend` on Blackwell, in bf16.

    Args:
        launch: options of GEMMs; those of weight gradients leave no SM free.
        interleaved: w1, b1 and their gradients are stored in the order of the kernels.
    """

    fuses_gather: ClassVar[bool] = True

    def __init__(self, launch: LaunchOptions, interleaved: bool) -> None:
        self._launch, self._interleaved = launch, interleaved
        self._options: dict[str, Any] = dict(use_dynamic_sched=True)
        self._order, self._torch = Interleaved(), Grouped()

    def plan(self, topk_idx_NK: Tensor, topk_prob_NK: Tensor, size: PlanSize) -> ExpertPlan:
        return sort_pairs(topk_idx_NK, topk_prob_NK, size, align=ROWS)

    def plan_backward(self, dprob_S: Tensor, inverse_NK: Tensor) -> Tensor:
        return gather_pairs(dprob_S, inverse_NK)

    def fc1_act(self, call: Fc1Call) -> tuple[Tensor | None, Tensor]:
        fc1, plan, act = call.fc1, call.plan, call.act
        x_SD = gathered(Operand(call.x_ND, gather=True), plan)
        outputs = self._call(
            "grouped_gemm_glu",
            x_SD,
            plan,
            sfa_tensor=None,
            b_tensor=self._fc1(fc1.weight_LOI, 1),
            bias_tensor=None if fc1.bias_LO is None else self._fc1(fc1.bias_LO, 1).mT,
            prob_tensor=_prob(plan, x_SD),
            generate_c=call.keep_h,
            **epilogue(act, block_scaled=False).forward,
        )
        a_SF = outputs["d_tensor"]
        assert a_SF is not None
        return outputs["c_tensor"], a_SF

    def rows(self, call: RowsCall) -> Tensor:
        a_SI, linear, plan = call.a_SI, call.linear, call.plan
        stored, dim = linear.weight_LOI, 1
        if linear.is_transposed:
            stored = stored.mT
        if max(linear.parts, linear.parts_in) > 1:
            stored = self._fc1(stored, dim)
        outputs = self._call(
            "grouped_gemm",
            a_SI,
            plan,
            b_tensor=stored,
            b_major="n" if linear.is_transposed else "k",
            bias_tensor=None if linear.bias_LO is None else linear.bias_LO.mT,
            prob_tensor=_prob(plan, a_SI),
        )
        y_SO = outputs["d_tensor"]
        assert y_SO is not None
        return y_SO

    def fc2_dgrad_dact(self, call: Fc2DgradCall) -> HiddenGrads:
        fc2, h_SH, plan, act = call.fc2, call.h_SH, call.plan, call.act
        dy_SD = gathered(call.dy, plan)
        S, F = len(h_SH), fc2.weight_LOI.shape[2]
        dprob_S = torch.zeros(S, device=h_SH.device)
        outputs = self._call(
            "grouped_gemm_dglu",
            dy_SD,
            plan,
            sfa_tensor=None,
            c_tensor=h_SH,
            beta_tensor=ones(fc2.weight_LOI.shape[0], h_SH.device),
            prob_tensor=_prob(plan, h_SH),
            dprob_tensor=dprob_S,
            b_tensor=fc2.weight_LOI,
            b_major="n",
            activation_tensor=_aligned(h_SH, S, F),
            **epilogue(act, block_scaled=False).backward,
        )
        dh_SH, a_SF = outputs["d_row_tensor"], outputs["activation_tensor"]
        assert dh_SH is not None and a_SF is not None
        return HiddenGrads(dh_SH, a_SF, _dprob(dprob_S, dy_SD, fc2, plan), None)

    def wgrad(self, call: WgradCall) -> Tensor:
        d, v, plan, into = call.d, call.v, call.plan, call.into
        d_SO, v_SI = gathered(d, plan), gathered(v, plan)
        ordered = d.parts == 1 or self._interleaved
        outputs = library.call(
            "grouped_gemm_wgrad",
            DEFAULT,
            a_tensor=d_SO.mT,
            b_tensor=v_SI,
            sfa_tensor=None,
            sfb_tensor=None,
            offsets_tensor=ends(plan),
            wgrad_tensor=into.out if into is not None and ordered else None,
            wgrad_dtype=into.out.dtype if into is not None else d_SO.dtype,
            accumulate_on_output=into is not None and into.add and ordered,
        )
        dw_LOI = outputs["wgrad_tensor"]
        assert dw_LOI is not None
        return dw_LOI if ordered else put(self._order.canonical(dw_LOI, 1), into)

    def bias_grad(self, call: BiasGradCall) -> Tensor:
        d, plan = call.d, call.plan
        rows = Operand(gathered(d, plan))
        db_LO = self._torch.bias_grad(call._replace(d=rows, into=None))
        if d.parts > 1 and not self._interleaved:
            db_LO = self._order.canonical(db_LO, 1)
        return put(db_LO, call.into)

    def combine(self, y_SD: Tensor, inverse_NK: Tensor, addends: Sequence[Tensor] = ()) -> Tensor:
        if not y_SD.is_cuda or inverse_NK.shape[1] > COMBINE_SLOTS:
            return self._torch.combine(y_SD, inverse_NK, addends)
        from phalanx.kernels.sm90.experts.combine import combine

        return combine(y_SD, inverse_NK, addends=addends)

    def _call(
        self, name: str, rows_SC: Tensor, plan: ExpertPlan, **arguments: Any
    ) -> dict[str, Any]:
        """A grouped GEMM over expert rows."""
        return library.call(
            name,
            self._launch,
            a_tensor=rows_SC,
            padded_offsets=ends(plan),
            alpha_tensor=ones(len(plan.offsets) - 1, rows_SC.device),
            **self._options,
            **arguments,
        )

    def _fc1(self, stored: Tensor, dim: int) -> Tensor:
        """Weights or biases of fc1, with channels along `dim` in the order of the kernels."""
        return stored if self._interleaved else self._order.store(stored, dim)


def _prob(plan: ExpertPlan, rows: Tensor) -> Tensor:
    return ones(len(rows), rows.device) if plan.row_prob_S is None else plan.row_prob_S


def _aligned(like: Tensor, rows: int, columns: int) -> Tensor:
    """An empty matrix, aligned explicitly, as CPU tensors may start anywhere."""
    memory = like.new_empty(rows * columns + _ACTIVATION_BYTES // like.element_size())
    skip = -memory.data_ptr() % _ACTIVATION_BYTES // like.element_size()
    return memory[skip : skip + rows * columns].view(rows, columns)


def _dprob(dprob_S: Tensor, dy_SD: Tensor, fc2: Linear, plan: ExpertPlan) -> Tensor | None:
    """Gradient of the probabilities, with the share of fc2's bias."""
    if plan.row_prob_S is None:
        return None
    if fc2.bias_LO is not None:
        expert_S = expert_of_row(plan.offsets, dy_SD)
        dprob_S = dprob_S + (dy_SD.float() * fc2.bias_LO.index_select(0, expert_S).float()).sum(-1)
    return real(dprob_S, plan)
