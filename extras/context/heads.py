"""Core attention of ranks that share sequences, with some of the heads of whole sequences.

Every rank has the same work, whatever documents a sequence holds, and kernels see whole sequences:
windows, sinks and bounds of documents are those of one rank.

Shape legend: S positions of this rank, T of a whole sequence, N sequences, B batch (with packed
documents 1, and N sequences lie along S), H query heads, G key-value heads, d channels of query and
key, v channels of value, R context ranks.
"""

from torch import Tensor

from phalanx.extras.context.exchange import own_heads, own_tokens, whole_sequences
from phalanx.kernels.core_attention.core import attention
from phalanx.kernels.core_attention.max_logit import MaxLogit
from phalanx.moe.model.attention import CoreAttention
from phalanx.moe.model.max_logits import active_max_logit
from phalanx.moe.model.packed import Packed


class SharedHeads(CoreAttention):
    """Context ranks share out the heads of a tensor rank.

    R divides H, and G or is a multiple of it: then R / G ranks have the same keys and values, and
    the sum of their gradients is that of the head.
    """

    def _attend_packed(
        self, q_SBHd: Tensor, k_SBGd: Tensor, v_SBGv: Tensor, packed: Packed | None
    ) -> Tensor:
        group = self.cp_group
        ranks = group.size()
        batch, groups = k_SBGd.shape[1:3]
        if ranks > groups:
            k_SBGd, v_SBGv = (x.repeat_interleave(ranks // groups, 2) for x in (k_SBGd, v_SBGv))
        sequences = batch if packed is None else packed.sequences
        parts = [
            x.flatten(2).transpose(0, 1).reshape(sequences, -1, x.shape[2] * x.shape[3])
            for x in (q_SBHd, k_SBGd, v_SBGv)
        ]
        sections = [part.shape[-1] for part in parts]
        mixed_NTc = whole_sequences(parts, group)
        mixed_BTc = mixed_NTc.reshape(batch, -1, mixed_NTc.shape[-1])
        q, k, v = (
            part.unflatten(-1, (-1, x.shape[-1])).transpose(1, 2)
            for part, x in zip(
                mixed_BTc.split([c // ranks for c in sections], -1),
                (q_SBHd, k_SBGd, v_SBGv),
                strict=True,
            )
        )
        o_BHTv = attention(
            q,
            k,
            v,
            scale=self.scale,
            window=self.window,
            sinks_H=self._own_sinks(),
            documents=None if packed is None else packed.documents,
            top=self._own_max_logit(),
            backend=self.backend,
        )
        out_NTc = o_BHTv.transpose(1, 2).reshape(sequences, -1, o_BHTv.shape[1] * v.shape[-1])
        out_BSC = own_tokens(out_NTc, group).reshape(batch, q_SBHd.shape[0], -1)
        return out_BSC.transpose(0, 1).contiguous()

    def _own_sinks(self) -> Tensor | None:
        sinks_H = self.softmax_offset
        return None if sinks_H is None else own_heads(sinks_H, [len(sinks_H)], self.cp_group)

    def _own_max_logit(self) -> MaxLogit | None:
        """The place of this rank's heads; the table is reduced over all ranks."""
        if (top := active_max_logit(self)) is None:
            return None
        most_H = top.most_H.chunk(self.cp_group.size())[self.cp_group.rank()]
        return MaxLogit(most_H, top.due)
