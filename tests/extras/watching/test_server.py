"""The server over HTTP, the runs that it finds, and mistakes on the command line in one line."""

import builtins
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient

from phalanx.extras.watching.app import app
from phalanx.extras.watching.runs import Runs
from phalanx.scripts import watch
from tests.extras.watching.conftest import FACTS, step, write

ROOT = Path(__file__).resolve().parents[3]


def client(*paths: Path) -> TestClient:
    return TestClient(app(Runs(paths), "127.0.0.1"), base_url="http://127.0.0.1:8001")


def names(runs: Runs) -> list[str]:
    return [run["name"] for run in runs.listed()]


def test_the_page_and_its_files_are_served_with_no_source_outside(tmp_path: Path) -> None:
    with client(tmp_path) as http:
        page = http.get("/")
        assert page.status_code == 200 and "default-src 'none'" in str(page.headers)
        for name in re.findall(r'(?:href|src)="([^"]+)"', page.text):
            if name != "data:,":
                found = http.get(name)
                assert found.status_code == 200 and found.content
                text = found.text.replace("http://www.w3.org/2000/svg", "")  # a name
                assert not re.search(r"//\w+\.\w|@import", text)
        assert http.get("/../run.py").status_code == 404


def test_data_is_new_data_alone(tmp_path: Path) -> None:
    write(tmp_path / "one", [FACTS, step(1), step(2)])
    with client(tmp_path / "one") as http:
        assert http.get("/runs").json()["runs"][0]["name"] == "one"
        first = http.get("/data", params={"run": "one"}).json()
        assert first["points"]["series"]["loss"]["step"] == [1, 2] and first["since"] is None
        have = ",".join(map(str, first["have"]))
        assert "points" not in http.get("/data", params={"run": "one", "have": have}).json()
        write(tmp_path / "one", [step(3)])
        more = http.get("/data", params={"run": "one", "have": have}).json()
        assert more["points"]["series"]["loss"]["step"] == [2, 3] and more["since"] == 2
        part = http.get("/data", params={"run": "one", "from": 2, "to": 2}).json()
        assert part["points"]["axis"]["step"] == [2]
        # A page of a server that has been started again.
        strange = http.get("/data", params={"run": "one", "have": "x,1,3,2,1"}).json()
        assert strange["since"] is None and strange["points"]["axis"]["step"] == [1, 2, 3]


@pytest.mark.parametrize(
    ("asked", "code", "said"),
    [
        ({"run": "../one"}, 404, "there is no run '../one'"),
        ({}, 404, "there is no run ''"),
        ({"run": "one", "have": "a,b"}, 400, "have, from or to"),
        ({"run": "one", "from": "x"}, 400, "have, from or to"),
    ],
)
def test_bad_requests_are_answered(
    asked: dict[str, str], code: int, said: str, tmp_path: Path
) -> None:
    write(tmp_path / "one", [step(1)])
    with client(tmp_path) as http:
        reply = http.get("/data", params=asked)
        assert reply.status_code == code and said in reply.json()["error"]["message"]


def test_other_names_of_this_address_are_refused(tmp_path: Path) -> None:
    with client(tmp_path) as http:
        assert http.get("/runs", headers={"Host": "evil.example"}).status_code == 400
        assert http.get("/runs", headers={"Host": "localhost:8001"}).status_code == 200


def test_runs_of_a_folder_are_found_the_newest_first(tmp_path: Path) -> None:
    for age, name in enumerate(["new", "sweep/lr=1", "old"]):
        path = write(tmp_path / name, [step(1)])
        os.utime(path, (1e9 - age, 1e9 - age))
    (tmp_path / "begun" / "launches").mkdir(parents=True)
    (tmp_path / "data").mkdir()
    runs = Runs([tmp_path])
    assert names(runs) == ["new", "sweep/lr=1", "old", "begun"]
    assert [run["chosen"] for run in runs.listed()] == [True, False, False, False]
    write(tmp_path / "newer", [step(1)])
    assert names(runs)[0] == "newer"


def test_named_runs_come_first_and_have_different_names(tmp_path: Path) -> None:
    a, b = (write(tmp_path / of / "run", [step(1)]) for of in "ab")
    other = write(tmp_path / "runs" / "other", [step(1)])
    later = tmp_path / "later" / "metrics.jsonl"
    runs = Runs([a.parent, b, later, other.parent.parent])
    assert names(runs) == ["a/run", "b/run", "later", "other"]
    assert [run["chosen"] for run in runs.listed()] == [True, True, True, False]
    assert runs.missing() == [later]
    assert runs.get("b/run") is runs.get("b/run")


def test_a_folder_that_is_made_later_may_be_of_runs(tmp_path: Path) -> None:
    runs = Runs([tmp_path / "runs"])
    assert names(runs) == ["runs"] and runs.listed()[0]["time"] is None
    (tmp_path / "runs").mkdir()
    assert names(runs) == []
    write(tmp_path / "runs" / "one", [step(1)])
    assert names(runs) == ["one"] and runs.listed()[0]["chosen"]


def test_mistakes_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def error(*words: Any) -> str:
        assert watch.main([str(word) for word in words]) == 2
        out, err = capsys.readouterr()
        assert err.count("\n") == 1 and err.startswith("watch: ") and not out
        return err

    missing = tmp_path / "no" / "such" / "run"
    assert f"{missing}: there is no such folder; give that of a run" in error(missing)
    (tmp_path / "notes.txt").write_text("x")
    assert f"{tmp_path}/notes.txt is no metrics.jsonl" in error(tmp_path / "notes.txt")
    assert "--port 70000: must be a number from 0 to 65535" in error(tmp_path, "--port", 70000)
    assert "--host is empty: leave it out, or give 0.0.0.0" in error(tmp_path, "--host", "")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert "choose a --port" in error(tmp_path, "--port", port)
    with pytest.raises(SystemExit):
        watch.main(["s3://bucket/run"])
    assert "is an address" in capsys.readouterr().err

    imported = builtins.__import__

    def without(name: str, *more: Any, **options: Any) -> Any:
        if name == "uvicorn":
            raise ModuleNotFoundError("No module named 'uvicorn'", name="uvicorn")
        return imported(name, *more, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    assert "pip install 'phalanx-moe[serve]'" in error(tmp_path)


def test_the_command_serves_until_it_is_interrupted(tmp_path: Path) -> None:
    run, log = tmp_path / "later", tmp_path / "log"
    words = [sys.executable, "scripts/watch.py", str(run), "--port", "0"]
    with log.open("w") as out:
        process = subprocess.Popen(words, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT)
    try:
        until = time.monotonic() + 60
        while not (found := re.search(r"http://127\.0\.0\.1:\d+", log.read_text())):
            assert process.poll() is None and time.monotonic() < until, log.read_text()
            time.sleep(0.05)
        assert f"-- {run} does not exist yet" in log.read_text()
        write(run, [FACTS, step(1)])
        reply = httpx.get(f"{found[0]}/data", params={"run": "later"}).json()
        assert reply["points"]["axis"]["step"] == [1]
    finally:
        process.send_signal(signal.SIGINT)
        code = process.wait(30)
    assert code in (0, 130) and "Traceback" not in log.read_text(), log.read_text()
