"""Services that are called in a thread: what they get, and that none stops or holds up a run."""

import io
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest

from phalanx.configs.schema import Config
from phalanx.configs.tables.trackers import TRACKERS
from phalanx.moe.report import metrics as metrics_module
from phalanx.moe.report import service
from phalanx.moe.report.loggers import read
from phalanx.moe.report.metrics import Metrics

NUMBERS = {"train/loss": 2.0, "perf/memory": 1.25, "perf/step_time": 0.5, "perf/goodput": 0.0}


class Fake(types.ModuleType):
    """Stands in for the package of a service; a call named `fails` raises, `hangs` waits."""

    def __init__(self, fails: str = "", hangs: str = "") -> None:
        super().__init__("fake")
        self._fails, self._hangs = fails, hangs
        self.go_on = threading.Event()
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self.info, self.experiment_id = types.SimpleNamespace(run_id="run7"), "3"
        self.Metric = lambda *given: given
        self.Param = lambda *given: given

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*given: Any, **named: Any) -> Any:
            self.calls.append((name, given, named))
            if name == self._hangs:
                self.go_on.wait(20)
            if name == self._fails:
                raise ConnectionError("no route to host")
            return self

        return call

    def named(self, name: str) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        return [(given, more) for called, given, more in self.calls if called == name]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Fake]:
    monkeypatch.setattr(metrics_module, "memory", lambda: {"memory": 1.25})

    def installed(**how: str) -> Fake:
        fake = Fake(**how)
        for package in ("mlflow", "mlflow.entities", "comet_ml", "trackio"):
            monkeypatch.setitem(sys.modules, package, fake)
        return fake

    return installed


def make(folder: Path, tracker: str, step: int = 0) -> tuple[Metrics, io.StringIO]:
    cfg, stream = Config(), io.StringIO()
    cfg.run.trackers, cfg.run.name = [tracker], "mine"
    return Metrics(folder, cfg, True, step=step, stream=stream), stream


def log(metrics: Metrics, *steps: int) -> None:
    for step in steps:
        metrics.log({"step": step, "loss": 2.0, "step_time": 0.5, "note": "text"})


def called(install: Callable[..., Fake], folder: Path, tracker: str, step: int = 0) -> Fake:
    """The service after a run from `step` that logged step 4."""
    fake = install()
    metrics, stream = make(folder, tracker, step=step)
    log(metrics, 4)
    metrics.close()
    assert "warning" not in stream.getvalue()
    return fake


