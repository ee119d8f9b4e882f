"""From command lines to typed configurations: groups, overrides, mistakes, options of train.py."""

import re
import shlex
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from omegaconf import OmegaConf

from phalanx.configs import load as loading
from phalanx.configs.knobs import pluralize
from phalanx.configs.load import GROUPS, ConfigError, compose, from_argv, load, options, usage
from phalanx.configs.validate import validate


def mistakes(*overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(overrides)
    return str(caught.value).splitlines()


@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_bare_command_is_valid_on_small_machines(world: int) -> None:
    cfg = load([])
    validate(cfg, world)
    assert (cfg.model.name, cfg.data.source, cfg.run.name) == ("tiny", "embedded", "tiny")


@pytest.mark.parametrize("group", [g for g in GROUPS if g not in ("experiment", "model")])
def test_every_option_composes(group: str) -> None:
    assert options(group)
    for option in options(group):
        assert compose([f"{group}={option}"]).choices[group] == option


def test_every_model_is_named_after_its_file() -> None:
    assert [load([f"model={name}"]).model.name for name in options("model")] == options("model")


def test_precedence_is_group_then_experiment_then_command_line() -> None:
    cfg = load(["experiment=gpt_oss_20b_8gpu"])
    assert (cfg.model.layers, cfg.parallel.expert, cfg.data.sequence_length) == (24, 8, 4096)
    assert (cfg.run.name, cfg.run.resume) == ("gpt_oss_20b", "auto")
    cfg = load(["experiment=gpt_oss_20b_8gpu", "run=bench", "data=synthetic", "model.layers=2"])
    assert (cfg.run.name, cfg.run.steps, cfg.run.save_interval) == ("bench_gpt_oss_20b", 50, -1)
    assert (cfg.data.source, cfg.data.sequence_length) == ("synthetic", 4096)
    assert (cfg.model.layers, cfg.model.hidden) == (2, 2880)


def test_values_keep_the_types_of_the_schema() -> None:
    cfg = load(["run.name=7", "optim.lr=1", "data.blend=[0.5,a,0.5,b]", "run.profile=[3,5]"])
    assert cfg.run.name == "7"
    assert isinstance(cfg.optim.lr, float)
    assert cfg.data.blend == ["0.5", "a", "0.5", "b"]
    assert cfg.run.profile == [3, 5]


@pytest.mark.parametrize(
    ("override", "meant"),
    [
        ("model.hiden=3", "model.hidden"),
        ("hiden=3", "model.hidden"),
        ("hidden=3", "model.hidden"),
        ("seed=3", "data.seed or run.seed"),
        ("run.sed=3", "run.seed"),
        ("data.step=3", "run.steps"),
        ("model.moe.topk=3", "model.moe.top_k"),
        ("modl=tiny", "model"),
        ("ep=8", "parallel.expert"),
        ("parallel.tp=2", "parallel.tensor"),
        ("model.moe={topk: 3}", "model.moe.top_k"),
    ],
)
def test_unknown_knob_is_answered_with_the_near_miss(override: str, meant: str) -> None:
    (line,) = mistakes(override)
    assert "no such knob" in line
    assert f"did you mean {meant}" in line


def test_a_knob_that_was_renamed_is_answered_with_its_new_name() -> None:
    assert mistakes("run.precision=fp32") == ["run.precision=fp32: is now precision=fp32"]
    assert mistakes("kernels.dynamic=false") == [
        "kernels.dynamic=false: no longer exists, as fused kernels always claim tiles at run time; "
        "remove it"
    ]
    assert mistakes("precision.wgrad_blocks=square") == [
        "precision.wgrad_blocks=square: no longer exists, as operands of weight gradients always "
        "have blocks of 128 tokens x 128 channels; remove it"
    ]
    assert load(["precision=fp32"]).precision.recipe == "fp32"


def test_unknown_knob_without_a_near_miss_suggests_nothing() -> None:
    assert mistakes("zebra.quokka=1") == ["zebra.quokka: no such knob"]


def test_unknown_option_lists_the_options() -> None:
    (line,) = mistakes("model=gpt_oss")
    assert "did you mean model=gpt_oss_120b or model=gpt_oss_20b?" in line
    assert all(name in line for name in options("model"))


def test_one_name_is_a_list_of_names() -> None:
    for text, names in (
        ("moe", ["moe"]),
        ("none", []),
        ("[]", []),
        ("[norm,mlp]", ["norm", "mlp"]),
    ):
        assert load([f"run.recompute={text}"]).run.recompute == names
    assert load(["run.offload=residual"]).run.offload == ["residual"]


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("model.hidden=abc", "expected an integer, as in model.hidden=128"),
        ("run.steps=1.5", "expected an integer"),
        ("run.steps=", "expected an integer"),
        ("optim.lr=fast", "expected a number"),
        ("run.deterministic=maybe", "expected true or false"),
        ("data.blend=prefix", "expected a list, as in data.blend='[prefix]'"),
        ("run.profile=[a,b]", "expected a list, as in run.profile='[1,2]'"),
        ("run.recompute=7", "expected a list, as in run.recompute='[norm,mla_up]'"),
        ("model.moe=8", "set one of its knobs, as in model.moe.experts=..."),
        ("run.steps=1,2", "one value at a time"),
        ("data.split=98,2", "quote it twice: data.split='\"98,2\"'"),
        ("parallel.pipeline_layout=Et|(tt|)*3", "quote the value twice"),
        ("run.steps=3;", "expected an integer, as in run.steps=100"),
        ("run.deterministic=on|off", "expected true or false, as in run.deterministic=false"),
        ("+run.steps=3", "without +, ++ or ~"),
        ("~run.steps", "without +, ++ or ~"),
        ("run.steps", "expected <knob>=<value>"),
        ("=3", "expected <knob>=<value>"),
        ("run.name=${model.nam}", "Interpolation key 'model.nam' not found"),
    ],
)
def test_wrong_value_names_the_whole_knob(override: str, expected: str) -> None:
    (line,) = mistakes(override)
    assert line.startswith(override.lstrip("+~").partition("=")[0]) or line.startswith(override)
    assert expected in line


