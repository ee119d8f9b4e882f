"""Muon: one step against its statement, the same training on other layouts, checkpoints."""

import functools
import math
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from phalanx.configs.load import load
from tests.parallel.checkpoint.checkpoints import (
    assert_equal,
    build,
    checkpointer,
    save,
    stored,
    train,
)
from tests.parallel.checkpoint.checkpoints import load as load_into
from tests.support.distributed import run_distributed
from tests.support.scheduling import slow
from tests.support.training import Trained, trained

pytest.importorskip("emerging_optimizers")

SMALL = [
    *["run.device=cpu", "precision=fp32", "model.layers=2", "model.hidden=32"],
    *["model.vocab_size=64", "model.dense_ffn=48", "model.moe.ffn=16", "model.init_std=0.1"],
    *["data.sequence_length=16", "data.micro_batch=1", "data.global_batch=4"],
    *["optim.warmup_steps=0", "optim.schedule=constant", "optim.lr=2e-2"],
]
MUON = "optim.kind=muon"
GPT_OSS = ["model=tiny_gpt_oss", *SMALL, "model.attention.head_dim=8"]
DEEPSEEK = ["model=tiny_deepseek", *SMALL]

# --- one step -------------------------------------------------------------------------------------


def orthogonal(g: Tensor) -> Tensor:
    """Five Newton-Schulz iterations on [M, N], fp64."""
    if g.size(0) > g.size(1):
        return orthogonal(g.T).T
    x = g / g.norm()
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x


@pytest.mark.parametrize("shape", [(3, 8, 20), (3, 20, 8), (1, 16, 16)])
def test_stacks_become_orthogonal_as_matrices_do(shape: tuple[int, int, int]) -> None:
    from emerging_optimizers.orthogonalized_optimizers.muon_utils import newton_schulz

    from phalanx.extras.muon import optimizer as muon

    stack = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    stack[0] = 0
    found = muon.orthogonal(stack, 5, torch.float32, 0.3)
    want = torch.stack([stack[0].double(), *[0.3 * orthogonal(m.double()) for m in stack[1:]]])
    torch.testing.assert_close(found.double(), want, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found, 0.3 * newton_schulz(stack, 5, "simple"), rtol=1e-4, atol=1e-5)
    half = muon.orthogonal(stack, 5, torch.bfloat16, 0.3)
    assert half.dtype == torch.bfloat16 and found.is_contiguous() and half.is_contiguous()
    torch.testing.assert_close(half.double(), want, rtol=0, atol=0.04 * 0.3)


def test_bf16_errs_no_more_than_the_library_does() -> None:
    from emerging_optimizers.orthogonalized_optimizers.muon_utils import newton_schulz
    from emerging_optimizers.utils import fp32_matmul_precision

    from phalanx.extras.muon import optimizer as muon

    stack = torch.randn(2, 128, 256, generator=torch.Generator().manual_seed(2))
    stack[1] *= torch.logspace(0, -3, 128)[:, None]  # singular values of all sizes
    want = torch.stack([orthogonal(m.double()) for m in stack])
    with fp32_matmul_precision("medium"):
        theirs = newton_schulz(stack, 5, "simple").double()
    ours = muon.orthogonal(stack, 5, torch.bfloat16, 1.0).double()
    assert all((ours - want).norm(dim=(1, 2)) <= 1.25 * (theirs - want).norm(dim=(1, 2)))


