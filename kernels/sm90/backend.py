"""The fused kernels of this package as a backend of the expert MLP.

An adapter and nothing more: every operation of `kernels.backend` calls functions of this package,
imported when they are first used.

Shape legend as in `kernels.backend`; C column tiles of the kernel that left partial sums.
"""

from typing import ClassVar

import torch
from torch import Tensor

from kernels.activation import Activation
from kernels.backend import Planned, Rows


class Fused:
    """`kernels.backend.Backend` on Hopper, in bf16.

    Args:
        sm_margin: SMs that every GEMM leaves free.
        dynamic: GEMMs claim tiles on the device; otherwise tiles are dealt out in turn.
    """

    gathers: ClassVar[bool] = True

    def __init__(self, sm_margin: int, dynamic: bool) -> None:
        self._sm_margin, self._dynamic = sm_margin, dynamic

    def plan(
        self,
        topk_idx_NK: Tensor,
        topk_prob_NK: Tensor,
        *,
        first_expert: int,
        local_experts: int,
        rows: int,
    ) -> Planned:
        from kernels.sm90.plan import plan

        where = dict(first_expert=first_expert, local_experts=local_experts, rows=rows)
        return Planned(*plan(topk_idx_NK, topk_prob_NK, **where))

    def plan_backward(self, dprob_S: Tensor, inverse_NK: Tensor) -> Tensor:
        from kernels.sm90.plan import plan_backward

        return plan_backward(dprob_S, inverse_NK)

    def fc1_act(
        self,
        x_ND: Tensor,
        w1_LHD: Tensor,
        b1_LH: Tensor | None,
        rows: Rows,
        act: Activation,
        *,
        keep_h: bool = True,
    ) -> tuple[Tensor | None, Tensor]:
        from kernels.sm90.fc1_act import fc1_act

        return fc1_act(
            x_ND,
            w1_LHD,
            rows.offsets,
            act,
            index_S=rows.index_S,
            prob_S=rows.prob_S,
            bias_LH=b1_LH,
            keep_h=keep_h,
            ready=rows.ready,
            sm_margin=self._sm_margin,
            dynamic=self._dynamic,
        )

    def rows(
        self, a_SI: Tensor, w_LOI: Tensor, rows: Rows, bias_LO: Tensor | None = None
    ) -> Tensor:
        from kernels.sm90.rows import rows as grouped_gemm

        scale_S = rows.prob_S
        if bias_LO is not None and scale_S is None:
            scale_S = torch.ones(a_SI.shape[0], device=a_SI.device)
        return grouped_gemm(
            a_SI,
            w_LOI,
            rows.offsets,
            bias_LN=bias_LO,
            scale_S=None if bias_LO is None else scale_S,
            sm_margin=self._sm_margin,
            dynamic=self._dynamic,
            told=rows.told,
        )

    def fc2_dgrad_dact(
        self,
        dy: Tensor,
        w2_LDF: Tensor,
        b2_LD: Tensor | None,
        h_SH: Tensor,
        rows: Rows,
        act: Activation,
        *,
        gather: bool,
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        from kernels.sm90.dprob import dprob
        from kernels.sm90.fc2_dgrad_dact import fc2_dgrad_dact

        index_S = rows.index_S if gather else None
        dh_SH, a_SF, partial_CS = fc2_dgrad_dact(
            dy,
            w2_LDF,
            h_SH,
            rows.offsets,
            act,
            index_S=index_S,
            prob_S=rows.prob_S,
            ready=rows.ready,
            sm_margin=self._sm_margin,
            dynamic=self._dynamic,
        )
        if partial_CS is None:
            return dh_SH, a_SF, None, None
        table_NL = None if b2_LD is None or not dy.shape[0] else _with_every_bias(dy, b2_LD)
        dprob_S = dprob(partial_CS, rows.offsets, table_NL=table_NL, index_S=index_S)
        return dh_SH, a_SF, dprob_S, None

    def wgrad(
        self,
        d: Tensor,
        v: Tensor,
        rows: Rows,
        *,
        gather_d: bool,
        gather_v: bool,
        out: Tensor | None = None,
        accumulate: bool = False,
    ) -> Tensor:
        from kernels.sm90.wgrad import wgrad

        return wgrad(
            d,
            v,
            rows.offsets,
            d_index_S=rows.index_S if gather_d else None,
            v_index_S=rows.index_S if gather_v else None,
            out_LOI=out,
            accumulate=accumulate,
            order_L=rows.order_L,
            sm_margin=self._sm_margin,
            dynamic=self._dynamic,
        )

    def bias_grad(
        self,
        d: Tensor,
        rows: Rows,
        *,
        scale: bool,
        gather: bool,
        out: Tensor | None = None,
        accumulate: bool = False,
    ) -> Tensor:
        from kernels.sm90.bias_grad import bias_grad

        return bias_grad(
            d,
            rows.offsets,
            scale_S=rows.prob_S if scale else None,
            index_S=rows.index_S if gather else None,
            out_LO=out,
            dtype=torch.float32,
            accumulate=accumulate,
        )

    def combine(self, y_SD: Tensor, inverse_NK: Tensor) -> Tensor:
        from kernels.sm90.combine import combine

        return combine(y_SD, inverse_NK)


def _with_every_bias(dy: Tensor, b2_LD: Tensor) -> Tensor:
    """fp32 <dy[n], b2[e]> of all rows and all experts: a narrow GEMM that gathers nothing."""
    return torch.mm(dy, b2_LD.T, out_dtype=torch.float32)
