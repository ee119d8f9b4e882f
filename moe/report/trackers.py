"""The services of `run.wandb`, `run.tensorboard` and `run.trackers`."""

import contextlib
import json
import os
import re
import struct
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from phalanx.configs.redact import redacted
from phalanx.configs.schema import Config
from phalanx.moe.report.service import Service, Sink, ThreadSink, own_id, parameters

_BLOCK = 32 << 10
_PREAMBLE = 7
_HEAD = struct.Struct("<IHB")  # checksum, size and kind of a chunk
_WHOLE, _LAST = 1, 4  # kinds of chunks that end a record; 2 begins one, 3 goes on


def rows(path: Path) -> Iterator[dict[str, Any]]:
    """Rows of a .wandb file, in their order, up to where the file breaks off.

    W&B writes blocks of 32 KiB: a kill loses the rows of the last one. The file is a log of LevelDB
    (doc/log_format.md there) behind seven bytes: blocks with chunks of records, which are wandb's
    protobuf messages.
    """
    from wandb.proto.wandb_internal_pb2 import Record

    for content in _records(path.read_bytes()):
        record = Record.FromString(content)
        if record.HasField("history"):
            yield {
                ".".join(item.nested_key) or item.key: json.loads(item.value_json)
                for item in record.history.item
            }


def _records(data: bytes) -> Iterator[bytes]:
    at, record = _PREAMBLE, b""
    while at + _HEAD.size <= len(data):
        left = _BLOCK - at % _BLOCK
        if left < _HEAD.size:  # too little for another chunk
            at += left
            continue
        _, size, kind = _HEAD.unpack_from(data, at)
        begin, at = at + _HEAD.size, at + _HEAD.size + size
        if not kind or at > len(data):
            return
        record = (b"" if kind in (_WHOLE, 2) else record) + data[begin:at]
        if kind in (_WHOLE, _LAST):
            yield record


class WeightsAndBiases(Service):
    """A run of `run.project`, offline in the folder of the run, or online."""

    name = "Weights & Biases"
    file = "wandb"

    def __init__(self, cfg: Config, folder: Path, step: int, sent: int) -> None:
        import wandb

        self._known: dict[str, Any] = {}  # last of each name, as of the step
        if cfg.run.wandb == "offline" and step:
            self._known = _last_numbers(folder / "wandb", own_id(folder / "wandb_id", step))
        if cfg.run.wandb == "online" and not wandb.login(prompt=False):
            raise RuntimeError("not logged in: run `wandb login`, or set run.wandb=offline")
        self._run = wandb.init(
            project=redacted(cfg.run.project),
            name=redacted(cfg.run.name),
            id=own_id(folder / "wandb_id", step),
            resume="allow",
            dir=str(folder),
            mode="offline" if cfg.run.wandb == "offline" else "online",
            config=redacted(asdict(cfg)),
            # What wandb collects by itself has the command line and the repository's address in it.
            settings=wandb.Settings(
                console="off", quiet=True, init_timeout=60, disable_git=True, x_disable_meta=True
            ),
        )
        # Our step as a field: their own counter refuses the steps that a resumed run does again.
        # Every record has train/tokens too, which a chart can have as its x-axis.
        self._run.define_metric("*", step_metric="step")
        if cfg.run.wandb == "online" and self._run.resumed:
            self._known = dict(self._run.summary)

    def has(self, step: int, numbers: dict[str, float]) -> bool:
        last = self._known.get("step", 0)
        return step < last or (step == last and numbers.items() <= self._known.items())

    def log(self, step: int, numbers: dict[str, float], time: float) -> None:
        self._run.log({"step": step, "_timestamp": time} | numbers)

    def close(self) -> None:
        self._run.finish()


def _last_numbers(folder: Path, run: str) -> dict[str, Any]:
    """Numbers in the file of the launch before this one, of each name the last."""
    known: dict[str, Any] = {}
    if files := sorted(folder.glob(f"offline-run-*-{run}/run-{run}.wandb")):
        for row in rows(files[-1]):
            known |= row
    return known


