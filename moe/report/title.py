"""Facts of a run in the titles of its curves, traces and tables."""

from typing import Any

from phalanx.configs.formats import described
from phalanx.configs.redact import redacted
from phalanx.moe.job import Job
from phalanx.moe.report.start_page import device


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
