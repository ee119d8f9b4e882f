"""One start of a run: its first lines of output, and its record in the run folder.

`config.yaml` is the config of the newest launch, `launches/<time>.yaml` that of each launch with
its command, versions, hosts and devices, and `console.log` (moe.report.console) their output.
Imports nothing heavy before the ranks have met.
"""

import functools
import os
import platform
import re
import shlex
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml

from phalanx.configs.knobs import pluralize
from phalanx.configs.redact import redacted
from phalanx.configs.schema import Config
from phalanx.moe.report.console import Console
from phalanx.moe.versions import code, packages
from phalanx.parallel import devices


@dataclass(frozen=True)
class Launch:
    """Command of this process, and its console."""

    command: str
    console: Console
    phases: Sequence[Config]  # configurations of the phases of the run, or its own

    def keep(self, cfg: Config, folder: Path, device: str, facts: dict[str, str]) -> None:
        """Record this launch in the run folder, which is created. Collective.

        The `facts` are versions other than those of packages. Raises ValueError on every rank if
        rank 0 cannot write.
        """
        from phalanx.parallel.fault.agreement import Failed, failing_together, gather

        devices_by_rank = gather((socket.gethostname(), device))
        main = os.environ.get("RANK", "0") == "0"
        try:
            with failing_together(OSError):
                if main:
                    self._write(cfg, folder, devices_by_rank, facts)
        except Failed as failed:
            text = f"cannot write to {folder} (run.dir, run.name): {failed}"
            raise ValueError(text) from None
        if not main:
            self.console.keep(folder, "")

    def _write(
        self,
        cfg: Config,
        folder: Path,
        devices_by_rank: Sequence[tuple[str, str]],
        facts: dict[str, str],
    ) -> None:
        commit, changed = code()
        started, config = time.strftime("%Y-%m-%d %H:%M:%S %z"), redacted(asdict(cfg))
        record: dict[str, Any] = {
            "time": started,
            "command": self.command,
            "folder": os.getcwd(),
            "ranks": len(devices_by_rank),
            "hosts": _hosts(devices_by_rank),
            "versions": _versions() | facts,
            "code": {"commit": commit, "changed": changed},
        }
        launches = folder / "launches"
        launches.mkdir(parents=True, exist_ok=True)
        self.console.keep(folder, f"{started}  {self.command}")
        text = _yaml(redacted(record) | {"config": config})
        _unused(launches, time.strftime("%Y%m%d-%H%M%S")).write_text(text, encoding="utf-8")
        new = folder / "config.yaml.new"
        new.write_text(f"# {started}  {self.command}\n{_yaml(config)}", encoding="utf-8")
        new.replace(folder / "config.yaml")


def announce(cfg: Config, world: int) -> None:
    """Print the run (rank 0) and the node (its first rank), before imports take their seconds."""
    rank = int(os.environ.get("RANK", "0"))
    if rank == 0:
        ranks = pluralize(world, "rank")
        folder = redacted(f"{cfg.run.dir}/{cfg.run.name}")
        print(f"Phalanx: run {folder} on {ranks}; importing torch and Megatron-Core", flush=True)
    if os.environ.get("LOCAL_RANK", "0") == "0":
        local = int(os.environ.get("LOCAL_WORLD_SIZE") or world)
        print(node_line(socket.gethostname(), rank, local, devices.names()), flush=True)


def node_line(host: str, first: int, ranks: int, gpus: Sequence[str]) -> str:
    """Line on a node, such as `node host: ranks 8-15, 8 x NVIDIA H200`."""
    numbers = f"ranks {first}-{first + ranks - 1}" if ranks > 1 else f"rank {first}"
    kinds = [f"{gpus.count(name)} x {name}" for name in dict.fromkeys(gpus)]
    return f"node {host}: {numbers}, {', '.join(kinds) or 'no GPU'}"


def command_line(argv: Sequence[str]) -> str:
    """Command that started this process, or torchrun's if that started it; without secrets."""
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
def _versions() -> dict[str, str]:
    installed = {name: version for name, version in packages().items() if version != "none"}
    return {"python": platform.python_version()} | installed


def _hosts(devices_by_rank: Sequence[tuple[str, str]]) -> list[dict[str, Any]]:
    """Hosts in the order of their first rank, each with its ranks and their devices."""
    from phalanx.parallel.fault.same_settings import ranges

    hosts: dict[str, dict[str, Any]] = {}
    for rank, (name, device) in enumerate(devices_by_rank):
        host = hosts.setdefault(name, {"host": name, "ranks": [], "devices": {}})
        host["ranks"].append(rank)
        host["devices"][device] = host["devices"].get(device, 0) + 1
    return [host | {"ranks": ranges(host["ranks"])} for host in hosts.values()]


def _yaml(value: Any) -> str:
    # libyaml's, with the same text in a sixth of the time; some builds of PyYAML have none.
    dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
    return yaml.dump(value, Dumper=dumper, sort_keys=False, allow_unicode=True, width=10_000)


def _unused(folder: Path, name: str) -> Path:
    """Path of that name, with a number if the name is taken, so that names sort by time."""
    path, number = folder / f"{name}.yaml", 1
    while path.exists():
        number += 1
        path = folder / f"{name}_{number}.yaml"
    return path
