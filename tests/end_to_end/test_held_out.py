"""Validation by domain on data of its own, at intervals, with results by name."""

import json
import math
from pathlib import Path

import pytest

from phalanx.moe.data.token_files import Sidecar
from tests.support.runs import TINY, exact, records, run, text, write_corpus

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def prefixes(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Three sources of the same number of tokens; two have one and two bytes a token."""
    folder, pieces = tmp_path_factory.mktemp("domains"), b"\n\n".join(text())
    size, made = len(pieces) // 3, []
    for number, name in enumerate(["train", "prose", "code"]):
        part = list(pieces[number * size : (number + 1) * size])
        made.append(write_corpus(folder / name, [part]))
        of = {"documents": 1, "tokens": size, "text_bytes": size * number}
        kind = {"tokenizer": "t", "tokenizer_sha256": "t", "vocab_size": 256, "eod": 0}
        Sidecar(dtype="uint16", **kind, **of).write(Path(f"{made[-1]}.json"))
    return made


def test_each_domain_has_its_scores(prefixes: list[str], tmp_path: Path) -> None:
    train, prose, code = prefixes
    args = [*TINY, "data=indexed", "data.split='1'"]
    args += [f"data.blend=[{train}]", f"data.cache={tmp_path}/cache", "run.steps=4"]
    args += ["run.save_interval=-1", "precision=fp32"]
    runs = {
        "both": [f"data.validation=[{prose},{code}]", "run.eval_interval=2", "run.eval_batches=4"],
        "prose": [f"data.validation=[{prose}]", "run.eval_interval=2", "run.eval_batches=2"],
        "none": [],
    }
    out = {}
    for name, more in runs.items():
        (out[name],) = run(1, [*args, *more, f"run.dir={tmp_path / name}"])
        assert out[name].code == 0, out[name].err
    both, alone, plain = (records(tmp_path / name / "run") for name in runs)
    assert exact(both) == exact(alone) == exact(plain), "a validation changes nothing"
    assert [r["step"] for r in both if "valid_loss" in r] == [2, 4]
    for record, of_prose in ((both[i], alone[i]) for i in (1, 3)):
        assert record["valid_labels/prose"] == record["valid_labels/code"] == 2 * 8 * 16
        assert record["valid_loss/prose"] == pytest.approx(of_prose["valid_loss"], rel=1e-6)
        domains = [record[f"valid_loss/{name}"] for name in ("prose", "code")]
        assert record["valid_loss"] == pytest.approx(sum(domains) / 2, rel=1e-6)
        bits = [record[f"valid_bits_per_byte/{name}"] for name in ("prose", "code")]
        expected = [domains[0] / math.log(2), domains[1] / math.log(2) / 2]
        assert bits == pytest.approx(expected, rel=1e-6)
    assert "each validation" in out["both"].out and "prose" in out["both"].out
    lines = (tmp_path / "both/run/metrics.jsonl").read_text().splitlines()
    assert sum("valid_loss/code" in json.loads(line) for line in lines) == 2
