"""Services of `run.trackers`: a subclass of `moe.report.service.Service` each, by import path.

Another package adds one by an entry point of the group `phalanx.trackers`, whose name is the value
of the knob:

    [project.entry-points."phalanx.trackers"]
    mine = "my_package.tracker:Mine"
"""

from importlib.metadata import entry_points

TRACKERS: dict[str, str] = {
    "tensorboard": "phalanx.moe.report.trackers:TensorBoard",
    "mlflow": "phalanx.extras.trackers.mlflow:Mlflow",
    "comet": "phalanx.extras.trackers.comet:Comet",
    "trackio": "phalanx.extras.trackers.trackio:Trackio",
} | {entry.name: entry.value for entry in entry_points(group="phalanx.trackers")}
