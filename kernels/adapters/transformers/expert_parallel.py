"""Expert parallelism of transformers over the exchange of this project.

    from_pretrained(..., distributed_config=DistributedConfig(
        ep_size=8, fsdp_size=8, ep_implementation="phalanx_symm"))

Ranks of a group exchange tokens within kernels over NVLink, on gloo by all-to-all. Nothing is read
on the host, and room is reserved for every row that could arrive. Every rank of the group has as
many tokens as any other in every call. With less room,

    EPImplementationInterface.register("small", partial(SymmEP, capacity_factor=1.5))

registers an implementation of which `phalanx.adapters.transformers.groups()` tell when tokens were
dropped (`overflowed`), so that the training loop reruns the step after `grow`.

Legend: T tokens of a rank, K experts per token, D hidden.
"""

from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers.distributed.expert_parallel import EPImplementation

from phalanx.adapters.expert_groups import group_of
from phalanx.adapters.transformers.experts import options_of, weights_of
from phalanx.kernels import api
from phalanx.kernels.api import TopK

EP_NAME = "phalanx_symm"  # value of `ep_implementation`


class SymmEP(EPImplementation):
    """One layer's experts over the ranks of the expert-parallel mesh.

    Args:
        tp_mesh: ranks that have the same tokens; each exchanges a part of them.
        capacity_factor: as for `ExpertParallelGroup`, the same in all layers.

    Raises:
        ValueError: experts of a kind that the kernels do not compute, ranks between which the
            exchange cannot run, or another capacity than that of their exchange.
    """

    def __init__(
        self,
        experts: Any,
        ep_mesh: DeviceMesh,
        tp_mesh: DeviceMesh,
        capacity_factor: float | None = None,
    ) -> None:
        super().__init__(experts, ep_mesh, tp_mesh)
        options_of(experts)  # refuses experts before anything is loaded
        self._experts = experts
        self._group = group_of(ep_mesh.get_group(), experts.down_proj.dtype, capacity_factor)

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """[T, D] weighted sum of each token's experts, of all ranks; collective over the mesh.

        `top_k_index` [T, K] has ids of experts of all ranks. ValueError if T is no multiple of the
        ranks that have the same tokens.
        """
        mesh, tokens = self.tp_mesh, hidden_states.shape[0]
        if tokens % mesh.size():
            raise ValueError(
                f"{tokens} tokens cannot be shared by tp_size={mesh.size()}: pad sequences to a "
                "multiple"
            )
        parts: Any = [hidden_states, top_k_index, top_k_weights]
        if mesh.size() > 1:
            parts = [
                DTensor.from_local(part, mesh, [Replicate()], run_check=False)
                .redistribute(mesh, [Shard(0)])
                .to_local()
                for part in parts
            ]
        (x, *choices), own = parts, self._experts
        out = api.experts(x, TopK(*choices), weights_of(own), options_of(own), self._group)
        if mesh.size() > 1:
            out = DTensor.from_local(out, mesh, [Shard(0)], run_check=False).full_tensor()
        return out
