"""scripts/checkpoint.py average: means of weights and of moving averages, and what takes them."""

import io
import os
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx.moe.hf import ConversionError
from phalanx.moe.hf.average import _compare
from phalanx.moe.hf.pieces import PieceReader
from phalanx.scripts import checkpoint, convert_hf, evaluate
from tests.parallel.checkpoint.checkpoints import (
    build,
    checkpointer,
    largest,
    load,
    save,
    stored,
    tensors,
    train,
)
from tests.parallel.conftest import run, template  # noqa: F401  (fixtures)
from tests.support.distributed import run_distributed
from tests.support.runs import SMALL
from tests.support.runs import run as train_run

STEP_2, STEP_4 = "step_00000002", "step_00000004"
WORDS = "embedding.word_embeddings.weight"


def average(*arguments: Path | str) -> int:
    return checkpoint.main(["average", *map(str, arguments)])


def weights(path: Path) -> dict[str, torch.Tensor]:
    return {name: t for name, t in stored(path).items() if not name.startswith("optimizer.")}


@pytest.mark.dist
def test_the_mean_of_two_checkpoints(
    run: Path,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    first, second, out = run / "step_00000001", run / "step_00000002", tmp_path / "mean"
    assert average(first, second, "--out", out) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{out}: weights of {first}, {second}",
        "  the bias of the experts (1 layer) is the mean of the checkpoints'",
    ]
    a, b, mean = weights(first), weights(second), stored(out)
    (bias,) = (name for name in a if name.endswith("expert_bias"))
    assert mean.keys() == a.keys()
    assert not any(torch.equal(a[name], b[name]) for name in (WORDS, bias))
    for name, value in mean.items():
        expected = ((a[name].double() + b[name].double()) / 2).to(a[name].dtype)
        assert value.dtype == a[name].dtype and torch.equal(value, expected), name
    assert checkpoint.main(["verify", str(out)]) == 0
    assert average(run, "--out", tmp_path / "one") == 0  # the newest one, as it is
    assert all(torch.equal(value, b[name]) for name, value in stored(tmp_path / "one").items())


def _averaged(folder: Path) -> None:
    engine, groups = build(ema=0.5)
    train(engine, groups, 0, 3)
    save(checkpointer(folder, groups), 3, engine)


def _loaded(folder: Path, path: Path) -> dict[str, torch.Tensor]:
    engine, groups = build(seed=2, ema=0.5)
    load(checkpointer(folder, groups), path, engine, {"model": {"layers": 2}})
    held = tensors(engine)
    averages = {n.removeprefix("ema "): t for n, t in held.items() if n.startswith("ema ")}
    assert averages and all(
        torch.equal(t, held[f"main {n}"].float()) for n, t in averages.items()
    ), "averages begin with the weights"
    train(engine, groups, 0, 1)
    return {n: t for n, t in held.items() if n[0] == "0"}


@pytest.mark.dist
def test_moving_averages_become_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_distributed(_averaged, 2, tmp_path)
    path, out = tmp_path / "step_00000003", tmp_path / "averages"
    assert average(path, "--ema", "--out", out) == 0
    told = capsys.readouterr().out
    assert "(1 layer), which has no moving average, is that of the checkpoint\n" in told
    held, made = stored(path), stored(out)
    for name, value in made.items():
        ema = held.get(f"optimizer.state.ema.{name}")
        assert (ema is None) == ("expert_bias" in name)
        assert torch.equal(value, held[name] if ema is None else ema.to(value.dtype)), name
    assert not torch.equal(made[WORDS], held[WORDS])
    (state,) = run_distributed(_loaded, 1, tmp_path / "new", out)
    assert torch.equal(state[f"0.{WORDS}"], made[WORDS])


