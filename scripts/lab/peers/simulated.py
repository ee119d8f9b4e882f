"""Speed of a published run by the estimate, beside the published one."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from phalanx.configs.arithmetic.accounting import flops_per_token
from phalanx.configs.knobs import changed
from phalanx.configs.layout import micro_batches
from phalanx.configs.records import Published, configured
from phalanx.configs.tables.machines import MACHINES
from phalanx.configs.validate import validate
from phalanx.extras.baseline.rules import ELEMENTWISE_PASSES, peer_machine
from phalanx.moe.plan.cost.step_time import StepTime, busiest, step_with, with_natural_routing
from phalanx.moe.plan.described import resolved
from phalanx.scripts.lab.peers.dispatchers import DISPATCHERS, peer_exchange

_HOST_SECONDS = 5.0e-3
"""Time in which a host launches a layer of Megatron-Core, forward and backward, without graphs: a
micro-batch of four layers took 21.9 ms eagerly and 15.3 ms in a graph, on one H200."""


@dataclass(frozen=True)
class Simulated:
    """A published run and its estimate."""

    record: Published
    step: StepTime
    tokens: float  # expected tokens a second and GPU

    @property
    def error(self) -> float:
        """Part by which the estimate is above the published rate."""
        return self.tokens / self.record.tokens_per_second_per_gpu - 1


def simulated(record: Published) -> Simulated:
    """The estimate of a record that says its `stack`, or ValueError."""
    if record.stack is None:
        raise ValueError(f"{record.system} of {record.source} has no stack to estimate")
    cfg, world = configured(record)
    cfg = changed(cfg, {"kernels.backend": "megatron", "run.machine": _machine(record)})
    validate(cfg, world)
    stack, machine = record.stack, MACHINES[cfg.run.machine]
    known = resolved(cfg, world, machine.node_gpus)
    sent = peer_exchange(known, world, machine, DISPATCHERS[stack.dispatcher], stack.overlap)
    rates = peer_machine(cfg, machine, stack.attention)
    step = step_with(sent, known, world, rates, ELEMENTWISE_PASSES)
    step = with_natural_routing(step, busiest(cfg, world))
    if not stack.graphs:
        layers = -(-(cfg.model.layers + cfg.model.mtp_layers) // cfg.parallel.pipeline)
        launching = layers * micro_batches(cfg, world) * _HOST_SECONDS
        step = replace(step, waiting=step.waiting + max(0.0, launching - step.total))
    tokens = cfg.data.global_batch * cfg.data.sequence_length / world / step.total
    return Simulated(record, step, tokens)


def table(runs: Sequence[Simulated]) -> str:
    """A Markdown table, one row a run, with the parts of its step in percent."""
    head = ("model", "system", "GPUs", "published", "estimate", "error", "TFLOP/s", "step")
    rows = [head, ("---",) * 3 + ("---:",) * 4 + ("---",)]
    for run in runs:
        r, total = run.record, run.step.total
        cfg, _ = configured(r)
        flops = flops_per_token(cfg.model, r.sequence_length)
        parts = [f"{name} {part / total:.0%}" for name, part in vars(run.step).items()]
        shown = ", ".join(part for part in parts if not part.endswith(" 0%"))
        cells = (f"{r.tokens_per_second_per_gpu:,.0f}", f"{run.tokens:,.0f}", f"{run.error:+.1%}")
        rows.append(
            (r.model, r.system, r.hardware, *cells, f"{run.tokens * flops / 1e12:.0f}", shown)
        )
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _machine(record: Published) -> str:
    return record.hardware.split(" x ")[1].lower()
