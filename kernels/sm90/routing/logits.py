"""Rows of router logits in the registers of a warp, and the arithmetic of routing probabilities.

Shared by the kernels `topk` and `topk_backward`: one warp a token, four successive logits of every
128 a lane. All arithmetic is fp32, whatever the logits are.

Legend: T tokens, E experts, K experts per token.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from phalanx.kernels.sm90.jit.ptx import unpack
from phalanx.kernels.sm90_limits import TOPK_EXPERTS as MAX_EXPERTS
from phalanx.kernels.sm90_limits import TOPK_GROUP_SCORES as MAX_BEST
from phalanx.kernels.sm90_limits import TOPK_GROUP_STEP
from phalanx.kernels.sm90_limits import TOPK_GROUPS as MAX_GROUPS
from phalanx.kernels.sm90_limits import TOPK_SLOTS as MAX_SLOTS

WARPS = 8  # warps, and tokens, of a CTA
LANES = 32
FOUR = TOPK_GROUP_STEP  # logits of a vector; a lane holds every 32nd vector of its token's row
TINY = 1e-20  # added to the sum that normalises sigmoids
WEIGHTS = ("softmax", "softmax_all", "sigmoid", "sigmoid_sum")
"""Probabilities: softmax over the chosen or all logits, sigmoids plain or over their sum."""


@dataclass(frozen=True)
class ExpertGroups:
    """Groups of experts that limit a token's choice, by their best scores."""

    number: int  # 2 to 32
    size: int  # experts of a group, a multiple of 4: a vector of logits belongs to one group
    chosen: int  # number of groups that a token chooses from, fewer than all
    best: int  # number of a group's best scores that are added, 1 or 2

    def __post_init__(self) -> None:
        if not 2 <= self.number <= MAX_GROUPS or self.number * self.size > MAX_EXPERTS:
            raise ValueError(
                f"{self.number} groups of {self.size} experts: must be 2 to {MAX_GROUPS} groups "
                f"with at most {MAX_EXPERTS} experts in all"
            )
        if self.size < FOUR or self.size % FOUR:
            raise ValueError(f"groups of {self.size} experts: must be a multiple of {FOUR}")
        if not 1 <= self.chosen < self.number or not 1 <= self.best <= MAX_BEST:
            raise ValueError(
                f"{self.chosen} of {self.number} groups by the sum of {self.best} scores: must be "
                f"fewer than all, by 1 or {MAX_BEST}"
            )


@dataclass(frozen=True)
class TopkConfig:
    """Choices that are compiled into the kernels `topk` and `topk_backward`."""

    top_k: int
    vectors: int  # vectors of four logits that a lane holds: 1 for up to 128 experts, at most 4
    bf16: bool  # logits are bf16, not fp32
    weights: str  # one of `WEIGHTS`
    biased: bool = False  # choose by sigmoid plus bias, not by the logit
    groups: ExpertGroups | None = None
    """Choose by the sigmoid, plus bias if biased, from some groups alone; None from all experts."""

    def __post_init__(self) -> None:
        if not 1 <= self.top_k <= MAX_SLOTS:
            raise ValueError(f"top_k={self.top_k}: must be 1 to {MAX_SLOTS}")
        if not 1 <= self.vectors <= MAX_EXPERTS // (FOUR * LANES):
            raise ValueError(f"vectors={self.vectors}: more than {MAX_EXPERTS} experts")
        if self.weights not in WEIGHTS:
            raise ValueError(f"weights={self.weights}: must be one of {WEIGHTS}")
        if self.groups is not None and not self.weights.startswith("sigmoid"):
            raise ValueError(f"weights={self.weights}: with groups they must be sigmoids")

    @property
    def by_score(self) -> bool:
        """True if scores other than the logits are compared: the weights then reload the logits."""
        return self.biased or self.groups is not None


