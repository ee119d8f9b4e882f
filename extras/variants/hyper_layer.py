"""The layer with hyper-connections in place of residuals.

The first layer makes n equal streams of its input, and the last one hands on their mean, so that
embedding, final norm and loss stay as they are. Between layers streams lie side by side in the
channels.

Legend: s positions of this rank, B sequences, T = s * B, n streams, D hidden, C = n * D.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from phalanx.extras.variants.hyper_connections import HyperConnection, write
from phalanx.moe.layer import MoE
from phalanx.moe.model.dense_mlp import DenseMLP
from phalanx.moe.model.transformer_layer import Layer, fork
from phalanx.parallel.memory.layer_context import LayerContext


class HyperLayer(Layer):
    """`moe.model.transformer_layer.Layer` with n residual streams.

    Args: those of Layer, and `size`, which is n.
    """

    def __init__(self, *args: Any, size: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.streams = size
        self.attention_hyper = HyperConnection(self.config, size)
        self.mlp_hyper = HyperConnection(self.config, size)

    def _forward(
        self, attend: Callable[[Tensor], Any], memory: LayerContext, hidden: Tensor
    ) -> Tensor:
        """Streams after the layer [s, B, C]; the first takes and the last returns [s, B, D]."""
        shape, n = hidden.shape[:2], self.streams
        if self.layer_number == 1:
            x_TnD = hidden.flatten(0, 1)[:, None].expand(-1, n, -1).contiguous()
        else:
            x_TnD = hidden.view(-1, n, self.config.hidden_size)

        in_TD, *how = self.attention_hyper(x_TnD)
        normed, _ = fork(self.input_layernorm, in_TD.unflatten(0, shape))
        out, bias = attend(normed)
        memory.close(out)
        out = out if bias is None else out + bias
        x_TnD = write(x_TnD, out.flatten(0, 1), *how)

        in_TD, *how = self.mlp_hyper(x_TnD)
        normed, _ = fork(self.pre_mlp_layernorm, in_TD.unflatten(0, shape))
        own = isinstance(self.mlp, MoE | DenseMLP)
        out, bias = self.mlp(normed, memory=memory) if own else self.mlp(normed)
        out = out if bias is None else out + bias
        x_TnD = write(x_TnD, out.flatten(0, 1), *how)

        if self.layer_number == self.config.num_layers:
            return x_TnD.mean(1).unflatten(0, shape)
        return x_TnD.flatten(1).unflatten(0, shape)
