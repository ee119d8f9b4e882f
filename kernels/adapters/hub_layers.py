"""Layers for `kernelize` of Hugging Face's kernels: forward passes in place of transformers'.

`scripts/lab/release/build_hub_kernel.py` packs them as the `layers` of a kernel repository.
`kernelize` binds a forward pass of this file to the module that it replaces, so that `self` is that
module, with its own parameters and submodules, and the classes here have no state.

Legend: B sequences of S tokens, T tokens, K experts per token, D hidden.
"""

from typing import Any

from torch import Tensor, nn

from phalanx.adapters.transformers.experts import forward as experts_forward
from phalanx.adapters.transformers.modules import is_dispatched


class Experts(nn.Module):
    """The experts of a model of transformers, of any class that it dispatches.

    transformers names no layer for them: `kernels.replace_kernel_forward_from_hub(cls, "Experts")`
    does, for a class such as `Qwen3MoeExperts`.
    """

    can_torch_compile = True

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """[T, D] weighted sum of each token's experts, from ids and weights [T, K]."""
        return experts_forward(self, hidden_states, top_k_index, top_k_weights)


class MegaBlocksMoeMLP(nn.Module):
    """The MLP of GPT-OSS, by the name under which transformers looks for a kernel of it."""

    can_torch_compile = True

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """[B, S, D] outputs, and [T, K] weights of each token's experts.

        ValueError for experts that transformers does not dispatch, as those in MXFP4.
        """
        own: Any = self
        if not is_dispatched(own.experts):
            raise ValueError(
                f"{type(own.experts).__name__}: phalanx does not read weights of these experts: "
                "load the model in bf16"
            )
        x_TD = hidden_states.reshape(-1, hidden_states.shape[-1])
        _, score_TK, idx_TK = own.router(x_TD)
        out_TD = experts_forward(own.experts, x_TD, idx_TK, score_TK)
        return out_TD.view_as(hidden_states), score_TK
