"""Every layout computes the training of one process: same weights to start with, same losses.

fp32 on gloo, through the trainer. All layouts draw the same weights, read the same micro-batches,
and must agree with one process in losses, gradient norm, expert load and balance of every step, and
in every weight and router bias after the last.

aux_loss and z_loss are means over a micro-batch: they agree because data.micro_batch is the same on
all layouts, and data.Loader then deals out the same micro-batches. global_aux_loss also sees how
many micro-batches came before on all replicas, so layouts of one replica are compared in it.
seq_aux_loss is the one that does not depend on how a batch is cut.
"""

import functools
import operator
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch

from tests.support import runs
from tests.support.row_overflow import overflow_always
from tests.support.scheduling import slow
from tests.support.training import Trained, trained

pytestmark = pytest.mark.dist

# A reordered sum of some thousand fp32 terms moves by a few units of 2**-24 = 6e-8. Losses are such
# sums; gradient norms are sums of squares of what came back through all layers. After some steps
# 1e-7 and 3e-6 are seen; weight decay on expert biases by mistake shows with 2e-5 and 4e-4.
LOSS, NORM = 2e-6, 2e-5
# Of the change of a weight, plus some roundings of the weight itself.
CHANGE, WEIGHT = 1e-4, 3e-7

TRAINING = [
    "precision=fp32",
    "run.steps=2",
    # Rounding must not change a choice of experts. With this seed the last expert chosen and the
    # first one left out are never closer than 5e-5 of the largest score.
    "run.seed=3",
    "data.sequence_length=16",
    "data.micro_batch=1",
    "data.global_batch=4",
    "optim.lr=3e-2",
    "optim.warmup_steps=0",
    "optim.schedule=constant",
    # Adam divides a gradient by its size, which makes a whole step of the rounding of a zero. With
    # eps above most gradients an update is nearly linear in them: errors and wrong factors show.
    "optim.eps=1e-2",
    "parallel.capacity_factor=16",
]
SMALL = [
    "model.vocab_size=64",
    "model.hidden=32",
    "model.dense_ffn=48",
    "model.layers=2",
    "model.moe.ffn=16",
    "model.init_std=0.1",
]
TINY = [
    *["model=tiny", *TRAINING, *SMALL],
    "model.attention.head_dim=8",
    "model.moe.router.z_loss=1e-2",
]
GPT_OSS = [
    *[*TRAINING, *SMALL, *runs.GPT_OSS],
    "model.attention.window=6",
]
DEEPSEEK = [
    *[*TRAINING, *SMALL, *runs.DEEPSEEK],
    "model.moe.ffn=8",
]
GLM = [
    *TINY,
    "model.attention.qk_norm=true",
    "model.attention.qkv_bias=true",
    "model.attention.rotary_dim=4",
]
QWEN3_NEXT = [
    *["model=tiny_qwen3_next", *TRAINING, *SMALL],
    "model.attention.head_dim=8",
    "model.attention.rotary_dim=4",
    "model.moe.experts=8",
    "model.moe.top_k=2",
    "model.moe.shared_ffn=16",
    "model.moe.router.z_loss=1e-2",
    "model.linear_attention.full_attention_interval=2",
    "model.linear_attention.key_heads=2",
    "model.linear_attention.value_heads=4",
]
DENSE = [*["model=tiny_dense", *TRAINING, *SMALL], "model.attention.head_dim=8"]
MODELS = {
    "tiny": TINY,
    "dense": DENSE,
    "dense_4": [*DENSE, "model.layers=4"],
    "dense_mtp": [*DENSE, "model.mtp_layers=1"],
    "glm": GLM,
    "glm_one_group": [*GLM, "model.attention.kv_heads=1"],
    "olmoe": [*TINY, "model.attention.qk_norm=true", "model.attention.qk_norm_over=projection"],
    "gpt_oss": GPT_OSS,
    "deepseek": DEEPSEEK,
    "gpt_oss_4": [*GPT_OSS, "model.layers=4"],
    "deepseek_4": [*DEEPSEEK, "model.layers=4"],
    "qwen3_next": QWEN3_NEXT,
    "qwen3_next_4_heads": [*QWEN3_NEXT, "model.linear_attention.key_heads=4"],
    "qwen3_next_one_group": [*QWEN3_NEXT, "model.attention.kv_heads=1"],
    "deepseek_tied": [*DEEPSEEK, "model.tie_embeddings=true"],
    "balanced": [
        *TINY,
        "model.moe.router.seq_aux_loss=1e-2",
        "model.moe.router.global_aux_loss=1e-2",
    ],
}

