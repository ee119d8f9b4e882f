"""Versions that the results of a run depend on: of this code, and of packages."""

import functools
import subprocess
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

_PACKAGES = (
    *("torch", "megatron-core", "nvidia-cutlass-dsl", "transformer-engine", "triton", "numpy"),
    *("flash-attn-4", "quack-kernels", "fla-core", "emerging-optimizers", "nvidia-cudnn-frontend"),
)


def code() -> tuple[str, bool]:
    """Commit of this tree, `unknown` outside a repository, and whether it has been changed."""
    folder = Path(__file__).resolve().parent

    def git(*args: str) -> str:
        command = ["git", "-C", str(folder), *args]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "HEAD"), bool(git("status", "--porcelain"))
    except (OSError, subprocess.CalledProcessError):
        return "unknown", False


@functools.cache
def packages() -> Mapping[str, str]:
    """Versions of the packages that affect the results of a run, `none` if not installed."""
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "none"
    return versions
