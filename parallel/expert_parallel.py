"""Expert parallelism for models of any framework: the layer of this project without Megatron-Core.

`ExpertParallelGroup` is what the layers of a model share: the choice of the transport, the memory
that ranks write to each other, and the budget of rows. `ExpertParallelMoE` is a layer with weights.

No token is dropped unless the budget overflows. By default it has room for every row that could
arrive. With a smaller one an overflow is noted on the device; `overflowed` reads it, and the caller
discards the step, calls `grow` and runs it again.

In a CUDA graph: run a step first, which allocates memory; capture `begin` before the first layer.

Legend: T tokens of a rank, K experts of a token, E experts of all ranks, R ranks, L = E / R experts
of a rank, D hidden, F expert width.
"""

from typing import NamedTuple, Unpack

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.kernels.expert_mlp.activation import Activation
from phalanx.kernels.expert_mlp.grouped_mlp import grouped_mlp
from phalanx.kernels.expert_mlp.mlp_spec import MLPSpec, MLPWeights
from phalanx.kernels.functional.experts import TopK, experts
from phalanx.kernels.functional.module import ExpertModule
from phalanx.kernels.functional.options import (
    ExpertOptions,
    KernelOptions,
    check_device,
    check_float,
)
from phalanx.kernels.quantize.recipe import Fp8Block
from phalanx.parallel.connections import Connections
from phalanx.parallel.dispatcher.base import TokenChoices, make_dispatcher
from phalanx.parallel.dispatcher.capacity import Budget
from phalanx.parallel.dispatcher.exchange import SymmOptions
from phalanx.parallel.dispatcher.transport import choose_transport, sms_of
from phalanx.parallel.dispatcher.transport_class import Dispatcher


class _Key(NamedTuple):
    """Facts by which layers share a dispatcher."""

    experts: int
    top_k: int
    backend: str
    recipe: Fp8Block | None