EP1, EP2, EP4 = ({"parallel.expert": size} for size in (1, 2, 4))
TP2, PP2, CP2 = ({f"parallel.{kind}": 2} for kind in ("tensor", "pipeline", "context"))
VP2 = PP2 | {"parallel.virtual_pipeline": 2}
# Multi-token prediction on a stage of its own, which holds a copy of the embedding.
PP4 = {"parallel.pipeline": 4, "parallel.pipeline_layout": "Et|t|m|L"}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "dp2": (2, EP1),
    "ep2": (2, EP2),
    "pp2": (2, PP2),
    "pp2_vp2": (2, VP2),
    "tp2": (2, TP2 | EP1),
    "tp2_ep2": (2, TP2 | EP2),
    "cp2": (2, CP2 | EP1),
    "cp2_ep2": (2, CP2 | EP2 | {"kernels.attention": "reference"}),
    "cp4": (4, {"parallel.context": 4} | EP2),
    "cp2_dp2": (4, CP2 | EP2),
    "tp2_dp2": (4, TP2 | EP2),
    "ep4": (4, EP4),
    "ep2_edp2": (4, EP2),
    "pp2_ep2": (4, PP2 | EP2),
    "pp2_cp2": (4, PP2 | CP2),
    "pp2_vp2_ep2": (4, VP2 | EP2),
    "pp2_vp2_cp2": (4, VP2 | CP2 | EP1),
    "tp2_pp2": (4, TP2 | PP2 | EP2),
    "tp2_cp2": (4, TP2 | CP2 | EP4),
    "pp4_mtp": (4, PP4),
}
CASES = {
    "pp2": ["balanced", "deepseek_tied"],
    "tp2": ["gpt_oss", "qwen3_next_one_group"],
    "tp2_ep2": ["deepseek"],
    "cp2": ["gpt_oss"],
    "ep2_edp2": ["deepseek"],
    "pp2_vp2": ["deepseek_4"],
    "pp4_mtp": ["deepseek"],
}

# Their layout or model is in other cases too, that of qwen3_next in test_linear_attention.
CASES_TOO = {
    "dp2": ["dense", "qwen3_next", "deepseek"],
    "ep2": ["tiny", "gpt_oss", "deepseek", "qwen3_next"],
    "ep4": ["tiny"],
    "pp2": ["qwen3_next", "dense"],
    "pp2_ep2": ["deepseek"],
    "tp2": ["dense_mtp", "glm", "glm_one_group", "qwen3_next"],
    "tp2_pp2": ["deepseek"],
    "pp2_vp2": ["gpt_oss_4", "dense_4"],
    "pp2_vp2_cp2": ["deepseek_4"],
    "cp2": ["dense", "olmoe", "qwen3_next"],
    "pp4_mtp": ["dense_mtp"],
    "tp2_ep2": ["gpt_oss", "balanced"],
    "cp2_ep2": ["deepseek", "balanced"],
    "pp2_cp2": ["qwen3_next"],
    "tp2_cp2": ["gpt_oss", "qwen3_next_4_heads"],
}

In = Callable[[str, str], Trained]


@pytest.fixture(scope="module")
def in_layout() -> In:
    """Run of a model in a layout, trained once for all tests: (layout, model)."""

    def run(layout: str, name: str) -> Trained:
        world, changes = LAYOUTS[layout]
        return trained(world, MODELS[name], changes)

    return functools.cache(run)


Alone = Callable[[str], Trained]


@pytest.fixture(scope="module")
def alone(in_layout: In) -> Alone:
    """Run of a model in one process."""
    return functools.partial(in_layout, "one")


def results(run: Trained) -> dict[str, list[float]]:
    """Records of a run without those of its speed."""
    names = {"loss", "mtp_loss", "grad_norm", "lr", "load_max", "load_p95", "dead_experts"}
    recorded = (k for k in run.steps[0] if k in names or k.startswith("balance/"))
    return {**{name: run.series(name) for name in recorded}, "valid_loss": run.valid_losses}


