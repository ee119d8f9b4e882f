"""GPUs of this host by name, without torch: importing that takes seconds, asking the driver none.

    python parallel/devices.py     one line for each GPU that CUDA_VISIBLE_DEVICES leaves

`names` asks in a process of its own, so that CUDA's state here stays as torch will make it.
"""

import ctypes
import os
import subprocess
import sys

_CUDA = 13  # version that the pinned torch is made for
_LONGEST = 30.0  # seconds for the driver to wake eight GPUs that nobody uses


def names() -> list[str]:
    """Name of each GPU that this process may use; empty without a driver, or if it is stuck."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return []
    command = [sys.executable, "-IS", __file__]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LONGEST)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.splitlines()


def _ask() -> list[str]:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return []
    number, name, found = ctypes.c_int(), ctypes.create_string_buffer(100), []
    driver.cuDriverGetVersion(ctypes.byref(number))
    if number.value // 1000 < _CUDA:
        version = f"{number.value // 1000}.{number.value % 1000 // 10}"
        print(f"the driver is for CUDA {version}; GPUs need one for {_CUDA}", file=sys.stderr)
        return []
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(number)):
        return []
    for index in range(number.value):
        driver.cuDeviceGetName(name, len(name), index)
        found.append(name.value.decode(errors="replace") or "GPU")
    return found


if __name__ == "__main__":
    for gpu in _ask():
        print(gpu)
