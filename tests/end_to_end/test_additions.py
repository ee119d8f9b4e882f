"""Activations, transports, backends, optimizers and recipes are added by an entry each."""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from pkgutil import resolve_name

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tests.support.training  # noqa: F401  (Megatron-Core, once for all ranks, which are forked)
from phalanx.configs.arithmetic.accounting import active_parameters, flops_per_token, parameters
from phalanx.configs.bounds import choices
from phalanx.configs.docs import tables
from phalanx.configs.load import load
from phalanx.configs.schema import Config, ModelConfig
from phalanx.configs.tables.capabilities import PLANNER
from phalanx.configs.tables.machines import MACHINES
from phalanx.configs.validate import ConfigError, validate
from phalanx.kernels.expert_mlp.activation import Activation
from phalanx.kernels.expert_mlp.backend import rows_for
from phalanx.kernels.expert_mlp.grouped_mlp import grouped_mlp
from phalanx.kernels.expert_mlp.mlp_spec import MLPSpec, MLPWeights
from phalanx.kernels.functional.module import GroupedMLP
from phalanx.kernels.quantize.recipe import Fp8Block, Microscaling, Recipe
from phalanx.kernels.registry import Facts, KernelUnavailable, resolve
from phalanx.kernels.routing.plan import make_plan
from phalanx.moe.model.kernel_facts import recipe
from phalanx.moe.plan.cost.activations import Activations
from phalanx.moe.plan.cost.stages import exchange_bytes, stage_memory
from phalanx.moe.plan.cost.step_time import step_time
from phalanx.moe.plan.cost.traffic import traffic
from phalanx.moe.plan.cost.weights import stage_weights
from phalanx.moe.plan.described import resolved
from phalanx.parallel.dispatcher.costs import Links
from tests.parallel.dispatcher.test_base import (
    ROUTINGS,
    Case,
    Result,
    assert_near,
    make_case,
    rank_layer,
)
from tests.support.additions import Counted, added
from tests.support.distributed import run_distributed
from tests.support.runs import SMALL, records, run


@pytest.fixture(autouse=True)
def entries() -> Iterator[None]:
    with added():
        yield


def trained(folder: Path, overrides: list[str], ranks: int) -> tuple[list[float], str]:
    """Losses of the steps of a run with the additions, and what it printed."""
    command = [*SMALL, "run.save_interval=-1", *overrides, f"run.dir={folder}"]
    ended = run(ranks, command, added)
    assert [rank.code for rank in ended] == [0] * ranks, ended[0].err
    return [r["loss"] for r in records(folder / "run") if "grad_norm" in r], ended[0].out


# --- an activation --------------------------------------------------------------------------------


def stated(h: Tensor, act: Activation) -> Tensor:
    gate, up = h.chunk(2, -1) if act.kind == "reglu" else (h, torch.ones(()))
    if act.limit:
        gate, up = gate.clamp(max=act.limit), up.clamp(-act.limit, act.limit)
    return torch.where(gate > 0, gate, 0.0) * (up + act.offset)


@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("act", ["reglu", "reglu, clamped", "relu"])
def test_forward_and_backward_of_an_added_activation(backend: str, act: str) -> None:
    """Against autograd in fp64, expert by expert."""
    kind, clamped = act.split(",")[0], "clamped" in act
    what = Activation(kind, limit=0.7, offset=0.5) if clamped else Activation(kind)
    torch.manual_seed(0)
    mlp = GroupedMLP(4, 32, 24, 2, what, bias=True, backend=backend)
    x, prob = torch.randn(40, 32, requires_grad=True), torch.rand(40, 2, requires_grad=True)
    idx = torch.rand(40, 4).topk(2).indices
    dout = torch.randn(40, 32)
    mlp(x, idx, prob).backward(dout)
    ours = dict(mlp.named_parameters()) | {"x": x, "prob": prob}
    wide = {name: leaf.detach().double().requires_grad_() for name, leaf in ours.items()}
    out = torch.zeros(40, 32, dtype=torch.float64)
    for e in range(4):
        h = F.linear(wide["x"], wide["w1"][e], wide["b1"][e])
        y = F.linear(stated(h, what), wide["w2"][e], wide["b2"][e])
        out = out + (wide["prob"] * (idx == e)).sum(1, keepdim=True) * y
    out.backward(dout.double())
    for name, leaf in wide.items():
        torch.testing.assert_close(ours[name].grad.double(), leaf.grad, rtol=1e-4, atol=1e-5)


