"""The sequences of a micro-batch as one, whose documents do not see each other.

Megatron-Core carries it through model, layers and recomputation as its `packed_seq_params`; the
fields that its variable-length format would be chosen by stay empty, so that hidden states keep
their [T, 1, D]. One sequence rather than several: variable-length kernels and rotary angles by
position need nothing else, and the tokens [B, S] are that already in memory.

Everything is on the device and of static size, and follows from the positions alone: a step that
packs is captured in a CUDA graph as any other (`kernels.attention.documents`).

Legend: B sequences of a micro-batch, S tokens of each, T = B * S.
"""

from dataclasses import dataclass
from typing import Any

from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from phalanx.kernels.attention.documents import Documents


@dataclass
class Packed(PackedSeqParams):
    """Documents of a micro-batch."""

    documents: Any = None
    """`Documents`, for core attention."""
    position_T: Any = None
    """int64: of each token in its piece of a document."""
    last_T: Any = None
    """bool: tokens behind which nothing of their document follows, for
    `parallel.megatron.patches.shift_within_documents`."""

    def angles(self, freqs_S11F: Tensor) -> Tensor:
        """Rotary angles [T, 1, 1, F] of the tokens, from those of the positions of a sequence."""
        return freqs_S11F[self.position_T]


def packed(position_BS: Tensor, *, places: int) -> Packed:
    """The documents of a micro-batch.

    Args:
        position_BS: int64, of each token in its piece of a document; every sequence begins with 0.
        places: for documents of a sequence, where attention needs their bounds; else 0.
    """
    B, S = position_BS.shape
    position_T = position_BS.reshape(-1)
    documents = Documents(position_T, places=B * places, longest=S)
    return Packed(
        max_seqlen_q=S,
        max_seqlen_kv=S,
        documents=documents,
        position_T=position_T,
        last_T=documents.last_T,
    )
