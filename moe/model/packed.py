"""The sequences of a micro-batch as one, whose documents do not see each other.

Megatron-Core carries it through model, layers and recomputation as its `packed_seq_params`; the
fields that its variable-length format would be chosen by stay empty, so that hidden states keep
their [T, 1, D]. One sequence rather than several: variable-length kernels and rotary angles by
position need nothing else, and the tokens [B, S] are that already in memory.

Everything is on the device and of static size, and follows from the positions alone: a step that
packs is captured in a CUDA graph as any other (`kernels.core_attention.documents`).

Under context parallelism a rank has two chunks of each sequence, as Megatron-Core deals them.

Legend: B sequences of a micro-batch, S tokens of each on this rank, T = B * S.
"""

from dataclasses import dataclass, field
from typing import Any

from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from phalanx.kernels.core_attention.documents import Documents


@dataclass
class Packed(PackedSeqParams):
    """Documents of a micro-batch."""

    documents: Any = None
    """`Documents`, for core attention; None where context ranks share sequences."""
    sequences: int = 1
    """B."""
    position_T: Any = None
    """int64: of each token in its piece of a document."""
    whole_BS: Any = None
    """int64: the positions of whole sequences, those of other context ranks' tokens among them, for
    linear attention."""
    last_T: Any = None
    """bool: tokens behind which nothing of their document follows, for
    `parallel.megatron.patches.shift_within_documents`."""

    _of_chunks: dict[tuple[int, int, int], Documents] = field(default_factory=dict)

    def of_chunk(self, sequence: int, chunk: int, before: int) -> Documents:
        """The documents of one of this rank's two chunks of a sequence, for core attention, made
        once for all layers.

        Args:
            sequence: of the B.
            chunk: 0 or 1.
            before: keys before it that it attends to.
        """
        key = sequence, chunk, before
        if key not in self._of_chunks:
            position_S = self.position_T.view(self.sequences, 2, -1)[sequence, chunk]
            longest = self.max_seqlen_q
            self._of_chunks[key] = Documents(position_S, places=0, longest=longest, before=before)
        return self._of_chunks[key]

    def angles(self, freqs_S11F: Tensor) -> Tensor:
        """Rotary angles [T, 1, 1, F] of the tokens, from those of the positions of a sequence."""
        return freqs_S11F[self.position_T]


def packed(
    position_BS: Tensor,
    *,
    places: int,
    ranks: int = 1,
    whole_BS: Any = None,
    last_BS: Any = None,
) -> Packed:
    """The documents of a micro-batch.

    Args:
        position_BS: int64, of each token in its piece of a document; every sequence begins with 0.
        places: for documents of a sequence, where attention needs their bounds; else 0.
        ranks: that share the sequences.
        whole_BS: positions of all their tokens, if ranks share sequences.
        last_BS: bool: tokens that end a piece, if ranks share sequences; then a rank alone cannot
            tell.
    """
    B, S = position_BS.shape
    position_T = position_BS.reshape(-1)
    documents = Documents(position_T, places=B * places, longest=S) if ranks == 1 else None
    return Packed(
        max_seqlen_q=S * ranks,
        max_seqlen_kv=S * ranks,
        documents=documents,
        sequences=B,
        position_T=position_T,
        whole_BS=position_BS if whole_BS is None else whole_BS,
        last_T=last_BS.reshape(-1) if documents is None else documents.last_T,
    )