def configured(*overrides: str, world: int = 1) -> Config:
    cfg = load(list(overrides))
    validate(cfg, world)
    return cfg


def tiny(kind: str) -> ModelConfig:
    return configured("model=tiny_deepseek", f"model.moe.activation={kind}").model


@pytest.mark.parametrize(("kind", "like"), [("reglu", "swiglu"), ("relu", "squared_relu")])
def test_an_added_activation_is_counted(kind: str, like: str) -> None:
    """Like one with as many matrices; those with a gate have half as many again."""
    here, there, other = (tiny(k) for k in (kind, like, "swiglu"))
    assert parameters(here) == parameters(there)
    assert active_parameters(here) == active_parameters(there)
    assert flops_per_token(here, 64) == flops_per_token(there, 64)
    assert (parameters(here) == parameters(other)) == (like == "swiglu")
    base = "experiment=moonlight_8gpu"
    one, two = (
        resolved(configured(base, f"model.moe.activation={k}", world=8), 8, 8) for k in (kind, like)
    )
    assert stage_memory(one, 8) == stage_memory(two, 8)
    assert stage_weights(one, 8) == stage_weights(two, 8)


def test_an_added_activation_obeys_the_rules() -> None:
    assert {"reglu", "relu"} <= set(choices()["model.moe.activation"])
    assert "`reglu`: max(gate, 0) * up (arXiv 2002.05202)" in tables()
    configured("model.moe.activation=reglu", "model.moe.activation_limit=1")
    with pytest.raises(ConfigError, match="needs a gated activation, not relu"):
        configured("model.moe.activation=relu", "model.moe.activation_limit=1")
    with pytest.raises(ConfigError, match="set model.moe.activation=reglu"):
        configured("model.moe.activation=regluu")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["reglu", "relu"])