def moved(name: str, w: Tensor, grads: list[Tensor], heads: tuple[int, int, int]) -> Tensor | None:
    """A weight after the steps, or None if AdamW has it. `heads`: queries, keys, channels."""
    if name.endswith((".w1", ".w2")):
        experts = [
            moved(f"linear_fc{name[-1]}.weight", w[i], [g[i] for g in grads], heads)
            for i in range(len(w))
        ]
        return torch.stack([e for e in experts if e is not None])
    if name.endswith("linear_fc1.weight"):
        rows = torch.arange(w.size(0)).chunk(2)
    elif name.endswith("linear_qkv.weight"):
        queries, keys, d = heads
        row = torch.arange(w.size(0)).view(keys, (queries // keys + 2), d)
        rows = tuple(r.flatten() for r in (row[:, :-2], row[:, -2], row[:, -1]))
    elif ("linear" in name and name.endswith("weight") and w.dim() == 2) or "eh_proj" in name:
        rows = (torch.arange(w.size(0)),)
    else:
        return None
    after = w.clone()
    for r in rows:
        buffer = torch.zeros_like(w[r])
        for g in grads:
            buffer = 0.95 * buffer + g[r]
            update = orthogonal(g[r] + 0.95 * buffer)
            scale = 0.2 * math.sqrt(max(update.shape))
            after[r] = (1 - 2e-2 * 0.1) * after[r] - 2e-2 * scale * update
    return after


def _steps(overrides: list[str]) -> dict[str, tuple[Tensor, list[Tensor], Tensor]]:
    """Values of each parameter before, clipped gradients of two steps, and values after."""
    from phalanx.parallel.runtime import start

    runtime = start(seed=1, timeout=60, deterministic=False)
    from phalanx.moe.run.setup import setup

    engine = setup(load(overrides), runtime).engine
    named = dict(engine.modules[0].named_parameters())
    found = {n: (p.detach().double(), [], p) for n, p in named.items()}
    for _ in range(2):
        engine.zero_grad()
        for p in named.values():
            p.main_grad.normal_()
        given = {n: p.main_grad.double() for n, p in named.items()}
        norm = engine.step()
        for n, (_, grads, _) in found.items():
            grads.append(given[n] * min(1.0, 1.0 / (norm + 1e-6)))
    return {n: (before, grads, p.detach().double()) for n, (before, grads, p) in found.items()}


def matrices_of(overrides: list[str]) -> dict[str, Any]:
    from phalanx.extras.muon.matrices import mark, of
    from tests.moe.model.test_features import built

    _, model = built(overrides)
    mark(model, model.config)
    return {name: of(p) for name, p in model.named_parameters() if "self_attention" in name}


def test_linear_attention_and_gates_are_matrices_of_their_own() -> None:
    more = ["model.linear_attention.full_attention_interval=2", "model.attention.kv_heads=2"]
    command = ["model=tiny_qwen3_next", *SMALL, "model.mtp_layers=0", *more]
    (found,) = run_distributed(matrices_of, 1, command)
    linear, full = (f"decoder.layers.{i}.self_attention" for i in (0, 1))
    inside = found[f"{linear}.in_proj.weight"]  # queries, keys, values, gates, beta, alpha
    assert (inside.groups, inside.rows) == (1, (256, 256, 512, 512, 4, 4))
    assert found[f"{linear}.out_proj.weight"].rows == (32,)
    for vector in ("A_log", "dt_bias", "conv1d.weight", "out_norm.weight"):
        assert found[f"{linear}.{vector}"] is None
    mixed = found[f"{full}.linear_qkv.weight"]  # two queries, their gates, a key, a value
    assert (mixed.groups, mixed.rows) == (2, (64, 64, 32, 32))


def check_steps(ours: dict[str, Any], adamw: dict[str, Any], heads: tuple[int, int, int]) -> None:
    by_muon = set()
    for name, (before, grads, after) in ours.items():
        expected = moved(name, before, grads, heads)
        if expected is None:
            assert torch.equal(after, adamw[name][2]), f"{name} is not as AdamW leaves it"
            continue
        by_muon.add(name.split(".", 3)[-1])
        error = (after - expected).norm() / (expected - before).norm()
        assert error < 2e-5, f"{name}: {error:.1e}"
    assert {"mlp.experts.w1", "mlp.experts.w2", "self_attention.linear_proj.weight"} <= by_muon
    assert not any("router" in n or "embedding" in n or "output_layer" in n for n in by_muon)


@functools.cache
def by_adamw(*model: str) -> dict[str, Any]:
    """`_steps` of AdamW."""
    return run_distributed(_steps, 1, list(model))[0]


@pytest.mark.parametrize("sharded", ["true", "false"])
@pytest.mark.parametrize(("model", "heads"), [(GPT_OSS, (8, 2, 8)), (DEEPSEEK, (0, 0, 0))])
def test_two_steps_against_a_statement_of_muon(
    model: list[str], heads: tuple[int, int, int], sharded: str
) -> None:
    """Fused projections by part, experts one by one; every other parameter by AdamW."""
    overrides = [*model, MUON, f"parallel.distributed_optimizer={sharded}"]
    (ours,) = run_distributed(_steps, 1, overrides)
    check_steps(ours, by_adamw(*model), heads)


SLICE = 12288
"""Elements of the largest matrix; the experts of a layer have more."""


def _steps_in_slices(overrides: list[str]) -> tuple[dict[str, Any], list[int]]:
    """`_steps`, and how many elements waited to be moved whenever momentum was made of some."""
    from phalanx.extras.muon import optimizer as muon

    waits, held = [0], list[int]()
    make, move = muon.momentum, muon.Muon._move

    def noted(grad: Tensor, *given: Any, **how: Any) -> Tensor:
        waits.append(waits[-1] + grad.numel())
        held.append(waits[-1])
        return make(grad, *given, **how)

    def moved_all(*given: Any) -> None:
        move(*given)
        waits.append(0)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(muon, "_SLICE", SLICE))
        stack.enter_context(mock.patch.object(muon, "momentum", noted))
        stack.enter_context(mock.patch.object(muon.Muon, "_move", moved_all))
        return _steps(overrides), held


def test_no_more_than_a_slice_is_held() -> None:
    """Nor more is made of momentum before what waits is moved, in several turns."""
    ((ours, held),) = run_distributed(_steps_in_slices, 1, [*DEEPSEEK, MUON])
    check_steps(ours, by_adamw(*DEEPSEEK), (0, 0, 0))
    assert max(held) <= SLICE
    turns = [after - before for before, after in pairwise(held)]
    assert min(turns) < 0 < max(turns)


# --- layouts --------------------------------------------------------------------------------------

STEPS = {"run.steps": 3, "run.seed": 3, "parallel.capacity_factor": 16, "optim.eps": 1e-2}
EP1, EP2, TP2 = {"parallel.expert": 1}, {"parallel.expert": 2}, {"parallel.tensor": 2}


@pytest.fixture(scope="module")
def alone() -> dict[str, Trained]:
    """Trained in one process."""
    models = {"gpt_oss": GPT_OSS, "deepseek": DEEPSEEK}
    return {name: trained(1, [*model, MUON], STEPS) for name, model in models.items()}


@pytest.mark.dist
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        *slow(("gpt_oss", EP2 | {"kernels.backend": "megatron"})),
        *slow(("deepseek", EP1), ("gpt_oss", TP2 | EP1)),
        ("deepseek", TP2 | EP2),
        ("deepseek", {"parallel.pipeline": 2}),
    ],
)
def test_two_ranks_equal_one(name: str, layout: dict[str, Any], alone: dict[str, Trained]) -> None:
    model = GPT_OSS if name == "gpt_oss" else DEEPSEEK
    two, one = trained(2, [*model, MUON], STEPS | layout), alone[name]
    assert two.series("loss") == pytest.approx(one.series("loss"), rel=1e-5)
    two.has_weights_of(one, change=1e-3)


