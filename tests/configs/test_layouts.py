"""Sizes that a configuration resolves to, and the layouts of all experiments."""

from dataclasses import replace

import pytest

from phalanx.configs.arithmetic.accounting import flops_per_token
from phalanx.configs.layout import ranks_of_experiment
from phalanx.configs.load import Ended, from_argv, load, options
from phalanx.configs.schema import Config
from phalanx.configs.validate import (
    ConfigError,
    data_parallel_size,
    expert_parallel_size,
    micro_batches,
    validate,
)
from tests.configs.test_validate import problems
from tests.support.advice import advised, tried
from tests.support.distributed import run_distributed


@pytest.mark.parametrize(
    ("overrides", "world", "expert"),
    [
        ("", 1, 1),
        ("", 2, 2),
        ("", 6, 2),
        ("", 16, 8),
        ("model.moe.experts=6", 4, 2),
        ("parallel.pipeline=2", 4, 2),
        ("parallel.tensor=2", 8, 8),  # experts spread over tensor parallel ranks too
        ("parallel.expert=4", 8, 4),
    ],
)
def test_expert_parallel_size(overrides: str, world: int, expert: int) -> None:
    assert expert_parallel_size(load(overrides.split()), world) == expert


def test_sizes_of_a_large_layout() -> None:
    cfg = load(["experiment=deepseek_v3_1024gpu"])
    assert data_parallel_size(cfg, 1024) == 64
    assert micro_batches(cfg, 1024) == 256


EXPERIMENTS = {
    "deepseek_v3_1024gpu": 1024,
    "deepseek_v3_256gpu": 256,
    "gpt_oss_120b_64gpu": 64,
    "deepseek_v3_l4_8gpu": 8,
    "gpt_oss_20b_8gpu": 8,
    "moonlight_8gpu": 8,
    "qwen3_30b_8gpu": 8,
    "qwen3_235b_64gpu": 64,
    "mixtral_8x7b_8gpu": 8,
    "mixtral_8x22b_64gpu": 64,
    "deepseek_v2_lite_8gpu": 8,
    "kimi_k2_256gpu": 256,
    "olmoe_8gpu": 8,
    "deepseek_v3_phases_256gpu": 256,
    "glm_4_5_128gpu": 128,
    "glm_4_5_air_32gpu": 32,
    "minimax_m2_64gpu": 64,
    "qwen3_next_16gpu": 16,
    "qwen3_30b_128k_8gpu": 8,
    "qwen3_30b_1m_32gpu": 32,
}


def test_experiments_of_the_proof_differ_in_their_mlps_alone() -> None:
    dense, moe = (load([f"experiment=proof_{name}"]) for name in ("dense", "moe"))
    length = dense.data.sequence_length
    assert flops_per_token(dense.model, length) == flops_per_token(moe.model, length)
    assert (dense.data, dense.optim, dense.parallel) == (moe.data, moe.optim, moe.parallel)
    dense.model.moe, dense.model.name = moe.model.moe, moe.model.name
    assert dense.model == moe.model


def test_every_experiment_has_a_size() -> None:
    on_any_number = ["proof_dense", "proof_moe", "proof_moe_32k", "proof_moe_long"]
    assert sorted([*EXPERIMENTS, *on_any_number]) == sorted(options("experiment"))
    assert {name: ranks_of_experiment(name) for name in EXPERIMENTS} == EXPERIMENTS
    assert ranks_of_experiment("of_my_own") == ranks_of_experiment("") == 0