def agree(run: Trained, expected: Trained) -> None:
    """Check for the same initial weights, and the same training within rounding."""
    assert run.before.keys() == expected.before.keys()
    for key, weight in expected.before.items():
        assert torch.equal(run.before[key], weight), f"{key} starts with other values"
    actual = results(run)
    for name, values in results(expected).items():
        bound = NORM if name == "grad_norm" else LOSS
        assert actual.pop(name) == pytest.approx(values, rel=bound), name
    assert not actual
    run.has_weights_of(expected, CHANGE, WEIGHT)
    for key, weight in expected.after.items():
        if key.endswith("expert_bias"):
            assert not torch.equal(weight, expected.before[key])
            assert torch.equal(run.after[key], weight), key


def pairs(cases: dict[str, list[str]]) -> list[tuple[str, str]]:
    return [(layout, name) for layout, names in cases.items() for name in names]


@pytest.mark.parametrize(("layout", "name"), [*pairs(CASES), *slow(*pairs(CASES_TOO))])
def test_layout_agrees_with_one_process(
    layout: str, name: str, in_layout: In, alone: Alone
) -> None:
    agree(in_layout(layout, name), alone(name))


def test_training_changes_what_is_compared(alone: Alone) -> None:
    """Losses move, gradients are clipped, and every weight is trained."""
    for name in ("tiny", "gpt_oss", "deepseek", "dense"):
        run = alone(name)
        assert max(run.series("loss")) / min(run.series("loss")) - 1 > 1000 * LOSS
        assert min(run.series("grad_norm")) > 1  # the limit: every step depends on the norm
        for key, weight in run.before.items():
            assert not torch.equal(run.after[key], weight), key


# --- the same training cut or run otherwise -------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "sharded", "overlap"),
    [
        *[("one", False, True), ("ep2", True, False), ("pp2", False, False)],
        *slow(("ep2", False, True)),
    ],
)
def test_sharding_and_overlap_change_nothing(
    layout: str, sharded: bool, overlap: bool, alone: Alone
) -> None:
    world, changes = LAYOUTS[layout]
    how = {"parallel.distributed_optimizer": sharded, "parallel.overlap": overlap}
    agree(trained(world, TINY, changes | how), alone("tiny"))


