"""QK-clip (Kimi K2, arXiv 2507.20534, section 2.1): heads whose logits are too large are rescaled.

After the update of a step, the query and key weights of each head whose largest logit exceeded the
limit in that step are multiplied so that its logits change by gamma = limit / largest. Weights that
heads share are not changed, so that each head is clipped by its own gamma and no other head is:

- heads that do not share their key: query and key by sqrt(gamma);
- heads that share their key (grouped queries): the query by gamma, which is the paper's rule for
  the rotary part that all keys of latent attention share;
- latent attention: query and key without position by sqrt(gamma), the rotary part of the query by
  gamma.

Biases of queries and keys are multiplied with their weights; a logit is linear in both together. A
norm of queries and keys after their projection would undo the clip: configs.validate rejects it.

Shape legend: L layers, H query heads, G key-value heads, R = H / G, rows of a projection.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from phalanx.moe.model.max_logits import MaxLogits, attention_layers
from phalanx.moe.router.balance import layer_index


class QKClip:
    """Factors by which the parameters of this rank are multiplied after an update.

    Args:
        chunks: model chunks of this rank, wrapped or not.
        pg: the `tp` group splits the rows of projections.
        tops: the largest logits of a step.
        limit: tau, the largest logit allowed.
    """

    def __init__(
        self,
        chunks: Sequence[torch.nn.Module],
        config: TransformerConfig,
        pg: ProcessGroupCollection,
        tops: MaxLogits,
        limit: float,
    ) -> None:
        self._config, self._tops, self._limit = config, tops, limit
        self.parameters: list[Tensor] = []
        self._positions: list[tuple[str, int, slice]] = []
        """Projection, layer, and this rank's rows within those of all ranks, by parameter."""
        for layer in attention_layers(chunks):
            for name, parameter in _projections(layer.self_attention):
                rows = parameter.size(0)
                local = slice(pg.tp.rank() * rows, (pg.tp.rank() + 1) * rows)
                self.parameters.append(parameter)
                self._positions.append((name, layer_index(layer, config), local))

    def factors(self) -> list[Tensor] | None:
        """fp32 factors of the rows of each of `parameters`; None if the step measured no logits.

        They are 1 where nothing is clipped. No host read.
        """
        if not self._tops.measured:
            return None
        gamma_LH = clip_factors(self._tops.most_LH, self._limit)
        row_factors = _latent_rows if self._config.multi_latent_attention else _grouped_rows
        tables = row_factors(gamma_LH, self._config)
        return [tables[name][layer, local] for name, layer, local in self._positions]


def clip_factors(most_LH: Tensor, limit: float) -> Tensor:
    """Gamma of each head: limit / largest logit where that is above the limit, else 1."""
    return torch.where(most_LH > limit, limit / most_LH, 1.0)


def _projections(attention: Any) -> Iterator[tuple[str, Tensor]]:
    for name in ("linear_qkv", "linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj"):
        projection = getattr(attention, name, None)
        for parameter in () if projection is None else (projection.weight, projection.bias):
            if parameter is not None:
                yield name, parameter


def _grouped_rows(gamma_LH: Tensor, config: Any) -> dict[str, Tensor]:
    """[L, rows]: a group has R query heads, their R gates if any, its key and its value."""
    L, G, channels = gamma_LH.size(0), config.num_query_groups, config.kv_channels
    query_LGR = gamma_LH.view(L, G, -1)
    gates_LGR = torch.ones_like(query_LGR if config.attention_output_gate else query_LGR[..., :0])
    value_LG1 = torch.ones_like(query_LGR[..., :1])
    key_LG1 = value_LG1
    if query_LGR.size(-1) == 1:
        query_LGR = key_LG1 = query_LGR.sqrt()
    mixed = torch.cat((query_LGR, gates_LGR, key_LG1, value_LG1), -1)
    return {"linear_qkv": _spread(mixed, channels).flatten(1)}


def _latent_rows(gamma_LH: Tensor, config: Any) -> dict[str, Tensor]:
    """[L, rows]: a head has its part without position, then the rotary part, or the value."""
    root = _spread(gamma_LH.sqrt(), config.qk_head_dim)
    query = torch.cat((root, _spread(gamma_LH, config.qk_pos_emb_head_dim)), -1)
    value = _spread(torch.ones_like(gamma_LH), config.v_head_dim)
    rows = query.flatten(1)
    return {
        "linear_q_proj": rows,
        "linear_q_up_proj": rows,
        "linear_kv_up_proj": torch.cat((root, value), -1).flatten(1),
    }


def _spread(factor: Tensor, channels: int) -> Tensor:
    return factor[..., None].expand(*factor.shape, channels)