class TensorBoard(Service):
    """Event files in the folder of the run."""

    name = "TensorBoard"
    file = "tensorboard"

    def __init__(self, cfg: Config, folder: Path, step: int, sent: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        with _silent_threads():
            # Later steps of event files before it are no longer shown: they follow once more.
            self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=sent + 1)

    def log(self, step: int, numbers: dict[str, float], time: float) -> None:
        for key, value in numbers.items():
            self._writer.add_scalar(key, value, step, walltime=time)

    def flush(self) -> bool:
        self._writer.flush()
        return True

    def rewind(self, step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        begun = SessionLog(status=SessionLog.START)  # as purge_step begins an event file
        writer: Any = self._writer.file_writer
        writer.add_event(Event(session_log=begun), step + 1)

    def close(self) -> None:
        self._writer.close()


@contextlib.contextmanager
def _silent_threads() -> Iterator[None]:
    """Suppress tracebacks of threads that are started inside the block.

    An error of TensorBoard's writer thread is raised once more at the next record, where `Sink`
    reports it.
    """
    before, hook = set(threading.enumerate()), threading.excepthook
    yield
    silent = weakref.WeakSet(set(threading.enumerate()) - before)

    def unless_silent(args: threading.ExceptHookArgs) -> None:
        if args.thread not in silent:
            hook(args)

    threading.excepthook = unless_silent


class Comet(Service):
    """An experiment of `run.project`; without COMET_API_KEY an archive in the folder of the run."""

    name = "Comet"
    file = "comet"
    threaded = True

    def __init__(self, cfg: Config, folder: Path, step: int, sent: int) -> None:
        import comet_ml

        # Archives of one experiment have one name: each launch has a folder of its own.
        archives = folder / "comet" / f"after_step_{step}"
        self._online = online = bool(os.environ.get("COMET_API_KEY"))
        if not online:
            archives.mkdir(parents=True, exist_ok=True)
        # What Comet collects by itself has code, the command line and the repository in it.
        config = comet_ml.ExperimentConfig(
            name=redacted(cfg.run.name),
            offline_directory=str(archives),
            log_code=False,
            log_git_metadata=False,
            log_git_patch=False,
            log_env_details=False,
            parse_args=False,
            auto_output_logging=False,
            auto_param_logging=False,
            auto_metric_logging=False,
            display_summary_level=0,
        )
        self._experiment = comet_ml.start(
            project_name=redacted(cfg.run.project),
            experiment_key=own_id(folder / "comet_id", step, size=16),
            mode="get_or_create" if online else "get" if step else "create",
            online=online,
            experiment_config=config,
        )
        self._experiment.log_parameters(parameters(redacted(asdict(cfg))))

    def log(self, step: int, numbers: dict[str, float], time: float) -> None:
        self._experiment.log_metrics(numbers, step=step)

    def flush(self) -> bool:
        # A killed run leaves no archive: all that it logged is sent again.
        return self._online and bool(self._experiment.flush())

    def close(self) -> None:
        self._experiment.end()


_LONGEST = 6000  # characters of a value of a parameter
_BATCH = 100  # parameters that a server takes at once


class Mlflow(Service):
    """A run of the experiment `run.project`.

    Its server is that of MLFLOW_TRACKING_URI; without one a database in the folder of the run.
    """

    name = "MLflow"
    file = "mlflow"
    threaded = True

    def __init__(self, cfg: Config, folder: Path, step: int, sent: int) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Param

        own = f"sqlite:///{folder.resolve() / 'mlflow.db'}"
        self._client = MlflowClient(os.environ.get("MLFLOW_TRACKING_URI") or own)
        self._id = _run_id(self._client, cfg, folder / "mlflow_id", step)
        texts = parameters(redacted(asdict(cfg)))
        given = [Param(name, str(value)[:_LONGEST]) for name, value in texts.items()]
        if not step:  # those of a run cannot change
            for first in range(0, len(given), _BATCH):
                self._client.log_batch(self._id, params=given[first : first + _BATCH])

    def log(self, step: int, numbers: dict[str, float], time: float) -> None:
        from mlflow.entities import Metric

        # Of the record: what is sent again is the same to MLflow, which keeps it once.
        at = round(time * 1000)
        named = {re.sub(r"[^\w\-./ ]", "_", name): value for name, value in numbers.items()}
        metrics = [Metric(name, float(value), at, step) for name, value in named.items()]
        self._client.log_batch(self._id, metrics=metrics)

    def flush(self) -> bool:
        return True  # it has what `log` has returned from

    def close(self) -> None:
        self._client.set_terminated(self._id)


def _run_id(client: Any, cfg: Config, path: Path, step: int) -> str:
    if step and path.exists():
        run = path.read_text().strip()
        client.update_run(run, status="RUNNING")
        return run
    project = redacted(cfg.run.project)
    known = client.get_experiment_by_name(project)
    experiment = client.create_experiment(project) if known is None else known.experiment_id
    made = client.create_run(experiment, run_name=redacted(cfg.run.name))
    path.write_text(made.info.run_id)
    return str(made.info.run_id)


class Trackio(Service):
    """A run of `run.project` in its own database, or in the space of TRACKIO_SPACE_ID."""

    name = "Trackio"
    file = "trackio"
    threaded = True

    def __init__(self, cfg: Config, folder: Path, step: int, sent: int) -> None:
        import trackio

        # A run there is its name: one that starts from scratch is another.
        name = f"{redacted(cfg.run.name)}-{own_id(folder / 'trackio_id', step)}"
        self._run = trackio.init(
            project=redacted(cfg.run.project),
            name=name,
            config=parameters(redacted(asdict(cfg))),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def log(self, step: int, numbers: dict[str, float], time: float) -> None:
        self._run.log(numbers, step=step)

    def close(self) -> None:
        self._run.finish()


TRACKERS: dict[str, type[Service]] = {"mlflow": Mlflow, "comet": Comet, "trackio": Trackio}


def make_sinks(
    cfg: Config,
    folder: Path,
    step: int,
    warn: Callable[[str], None],
    records: Sequence[dict[str, Any]] = (),
) -> list[Sink]:
    """Sinks of run.wandb, run.tensorboard and run.trackers; arguments as for `Sink`."""
    kinds: list[type[Service]] = [WeightsAndBiases] if cfg.run.wandb != "off" else []
    kinds += [TensorBoard] if cfg.run.tensorboard else []
    kinds += [TRACKERS[name] for name in cfg.run.trackers]
    return [
        (ThreadSink if kind.threaded else Sink)(kind, cfg, folder, step, warn, records)
        for kind in kinds
    ]