# --- what is trained ------------------------------------------------------------------------------


def test_loss_falls_and_adamw_keeps_its_parameters() -> None:
    """With weights, gradients and moments in bf16."""
    how = {"precision.recipe": "bf16", "optim.moments": "bf16", "parallel.grad_dtype": "bf16"}
    text = {"data.source": "embedded", "model.vocab_size": 256, "data.micro_batch": 4}
    run = trained(1, [*DEEPSEEK, MUON], how | text | {"run.steps": 12, "optim.lr": 1e-2})
    losses = run.series("loss")
    assert max(losses[-3:]) < losses[0] - 0.5, losses
    one = how | {"run.steps": 1}
    first = [trained(1, [*DEEPSEEK, f"optim.kind={kind}"], one).after for kind in ("muon", "adamw")]
    same = {key for key, value in first[0].items() if torch.equal(value, first[1][key])}
    others = {key for key in first[0] if key not in same}
    assert all("linear_" in key or "eh_proj" in key for key in others), others
    assert all(key in others for key in first[0] if "linear_" in key and "norm" not in key)


# --- checkpoints ----------------------------------------------------------------------------------


def _convert(source: Path, target: Path, layout: dict[str, Any]) -> None:
    """Load the checkpoint of `source`, if there is one, and save it in `target`."""
    engine, groups = build(kind="muon", **layout)
    if source.exists():
        load_into(checkpointer(source, groups), source / "step_00000003", engine)
    else:
        train(engine, groups, 0, 3)
    save(checkpointer(target, groups), 3, engine)


@pytest.mark.dist
def test_checkpoints_change_layout(tmp_path: Path) -> None:
    """From whole parameters on each of two ranks to one rank, unsharded, expert parallel."""
    chain: list[tuple[int, dict[str, Any]]] = [
        *[(2, {}), (1, {}), (2, {"distributed_optimizer": False}), (2, {"expert": 2})],
    ]
    folders = [tmp_path / str(i) for i in range(len(chain) + 1)]
    for i, (world, layout) in enumerate(chain):
        run_distributed(_convert, world, folders[i], folders[i + 1], layout)
    first, *others = (stored(folder / "step_00000003") for folder in folders[1:])
    assert any(name.startswith("optimizer.state.momentum_buffer.") for name in first)
    for state in others:
        assert_equal(state, first)


def _of_another_kind(folder: Path) -> None:
    from phalanx.parallel.checkpoint.saved_knobs import CheckpointMismatch

    for kind, other in (("adamw", "muon"), ("muon", "adamw")):
        engine, groups = build(kind=kind)
        checkpoints = checkpointer(folder / kind, groups)
        train(engine, groups, 0, 1)
        path = save(checkpoints, 1, engine)
        fresh, groups = build(kind=other)
        with pytest.raises(CheckpointMismatch, match=f"go on with optim.kind={kind}, or"):
            load_into(checkpoints, path, fresh)


def test_another_kind_of_optimizer_is_refused(tmp_path: Path) -> None:
    run_distributed(_of_another_kind, 1, tmp_path)