def test_the_fused_kernels_compile_with_an_added_activation(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("cutlass")
    from phalanx.kernels.sm90.experts.fc1_act import Fc1Kernel
    from phalanx.kernels.sm90.experts.fc2_dgrad_dact import DgradKernel
    from phalanx.kernels.sm90.gemm.epilogues import Act, ActGrad
    from phalanx.kernels.sm90.gemm.gemm import GemmConfig
    from phalanx.kernels.sm90.gemm.tiles import configured as tile
    from phalanx.kernels.sm90.jit.launch import compile_kernel

    for kernel, epilogue, transposed in ((Fc1Kernel, Act, False), (DgradKernel, ActGrad, True)):
        made, keep = {}, f"--keep-cubin --dump-dir {tmp_path}"
        for name in (kind, "squared_relu"):
            loop = tile("pp192", gather=True, transposed=transposed)
            config = GemmConfig(epilogue(Activation(name)), loop)
            made[name] = compile_kernel(kernel, config, keep).artifacts.CUBIN
        assert made[kind][:4] == b"\x7fELF" and made[kind] != made["squared_relu"]


def test_a_kept_kernel_is_another_when_the_file_of_its_epilogue_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("cutlass")
    from phalanx.kernels.sm90.experts.fc1_act import Fc1Kernel
    from phalanx.kernels.sm90.gemm.epilogues import Act
    from phalanx.kernels.sm90.jit import launch

    def name(kind: str) -> str:
        return launch.entry_name(Fc1Kernel, Act(Activation(kind)))

    before = {kind: name(kind) for kind in ("reglu", "swiglu")}
    assert before == {kind: name(kind) for kind in before}
    real, changed = launch.digest_of, Path("tests/kernels/sm90/relu.py").name
    monkeypatch.setattr(
        launch,
        "digest_of",
        lambda files: real(files) + "x" * (changed in [f.name for f in files]),
    )
    assert name("reglu") != before["reglu"] and name("swiglu") == before["swiglu"]


# --- a transport ----------------------------------------------------------------------------------


def _layer(case: Case) -> Result:
    with added():
        return rank_layer(case, "broadcasts")


@pytest.mark.dist
@pytest.mark.parametrize("kind", ROUTINGS)
def test_an_added_transport_equals_the_dense_statement(kind: str) -> None:
    case = make_case(kind, torch.float32)
    results = run_distributed(_layer, 2, case)
    assert_near(Result(*map(torch.cat, zip(*results, strict=True))), case)


def test_an_added_transport_obeys_the_rules() -> None:
    assert "broadcasts" in choices()["parallel.dispatch"]
    assert "`broadcasts`: a broadcast for each rank" in tables()
    with pytest.raises(ConfigError, match="comm_sms=8 has no effect with parallel.dispatch=broad"):
        configured("parallel.dispatch=broadcasts", "parallel.comm_sms=8", world=2)


@pytest.mark.extras
def test_a_dry_run_counts_an_added_transport() -> None:
    """Its rows on the links, saved rows and buffers; nothing of it counts for others."""
    base = ("experiment=moonlight_8gpu", "parallel.comm_sms=0")
    # `auto` would hide exchanges of `alltoall`
    base += ("parallel.overlap_microbatches=off", "parallel.delay_wgrad=off")
    names = ("broadcasts", "alltoall")
    ours, theirs = (
        resolved(configured(*base, f"parallel.dispatch={name}", world=8), 8, 8) for name in names
    )
    sent, act = traffic(ours, 8), Activations(ours, 8)
    assert (sent.dispatch, sent.combine) == (Links(7, 0), Links(21, 0))
    row = 2 * ours.model.hidden
    assert act.moe_layer().saved == Activations(theirs, 8).moe_layer().saved  # it keeps as many
    less = Activations(theirs, 8).moe_layer().backward - act.moe_layer().backward
    assert less == (act.sizes.received - 5) * row
    assert exchange_bytes(ours, 8) == 2 * act.sizes.received * (row + 8 * ours.model.moe.top_k)
    times = [step_time(cfg, 8, MACHINES["h200"]).exchange for cfg in (ours, theirs)]
    assert times[0] == pytest.approx(2 * times[1])  # 4 x 7 rows instead of 2 x 7
    page = resolve_name(PLANNER["page"])
    text, _ = page(configured(*base, "parallel.dispatch=broadcasts", world=8), 8)
    assert "sent      broadcasts: a token has experts on" in text
    assert "receive buffers of broadcasts" in text
    assert re.search(r"combine +0\.00 rows per token over the network, 21\.00 inside nodes", text)


# --- a backend of the experts ---------------------------------------------------------------------


def test_an_added_backend_obeys_the_rules() -> None:
    assert "counted" in choices()["kernels.backend"]
    configured("kernels.backend=counted", "precision=mxfp8")
    cpu = Facts("cpu", None, torch.float32, hidden=64, ffn=64)
    assert resolve("grouped_mlp", "counted", cpu).reason == "kernels.backend=counted"
    assert resolve("grouped_mlp", "auto", cpu).backend == "reference"
    with pytest.raises(KernelUnavailable, match="kernels.backend=counted cannot run here: counts"):
        resolve("grouped_mlp", "counted", replace(cpu, device="cuda", capability=(9, 0)))
    assert rows_for(9, 2, "counted") == 12 and rows_for(9, 2, "torch") == 9


@pytest.mark.parametrize("recipe", [None, Fp8Block(), Microscaling("mxfp8")])
def test_an_added_backend_has_the_bits_of_the_one_that_it_extends(recipe: Recipe | None) -> None:
    torch.manual_seed(0)
    x, w1, w2 = torch.randn(40, 64), torch.randn(4, 128, 64), torch.randn(4, 64, 64)
    idx, prob = torch.rand(40, 4).topk(2).indices.int(), torch.rand(40, 2)
    outs = []
    for name in ("counted", "torch"):
        plan = make_plan(idx, prob, first_expert=0, local_experts=4, rows=80, backend=name)
        spec = MLPSpec(Activation("swiglu"), name, recipe=recipe)
        before = Counted.calls
        outs.append(grouped_mlp(x, MLPWeights(w1, w2), plan, spec))
        assert (Counted.calls > before) == (name == "counted")
    assert torch.equal(*outs)


# --- an optimizer ---------------------------------------------------------------------------------


def test_an_added_optimizer_obeys_the_rules() -> None:
    assert "lion" in choices()["optim.kind"]
    assert "`lion`: the sign of momentum (arXiv 2302.06675)" in tables()
    with pytest.raises(ConfigError, match="optim.beta1=0.999 is above 0.99"):
        configured("optim.kind=lion", "optim.moments=bf16", "optim.beta1=0.999")
    configured("optim.kind=lion", "optim.moments=bf16", "optim.momentum=0.999")


def test_a_dry_run_counts_the_moments_of_an_added_optimizer() -> None:
    """Masters and one moment in fp32, where AdamW has two."""
    base = "experiment=moonlight_8gpu"
    lion, adamw = (
        resolved(configured(base, f"optim.kind={kind}", world=8), 8, 8)
        for kind in ("lion", "adamw")
    )
    bytes_of = [[w.optimizer_bytes for w in stage_weights(cfg, 8)] for cfg in (lion, adamw)]
    assert bytes_of[0] == [pytest.approx(2 / 3 * n) for n in bytes_of[1]]


@pytest.mark.dist
def test_a_model_trains_with_an_added_optimizer(tmp_path: Path) -> None:
    """Two ranks with a sharded state and one rank have the same losses, and others than AdamW's."""
    losses = {}
    how = ["run.steps=4", "precision=fp32", "optim.warmup_steps=0"]
    how += ["optim.lr=1e-3", "optim.min_lr=1e-4"]
    for kind, ranks in (("lion", 2), ("lion", 1), ("adamw", 1)):
        name = f"{kind}{ranks}"
        given = [*how, f"optim.kind={kind}"]
        losses[name], _ = trained(tmp_path / name, given, ranks)
    assert losses["lion2"] == pytest.approx(losses["lion1"], rel=1e-4)
    assert losses["lion1"][-1] < losses["lion1"][0] - 0.05
    assert losses["lion1"][1:] != pytest.approx(losses["adamw1"][1:], rel=1e-4)


# --- a recipe -------------------------------------------------------------------------------------


def test_an_added_recipe_obeys_the_rules() -> None:
    assert "fp8_wide" in choices()["precision.recipe"]
    assert "`fp8_wide`: e4m3 in blocks of 128, and e5m2 for gradients" in tables()
    switch = "precision.hidden=fp8 is a switch of fp8_block, and precision is fp8_wide"
    with pytest.raises(ConfigError, match=switch):
        configured("precision.recipe=fp8_wide", "precision.hidden=fp8")
    cfg = configured("precision.recipe=fp8_wide", "precision.bf16_first_layers=1")
    assert [recipe(cfg, layer) for layer in range(2)] == [None, Fp8Block("e5m2")]


def test_a_dry_run_counts_an_added_recipe() -> None:
    """Weights in bf16 and no FP8 copies, as its values are emulated."""
    base = ("experiment=moonlight_8gpu", "kernels.backend=torch")
    added_one, fp8 = (
        resolved(configured(*base, f"precision.recipe={name}", world=8), 8, 8)
        for name in ("fp8_wide", "fp8_block")
    )
    assert stage_memory(added_one, 8) == stage_memory(fp8, 8)
    assert step_time(added_one, 8, MACHINES["h200"]) == step_time(fp8, 8, MACHINES["h200"])


@pytest.mark.dist
def test_a_model_trains_with_an_added_recipe(tmp_path: Path) -> None:
    """It has the bits of the recipe that can be told to do the same, and others than bf16."""
    losses = {}
    same = ["precision=fp8_block", "precision.grad_format=e5m2"]
    for name, overrides in (
        ("added", ["precision.recipe=fp8_wide"]),
        ("same", same),
        ("bf16", ["precision=bf16"]),
    ):
        given = ["data=synthetic", "run.steps=3", *overrides]
        losses[name], _ = trained(tmp_path / name, given, 1)
    assert losses["added"] == losses["same"] != losses["bf16"]


# --- all, in a run --------------------------------------------------------------------------------


@pytest.mark.dist
def test_a_model_trains_with_all(tmp_path: Path) -> None:
    """A step of two ranks equals one over collectives; the start page names the additions."""
    losses = {}
    for name in ("broadcasts", "alltoall"):
        given = ["data=synthetic", "run.steps=2", "precision=fp32", "parallel.expert=2"]
        given += ["model.moe.activation=reglu", "kernels.backend=counted"]
        losses[name], page = trained(tmp_path / name, [*given, f"parallel.dispatch={name}"], 2)
        assert re.search(rf"transport +{name} +parallel.dispatch={name}", page)
        assert re.search(r"grouped_mlp +counted +kernels.backend=counted", page)
        if name == "broadcasts":
            assert "broadcasts are over when they return" in page
    assert len(losses["broadcasts"]) == 2
    assert losses["broadcasts"] == pytest.approx(losses["alltoall"], rel=1e-5)
