"""The rules between knobs: what is refused, and that the named override fixes it."""

import copy
import random
import re
import shlex
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from phalanx.configs.knobs import spelled
from phalanx.configs.load import load
from phalanx.configs.schema import Config
from phalanx.configs.tables.transports import TRANSPORTS
from phalanx.configs.validate import ConfigError, validate
from tests.support.additions import COUNTING_TRANSPORTS

MASK = "data.document_mask=true"
FP8 = "precision=fp8_block"


def problems(cfg: Config, world: int = 1) -> list[str]:
    try:
        validate(cfg, world)
    except ConfigError as error:
        return str(error).splitlines()
    return []


def named(line: str) -> list[str]:
    """The overrides that a problem names, as the words that a shell makes of them."""
    return shlex.split(line.rpartition("; set ")[2])


def table(path: Path) -> list[tuple[str, int, str, str]]:
    """Cases of a Markdown file: overrides, ranks, problem and fix of each row of its tables."""
    cases = []
    for line in path.read_text("utf-8").splitlines():
        if line.startswith("|") and not line.startswith(("| overrides |", "|---")):
            cells = re.split(r"(?<!\\)\|", line)[1:-1]
            overrides, world, problem, fix = (c.strip().replace("\\|", "|") for c in cells)
            cases.append((overrides, int(world), problem, fix))
    return cases


PROBLEMS = table(Path(__file__).with_name("problems.md"))


@mock.patch.dict(TRANSPORTS, COUNTING_TRANSPORTS)
@pytest.mark.parametrize(("overrides", "world", "problem", "fix"), PROBLEMS)
def test_problem_names_the_override_that_fixes_it(
    overrides: str, world: int, problem: str, fix: str
) -> None:
    given = overrides.split(" ")
    lines = problems(load(given), world)
    assert any(problem in line and fix in " ".join(named(line)) for line in lines), lines
    assert problems(load([*given, *(word for line in lines for word in named(line))]), world) == []


@pytest.mark.parametrize(
    ("overrides", "world"),
    [
        ("parallel.tensor=4", 4),  # two key-value heads on four ranks: each has a copy of one
        ("parallel.context=2 parallel.tensor=2", 4),
        ("parallel.pipeline=2 parallel.virtual_pipeline=2", 4),
        ("parallel.pipeline=2 parallel.pipeline_layout='Ett|ttL'", 2),
        ("parallel.pipeline=2 parallel.pipeline_layout='Et*3|tL'", 2),
        ("model=tiny_deepseek parallel.pipeline=2 parallel.pipeline_layout='E(t)*4|mL'", 2),
        ("model=tiny_deepseek parallel.pipeline=2 parallel.pipeline_layout='Ettttm|L'", 2),
        ("parallel.expert=4", 8),
        ("data=indexed data.blend=[a]", 1),
        ("data=indexed data.blend=[a,b]", 1),
        ("data=indexed data.blend=[0.7,a,3e-1,b]", 1),
        ("run.profile=[1,80]", 1),
        ("run.steps=1", 1),  # within the warm-up
        ("optim.schedule=WSD optim.warmup_steps=90 run.steps=100", 1),
        ("precision=fp32 kernels=torch run.device=cpu", 1),
        *[(f"{FP8} kernels={k}", 1) for k in ("auto", "reference", "torch", "te")],
        *[(f"{FP8} run.device={device} kernels=torch", 2) for device in ("cpu", "cuda")],
        (f"{FP8} precision.bf16_first_layers=1 precision.bf16_last_layers=2", 1),
        (f"{FP8} precision.dispatch=fp8", 1),
        ("precision=bf16 precision.dispatch=bf16", 1),
        ("model.moe.experts=0 model.moe.router.aux_loss=0 precision.dispatch=bf16", 1),
        (f"{FP8} precision.dispatch=fp8 parallel.dispatch=local parallel.expert=1", 2),
        *[
            (
                f"{FP8} precision.dispatch=fp8 parallel.dispatch={name} "
                f"parallel.expert_replication={slots}",
                2,
            )
            for name in ("alltoall", "symm")
            for slots in (0, 2)
        ],
        (f"{FP8} parallel.tensor=2", 2),
        *[
            (f"precision={recipe} precision.wgrad=bf16 kernels={k}", 1)
            for recipe in ("mxfp8", "nvfp4")
            for k in ("auto", "reference", "torch")
        ],
        *[(f"{FP8} precision.wgrad=bf16 kernels={k}", 1) for k in ("auto", "reference", "torch")],
        ("precision=nvfp4 precision.stochastic_rounding=false precision.bf16_last_layers=1", 1),
        ("data.split=98 run.eval_interval=0", 1),
        (f"{MASK} data.max_documents=8 data.micro_batch=4 parallel.tensor=2", 2),
        (f"{MASK} model=tiny_deepseek data.micro_batch=1 parallel.pipeline=2", 2),
    ],
)
def test_sound_configurations_pass(overrides: str, world: int) -> None:
    assert problems(load(overrides.split(" ")), world) == []


@mock.patch.dict(TRANSPORTS, COUNTING_TRANSPORTS)
def test_a_transport_carries_fp8_where_its_entry_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = load([FP8, "precision.dispatch=fp8", "parallel.dispatch=broadcasts"])
    assert len(problems(cfg, 2)) == 1
    monkeypatch.setitem(TRANSPORTS, "broadcasts", replace(TRANSPORTS["broadcasts"], fp8=True))
    assert problems(cfg, 2) == []
    monkeypatch.undo()
    # The transport is unknown when a configuration is checked.
    assert all(facts.fp8 for facts in TRANSPORTS.values() if facts.auto)


