"""The routing plan against a slow statement of it: loops over experts, rows and slots."""

import pytest
import torch
from torch import Tensor

from phalanx.kernels.expert_mlp.backend import rows_for
from phalanx.kernels.expert_mlp.expert_plan import ExpertPlan
from phalanx.kernels.routing.plan import make_plan


def slow_plan(
    idx: list[list[int]], prob: list[list[float]], first: int, local: int
) -> dict[str, list]:
    """All rows that the local experts need, in order, without a budget."""
    tokens, probs, offsets = [], [], [0]
    inverse = [[-1] * len(row) for row in idx]
    for expert in range(first, first + local):
        for n, row in enumerate(idx):
            for k, chosen in enumerate(row):
                if chosen == expert:
                    inverse[n][k] = len(tokens)
                    tokens.append(n)
                    probs.append(prob[n][k])
        offsets.append(len(tokens))
    return {"tokens": tokens, "probs": probs, "offsets": offsets, "inverse": inverse}


def routing(n: int, k: int, experts: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(n, experts, generator=generator)
    prob, idx = scores.topk(k, dim=1)
    return idx.to(torch.int32), prob


def test_unknown_backend_is_named() -> None:
    with pytest.raises(ValueError, match="kernels.backend=te .* kernels=torch"):
        make_plan(*routing(4, 2, 4), first_expert=0, local_experts=4, rows=8, backend="te")


def check(plan: ExpertPlan, idx: Tensor, prob: Tensor, first: int, local: int, rows: int) -> None:
    want = slow_plan(idx.tolist(), prob.tolist(), first, local)
    used = min(rows, len(want["tokens"]))
    assert plan.needed.tolist() == len(want["tokens"])
    assert plan.offsets.tolist() == [min(o, rows) for o in want["offsets"]]
    assert plan.row_index_S.tolist() == want["tokens"][:used] + [0] * (rows - used)
    assert plan.row_prob_S.tolist() == want["probs"][:used] + [0.0] * (rows - used)
    assert plan.inverse_NK.tolist() == [[s if s < rows else -1 for s in r] for r in want["inverse"]]
    for name in ("row_index_S", "offsets", "inverse_NK", "needed"):
        assert getattr(plan, name).dtype == torch.int32
    assert plan.row_prob_S.dtype == torch.float32


@pytest.mark.parametrize("rows", [1, 17, 60, 120, 300])
@pytest.mark.parametrize(("first", "local"), [(0, 12), (0, 4), (4, 4), (8, 4), (3, 1)])
def test_equals_the_slow_statement(first: int, local: int, rows: int) -> None:
    """All experts local, and slices of them; buffers too small, exact (120 pairs), too large."""
    idx, prob = routing(40, 3, 12)
    plan = make_plan(idx, prob, first_expert=first, local_experts=local, rows=rows)
    check(plan, idx, prob, first, local, rows)


@pytest.mark.parametrize(
    ("idx", "first", "local"),
    [
        pytest.param([[5, 6, 7], [7, 5, 6]], 0, 4, id="no local token"),
        pytest.param([[2, 9, 8]] * 20, 0, 4, id="all tokens to one expert"),
        pytest.param(
            [[0, 3, 9], [3, 0, 9], [9, 3, 0]], 0, 5, id="empty experts between and at the end"
        ),
        pytest.param([[0, 1, 2], [2, 1, 0], [1, 0, 2]], 0, 3, id="every token to every expert"),
        pytest.param([[-1, 1, -1], [-1, -1, -1]], 0, 3, id="slots without an expert"),
        pytest.param([[1, 1, 0], [0, 1, 1]], 0, 2, id="an expert twice in one token"),
        pytest.param([[300, 511, 256]] * 3, 256, 256, id="more experts than a byte counts"),
    ],
)
def test_corner_cases(idx: list[list[int]], first: int, local: int) -> None:
    idx_NK = torch.tensor(idx, dtype=torch.int32)
    prob_NK = torch.rand(idx_NK.shape, generator=torch.Generator().manual_seed(1))
    for rows in (1, 4, idx_NK.numel(), 80):
        plan = make_plan(idx_NK, prob_NK, first_expert=first, local_experts=local, rows=rows)
        check(plan, idx_NK, prob_NK, first, local, rows)


@pytest.mark.parametrize("rows", [9, 40, 90, 200])
def test_probability_gradient_comes_from_the_row_of_the_pair(rows: int) -> None:
    """A pair gets the gradient of its own row, and none if it is elsewhere or past the budget."""
    idx, prob = routing(30, 3, 8, seed=2)
    prob.requires_grad_()
    plan = make_plan(idx, prob, first_expert=2, local_experts=4, rows=rows)
    weight = torch.arange(1.0, rows + 1)
    used = min(rows, int(plan.needed))
    weight[used:] = float("nan")  # what a kernel leaves in the padding must not get through
    plan.row_prob_S.backward(weight)
    inverse = plan.inverse_NK.tolist()
    assert prob.grad is not None
    assert prob.grad.tolist() == [[float(s + 1) if s >= 0 else 0.0 for s in row] for row in inverse]
    assert sum(s >= 0 for row in inverse for s in row) == used


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"idx": torch.zeros(4, 2, dtype=torch.int64)}, "must be int32"),
        ({"prob": torch.zeros(4, 2, dtype=torch.bfloat16)}, "float32"),
        ({"prob": torch.zeros(4, 3)}, r"\[tokens, top_k\]"),
        ({"rows": 0}, "at least one row"),
        ({"local": 40000}, "holds 1 to"),
    ],
)
def test_bad_input_is_named(change: dict, message: str) -> None:
    given = {
        "idx": torch.zeros(4, 2, dtype=torch.int32),
        "prob": torch.zeros(4, 2),
        "rows": 8,
        "local": 2,
    }
    given |= change
    with pytest.raises(ValueError, match=message):
        make_plan(
            given["idx"],
            given["prob"],
            first_expert=0,
            local_experts=given["local"],
            rows=given["rows"],
        )


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("n", "k", "experts", "local", "rows"), [(64, 4, 16, 4, 128), (65536, 8, 256, 32, 98304)]
)
def test_gpu_equals_cpu_bit_for_bit(n: int, k: int, experts: int, local: int, rows: int) -> None:
    idx, prob = routing(n, k, experts, seed=3)
    results = []
    for device in ("cpu", "cuda"):
        leaf = prob.to(device, copy=True).requires_grad_()
        torch.cuda.set_sync_debug_mode("default")
        args = (idx.to(device), leaf)
        torch.cuda.set_sync_debug_mode("error")
        try:
            plan = make_plan(*args, first_expert=local, local_experts=local, rows=rows)
            plan.row_prob_S.square().sum().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        results.append([t.detach().cpu() for t in plan[:5]] + [leaf.grad.cpu()])
    for name, cpu, gpu in zip([*ExpertPlan._fields[:5], "grad"], *results, strict=True):
        assert torch.equal(cpu, gpu), name


