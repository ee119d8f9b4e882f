"""Start of a run: its first launch decides, and START.json beside its checkpoints remembers.

A command is given more often than once: by torchrun and Kubernetes after a failure, by Slurm after
a requeue, by a person. So `run.resume` is obeyed while the run has no checkpoint of its own; then
the run goes on from its newest one. `run.start_over` starts it over, once for each word. The record
is with the checkpoints, as run folders may be on disks that hosts lose. Imports no torch.

What may change of the configuration of its checkpoint is one table (`CHANGES`), by which `compare`
refuses or reports differences.
"""

import json
import os
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from phalanx.configs.addresses import is_address
from phalanx.configs.arithmetic.data_stages import begun
from phalanx.configs.knobs import overrides
from phalanx.configs.redact import redacted
from phalanx.configs.schema import RunConfig
from phalanx.configs.tables.optimizers import OPTIMIZERS
from phalanx.configs.validate import ConfigError
from phalanx.parallel.checkpoint import commit, remote  # noqa: F401  (the latter for addresses)
from phalanx.parallel.checkpoint.saved_knobs import CheckpointMismatch, leaves, shown, understood
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
    begins: bool = True  # not with a checkpoint of its own


def start_over_override() -> str:
    """The override that starts a run over, with a word that no launch has used."""
    return f"run.start_over={time.strftime('%Y%m%d-%H%M%S')}"


def starts_over(run: RunConfig, record: Record) -> bool:
    """Return whether this launch is the first with its `run.start_over`."""
    return bool(run.start_over) and redacted(run.start_over) not in record.words


def decide(run: RunConfig, record: Record, newest: Place | None) -> Start:
    """Return the start of a launch; `newest` is not looked at if the run starts over.

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
    start = Start(newest, False, _note(run, asked), record, begins=False)
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
    """The record beside the checkpoints of a run. Raises OSError."""
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


ALWAYS, BEGIN, NEVER = "at every resume", "where a run or phase begins", "never"
_LOSSES = ("aux_loss", "seq_aux_loss", "global_aux_loss", "z_loss", "force_balance", "replay")
CHANGES = {
    **dict.fromkeys(("model", "optim.kind"), NEVER),
    **dict.fromkeys(("model.name", "model.init_std", "model.mtp_loss"), ALWAYS),
    **dict.fromkeys((f"model.moe.router.{name}" for name in _LOSSES), ALWAYS),
    **dict.fromkeys(("model.attention.rope_theta", "model.attention.yarn"), BEGIN),
    **{"model.attention.sparse.phase": BEGIN, "model.attention.sparse.loss": ALWAYS},
    **dict.fromkeys(("data.source", "data.stages", "data.split", "data.seed"), BEGIN),
    "data.sequence_length": BEGIN,
}
"""When a knob may change, or those of a section; others always. docs/checkpoints.md has reasons."""
_BUT = {"model.moe.router.bias_rate": 0, "precision.recipe": "fp32"}
"""Values of knobs that may change always, but neither from this value nor to it."""
_STAGES = "data.stages"
_FEW = 8  # differences that a person reads one by one


class OtherPhase(CheckpointMismatch):
    """The checkpoint is of another phase of the run than the one that is to go on from it."""


def compare(
    saved: dict[str, Any],
    current: dict[str, Any],
    samples: int = 0,
    *,
    step: int = 0,
    begins: bool = False,
) -> list[str]:
    """Differences that a resumed run may have, as `key old -> new`.

    Args:
        saved: configuration of the checkpoint. A knob that only one of the two knows is not
            compared.
        current: configuration of this run.
        samples: number of samples that the checkpoint has passed; later stages may differ.
        step: steps of the checkpoint, by which a phase begins with it or not.
        begins: the run begins with this checkpoint of another one.

    Raises:
        CheckpointMismatch: a knob that must agree does not, or one of the checkpoint is not
            understood; the message is a diff with the way out.
        OtherPhase: the checkpoint is not of the present phase, nor the end of the one before.
    """
    old, new = understood(saved).values, dict(leaves(current))
    if any(key.startswith("optim.") for key in old):  # weights alone go with any optimizer
        old.setdefault("optim.kind", next(iter(OPTIMIZERS)))  # of versions that had no other
    if "data.blend" in old:
        old.setdefault(_STAGES, [])  # of versions that had none
    if phases := new.pop("run.phases", None):
        if not phases[-1]["first"] <= step <= new["run.steps"]:
            raise OtherPhase(f"step {step} is not of phase {phases[-1]['name']}: start again")
        begins = begins or 0 < phases[-1]["first"] == step
    changed = [key for key in old if key in new and old[key] != new[key]]
    refused = [key for key in changed if must_agree(key, old[key], new[key], begins=begins)]
    if _STAGES in refused:
        passed = samples, old.get("data.sequence_length", 1)
        same = begun(old[_STAGES], *passed) == begun(new[_STAGES], *passed)
        if same or "data.blend" in changed:
            refused.remove(_STAGES)
    if refused:
        raise CheckpointMismatch(_refusal(refused, old, new))
    return [f"{key} {shown(old[key])} -> {shown(new[key])}" for key in changed]


def must_agree(key: str, old: Any, new: Any, *, begins: bool = False) -> bool:
    """Return whether a knob may not have two different values; `begins` as in `compare`."""
    if isinstance(old, dict) and isinstance(new, dict):
        parts = [n for n in old | new if old.get(n) != new.get(n)]
        return any(must_agree(f"{key}.{n}", old.get(n), new.get(n), begins=begins) for n in parts)
    if key in _BUT:
        return bool((old == _BUT[key]) != (new == _BUT[key]))
    fits = [name for name in CHANGES if f"{key}.".startswith(f"{name}.")]
    when = CHANGES[max(fits, key=len)] if fits else ALWAYS
    return when == NEVER or (when == BEGIN and not begins)


def _refusal(keys: list[str], old: dict[str, Any], new: dict[str, Any]) -> str:
    rows = [("", "checkpoint", "now"), *((k, shown(old[k]), shown(new[k])) for k in keys)]
    widths = [max(len(row[i]) for row in rows) for i in range(2)]
    table = [f"  {a:<{widths[0]}}  {b:<{widths[1]}}  {c}" for a, b, c in rows]
    values = "the values of the checkpoint"
    if len(keys) <= _FEW:
        values = overrides({k: old[k] for k in keys})
    else:
        table[_FEW + 1 :] = [f"  and {len(keys) - _FEW} more"]
    instead = "or begin a run or phase with the checkpoint (run.resume, run.phases),"
    return "\n".join(
        [
            "this run is not configured as its checkpoint:",
            *table,
            f"go on with {values},",
            *[instead] * all(not must_agree(k, old[k], new[k], begins=True) for k in keys),
            f"or start anew with run.resume=never and another run.name or {start_over_override()}",
        ]
    )
