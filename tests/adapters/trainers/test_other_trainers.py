"""Trainers of packages that the development environment lacks; scripts/lab/test_adapters.sh."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

pytest.importorskip("transformers")

import phalanx.adapters.transformers  # noqa: F401  (registers)
from phalanx.kernels.api import MoE
from tests.adapters.hf_models import VOCABULARY, close, model, tokens
from tests.support.distributed import run_distributed


def word_tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<s>", "</s>", "<pad>", "<unk>"]
    words = special + [f"w{i}" for i in range(VOCABULARY - len(special))]
    vocab = {word: i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
    )


@pytest.mark.parametrize("adapters", [False, True])
def test_supervised_fine_tuning_of_trl(adapters: bool, tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    from datasets import Dataset
    from peft import LoraConfig

    texts = [" ".join(f"w{i * j % 50}" for j in range(1, 12 + i)) for i in range(1, 9)]
    lora = LoraConfig(
        r=2,
        target_modules=["q_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    )
    losses = []
    for implementation in ("phalanx", "eager"):
        arguments = trl.SFTConfig(
            output_dir=str(tmp_path),
            max_steps=2,
            per_device_train_batch_size=2,
            logging_steps=1,
            learning_rate=0.01,
            report_to=[],
            use_cpu=True,
            bf16=False,
            save_strategy="no",
            disable_tqdm=True,
        )
        trainer = trl.SFTTrainer(
            model=model("qwen3_moe", implementation),
            args=arguments,
            train_dataset=Dataset.from_dict({"text": texts}),
            processing_class=word_tokenizer(),
            peft_config=lora if adapters else None,
        )
        trainer.train()
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert len(losses[0]) == 2 and losses[0] == pytest.approx(losses[1], rel=1e-4)


def zero_3() -> list[list[float]]:
    """Losses of models with each implementation in turn: deepspeed keeps its process groups."""
    import deepspeed

    deepspeed.init_distributed("gloo")
    names = ("qwen3_moe", "gpt_oss")
    return [zero_3_steps(name, kind) for name in names for kind in ("phalanx", "eager")]


def zero_3_steps(name: str, implementation: str) -> list[float]:
    import deepspeed

    made = model(name, implementation)
    engine, *_ = deepspeed.initialize(
        model=made,
        optimizer=torch.optim.AdamW(made.parameters(), lr=0.01),
        config={
            "train_micro_batch_size_per_gpu": 3,
            "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
            "zero_allow_untested_optimizer": True,
        },
    )
    experts = made.model.layers[1].mlp.experts
    assert experts.down_proj.numel() == 0  # a part of it is on each rank
    losses = []
    for seed in range(3):
        ids = tokens(seed + 10 * dist.get_rank())
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


@pytest.mark.dist
def test_zero_3_of_deepspeed() -> None:
    pytest.importorskip("deepspeed")
    first, second = run_distributed(zero_3, 2, timeout=500)  # it compiles an extension
    assert first != second  # batches of their own
    for losses in (first, second):
        assert losses[0] == pytest.approx(losses[1], rel=1e-4)
        assert losses[2] == pytest.approx(losses[3], rel=1e-4)


def test_a_module_of_lightning(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning")

    class Regression(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.moe, self.head = MoE(32, 48, 4, 2), nn.Linear(32, 1)

        def training_step(self, batch: Any, batch_idx: int = 0) -> Tensor:
            x, y = batch
            out, losses = self.moe(x)
            error: Tensor = (self.head(out) - y).square().mean()
            return error + sum(losses.values())

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    torch.manual_seed(1)
    rows = [(torch.randn(6, 32), torch.randn(6, 1)) for _ in range(4)]
    data = torch.utils.data.DataLoader(rows, batch_size=2)
    trained, plain = Regression(), Regression()
    trainer = lightning.Trainer(
        max_steps=2,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        default_root_dir=tmp_path,
    )
    trainer.fit(trained, data)
    optimizer = plain.configure_optimizers()
    for batch in data:
        optimizer.zero_grad()
        plain.training_step(batch).backward()
        optimizer.step()
    for key, value in plain.state_dict().items():
        close(trained.state_dict()[key], value)
    (path,) = tmp_path.rglob("*.ckpt")
    loaded = Regression.load_from_checkpoint(path)
    assert all(torch.equal(v, trained.state_dict()[k]) for k, v in loaded.state_dict().items())
