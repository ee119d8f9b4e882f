"""A server of a tiny run in a process of its own, for the tests of a folder."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.tiny_runs import step_of, train

ROOT = Path(__file__).resolve().parents[3]
TEMPLATE = """\
{% for message in messages %}
{% if message.role not in ("system", "user", "assistant") %}
{{ raise_exception("nobody is " + message.role) }}
{% endif %}
[{{ message.role }}] {{ message.content }}
{% endfor %}
{% if add_generation_prompt %}[assistant] {% endif %}"""


@dataclass(frozen=True)
class Server:
    """A server and the run that it shows."""

    url: str
    run: Path
    later: Path  # a newer checkpoint, which the run gets when it is copied there
    process: subprocess.Popen[str]


@pytest.fixture(scope="package")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints of steps 6 and 12."""
    folder = tmp_path_factory.mktemp("trained")
    more = ["run.steps=12", "run.save_interval=6", "data.sequence_length=32"]
    return train(folder, "one", 1, *more)


@pytest.fixture(scope="package")
def server(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of the earlier checkpoint alone, with a chat template."""
    folder = tmp_path_factory.mktemp("served")
    run = folder / "one"
    shutil.copytree(step_of(trained, 6), step_of(run, 6))
    (folder / "chat.jinja").write_text(TEMPLATE)
    words = ["scripts/serve.py", run, "--port", "0", "--chat-template", folder / "chat.jinja"]
    log = folder / "log"
    with log.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, *map(str, words), "--device", "cpu"],
            cwd=ROOT,
            stdout=out,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
    try:
        until = time.monotonic() + 120
        while not (found := re.search(r"http://127\.0\.0\.1:\d+", log.read_text())):
            assert process.poll() is None and time.monotonic() < until, log.read_text()
            time.sleep(0.1)
        yield Server(found[0], run, step_of(trained, 12), process)
        assert process.poll() is None, log.read_text()
    finally:
        process.send_signal(signal.SIGINT)
        try:
            ended = process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    assert ended in (0, 130) and "Traceback" not in log.read_text(), log.read_text()
