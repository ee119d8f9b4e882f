"""The sequences of a micro-batch packed into one, whose documents do not attend to each other.

Megatron-Core passes it through model, layers and recomputation as its `packed_seq_params`; the
fields that select its variable-length format stay empty, so that hidden states keep their shape
[T, 1, D]. Variable-length kernels and rotary angles by position need no more than one sequence, as
which the tokens [B, S] already lie in memory.

Everything is on the device, of static size, and follows from the positions alone: a step can be
captured in a CUDA graph (`kernels.core_attention.documents`).

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

    documents: Any = None  # `Documents` of full sequences, for core attention
    sequences: int = 1  # number of sequences, B
    position_T: Any = None  # position of each token in its piece of a document, int64
    whole_BS: Any = None
    """Positions of full sequences, int64, with tokens of other context ranks, for linear attention.
    """
    last_T: Any = None
    """bool, last tokens of pieces, for `parallel.megatron.patches.shift_within_documents`."""

    of_chunks: dict[Any, Documents] = field(default_factory=dict)  # of `extras.context.keys`

    def angles(self, freqs_S11F: Tensor) -> Tensor:
        """Rotary angles [T, 1, 1, F] of the tokens, from those of all positions of a sequence."""
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
        position_BS: int64, position of each token in its piece of a document; 0 at the start of
            every sequence.
        places: most documents of a sequence, if attention needs their bounds; else 0.
        ranks: number of context ranks that share the sequences.
        whole_BS: positions of the full sequences, if ranks share sequences.
        last_BS: bool, tokens that end a piece, if ranks share sequences; one rank's positions do
            not determine them.
    """
    B, S = position_BS.shape
    whole_BS = position_BS if whole_BS is None else whole_BS
    documents = Documents(whole_BS.reshape(-1), places=B * places, longest=S * ranks)
    return Packed(
        max_seqlen_q=S * ranks,
        max_seqlen_kv=S * ranks,
        documents=documents,
        sequences=B,
        position_T=position_BS.reshape(-1),
        whole_BS=whole_BS,
        last_T=documents.last_T if last_BS is None else last_BS.reshape(-1),
    )