def test_all_problems_come_at_once_and_without_consequences() -> None:
    overrides = (
        "model.layers=0 precision.recipe=fp8 parallel.tensor=3 parallel.pipeline=3 data.blend=[a]"
    )
    knobs_named = [line.split("=")[0] for line in problems(load(overrides.split(" ")), 1)]
    assert knobs_named == [
        "model.layers",
        "precision.recipe",
        "data.blend",
        "parallel.tensor",
        "parallel.pipeline",
    ]


def test_validation_leaves_the_configuration_as_it_was() -> None:
    cfg = load(["model.layers=0", "parallel.tensor=3"])
    before = copy.deepcopy(cfg)
    problems(cfg)
    assert cfg == before


RANGES: dict[str, tuple[object, ...]] = {
    "parallel.tensor": (1, 2, 3, 4),
    "parallel.context": (1, 2, 3),
    "parallel.pipeline": (0, 1, 2, 3, 4),
    "parallel.virtual_pipeline": (1, 1, 2, 3),
    "parallel.pipeline_layout": ("", "", "Ett|ttL", "E(tt|)*2L", "Et"),
    "parallel.expert": (0, 1, 2, 3, 4, 16),
    "parallel.dispatch": ("auto", "local", "alltoall", "symm", "hier"),
    "parallel.expert_replication": (0, 0, 2, "auto"),
    "model.layers": (1, 4, 6),
    "model.vocab_size": (100, 256, 258),
    "model.bias": (False, True),
    "model.attention.kind": ("gqa", "mla"),
    "model.attention.heads": (3, 4, 8),
    "model.attention.kv_heads": (1, 2, 3),
    "model.attention.window": (0, 32),
    "model.moe.experts": (0, 4, 6, 8),
    "model.moe.top_k": (1, 2, 7),
    "model.moe.shared_ffn": (0, 0, 100),
    "model.moe.dense_layers": (0, 1, 5),
    "model.moe.router.groups": (1, 2, 3, 5),
    "model.moe.router.group_topk": (1, 2, 4),
    "model.moe.router.bias_rate": (0.0, 1e-3),
    "model.moe.router.rounding": ("none", "nearest"),
    "model.moe.router.force_balance": (False, True),
    "model.moe.router.replay": ("", "", "a"),
    "data.sequence_length": (7, 32, 100),
    "data.micro_batch": (1, 3, 4),
    "data.global_batch": (0, 16, 31),
    "data.blend": ([], ["a"], ["0.5", "a", "b"]),
    "data.source": ("embedded", "indexed", "synthetic"),
    "data.document_mask": (False, True),
    "data.max_documents": (0, 8),
    "model.moe.router.seq_aux_loss": (0.0, 1e-4),
    "kernels.attention": ("auto", "te", "flex"),
    "optim.min_lr": (0.0, 1.0),
    "optim.schedule": ("cosine", "WSD"),
    "optim.warmup_steps": (0, 10, 75),
    "optim.decay_steps": (0, 10, 75, 80),
    "optim.qk_clip": (0.0, 100.0),
    "model.attention.qk_norm": (False, True),
    "precision.recipe": ("bf16", "fp32", "fp8_block", "fp8_block", "mxfp8", "nvfp4"),
    "precision.stochastic_rounding": (True, False),
    "precision.hidden": ("bf16", "fp8"),
    "precision.dispatch": ("auto", "bf16", "fp8"),
    "precision.wgrad": ("bf16", "fp8"),
    "precision.bf16_first_layers": (0, 0, 1, 6),
    "precision.bf16_last_layers": (0, 0, 2, 6),
    "run.device": ("auto", "cuda", "cpu"),
    "kernels.backend": ("auto", "torch", "te", "fused"),
    "optim.kind": ("adamw", "muon"),
    "optim.moments": ("fp32", "bf16"),
    "optim.momentum": (0.95, 0.995),
    "optim.max_logit_every": (0, 2),
    "run.recompute": ([], ["norm"], ["mla_up", "full"], ["moe", "expert_h"], ["moe_act", "mlp"]),
    "run.offload": ([], ["residual", "residual"], ["attention"], ["expert_h", "attention"]),
    "run.checkpoints": ("", "s3://b/x", "file:///tmp/x", "runs", "s3://u:p@b/x", "s3://"),
    "run.sample_every": (0, 5),
    "model.attention.qk_norm_over": ("head", "projection"),
    "model.attention.rotary_dim": (0, 4, 5, 500),
    "model.attention.output_gate": (False, True),
    "model.attention.qkv_bias": (False, True),
    "model.moe.shared_gate": (False, True),
}


@pytest.mark.parametrize("cases", [50, pytest.param(1000, marks=pytest.mark.slow)])
def test_the_named_overrides_together_always_fix_a_configuration(cases: int) -> None:
    check_random_configurations(RANGES, cases)


def check_random_configurations(ranges: dict[str, tuple[object, ...]], cases: int) -> None:
    draw = random.Random(0)
    broken = 0
    for _ in range(cases):
        world = draw.choice((1, 2, 3, 4, 6, 8, 12, 24))
        paths = draw.sample(list(ranges), k=12)
        given = [f"{path}={spelled(draw.choice(ranges[path]))}" for path in paths]
        lines = problems(load(given), world)
        broken += bool(lines)
        words = [word for line in lines for word in named(line)]
        assert problems(load([*given, *words]), world) == [], (world, lines)
    assert broken > cases / 2
