"""Core attention of ranks that share sequences, over gathered keys and values of whole sequences.

Shape legend: S positions of this rank, T keys, B batch, H query heads, G key-value heads,
d channels of query and key, v channels of value.
"""

import torch
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

from phalanx.extras.context.exchange import dealt
from phalanx.kernels.core_attention.documents import Documents
from phalanx.moe.model.attention import CoreAttention
from phalanx.moe.model.packed import Packed


class GatheredKeys(CoreAttention):
    """A rank attends with its two chunks of queries (Llama 3, arXiv 2407.21783, section 3.3.2)."""

    def _attend_packed(
        self,
        q_SBHd: torch.Tensor,
        k_SBGd: torch.Tensor,
        v_SBGv: torch.Tensor,
        packed: Packed | None,
    ) -> torch.Tensor:
        """This rank's queries against the keys of all context ranks.

        A chunk attends the gathered keys from the start of its window to its own end: causal
        attention with fewer queries than keys. Packed sequences are concatenated along S.
        """
        ranks, rank = self.cp_group.size(), self.cp_group.rank()
        sequences = 1 if packed is None else packed.sequences
        size, k_width = q_SBHd.size(0) // (2 * sequences), k_SBGd.size(-1)
        kv = gather_from_sequence_parallel_region(
            torch.cat([k_SBGd, v_SBGv], -1), group=self.cp_group
        )
        kv_chunks, q_chunks, outputs = kv.split(size), q_SBHd.split(size), []
        order = dealt(ranks)
        places = [divmod(order.index(chunk), 2) for chunk in range(2 * ranks)]
        for sequence in range(sequences):
            kv = torch.cat([kv_chunks[2 * (r * sequences + sequence) + i] for r, i in places])
            k_TBGd, v_TBGv = kv[..., :k_width], kv[..., k_width:]
            for i, chunk in enumerate((rank, 2 * ranks - 1 - rank)):
                start, end = chunk * size, (chunk + 1) * size
                first_key = max(0, start - self.window + 1) if self.window else 0
                documents = packed and _of_chunk(packed, sequence, i, start - first_key)
                keys, values = k_TBGd[first_key:end], v_TBGv[first_key:end]
                outputs.append(self._attend(q_chunks[2 * sequence + i], keys, values, documents))
        return torch.cat(outputs)


def _of_chunk(packed: Packed, sequence: int, chunk: int, before: int) -> Documents:
    """Documents of a sequence's chunk 0 or 1 on this rank, which attends to `before` keys too."""
    key, made = (sequence, chunk, before), packed.of_chunks
    if key not in made:
        position_S = packed.position_T.view(packed.sequences, 2, -1)[sequence, chunk]
        longest = packed.max_seqlen_q
        made[key] = Documents(position_S, places=0, longest=longest, before=before)
    return made[key]