class ExpertParallelGroup:
    """Ranks that share the experts of a model's layers.

    Rank r of the group has experts r * L to (r + 1) * L - 1. Creating it is collective over all
    ranks of the job, each of which is in one such group; so is every method but `grow`.

    Args:
        transport: `symm`, which pushes tokens over NVLink (bf16, one host, Hopper), `hier`, which
            sends a token once to each node (groups over several), `alltoall`, which runs
            everywhere, or `auto`: the first of them that can run.
        capacity_factor: rows of a rank's buffers over the balanced load T * K. None: R, with which
            every row that could arrive has room.
        comm_sms: SMs that `symm` takes for pushes beside the experts' kernels; 0: none beside them.
        timeout: seconds after which a wait for another rank in `symm` is an error.

    Raises:
        ValueError: an argument of another type. On all ranks: an unknown transport or one that
            cannot run here, or a factor below 1.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        transport: str = "auto",
        capacity_factor: float | None = None,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
        comm_sms: int | str = "auto",
        timeout: float = 600.0,
    ) -> None:
        if not dist.is_initialized():
            raise ValueError("group: call torch.distributed.init_process_group first")
        if group is not None and not isinstance(group, dist.ProcessGroup):
            raise ValueError(f"group must be a process group, not {type(group).__name__}")
        check_float("dtype", dtype)
        check_device(device)
        if comm_sms != "auto" and (type(comm_sms) is not int or comm_sms < 0):
            raise ValueError(f"comm_sms={comm_sms!r}: set it to auto, or to 0 or more SMs")
        if not isinstance(timeout, (int, float)) or not timeout > 0:
            raise ValueError(f"timeout={timeout!r}: set it to seconds above 0")
        world = dist.group.WORLD
        assert world is not None
        self.group = world if group is None else group
        ranks = self.group.size()
        if ranks == 1 and transport in ("symm", "alltoall"):
            transport = "auto"  # nothing travels
        try:
            self.transport = choose_transport(transport, self.group, dtype)
        except ValueError as error:
            raise ValueError(str(error).replace("parallel.dispatch=", "transport=")) from None
        factor = float(ranks) if capacity_factor is None else capacity_factor
        self.capacity_factor = factor
        here = torch.cuda.current_device() if torch.cuda.is_available() else "cpu"
        try:
            self.budget = Budget(factor, torch.device(here if device is None else device))
        except ValueError:
            raise ValueError(f"capacity_factor={factor}: set it to 1 or more") from None
        self.connections = Connections()
        self._comm_sms, self._timeout = comm_sms, timeout
        self._dispatchers: dict[_Key, Dispatcher] = {}

    @property
    def size(self) -> int:
        """R."""
        return self.group.size()

    def experts(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_prob: Tensor,
        w1: Tensor,
        w2: Tensor,
        b1: Tensor | None = None,
        b2: Tensor | None = None,
        **options: Unpack[ExpertOptions],
    ) -> Tensor:
        """`kernels.api.grouped_experts` over the experts of all ranks.

        Collective over the group, in the forward pass and in the backward pass. torch.compile
        breaks the graph here. Arguments, result and errors are those of `kernels.api.experts` with
        a group.
        """
        return experts(x, TopK(topk_idx, topk_prob), (w1, w2, b1, b2), options, self)

    def exchange(self, x_TD: Tensor, routing: TopK, weights: MLPWeights, spec: MLPSpec) -> Tensor:
        """`kernels.functional.experts.ExpertGroup.exchange`."""
        recipe = spec.recipe if isinstance(spec.recipe, Fp8Block) else None
        experts, K = len(weights.w1) * self.size, routing.idx.shape[-1]
        dispatcher = self._dispatcher(_Key(experts, K, spec.backend, recipe))
        received = dispatcher.dispatch(x_TD, *routing)
        with received.saving():
            out_ND = grouped_mlp(
                received.rows_ND,
                weights,
                received.plan,
                spec,
                overlap=received.overlap,
                fp8_inputs=received.fp8_inputs,
            )
        return dispatcher.combine(out_ND, received)

    def overflowed(self) -> bool:
        """True if a layer of any rank lacked rows since the last call, for which the host waits."""
        return self.budget.exceeded(self.budget.record(self.group).tolist())

    def grow(self) -> None:
        """Enlarge the budget after an overflow, for the same step; recapture graphs."""
        if any(growth.between_nodes for growth in self.budget.grow()):
            self.connections.release()  # their buffers have the size of a node's blocks

    def begin(self) -> None:
        """Order the buffers of exchanges: the first thing that a CUDA graph captures."""
        self.connections.begin()

    def release(self) -> None:
        """Free the memory that ranks share, before the process groups are destroyed."""
        self.connections.release()

    def _dispatcher(self, key: _Key) -> Dispatcher:
        if key not in self._dispatchers:
            quantizes = key.recipe is not None
            sms = sms_of(self._comm_sms, self.transport, key.backend, quantizes)
            self._dispatchers[key] = make_dispatcher(
                self.transport,
                group=self.group if self.size > 1 else None,
                experts=key.experts,
                slots=TokenChoices(key.top_k, key.top_k),
                budget=self.budget,
                backend=key.backend,
                symm=SymmOptions(comm_sms=sms, timeout=self._timeout),
                recipe=key.recipe,
                connections=self.connections,
            )
        return self._dispatchers[key]


class ExpertParallelMoE(ExpertModule):
    """The experts of an MoE layer over the ranks of a group; each rank has L of them.

    Sums and parameters are those of `kernels.api.GroupedMLP`, with L experts. Gradients are those
    of the tokens of all ranks of the group, and are not to be averaged over it.

    Args:
        activation: its kind, or with constants an `Activation`.
        device, dtype: of the parameters.

    Raises:
        ValueError: invalid sizes, or an unknown activation or recipe.
    """

    group: ExpertParallelGroup

    def __init__(
        self,
        group: ExpertParallelGroup,
        experts: int,
        hidden: int,
        ffn: int,
        top_k: int,
        activation: str | Activation = "swiglu",
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Unpack[KernelOptions],
    ) -> None:
        if not isinstance(group, ExpertParallelGroup):
            raise ValueError(f"group must be an ExpertParallelGroup, not {type(group).__name__}")
        sizes = dict(experts=experts, hidden=hidden, ffn=ffn, top_k=top_k)
        where = dict(device=device, dtype=dtype)
        super().__init__(sizes, activation, bias, where, dict(options), group)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, transport={self.group.transport.name}"
