"""A model without a vocabulary size gets that of the data, from the dry run to the export."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml
from megatron.core.datasets.indexed_dataset import IndexedDataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from phalanx import train
from phalanx.configs.load import Ended, load
from phalanx.moe.data.blend import fill, shown
from phalanx.moe.data.host_cache import DataError
from phalanx.moe.data.token_files import Sidecar
from phalanx.parallel.checkpoint import saved_config
from phalanx.scripts import checkpoint, convert_hf, evaluate, prepare_data, sample
from tests.support.runs import SMALL, run, text, write_corpus
from tests.support.tiny_runs import command

IDS = 300
LINE = f"384, of which {IDS} are ids of {{}}/tokenizer.json"


END = "<|endoftext|>"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A prefix, prepared as in the README."""
    return prepared(tmp_path_factory.mktemp("own"), tokenizer(text()))


def tokenizer(parts: Sequence[bytes]) -> Tokenizer:
    """A byte-level BPE of `IDS` tokens, whose merges are those of a text."""
    results = Tokenizer(models.BPE())
    results.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    results.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    results.train_from_iterator(
        [part.decode() for part in parts],
        trainers.BpeTrainer(vocab_size=IDS, special_tokens=[END], initial_alphabet=alphabet),
    )
    return results


def prepared(folder: Path, tokenizer: Tokenizer) -> str:
    """The prefix of `text` by a tokenizer."""
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    rows = [json.dumps({"text": part.decode()}) for part in text()]
    (folder / "wiki.jsonl").write_text("\n".join(rows))
    given = [folder / "wiki.jsonl", "--tokenizer", folder / "tokenizer.json", "--eod", END]
    given += ["--output", folder / "data/wiki", "--workers", 1]
    assert prepare_data.main([*map(str, given)]) == 0
    return str(folder / "data/wiki")


def overrides(corpus: str, *more: str) -> list[str]:
    """Overrides of a run without a vocabulary size."""
    small = [text for text in SMALL if not text.startswith("model.vocab_size")]
    data = ["data=indexed", f"data.blend=[{corpus}]", f"data.cache={Path(corpus).parent}/cache"]
    return [*small, "model=tiny", "model.attention.head_dim=8", *data, *more]


@pytest.mark.dist
def test_a_run_takes_the_vocabulary_of_its_data(corpus: str, tmp_path: Path) -> None:
    shown_line = LINE.format(Path(corpus).parents[1].name)
    given = overrides(corpus, "run.save_interval=1", f"run.dir={tmp_path}")
    main, _ = run(2, [*given, "run.steps=2", "parallel.expert=2"])
    assert main.code == 0, main.err
    assert f"\n  vocab   {shown_line}\n" in main.out
    folder = tmp_path / "run"
    kept = yaml.safe_load((folder / "config.yaml").read_text())
    newest = saved_config.newest(folder / "checkpoints")
    assert newest is not None
    for config in (kept, saved_config.configuration(newest).config):
        assert config["model"]["vocab_size"] == 384
    main, _ = run(2, [*given, "run.steps=3", "parallel.tensor=2", "parallel.expert=1"])
    assert main.code == 0 and "step 2" in main.out, main.err  # another layout, the same model
    for script, words in (
        (sample.main, ["--prompt", "def ", "--tokens", "3"]),
        (evaluate.main, [corpus, "--max-tokens", "100"]),
        (convert_hf.main, [tmp_path / "hf"]),
    ):
        argv = ["export", folder, *words] if script is convert_hf.main else [folder, *words]
        output = command(script, *argv)
        assert output.code == 0, output.err
    assert f"\n  tokenizer: that of the data, {corpus}.tokenizer.json\n" in output.out
    assert json.loads((tmp_path / "hf/config.json").read_text())["vocab_size"] == 384
    opened_by_transformers(tmp_path / "hf", corpus)


def opened_by_transformers(folder: Path, corpus: str) -> None:
    """The tokenizer of the data is there without an option, and ends texts as the data does."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    data = IndexedDataset(corpus)  # unmaps its rows when it goes
    ids = data[0].tolist()
    assert tokenizer(text()[0].decode()).input_ids == ids[:-1]
    end = model.generation_config.eos_token_id
    assert ids[-1] == tokenizer.eos_token_id == model.config.eos_token_id == end
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|endoftext|>", "<|endoftext|>")
    batch = tokenizer(["def ", "import os"], padding=True, return_tensors="pt")
    assert model.generate(**batch, max_new_tokens=2).shape[0] == 2


@pytest.mark.dist
@pytest.mark.extras  # phases
def test_a_model_goes_on_with_the_ids_that_it_knows(
    corpus: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Other ids of the same number fit the model, and would undo what it has learned."""
    longer = tokenizer(text())
    longer.add_special_tokens(["<|user|>"])
    more, other = (
        prepared(tmp_path / name, made)
        for name, made in (("more", longer), ("other", tokenizer(text()[:9])))
    )
    (main,) = run(1, overrides(corpus, f"run.dir={tmp_path}", "run.steps=1", "run.save_interval=1"))
    assert main.code == 0, main.err
    kept = f"{corpus}.tokenizer.json"
    before = f"what the model was trained on has {kept}, whose ids are other tokens: "
    resume = f"run.resume={tmp_path}/run/checkpoints/step_00000001"

    def errors(blend: str, *given: str) -> list[str]:
        capsys.readouterr()
        words = [f"run.dir={tmp_path}", "run.steps=2", "--check", *given]
        code, lines = train.main(overrides(blend, *words)), capsys.readouterr().err.splitlines()
        found = [line for line in lines if "error: " in line]
        assert code == 2 * bool(found)
        return found

    for name in ("run.name=run", "run.name=new"):
        starts = [name, *[resume] * name.endswith("new")]
        assert errors(corpus, *starts) == errors(more, *starts) == []
        (line,) = errors(other, *starts)
        assert line.startswith(f"error: the data (data.blend) has the tokenizer {other}.")
        assert before in line
    averaged = tmp_path / "averaged"
    assert checkpoint.main(["average", str(tmp_path / "run"), "--out", str(averaged)]) == 0
    starts = ["run.name=new", f"run.resume={averaged}"]
    assert errors(corpus, *starts) == errors(more, *starts) == []
    (line,) = errors(other, *starts)
    assert before in line
    of_bytes = ["data.source=embedded", "data.blend=[]", "model.vocab_size=384"]
    (line,) = errors(corpus, "run.name=new", resume, *of_bytes)
    assert line.startswith("error: the data (data.blend) has the tokenizer bytes, ")
    phases = 'run.phases=[{{name:a,steps:1}},{{name:b,steps:1,overrides:["data.blend=[{}]"]}}]'
    assert errors(corpus, "run.name=phases", phases.format(more)) == []
    assert errors(more, "run.name=phases", phases.format(corpus)) == []
    with pytest.raises(Ended) as ended:
        errors(corpus, "run.name=phases", phases.format(other))
    assert ended.value.text.startswith("error: phase b: the data ") and before in ended.value.text