@pytest.mark.parametrize(
    ("words", "written"),
    [
        (["optim.lr = 3"], "optim.lr=3"),
        (["optim.lr =3"], "optim.lr=3"),
        (["model = tiny"], "model=tiny"),
        (["run.steps: 3"], "run.steps=3"),
        (["run.steps 3"], "run.steps=3"),
        (["run.steps==3"], "run.steps=3"),
        (["run.name = a b"], "'run.name=a b'"),
        (["optim.lr", "=", "3"], "optim.lr=3, as one word"),
        (["optim.lr", "=3"], "optim.lr=3, as one word"),
        (["optim.lr=", "3"], "optim.lr=3, as one word"),
        (["optim.lr", "3"], "optim.lr=3, as one word"),
        (["run.steps=3 run.name=x"], "run.steps=3 run.name=x, as separate words"),
        (["run.steps=3, optim.lr = 1"], "run.steps=3 optim.lr=1, as separate words"),
        (["@model=tiny"], "model=tiny, without @"),
    ],
)
def test_an_override_that_is_only_spelled_wrong_is_spelled_right(
    words: list[str], written: str
) -> None:
    assert mistakes(*words) == [f"{' '.join(words)}: write {written}"]
    load(shlex.split(written.partition(", ")[0]))


def test_words_beside_an_override_without_a_value_are_not_its_value() -> None:
    assert mistakes("optim.lr=", "run.steps=3") == [
        "optim.lr=: expected a number, as in optim.lr=0.003"
    ]
    assert load(["run.checkpoints=", "run.steps=3"]).run.steps == 3


def test_all_mistakes_are_reported_at_once() -> None:
    lines = mistakes("model=tin", "hiden=3", "run.steps=many", "run.seed=2", "run.lr=1")
    assert [line.split(":")[0] for line in lines] == [
        "model=tin",
        "hiden",
        "run.steps=many",
        "run.lr",
    ]


def test_a_mistake_in_a_file_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / "configs"
    shutil.copytree(loading.FOLDER, folder, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "model" / "mine.yaml").write_text("hidden: 64\nmoe: {exprts: 4}\n")
    (folder / "model" / "other.yaml").write_text("hidden: wide\n")
    (folder / "run" / "old.yaml").write_text("precision: fp32\n")
    monkeypatch.setattr(loading, "FOLDER", folder)
    (line,) = mistakes("model=mine")
    assert line == (
        "configs/model/mine.yaml: model.moe.exprts: no such knob; did you mean model.moe.experts?"
    )
    (line,) = mistakes("run=old")
    assert line == "configs/run/old.yaml: run.precision: no such knob; did you mean precision?"
    (line,) = mistakes("model=other")
    assert line.startswith("configs/model/other.yaml: model.hidden: Value 'wide'")
    assert line.endswith("expected an integer, as in hidden: 128")


