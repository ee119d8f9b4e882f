"""On a GPU: samples between replays of a graph, and the same scores as on the CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
pytestmark = pytest.mark.gpu


def call(*words: object) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        env=os.environ
        | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done


@pytest.mark.parametrize("model", ["tiny", "tiny_gpt_oss", "tiny_deepseek"])
def test_a_run_on_a_gpu_is_looked_at(model: str, tmp_path: Path) -> None:
    given = [f"model={model}", "run.device=cuda", "run.steps=40", "run.name=run"]
    trained = call("train.py", *given, f"run.dir={tmp_path}", "run.sample_every=20")
    assert trained.stdout.count("-- sample after step") == 2
    said = call("scripts/sample.py", tmp_path / "run", "--prompt", "def ", "--no-stop")
    assert said.stdout.startswith("def ") and "64 tokens, " in said.stderr
    text = tmp_path / "text.txt"
    text.write_text(Path(json.__file__).read_text())
    losses = []
    for device in ("cuda", "cpu"):
        out = tmp_path / f"{device}.json"
        call("scripts/evaluate.py", tmp_path / "run", text, "--device", device, "--json", out)
        losses.append(json.loads(out.read_text())["files"][str(text)]["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=5e-3) and 1 < losses[0] < 4
