"""Start of a run: its first launch decides, and START.json beside its checkpoints remembers.

A command is given more often than once: by torchrun and Kubernetes after a failure, by Slurm after
a requeue, by a person. So `run.resume` is obeyed while the run has no checkpoint of its own; from
then on the run goes on from its newest one. `run.start_over` starts it over, once for each word.
The record is where the checkpoints are, for run folders may be on disks that hosts lose. Imports no
torch.
"""

import json
import os
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from phalanx.configs.addresses import is_address
from phalanx.configs.redact import redacted
from phalanx.configs.schema import RunConfig
from phalanx.configs.validate import ConfigError
from phalanx.parallel.checkpoint import commit, remote  # noqa: F401  (the latter for addresses)
from phalanx.parallel.object_store import Place, Remote, persist, place

NAME = "START.json"
SCRATCH = "scratch"


@dataclass(frozen=True)
class Record:
    """Content of START.json; empty for a run that has not started yet."""

    origin: str = ""  # `scratch`, or the checkpoint that the run started from
    asked: tuple[str, ...] = ()  # every `run.resume` that a launch of this run has obeyed
    words: tuple[str, ...] = ()  # every `run.start_over` that a launch has obeyed


@dataclass(frozen=True)
class Start:
    """Start of one launch, and its reason."""

    path: Place | None  # checkpoint; None starts from scratch
    over: bool  # the run starts over: its checkpoints have to be set aside
    note: str  # a line about a knob that is not obeyed again; empty if there is none
    record: Record  # the record from now on


def start_over_override() -> str:
    """The override that starts a run over, with a word that no launch has used."""
    return f"run.start_over={time.strftime('%Y%m%d-%H%M%S')}"


def starts_over(run: RunConfig, record: Record) -> bool:
    """Return whether this launch is the first with its `run.start_over`."""
    return bool(run.start_over) and redacted(run.start_over) not in record.words


def decide(run: RunConfig, record: Record, newest: Place | None) -> Start:
    """Return the start of a launch.

    Args:
        run: its knobs.
        record: of `read`.
        newest: checkpoint of the run; not looked at if the run starts over.

    Raises:
        ConfigError: the run has checkpoints and did not start where `run.resume` says.
    """
    asked, over = _origin(run.resume), starts_over(run, record)
    if over or newest is None:
        origin = asked or record.origin or SCRATCH
        words = (*record.words, redacted(run.start_over)) if over else record.words
        named = run.resume if asked else origin  # as it was written
        path = None if origin == SCRATCH else place(named)
        return Start(path, over, "", Record(origin, (asked,) if asked else (), words))
    start = Start(newest, False, _note(run, asked), record)
    if not asked or asked in (record.origin, *record.asked) or not record.origin:
        return start
    if asked == _origin(str(newest)):
        return replace(start, note="", record=replace(record, asked=(*record.asked, asked)))
    began = "from scratch" if record.origin == SCRATCH else f"from {record.origin}"
    raise ConfigError(
        f"run.resume={run.resume}: {run.dir}/{run.name} has started {began} and has checkpoints: "
        f"set run.resume=auto to go on from {newest}, {start_over_override()} to set "
        "its checkpoints aside and "
        "start over, or another run.name"
    )


def read(root: Place) -> Record:
    """The record beside the checkpoints of a run.

    Raises:
        OSError: it cannot be read.
    """
    try:
        return _parsed(commit.contents(root / NAME), root)
    except (FileNotFoundError, NotADirectoryError):
        return Record()


def write(root: Place, record: Record) -> None:
    """Keep the record, at once. Raises OSError."""
    data = json.dumps(asdict(record), indent=1).encode() + b"\n"
    if isinstance(root, Remote):
        return persist(lambda: (root / NAME).write(data))
    new = root / f"{NAME}.new"
    with new.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    new.replace(root / NAME)


def _origin(resume: str) -> str:
    """The place that `run.resume` names, the same from every working folder; empty for `auto`."""
    if resume in ("auto", "never"):
        return SCRATCH if resume == "never" else ""
    found = place(resume)
    return str(found) if is_address(resume) else str(Path(resume).resolve())


def _note(run: RunConfig, asked: str) -> str:
    knobs = [f"run.start_over={run.start_over}"] if run.start_over else []
    knobs += [f"run.resume={run.resume}"] if asked else []
    if not knobs:
        return ""
    said = " and ".join(knobs)
    return (
        f"{said}: an earlier launch has started this run, which goes on from its newest "
        f"checkpoint; {start_over_override()} would start it over"
    )


def _parsed(data: bytes, root: Place) -> Record:
    try:
        content = json.loads(data)
        texts = [content["origin"], *content["asked"], *content["words"]]
        if not all(isinstance(text, str) for text in texts):
            raise TypeError
        return Record(content["origin"], tuple(content["asked"]), tuple(content["words"]))
    except (ValueError, LookupError, TypeError):
        raise OSError(
            f"{root / NAME} is damaged: delete it, and the run goes on from its newest checkpoint"
        ) from None
