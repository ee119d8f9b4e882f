"""Training with the fused kernels on one NVIDIA GPU is training with the torch backend."""

import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from phalanx.moe.report.loggers import read
from tests.support.row_overflow import EVERY
from tests.support.runs import text, write_corpus

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).resolve().parents[2]
OVERRIDES = [
    "run.device=cuda",
    "run.steps=4",
    "run.save_interval=-1",
    "data=synthetic",
    "data.sequence_length=256",
    "data.micro_batch=2",
    "data.global_batch=8",
    "optim.warmup_steps=0",
    "run.graph=off",
    "parallel.comm_sms=0",
]
"""Run without features that `auto` adds, unless a test asks for them."""
GRAPH = "run.graph=full_iteration"
Steps = list[dict[str, float]]
"""Metrics of each run."""


@pytest.fixture(autouse=True)
def _hopper() -> None:
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs a Hopper GPU")


def train(
    folder: Path, name: str, *overrides: str, ranks: int = 1, program: Sequence[str] = ("train.py",)
) -> Steps:
    positions = [f"run.dir={folder}", f"run.name={name}"]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    launcher = launcher if ranks > 1 else []
    command = [sys.executable, *launcher, *program, *OVERRIDES, *positions, *overrides]
    finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert finished.returncode == 0, finished.stdout[-4000:] + finished.stderr[-4000:]
    return read(folder / name / "metrics.jsonl")


def train_side_by_side(folder: Path, runs: Mapping[str, Sequence[str]]) -> dict[str, Steps]:
    """Several runs by name, some concurrently: most of a small run's time is its start."""
    with ThreadPoolExecutor(_AT_A_TIME) as pool:
        started = {name: pool.submit(train, folder, name, *given) for name, given in runs.items()}
        return {name: run.result() for name, run in started.items()}


_AT_A_TIME = 4


def close(ours: Steps, theirs: Steps) -> None:
    for name, tolerance in (("loss", 5e-3), ("grad_norm", 5e-2)):
        want = pytest.approx([step[name] for step in theirs], rel=tolerance)
        assert [step[name] for step in ours] == want, name


RUNS = ("torch", "eager", "graph")


def check_fused_and_captured(
    folder: Path, common: Sequence[str], *, same: Sequence[str], near: int = 4
) -> None:
    """Train `RUNS`: captured steps have the `same` records as eager ones, in all steps.

    `near`: the first steps in which fused kernels are close to the torch backend.
    """
    fused = [*common, "kernels=fused"]
    runs = dict(zip(RUNS, ([*common, "kernels=torch"], fused, [*fused, GRAPH]), strict=True))
    theirs, eager, graph = train_side_by_side(folder, runs).values()
    close(eager[:near], theirs[:near])
    assert eager[-1]["loss"] < eager[0]["loss"]
    for name in same:
        assert [s[name] for s in graph] == [s[name] for s in eager], name
    assert "could not be captured" not in (folder / "graph" / "console.log").read_text()


@pytest.mark.parametrize("model", ["tiny", "tiny_gpt_oss"])
def test_fused_kernels_train_like_torch(model: str, tmp_path: Path) -> None:
    margins = ["kernels.sm_margin.forward=8", "kernels.sm_margin.dgrad=16"]
    margins += ["kernels.sm_margin.wgrad=24"]
    fused = [f"model={model}", "kernels=fused"]
    runs = {
        "torch": [f"model={model}", "kernels=torch"],
        "fused": fused,
        "margins": [*fused, *margins],
        "unfused": [*fused, "kernels.gradient_accumulation_fusion=false"],
    }
    got = train_side_by_side(tmp_path, runs)
    close(got["fused"], got["torch"])
    close(got["margins"], got["fused"])
    close(got["unfused"], got["fused"])


def documents(folder: Path) -> list[str]:
    """Overrides that train on packed documents of real text."""
    pieces = [list(p[: 20 + i % 300]) for i, p in enumerate(text() * 20)]
    prefix = write_corpus(folder / "corpus", pieces)
    data = ["data.source=indexed", f"data.blend=[{prefix}]", f"data.cache={folder / 'cache'}"]
    return [*data, "model.vocab_size=256", "data.split='100'", "data.document_mask=true"]


