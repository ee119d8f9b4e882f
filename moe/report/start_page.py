"""The page that a run prints at its start: model, data, devices, layout, kernels.

Some of its facts are in the titles of curves, traces and tables too.
"""

import sys
from typing import Any

import torch

from phalanx.configs.arithmetic.accounting import flops_note, flops_per_token
from phalanx.configs.arithmetic.batch_sizes import parse as batch_size
from phalanx.configs.arithmetic.data_stages import parse
from phalanx.configs.formats import described
from phalanx.configs.knobs import pluralize
from phalanx.configs.redact import redacted
from phalanx.configs.schema import DataConfig
from phalanx.kernels.registry import table
from phalanx.moe.data.blend import shown
from phalanx.moe.data.loader import Loader, Samples
from phalanx.moe.data.sources import stage_line
from phalanx.moe.data.sources import table as source_table
from phalanx.moe.job import Job
from phalanx.moe.text import count, devices, model_size, storage, work
from phalanx.moe.versions import code


def describe(job: Job, resumed: str, loader: Loader, valid_set: Samples | None = None) -> str:
    """The start page, at most 100 columns wide if names and paths are short."""
    cfg, world = job.cfg, job.runtime.world
    local, size = job.engine.parameter_bytes()
    flops = flops_per_token(cfg.model, cfg.data.sequence_length)
    tokens = cfg.data.global_batch * cfg.data.sequence_length
    read = len(loader.dataset) * cfg.data.sequence_length  # of the whole run, before a resume too
    facts = [
        ("run", f"{cfg.run.dir}/{cfg.run.name}, {resumed}"),
        ("code", f"git {revision()}, torch {torch.__version__}, Python {sys.version.split()[0]}"),
        ("device", f"{devices(world, device(job.runtime.device))}, {described(cfg)}"),
        (
            "model",
            f"{model_size(cfg.model)}, {count(local)} on rank 0 ({storage(size)})",
        ),
        ("work", f"{work(flops)} per token, {work(flops * tokens)} per step{flops_note(cfg)}"),
        (
            "data",
            f"{cfg.data.source}, sequence {cfg.data.sequence_length}, batch "
            f"{_batches(cfg.data, job.data_parallel)}",
        ),
        ("length", f"{pluralize(cfg.run.steps, 'step')}, {count(read)} tokens"),
    ]
    if loader.documents:
        facts.insert(-1, ("packing", str(loader.packing())))
    if some := [f"{s.labels:.1%} of {s.name}" for s in loader.dataset.sources if s.labels < 1]:
        apart = "" if loader.documents else "; rows see each other (data.document_mask)"
        facts.insert(-1, ("labels", f"tokens that count in the loss: {', '.join(some)}{apart}"))
    if ids := shown(cfg):
        facts.insert(4, ("vocab", ids))
    lines = ["Phalanx", *(f"  {name:<8}{text}" for name, text in facts), ""]
    sources = source_table(loader.dataset.sources, valid_set.sources if valid_set else ())
    lines += ["  " + text for text in sources.splitlines()] + [""] * bool(sources)
    names = [source.name for source in loader.dataset.sources]
    stages = [stage_line(stage, names) for stage in map(parse, cfg.data.stages)]
    lines += ["  " + text for text in stages] + [""] * bool(stages)
    lines += ["  " + text for text in job.groups.table().splitlines()] + [""]
    lines += ["  " + text for text in table(job.lines).splitlines()]
    return "\n".join(lines) + "\n"


def _batches(data: DataConfig, ranks: int) -> str:
    """`512 = 4 x 16 micro-batches x 8 ranks`, and the sizes of a warm-up before it."""
    count_of = pluralize(data.global_batch // (data.micro_batch * ranks), "micro-batch")
    text = f"{data.global_batch} = {data.micro_batch} x {count_of} x {pluralize(ranks, 'rank')}"
    sizes = [
        f"{each.size} up to {count(each.tokens)}" for each in map(batch_size, data.batch_warmup)
    ]
    return f"{text}, after {', '.join(sizes)} tokens" if sizes else text


def revision() -> str:
    """Short commit, with a + if the working tree has changes; `unknown` outside a repository."""
    commit, changed = code()
    return commit[:7] + "+" * changed


def device(where: torch.device) -> str:
    """The device's name and memory."""
    if where.type != "cuda":
        return "CPU process"
    size = int(torch.cuda.get_device_properties(where).total_memory)
    return f"{torch.cuda.get_device_name(where)} of {storage(size)}"


def versions(where: torch.device) -> dict[str, str]:
    """Versions of torch, and on a GPU of CUDA and NCCL."""
    names = {"torch": str(torch.__version__)}
    if where.type == "cuda":
        names["cuda"] = str(torch.version.cuda)
        names["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return names


def title_facts(job: Job) -> dict[str, Any]:
    """Model, data, device, precision and expert kernels, as JSON values without secrets."""
    cfg = job.cfg
    facts = {
        "run": cfg.run.name,
        "model": cfg.model.name,
        "data": cfg.data.source,
        "sequence": cfg.data.sequence_length,
        "batch": cfg.data.global_batch,
        "ranks": job.runtime.world,
        "device": device(job.runtime.device),
        "precision": described(cfg),
        "experts": job.plan.cfg.kernels.backend,
    }
    return redacted(facts)
