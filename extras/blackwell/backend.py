"""nvidia-cudnn-frontend's fused grouped GEMMs as a backend of the expert MLP: bf16, MXFP8, NVFP4.

An adapter. Rows are gathered into blocks of 256 per expert, whose padding is 0; h and its gradient
have their channels in the order of `extras.blackwell.interleave`, weights too if they are stored
so; otherwise a reordered copy is made for each use. In bf16 cuDNN can sum the gradient of a
probability over column tiles only by atomic additions in fp32, so its last bits may differ from run
to run. All other sums have a fixed order.

In MXFP8 the gated epilogues quantize their outputs: activations for fc2, and the gradient of h in
rows for the data gradient and in columns for the weight gradient, each from the fp32 of the
epilogue. In NVFP4 epilogues return bf16, as a tensor's amax must be known first, and quantization
follows. Activations for the weight gradient are recomputed from h. The gradient of fc1's biases is
summed from the quantized gradient of h.

Shape legend as in `kernels.expert_mlp.backend`.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from phalanx.extras.blackwell import library
from phalanx.extras.blackwell.availability import ROWS
from phalanx.extras.blackwell.glu import epilogue
from phalanx.extras.blackwell.interleave import RUN, Interleaved
from phalanx.extras.blackwell.library import ones
from phalanx.extras.blackwell.operands import FORMATS, MXFP8, Packed, ends, gathered, real
from phalanx.extras.microscaling import nvfp4
from phalanx.kernels.expert_mlp.activation import Activation, Formula, formula
from phalanx.kernels.expert_mlp.backend import Backend, HiddenGrads, Options, UnquantizedMixin, put
from phalanx.kernels.expert_mlp.calls import (
    BiasGradCall,
    Fc1Call,
    Fc2DgradCall,
    Linear,
    Operand,
    RowsCall,
    WgradCall,
)
from phalanx.kernels.expert_mlp.expert_plan import ExpertPlan, PlanSize, gather_pairs, sort_pairs
from phalanx.kernels.expert_mlp.main_grad import Buffer
from phalanx.kernels.expert_mlp.torch_grouped import Grouped, as_one_kernel, expert_of_row
from phalanx.kernels.launch_options import DEFAULT, LaunchOptions
from phalanx.kernels.limits import COMBINE_SLOTS
from phalanx.kernels.quantize.recipe import Microscaling

_ACTIVATION_BYTES = 32  # alignment of recomputed activations; new tensors on GPUs have it


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
        operands = dict(a_tensor=d_SO.mT, b_tensor=v_SI, sfa_tensor=None, sfb_tensor=None)
        dw_LOI = _wgrad(operands, plan, into, d_SO.dtype, ordered=ordered)
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
        return stored if self._interleaved else self._order.store(stored, dim)


def _prob(plan: ExpertPlan, rows: Tensor) -> Tensor:
    return ones(len(rows), rows.device) if plan.row_prob_S is None else plan.row_prob_S


def _aligned(like: Tensor, rows: int, columns: int) -> Tensor:
    """An empty matrix, aligned explicitly, as CPU tensors may start anywhere."""
    memory = like.new_empty(rows * columns + _ACTIVATION_BYTES // like.element_size())
    skip = -memory.data_ptr() % _ACTIVATION_BYTES // like.element_size()
    return memory[skip : skip + rows * columns].view(rows, columns)


def _dprob(dprob_S: Tensor, dy_SD: Tensor, fc2: Linear, plan: ExpertPlan) -> Tensor | None:
    if plan.row_prob_S is None:
        return None
    if fc2.bias_LO is not None:
        expert_S = expert_of_row(plan.offsets, dy_SD)
        dprob_S = dprob_S + (dy_SD.float() * fc2.bias_LO.index_select(0, expert_S).float()).sum(-1)
    return real(dprob_S, plan)


def _wgrad(
    operands: dict[str, Any],
    plan: ExpertPlan,
    into: Buffer | None,
    dtype: torch.dtype,
    *,
    ordered: bool,
) -> Tensor:
    """Weight gradients [L, O, I] in cuDNN's order of channels, in the buffer if it is `ordered`."""
    outputs = library.call(
        "grouped_gemm_wgrad",
        DEFAULT,
        offsets_tensor=ends(plan),
        wgrad_tensor=into.out if into is not None and ordered else None,
        wgrad_dtype=dtype if into is None else into.out.dtype,
        accumulate_on_output=into is not None and into.add and ordered,
        **operands,
    )
    dw_LOI = outputs["wgrad_tensor"]
    assert dw_LOI is not None
    return dw_LOI