@pytest.mark.parametrize("model", ["tiny", "tiny_gpt_oss"])
def test_packed_documents(model: str, tmp_path: Path) -> None:
    """flash-attn-4, eager and captured, against the reference."""
    common = [f"model={model}", "kernels=torch", "model.attention.head_dim=64"]
    common += documents(tmp_path)
    runs = {name: [*common, f"kernels.attention={name}"] for name in ("reference", "fa4", "flex")}
    runs |= {f"{name}_graph": [*runs[name], GRAPH] for name in ("fa4", "flex")}
    want, *others = train_side_by_side(tmp_path, runs).values()
    for got in others:
        close(got, want)


LINEAR = "tiny_qwen3_next"


def test_linear_attention(tmp_path: Path) -> None:
    """flash-linear-attention, eager and captured, against the torch implementation."""
    common = [f"model={LINEAR}", "kernels=fused", "model.attention.head_dim=64"]
    packed = documents(tmp_path)
    ways = {"torch": ["kernels.attention=reference"], "fla": [], "graph": [GRAPH]}
    runs = {name: [*common, *way] for name, way in ways.items()}
    runs |= {f"documents_{name}": [*given, *packed] for name, given in runs.items()}
    got = train_side_by_side(tmp_path, runs)
    for data in ("", "documents_"):
        for name in ("fla", "graph"):
            close(got[data + name], got[f"{data}torch"])
    labels = [[step["labels"] for step in got[f"documents_{name}"]] for name in ways]
    assert labels[0] == labels[1] == labels[2] and len(set(labels[0])) > 1
    page = (tmp_path / "fla" / "console.log").read_text()
    assert re.search(r"^  linear_attention +(\S+) +auto$", page, re.M)[1] == "fla"  # type: ignore[index]


@pytest.mark.parametrize("mode", ["nearest", "up", "down"])
def test_token_rounding(mode: str, tmp_path: Path) -> None:
    rounding = [f"model.moe.router.rounding={mode}", "model.moe.router.rounding_tile=64"]
    theirs = train(tmp_path, "torch", "model=tiny", "kernels=torch", *rounding)
    close(train(tmp_path, "fused", "model=tiny", "kernels=fused", *rounding), theirs)


@pytest.mark.parametrize("kernels", ["torch", "fused"])
@pytest.mark.parametrize("model", ["tiny", "tiny_gpt_oss", "tiny_deepseek", LINEAR])
def test_a_graph_trains_bit_for_bit_like_eager_steps(
    model: str, kernels: str, tmp_path: Path
) -> None:
    options = [f"model={model}", f"kernels={kernels}", "run.steps=200"]
    options += ["run.eval_interval=70", "run.eval_batches=1", "parallel.capacity_factor=8"]
    runs = {"eager": options, "graph": [*options, GRAPH]}
    eager, graph = train_side_by_side(tmp_path, runs).values()
    for name in ("loss", "grad_norm", "valid_loss", "load_max", "mtp_loss"):
        assert [s.get(name) for s in graph] == [s.get(name) for s in eager], name


@pytest.mark.parametrize(
    ("model", "precision"), [("tiny", "bf16"), ("tiny_deepseek", "bf16"), ("tiny", "fp8_block")]
)
def test_muon_and_qk_clip_in_a_graph(model: str, precision: str, tmp_path: Path) -> None:
    options = [f"model={model}", f"precision={precision}", "kernels=fused", "optim=muon"]
    options += ["run.steps=20", "optim.qk_clip=0.1", "optim.max_logit_every=1"]
    options += ["parallel.capacity_factor=8"]
    runs = {"eager": options, "graph": [*options, GRAPH]}
    eager, graph = train_side_by_side(tmp_path, runs).values()
    assert eager[-1]["loss"] < eager[0]["loss"]
    assert max(s["max_logit"] for s in eager) > 0.1  # there was something to clip
    for name in ("loss", "grad_norm", "max_logit"):
        assert [s[name] for s in graph] == [s[name] for s in eager], name


