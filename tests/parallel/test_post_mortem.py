"""What a rank leaves behind where its device can no longer be asked."""

import json
from pathlib import Path

import pytest
from torch._C import _distributed_c10d as c10d

from parallel import post_mortem


def test_a_broken_device_costs_the_record_of_collectives_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> bytes:
        raise RuntimeError("CUDA error: unspecified launch failure")

    monkeypatch.setattr(c10d, "_dump_fr_trace_json", broken)
    post_mortem.write(tmp_path / "failures", 3, "rank 1 died", "what was handled")
    text = (tmp_path / "failures/rank_3.txt").read_text()
    assert text.startswith("rank 1 died\n") and "what was handled" in text
    assert "test_post_mortem.py" in text  # the stack
    record = json.loads((tmp_path / "failures/rank_3.collectives.json").read_bytes())
    assert record == {"entries": [], "error": "CUDA error: unspecified launch failure"}
