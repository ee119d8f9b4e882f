"""The experts in models of Megatron-Core: layer specifications.

    python pretrain_gpt.py ... --spec phalanx.adapters.megatron spec

    provider.transformer_layer_spec = phalanx.adapters.megatron.spec     # Megatron-Bridge

`spec` keeps Megatron-Core's router and dispatcher, and replaces the experts; `symm_spec` replaces
the dispatcher too: tokens are exchanged within kernels, and no count is read on the host.
`block_spec` is for scripts that build specifications themselves, as for multi-token prediction.
"""

from phalanx.adapters.expert_groups import groups, release
from phalanx.adapters.megatron.experts import Experts
from phalanx.adapters.megatron.specs import SymmMoELayer, block_spec, spec, symm_spec

__all__ = ["Experts", "SymmMoELayer", "block_spec", "groups", "release", "spec", "symm_spec"]
