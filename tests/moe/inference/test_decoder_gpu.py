"""On a GPU: tokens by replays of a graph against forward passes of whole texts, and their speed."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
pytestmark = pytest.mark.gpu

PROGRAM = """
import json, sys, time
import torch
from tests.moe.inference.random_model import opened

overrides, prompts, count = json.loads(sys.argv[1])
with opened(overrides, std=0.05) as predictor:
    from phalanx.moe.inference.generation import Batch
    from phalanx.moe.inference.sampling import Sampler

    def errors(graphs):
        predictor.decoder.graphs = graphs
        texts, found = [list(prompt) for prompt in prompts], []
        batch = Batch(predictor, texts, [Sampler()] * len(texts), count, context=512)
        for new in batch:
            whole_V = predictor.next_logits(torch.tensor([texts[new.row]]))
            error = (new.logits_V - whole_V).norm() / whole_V.norm()
            found.append(float(error))
            texts[new.row].append(new.token)
        return found

    reads_host = not predictor.decoder.graphs
    result = {"captured": not reads_host, "graph": errors(not reads_host), "eager": errors(False)}
    predictor.decoder.graphs = not reads_host
    again = [new.token for new in Batch(predictor, prompts[:1], [Sampler()], 8, context=512)]
    seconds = {}
    for cache in (True, False):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in Batch(predictor, prompts[:1], [Sampler()], 64, context=512, cache=cache):
            pass
        seconds[str(cache)] = time.perf_counter() - began
    print(json.dumps(result | {"again": again, "seconds": seconds}))
"""


def measured(overrides: list[str], count: int) -> dict[str, Any]:
    prompts = [[3, 1, 4], list(range(1, 40)), [7] * 17]
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps([overrides, prompts, count])],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(overrides, result["seconds"])
    return result


@pytest.mark.parametrize("model", ["tiny", "tiny_gpt_oss", "tiny_deepseek", "tiny_qwen3_next"])
@pytest.mark.parametrize("dense", [True, False])
def test_a_graph_changes_no_text(model: str, dense: bool) -> None:
    """Rounding moves a token to another expert now and then, but not in dense layers."""
    overrides = [f"model={model}", "data=embedded", "data.sequence_length=512", "precision=bf16"]
    overrides += ["model.moe.dense_layers=${model.layers}"] if dense else []
    result = measured(overrides, 10)
    assert result["captured"] and len(result["graph"]) == 30
    for how in ("graph", "eager"):
        near = sum(error < 0.05 for error in result[how])
        assert near == 30 if dense else near >= 20, result[how]
    assert len(result["again"]) == 8


def test_few_tokens_in_fp8() -> None:
    """One token of each of three sequences: fewer rows than a block of scales has."""
    overrides = ["model=tiny", "data=embedded", "data.sequence_length=512", "precision=fp8_block"]
    overrides += ["model.hidden=128", "model.moe.ffn=128", "model.dense_ffn=128"]
    result = measured([*overrides, "model.attention.head_dim=32"], 6)
    assert result["captured"] and len(result["again"]) == 8
    assert sum(error < 0.5 for error in result["graph"]) >= 9, result["graph"]
