"""Token rounding: every expert's number of tokens becomes a multiple of a tile (arXiv 2512.14080).

The step between the choice of experts and their probabilities. A token is a candidate for its 2K
best experts (its K best when rounding down). No tile of a grouped GEMM is padded, and counts stay
within a tile of top-K routing. Counts are those of this rank's tokens: sums over ranks are
multiples too. Invariants: static shapes, no host read, deterministic on any device.

Legend: T tokens of this rank, E experts, K experts per token, C candidate experts per token.
"""

import torch
from torch import Tensor

from phalanx.configs.arithmetic.layers import candidates
from phalanx.configs.schema import RouterConfig
from phalanx.parallel.dispatcher.base import TokenChoices


def surplus(mode: str, tile: int) -> int:
    """Largest number of tokens that rounding adds to an expert."""
    return {"nearest": tile // 2, "up": tile - 1}.get(mode, 0)


def round_counts(count: Tensor, tile: int, mode: str) -> Tensor:
    """Integers rounded to multiples of `tile`; `nearest` rounds half to even, as torch.round."""
    tiles = count.div(tile, rounding_mode="floor")
    remainder = count - tiles * tile
    if mode == "up":
        tiles = tiles + (remainder > 0)
    if mode == "nearest":
        tiles = tiles + ((2 * remainder > tile) | ((2 * remainder == tile) & (tiles % 2 == 1)))
    return tiles * tile


def keep(
    idx_TC: Tensor, score_TC: Tensor, *, top_k: int, experts: int, tile: int, mode: str
) -> Tensor:
    """Mask of the candidates that their experts keep, bool [T, C].

    An expert keeps its first f' candidates, f' being its top-K count rounded by `mode` (`nearest`,
    `up` or `down`), or rounded down if it has too few candidates. Tokens that have the expert among
    their K best come first, and within both classes tokens of higher score; ties go to the lower
    token. `idx_TC` are int64 experts of each token, best first, distinct; a tile has `tile` rows.
    """
    T, C = idx_TC.shape
    expert, score = idx_TC.flatten(), score_TC.flatten()
    slot = torch.arange(C, device=expert.device).expand(T, C).flatten()
    # Two stable sorts, least significant first; flat order is by token.
    by_score = torch.sort(score, descending=True, stable=True).indices
    group = (2 * expert + (slot >= top_k)).index_select(0, by_score)
    group, order = torch.sort(group.to(torch.int32), stable=True)
    order = by_score.index_select(0, order)
    groups = torch.arange(2 * experts + 1, dtype=torch.int32, device=group.device)
    bound = torch.searchsorted(group, groups)
    start_E, middle_E, end_E = bound[:-1:2], bound[1::2], bound[2::2]
    count_E, candidates_E = middle_E - start_E, end_E - start_E
    kept_E = round_counts(count_E, tile, mode)
    kept_E = torch.where(kept_E <= candidates_E, kept_E, round_counts(count_E, tile, "down"))
    limit_E = start_E + kept_E
    position = torch.arange(T * C, device=group.device)
    kept = position < limit_E.index_select(0, group // 2)
    return torch.empty_like(kept).scatter_(0, order, kept).view(T, C)


def slots(options: RouterConfig, *, experts: int, top_k: int) -> TokenChoices:
    """Slots in a row of the router's expert ids."""
    grouped = dict(groups=options.groups, group_topk=options.group_topk)
    if options.rounding == "none":
        return TokenChoices(top_k, top_k, **grouped)
    reachable = options.group_topk * (experts // options.groups)
    width = candidates(options.rounding, top_k, reachable)
    extra = surplus(options.rounding, options.rounding_tile)
    return TokenChoices(top_k, width, extra, **grouped)
