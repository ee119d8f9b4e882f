"""Each family there and back: logits of transformers, tensors to the last bit."""

from pathlib import Path

import megatron.core.distributed
import megatron.core.models.gpt.gpt_model  # noqa: F401
import pytest
import torch
from torch import Tensor

from phalanx.moe.hf.convert import export_checkpoint, import_folder
from tests.moe.hf import models
from tests.moe.hf.models import (
    MODELS,
    VARIANTS,
    imported,
    our_logits,
    save_with_predictions,
    tensors,
    words,
)
from tests.support.distributed import run_distributed
from tests.support.scheduling import mostly_slow

pytestmark = pytest.mark.dist


def errors(found: Tensor, exact: Tensor) -> Tensor:
    """Relative error of the logits of every token."""
    return (found - exact).norm(dim=-1) / exact.norm(dim=-1)


def same(a: Path, b: Path) -> bool:
    """True if two folders hold the same tensors, bit for bit, in the same dtypes."""
    left, right = tensors(a), tensors(b)
    assert left.keys() == right.keys()
    bits = [torch.equal(left[n].view(torch.uint8), right[n].view(torch.uint8)) for n in left]
    return all(bits) and all(left[n].dtype == right[n].dtype for n in left)


@pytest.mark.parametrize("name", [*MODELS, *VARIANTS])
def test_fp32_logits_are_those_of_transformers_and_export_gives_the_folder_back(
    name: str, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    of, changes = VARIANTS.get(name, (name, {}))
    model, ids = models.theirs(of, **changes), words()
    model.save_pretrained(tmp_path / "theirs")
    step = tmp_path / "step"
    cfg = imported(tmp_path / "theirs", step)
    if cfg.model.moe.top_k == 1:  # as runs from scratch have it, and makes no difference
        cfg.model.moe.router.normalize, step = True, tmp_path / "normalize"
        import_folder(tmp_path / "theirs", step, cfg.model)
    ((ours, _),) = run_distributed(our_logits, 1, cfg, step, ids)
    with torch.no_grad():
        exact = model(ids).logits
    assert errors(ours, exact).max() < 1e-4

    export_checkpoint(step, tmp_path / "back", shard_bytes=200_000)
    assert same(tmp_path / "theirs", tmp_path / "back")
    assert len(list((tmp_path / "back").glob("model-*-of-*.safetensors"))) > 1
    eager = {"attn_implementation": "eager", "dtype": "auto"}
    again, report = AutoModelForCausalLM.from_pretrained(
        tmp_path / "back", **eager, output_loading_info=True
    )
    assert not report["missing_keys"] and not report["unexpected_keys"]
    with torch.no_grad():
        assert torch.equal(again(ids).logits, exact)


def test_probabilities_of_all_experts_normalised_over_the_best(tmp_path: Path) -> None:
    """A Mixtral as our small model has it."""
    model, ids = models.theirs("mixtral"), words()
    model.save_pretrained(tmp_path / "theirs")
    cfg = imported(tmp_path / "theirs", tmp_path / "step")
    router = cfg.model.moe.router
    router.softmax_over, router.normalize = "all", True
    import_folder(tmp_path / "theirs", tmp_path / "all", cfg.model)
    ((ours, _),) = run_distributed(our_logits, 1, cfg, tmp_path / "all", ids)
    with torch.no_grad():
        assert errors(ours, model(ids).logits).max() < 1e-4
    export_checkpoint(tmp_path / "all", tmp_path / "back")
    assert same(tmp_path / "theirs", tmp_path / "back")


@mostly_slow(
    "name", MODELS, "deepseek_v3", "gpt_oss", "qwen3_next", "minimax_m2", "glm4_moe", "olmoe"
)
def test_bf16_logits_are_as_near_as_those_of_transformers(name: str, tmp_path: Path) -> None:
    model, ids = models.theirs(name, torch.bfloat16), words()
    model.save_pretrained(tmp_path / "theirs")
    cfg = imported(tmp_path / "theirs", tmp_path / "step", "bf16")
    if cfg.model.attention.sinks:
        # With sdpa's roundings other tokens go to other experts, as in transformers' own.
        cfg.kernels.attention = "reference"
    ((ours, _),) = run_distributed(our_logits, 1, cfg, tmp_path / "step", ids)
    with torch.no_grad():
        rounded = model(ids).logits.float()
        exact = model.float()(ids).logits
    # The median, for a token near a tie goes to other experts in bf16, on either side.
    assert errors(ours, exact).median() < 2 * errors(rounded, exact).median()
    assert (ours - exact).norm() < 2 * (rounded - exact).norm()

    export_checkpoint(tmp_path / "step", tmp_path / "back")
    assert same(tmp_path / "theirs", tmp_path / "back")


@pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe"])
def test_prediction_layers(name: str, tmp_path: Path) -> None:
    model, ids = models.theirs(name), words()
    predictor = save_with_predictions(model, tmp_path / "theirs")
    cfg = imported(tmp_path / "theirs", tmp_path / "step")
    assert cfg.model.mtp_layers == 1
    ((ours, predicted),) = run_distributed(our_logits, 1, cfg, tmp_path / "step", ids)
    following = torch.cat([ids[:, 1:], torch.zeros_like(ids[:, :1])], 1)
    positions = torch.arange(ids.size(1)).expand_as(ids)
    with torch.no_grad():
        result = model(ids, output_hidden_states=True)
        hidden = predictor.forward_layer(
            0, result.hidden_states[-1], positions, None, input_ids=following
        )
        exact = model.lm_head(hidden)
    assert errors(ours, result.logits).max() < 1e-4
    assert predicted is not None and errors(predicted, exact).max() < 1e-4

    export_checkpoint(tmp_path / "step", tmp_path / "back")
    assert same(tmp_path / "theirs", tmp_path / "back")


def test_the_prediction_layer_of_qwen3_next(tmp_path: Path) -> None:
    """transformers has the model alone: the layer is compared with the same one in the decoder."""
    model = models.theirs("qwen3_next")
    fields = models.add_prediction_of_qwen3_next(model, tmp_path / "theirs")
    cfg = imported(tmp_path / "theirs", tmp_path / "step")
    assert cfg.model.mtp_layers == 1
    ids = words()
    ((ours, predicted),) = run_distributed(our_logits, 1, cfg, tmp_path / "step", ids)
    with torch.no_grad():
        result = model(ids, output_hidden_states=True)
        exact = models.prediction_of_qwen3_next(model, fields, result.hidden_states[-1], ids)
    assert errors(ours, result.logits).max() < 1e-4
    assert predicted is not None and errors(predicted, exact).max() < 1e-4

    export_checkpoint(tmp_path / "step", tmp_path / "back")
    assert same(tmp_path / "theirs", tmp_path / "back")
    cfg.model.mtp_layers = 0
    import_folder(tmp_path / "theirs", tmp_path / "without", cfg.model)
    export_checkpoint(tmp_path / "without", tmp_path / "alone")
    assert not any(name.startswith("mtp.") for name in tensors(tmp_path / "alone"))


def test_prediction_layers_can_be_left_out(tmp_path: Path) -> None:
    model = models.theirs("deepseek_v3")
    save_with_predictions(model, tmp_path / "theirs")
    cfg = imported(tmp_path / "theirs", tmp_path / "with")
    cfg.model.mtp_layers = 0
    import_folder(tmp_path / "theirs", tmp_path / "without", cfg.model)
    export_checkpoint(tmp_path / "without", tmp_path / "back")
    kept = {n: t for n, t in tensors(tmp_path / "theirs").items() if ".layers.3." not in n}
    back = tensors(tmp_path / "back")
    assert kept.keys() == back.keys() and all(torch.equal(kept[n], back[n]) for n in kept)
