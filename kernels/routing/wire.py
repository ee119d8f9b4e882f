"""Routing packed for the experts' ranks: one launch to pack and one to unpack.

Legend: T tokens of a rank, K slots of a token, R ranks, N = R * T received rows.
"""

import torch
from torch import Tensor

_PIECE = 4  # granularity in int32 of a rank's block of routing: 16 bytes


def routing_size(tokens: int, slots: int) -> int:
    """Number of int32 in a rank's block of routing."""
    return -(-2 * tokens * slots // _PIECE) * _PIECE


def pack_routing(
    idx_TK: Tensor, prob_TK: Tensor, *, ranks: int, local: int
) -> tuple[Tensor, Tensor]:
    """The routing that a rank sends to all others, and the rows of the sums that they return.

    Args:
        idx_TK: int32 expert ids, -1 for none; contiguous, as probabilities are.
        prob_TK: fp32.
        ranks: R.
        local: number of experts per rank.

    Returns:
        int32 [1, P]: ids, bits of the probabilities, and padding to 16 bytes, which is unspecified;
        int32 [T, R]: received row r * T + t of token t on each rank r that has one of its experts,
        else -1.
    """
    T, K = idx_TK.shape
    side = idx_TK.new_empty(1, routing_size(T, K))
    bits_TK = prob_TK.detach().view(torch.int32)
    if idx_TK.is_cuda:
        from phalanx.kernels.routing.wire_triton import pack

        rows_TR = idx_TK.new_empty(T, ranks)
        pack(idx_TK, bits_TK, side, rows_TR, local)
        return side, rows_TR
    torch.cat((idx_TK.flatten(), bits_TK.flatten()), out=side[0, : 2 * T * K])
    rank_TK = torch.where(idx_TK >= 0, idx_TK // local, -1)
    rank_R = torch.arange(ranks, dtype=torch.int32)
    row_TR = torch.arange(T, dtype=torch.int32)[:, None] + rank_R * T
    return side, torch.where((rank_TK[:, :, None] == rank_R).any(1), row_TR, -1)


def unpack_routing(blocks_RP: Tensor, tokens: int, slots: int) -> tuple[Tensor, Tensor]:
    """Ids int32 [N, K] and probabilities fp32 [N, K] of all ranks, packed by `pack_routing`."""
    R, pairs = blocks_RP.shape[0], tokens * slots
    idx_NK = blocks_RP.new_empty(R * tokens, slots)
    prob_NK = torch.empty_like(idx_NK, dtype=torch.float32)
    bits_NK = prob_NK.view(torch.int32)
    if blocks_RP.is_cuda:
        from phalanx.kernels.routing.wire_triton import unpack

        unpack(blocks_RP, idx_NK, bits_NK)
    else:
        idx_NK.view(R, -1).copy_(blocks_RP[:, :pairs])
        bits_NK.view(R, -1).copy_(blocks_RP[:, pairs : 2 * pairs])
    return idx_NK, prob_NK