class CuDNNMicroscaling(CuDNN):
    """`kernels.expert_mlp.backend.Backend` on Blackwell with a recipe of its tensor cores.

    Raises:
        ValueError: weight gradients in bf16, for which cuDNN has no epilogue.
    """

    def __init__(self, launch: LaunchOptions, interleaved: bool, recipe: Microscaling) -> None:
        super().__init__(launch, interleaved)
        if recipe.wgrad == "bf16":
            raise ValueError("kernels=cudnn has no precision.wgrad=bf16: use kernels=torch")
        self._recipe, self._format = recipe, FORMATS[recipe.format]
        self._scaled: dict[str, Any] = dict(sf_vec_size=self._format.block)

    def columns(self, x: Operand, plan: ExpertPlan) -> Operand:
        if isinstance(x.matrix, Packed):  # by an epilogue
            return x
        return Operand(self._columns(gathered(x, plan), plan, x.gradient), parts=x.parts)

    def fc1_act(self, call: Fc1Call) -> tuple[Tensor | None, Any]:
        fc1, plan, act = call.fc1, call.plan, call.act
        x_SD = gathered(Operand(call.x_ND, gather=True), plan)
        x = self._format.rows(x_SD, plan.offsets, False)
        w1 = self._format.weights(self._fc1(fc1.weight_LOI, 1))
        outputs = self._product(
            "grouped_gemm_glu",
            x,
            w1,
            plan,
            bias_tensor=None if fc1.bias_LO is None else self._fc1(fc1.bias_LO, 1).mT,
            prob_tensor=_prob(plan, x_SD),
            c_dtype=torch.bfloat16,
            **self._outputs(x_SD.device),
            **epilogue(act, block_scaled=True).forward,
        )
        return outputs["c_tensor"] if call.keep_h else None, self._output(outputs, "d_tensor")

    def rows(self, call: RowsCall) -> Tensor:
        a, linear, plan = call.a_SI, call.linear, call.plan
        w_LOI = linear.weight_LOI
        if linear.parts > 1 or linear.parts_in > 1:
            w_LOI = self._fc1(w_LOI, 1 if linear.parts > 1 else 2)
        gradient = linear.is_transposed and self._recipe.stochastic
        if not isinstance(a, Packed):
            a = self._format.rows(a, plan.offsets, gradient)
        outputs = self._product(
            "grouped_gemm_quant",
            a,
            self._format.weights(w_LOI),
            plan,
            bias_tensor=None if linear.bias_LO is None else linear.bias_LO.mT,
            # Without a bias it would multiply the product.
            prob_tensor=None if linear.bias_LO is None else _prob(plan, a.data),
            d_dtype=torch.bfloat16,
            generate_amax=False,
        )
        y_SO: Tensor = outputs["d_tensor"]
        return y_SO

    def fc2_dgrad_dact(self, call: Fc2DgradCall) -> HiddenGrads:
        fc2, h_SH, plan, act = call.fc2, call.h_SH, call.plan, call.act
        dy_SD = gathered(call.dy, plan)
        dprob_S = torch.zeros(len(h_SH), device=h_SH.device)
        outputs = self._product(
            "grouped_gemm_dglu",
            self._format.rows(dy_SD, plan.offsets, self._recipe.stochastic),
            self._format.weights(fc2.weight_LOI.mT),
            plan,
            c_tensor=h_SH,
            beta_tensor=ones(len(plan.offsets) - 1, h_SH.device),
            prob_tensor=_prob(plan, h_SH),
            dprob_tensor=dprob_S,
            deterministic=True,
            **self._outputs(h_SH.device),
            **epilogue(act, block_scaled=True).backward,
        )
        dh = self._output(outputs, "d_row_tensor")
        if self._format.quantized_outputs:
            dh_columns = Packed(outputs["d_col_tensor"].mT, outputs["sfd_col_tensor"].view(-1))
        else:
            dh_columns = self._columns(dh, plan, True)
        a_SF = as_one_kernel(_activations, h_SH, _prob(plan, h_SH), act, formula(act))
        dprob = _dprob(outputs["dprob_tensor"], dy_SD, fc2, plan)
        return HiddenGrads(dh, self._columns(a_SF, plan, False), dprob, None, dh_columns)

    def wgrad(self, call: WgradCall) -> Tensor:
        d, plan, into = call.d, call.plan, call.into
        d_TO, v_TI = d.matrix, call.v.matrix
        ordered = d.parts == 1 or self._interleaved
        scales: dict[str, Tensor] = {}
        if self._format.scales_products:
            scales = dict(
                global_scale_a=d_TO.amax_L / nvfp4.TOP, global_scale_b=v_TI.amax_L / nvfp4.TOP
            )
        tensors = dict(a_tensor=d_TO.data, b_tensor=v_TI.data.mT)
        tensors |= dict(sfa_tensor=d_TO.scale, sfb_tensor=v_TI.scale)
        operands = tensors | scales | self._scaled
        dw_LOI = _wgrad(operands, plan, into, torch.bfloat16, ordered=ordered)
        return dw_LOI if ordered else put(self._order.canonical(dw_LOI, 1), into)

    def bias_grad(self, call: BiasGradCall) -> Tensor:
        d = call.d
        if isinstance(d.matrix, Packed):
            values = as_one_kernel(_values, d.matrix.data, d.matrix.scale)
            call = call._replace(d=d._replace(matrix=values))
        return super().bias_grad(call)

    def _product(
        self, name: str, a: Packed, b: Packed, plan: ExpertPlan, **arguments: Any
    ) -> dict[str, Any]:
        alpha_L = ones(len(plan.offsets) - 1, a.data.device)
        if a.amax_L is not None and b.amax_L is not None:
            alpha_L = nvfp4.tensor_scale(a.amax_L, b.amax_L)
            if name == "grouped_gemm_dglu":  # which squares it
                alpha_L = alpha_L.sqrt()
        return library.call(
            name,
            self._launch,
            a_tensor=a.data,
            sfa_tensor=a.scale,
            b_tensor=b.data,
            sfb_tensor=b.scale,
            padded_offsets=ends(plan),
            alpha_tensor=alpha_L,
            **self._options,
            **self._scaled,
            **arguments,
        )

    def _outputs(self, device: torch.device) -> dict[str, Any]:
        """Arguments for an epilogue's outputs; the scales of columns are grouped by expert."""
        if not self._format.quantized_outputs:
            return dict(d_dtype=torch.bfloat16)
        return dict(
            d_dtype=torch.float8_e4m3fn, norm_const_tensor=ones(1, device), discrete_col_sfd=True
        )

    def _output(self, outputs: dict[str, Any], name: str) -> Any:
        if not self._format.quantized_outputs:
            return outputs[name]
        return Packed(outputs[name], outputs["sfd_row_tensor"].view(-1))

    def _columns(self, x_SC: Tensor, plan: ExpertPlan, gradient: bool) -> Packed:
        return self._format.columns(x_SC, plan.offsets, gradient and self._recipe.stochastic)


def _values(data: Tensor, scale: Tensor) -> Tensor:
    return MXFP8().values(Packed(data, scale)).to(torch.bfloat16)


def _activations(h_SH: Tensor, prob_S: Tensor, act: Activation, functions: Formula) -> Tensor:
    """act(h) * prob in fp32, rounded, where h alternates runs of gate and up channels."""
    gate, up = (half.flatten(-2) for half in h_SH.float().unflatten(-1, (-1, 2, RUN)).unbind(-2))
    if act.limit:
        gate, up = gate.clamp(max=act.limit), up.clamp(-act.limit, act.limit)
    return (functions.value(gate, act) * (up + act.offset) * prob_S[:, None]).to(h_SH.dtype)


def cudnn(options: Options) -> Backend:
    """cuDNN's grouped GEMMs for Blackwell, in bf16, MXFP8 or NVFP4; a ValueError for fp8_block."""
    if options.recipe is None:
        return CuDNN(options.launch, options.channel_order is not None)
    if not isinstance(options.recipe, Microscaling):
        raise ValueError("kernels.backend=cudnn has no fp8_block: use kernels=torch")
    return CuDNNMicroscaling(options.launch, options.channel_order is not None, options.recipe)