@pytest.mark.dist
def test_mistakes_are_told_in_one_line(
    run: Path,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    first, second, out = run / "step_00000001", run / "step_00000002", tmp_path / "mean"

    def refusal(*arguments: Path | str) -> str:
        assert average(*arguments, "--out", out) == 1
        output = capsys.readouterr()
        errors = [line for line in output.err.splitlines() if line.startswith("checkpoint: ")]
        assert len(errors) == 1 and not output.out and not out.exists()
        assert not out.with_name("mean.tmp").exists()
        return errors[0]

    assert "has no moving averages: train with optim.ema=0.999" in refusal(first, "--ema")
    assert f"{tmp_path / 'none'} has no checkpoint" in refusal(tmp_path / "none")
    out.mkdir()
    assert average(first, "--out", out) == 1 and "exists" in capsys.readouterr().err
    out.rmdir()
    os.truncate(largest(second), 100)
    assert "is no valid checkpoint" in refusal(first, second)


def _wider(folder: Path) -> None:
    engine, groups = build(experts=8)
    save(checkpointer(folder, groups), 1, engine)


@pytest.mark.dist
def test_other_models_are_refused(
    run: Path,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run_distributed(_wider, 1, tmp_path / "wider")
    arguments = [run / "step_00000001", tmp_path / "wider", "--out", tmp_path / "mean"]
    assert average(*arguments) == 1
    error = capsys.readouterr().err
    assert "are of different models: " in error and "has shape" in error


class _Tensors(dict[str, tuple[int, ...]]):
    """Shapes by name, in place of a checkpoint's reader."""

    shape = dict[str, tuple[int, ...]].__getitem__


def test_a_tensor_that_one_lacks_is_told() -> None:
    readers: list[Any] = [_Tensors(w=(2, 3)), _Tensors(w=(2, 3), bias=(3,))]
    with pytest.raises(ConversionError, match=r"^a and b are .*: bias has shape none and \[3\]$"):
        _compare(Path("a"), readers[0], Path("b"), readers[1])


@pytest.mark.dist
@pytest.mark.extras  # goes on with other data
def test_a_run_with_averages_is_resumed_evaluated_and_exported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [*SMALL, "model=tiny_deepseek", "data=embedded", "run.steps=4", "optim.ema=0.5"]
    command += ["run.save_interval=2", "run.log_interval=1"]
    (main,) = train_run(1, [*command, f"run.dir={tmp_path / 'whole'}"])
    assert main.code == 0, main.err
    folder = tmp_path / "whole/run/checkpoints"
    (main,) = train_run(1, [*command, f"run.dir={tmp_path}", f"run.resume={folder / STEP_2}"])
    assert main.code == 0, main.err
    held, again = (stored(d / STEP_4) for d in (folder, tmp_path / "run/checkpoints"))
    assert all(torch.equal(value, again[name]) for name, value in held.items())

    out, exported = tmp_path / "averages", tmp_path / "exported"
    assert average(tmp_path / "whole/run", "--ema", "--out", out) == 0
    assert convert_hf.main(["export", str(out), str(exported), "--dtype", "fp32"]) == 0
    from safetensors.torch import load_file

    words = load_file(exported / "model-00001-of-00001.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(words, stored(out)[WORDS].float())
    text = tmp_path / "text.txt"
    text.write_text("def main():\n    return 0\n")
    capsys.readouterr()
    scores = set()
    for path in (out, tmp_path / "whole/run"):
        assert evaluate.main([str(path), str(text)]) == 0
        scores.add(capsys.readouterr().out.splitlines()[-1])
    assert len(scores) == 2 and all("text.txt" in score for score in scores)
    # A run of other data starts from them.
    anew = [*SMALL, "model=tiny_deepseek", "run.steps=1", "data.source=synthetic"]
    (main,) = train_run(1, [*anew, f"run.dir={tmp_path / 'anew'}", f"run.resume={out}"])
    assert main.code == 0 and f"from the weights of {out}" in main.out, main.err


def test_a_strided_tensor_is_read_as_it_is_and_refused_compressed(tmp_path: Path) -> None:
    reader = PieceReader.__new__(PieceReader)
    reader._folder = tmp_path
    written, packed, value = io.BytesIO(), io.BytesIO(), torch.arange(12.0).view(3, 4).t()
    torch.save(value, written)
    assert torch.equal(reader._whole("key", written.getvalue()), value)
    deflated = zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED)
    with zipfile.ZipFile(written) as plain, deflated as copy:
        for name in plain.namelist():
            copy.writestr(name, plain.read(name))
    with pytest.raises(ConversionError, match="has key in another form: .* is compressed"):
        reader._whole("key", packed.getvalue())
