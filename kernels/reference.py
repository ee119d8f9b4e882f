"""Plain torch in fp32 (fp64 for fp64 inputs), one expert at a time: the oracle of the expert MLP.

Reads the offsets on the host and is slow; runs any size and dtype on any device. Results are
rounded to the input's dtype exactly where `kernels.backend` says so, and padding rows are NaN, so
that a consumer that reads them is found out.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.activation import Activation
from kernels.backend import Rows


def activation(h: Tensor, act: Activation) -> Tensor:
    """The definition of every activation: [..., H] -> [..., F] in the dtype of h."""
    gate, up = h.chunk(2, -1) if act.gated else (h, None)
    if act.limit:
        gate = gate.clamp(max=act.limit)
        up = None if up is None else up.clamp(-act.limit, act.limit)
    match act.kind:
        case "swiglu":
            value = F.silu(gate)
        case "geglu":
            value = F.gelu(gate)
        case "quick_geglu":
            value = gate * torch.sigmoid(act.alpha * gate)
        case _:
            value = gate.relu().square()
    return value if up is None else value * (up + act.offset)


class Reference:
    """`kernels.backend.Backend` by loops over experts."""

    def fc1_act(
        self, x_ND: Tensor, w1_LHD: Tensor, b1_LH: Tensor | None, rows: Rows, act: Activation
    ) -> tuple[Tensor, Tensor]:
        S, width = rows.index_S.shape[0], w1_LHD.shape[1]
        h_SH = _padding(x_ND, S, width)
        a_SF = _padding(x_ND, S, width // 2 if act.gated else width)
        for e, span in enumerate(_spans(rows.offsets)):
            h = _wide(x_ND.index_select(0, rows.index_S[span])) @ _wide(w1_LHD[e]).T
            h_SH[span] = (h if b1_LH is None else h + _wide(b1_LH[e])).to(x_ND.dtype)
            prob_S1 = rows.prob_S[span, None]
            a_SF[span] = (activation(_wide(h_SH[span]), act) * prob_S1).to(x_ND.dtype)
        return h_SH, a_SF

    def rows(
        self, a_SI: Tensor, w_LOI: Tensor, rows: Rows, bias_LO: Tensor | None = None
    ) -> Tensor:
        y_SO = _padding(a_SI, a_SI.shape[0], w_LOI.shape[1])
        for e, span in enumerate(_spans(rows.offsets)):
            y = _wide(a_SI[span]) @ _wide(w_LOI[e]).T
            if bias_LO is not None:
                y = y + _wide(bias_LO[e]) * rows.prob_S[span, None]
            y_SO[span] = y.to(a_SI.dtype)
        return y_SO

    def fc2_dgrad_dact(
        self,
        dy_SD: Tensor,
        w2_LDF: Tensor,
        b2_LD: Tensor | None,
        h_SH: Tensor,
        rows: Rows,
        act: Activation,
    ) -> tuple[Tensor, Tensor, Tensor]:
        S, ffn = dy_SD.shape[0], w2_LDF.shape[2]
        dh_SH, a_SF = _padding(dy_SD, S, h_SH.shape[1]), _padding(dy_SD, S, ffn)
        dprob_S = torch.zeros_like(rows.prob_S)
        for e, span in enumerate(_spans(rows.offsets)):
            dy = _wide(dy_SD[span])
            h = _wide(h_SH[span]).detach().requires_grad_()
            prob = rows.prob_S[span].detach().requires_grad_()
            with torch.enable_grad():
                a = activation(h, act) * prob[:, None]
                dh, dprob = torch.autograd.grad(a, (h, prob), dy @ _wide(w2_LDF[e]))
            if b2_LD is not None:
                dprob = dprob + dy @ _wide(b2_LD[e])
            dh_SH[span], a_SF[span], dprob_S[span] = dh.to(dy_SD.dtype), a.to(dy_SD.dtype), dprob
        return dh_SH, a_SF, dprob_S

    def wgrad(self, d_SO: Tensor, v: Tensor, rows: Rows, *, gather: bool) -> Tensor:
        dw_LOI = d_SO.new_zeros(rows.offsets.shape[0] - 1, d_SO.shape[1], v.shape[1])
        for e, span in enumerate(_spans(rows.offsets)):
            v_SI = v.index_select(0, rows.index_S[span]) if gather else v[span]
            dw_LOI[e] = (_wide(d_SO[span]).T @ _wide(v_SI)).to(d_SO.dtype)
        return dw_LOI

    def bias_grad(self, d_SO: Tensor, rows: Rows, *, scale: bool) -> Tensor:
        db_LO = d_SO.new_zeros(rows.offsets.shape[0] - 1, d_SO.shape[1])
        for e, span in enumerate(_spans(rows.offsets)):
            d = _wide(d_SO[span])
            db_LO[e] = (d * rows.prob_S[span, None] if scale else d).sum(0).to(d_SO.dtype)
        return db_LO

    def combine(self, y_SD: Tensor, inverse_NK: Tensor) -> Tensor:
        out_ND = _wide(y_SD.new_zeros(inverse_NK.shape[0], y_SD.shape[1]))
        for row_N in inverse_NK.unbind(1):
            here = (row_N >= 0).nonzero().squeeze(1)
            out_ND[here] += _wide(y_SD.index_select(0, row_N[here]))
        return out_ND.to(y_SD.dtype)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _padding(like: Tensor, rows: int, columns: int) -> Tensor:
    return like.new_full((rows, columns), float("nan"))


def _spans(offsets: Tensor) -> list[slice]:
    ends = offsets.tolist()
    return [slice(begin, end) for begin, end in zip(ends, ends[1:], strict=False)]
