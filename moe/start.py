"""The page a run starts with: what is trained, on what, with which kernels, from where."""

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from configs.schema import ModelConfig
from kernels.registry import table
from moe.accounting import active_parameters, flops_per_token, parameters
from moe.data import Loader

if TYPE_CHECKING:
    from moe.setup import Job


def describe(job: "Job", resumed: str, loader: Loader) -> str:
    """The start page, at most 100 columns wide where names and paths are short."""
    cfg, world = job.cfg, job.runtime.world
    here, size = job.engine.parameter_bytes()
    flops = flops_per_token(cfg.model, cfg.data.sequence_length)
    tokens = cfg.data.global_batch * cfg.data.sequence_length
    facts = [
        ("run", f"{cfg.run.dir}/{cfg.run.name}, {resumed}"),
        ("code", f"git {revision()}, torch {torch.__version__}, Python {sys.version.split()[0]}"),
        ("device", f"{world} x {device(job.runtime.device)}, {cfg.run.precision}"),
        (
            "model",
            f"{model_size(cfg.model)}, {count(here)} on rank 0 ({storage(size)})",
        ),
        ("work", f"{work(flops)} a token, {work(flops * tokens)} a step"),
        (
            "data",
            f"{cfg.data.source}, sequence {cfg.data.sequence_length}, batch "
            f"{cfg.data.global_batch} = {cfg.data.micro_batch} x {loader.micro_batches} "
            f"micro-batches x {job.data_parallel} ranks",
        ),
        ("length", f"{cfg.run.steps} steps, {count(tokens * cfg.run.steps)} tokens"),
    ]
    lines = ["Phalanx", *(f"  {name:<8}{text}" for name, text in facts), ""]
    lines += ["  " + text for text in job.groups.table().splitlines()] + [""]
    lines += ["  " + text for text in table(job.choices).splitlines()]
    return "\n".join(lines) + "\n"


def model_size(model: ModelConfig) -> str:
    """`tiny: 3.4 M parameters, 1.0 M active a token`, as published ones are counted: without
    multi-token prediction (MTP), told apart, and active ones without the input embedding."""
    total, active = parameters(model, mtp=False).total, active_parameters(model).total
    predicting = parameters(model).total - total
    more = f" (+ {count(predicting)} MTP)" if predicting else ""
    return f"{model.name}: {count(total)} parameters{more}, {count(active)} active a token"


def revision() -> str:
    """Short commit, with a + if the working tree has changes; `unknown` outside a repository."""
    here = Path(__file__).resolve().parent

    def git(*args: str) -> str:
        command = ["git", "-C", str(here), *args]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def device(where: torch.device) -> str:
    """The device's name and memory."""
    if where.type != "cuda":
        return "CPU process"
    size = int(torch.cuda.get_device_properties(where).total_memory)
    return f"{torch.cuda.get_device_name(where)} of {storage(size)}"


def count(number: float) -> str:
    """`671.0 B`, `20.9 M`, `512`."""
    return _scaled(number, (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3))) or f"{number:.0f}"


def work(flops: float) -> str:
    """`56.4 GFLOP`."""
    units = [(f"{unit}FLOP", 1000.0 ** (6 - i)) for i, unit in enumerate("EPTGMk")]
    return _scaled(flops, units) or f"{flops:.0f} FLOP"


def storage(size: int) -> str:
    """`139.8 GiB`, `3.4 MiB`."""
    units = (("TiB", 2.0**40), ("GiB", 2.0**30), ("MiB", 2.0**20), ("KiB", 2.0**10))
    return _scaled(size, units) or f"{size} bytes"


def _scaled(number: float, units: Iterable[tuple[str, float]]) -> str:
    """The number in the largest unit that is not above it; empty below all of them."""
    return next((f"{number / size:.1f} {unit}" for unit, size in units if number >= size), "")