def aligned(idx: Tensor, prob: Tensor, first: int, local: int, rows: int, align: int) -> dict:
    """The slow statement with every expert's rows padded, cut off at `rows`."""
    want = slow_plan(idx.tolist(), prob.tolist(), first, local)
    tokens, probs, offsets, place = [], [], [0], {}
    for e in range(local):
        for s in range(want["offsets"][e], want["offsets"][e + 1]):
            place[s] = len(tokens)
            tokens.append(want["tokens"][s])
            probs.append(want["probs"][s])
        missing = -len(tokens) % align
        tokens += [-1] * missing
        probs += [0.0] * missing
        offsets.append(len(tokens))
    kept = rows // align * align
    return {
        "needed": len(tokens),
        "tokens": tokens[:kept] + [-1] * (rows - len(tokens[:kept])),
        "probs": probs[:kept] + [0.0] * (rows - len(probs[:kept])),
        "offsets": [min(o, kept) for o in offsets],
        "inverse": [
            [place[s] if s in place and place[s] < kept else -1 for s in row]
            for row in want["inverse"]
        ],
    }


@pytest.mark.parametrize("rows", [256, 700, 1024, 4096])
@pytest.mark.parametrize(("first", "local"), [(0, 12), (4, 4), (3, 1)])
@pytest.mark.extras
def test_aligned_plans_equal_the_slow_statement(first: int, local: int, rows: int) -> None:
    idx, prob = routing(300, 3, 12)
    idx[7] = -1
    plan = make_plan(idx, prob, first_expert=first, local_experts=local, rows=rows, backend="cudnn")
    want = aligned(idx, prob, first, local, rows, 256)
    assert plan.needed.item() == want["needed"]
    assert plan.offsets.tolist() == want["offsets"]
    assert plan.row_index_S.tolist() == want["tokens"]
    assert plan.row_prob_S.tolist() == want["probs"]
    assert plan.inverse_NK.tolist() == want["inverse"]
    assert plan.offsets[1:].data_ptr() % 16 == 0


@pytest.mark.parametrize("local", [1, 5])
def test_rows_for_are_enough_for_any_routing(local: int) -> None:
    assert rows_for(120, local, "torch") == 120
    for pairs in (0, 1, 255, 256, 257, 1000):
        rows = rows_for(pairs, local, "cudnn")
        counts = [min(pairs, local - 1) and 1] * (local - 1)
        counts.append(pairs - sum(counts))
        assert sum(-(-n // 256) * 256 for n in counts) <= rows
        assert rows % 256 == 0
