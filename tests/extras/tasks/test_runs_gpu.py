"""On a GPU: scores between replays of a graph, which go on bit for bit."""

import json
from pathlib import Path

import pytest

from phalanx.moe.report.loggers import read
from phalanx.scripts import make_tasks
from tests.extras.tasks.conftest import write
from tests.moe.inference.test_predictor_gpu import call
from tests.support.runs import exact

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("model", ["tiny", "tiny_gpt_oss", "tiny_deepseek"])
def test_scores_between_replays(model: str, tmp_path: Path) -> None:
    made = ["--embedded", "--rows", "20"]
    assert make_tasks.main([str(tmp_path / "tasks"), *made]) == 0
    text = Path(json.__file__).read_text()
    write(tmp_path / "tasks" / "text.jsonl", [{"text": text[:5000]}, {"text": "import os\n"}])
    tasks = sorted(map(str, (tmp_path / "tasks").glob("*.jsonl")))
    given = [
        f"model={model}",
        "run.device=cuda",
        "run.graph=full_iteration",
        "run.steps=12",
        "run.eval_interval=4",
    ]
    given += ["optim.ema=0.9", "run.deterministic=true", f"run.dir={tmp_path}"]
    call("train.py", *given, "run.name=plain")
    scored = [f"run.tasks=[{','.join(tasks)}]", "run.name=scored"]
    done = call("train.py", *given, *scored)
    assert done.stdout.count("-- scores after step") == 3
    assert done.stdout.count("-- scores of the moving averages after step") == 3
    records = [read(tmp_path / name / "metrics.jsonl") for name in ("plain", "scored")]
    assert exact(records[0]) == exact(records[1])
    assert [r["layers"] for r in records[0]] == [r["layers"] for r in records[1]]
    out = tmp_path / "out.json"
    call("scripts/evaluate.py", tmp_path / "scored", "--tasks", *tasks, "--json", out)
    found = json.loads(out.read_text())["tasks"]
    last = records[1][-1]
    for key in ("text/bits_per_byte", "cloze/gold_bits_per_byte"):
        assert last[f"tasks/{key}"] == pytest.approx(found[key], rel=5e-3)
    assert last["tasks/cloze/acc"] == pytest.approx(found["cloze/acc"], abs=0.1)
