"""The configuration that a checkpoint was written with, read in a moment and without torch.

For questions before a run starts: names and sizes of files are looked at, not their contents, which
loading verifies (parallel.checkpoint.verify). Nothing in a checkpoint is executed: of its pickles,
objects become empty stand-ins. Nothing takes more memory than its bytes on the disk, which have a
limit.
"""

import io
import pickle
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from phalanx.configs import programs
from phalanx.configs.addresses import is_address
from phalanx.configs.knobs import overrides
from phalanx.parallel.checkpoint import commit, remote  # noqa: F401  (the latter for addresses)
from phalanx.parallel.checkpoint.commit import METADATA, Commit, Invalid
from phalanx.parallel.checkpoint.start import start_over_override
from phalanx.parallel.object_store import Place, Remote, place
from phalanx.parallel.untrusted import check_archive, check_pickle

_COMMON = "common_state/shard_0_1"  # where Megatron-Core puts plain objects that all ranks share


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; those on disk are intact."""


class NoUsableCheckpoint(CheckpointError):
    """There are checkpoints, none of them valid; starting from zero would hide that."""


class NoneValid(NoUsableCheckpoint):
    """None of the run's own checkpoints is valid."""


def newest(root: Place) -> Place | None:
    """Newest checkpoint of a run with all of its files, or None if it has none yet.

    Raises NoUsableCheckpoint if each lacks something, OSError if the folder cannot be read.
    """
    found = [path for _, path in commit.committed(root)]
    for folder in found:
        if not lacking(folder):
            return folder
    if refused := found + commit.with_suffix(root, ".bad"):
        raise none_valid(root, refused)
    return None


def root_of(folder: Place) -> Place:
    """Return the folder of a run's checkpoints, also below `run.checkpoints` of its newest launch.

    Any other folder or address is returned as it is.
    """
    if isinstance(folder, Path):
        try:
            run = yaml.safe_load((folder / "config.yaml").read_text("utf-8"))["run"]
            address, name = str(run["checkpoints"]), str(run["name"])
        except (OSError, ValueError, LookupError, TypeError, yaml.YAMLError):
            address = name = ""  # no run, or one from before there was the knob
        if is_address(address):
            return place(address) / name
    return folder / "checkpoints" if (folder / "checkpoints").is_dir() else folder


def checkpoint_of(folder: Place, step: int | None = None) -> Place:
    """The checkpoint that a person means by the folder or address of a run, or of itself.

    `step` chooses among a run's, the newest by default.

    Raises:
        NoUsableCheckpoint: there is none, or not of that step.
        OSError: the folder cannot be read.
    """
    if (folder / commit.COMMIT).is_file():
        if step is not None:
            raise NoUsableCheckpoint(f"{folder} is one checkpoint: give its run to choose a step")
        return folder
    root = root_of(folder)
    listed = commit.committed(root)
    found = dict(reversed(listed))  # of one step the newest
    if not found:
        if hint := of_hugging_face(folder):
            raise NoUsableCheckpoint(f"{folder} {hint}")
        where = f" in {root}" if isinstance(root, Remote) and root != folder else ""
        raise NoUsableCheckpoint(
            f"{folder} has no checkpoint{where}: give the folder of a run that has saved one"
        )
    if step is None:
        whole = next((path for _, path in listed if not lacking(path)), None)
        if whole is None:
            raise NoUsableCheckpoint(
                f"no checkpoint of {folder} is whole: "
                f"{programs.here('python scripts/checkpoint.py')} list {folder} tells why"
            )
        return whole
    if step not in found:
        steps = ", ".join(map(str, sorted(found)))
        raise NoUsableCheckpoint(f"{folder} has no checkpoint of step {step}, but of {steps}")
    return found[step]


def none_valid(root: Place, refused: Sequence[Place]) -> NoneValid:
    """The error of a run whose checkpoints are all damaged."""
    names = ", ".join(path.name for path in refused[:3])
    return NoneValid(
        f"no checkpoint in {root} is valid ({names}): {start_over_override()} run.resume=never "
        "sets them aside "
        "and starts from scratch, with run.resume=<folder> from another checkpoint"
    )


