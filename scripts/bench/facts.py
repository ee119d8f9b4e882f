"""What a measurement was made with: device, versions, clocks and power."""

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
    """For the head of a table and of a JSON file; `after` the run only what may have changed.

    `name` is that of a device that CUDA does not know.
    """
    clocks = state(device)
    if after:
        return {"after": clocks, **versions()}
    driver = _smi(device, ("driver_version",))
    found = {
        "device": name or torch.cuda.get_device_name(device),
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "",
        **({"driver": driver[0]} if driver else {}),
        **versions(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": " ".join(command),
    }
    return {**found, "before": clocks}


def versions() -> dict[str, str]:
    """Of packages that are installed, and of peers that were imported."""
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    for name in _MODULES:
        if name in sys.modules:
            found[name] = str(getattr(sys.modules[name], "__version__", "unknown"))
    return found


def state(device: torch.device) -> dict[str, str]:
    """MHz, watts and degrees as nvidia-smi says; empty if it does not answer."""
    return dict(zip(_QUERY, _smi(device, _QUERY), strict=False))


def _smi(device: torch.device, fields: tuple[str, ...]) -> list[str]:
    if device.type != "cuda":
        return []
    identity = str(torch.cuda.get_device_properties(device).uuid)
    which = identity if identity.startswith("GPU-") else f"GPU-{identity}"
    wanted = [f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(
            ["nvidia-smi", "-i", which, *wanted], capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    if done.returncode:
        return []
    return [value.strip() for value in done.stdout.strip().split(",")]
