"""Trainers over transformers with the kernels' experts, against the same with its own experts."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import phalanx.adapters.transformers
from tests.adapters.hf_models import close, model, tokens
from tests.support.distributed import run_distributed

EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def batches(rank: int = 0) -> list[Tensor]:
    return [tokens(seed) for seed in range(10 * rank, 10 * rank + 3)]


def test_transformers_trainer(tmp_path: Path) -> None:
    from transformers import Trainer, TrainingArguments

    data = [{"input_ids": row, "labels": row} for batch in batches() for row in batch]
    results = []
    for implementation in ("phalanx", "eager"):
        arguments = TrainingArguments(
            output_dir=str(tmp_path / implementation),
            max_steps=2,
            per_device_train_batch_size=3,
            gradient_accumulation_steps=2,
            gradient_checkpointing=True,
            logging_steps=1,
            learning_rate=0.01,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        )
        trainer = Trainer(model("qwen3_moe", implementation), arguments, train_dataset=data)
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        results.append((losses, trainer.model))
    (ours, trained), (theirs, other) = results
    assert len(ours) == 2 and ours == pytest.approx(theirs, rel=1e-4)
    saved = type(other).from_pretrained(tmp_path / "phalanx" / "checkpoint-2")
    close(saved(tokens()).logits, trained(tokens()).logits)


def steps(made: Any, optimizer: Any, backward: Any = None) -> list[float]:
    """Losses of three steps, of batches of this rank."""
    losses = []
    for ids in batches(dist.get_rank()):
        loss = made(input_ids=ids, labels=ids).loss
        backward(loss) if backward else loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def sgd(made: Any) -> Any:
    return torch.optim.SGD([p for p in made.parameters() if p.requires_grad], 0.1, momentum=0.9)


def accelerated(name: str, implementation: str) -> list[float]:
    from accelerate import Accelerator, DistributedType
    from accelerate.utils import FullyShardedDataParallelPlugin

    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}  # read, not used
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        cpu_ram_efficient_loading=False,
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    # Accelerate takes DDP on a CPU.
    accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin
    made = model(name, implementation)
    made, optimizer = accelerator.prepare(made, sgd(made))
    experts = made.model.layers[1].mlp.experts
    assert isinstance(experts.gate_up_proj, DTensor)
    if (name, implementation) == ("gpt_oss", "phalanx"):
        with pytest.raises(ValueError, match="^layout=transposed_interleaved: .* are sharded$"):
            phalanx.adapters.transformers.convert(made)
    return steps(made, optimizer, accelerator.backward)


@pytest.mark.dist
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_accelerate_with_fsdp2(name: str) -> None:
    ours = run_distributed(accelerated, 2, name, "phalanx")
    theirs = run_distributed(accelerated, 2, name, "eager")
    assert ours[0] != ours[1]  # batches of their own
    for got, want in zip(ours, theirs, strict=True):
        assert got == pytest.approx(want, rel=1e-4)


def sharded(implementation: str) -> tuple[Any, Any]:
    made = model("qwen3_moe", implementation)
    for layer in made.model.layers:
        fully_shard(layer)
    fully_shard(made)
    return made, sgd(made)


def saved_and_loaded(folder: str, source: str, target: str) -> list[list[float]]:
    """Losses after a checkpoint of the source's, of the source and of the target."""
    made, optimizer = sharded(source)
    steps(made, optimizer)
    dcp.save(
        dict(zip(("model", "optim"), get_state_dict(made, optimizer), strict=True)),
        checkpoint_id=folder,
    )
    other, second = sharded(target)
    states = dict(zip(("model", "optim"), get_state_dict(other, second), strict=True))
    dcp.load(states, checkpoint_id=folder)
    set_state_dict(
        other, second, model_state_dict=states["model"], optim_state_dict=states["optim"]
    )
    return [steps(made, optimizer), steps(other, second)]


@pytest.mark.dist
@pytest.mark.parametrize(("source", "target"), [("phalanx", "eager"), ("eager", "phalanx")])
def test_fsdp2_and_distributed_checkpoints(source: str, target: str, tmp_path: Path) -> None:
    for want, got in run_distributed(saved_and_loaded, 2, str(tmp_path), source, target):
        assert got == pytest.approx(want, rel=1e-4)


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral, top-1", "deepseek_v3"])
def test_lora_on_attention_and_experts(name: str) -> None:
    peft = pytest.importorskip("peft")
    logits, merged, grads = [], [], []
    for implementation in ("phalanx", "eager"):
        config = peft.LoraConfig(
            r=3, target_modules=["o_proj"], target_parameters=EXPERTS, lora_dropout=0.0
        )
        made = peft.get_peft_model(model(name, implementation), config)
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for parameter in (p for p in made.parameters() if p.requires_grad):
                parameter.normal_(0, 0.1, generator=generator)
        out = made(input_ids=tokens(), labels=tokens())
        out.loss.backward()
        logits.append(out.logits.detach())
        grads.append({k: p.grad for k, p in made.named_parameters() if p.requires_grad})
        plain = model(name, implementation)(tokens()).logits
        assert (out.logits - plain).abs().max() > 0.02  # the adapter's effect
        merged.append(made.merge_and_unload()(tokens()).logits)
    close(*logits)
    for key, want in grads[1].items():
        close(grads[0][key], want)
    assert any("experts" in key for key in grads[1]) and any("o_proj" in key for key in grads[1])
    close(*merged)
    torch.testing.assert_close(merged[0], logits[0], rtol=0, atol=1e-4)
