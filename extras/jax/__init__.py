"""The grouped MLP of JAX over the kernels for Hopper (experimental); imports no torch.

from phalanx.jax import grouped_mlp
"""

try:
    import jax as _jax  # noqa: F401
except ModuleNotFoundError:
    raise ModuleNotFoundError("phalanx.jax needs jax: pip install 'phalanx-moe[jax]'") from None

from phalanx.jax.grouped_mlp import Activation as Activation
from phalanx.jax.grouped_mlp import grouped_mlp as grouped_mlp
