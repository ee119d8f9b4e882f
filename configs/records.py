"""Training throughput that others published and that we measured: the records below docs/.

docs/published/training.yaml lists numbers as their source printed them. Each
docs/measured/training/own_*.yaml is one measurement of ours, by scripts/lab/record_anchor.py. Both
carry TFLOP/s by the convention of configs.arithmetic.accounting, so that they compare.
"""

import functools
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from phalanx.configs.knobs import copied
from phalanx.configs.load import load
from phalanx.configs.schema import Config

_DOCS = Path(__file__).resolve().parents[1] / "docs"
PUBLISHED = _DOCS / "published" / "training.yaml"
MEASURED = _DOCS / "measured" / "training"
WINDOW = range(41, 51)  # steps that a measurement counts


@dataclass
class Record:
    """Fields that published and own records share."""

    model: str = MISSING  # option of `model=`
    overrides: list[str] = field(default_factory=list)  # differences of the measured model
    system: str = MISSING  # framework; our own records name the experts' backend too
    date: str = MISSING  # day of the measurement, or of the page that printed it: YYYY-MM-DD
    hardware: str = MISSING  # number and kind of GPUs: `8 x H200`
    gpus: int = MISSING  # number of GPUs
    dtype: str = MISSING  # option of `precision=`: `bf16`, `fp32`, `fp8_block`, ..
    sequence_length: int = MISSING  # tokens in a sequence
    micro_batch: int | None = None  # sequences of a rank in a pass; null: not said
    global_batch: int | None = None  # sequences in a step; null: not said
    layout: str = MISSING  # sizes of the parallel groups, and what is recomputed
    routing: str = MISSING  # `natural`, `replayed` (of a trained model) or `forced` (balanced)
    data: str = MISSING  # `real` text or `mock` tokens
    tokens_per_second_per_gpu: float = MISSING  # as printed; mean of steps 41-50 of our own
    tflops_per_gpu: float = MISSING  # by configs.arithmetic.accounting
    note: str = ""  # facts that a reader needs to compare this record with others


@dataclass
class Published(Record):
    """A number as its source printed it. Not run by us."""

    source: str = MISSING  # address of the page or file
    tflops_per_gpu_printed: float | None = None  # by the source's own convention; null: not said
    settings: list[str] = field(default_factory=list)
    """Overrides that lay the run out here, as near as our knobs come (FSDP is data parallel)."""
    stack: dict[str, Any] | None = None  # the framework (scripts.lab.peers.stack)


@dataclass
class OwnRecord(Record):
    """A measurement of ours: 50 steps from scratch, of which 41-50 count."""

    command: str = MISSING  # command line that was run, from the repository root
    commit: str = MISSING  # commit of the repository that ran; a + says that the tree had changes
    versions: dict[str, str] = MISSING  # versions of the packages that matter to speed
    tokens_per_second_per_gpu_sd: float = MISSING  # standard deviation over steps 41-50
    tflops_per_gpu_sd: float = MISSING  # standard deviation over steps 41-50
    step_time: float = MISSING  # seconds, mean of steps 41-50
    step_time_sd: float = MISSING  # standard deviation over steps 41-50
    loss_at_50: float = MISSING  # nats a token at step 50
    load_max_at_50: float = MISSING  # tokens of the busiest expert over the mean, worst layer
    rank_load_at_50: float | None = None
    """Expert rows of the busiest rank over the mean at step 50, on average over layers; null where
    that was not recorded or the experts are on one rank."""
    dead_experts_at_50: int = MISSING  # experts without a token at step 50, over all layers
    reruns: int = MISSING  # steps that overflowed the budget of expert rows and ran again
    capacity_factor: float | None = None  # at the end of the run; null: not recorded
    peak_memory_gib: float = MISSING  # largest allocation of rank 0


def published(path: Path = PUBLISHED) -> list[Published]:
    """Records that others published, in the order of the file; ValueError: one does not fit."""
    rows = yaml.safe_load(path.read_text(encoding="utf-8"))
    return [_typed(Published, row, f"{path.name}, record {i}") for i, row in enumerate(rows, 1)]


def own(folder: Path = MEASURED) -> dict[str, OwnRecord]:
    """Our own records by file name, without .yaml; ValueError: one does not fit."""
    files = sorted(folder.glob("own_*.yaml"))
    return {path.stem: _own(path.read_text(encoding="utf-8"), path.name) for path in files}


@functools.cache
def _own(text: str, name: str) -> OwnRecord:
    return _typed(OwnRecord, yaml.safe_load(text), name)


def configured(record: Record) -> tuple[Config, int]:
    """The run of a record as a configuration, not yet validated, and its ranks.

    Where a source does not say its batch, a rank has eight micro-batches of one sequence.
    """
    if isinstance(record, OwnRecord):
        ranks, overrides = launch(record.command)
        return copied(_loaded(*overrides)), ranks
    assert isinstance(record, Published)
    micro = record.micro_batch or 1
    data = {
        "data": "synthetic",
        "data.sequence_length": record.sequence_length,
        "data.micro_batch": micro,
        "data.global_batch": record.global_batch or 8 * micro * record.gpus,
        "precision": record.dtype,
        "model.moe.router.force_balance": str(record.routing == "forced").lower(),
    }
    given = [f"{knob}={value}" for knob, value in data.items()]
    overrides = [f"model={record.model}", *given, *record.overrides, *record.settings]
    return copied(_loaded(*overrides)), record.gpus


@functools.cache
def _loaded(*overrides: str) -> Config:
    return load(overrides)


def launch(command: str) -> tuple[int, list[str]]:
    """Ranks and overrides of a `torchrun ... train.py ...` or `python train.py ...` command line.

    Raises ValueError without train.py, or without the number of ranks that torchrun starts.
    """
    words = shlex.split(command, comments=True)
    if "train.py" not in words:
        raise ValueError(f"no train.py in the command: {command}")
    at = words.index("train.py")
    return _ranks(words[:at]), words[at + 1 :]


def _typed[T: Record](kind: type[T], row: Any, where: str) -> T:
    try:
        record = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(kind), row))
    except OmegaConfBaseException as error:
        raise ValueError(f"{where}: {str(error).splitlines()[0]}") from error
    assert isinstance(record, kind)
    return record


def _ranks(words: Sequence[str]) -> int:
    if not any(word.endswith("torchrun") for word in words):
        return 1
    given = {}
    for word, after in zip(words, [*words[1:], ""], strict=True):
        name, equals, value = word.replace("_", "-").partition("=")
        given[name] = value if equals else after
    ranks = [given.get(name, default) for name, default in _SIZES.items()]
    if not all(text.isdecimal() for text in ranks):
        raise ValueError("the command must say --nproc-per-node N, and --nnodes N of several")
    return int(ranks[0]) * int(ranks[1])


_SIZES = {"--nnodes": "1", "--nproc-per-node": ""}
