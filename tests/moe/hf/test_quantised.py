"""MXFP4 and block-scaled FP8 against their definitions, and folders that hold them."""

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from phalanx.moe.hf import ConversionError
from phalanx.moe.hf.convert import export_checkpoint
from phalanx.moe.hf.source import from_fp8, from_mxfp4
from tests.moe.hf import models
from tests.moe.hf.models import imported, index, tensors


def e2m1(code: int) -> float:
    """OCP MX 1.0, 5.3.3: a sign, two bits of exponent with bias 1, one of mantissa."""
    sign, exponent, mantissa = -1.0 if code & 8 else 1.0, (code >> 1) & 3, code & 1
    if exponent == 0:
        return sign * mantissa * 0.5
    return sign * (1 + mantissa / 2) * 2.0 ** (exponent - 1)


def e4m3(code: int) -> float:
    """OCP FP8: a sign, four bits of exponent with bias 7, three of mantissa, no infinity."""
    sign, exponent, mantissa = -1.0 if code & 128 else 1.0, (code >> 3) & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


@pytest.mark.parametrize("scale", [0, 1, 110, 126, 127, 128, 200, 252])
def test_every_code_of_mxfp4(scale: int) -> None:
    codes = torch.arange(32, dtype=torch.uint8) % 16
    blocks = codes[0::2] | (codes[1::2] << 4)
    found = from_mxfp4(blocks[None], torch.tensor([scale], dtype=torch.uint8))
    assert found.dtype == torch.bfloat16
    expected = [math.ldexp(e2m1(int(code)), scale - 127) for code in codes]
    assert found.tolist() == expected  # powers of two times 1 to 1.5: bf16 has them all
    assert torch.signbit(found[8:16]).all()  # -0 included


def test_mxfp4_beyond_the_range() -> None:
    six = torch.full((1, 16), 7 | 7 << 4, dtype=torch.uint8)
    assert from_mxfp4(six, torch.tensor([254], dtype=torch.uint8)).isinf().all()
    assert from_mxfp4(six, torch.tensor([255], dtype=torch.uint8)).isnan().all()


def test_mxfp4_is_what_transformers_reads() -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator = torch.Generator().manual_seed(1)
    blocks = torch.randint(256, (3, 64, 2, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(100, 140, (3, 64, 2), generator=generator, dtype=torch.uint8)
    theirs = convert_moe_packed_tensors(blocks, scales)  # of the transposed, as they store it
    assert torch.equal(from_mxfp4(blocks, scales).transpose(1, 2), theirs)


@pytest.mark.parametrize("factor", [1.0, 2.0**-100, 2.0**100, 0.37])
def test_every_code_of_fp8(factor: float) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(16, 16)
    scale = torch.tensor([[factor, -factor]])
    found = from_fp8(codes.view(torch.float8_e4m3fn), scale, (128, 8))
    for i in range(16):
        for j in range(16):
            value = e4m3(16 * i + j) * (1 if j < 8 else -1)
            exact = torch.tensor(value, dtype=torch.float64) * scale[0, 0].double()
            expected = exact.float().bfloat16()
            torch.testing.assert_close(found[i, j], expected, rtol=0, atol=0, equal_nan=True)


def test_fp8_blocks_at_the_edges_and_in_pieces() -> None:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(300, 200, generator=generator).to(torch.float8_e4m3fn)
    scale = torch.rand(3, 2, generator=generator)
    found = from_fp8(weight, scale, (128, 128))
    for i in (0, 127, 128, 255, 256, 299):
        for j in (0, 127, 128, 199):
            exact = weight[i, j].float() * scale[i // 128, j // 128]
            assert found[i, j] == exact.bfloat16()
    pieces = [from_fp8(weight[a : a + 100], scale, (128, 128), a) for a in (0, 100, 200)]
    assert torch.equal(torch.cat(pieces), found)


def quantise_experts(folder: Path) -> dict[str, Tensor]:
    """Random MXFP4 in place of the experts of a GPT-OSS folder; their values in its layout."""
    kept, values = {}, {}
    generator = torch.Generator().manual_seed(2)
    for name, tensor in tensors(folder).items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            kept[name] = tensor
            continue
        experts, inputs, outputs = tensor.shape
        shape = (experts, outputs, inputs // 32)
        blocks = torch.randint(256, (*shape, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(120, 128, shape, generator=generator, dtype=torch.uint8)
        kept[f"{name}_blocks"], kept[f"{name}_scales"] = blocks, scales
        table = torch.tensor([e2m1(code) for code in range(16)])
        pairs = torch.stack([table[(blocks % 16).long()], table[(blocks // 16).long()]], -1)
        exact = pairs.flatten(-2) * 2.0 ** (scales.float() - 127)[..., None]
        values[name] = exact.flatten(-2).transpose(1, 2).bfloat16().contiguous()
    _replace(folder, kept)
    return values


def quantise_linears(folder: Path) -> dict[str, Tensor]:
    """FP8 with blocks of 16 x 16 in place of the projections of a DeepSeek-V3 folder."""
    kept, values = {}, {}
    generator = torch.Generator().manual_seed(2)
    for name, tensor in tensors(folder).items():
        if not name.endswith("_proj.weight"):
            kept[name] = tensor
            continue
        rows, columns = (-(-n // 16) for n in tensor.shape)
        scale = torch.rand(rows, columns, generator=generator) + 0.5
        kept[name] = tensor.float().to(torch.float8_e4m3fn)
        kept[f"{name}_scale_inv"] = scale
        spread = scale.repeat_interleave(16, 0).repeat_interleave(16, 1)
        spread = spread[: tensor.size(0), : tensor.size(1)]
        values[name] = (kept[name].float() * spread).bfloat16()
    _replace(folder, kept)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    (folder / "config.json").write_text(json.dumps(config))
    return values


def _replace(folder: Path, kept: dict[str, Tensor]) -> None:
    for path in folder.glob("*.safetensors"):
        path.unlink()
    save_file(
        {name: tensor.contiguous() for name, tensor in kept.items()}, folder / "a.safetensors"
    )
    index(folder)


FORMATS = {"gpt_oss": quantise_experts, "deepseek_v3": quantise_linears}


@pytest.mark.parametrize("name", FORMATS)
def test_a_quantised_folder_is_imported_as_bf16(name: str, tmp_path: Path) -> None:
    models.theirs(name, torch.bfloat16).save_pretrained(tmp_path / "theirs")
    before = tensors(tmp_path / "theirs")
    values = FORMATS[name](tmp_path / "theirs")
    imported(tmp_path / "theirs", tmp_path / "step")
    export_checkpoint(tmp_path / "step", tmp_path / "back")
    back = tensors(tmp_path / "back")
    assert values and back.keys() == before.keys()
    for key, tensor in back.items():
        assert torch.equal(tensor, values.get(key, before[key])), key


def test_values_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    models.theirs("gpt_oss", torch.bfloat16).save_pretrained(tmp_path / "theirs")
    quantise_experts(tmp_path / "theirs")
    kept = tensors(tmp_path / "theirs")
    kept["model.layers.1.mlp.experts.down_proj_scales"][0, 0, 0] = 255
    _replace(tmp_path / "theirs", kept)
    with pytest.raises(ConversionError, match=r"layers\.1\.mlp\.experts\.down_proj has .* NaN"):
        imported(tmp_path / "theirs", tmp_path / "step")
    assert not list(tmp_path.glob("step*"))
