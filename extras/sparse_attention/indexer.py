"""The lightning indexer of a layer: projections of its queries, keys and weights of heads.

Its inputs are cut off from the gradient, as in the paper: it learns from its own loss alone.
transformers leaves out the Hadamard transform of queries and keys that DeepSeek's code has for
FP8: it is orthogonal and changes no product. So does this.

Shape legend: S positions, B batch, D hidden, q rank of the query latent, J heads and e channels.
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.module import MegatronModule
from torch import Tensor, nn

from phalanx.extras.sparse_attention.options import SparseOptions
from phalanx.kernels.core_attention.rope import rope

_EPS = 1e-6  # of the norm of keys


class Indexer(MegatronModule):
    """Queries of the latent of attention's queries, and one key a token, both rotated in part.

    Args:
        config: Megatron-Core's, of a model with latent attention.
        sparse: heads, channels and the layout of rotated pairs.
    """

    def __init__(self, config: Any, sparse: SparseOptions) -> None:
        super().__init__(config=config)
        self.heads, self.interleaved = sparse.heads, sparse.interleaved
        device = torch.cuda.current_device()
        own: dict[str, Any] = dict(dtype=config.params_dtype, device=device)
        linear: Any = partial(nn.Linear, bias=False, **own)
        self.query = linear(config.q_lora_rank, sparse.heads * sparse.dim)
        self.key = linear(config.hidden_size, sparse.dim)
        self.key_norm = nn.LayerNorm(sparse.dim, eps=_EPS, **own)
        self.weights = linear(config.hidden_size, sparse.heads)
        self.factor = (sparse.heads * sparse.dim) ** -0.5

    def forward(
        self, hidden_SBD: Tensor, latent_SBq: Tensor, freqs_S11F: Tensor, mscale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [S, B, J, e] and keys [S, B, e] in the dtype of the inputs, weights [S, B, J].

        Args:
            latent_SBq: normalised latent of attention's queries.
            freqs_S11F, mscale: angles of attention, as `kernels.core_attention.rope` has them.
        """
        hidden_SBD, latent_SBq = hidden_SBD.detach(), latent_SBq.detach()
        turn = partial(rope, freqs_S11F=freqs_S11F, mscale=mscale, interleaved=self.interleaved)
        q_SBJe = turn(self.query(latent_SBq).unflatten(-1, (self.heads, -1)))
        k = self.key(hidden_SBD)
        k = F.layer_norm(k, k.shape[-1:], self.key_norm.weight, self.key_norm.bias, _EPS)
        w_SBJ = self.weights(hidden_SBD).float() * self.factor
        return q_SBJe, turn(k[:, :, None]).squeeze(2), w_SBJ
