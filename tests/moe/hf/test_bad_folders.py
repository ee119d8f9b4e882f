"""Folders that cannot be converted: one line that names the tensor, field or knob; no result."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from phalanx.moe.hf import ConversionError
from phalanx.moe.hf.convert import export_checkpoint
from tests.moe.hf import models
from tests.moe.hf.models import imported, index, tensors
from tests.support.tokenizers import llama


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of three families, and checkpoints of them."""
    root = tmp_path_factory.mktemp("saved")
    for name in ("deepseek_v3", "gpt_oss", "qwen3_moe"):
        models.theirs(name, torch.bfloat16).save_pretrained(root / name)
        imported(root / name, root / f"{name}-step")
    return root


def copied(source: Path, out: Path) -> Path:
    """A copy with an index over one shard, whose tensors can be changed."""
    out.mkdir()
    (out / "config.json").write_text((source / "config.json").read_text())
    save_file(tensors(source), out / "a.safetensors")
    index(out)
    return out


def change_config(folder: Path, **fields: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    found = tensors(folder)
    change(found)
    save_file(found, folder / "a.safetensors")
    index(folder)


def change_index(folder: Path, file: str, gone: str = "") -> None:
    """All tensors in one file, and one more that is not there."""
    names = [*tensors(folder), *([gone] if gone else [])]
    text = json.dumps({"weight_map": dict.fromkeys(names, file)})
    (folder / "model.safetensors.index.json").write_text(text)


def in_another_shard(folder: Path, name: str, like: str) -> None:
    """A tensor in a second shard that the index names for another tensor alone."""
    found = tensors(folder)
    save_file({name: found[like].clone(), "other": found[like].clone()}, folder / "b.safetensors")
    change_index(folder, "a.safetensors")
    path = folder / "model.safetensors.index.json"
    content = json.loads(path.read_text())
    content["weight_map"] = {n: f for n, f in content["weight_map"].items() if n in found}
    content["weight_map"]["other"] = "b.safetensors"
    path.write_text(json.dumps(content))


def put_number(folder: Path, number: float, dtype: torch.dtype) -> None:
    """One value of a tensor of this dtype."""

    def change(found: dict[str, torch.Tensor]) -> None:
        found[LATE] = found[LATE].to(dtype)
        found[LATE].view(-1)[-1] = number

    change_tensors(folder, change)


NORM = "model.layers.1.input_layernorm.weight"
CONFIGS = ("config.json", "generation_config.json")
LATE = "model.layers.2.mlp.experts.7.down_proj.weight"
FIELDS: list[tuple[str, dict[str, Any], str]] = [
    ("qwen3_moe", {"model_type": "mamba"}, "model_type='mamba'"),
    ("qwen3_moe", {"hidden_size": 32}, "has shape"),
    ("qwen3_moe", {"num_hidden_layers": 2}, r"layers\.2\..* is unexpected"),
    ("qwen3_moe", {"num_hidden_layers": 4}, r"layers\.3\..* is missing"),
    (
        "qwen3_moe",
        {"num_local_experts": 9},
        r"mlp\.gate\.weight has shape \[8, 64\], not \[9, 64\]",
    ),
    ("qwen3_moe", {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "llama3"),
    ("gpt_oss", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "no factor"),
    ("gpt_oss", {"rope_parameters": {"rope_type": "default", "rope_theta": 0.5}}, "no integer"),
    ("deepseek_v3", {"q_lora_rank": None}, r"q_proj\.weight is missing"),
    (
        "deepseek_v3",
        {"quantization_config": {"quant_method": "fp8", "weight_block_size": 128}},
        "weight_block_size=128",
    ),
]


@pytest.mark.parametrize(("name", "fields", "message"), FIELDS)
def test_a_config_that_does_not_fit(
    name: str, fields: dict[str, Any], message: str, saved: Path, tmp_path: Path
) -> None:
    folder = copied(saved / name, tmp_path / "theirs")
    change_config(folder, **fields)
    refused(folder, tmp_path, message)


def refused(folder: Path, tmp_path: Path, message: str) -> None:
    with pytest.raises(ConversionError, match=message) as error:
        imported(folder, tmp_path / "step")
    assert "\n" not in str(error.value)
    assert not list(tmp_path.glob("step*"))


FOLDERS: list[tuple[Callable[[Path], object], str]] = [
    (lambda f: change_tensors(f, lambda t: t.pop(NORM)), f"{NORM} is missing"),
    (lambda f: change_tensors(f, lambda t: t.update(extra=t[NORM].clone())), "extra is unexpected"),
    (
        lambda f: change_tensors(f, lambda t: t.update({NORM: t[NORM][:9]})),
        rf"{NORM} has shape \[9\]",
    ),
    (lambda f: change_tensors(f, lambda t: t.update({NORM: t[NORM].half()})), f"{NORM} is .* F16"),
    (
        lambda f: change_tensors(f, lambda t: t.update({NORM: t[NORM].to(torch.float8_e4m3fn)})),
        f"{NORM}_scale_inv is missing",
    ),
    (lambda f: change_index(f, "../theirs/a.safetensors"), "names '../theirs/a.safetensors'"),
    (lambda f: change_index(f, "/etc/passwd"), "names '/etc/passwd'"),
    (lambda f: change_index(f, "a.bin"), "names 'a.bin'"),
    (lambda f: change_index(f, "..safetensors/.safetensors"), "names "),
    (lambda f: change_index(f, "b.safetensors"), r"b\.safetensors is missing"),
    (lambda f: (f / "model.safetensors.index.json").unlink(), "only safetensors are read"),
    (lambda f: (f / "model.safetensors.index.json").write_text("[]"), "is no JSON object"),
    (lambda f: (f / "model.safetensors.index.json").write_text("{}"), "has no weight_map"),
    (lambda f: (f / "config.json").unlink(), r"config\.json is missing"),
    (lambda f: (f / "config.json").write_text("[" * 99999), r"config\.json is no JSON object"),
    (
        lambda f: (f / "a.safetensors").write_bytes(b"\x80" * 64),
        r"a\.safetensors cannot be read",
    ),
    (
        lambda f: (f / "a.safetensors").write_bytes((f / "a.safetensors").read_bytes()[:-8]),
        r"a\.safetensors cannot be read",
    ),
    (
        lambda f: (f / "model.safetensors").write_bytes((f / "a.safetensors").read_bytes()),
        r"theirs has model\.safetensors and an .*index\.json that names a\.safetensors: it is amb",
    ),
    (
        lambda f: in_another_shard(f, NORM, NORM),
        rf"theirs has {NORM} in a\.safetensors and in b\.safetensors: it is ambiguous",
    ),
    (
        lambda f: in_another_shard(f, "model.norm.bias", "model.norm.weight"),
        r"model\.norm\.bias is unexpected",
    ),
    (
        lambda f: change_index(f, "a.safetensors", gone="gone"),
        r"index\.json has gone in a\.safetensors, which lacks it",
    ),
    (
        lambda f: (f / "adapter_config.json").write_text("{}"),
        r"theirs has adapter_config\.json, of an adapter .* merge it",
    ),
]


@pytest.mark.parametrize(("damage", "message"), FOLDERS)
def test_a_folder_that_is_damaged(
    damage: Callable[[Path], object], message: str, saved: Path, tmp_path: Path
) -> None:
    folder = copied(saved / "qwen3_moe", tmp_path / "theirs")
    damage(folder)
    refused(folder, tmp_path, message)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_weights_that_are_no_numbers(
    number: float, dtype: torch.dtype, saved: Path, tmp_path: Path
) -> None:
    folder = copied(saved / "qwen3_moe", tmp_path / "theirs")
    put_number(folder, number, dtype)
    refused(folder, tmp_path, rf"{LATE} has values that are NaN or infinite")


def test_a_checkpoint_with_no_numbers_is_not_exported(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from phalanx.moe.hf.source import SourceFolder

    folder = copied(saved / "qwen3_moe", tmp_path / "theirs")
    put_number(folder, math.nan, torch.bfloat16)
    with monkeypatch.context() as m:  # as a run may have made it
        m.setattr(SourceFolder, "read", lambda self, name, rows: self._values(name, *rows))
        imported(folder, tmp_path / "step")
    with pytest.raises(ConversionError, match=rf"{LATE} has .* NaN .*: export an earlier checkpoi"):
        export_checkpoint(tmp_path / "step", tmp_path / "back")
    assert not list(tmp_path.glob("back*"))


def test_an_index_of_the_single_file_is_not_ambiguous(saved: Path, tmp_path: Path) -> None:
    folder = copied(saved / "qwen3_moe", tmp_path / "theirs")
    (folder / "a.safetensors").rename(folder / "model.safetensors")
    change_index(folder, "model.safetensors")
    imported(folder, tmp_path / "step")


def test_nothing_is_overwritten(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    with pytest.raises(ConversionError, match="there exists"):
        imported(saved / "qwen3_moe", tmp_path / "there")
    with pytest.raises(ConversionError, match="there exists"):
        export_checkpoint(saved / "qwen3_moe-step", tmp_path / "there")
    assert not list((tmp_path / "there").iterdir())
    (tmp_path / "new.tmp").mkdir()
    with pytest.raises(ConversionError, match=r"new\.tmp exists"):
        imported(saved / "qwen3_moe", tmp_path / "new")


def test_a_checkpoint_with_a_flipped_byte_is_not_exported(saved: Path, tmp_path: Path) -> None:
    models.theirs("qwen3_moe", torch.bfloat16).save_pretrained(tmp_path / "theirs")
    imported(tmp_path / "theirs", tmp_path / "step")
    path = tmp_path / "step" / "__0_0.distcp"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(ConversionError, match=r"__0_0\.distcp has .* its contents changed"):
        export_checkpoint(tmp_path / "step", tmp_path / "back")
    assert not list(tmp_path.glob("back*"))


def test_what_is_no_checkpoint_is_not_exported(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(ConversionError, match=r"COMMIT\.json is missing"):
        export_checkpoint(saved / "qwen3_moe", tmp_path / "back")


def test_tokenizer_files_are_copied(saved: Path, tmp_path: Path) -> None:
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    with pytest.raises(ConversionError, match="no tokenizer files"):
        export_checkpoint(saved / "qwen3_moe-step", tmp_path / "back", tokenizer=tokenizer)
    (tokenizer / "tokenizer.json").write_text("{}")
    with pytest.raises(
        ConversionError, match=r"tokenizer/tokenizer\.json is not a tokenizer\.json"
    ):
        export_checkpoint(saved / "qwen3_moe-step", tmp_path / "back", tokenizer=tokenizer)
    (tokenizer / "tokenizer_config.json").write_text("{}")
    (tokenizer / "generation_config.json").write_text('{"eos_token_id": 7, "top_k": 5}')
    (tokenizer / "config.json").write_text('{"eos_token_id": 2}')
    (tokenizer / "pytorch_model.bin").write_text("not this")
    export_checkpoint(saved / "qwen3_moe-step", tmp_path / "back", tokenizer=tokenizer)
    assert (tmp_path / "back" / "tokenizer.json").read_text() == "{}"
    assert not (tmp_path / "back" / "pytorch_model.bin").exists()
    both = [json.loads((tmp_path / "back" / name).read_text()) for name in CONFIGS]
    assert [each["eos_token_id"] for each in both] == [2, 2], "they agree"
    with pytest.raises(
        ConversionError, match="no folder .*/gone: --tokenizer takes a local folder"
    ):
        export_checkpoint(saved / "qwen3_moe-step", tmp_path / "again", tokenizer=tmp_path / "gone")


def test_ids_that_the_model_does_not_have(saved: Path, tmp_path: Path) -> None:
    """Refused at import; a run that has one is exported with another one, or none."""
    folder = copied(saved / "qwen3_moe", tmp_path / "theirs")
    made = llama()
    made.save(str(tmp_path / "tokenizer.json"))
    for name, content, message in (
        ("config.json", {"pad_token_id": 96}, "config.json has pad_token_id=96, .* --pad-token-id"),
        ("generation_config.json", {"eos_token_id": [1, 96]}, "generation_config.json has eos_tok"),
        ("tokenizer.json", json.loads(made.to_str()), r"ids up to 311 .*=96: .*: move its files"),
    ):
        before = (folder / name).read_text() if (folder / name).exists() else "{}"
        (folder / name).write_text(json.dumps(json.loads(before) | content))
        refused(folder, tmp_path, message)
        (folder / name).write_text(before)
    with pytest.raises(ConversionError, match="ids up to 311 .*: leave --tokenizer out"):
        export_checkpoint(saved / "qwen3_moe-step", tmp_path / "back", tokenizer=tmp_path)


def test_a_run_whose_pad_is_outside_the_vocabulary_is_exported_without_it(
    saved: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from phalanx.moe.hf import tokenizer_files
    from phalanx.scripts import convert_hf

    folder = copied(saved / "qwen3_moe", tmp_path / "theirs")
    change_config(folder, pad_token_id=96, eos_token_id=5)
    with monkeypatch.context() as m:  # as an import of before made it
        m.setattr(tokenizer_files, "check_ids", lambda *given: None)
        imported(folder, tmp_path / "step")
    with pytest.raises(ConversionError, match="imported model has pad_token_id=96, .*, or none"):
        export_checkpoint(tmp_path / "step", tmp_path / "back")
    for given, pad in (("none", None), ("3", 3)):
        out = tmp_path / f"back{given}"
        argv = ["export", str(tmp_path / "step"), str(out), "--pad-token-id", given]
        assert convert_hf.main(argv) == 0
        config, generation = (json.loads((out / name).read_text()) for name in CONFIGS)
        assert config["pad_token_id"] == generation.get("pad_token_id") == pad
        assert config["eos_token_id"] == generation["eos_token_id"] == 5
        assert "left empty: bos_token_id (" in capsys.readouterr().out, "of pad it is no question"
    argv = ["import", str(folder), str(tmp_path / "again"), "--pad-token-id", "none"]
    assert convert_hf.main(argv) == 0
    assert convert_hf.main(["export", str(tmp_path / "again"), str(tmp_path / "out")]) == 0
    assert json.loads((tmp_path / "out" / "config.json").read_text())["pad_token_id"] is None


KNOBS: list[tuple[str, dict[str, Any], str]] = [
    ("qwen3_moe", {"bias": True}, r"model\.bias=true cannot be exported"),
    (
        "qwen3_moe",
        {"attention.qk_norm": False},
        r"dense_layers=1 .*: mixtral of Hugging Face has 0",
    ),
    ("qwen3_moe", {"moe.activation": "geglu"}, r"model\.moe\.activation=geglu"),
    (
        "deepseek_v3",
        {"moe.router.score": "softmax"},
        r"bias_rate=0\.001 .*: deepseek_v2 of Hugging",
    ),
    ("deepseek_v3", {"moe.router.bias_rate": 0.0}, r"model\.moe\.router\.bias_rate=0"),
    ("deepseek_v3", {"moe.shared_ffn": 0}, r"model\.moe\.shared_ffn=0"),
    ("deepseek_v3", {"layers": 4}, r"decoder\.layers\.3\..* is missing from the checkpoint"),
    ("gpt_oss", {"hidden": 32}, r"embedding\..* has shape \[96, 64\], not \[96, 32\]"),
]


@pytest.mark.parametrize(("name", "changes", "message"), KNOBS)
def test_a_model_that_hugging_face_does_not_have(
    name: str, changes: dict[str, Any], message: str, saved: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    import phalanx.moe.hf.convert as convert
    from phalanx.configs.knobs import put
    from phalanx.configs.schema import Config

    original = convert._model

    def changed(saved: Any) -> Any:
        cfg = Config(model=original(saved))
        for knob, value in changes.items():
            put(cfg, f"model.{knob}", value)
        return cfg.model

    monkeypatch.setattr(convert, "_model", changed)
    with pytest.raises(ConversionError, match=message):
        export_checkpoint(saved / f"{name}-step", tmp_path / "back")
    assert not list(tmp_path.glob("back*"))