def test_a_batch_that_grows_is_captured_anew(tmp_path: Path) -> None:
    options = ["model=tiny_gpt_oss", "run.steps=12", "data.batch_warmup=[2:2e3,4:5e3]"]
    runs = {"eager": options, "graph": [*options, GRAPH]}
    eager, graph = train_side_by_side(tmp_path, runs).values()
    assert [s["labels"] for s in graph] == [512] * 4 + [1024] * 3 + [2048] * 5
    for name in ("loss", "grad_norm", "labels"):
        assert [s[name] for s in graph] == [s[name] for s in eager], name
    assert "could not be captured" not in (tmp_path / "graph" / "console.log").read_text()


def test_an_injected_fault_is_in_the_graph(tmp_path: Path) -> None:
    """Step 5 is a replay; steps that are not corrupted are bitwise equal."""
    options = ["model=tiny", "kernels=fused", "run.steps=8", "run.bad_steps=skip"]
    options += ["parallel.capacity_factor=8"]
    bad = [*options, "run.inject=nan@5"]
    eager, graph, sound = train_side_by_side(
        tmp_path, {"eager": bad, "graph": [*bad, GRAPH], "sound": [*options, GRAPH]}
    ).values()
    assert [s.get("skipped", 0) for s in graph] == [0, 0, 0, 0, 1, 1, 1, 1]
    for name in ("loss", "grad_norm", "skipped"):
        assert [s.get(name) for s in graph] == [s.get(name) for s in eager], name
    assert [s["loss"] for s in graph[:5]] == [s["loss"] for s in sound[:5]]


@pytest.mark.parametrize(
    ("given", "captured"),
    [
        ("", True),
        ("kernels=torch", True),
        ("kernels=megatron", False),
        ("run.recompute=moe", True),
        ("run.offload=[residual,expert_h]", True),
    ],
)
def test_auto_captures_where_it_can(given: str, captured: bool, tmp_path: Path) -> None:
    options = ["run.steps=8", "run.eval_interval=4", "run.eval_batches=1", *given.split()]
    auto = train(tmp_path, "auto", *options, "run.graph=auto")
    page = (tmp_path / "auto" / "console.log").read_text()
    assert re.search(r"^  graph +(\S+) +auto$", page, re.M)[1] == (  # type: ignore[index]
        "full_iteration" if captured else "off"
    )
    if captured:
        eager = train(tmp_path, "eager", *options)
        for name in ("loss", "grad_norm", "valid_loss"):
            assert [s.get(name) for s in auto] == [s.get(name) for s in eager], name


def test_a_run_goes_on_captured_where_it_was_eager(tmp_path: Path) -> None:
    """And vice versa: a checkpoint does not depend on graphs."""
    full_run = train(tmp_path, "whole", "run.steps=12", "optim.decay_steps=12")
    for first, second in (("off", "auto"), ("auto", "off")):
        for steps, graph in ((6, first), (12, second)):
            options = [f"run.steps={steps}", f"run.graph={graph}", "run.save_interval=6"]
            parts = train(tmp_path, f"{first}_{second}", *options, "optim.decay_steps=12")
        for name in ("loss", "grad_norm"):
            assert [s[name] for s in parts] == [s[name] for s in full_run], (first, name)


@pytest.mark.parametrize(
    "given",
    [
        "optim=adamw",
        "optim=adamw optim.moments=bf16",
        "optim=muon",
        "optim=muon optim.moments=bf16 parallel.grad_dtype=bf16",
    ],
)
def test_updates_in_graphs_repeat_the_bits_of_eager_ones(given: str, tmp_path: Path) -> None:
    """With a norm that is clipped in some steps and not in others."""
    options = [*given.split(), "run.steps=12", "kernels=fused"]
    norms = [step["grad_norm"] for step in train(tmp_path, "norms", *options)]
    clip = f"optim.clip_grad={sorted(norms)[len(norms) // 2]}"
    runs = {name: [*options, clip, graph] for name, graph in (("eager", ""), ("graph", GRAPH))}
    got = train_side_by_side(tmp_path, {k: [x for x in v if x] for k, v in runs.items()})
    for name in ("loss", "grad_norm"):
        assert [s[name] for s in got["graph"]] == [s[name] for s in got["eager"]], name
    assert "could not be captured" not in (tmp_path / "graph" / "console.log").read_text()


@pytest.fixture
def two_gpus() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")


