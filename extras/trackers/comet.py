"""Comet."""

import os
from dataclasses import asdict
from pathlib import Path

from phalanx.configs.redact import redacted
from phalanx.configs.schema import Config
from phalanx.moe.report.service import Service, own_id, parameters


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
