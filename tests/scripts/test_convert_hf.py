"""convert_hf as a person starts it: there and back, one-line errors, and little memory."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from phalanx.moe.report import progress
from phalanx.scripts import convert_hf
from tests.moe.hf.models import MODELS, index, tensors
from tests.support import s3

SCRIPT = Path(convert_hf.__file__)


def qwen3(folder: Path, **changes: Any) -> Path:
    """A Qwen3-MoE folder with random weights, made without transformers."""
    _, fields = MODELS["qwen3_moe"]
    config = {**fields, "model_type": "qwen3_moe", "rms_norm_eps": 1e-6, **changes}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    D, V, d = config["hidden_size"], config["vocab_size"], config["head_dim"]
    H, G = config["num_attention_heads"], config["num_key_value_heads"]
    shapes: dict[str, tuple[int, ...]] = {"model.norm.weight": (D,)}
    shapes |= {"model.embed_tokens.weight": (V, D), "lm_head.weight": (V, D)}
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{at}{norm}.weight"] = (D,)
        for letter, heads in (("q", H), ("k", G), ("v", G)):
            shapes[f"{at}self_attn.{letter}_proj.weight"] = (heads * d, D)
        shapes[f"{at}self_attn.o_proj.weight"] = (D, H * d)
        shapes |= {f"{at}self_attn.{letter}_norm.weight": (d,) for letter in "qk"}
        dense = layer in config["mlp_only_layers"]
        width = config["intermediate_size" if dense else "moe_intermediate_size"]
        if not dense:
            shapes[f"{at}mlp.gate.weight"] = (config["num_experts"], D)
        for expert in [""] if dense else [f"experts.{e}." for e in range(config["num_experts"])]:
            shapes |= {f"{at}mlp.{expert}{m}_proj.weight": (width, D) for m in ("gate", "up")}
            shapes[f"{at}mlp.{expert}down_proj.weight"] = (D, width)
    generator = torch.Generator().manual_seed(1)
    names = sorted(shapes)
    for number, part in enumerate((names[::2], names[1::2])):
        values = {n: torch.randn(shapes[n], generator=generator).bfloat16() for n in part}
        save_file(values, folder / f"{number}.safetensors")
    index(folder)
    return folder


def test_there_and_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = qwen3(tmp_path / "theirs", router_aux_loss_coef=0.03, eos_token_id=9)
    assert convert_hf.main(["import", str(folder), str(tmp_path / "step")]) == 0
    told, shown = capsys.readouterr()
    assert shown == ""  # it is no terminal, and was short
    overrides = told.split("train.py ")[1].splitlines()[0].split()
    assert overrides[0] == "model=qwen3_235b_a22b" and "model.hidden=64" in overrides
    assert overrides[-1] == f"run.resume={tmp_path / 'step'}"
    _, lines = told.split("config.json says:\n")
    reported, left = lines.split("what it does not say is yours to choose")
    assert reported.split() == ["model.moe.router.aux_loss=0.03"]
    assert "model.moe.router.aux_loss=0.03" in overrides
    assert {"optim.lr=0.002", "data.source=embedded", "run.steps=80"} <= set(left.split())
    assert "model.moe.router.global_aux_loss=0.0" in left and "bias_rate" not in left
    export = ["export", str(tmp_path / "step"), str(tmp_path / "back"), "--dtype", "fp32"]
    monkeypatch.setattr(progress, "_EVERY", 0)
    assert convert_hf.main(export) == 0
    printed, shown = capsys.readouterr()
    assert "\x1b" not in shown and "\r" not in shown
    ends = [line.split("|")[0] for line in shown.splitlines()]
    assert ends.index("verifying: 100%") < ends.index("exporting:   0%")
    assert ends[-1] == "exporting: 100%"
    assert "\n  no tokenizer: the data names none, or is not here; give --tokenizer" in printed
    assert "  eos_token_id=9\n  not known, left empty: bos_token_id, pad_token_id" in printed
    assert json.loads((tmp_path / "back" / "config.json").read_text())["dtype"] == "float32"
    theirs, back = tensors(folder), tensors(tmp_path / "back")
    assert theirs.keys() == back.keys()
    assert all(torch.equal(theirs[name].float(), back[name]) for name in theirs)


def test_mistakes_are_told_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    step = str(tmp_path / "step")
    assert convert_hf.main(["import", str(tmp_path / "none"), step]) == 1
    output = capsys.readouterr().err
    none = tmp_path / "none"
    assert output == f"convert_hf: there is no folder {none}: a model is read from a local one\n"
    assert convert_hf.main(["import", "Qwen/Qwen3-30B-A3B", step]) == 1
    output = capsys.readouterr().err
    assert output.endswith(": hf download Qwen/Qwen3-30B-A3B --local-dir Qwen3-30B-A3B\n")
    assert output.count("\n") == 1
    with pytest.raises(SystemExit):
        convert_hf.main(["export", step, "out", "--pad-token-id", "last"])
    assert "--pad-token-id: 'last': expected ids, or none" in capsys.readouterr().err
    folder = qwen3(tmp_path / "theirs", num_experts_per_tok=9)
    assert convert_hf.main(["import", str(folder), step, "--model", "tiny"]) == 1
    output = capsys.readouterr().err
    assert output.startswith("convert_hf: model.moe.top_k=9 is more than experts=8")
    assert not (tmp_path / "step").exists()
    assert convert_hf.main(["export", str(tmp_path), str(tmp_path / "out")]) == 1
    output = capsys.readouterr().err
    assert output.startswith(f"convert_hf: {tmp_path} has no checkpoint: give the folder of a run")
    with pytest.raises(SystemExit):
        convert_hf.main(["import", str(folder), "s3://bucket/step"])
    assert "s3://bucket/step is an address: give a folder" in capsys.readouterr().err


def test_export_from_an_object_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run in the store, a checkpoint copied there, and a damaged one."""
    from phalanx.parallel.object_store import place

    step = tmp_path / "step_00000000"
    assert convert_hf.main(["import", str(qwen3(tmp_path / "theirs")), str(step)]) == 0
    with s3.credentials(s3.endpoint()):
        run = place(f"s3://{s3.BUCKET}/converted")
        copied = run / "step_00000000.0123456789abcdef"
        for file in step.iterdir():
            (copied / file.name).upload(file)
        for number, source in enumerate((run, copied)):
            out = tmp_path / f"back{number}"
            assert convert_hf.main(["export", str(source), str(out)]) == 0
            assert f"{out}: of {copied}\n" in capsys.readouterr().out
            ours, theirs = tensors(out), tensors(tmp_path / "theirs")
            assert ours.keys() == theirs.keys()
            assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
        shard = copied / "__0_0.distcp"
        shard.write(shard.read()[:-1] + b"?")
        for source, why in (
            (copied, "is no valid checkpoint: __0_0.distcp has "),
            (run / "none", "has no checkpoint: give the folder of a run"),
        ):
            assert convert_hf.main(["export", str(source), str(tmp_path / "none")]) == 1
            line = capsys.readouterr().err.splitlines()[-1]
            assert line.startswith(f"convert_hf: {source} ") and why in line
        assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("model", ["qwen3_30b_a3b", "tiny"])