@pytest.mark.parametrize("dispatch", ["symm", "alltoall"])
def test_a_step_that_overflows_is_run_again_and_captured_anew(
    dispatch: str, tmp_path: Path, two_gpus: None
) -> None:
    options = ["model=tiny", "kernels=fused", "run.steps=12", f"parallel.dispatch={dispatch}"]
    roomy = train(tmp_path, "roomy", *options, "parallel.capacity_factor=8", ranks=2)
    tight = train(tmp_path, "tight", *options, "parallel.capacity_factor=1", GRAPH, ranks=2)
    assert tight[-1]["reruns"] > 0
    for name in ("loss", "grad_norm"):
        assert [s[name] for s in tight] == [s[name] for s in roomy], name


@pytest.mark.parametrize("model", ["tiny", "tiny_gpt_oss", "tiny_deepseek"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_overflows_every_ten_steps_change_nothing_in_a_graph(
    ranks: int, model: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Overflows of eager steps and, alternately, of captured ones."""
    if ranks == 2:
        request.getfixturevalue("two_gpus")
    options = [f"model={model}", "kernels=fused", "run.steps=40", "run.eval_interval=40"]
    options += ["run.eval_batches=2", "parallel.capacity_factor=8"]
    options += ["parallel.dispatch=symm"] if ranks == 2 else []
    never = train(tmp_path, "never", *options, ranks=ranks)
    crowding = ("-m", "tests.support.row_overflow")
    often = train(tmp_path, "often", *options, GRAPH, ranks=ranks, program=crowding)
    reruns = [0, *(step["reruns"] for step in often)]
    assert all(reruns[n + 1] > reruns[n] for n in range(0, 40, EVERY)) and not never[-1]["reruns"]
    for name in ("loss", "grad_norm", "valid_loss", "load_max", "mtp_loss"):
        assert [s.get(name) for s in often] == [s.get(name) for s in never], name


PIPELINES = ["parallel.pipeline=2", "parallel.pipeline=2 parallel.virtual_pipeline=2"]


@pytest.mark.parametrize("layout", PIPELINES)
@pytest.mark.parametrize("model", ["tiny", "tiny_deepseek"])
def test_overflows_of_any_stage_change_nothing_in_a_graph(
    model: str, layout: str, tmp_path: Path, two_gpus: None
) -> None:
    """All stages run a step again if the experts of one of them lack rows."""
    options = [f"model={model}", "kernels=fused", "run.steps=40", "run.eval_interval=40"]
    options += ["run.eval_batches=2", "parallel.capacity_factor=8", *layout.split()]
    never = train(tmp_path, "never", *options, ranks=2)
    crowding = ("-m", "tests.support.row_overflow")
    often = train(tmp_path, "often", *options, GRAPH, ranks=2, program=crowding)
    reruns = [0, *(step["reruns"] for step in often)]
    assert all(reruns[n + 1] > reruns[n] for n in range(0, 40, EVERY)) and not never[-1]["reruns"]
    for name in ("loss", "grad_norm", "valid_loss", "load_max", "mtp_loss"):
        assert [s.get(name) for s in often] == [s.get(name) for s in never], name


def test_a_graph_takes_the_memory_of_eager_fp8_copies(tmp_path: Path) -> None:
    """Cached copies of weights of the last eager step keep no blocks from it."""
    layers, experts, width = 4, 32, 1024
    model = ["model=tiny", f"model.layers={layers}", f"model.moe.experts={experts}"]
    model += [f"model.hidden={width}", f"model.moe.ffn={width}"]
    fp8 = ["precision=fp8_block", "precision.weights=resident"]
    last = train(tmp_path, "run", *model, *fp8, "kernels=fused", GRAPH)[-1]
    copies = 2 * layers * experts * 3 * width**2 / 2**30
    assert last["memory_reserved"] - last["memory"] < copies / 2


@pytest.mark.parametrize("layout", PIPELINES)
@pytest.mark.parametrize(
    "given",
    [
        "run.recompute=full",
        "run.recompute=[norm,attention,expert_h]",
        "run.offload=[residual,expert_h]",
        "optim=muon optim.moments=bf16",
    ],
)
def test_memory_savers_and_muon_in_graphs_of_stages(
    given: str, layout: str, tmp_path: Path, two_gpus: None
) -> None:
    options = ["model=tiny_deepseek", "kernels=fused", "run.steps=8", *layout.split()]
    options += [*given.split(), "parallel.capacity_factor=8"]
    eager = train(tmp_path, "eager", *options, ranks=2)
    graph = train(tmp_path, "graph", *options, GRAPH, ranks=2)
    for name in ("loss", "grad_norm", "mtp_loss"):
        assert [s.get(name) for s in graph] == [s.get(name) for s in eager], name


@pytest.mark.parametrize("model", ["tiny", "tiny_gpt_oss", "tiny_deepseek", LINEAR])
def test_halves_of_sequences_in_a_graph(model: str, tmp_path: Path, two_gpus: None) -> None:
    """With context parallelism, replays and reruns train on the same tokens as eager steps."""
    options = [f"model={model}", "kernels=fused", "run.steps=24", "run.eval_interval=24"]
    options += ["run.eval_batches=2", "parallel.context=2", "parallel.capacity_factor=8"]
    eager = train(tmp_path, "eager", *options, ranks=2)
    graph = train(tmp_path, "graph", *options, GRAPH, ranks=2)
    crowding = ("-m", "tests.support.row_overflow")
    often = train(tmp_path, "often", *options, GRAPH, ranks=2, program=crowding)
    assert often[-1]["reruns"] >= 3 and not eager[-1]["reruns"] and not graph[-1]["reruns"]
    for steps in (graph, often):
        for name in ("loss", "grad_norm", "valid_loss", "load_max", "mtp_loss"):
            assert [s.get(name) for s in steps] == [s.get(name) for s in eager], name


@pytest.mark.parametrize("model", ["tiny", "tiny_gpt_oss", "tiny_deepseek", LINEAR])
def test_documents_over_two_halves(model: str, tmp_path: Path, two_gpus: None) -> None:
    """Eager and captured, against one GPU."""
    common = [f"model={model}", "kernels=torch", "kernels.attention=flex", *documents(tmp_path)]
    common += ["model.moe.router.seq_aux_loss=0"]
    want = train(tmp_path, "one", *common)
    halves = [*common, "parallel.context=2"]
    close(train(tmp_path, "two", *halves, ranks=2), want)
    close(train(tmp_path, "graph", *halves, GRAPH, ranks=2), want)


@pytest.mark.parametrize("model", ["tiny", "tiny_gpt_oss", "tiny_deepseek"])
def test_one_sided_dispatch_trains_bit_for_bit_like_collectives(
    model: str, tmp_path: Path, two_gpus: None
) -> None:
    options = [f"model={model}", "kernels=fused", "run.steps=6", "parallel.capacity_factor=8"]
    theirs = train(tmp_path, "alltoall", *options, "parallel.dispatch=alltoall", ranks=2)
    beside, keep = "parallel.comm_sms=16", "parallel.save_x=keep"
    variants = {"symm": (), "graph": (keep, GRAPH)}
    variants |= {"beside": (beside, keep), "beside_graph": (beside, GRAPH)}
    for name, extra in variants.items():
        ours = train(tmp_path, name, *options, "parallel.dispatch=symm", *extra, ranks=2)
        for key in ("loss", "grad_norm"):
            assert [s[key] for s in ours] == [s[key] for s in theirs], (name, key)


STRICT = """
import runpy, torch
from phalanx.moe.run.trainer import Trainer

step = Trainer._train_step

def strict(self):
    torch.cuda.set_sync_debug_mode("error" if self.step > 3 else "default")
    try:
        return step(self)
    finally:
        torch.cuda.set_sync_debug_mode("default")

Trainer._train_step = strict
runpy.run_path("train.py", run_name="__main__")
"""


@pytest.mark.parametrize("moments", ["fp32", "bf16"])
def test_the_host_waits_for_nothing_but_the_totals(moments: str, tmp_path: Path) -> None:
    """Steps with update, record and preparation of the next, in torch's sync debug mode."""
    options = ["run.steps=8", "run.log_interval=1", f"optim.moments={moments}", GRAPH]
    steps = train(tmp_path, moments, *options, program=("-c", STRICT))
    assert [step["step"] for step in steps] == list(range(1, 9))
