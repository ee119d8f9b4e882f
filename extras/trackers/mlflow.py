"""MLflow."""

import os
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

from phalanx.configs.redact import redacted
from phalanx.configs.schema import Config
from phalanx.moe.report.service import Service, parameters

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
