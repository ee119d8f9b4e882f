"""One start of a run: what is said at once, and what the run folder keeps of it.

`config.yaml` is the configuration of the newest launch, `launches/<time>.yaml` is that of each with
its command, versions, hosts and devices, and `console.log` (moe.report.console) is what they
printed. Imports nothing heavy before the ranks have met.
"""

import functools
import os
import platform
import re
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import yaml

from phalanx.configs.knobs import pluralize
from phalanx.configs.redact import redacted
from phalanx.configs.schema import Config
from phalanx.moe.report.console import Console
from phalanx.parallel import devices

_PACKAGES = (
    *("torch", "megatron-core", "nvidia-cutlass-dsl", "transformer-engine", "triton", "numpy"),
    *("flash-attn-4", "quack-kernels", "fla-core", "emerging-optimizers", "nvidia-cudnn-frontend"),
)
"""Packages whose versions matter to what a run computes."""


@dataclass(frozen=True)
class Launch:
    """How this process was started, and its console."""

    command: str
    console: Console

    def keep(self, cfg: Config, folder: Path, device: str, facts: dict[str, str]) -> None:
        """Write what this launch is to the run folder, which is made. Collective.

        Args:
            cfg: configuration.
            folder: of the run.
            device: of this rank, as it is shown.
            facts: versions besides those of packages.

        Raises:
            ValueError: on every rank, if rank 0 cannot write.
        """
        from phalanx.parallel.fault.agreement import Failed, agree, gather

        places, problem = gather((socket.gethostname(), device)), None
        main = os.environ.get("RANK", "0") == "0"
        try:
            if main:
                self._write(cfg, folder, places, facts)
        except OSError as error:
            problem = f"cannot write to {folder} (run.dir, run.name): {error}"
        try:
            agree(problem)
        except Failed as failed:
            raise ValueError(str(failed)) from None
        if not main:
            self.console.keep(folder, "")

    def _write(
        self, cfg: Config, folder: Path, places: Sequence[tuple[str, str]], facts: dict[str, str]
    ) -> None:
        commit, changed = code()
        when, config = time.strftime("%Y-%m-%d %H:%M:%S %z"), redacted(asdict(cfg))
        about: dict[str, Any] = {
            "time": when,
            "command": self.command,
            "folder": os.getcwd(),
            "ranks": len(places),
            "hosts": _hosts(places),
            "versions": _versions() | facts,
            "code": {"commit": commit, "changed": changed},
        }
        launches = folder / "launches"
        launches.mkdir(parents=True, exist_ok=True)
        self.console.keep(folder, f"{when}  {self.command}")
        text = _yaml(redacted(about) | {"config": config})
        _free(launches, time.strftime("%Y%m%d-%H%M%S")).write_text(text, encoding="utf-8")
        new = folder / "config.yaml.new"
        new.write_text(f"# {when}  {self.command}\n{_yaml(config)}", encoding="utf-8")
        new.replace(folder / "config.yaml")


def announce(cfg: Config, world: int) -> None:
    """Say what starts before imports take their seconds: rank 0 the run, every node itself."""
    rank = int(os.environ.get("RANK", "0"))
    if rank == 0:
        ranks = pluralize(world, "rank")
        folder = redacted(f"{cfg.run.dir}/{cfg.run.name}")
        print(f"Phalanx: run {folder} on {ranks}; importing torch and Megatron-Core", flush=True)
    if os.environ.get("LOCAL_RANK", "0") == "0":
        local = int(os.environ.get("LOCAL_WORLD_SIZE") or world)
        print(node_line(socket.gethostname(), rank, local, devices.names()), flush=True)


def node_line(host: str, first: int, ranks: int, gpus: Sequence[str]) -> str:
    """`node host: ranks 8-15, 8 x NVIDIA H200`."""
    numbers = f"ranks {first}-{first + ranks - 1}" if ranks > 1 else f"rank {first}"
    kinds = [f"{gpus.count(name)} x {name}" for name in dict.fromkeys(gpus)]
    return f"node {host}: {numbers}, {', '.join(kinds) or 'no GPU'}"


def command_line(argv: Sequence[str]) -> str:
    """The command that started this process, torchrun's where that was it; without secrets."""
    installed = Path(sys.argv[0]).name == "phalanx-train"
    words = ["phalanx-train"] if installed else [sys.executable, "train.py"]
    words += argv
    if "TORCHELASTIC_RUN_ID" in os.environ:
        try:
            launcher = psutil.Process(os.getppid()).cmdline()
        except psutil.Error:
            launcher = []
        words = launcher if re.search(r"train\.py|phalanx[.-]train", " ".join(launcher)) else words
    return redacted(shlex.join(words))


@functools.cache
def code() -> tuple[str, bool]:
    """Commit of this tree, `unknown` outside a repository, and whether it has been changed."""
    here = Path(__file__).resolve().parent

    def git(*args: str) -> str:
        command = ["git", "-C", str(here), *args]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "HEAD"), bool(git("status", "--porcelain"))
    except (OSError, subprocess.CalledProcessError):
        return "unknown", False


def packages() -> dict[str, str]:
    """Versions of the packages that matter to what a run computes, `none` if not installed."""
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "none"
    return found


def _versions() -> dict[str, str]:
    installed = {name: version for name, version in packages().items() if version != "none"}
    return {"python": platform.python_version()} | installed


def _hosts(places: Sequence[tuple[str, str]]) -> list[dict[str, Any]]:
    """Hosts in the order of their first rank, each with its ranks and their devices."""
    from phalanx.parallel.fault.same_settings import ranges

    hosts: dict[str, dict[str, Any]] = {}
    for rank, (host, device) in enumerate(places):
        known = hosts.setdefault(host, {"host": host, "ranks": [], "devices": {}})
        known["ranks"].append(rank)
        known["devices"][device] = known["devices"].get(device, 0) + 1
    return [known | {"ranks": ranges(known["ranks"])} for known in hosts.values()]


def _yaml(value: Any) -> str:
    return yaml.safe_dump(value, sort_keys=False, allow_unicode=True, width=10_000)


def _free(folder: Path, name: str) -> Path:
    """A file of that name, numbered if there is one already, whose name comes after that one's."""
    path, number = folder / f"{name}.yaml", 1
    while path.exists():
        number += 1
        path = folder / f"{name}_{number}.yaml"
    return path