@pytest.mark.parametrize(
    "overrides",
    [
        ["run.steps=7", "experiment=gpt_oss_20b_8gpu", "model=tiny", "run.steps=8"],
        ["optim.lr=1", "run.name=${model.name}", "data.blend=[a,b]", "model.moe={ffn: 16}"],
    ],
)
def test_what_was_composed_before_changes_nothing(overrides: list[str]) -> None:
    """Hydra composes the groups, once; values follow. As Hydra does it with all at once."""
    for _ in "ab":
        load([*overrides, "run.seed=99"])
        made = compose(overrides)
    with initialize_config_dir(version_base="1.3", config_dir=str(loading.FOLDER)):
        whole = hydra_compose("config", overrides=overrides)
    assert whole.model.vocab_size == 0
    whole.model.vocab_size = 256  # that of bytes, which is filled in
    assert made.tree == whole and made.choices["model"] == "tiny"


def test_cfg_job_prints_what_load_gives(capsys: pytest.CaptureFixture[str]) -> None:
    overrides = ["model=tiny_gpt_oss", "run.steps=7"]
    with pytest.raises(SystemExit) as left:
        from_argv([overrides[0], "--cfg", "job", overrides[1]])
    printed = capsys.readouterr().out
    assert left.value.code == 0
    assert printed.startswith("# model=tiny_gpt_oss kernels=auto ")
    assert OmegaConf.create(printed) == asdict(load(overrides))


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_lists_groups_and_options(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        from_argv([flag])
    assert left.value.code == 0
    text = capsys.readouterr().out
    assert text == usage()
    assert all(option in text for group in GROUPS for option in options(group))


@pytest.mark.parametrize("option", ["--multirun", "-m"])
def test_several_runs_are_lists_of_a_program(
    option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        from_argv([option, "optim.lr=1e-3,2e-3"])
    (line,) = capsys.readouterr().err.splitlines()
    assert left.value.code == 2 and "scripts/lab/proof/run_experiments.py" in line


def test_bad_command_line_ends_with_one_line_per_mistake(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as left:
        from_argv(["parallel.tensor=3", "data.micro_batch=5"], world_size=2)
    assert left.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert [line.split("=")[0] for line in err.splitlines()] == [
        "error: parallel.tensor",
        "error: data.global_batch",
    ]


@pytest.mark.parametrize("argv", [["--run.steps", "50"], ["--run.steps=50"], ["--steps=50"]])
def test_knobs_with_dashes_are_explained(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        from_argv(argv)
    assert left.value.code == 2
    assert "without dashes; did you mean run.steps=...?" in capsys.readouterr().err


def test_only_rank_zero_prints(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "1")
    for argv, code in ((["--help"], 0), (["hiden=3"], 2)):
        with pytest.raises(SystemExit) as left:
            from_argv(argv)
        assert left.value.code == code
        assert capsys.readouterr() == ("", "")


def test_ranks_come_from_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert from_argv(["parallel=ep8"]).parallel.expert == 8
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(SystemExit):
        from_argv(["parallel=ep8"])


def test_a_layout_is_checked_without_its_machines(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        from_argv(["experiment=gpt_oss_120b_64gpu", "parallel.world_size=64"], world_size=1)
    assert left.value.code == 0
    assert "64 ranks: tensor 1 x context 1 x pipeline 4 x data 16" in capsys.readouterr().out


def test_nothing_is_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    from_argv(["run.steps=3"])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("number", "noun", "said"),
    [
        (0, "rank", "0 ranks"),
        (1, "rank", "1 rank"),
        (2, "micro-batch", "2 micro-batches"),
        ("1,024", "token", "1,024 tokens"),
        (3, "process", "3 processes"),
    ],
)
def test_nouns_follow_their_numbers(number: int | str, noun: str, said: str) -> None:
    assert pluralize(number, noun) == said


def test_no_message_has_a_noun_that_cannot_follow_its_number() -> None:
    """Numbers that can be 1 are written with `pluralize`."""
    may_be_one = (
        r"(?<!of )\{(?:len\([^{}]*\)|world|ranks|cfg\.run\.steps|count)(?::,)?\} [a-z-]+s\b"
    )
    found = [
        f"{path.name}: {text}"
        for folder in ("configs", "moe", "parallel", "scripts")
        for path in (Path(__file__).resolve().parents[2] / folder).rglob("*.py")
        for text in re.findall(may_be_one, path.read_text(encoding="utf-8"))
        if "bench" not in path.parts
    ]
    assert found == []
