"""The adapter over the package itself, compiled for sm_100a on a CPU: what each model needs.

Nothing is launched; the package derives, checks and compiles what it would run on a GPU.
"""

import pickle
import zlib
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from phalanx.configs.load import load
from phalanx.extras.blackwell.interleave import Interleaved
from phalanx.kernels.cache import digest_of
from phalanx.kernels.expert_mlp.activation import Activation
from phalanx.kernels.expert_mlp.backend import provider, rows_for
from phalanx.kernels.expert_mlp.expert_plan import PlanSize
from phalanx.kernels.expert_mlp.grouped_mlp import grouped_mlp
from phalanx.kernels.expert_mlp.main_grad import facts_of
from phalanx.kernels.expert_mlp.mlp_spec import MLPSpec, MLPWeights
from phalanx.kernels.quantize.recipe import Microscaling
from phalanx.moe.model.kernel_facts import activation_of
from tests.extras.blackwell import offline_cudnn
from tests.extras.blackwell.offline_cudnn import Log, installed, offline
from tests.kernels.sm90 import remembered
from tests.support.scheduling import matrix

pytestmark = pytest.mark.skipif(not installed(), reason="needs the extra `cudnn`")
ROOT = Path(__file__).parents[3]
FOLDER, KERNELS = ROOT / "configs" / "model", ROOT / "kernels"
RANKS = 8
"""Over which experts are spread, if there are so many."""


TILE = 256
"""The largest side of a tile."""
FAST = ("deepseek_v2_lite", "gpt_oss_20b")
"""Compiled by default: together they have all that tells models apart, but for the sizes
themselves; see `kinds`."""


def models(*fast: str) -> list[object]:
    """Names of all models, those that are not named here slow. What several of them need alike is
    compiled for the first alone."""
    names = sorted(path.stem for path in FOLDER.glob("*.yaml"))
    return [pytest.param(n, marks=() if n in fast else pytest.mark.slow) for n in names]