def test_mlflow_gets_numbers_and_one_run(
    tmp_path: Path, install: Callable[..., Fake], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    fake = called(install, tmp_path, "mlflow")
    assert fake.named("MlflowClient") == [((f"sqlite:///{tmp_path}/mlflow.db",), {})]
    assert fake.named("create_run") == [(("3",), {"run_name": "mine"})]
    *configured, (given, logged) = fake.named("log_batch")
    assert given == ("run7",)
    assert {name: (value, step) for name, value, _, step in logged["metrics"]} == {
        name: (value, 4) for name, value in NUMBERS.items()
    }
    names = [name for _, more in configured for name, _ in more["params"]]
    assert "model.moe.experts" in names and len(names) == len({*names})
    assert all(len(more["params"]) <= 100 for _, more in configured)
    assert fake.calls[-1][:2] == ("set_terminated", ("run7",))

    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://server:5000")
    fake = install()
    metrics, _ = make(tmp_path, "mlflow", step=4)
    metrics.close()
    assert fake.named("MlflowClient") == [(("http://server:5000",), {})]
    assert not fake.named("create_run") and fake.named("update_run")[0][0] == ("run7",)


def test_comet_gets_numbers_and_one_experiment(
    tmp_path: Path, install: Callable[..., Fake], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COMET_API_KEY", raising=False)
    keys = []
    for step in (0, 2, 0):
        fake = called(install, tmp_path, "comet", step)
        ((_, started),) = fake.named("start")
        assert started["online"] is False and started["project_name"] == "phalanx"
        assert started["mode"] == ("get" if step else "create")
        archive = started["experiment_config"].named("ExperimentConfig")[0][1]["offline_directory"]
        assert archive == str(tmp_path / "comet" / f"after_step_{step}")
        keys.append(started["experiment_key"])
        assert fake.named("log_metrics") == [((NUMBERS,), {"step": 4})]
        assert fake.calls[-1][0] == "end"
    assert keys[0] == keys[1] != keys[2] and len(keys[0]) == 32
    monkeypatch.setenv("COMET_API_KEY", "a-key-of-a-person")
    fake = install()
    make(tmp_path, "comet")[0].close()
    assert fake.named("start")[0][1]["online"] is True


def test_trackio_gets_numbers_and_one_run(tmp_path: Path, install: Callable[..., Fake]) -> None:
    names = []
    for step in (0, 2, 0):
        fake = called(install, tmp_path, "trackio", step)
        ((_, begun),) = fake.named("init")
        assert begun["project"] == "phalanx" and begun["name"].startswith("mine-")
        assert begun["config"]["optim.kind"] == "adamw"
        names.append(begun["name"])
        assert fake.named("log") == [((NUMBERS,), {"step": 4})]
        assert fake.calls[-1][0] == "finish"
    assert names[0] == names[1] != names[2]


CALLS = {
    "mlflow": ("MlflowClient", "log_batch", "set_terminated"),
    "comet": ("start", "log_metrics", "end"),
    "trackio": ("init", "log", "finish"),
}


@pytest.mark.parametrize(
    ("tracker", "fails"), [(name, call) for name, calls in CALLS.items() for call in calls]
)
def test_a_server_that_refuses_is_a_warning(
    tracker: str, fails: str, tmp_path: Path, install: Callable[..., Fake]
) -> None:
    fake = install(fails=fails)
    metrics, stream = make(tmp_path, tracker)
    log(metrics, 1, 2, 3)
    metrics.close()
    (warning,) = [line for line in stream.getvalue().splitlines() if "warning" in line]
    assert f"{resolve_name(TRACKERS[tracker]).name} is off for the rest of the run" in warning
    assert "no route to host" in warning and len(fake.named(fails)) == 1
    assert [record["step"] for record in read(tmp_path / "metrics.jsonl")] == [1, 2, 3]


@pytest.mark.parametrize("tracker", CALLS)
def test_a_server_that_does_not_answer_costs_no_time(
    tracker: str, tmp_path: Path, install: Callable[..., Fake], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "_PATIENCE", 0.2)
    monkeypatch.setattr(service, "_MOST", 3)
    for most, steps in ((3, (1, 2)), (3, range(1, 9))):
        fake = install(hangs=CALLS[tracker][0])
        metrics, stream = make(tmp_path, tracker)
        started = time.monotonic()
        log(metrics, *steps)
        assert time.monotonic() - started < 5
        metrics.close()
        (warning,) = [line for line in stream.getvalue().splitlines() if "warning" in line]
        full = len(steps) > most
        assert ("records wait for it" if full else "did not take the last records") in warning
        fake.go_on.set()


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trackio", None)
    metrics, stream = make(tmp_path, "trackio")
    metrics.close()
    assert "warning: Trackio is off" in stream.getvalue()
    assert "pip install trackio" in stream.getvalue()


def gone_on(install: Callable[..., Fake], folder: Path, tracker: str, step: int) -> Fake:
    """The service after a run that went on from `step` for another one."""
    fake = install()
    metrics, stream = make(folder, tracker, step=step)
    log(metrics, step + 1)
    metrics.close()
    assert "warning" not in stream.getvalue()
    assert (folder / f"{tracker}_sent").read_text() == f"{step + 1}\n"
    return fake


def wait_for(happened: Callable[[], bool]) -> None:
    until = time.monotonic() + 20
    while not happened():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_comet_and_trackio_get_what_a_killed_run_may_not_have_sent(
    tmp_path: Path, install: Callable[..., Fake], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All since the last end, or with a server of Comet since the last checkpoint."""
    sends = {"comet": "log_metrics", "trackio": "log"}
    for tracker, key in (("comet", ""), ("comet", "a-key"), ("trackio", "")):
        monkeypatch.setenv("COMET_API_KEY", key)
        folder = tmp_path / f"{tracker}{key}"
        called(install, folder, tracker)  # ends after step 4
        install()
        killed, _ = make(folder, tracker, step=4)
        log(killed, 5, 6)
        killed.flush()
        log(killed, 7)
        calls: Any = killed._sinks[0]
        wait_for(lambda calls=calls: not calls._calls.qsize())
        fake = gone_on(install, folder, tracker, step=7)
        steps = [more["step"] for _, more in fake.named(sends[tracker])]
        assert steps == ([7, 8] if key else [5, 6, 7, 8]), (tracker, key)


def test_mlflow_has_what_its_thread_has_sent(tmp_path: Path, install: Callable[..., Fake]) -> None:
    """The thread of the killed run was stuck behind step 5; times are those of the records."""
    fake, sent = install(), tmp_path / "mlflow_sent"
    killed, _ = make(tmp_path, "mlflow")
    log(killed, 5)
    killed.flush()
    wait_for(lambda: sent.exists() and sent.read_text() == "5\n")
    fake._hangs = "log_batch"
    log(killed, 6, 7)
    killed.flush()
    batches = gone_on(install, tmp_path, "mlflow", step=7).named("log_batch")
    times = {r["step"]: round(1000 * r["time"]) for r in read(tmp_path / "metrics.jsonl")}
    metrics = [metric for _, more in batches for metric in more["metrics"]]
    assert {(step, at) for *_, at, step in metrics} == {(n, times[n]) for n in (6, 7, 8)}
    fake.go_on.set()


def test_another_package_adds_a_service(tmp_path: Path) -> None:
    """The name of its entry point is a value of `run.trackers`."""
    info = tmp_path / "mine-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: mine\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[phalanx.trackers]\nmine = my_tracker:Mine\n")
    code = "import sys; sys.path.insert(0, sys.argv[1])\n"
    code += "from phalanx.configs.load import load\n"
    code += "from phalanx.configs.tables.trackers import TRACKERS\n"
    code += "print(load(['run.trackers=[mine]']).run.trackers, TRACKERS['mine'])"
    ran = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert ran.stdout == "['mine'] my_tracker:Mine\n"