def test_overrides_give_the_model_that_was_found(model: str) -> None:
    from dataclasses import asdict

    from phalanx.configs.load import load
    from phalanx.moe.hf.config import to_json, to_knobs

    published = load(["model=qwen3_30b_a3b"]).model
    actual = to_knobs(to_json(published, 4096, "bfloat16"))
    cfg, overrides = convert_hf.configured(actual, model)
    assert asdict(load(overrides).model) == asdict(cfg.model)
    assert (len(overrides) == 1) == (model == "qwen3_30b_a3b")


@pytest.mark.parametrize("option", ["deepseek_v3", "moonlight_16b_a3b", "gpt_oss_20b"])
def test_published_models_keep_their_configuration(option: str) -> None:
    from phalanx.configs.load import load
    from phalanx.moe.hf.config import to_json, to_knobs

    model = load([f"model={option}"]).model
    _, overrides = convert_hf.configured(to_knobs(to_json(model, 4096, "bfloat16")), None)
    assert overrides == [f"model={option}"]


# Not ru_maxrss, which a process inherits from the one that started it.
_PEAK = """
import re, sys
from pathlib import Path
from phalanx.scripts import convert_hf
from phalanx.moe.hf import convert
def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])
before = peak()
assert convert_hf.main(sys.argv[1:]) == 0
print("peak", peak() - before)
"""


def peak(*arguments: Any) -> float:
    """MiB that a conversion takes beyond what its imports take."""
    command = [sys.executable, "-c", _PEAK, *map(str, arguments)]
    finished = subprocess.run(
        command, capture_output=True, text=True, timeout=300, cwd=SCRIPT.parent.parent
    )
    assert finished.returncode == 0, finished.stderr
    return int(finished.stdout.split("peak ")[1]) / 1024


@pytest.mark.slow
def test_memory_is_that_of_some_pieces(tmp_path: Path) -> None:
    folder = qwen3(
        tmp_path / "theirs",
        hidden_size=512,
        vocab_size=120_000,
        moe_intermediate_size=512,
        intermediate_size=512,
        num_experts=64,
        num_hidden_layers=4,
    )
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors")) / 2**20
    assert size > 500
    assert peak("import", folder, tmp_path / "step") < 0.4 * size
    assert peak("export", tmp_path / "step", tmp_path / "back") < 0.4 * size