@pytest.mark.parametrize("world", [1, 2])
def test_gradient_accumulation_changes_nothing(world: int, alone: Alone) -> None:
    """Four micro-batches of one sequence, or one of all sequences of a rank."""
    agree(trained(world, DEEPSEEK, {"data.micro_batch": 4 // world}), alone("deepseek"))


BACKENDS = [
    *[
        ("torch", "one", "tiny"),
        ("torch", "ep2", "deepseek"),
        ("torch", "one", "dense"),
    ],
    *[
        ("megatron", "one", "gpt_oss"),
        ("megatron", "ep2", "tiny"),
        ("megatron", "tp2", "dense"),
    ],
]
BACKENDS_TOO = [
    (backend, layout, name)
    for backend, layout in (
        *product(["torch"], ["one", "ep2"]),
        *product(["megatron"], ["one", "ep2", "tp2_ep2"]),
    )
    for name in ("tiny", "gpt_oss", "deepseek")
    if (backend, layout, name) not in BACKENDS
]
BACKENDS_TOO.append(("megatron", "ep2", "qwen3_next"))


@pytest.mark.parametrize(("backend", "layout", "name"), [*BACKENDS, *slow(*BACKENDS_TOO)])
def test_expert_backends_agree(backend: str, layout: str, name: str, alone: Alone) -> None:
    """With the reference, which `auto` selects here: same weights, same keys."""
    world, changes = LAYOUTS[layout]
    agree(trained(world, MODELS[name], changes | {"kernels.backend": backend}), alone(name))


# --- overflow -------------------------------------------------------------------------------------

# One of each kind of state that a rerun could count twice or leave behind.
ALL_LOSSES = [
    *[*DEEPSEEK, "run.eval_interval=1"],
    *[f"model.moe.router.{name}=1e-2" for name in ("aux_loss", "seq_aux_loss", "global_aux_loss")],
    "model.moe.router.z_loss=1e-2",
    # Several micro-batches, of enough tokens that experts need more than one tile of rows.
    *["data.sequence_length=64", "data.micro_batch=2", "data.global_batch=8"],
]
HOW: dict[str, dict[str, Any]] = {
    "": {},
    "unsharded": {"parallel.distributed_optimizer": False},
    "unoverlapped": {"parallel.overlap": False},
    "plain": {"parallel.distributed_optimizer": False, "parallel.overlap": False},
    "bf16": {"precision.recipe": "bf16", "optim.moments": "bf16"},
    "recomputed": {"run.recompute": ["full"]},
    "parts": {"run.recompute": ["norm", "mla_up", "attention", "mlp", "expert_h"]},
    "moved": {"run.recompute": ["norm"], "run.offload": ["residual", "attention", "expert_h"]},
}
ONE_REPLICA = ("one", "tp2", "tp2_ep2", "cp2", "cp2_ep2", "pp2_vp2")
# test_overflow has expert parallel ranks, test_delayed_wgrad stages.
RERUN = [("one", "moved")]
RERUN_TOO = [
    *[("pp2_vp2", ""), ("ep2", "bf16")],
    *[("cp2", "plain"), ("tp2_ep2", "recomputed")],
    *[("one", ""), ("ep2", "moved"), ("dp2", "unsharded"), ("cp2", "unoverlapped")],
    *[("pp2", "unsharded"), ("cp2_ep2", ""), ("pp2_cp2", ""), ("tp2_cp2", ""), ("pp2_vp2_cp2", "")],
    *[
        ("dp2", ""),
        ("ep2", ""),
        ("tp2", ""),
        ("pp2", "bf16"),
        ("pp2_ep2", "parts"),
        ("cp2_ep2", "recomputed"),
        ("ep2_edp2", ""),
    ],
    *[("pp2_ep2", "unsharded"), ("tp2_pp2", ""), ("pp4_mtp", ""), ("pp2_vp2_ep2", "bf16")],
    *[("cp2_dp2", "unsharded"), ("cp4", ""), ("tp2_dp2", ""), ("pp2_cp2", "unoverlapped")],
]


@pytest.mark.parametrize(("layout", "how"), [*RERUN, *slow(*RERUN_TOO)])
def test_steps_that_are_run_again_change_nothing(layout: str, how: str) -> None:
    """Row overflow in every step and validation: bitwise equal to a run without overflow."""
    world, changes = LAYOUTS[layout]
    changes = changes | HOW[how] | ({"model.layers": 4} if "vp2" in layout else {})
    if layout in ONE_REPLICA:  # which would have more micro-batches than the others
        changes["data.global_batch"] = 4
    tight = trained(world, ALL_LOSSES, changes, overflow_always)
    roomy = trained(world, ALL_LOSSES, changes)
    reruns = [0, *tight.series("reruns")]
    assert all(map(operator.lt, reruns, reruns[1:])) and not any(roomy.series("reruns"))
    assert results(tight) == results(roomy)
    for key, weight in roomy.after.items():
        assert torch.equal(tight.after[key], weight), key
    assert tight.left == roomy.left


# --- memory ---------------------------------------------------------------------------------------

FP8 = {"precision.recipe": "fp8_block", "parallel.dispatch": "alltoall"}
SAVING = [
    *[("pp2_vp2", "deepseek_4", "moved"), ("pp2", "balanced", "moved")],
    ("ep2", "fp8", "moved"),
]
SAVING_TOO = [
    ("tp2_ep2", "deepseek", "parts"),
    *[("pp2_vp2_ep2", "deepseek_4", "parts"), ("pp4_mtp", "deepseek", "parts")],
    *[("ep2", "deepseek", "parts"), ("one", "fp8", "parts")],
    *[("tp2_pp2", "deepseek", "moved"), ("cp2_ep2", "deepseek", "parts"), ("one", "fp8", "moved")],
    *[("pp2_ep2", "fp8", "parts"), ("pp2_vp2", "deepseek_4", "recomputed")],
    *[("ep2", "fp8", "recomputed"), ("tp2", "glm", "moved"), ("cp2", "qwen3_next", "recomputed")],
]


@pytest.mark.parametrize(("layout", "name", "how"), [*SAVING, *slow(*SAVING_TOO)])
def test_what_is_computed_again_or_moved_changes_nothing(
    layout: str, name: str, how: str, in_layout: In
) -> None:
    """Bit for bit, with several micro-batches in flight."""
    world, changes = LAYOUTS[layout]
    changes = changes | (FP8 if name == "fp8" else {})
    saving = dict(HOW[how])
    if name in ("balanced", "glm"):
        saving["run.recompute"] = [n for n in saving["run.recompute"] if n != "mla_up"]
    model = MODELS["deepseek" if name == "fp8" else name]
    kept = trained(world, model, changes) if name == "fp8" else in_layout(layout, name)
    less = trained(world, model, changes | saving)
    assert results(less) == results(kept)
    for key, weight in kept.after.items():
        assert torch.equal(less.after[key], weight), key