@pytest.fixture
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("option", "name"),
    [*(("run.dry_run=true", name) for name in EXPERIMENTS), ("--check", "glm_4_5_128gpu")],
)
@pytest.mark.usefixtures("no_launcher")
def test_a_dry_run_takes_the_ranks_of_its_experiment(
    option: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    cfg, world = from_argv([option, f"experiment={name}"]), EXPERIMENTS[name]
    assert cfg.parallel.world_size == world
    taken = f"one a GPU, which this assumes: parallel.world_size={world}\n"
    said = f"experiment={name} is for {world} ranks, {taken}"
    assert capsys.readouterr() == ("", said)


@pytest.mark.parametrize(
    ("argv", "launched", "world"),
    [
        (["experiment=qwen3_30b_8gpu", "run.dry_run=true"], "16", 0),  # those that were started
        (["experiment=qwen3_30b_8gpu", "run.dry_run=true", "parallel.world_size=16"], "", 16),
        (["model=tiny", "--check"], "", 0),
    ],
)
@pytest.mark.usefixtures("no_launcher")
def test_ranks_that_are_given_are_taken(
    argv: list[str],
    launched: str,
    world: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if launched:
        monkeypatch.setenv("WORLD_SIZE", launched)
    assert from_argv(argv).parallel.world_size == world
    assert capsys.readouterr() == ("", "")


def resized(name: str, world: int, *more: str) -> tuple[list[str], Config]:
    """Overrides that an error names, or none, and the configuration with them."""
    given = [f"experiment={name}", *more, f"parallel.world_size={world}"]
    try:
        validate(load(given), 1, name)
        return [], load(given)
    except ConfigError as error:
        (line,) = str(error).splitlines()
    own = EXPERIMENTS[name]
    assert line.startswith(f"experiment={name} is for {own} ranks (tensor ")
    assert f"), not {world}: set " in line and f" to fit {world}, or start {own}; " in line
    shown = f"run.dry_run=true parallel.world_size={own} estimates it on {own} without them"
    assert line.endswith(shown) and tried(given, shown.split()[:2])
    (words,) = advised(line)
    return words, tried(given, words)


@pytest.mark.parametrize(
    ("given", "line"),
    [
        (
            ["model=qwen3_30b_a3b", "parallel.tensor=4", "parallel.expert=8"],
            "parallel.tensor=4 x parallel.expert=8 does not fit 1 rank; set parallel.world_size=8",
        ),
        (
            ["model=tiny_gpt_oss", "parallel.pipeline=3", "parallel.world_size=4"],
            "parallel.pipeline=3 does not fit 4 ranks; set parallel.world_size=6",
        ),
        (
            ["parallel.expert=8", "parallel.world_size=12", "data.global_batch=32"],
            "parallel.expert=8 does not fit 12 ranks; set parallel.world_size=8",
        ),
        (
            ["experiment=qwen3_235b_64gpu", "parallel.world_size=48"],
            "experiment=qwen3_235b_64gpu is for 64 ranks (tensor 1 x context 1 x pipeline 8 x data "
            "8, experts over 8), not 48: set parallel.world_size=64, or parallel.pipeline=6 "
            "parallel.virtual_pipeline=1 to fit 48",
        ),
        (  # a problem of any number of ranks
            ["parallel.tensor=3"],
            "parallel.tensor=3 does not divide model.vocab_size=256, model.attention.heads=4, "
            "world_size=1, model.attention.kv_heads=2; set parallel.tensor=1",
        ),
    ],
)
@pytest.mark.parametrize("option", ["run.dry_run=true", "--check"])
@pytest.mark.usefixtures("no_launcher")
def test_ranks_that_a_layout_fits_are_named_where_none_are_started(
    option: str, given: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(Ended):
        from_argv([option, *given])
    assert capsys.readouterr().err == f"error: {line}\n"
    for words in advised(line):
        from_argv([option, *given, *words])


def test_ranks_of_a_launcher_are_no_remedy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(Ended):
        from_argv(["--check", "parallel.expert=8"])
    assert capsys.readouterr().err.endswith("; set parallel.expert=2\n")


def test_a_problem_of_any_number_of_ranks_is_not_blamed_on_it() -> None:
    lines = []
    for name, ranks in (("olmoe_8gpu", 8), ("olmoe_8gpu", 4), ("", 4)):
        model = f"experiment={name}" if name else "model=olmoe_1b_7b"
        with pytest.raises(ConfigError) as raised:
            validate(load([model, "parallel.expert=4", "parallel.virtual_pipeline=2"]), ranks, name)
        lines.append(str(raised.value))
    assert lines[0] == lines[1] == lines[2]
    assert lines[0].startswith("parallel.virtual_pipeline=2 needs more than one stage")


def test_an_experiment_that_fits_no_number_of_ranks_has_its_problems_named() -> None:
    name, more = "kimi_k2_256gpu", ["parallel.dispatch=local", "parallel.expert_replication=1"]
    with pytest.raises(ConfigError, match="^parallel.pipeline=8 does not divide") as raised:
        validate(load([f"experiment={name}", *more, "parallel.world_size=4"]), 1, name)
    lines = str(raised.value).splitlines()
    assert any(line.startswith("parallel.expert_replication=1 is not possible") for line in lines)


@pytest.mark.parametrize("name", EXPERIMENTS)
@pytest.mark.extras
def test_an_experiment_on_other_ranks_needs_one_set_of_overrides(name: str) -> None:
    from phalanx.moe.plan.described import resolved

    own = load([f"experiment={name}"]).parallel
    for world in (1, 2, 8, 16, 64, 100, 1024):
        words, cfg = resized(name, world)
        resolved(cfg, world, 8)  # which a dry run asks next
        p = cfg.parallel
        assert words or (p.expert == own.expert and p.pipeline == own.pipeline)
        assert p.tensor <= own.tensor and p.pipeline <= own.pipeline and p.expert <= own.expert
        if world % EXPERIMENTS[name] == 0 or (world >= EXPERIMENTS[name] and world != 100):
            # Five micro-batches of 1,280 sequences, as of GPT-OSS-120B on 1,024 ranks, cannot go
            # by chunks of four stages.
            by_chunks = micro_batches(load([f"experiment={name}"]), world) % own.pipeline == 0
            virtual = own.virtual_pipeline if by_chunks else 1
            assert p == replace(own, world_size=world, virtual_pipeline=virtual)


@pytest.mark.parametrize(
    ("name", "world", "words"),
    [
        ("qwen3_235b_64gpu", 8, ["parallel.expert=1"]),
        ("deepseek_v3_256gpu", 64, ["parallel.expert=4"]),
        ("glm_4_5_128gpu", 8, ["parallel.expert=1"]),
        ("deepseek_v3_1024gpu", 8, ["parallel.pipeline=4", "parallel.expert=2"]),
        ("qwen3_30b_8gpu", 100, ["parallel.expert=4", "data.global_batch=600"]),
    ],
)
def test_sizes_of_an_experiment_are_kept_where_they_can_be(
    name: str, world: int, words: list[str]
) -> None:
    assert resized(name, world)[0] == words


def test_other_mistakes_stay_lines_of_their_own() -> None:
    given = ["experiment=qwen3_235b_64gpu", "optim.lr=0", "data.sequence_length=0"]
    with pytest.raises(ConfigError) as error:
        validate(load(given), 8, "qwen3_235b_64gpu")
    lines = str(error.value).splitlines()
    assert [line.partition("=")[0] for line in lines] == [
        "data.sequence_length",
        "optim.lr",
        "experiment",
    ]
    validate(load([*given, *(word for line in lines for word in advised(line)[0])]), 8)


@pytest.mark.parametrize(("name", "world"), EXPERIMENTS.items())
def test_experiment_is_valid_at_its_size(name: str, world: int) -> None:
    assert problems(load([f"experiment={name}"]), world) == []
    assert problems(load([f"experiment={name}", "run=bench"]), world) == []
    # The layout to check wins over the ranks that check it.
    assert problems(load([f"experiment={name}", f"parallel.world_size={world}"]), 1) == []


def megatron_layouts(experiments: dict[str, tuple[Config, int]]) -> dict[str, tuple[int, int]]:
    """(stages, chunks) of every experiment as Megatron-Core reads its layout."""
    from phalanx.parallel.megatron import cpu

    cpu.install()
    from phalanx.moe.model.megatron_config import Layout, transformer_config

    found = {}
    for name, (cfg, world) in experiments.items():
        p, expert = cfg.parallel, expert_parallel_size(cfg, world)
        layout = Layout(p.tensor, p.context, p.pipeline, p.virtual_pipeline, expert)
        config = transformer_config(cfg, layout, on_cpu=True)
        chunks = config.virtual_pipeline_model_parallel_size or 1
        found[name] = (config.pipeline_model_parallel_size, chunks)
    return found


def test_megatron_core_accepts_the_layout_of_every_experiment() -> None:
    cfgs = {name: (load([f"experiment={name}"]), world) for name, world in EXPERIMENTS.items()}
    (found,) = run_distributed(megatron_layouts, 1, cfgs)
    large = {
        "deepseek_v3_1024gpu": (8, 4),
        "deepseek_v3_256gpu": (16, 1),
        "deepseek_v3_phases_256gpu": (16, 1),
        "gpt_oss_120b_64gpu": (4, 2),
        "qwen3_235b_64gpu": (8, 4),
        "mixtral_8x22b_64gpu": (4, 8),
        "kimi_k2_256gpu": (8, 4),
        "glm_4_5_128gpu": (8, 4),
        "glm_4_5_air_32gpu": (2, 4),
        "minimax_m2_64gpu": (4, 8),
        "qwen3_next_16gpu": (2, 1),
    }
    assert found == {name: large.get(name, (1, 1)) for name in EXPERIMENTS}
