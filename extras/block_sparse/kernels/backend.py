"""Experts over the living blocks of their weights: a backend, and the `Experts` that bring it.

Shape legend as in `kernels.expert_mlp.backend`.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from phalanx.extras.block_sparse.kernels.lists import MOST, Blocks
from phalanx.kernels.expert_mlp.backend import Backend, SequentialMixin
from phalanx.kernels.expert_mlp.calls import (
    Fc1Call,
    Fc2DgradCall,
    HiddenRows,
    Rows,
    RowsCall,
    WgradCall,
)
from phalanx.kernels.expert_mlp.interfaces import OWN, OwnExperts
from phalanx.kernels.expert_mlp.main_grad import Buffer
from phalanx.kernels.expert_mlp.mlp_spec import Layer, MLPWeights
from phalanx.kernels.expert_mlp.weight_grads import WeightGrads
from phalanx.kernels.launch_options import LaunchOptions
from phalanx.kernels.sm90.experts.backend import Fused

if TYPE_CHECKING:
    from phalanx.extras.block_sparse.masks import BlockMasks


class SparseFused(Fused):
    """`Fused` in bf16 over living blocks.

    Calls that exchange rows with other GPUs meanwhile (`ready`, `signal`) run on all blocks, of
    which the dead ones are zero: the same results, in the time of all.
    """

    writes_into_out: ClassVar[bool] = False
    wgrad_pair = SequentialMixin.wgrad_pair

    def __init__(self, launch: LaunchOptions, fc1: Blocks, fc2: Blocks) -> None:
        super().__init__(launch)
        if fc1.shape == fc2.shape:
            raise ValueError(f"experts of {fc1.shape[1]} x {fc1.shape[2]} channels: must differ")
        self._fc1, self._fc2 = fc1, fc2

    @classmethod
    def like(cls, backend: Fused, fc1: Blocks, fc2: Blocks) -> "SparseFused":
        """With the options of another backend's launches."""
        return cls(backend._launch, fc1, fc2)

    def fc1_act(self, call: Fc1Call) -> tuple[Rows | None, Rows]:
        from phalanx.extras.block_sparse.kernels.gemm import sparse_gemm
        from phalanx.kernels.sm90.gemm.epilogues import Act

        if call.ready is not None:
            return super().fc1_act(call)
        plan, bias = call.plan, call.fc1.bias_LO
        made = sparse_gemm(
            call.x_ND,
            call.fc1.weight_LOI,
            self._fc1.forward,
            plan.offsets,
            Act(call.act, bias is not None, prob=plan.row_prob_S is not None),
            index_S=plan.row_index_S,
            options=self._launch,
            **_given(bias=bias, prob=plan.row_prob_S),
        )
        return made["h"], made["a"]

    def rows(self, call: RowsCall) -> Tensor:
        from phalanx.extras.block_sparse.kernels.gemm import Plain, sparse_gemm

        if call.signal is not None:
            return super().rows(call)
        linear, plan, scale = call.linear, call.plan, None
        if linear.bias_LO is not None:
            scale = self._scale_of_bias(linear, plan, call.a_SI)
        made = sparse_gemm(
            *(call.a_SI, linear.weight_LOI),
            self._fc1.backward if linear.is_transposed else self._fc2.forward,
            plan.offsets,
            Plain(linear.bias_LO is not None),
            options=self._launch.leaving(call.free_sms),
            **_given(bias=linear.bias_LO, scale=scale),
        )
        return made["y"]

    def fc2_dgrad_rows(self, call: Fc2DgradCall) -> HiddenRows:
        from phalanx.extras.block_sparse.kernels.gemm import sparse_gemm
        from phalanx.kernels.sm90.gemm.epilogues import ActGrad

        if call.ready is not None:
            return super().fc2_dgrad_rows(call)
        plan = call.plan
        made = sparse_gemm(
            call.dy.matrix,
            call.fc2.weight_LOI.mT,
            self._fc2.backward,
            plan.offsets,
            ActGrad(call.act, plan.row_prob_S is not None),
            loaded=call.h_SH,
            index_S=plan.row_index_S if call.dy.gather else None,
            options=self._launch,
            **_given(prob=plan.row_prob_S),
        )
        return made["dh"], made["a"], made.get("dprob")

    def wgrad(self, call: WgradCall) -> Tensor:
        from phalanx.extras.block_sparse.kernels.wgrad import sparse_wgrad

        rows, into = call.rows, call.into
        d, v = rows.d.matrix, rows.v.matrix
        shape = len(rows.offsets) - 1, d.shape[1], v.shape[1]
        blocks = self._fc1 if shape == self._fc1.shape else self._fc2
        if into is None:
            into = Buffer(d.new_empty(shape), add=False)
        return sparse_wgrad(rows, blocks.tiles, into.out, accumulate=into.add, options=self._launch)


class LivingExperts(OwnExperts):
    """`Experts` whose fused kernels in bf16 skip dead blocks; other backends multiply zeros."""

    def __init__(self, fc1: Blocks, fc2: Blocks) -> None:
        self._blocks = fc1, fc2

    def start(
        self, own: MLPWeights, first: Layer, wait_rows: Callable[[], None] | None
    ) -> Callable[[Backend], Backend]:
        return self._sparse

    def weight_grads(
        self, work: WeightGrads, own: MLPWeights, buffers: Sequence[Buffer | None]
    ) -> list[Tensor | None]:
        work.ops = self._sparse(work.ops)  # in place: a copy would keep operands that it frees
        return work.all(buffers)

    def _sparse(self, backend: Backend) -> Backend:
        return SparseFused.like(backend, *self._blocks) if type(backend) is Fused else backend


def skip_dead_blocks(experts: Any, masks: "BlockMasks") -> bool:
    """Have the fused kernels of a layer's experts skip the dead blocks of its masks, of 128 x 128.

    `experts` is a `moe.experts.Experts`. False if its weights are too wide for lists, or of one
    shape: kernels then multiply zeros, as those of other backends do.
    """
    fc1, fc2 = masks.living_fc1, masks.living_fc2
    parts = experts.w1.size(1) // experts.w2.size(2)
    if max(parts * fc1.size(1), fc1.size(2)) > MOST or parts * fc1.size(1) == fc1.size(2):
        return False
    lists = Blocks(fc1, parts), Blocks(fc2)
    living = LivingExperts(*lists)

    def update(masks: "BlockMasks") -> None:
        for blocks, mask in zip(lists, (masks.living_fc1, masks.living_fc2), strict=True):
            blocks.update(mask, every=masks.wants_all)

    def with_lists(module: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        received, *rest = args
        # Experts of other ranks beside them have no masks here.
        own = received.experts is OWN
        return (received._replace(experts=living) if own else received, *rest)

    masks.after_changes(update)
    experts.register_forward_pre_hook(with_lists)
    return True


def _given(**loads: Tensor | None) -> dict[str, Tensor]:
    return {name: load for name, load in loads.items() if load is not None}
