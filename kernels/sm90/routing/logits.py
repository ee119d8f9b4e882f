"""Rows of router logits in the registers of a warp, their keys, and routing probabilities.

Shared by the kernels `topk` and `topk_backward`: one warp a token, four successive logits of every
128 a lane. All arithmetic is fp32, whatever the logits are.

`topk` ranks experts by keys: fp32 numbers as unsigned integers in the same order. A maximum over a
warp is one instruction for integers, and a key with the complement of the expert in its low word
breaks ties in the comparison (`pair`).

Group-limited routing (DeepSeek-V3, arXiv 2412.19437, section 2.1.2) ranks groups of experts by the
sum of their best one or two scores, and only experts of the best groups keep their scores. Every
lane puts the two best keys of each of its vectors, which are of one group, into shared memory; lane
g collects those of group g, and counts the groups better than itself. Ties go to the lower group.

Legend: T tokens, E experts, K experts per token.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, Uint64

from phalanx.kernels.limits import TOPK_EXPERTS as MAX_EXPERTS
from phalanx.kernels.limits import TOPK_GROUP_SCORES as MAX_BEST
from phalanx.kernels.limits import TOPK_GROUP_STEP
from phalanx.kernels.limits import TOPK_GROUPS as MAX_GROUPS
from phalanx.kernels.limits import TOPK_SLOTS as MAX_SLOTS
from phalanx.kernels.sm90.jit.ptx import unpack

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
        # 64 bits: T * E may exceed 2^31. E is a multiple of 8, so that rows begin at whole vectors.
        first = Int64(token) * (experts >> 2) * words_of(config)
        return Logits(config, logits + first, experts)

    def expert(self, v: int) -> Int32:
        return (v * LANES + cute.arch.lane_idx()) * FOUR

    def vector(self, v: int) -> cute.Tensor:
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


_SIGN = 0x80000000
ALL_BITS = 0xFFFFFFFF


def key_of(x: Float32) -> Uint32:
    """Key of x, above 0; equal for both zeros. The rank of a NaN is not specified."""
    # -0 + 0 is +0: one key for both zeros. Numbers with a sign are reversed, others moved above.
    bits = as_bits(x + Float32(0))
    return Uint32(
        cutlass.select_(bits >= Uint32(_SIGN), Uint32(ALL_BITS) - bits, bits + Uint32(_SIGN))
    )


def bits_of(key: Uint32) -> Uint32:
    """Bits of the fp32 number of a key."""
    bits = cutlass.select_(key >= Uint32(_SIGN), key - Uint32(_SIGN), Uint32(ALL_BITS) - key)
    return Uint32(bits)


def larger(a: Uint32, b: Uint32) -> Uint32:
    """Maximum of two keys."""
    # cutlass.max compares with a sign if its first argument is a constant.
    return Uint32(cutlass.select_(a > b, a, b))


def smaller(a: Uint32, b: Uint32) -> Uint32:
    """Minimum of two keys."""
    return Uint32(cutlass.select_(a > b, b, a))


def pair(key: Uint32, expert: Int32) -> Uint64:
    """Key and expert in one integer: of equal keys the lower expert is larger."""
    return (Uint64(key) << 32) + Uint64(Uint32(ALL_BITS) - Uint32(expert))


MINUS_INFINITY = 0x007FFFFF  # key of -inf, the score of an expert whose group is not chosen
_LOW = 0xFFFFFFFF


@cute.jit
def keep_best_groups(
    groups: ExpertGroups, row: Logits, keys: cute.Tensor, best: cute.Tensor
) -> None:
    """Overwrite the keys of experts in groups that are not chosen by that of -inf. `row` gives the
    experts of this lane's keys [4, vectors], in registers, 0 past the last expert. `best` is shared
    memory of the warp, a Uint64 for each vector of each lane; overwritten."""
    _store_best(keys, best)
    # Lane g has the score of group g, as a key.
    score = _group_key(groups, best)
    lane, rank = cute.arch.lane_idx(), Int32(0)
    for g in cutlass.range_constexpr(groups.number):
        # Every lane compares with every group in turn: no barrier, and no sort.
        other = cute.arch.shuffle_sync(score, g)
        # Ranks are distinct, as ties go to the lower group: exactly `chosen` groups are chosen.
        if other > score:
            rank += 1
        if other == score and lane > g:
            rank += 1
    chosen = Uint32(cute.arch.vote_ballot_sync(lane < groups.number and rank < groups.chosen))
    for v in cutlass.range_constexpr(row.config.vectors):
        # Experts that are excluded score -inf; 0 is for places without an expert.
        group = Uint32(row.expert(v)) // Uint32(groups.size)
        if row.expert(v) < row.experts and (chosen >> group) % 2 == 0:
            for i in cutlass.range_constexpr(FOUR):
                keys[i, v] = Uint32(MINUS_INFINITY)


@cute.jit
def _store_best(keys: cute.Tensor, best: cute.Tensor) -> None:
    lane = cute.arch.lane_idx()
    for v in cutlass.range_constexpr(keys.shape[1]):
        first, second = keys[0, v], Uint32(0)
        for i in cutlass.range_constexpr(1, FOUR):
            # Both from the old `first`: what a larger key displaces may be the second best.
            first, second = larger(first, keys[i, v]), larger(second, smaller(first, keys[i, v]))
        best[v * LANES + lane] = (Uint64(first) << 32) + Uint64(second)
    cute.arch.sync_warp()  # before `_group_key` reads other lanes' pairs


@cute.jit
def _group_key(groups: ExpertGroups, best: cute.Tensor) -> Uint32:
    lane, vectors = cute.arch.lane_idx(), groups.size // FOUR
    first, second, key = Uint32(0), Uint32(0), Uint32(0)
    if lane < groups.number:
        for j in cutlass.range_constexpr(vectors):
            # Groups lie a power of two apart for most sizes: starting each lane at another vector
            # of its group spreads the lanes over the banks.
            pair = best[lane * vectors + (lane + j) % vectors]
            high, low = Uint32(pair >> 32), Uint32(pair & Uint64(_LOW))
            second = larger(smaller(first, high), larger(second, low))
            first = larger(first, high)
        # Scores are added as numbers, then compared as keys again.
        key = first
        if cutlass.const_expr(groups.best == MAX_BEST):
            key = key_of(as_float(bits_of(first)) + as_float(bits_of(second)))
    return key
