"""Throughput records: the schema and their arithmetic."""

import math
from datetime import date
from pathlib import Path

import pytest

from phalanx.configs import records
from phalanx.configs.arithmetic.accounting import flops_per_token
from phalanx.configs.load import load
from phalanx.configs.records import OwnRecord, Published, Record, launch, own, published
from phalanx.configs.schema import Config
from phalanx.configs.validate import data_parallel_size, expert_parallel_size, validate

PUBLISHED, OWN = published(), own()
COMMAND = "torchrun --nproc-per-node 2 train.py model=tiny run=bench run.device=cpu kernels=torch"


def check_shared(record: Record) -> None:
    """Invariants of every record."""
    assert int(record.hardware.split(" x ")[0]) == record.gpus
    assert record.routing in ("natural", "replayed", "forced")
    assert record.data in ("real", "mock")
    assert record.dtype in ("bf16", "fp32", "fp8_block")
    assert date(2024, 1, 1) < date.fromisoformat(record.date)


def configured(record: OwnRecord) -> Config:
    ranks, overrides = launch(record.command)
    cfg = load(overrides)
    validate(cfg, ranks)
    assert ranks == record.gpus
    return cfg


@pytest.mark.parametrize("record", PUBLISHED, ids=lambda r: f"{r.model}-{r.system}-{r.gpus}")
def test_published_rates_by_our_convention(record: Published) -> None:
    check_shared(record)
    assert record.source.startswith("https://")
    model = load([f"model={record.model}", *record.overrides]).model
    flops = flops_per_token(model, record.sequence_length)
    ours = record.tokens_per_second_per_gpu * flops / 1e12
    assert record.tflops_per_gpu == pytest.approx(ours, rel=0.01)
    if record.tflops_per_gpu_printed is None:
        return
    if record.tflops_per_gpu_printed != pytest.approx(ours, rel=0.02):
        assert "rinted FLOPs" in record.note, "the note must say why the source prints another rate"


@pytest.mark.parametrize("name", OWN)
def test_own_record_is_what_its_command_runs(name: str) -> None:
    record = OWN[name]
    check_shared(record)
    cfg = configured(record)
    ranks, data = record.gpus, cfg.data
    assert record.model == cfg.model.name
    assert (record.sequence_length, record.micro_batch, record.global_batch) == (
        data.sequence_length,
        data.micro_batch,
        data.global_batch,
    )
    router = cfg.model.moe.router
    routing = "forced" if router.force_balance else "replayed" if router.replay else "natural"
    assert record.routing == routing
    assert record.data == ("mock" if data.source == "synthetic" else "real")
    assert record.dtype == cfg.precision.recipe
    assert f"EP{expert_parallel_size(cfg, ranks)} DP{data_parallel_size(cfg, ranks)}" in (
        record.layout
    )
    assert cfg.run.steps == 50 and cfg.run.resume == "never"


@pytest.mark.parametrize("name", OWN)
def test_own_numbers_fit_together(name: str) -> None:
    record = OWN[name]
    cfg = configured(record)
    rate = record.tokens_per_second_per_gpu
    flops = flops_per_token(cfg.model, cfg.data.sequence_length)
    assert record.tflops_per_gpu == pytest.approx(rate * flops / 1e12, rel=0.01)
    tokens = cfg.data.global_batch * cfg.data.sequence_length
    assert rate * record.step_time * record.gpus == pytest.approx(tokens, rel=0.01)
    assert 0 <= record.tokens_per_second_per_gpu_sd < rate
    assert 0 < record.loss_at_50 < math.log(cfg.model.vocab_size)
    most = cfg.model.moe.experts / cfg.model.moe.top_k
    assert 1 <= record.load_max_at_50 <= round(most, 2)
    assert record.peak_memory_gib > 0
    assert {"torch", "megatron-core"} <= set(record.versions)


def test_every_file_is_a_record() -> None:
    files = {path.name for path in records.MEASURED.glob("*.yaml")}
    assert files == {f"{name}.yaml" for name in OWN}


@pytest.mark.parametrize(
    ("command", "ranks", "overrides"),
    [
        ("torchrun --nproc-per-node 8 train.py run=bench a=1", 8, ["run=bench", "a=1"]),
        ("torchrun --nnodes=4 --nproc_per_node=8 train.py", 32, []),
        (
            ".venv/bin/torchrun --nnodes 2 --nproc-per-node 4 \\\n train.py 'x=[1,2]'",
            8,
            ["x=[1,2]"],
        ),
        ("python train.py run.steps=2  # a remark", 1, ["run.steps=2"]),
    ],
)
def test_launch(command: str, ranks: int, overrides: list[str]) -> None:
    assert launch(command) == (ranks, overrides)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("bash scripts/train.sh", "no train.py"),
        ("torchrun --nproc-per-node auto train.py", "--nproc-per-node N"),
        ("torchrun train.py", "--nproc-per-node N"),
    ],
)
def test_launch_that_says_too_little(command: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        launch(command)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("gpus: many", "training.yaml, record 1: .*many"),
        ("tokens_per_secnd: 3", "training.yaml, record 1: .*tokens_per_secnd"),
        ("model: null", "training.yaml, record 1: "),
    ],
)
def test_a_record_that_does_not_fit(change: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "training.yaml").write_text(f"- {change}\n")
    with pytest.raises(ValueError, match=message):
        published(tmp_path / "training.yaml")


def test_a_record_with_a_field_missing(tmp_path: Path) -> None:
    (tmp_path / "own_x.yaml").write_text("model: tiny\n")
    with pytest.raises(ValueError, match="own_x.yaml: .*system"):
        own(tmp_path)