def needed(name: str) -> tuple[int, int, int, Activation, bool]:
    """(hidden, ffn, experts of a rank, activation, bias) of a model. Weights are compiled in with
    their sizes."""
    model = load([f"model={name}"]).model
    local = max(1, model.moe.experts // RANKS)
    return model.hidden, model.moe.ffn, local, activation_of(model.moe), model.bias


def kinds(name: str) -> set[tuple[object, ...]]:
    """Properties of a model that select code: its epilogue, and the used part of a last tile, of
    products of which each has both sizes as sides."""
    hidden, ffn, _, act, bias = needed(name)
    return {("epilogue", act, bias), ("side", hidden % TILE), ("side", ffn % TILE)}


def test_those_compiled_by_default_are_of_every_kind() -> None:
    """Whoever adds a model of another kind names it in `FAST`."""
    every = {path.stem: kinds(path.stem) for path in FOLDER.glob("*.yaml")}
    compiled = set().union(*(every[name] for name in FAST))
    assert {name: own - compiled for name, own in every.items() if own - compiled} == {}


@pytest.mark.parametrize("name", models(*FAST))
def test_every_model(tmp_path, name: str):
    """Forward and backward, gradients that replace and that are added to fp32 buffers."""
    hidden, ffn, experts, act, bias = needed(name)
    bf16 = dict(dtype=torch.bfloat16)
    shapes = [(experts, 2 * ffn, hidden), (experts, hidden, ffn)]
    shapes += [(experts, 2 * ffn), (experts, hidden)] if bias else []
    weights = [torch.empty(shape, **bf16).requires_grad_() for shape in shapes]
    log = step(
        tmp_path, MLPSpec(act, "cudnn", channel_order=Interleaved(), accumulate=True), weights
    )
    assert log.launches == 12
    kinds = [made.kernel for made in log.compiled]
    assert len(kinds) == 8, kinds  # both weight gradients that replace and that add, and four more
    check(log)


@matrix(("form", "bias"), ("mxfp8", False), ("nvfp4", True))
def test_every_recipe(tmp_path, form: str, bias: bool) -> None:
    """The kernels for MXFP8 and NVFP4 with the activations of the models in configs/model, and
    with as much of a last tile as they have; those but for weight gradients are compiled for
    weights of any size."""
    act = Activation("quick_geglu", limit=7.0, offset=1.0) if bias else Activation("swiglu")
    check(recipe(tmp_path, form, act, bias, (320, 320, 2) if bias else (256, 384, 2)))


@pytest.mark.slow
@pytest.mark.parametrize("form", ["mxfp8", "nvfp4"])
@pytest.mark.parametrize("name", models())
def test_every_recipe_of_every_model(tmp_path, form: str, name: str) -> None:
    """With one expert, as the weights are quantized for it."""
    hidden, ffn, _, act, bias = needed(name)
    check(recipe(tmp_path, form, act, bias, (hidden, ffn, 1)))


def recipe(folder, form, act, bias, sizes):
    hidden, ffn, experts = sizes
    shapes = [(experts, 2 * ffn, hidden), (experts, hidden, ffn)]
    shapes += [(experts, 2 * ffn), (experts, hidden)] if bias else []
    weights = [torch.zeros(shape, dtype=torch.bfloat16).requires_grad_() for shape in shapes]
    spec = MLPSpec(
        act, "cudnn", channel_order=Interleaved(), accumulate=True, recipe=Microscaling(form)
    )
    log = step(folder, spec, weights)
    assert log.launches == 12
    kinds = [made.kernel for made in log.compiled]
    assert len(set(kinds)) == 4 and all("BlockScaled" in kind for kind in kinds), kinds
    return log


def step(folder, spec: MLPSpec, weights: list[torch.Tensor]) -> Log:
    """Kernels that `compiled_step` requests, cached while all of its sources are the same."""
    shapes = [(w.dtype, w.shape, w.stride()) for w in weights]
    # Our own kernels, in the folders of sm90, are for Hopper.
    sources = {*KERNELS.rglob("*.py")} - {*KERNELS.glob("sm90/*/**/*.py")}
    own = [Path(__file__), Path(offline_cudnn.__file__)]
    packages = [version(name) for name in ("nvidia-cudnn-frontend", "nvidia-cutlass-dsl")]
    name = remembered.named(
        "cudnn", [repr(spec), repr(shapes), digest_of({*sources, *own}), *packages]
    )
    make = lambda: zlib.compress(pickle.dumps(compiled_step(folder, spec, weights)), 1)  # noqa: E731
    return pickle.loads(zlib.decompress(remembered.cache().fetch(name, make)))


def compiled_step(folder, spec: MLPSpec, weights: list[torch.Tensor]) -> Log:
    """Forward and backward, gradients that replace and that are added to fp32 buffers."""
    for w in weights:
        w.main_grad = torch.empty(w.shape)
        w.grad_added_to_main_grad = False
    experts, hidden = weights[1].shape[:2]
    x = torch.zeros(8, hidden, dtype=torch.bfloat16).requires_grad_()
    idx = torch.zeros(8, 1, dtype=torch.int32)
    size = PlanSize(0, experts, rows_for(8, 1, "cudnn"))
    plan = provider("cudnn").plan(idx, torch.ones(8, 1), size)
    plan = plan._replace(row_prob_S=plan.row_prob_S.clone().requires_grad_())
    with offline(compiles=True, folder=folder) as log:
        for add in (False, True):
            for w in weights[:2]:
                facts_of(w).replaces_main_grad = not add
            grouped_mlp(x, MLPWeights(*weights), plan, spec).backward(torch.zeros_like(x))
    return log


def check(log) -> None:
    """It is machine code for Blackwell, with its tensor cores and dynamic tiles."""
    for made in log.compiled:
        assert ".target sm_100a" in made.ptx, made.kernel
        assert "tcgen05.mma" in made.ptx, made.kernel
        assert made.cubin[:4] == b"\x7fELF"
        claims = "clusterlaunchcontrol.try_cancel" if "Wgrad" in made.kernel else "atom."
        assert claims in made.ptx, made.kernel