@pytest.mark.extras  # the page of a dry run
def test_it_is_said_before_a_launch(
    corpus: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shown_line = LINE.format(Path(corpus).parents[1].name)
    given = overrides(corpus, f"run.dir={tmp_path}", "run.steps=2")
    assert train.main([*given, "--check"]) == 0
    assert capsys.readouterr().err == f"vocabulary: {shown_line}\n"
    world = ["run.dry_run=true", "parallel.world_size=2"]
    assert train.main([*given, *world]) == 0
    assert f"\n  vocab     {shown_line}\n" in capsys.readouterr().out
    for more in (["--check"], world):  # a vocabulary of its own that does not fit
        assert train.main([*given, "model.vocab_size=256", *more]) == 2
        output = capsys.readouterr()
        (line,) = (output.err + output.out).splitlines()
        assert line.startswith(f"error: {corpus}.json: ids of tokenizer ")
        assert line.endswith("but model.vocab_size=256; set model.vocab_size=384")
    assert train.main([*given, "model.vocab_size=300", *world]) == 0
    assert "\n  vocab     300, of which 300 are ids of " in capsys.readouterr().out


def test_data_that_does_not_tell_is_refused_with_the_override(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prefix = write_corpus(tmp_path / "text", [[1] * 40] * 20)
    given = overrides(prefix, f"run.dir={tmp_path}", "run.steps=2")
    for more in (["--check"], [], ["run.dry_run=true"]):
        assert train.main([*given, *more]) == 2
        output = capsys.readouterr()
        line = next(x for x in (output.err + output.out).splitlines() if x.startswith("error: "))
        assert line == (
            f"error: the vocabulary of {prefix}.bin is unknown, as {prefix}.json is missing; "
            "set model.vocab_size to the number of ids of its tokenizer"
        )
    assert train.main([*given, "model.vocab_size=256", "--check"]) == 0
    Path(f"{prefix}.idx").unlink()
    assert train.main([*given, "--check"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {prefix}.idx does not exist")


@pytest.mark.parametrize(
    ("ids", "tensor", "expected"),
    [
        (1, 1, 128),
        (128, 1, 128),
        (129, 8, 256),
        (50257, 8, 50304),
        (300, 3, 384),
        (50257, 3, 50304),
    ],
)
def test_it_is_padded_for_every_layout_alike(
    tmp_path: Path, ids: int, tensor: int, expected: int
) -> None:
    prefix = write_corpus(tmp_path / "text", [[0] * 40] * 20)
    sidecar = Sidecar("t", "0", ids, 0, "uint16", documents=20, tokens=800)
    sidecar.write(Path(f"{prefix}.json"))
    cfg = load(overrides(prefix, f"parallel.tensor={tensor}"))
    assert cfg.model.vocab_size == 0
    fill(cfg)
    assert cfg.model.vocab_size == expected and expected % tensor == 0
    assert shown(cfg) == f"{expected:,}, of which {ids:,} are ids of t"
    cfg.model.vocab_size = 1000
    fill(cfg)
    assert cfg.model.vocab_size == 1000


def test_other_sources_are_of_bytes_and_two_tokenizers_are_refused(tmp_path: Path) -> None:
    for source in ("embedded", "synthetic"):
        assert load([f"data={source}"]).model.vocab_size == 256
        assert load([f"data={source}", "model.vocab_size=512"]).model.vocab_size == 512
    prefixes = [write_corpus(tmp_path / name, [[0] * 40] * 20) for name in "ab"]
    for prefix in prefixes:
        sidecar = Sidecar(prefix, prefix, 40, 0, "uint16", documents=20, tokens=800)
        sidecar.write(Path(f"{prefix}.json"))
    cfg = load(overrides(prefixes[0]))
    cfg.data.blend = prefixes
    fill(cfg)
    with pytest.raises(DataError, match="data.blend mixes tokenizers"):
        shown(cfg)
