"""Which peaks the utilisation of a run is measured against."""

import pytest
import torch

from phalanx.configs.load import load
from phalanx.moe.report.step_records import peaks


@pytest.mark.parametrize(
    ("precision", "name", "expected"),
    [
        ("bf16", "NVIDIA H200", {"mfu": 989}),
        ("fp8_block", "NVIDIA H200", {"mfu": 989, "mfu_fp8": 1978}),
        ("fp8_block", "NVIDIA A100-SXM4-80GB", {"mfu": 312}),
        ("fp32", "NVIDIA H200", {}),
        ("bf16", "NVIDIA GeForce RTX 4090", {}),
    ],
)
def test_peaks_of_a_gpu(
    precision: str, name: str, expected: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
    cfg = load([f"precision={precision}"])
    assert peaks(cfg, torch.device("cuda")) == expected
    assert peaks(cfg, torch.device("cpu")) == {}