def not_valid(path: Place, problem: str) -> NoUsableCheckpoint:
    """The error of a checkpoint that a person named as run.resume."""
    if foreign := of_hugging_face(path):
        return NoUsableCheckpoint(f"run.resume={path} {foreign}")
    inside = commit.committed(path) or commit.committed(path / "checkpoints")
    hint = f"; did you mean {overrides({'run.resume': str(inside[0][1])})}?" if inside else ""
    if not hint and not path.exists():
        hint = "; run.resume takes auto, never or a checkpoint folder"
    return NoUsableCheckpoint(f"run.resume={path} is no valid checkpoint: {problem}{hint}")


def of_hugging_face(folder: Place) -> str:
    """Advice for a Hugging Face folder that was named as a checkpoint; else an empty text."""
    if not isinstance(folder, Path) or not (folder / "config.json").is_file():
        return ""
    if not any(folder.glob("*.safetensors")):
        return ""
    made = shlex.join([str(folder), f"imported/{folder.resolve().name}"])
    return f"is a Hugging Face folder: first python scripts/convert_hf.py import {made}"


def lacking(folder: Place) -> str:
    """Return the first difference of names and sizes of files from COMMIT.json; empty if none.

    Raises NewerFormat.
    """
    if not folder.is_dir():
        return "no such folder"
    try:
        return str(commit.sizes_differ(folder, commit.read_commit(folder).files))
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except Invalid as error:
        return str(error)


class Compared(NamedTuple):
    """Facts of a checkpoint with which a run that goes on from it has to agree."""

    config: dict[str, Any]  # of weights alone only that of the model
    samples: int  # samples of the data that the checkpoint has passed
    step: int  # steps that it has done
    data: dict[str, Any]  # section of the configuration, of averaged weights too


def compared(common: dict[str, Any]) -> Compared:
    """Facts with which a run has to agree, from what all ranks share of a checkpoint."""
    config = dict(common["config"])
    kept = {k: v for k, v in config.items() if k == "model" or not common.get("weights_only")}
    samples = int(common.get("data", {}).get("consumed_samples", 0))
    return Compared(kept, samples, int(common.get("step", 0)), config.get("data", {}))


def configuration(folder: Place) -> Compared:
    """Facts with which a run that goes on from a checkpoint has to agree.

    Raises Invalid if they cannot be found, OSError if a file cannot be read.
    """
    state = _plain(_bytes_of(folder, commit.read_commit(folder)))
    try:
        return compared(state[0]["common"])
    except (TypeError, LookupError, ValueError):
        raise Invalid("no configuration in it") from None


def _bytes_of(folder: Place, record: Commit) -> bytes:
    data = commit.contents(folder / METADATA)
    try:
        check_pickle(data)
        places = vars(_Describing(io.BytesIO(data)).load())["storage_data"]
        found = next(vars(p) for i, p in places.items() if vars(i).get("fqn") == _COMMON)
        path, offset, length = found["relative_path"], found["offset"], found["length"]
    except Exception:  # pickle lets through whatever the bytes make it stumble over
        raise Invalid(f"{METADATA} is not readable") from None
    if path not in record.files or not all(type(n) is int and n >= 0 for n in (offset, length)):
        raise Invalid(f"{METADATA} refers to what is not of this checkpoint")
    if min(length, record.files[path][0]) > commit.LARGEST:
        raise Invalid("its plain data is larger than any")
    return bytes(commit.contents(folder / path, offset, min(length, record.files[path][0])))


def _plain(data: bytes) -> Any:
    """Return the object that torch.save wrote as these bytes, if it is plain data."""
    try:
        with check_archive(data) as archive:
            (name,) = (n for n in archive.namelist() if n.endswith("/data.pkl"))
            check_pickle(plain := archive.read(name))
            return _PlainOnly(io.BytesIO(plain)).load()
    except Exception as error:
        raise Invalid(f"its plain data is not readable ({type(error).__name__})") from None


class _StandIn:
    """Takes the place of any object; keeps its attributes, if it has some."""

    def __init__(self, *args: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            vars(self).update(state)


class _PlainOnly(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise Invalid(f"asks for {module}.{name}")


class _Describing(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return _StandIn
