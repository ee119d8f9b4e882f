"""Runs of the trainer on the ranks of `run_distributed`, and a small corpus for them."""

import contextlib
import io
import logging
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import megatron.core.distributed
import megatron.core.models.gpt.gpt_model  # noqa: F401
import numpy as np
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from phalanx.moe.report.loggers import read
from phalanx.parallel.checkpoint import commit
from phalanx.parallel.object_store import Place, Remote
from tests.support.distributed import run_distributed

SMALL = [
    "run.device=cpu",
    "run.name=run",
    "model.vocab_size=256",
    "model.hidden=32",
    "model.layers=2",
    "model.dense_ffn=48",
    "model.moe.ffn=16",
    "model.init_std=0.1",
    "data.sequence_length=16",
    "data.micro_batch=4",
    "data.global_batch=8",
    "optim.warmup_steps=2",
    "optim.decay_steps=20",
    "optim.lr=1e-2",
]
"""Overrides of any tiny model, for steps of some hundredths of a second."""
TINY = [*SMALL, "model=tiny", "model.attention.head_dim=8"]
GPT_OSS = ["model=tiny_gpt_oss", "model.attention.head_dim=8"]
DEEPSEEK = [
    "model=tiny_deepseek",
    "model.attention.q_lora_rank=16",
    "model.attention.kv_lora_rank=12",
    "model.attention.qk_nope_dim=8",
    "model.attention.qk_rope_dim=4",
    "model.attention.v_dim=8",
    "model.moe.shared_ffn=16",
]
"""Overrides of these models that go with `SMALL`."""


class Rank(NamedTuple):
    """Result of a run on one rank."""

    code: int
    out: str
    err: str
    seen: Any
    """Value of the `Change` context on this rank."""


Change = Callable[[int], contextlib.AbstractContextManager[Any]]
"""rank -> context in which the rank trains; its value must be picklable after the run."""


def run(world: int, overrides: Sequence[str], change: Change | None = None) -> list[Rank]:
    """Train like `train.py` on `world` ranks of this session's pools."""
    return run_distributed(_run, world, list(overrides), change)


def _run(overrides: list[str], change: Change | None) -> Rank:
    from phalanx import train

    # As in a new process: logging.warning() of a package adds a handler for the stderr of its time.
    logging.root.handlers.clear()
    out, err = io.StringIO(), io.StringIO()
    changed = change(int(os.environ["RANK"])) if change else contextlib.nullcontext()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), changed as seen:
        code = train.main(overrides)
    return Rank(code, out.getvalue(), err.getvalue(), seen)


@contextlib.contextmanager
def before_step(number: int, act: Callable[[], Any]) -> Iterator[None]:
    """Call `act` when step `number` starts."""
    from phalanx.moe.run.trainer import Trainer

    original = Trainer._train_step

    def step(self: Any) -> bool:
        if self.step + 1 == number:
            act()
        return original(self)

    with mock.patch.object(Trainer, "_train_step", step):
        yield


def terminate() -> None:
    """Send SIGTERM to this process, as a batch system does."""
    os.kill(os.getpid(), signal.SIGTERM)


def announced(out: str) -> bool:
    """True if nothing was printed, or only the first line of every run."""
    lines = out.splitlines()
    return not lines or [line.split()[0] for line in lines] == ["Phalanx:", "node"]


def records(folder: Path) -> list[dict[str, Any]]:
    """Records of a run's metrics.jsonl, each step once."""
    return read(folder / "metrics.jsonl")


def exact(records: Sequence[dict[str, Any]]) -> list[tuple[int, str, str]]:
    """(step, loss, gradient norm) in hexadecimal, exact to the last bit."""
    return [(r["step"], r["loss"].hex(), r["grad_norm"].hex()) for r in records]


def write_corpus(prefix: Path, documents: Sequence[Sequence[int]] | None = None) -> str:
    """Documents of token ids, by default those of `text`, as a .bin/.idx pair."""
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for document in documents or text():
        builder.add_document(np.array([*document], np.uint16), [len(document)])
    builder.finalize(f"{prefix}.idx")
    return str(prefix)


def with_corpus(folder: Path, documents: Sequence[Sequence[int]] | None = None) -> list[str]:
    """Overrides that train on a corpus, which `write_corpus` writes to the folder."""
    prefix = write_corpus(folder / "text", documents)
    return ["data=indexed", f"data.blend=[{prefix}]", f"data.cache={folder / 'cache'}"]


def write_checkpoint(folder: Place) -> None:
    """Write a checkpoint of step 5 that is complete by names and sizes of its files."""
    sums = {name: (1, commit.crc32(b"x")) for name in (".metadata", "metadata.json")}
    contents = dict.fromkeys(sums, b"x")
    contents[commit.COMMIT] = commit.with_checksum(commit.Commit(5, 1, sums))
    for name, data in contents.items():
        if isinstance(folder, Remote):
            (folder / name).write(data)
        else:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(data)


def text() -> list[bytes]:
    """Paragraphs of real text."""
    return [p for p in Path(contextlib.__file__).read_bytes().split(b"\n\n") if len(p) > 16]