@dataclass(frozen=True)
class Logits:
    """A row of logits, for a warp: element i of vector v of lane l is expert 128 v + 4 l + i."""

    config: TopkConfig
    row: cute.Pointer  # pointer to the row, in words of 4 bytes
    experts: Int32

    @staticmethod
    def of(config: TopkConfig, logits: cute.Pointer, token: Int32, experts: Int32) -> "Logits":
        """Row of a token in logits [T, E]."""
        # 64 bits: T * E may exceed 2^31. E is a multiple of 8, so that rows begin at whole vectors.
        first = Int64(token) * (experts >> 2) * words_of(config)
        return Logits(config, logits + first, experts)

    def expert(self, v: int) -> Int32:
        """First expert of vector v of this lane."""
        return (v * LANES + cute.arch.lane_idx()) * FOUR

    def vector(self, v: int) -> cute.Tensor:
        """Vector v of this lane in memory, as words."""
        words = words_of(self.config)
        at = (v * LANES + cute.arch.lane_idx()) * words
        return cute.make_tensor(self.row + at, cute.make_layout(words))

    @cute.jit
    def load(self, absent: Float32) -> cute.Tensor:
        """Load all logits of this lane; `absent` past the last expert."""
        x = cute.make_rmem_tensor((FOUR, self.config.vectors), Float32)
        x.fill(absent)
        # Vectors are within the row or past it as a whole, as E is a multiple of four.
        for v in cutlass.range_constexpr(self.config.vectors):
            if self.expert(v) < self.experts:
                words = cute.make_rmem_tensor(words_of(self.config), Uint32)
                cute.autovec_copy(self.vector(v), words)
                for i in cutlass.range_constexpr(FOUR):
                    x[i, v] = self._value(words, i)
        return x

    @cute.jit
    def one(self, expert: Int32) -> Float32:
        """Load the logit of any expert of the row."""
        # Two bf16 share a word, the even expert in its lower half.
        if cutlass.const_expr(self.config.bf16):
            low, high = unpack(load_one(self.row + expert // 2))
            return Float32(cutlass.select_(expert % 2 == 0, low, high))
        else:
            return as_float(load_one(self.row + expert))

    def _value(self, words: cute.Tensor, i: int) -> Float32:
        return unpack(words[i // 2])[i % 2] if self.config.bf16 else as_float(words[i])


def words_of(config: TopkConfig) -> int:
    """Words of a vector of four logits."""
    return FOUR // 2 if config.bf16 else FOUR


@cute.jit
def sum_exp(row: Logits, x: cute.Tensor, largest: Float32) -> Float32:
    """This lane's sum of exp(x - largest)."""
    total = Float32(0)
    for v in cutlass.range_constexpr(row.config.vectors):
        if row.expert(v) < row.experts:
            for i in cutlass.range_constexpr(FOUR):
                total += cute.math.exp(x[i, v] - largest)
    return total


def sigmoid(x: Float32) -> Float32:
    """Sigmoid with the bits of torch's on the same GPU."""
    return Float32(1) / (Float32(1) + cute.math.exp(-x))


def warp_sum(x: Float32) -> Float32:
    """Sum of all lanes, in the same order for every lane and run."""
    # A butterfly: in each step both partners add the same two numbers, so that their bits agree.
    for step in (16, 8, 4, 2, 1):
        x = x + cute.arch.shuffle_sync_bfly(x, step)
    return x


def as_bits(x: Float32) -> Uint32:
    """Bits of an fp32."""
    return x.bitcast(Uint32)


def as_float(bits: Uint32) -> Float32:
    """The fp32 with these bits."""
    return bits.bitcast(Float32)


def load_one(pointer: cute.Pointer) -> Any:
    """Load the element at a pointer."""
    return cute.make_tensor(pointer, cute.make_layout(1))[0]


def store_one(pointer: cute.Pointer, value: Any) -> None:
    """Store an element at a pointer."""
    cute.make_tensor(pointer, cute.make_layout(1))[0] = value
