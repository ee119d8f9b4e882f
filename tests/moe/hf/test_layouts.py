"""An imported checkpoint on two ranks: the same weights, logits, masters; and back from there."""

import copy
from dataclasses import asdict
from pathlib import Path
from typing import Any

import megatron.core.distributed
import megatron.core.models.gpt.gpt_model  # noqa: F401
import pytest
import torch

from phalanx.configs.knobs import put
from phalanx.configs.schema import Config, DataConfig
from phalanx.configs.validate import validate
from phalanx.moe.data.loader import Synthetic
from phalanx.moe.hf.convert import determined, export_checkpoint
from phalanx.moe.hf.source import read_json
from phalanx.scripts.convert_hf import configured
from tests.moe.hf import models
from tests.moe.hf.models import imported, loaded, our_logits, save_with_predictions, words
from tests.moe.hf.test_models import same
from tests.support.distributed import run_distributed
from tests.support.runs import records, run
from tests.support.training import _shards, joined

pytestmark = pytest.mark.dist
LAYOUTS = [{"parallel.expert": 2}, {"parallel.tensor": 2}, {"parallel.pipeline": 2}]


def with_changes(cfg: Config, changes: dict[str, Any], world: int) -> Config:
    cfg = copy.deepcopy(cfg)
    for knob, value in changes.items():
        put(cfg, knob, value)
    validate(cfg, world)
    return cfg


def resume(cfg: Config, checkpoint: Path) -> tuple[Any, Path]:
    """Inside a rank: the shards after loading with an optimizer, and a checkpoint of them.

    The optimizer's own fp32 parameters go to the model before the save, if they differ.
    """
    job, saver = loaded(cfg, checkpoint, optimizer=True)
    for part in getattr(job.engine.optimizer, "chained_optimizers", [job.engine.optimizer]):
        part._copy_main_params_to_model_params()
    shards = _shards(job)
    common = {"config": asdict(cfg)}
    engine = job.engine
    path = saver.save(1, engine.chunks, engine.optimizer, engine.scheduler, common)
    return shards, path


CASES = [
    ("deepseek_v3", LAYOUTS[0]),
    pytest.param("deepseek_v3", LAYOUTS[1], marks=pytest.mark.slow),
    ("deepseek_v3", LAYOUTS[2]),
    ("gpt_oss", LAYOUTS[1]),
    pytest.param("minimax_m2", LAYOUTS[0], marks=pytest.mark.slow),
    pytest.param("glm4_moe", LAYOUTS[1], marks=pytest.mark.slow),
    pytest.param("mixtral", LAYOUTS[2], marks=pytest.mark.slow),
    ("qwen3_next", LAYOUTS[1]),
    pytest.param("qwen3_next", LAYOUTS[2], marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("name", "changes"), CASES)
def test_two_ranks_hold_what_was_imported_and_export_it(
    name: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    model = models.theirs(name, torch.bfloat16, num_hidden_layers=4)
    if name == "deepseek_v3" and "parallel.pipeline" not in changes:
        save_with_predictions(model, tmp_path / "theirs")
    else:
        model.save_pretrained(tmp_path / "theirs")
    cfg = imported(tmp_path / "theirs", tmp_path / "step", "bf16")
    ((one, _),) = run_distributed(
        resume, 1, with_changes(cfg, {"run.name": "one"}, 1), tmp_path / "step"
    )
    two = run_distributed(resume, 2, with_changes(cfg, changes, 2), tmp_path / "step")
    whole, parts = joined([one]), joined([shards for shards, _ in two])
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[key], parts[key]) for key in whole)
    export_checkpoint(two[0][1], tmp_path / "back")
    assert same(tmp_path / "theirs", tmp_path / "back")


@pytest.mark.parametrize("name", [pytest.param("deepseek_v3", marks=pytest.mark.slow), "gpt_oss"])
def test_logits_on_two_expert_parallel_ranks(name: str, tmp_path: Path) -> None:
    model, ids = models.theirs(name), words()
    model.save_pretrained(tmp_path / "theirs")
    cfg = imported(tmp_path / "theirs", tmp_path / "step")
    ranks = run_distributed(our_logits, 2, with_changes(cfg, LAYOUTS[0], 2), tmp_path / "step", ids)
    with torch.no_grad():
        exact = model(ids).logits
    for logits, _ in ranks:
        assert (logits - exact).norm(dim=-1).div(exact.norm(dim=-1)).max() < 1e-4


def test_a_run_starts_from_an_import(tmp_path: Path) -> None:
    tokens = {"bos_token_id": 3, "eos_token_id": [5, 7]}
    model = models.theirs("qwen3_moe", max_position_embeddings=512, **tokens)
    model.generation_config.update(eos_token_id=[5, 7, 9], pad_token_id=4, temperature=0.6)
    model.generation_config.do_sample = True
    model.save_pretrained(tmp_path / "theirs")
    imported(tmp_path / "theirs", tmp_path / "step")
    _, overrides = configured(determined(tmp_path / "theirs"), None)
    ranks = run(
        2,
        [
            *overrides,
            "data=synthetic",
            "data.sequence_length=24",
            "data.micro_batch=2",
            "data.global_batch=8",
            "run.device=cpu",
            "precision=fp32",
            "run.steps=2",
            "run.name=run",
            f"run.dir={tmp_path}",
            f"run.resume={tmp_path / 'step'}",
        ],
    )
    assert ranks[0].code == 0, ranks[0].err
    assert f"from the weights of {tmp_path / 'step'}" in ranks[0].out
    data = DataConfig(source="synthetic", sequence_length=24)
    rows = torch.stack([torch.from_numpy(Synthetic(96, data, 16, 0)[i]) for i in range(8)])
    with torch.no_grad():
        logits = model(rows[:, :-1]).logits.flatten(0, 1)
    exact = torch.nn.functional.cross_entropy(logits, rows[:, 1:].flatten())
    first = next(r for r in records(tmp_path / "run") if r.get("step") == 1)
    assert first["loss"] == pytest.approx(exact.item(), rel=1e-5)
    export_checkpoint(tmp_path / "run" / "checkpoints" / "step_00000002", tmp_path / "back")
    assert not same(tmp_path / "theirs", tmp_path / "back")
    fields = read_json(tmp_path / "back" / "config.json")
    assert {name: fields[name] for name in tokens} == tokens  # which no knob of the run holds
    assert fields["pad_token_id"] is None and fields["max_position_embeddings"] == 512
    own, exported = (
        read_json(tmp_path / of / "generation_config.json") for of in ("theirs", "back")
    )
    assert exported == own and own["eos_token_id"] == [5, 7, 9] and own["temperature"] == 0.6
