"""Conditions of a measurement: device, versions, clocks and power."""

import datetime
import subprocess
import sys
from importlib import metadata
from typing import Any

import torch

_PACKAGES = ("triton", "nvidia-cutlass-dsl", "quack-kernels")
_MODULES = ("sonicmoe", "transformer_engine")
_QUERY = ("clocks.sm", "clocks.mem", "power.draw", "power.limit", "temperature.gpu")


def facts(
    device: torch.device, command: list[str], *, after: bool = False, name: str = ""
) -> dict[str, Any]:
    """Facts for the head of a table and of a JSON file; `after` the run those that may change.

    `name` is that of a device that CUDA does not know.
    """
    clocks = state(device)
    if after:
        return {"after": clocks, **versions()}
    driver = smi(device, ("driver_version",))
    known = {
        "device": name or torch.cuda.get_device_name(device),
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "",
        **({"driver": driver[0]} if driver else {}),
        **versions(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": " ".join(command),
    }
    return {**known, "before": clocks}


def versions() -> dict[str, str]:
    """Versions of installed packages, and of peers that were imported."""
    known = {}
    for name in _PACKAGES:
        try:
            known[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    for name in _MODULES:
        if name in sys.modules:
            known[name] = str(getattr(sys.modules[name], "__version__", "unknown"))
    return known


def state(device: torch.device) -> dict[str, str]:
    """Clocks (MHz), power (W) and temperature from nvidia-smi; empty if it does not answer."""
    return dict(zip(_QUERY, smi(device, _QUERY), strict=False))


def smi(device: torch.device, fields: tuple[str, ...]) -> list[str]:
    if device.type != "cuda":
        return []
    identity = str(torch.cuda.get_device_properties(device).uuid)
    gpu_id = identity if identity.startswith("GPU-") else f"GPU-{identity}"
    query = [f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    try:
        completed = subprocess.run(
            ["nvidia-smi", "-i", gpu_id, *query], capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    if completed.returncode:
        return []
    return [value.strip() for value in completed.stdout.strip().split(",")]
