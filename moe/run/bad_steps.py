"""Decision from loss and gradient norm whether the update of a step is applied.

It is taken between backward pass and optimizer. Both numbers are sums over all ranks with the same
bits on every rank, so that all ranks decide the same without a message, and a replayed graph ends
before the read. `run.bad_steps` is the policy for values that are not finite. A step without a
label that counts is skipped: only the balancing losses of the routers would change the parameters.
A spike is skipped, which is an idea of OLMo-core's SkipStepOptimizer: a loss or norm more than
`run.skip_spikes` standard deviations above the mean of the last 128 accepted steps.
"""

import math
import statistics
from collections import deque
from typing import Any

from phalanx.configs.knobs import pluralize
from phalanx.configs.schema import RunConfig
from phalanx.parallel.engine import Diverged

WINDOW = 128  # accepted steps to which a spike is compared; half of them are enough


class Health:
    """Losses and norms of recent steps, and counts of skipped steps and rollbacks of the run."""

    def __init__(self, run: RunConfig) -> None:
        self._run = run
        self._seen = {name: deque[float](maxlen=WINDOW) for name in ("loss", "gradient norm")}
        self._in_a_row = 0  # steps skipped since the last accepted one
        self._returns = {-1: 0}  # step of the last rollback's checkpoint -> rollbacks to it
        self.skipped = self.rollbacks = 0

    def fault(self, step: int, loss: float, norm: float, labels: int = 1) -> str | None:
        """Fault of a step; None for a good step, to which later ones are compared.

        Args:
            step: number of the step.
            loss: mean over its labels; undefined without labels.
            norm: norm of its gradients.
            labels: number of labels that count.
        """
        values = {"loss": loss, "gradient norm": norm}
        if not labels:
            del values["loss"]
        for name, value in values.items():
            if not math.isfinite(value):
                return f"the {name} of step {step} is {value}"
        if not labels:
            return f"step {step} has no loss: none of its labels counts"
        for name, value in values.items():
            if above := self._spike(value, self._seen[name]):
                return f"the {name} of step {step} is {value:.4g}, {above}"
        for name, value in values.items():
            self._seen[name].append(value)
        self._in_a_row = 0
        return None

    def skips(self, fault: str, *, finite: bool) -> bool:
        """True if a step with `fault` is skipped, False if the run has to be rolled back.

        Raises:
            Diverged: the run has to end, by `run.bad_steps` or `run.max_bad_steps`.
        """
        policy, most = "skip" if finite else self._run.bad_steps, self._run.max_bad_steps
        if policy == "stop":
            advice = "lower optim.lr, check the data, or set run.bad_steps=skip"
            raise Diverged(f"{fault}; the parameters are unchanged; {advice}")
        if policy == "rollback":
            return False
        if self._in_a_row == most:
            raise Diverged(
                f"{fault}, after {pluralize(most, 'step')} skipped in a row (run.max_bad_steps); "
                "the parameters are unchanged; lower optim.lr or check the data"
            )
        self._in_a_row += 1
        self.skipped += 1
        return True

    def roll_back(self, to: int, fault: str) -> None:
        """Count a rollback to the checkpoint of step `to`.

        Raises:
            Diverged: the last `run.max_bad_steps` rollbacks were to the same checkpoint.
        """
        times, most = self._returns.get(to, 0), self._run.max_bad_steps
        if times == most:
            raise Diverged(
                f"{fault}, and the run has gone back to step {to} {most} times "
                "(run.max_bad_steps); lower optim.lr or check the data"
            )
        self._returns = {to: times + 1}
        self.rollbacks += 1

    def counts(self) -> dict[str, int]:
        """Counts of bad steps for the record of a step, without zeros."""
        counts = {"skipped": self.skipped, "rollbacks": self.rollbacks}
        return {name: count for name, count in counts.items() if count}

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers for a checkpoint; a resumed run decides as an uninterrupted one."""
        seen = {name: list(values) for name, values in self._seen.items()}
        return {"seen": seen, "in_a_row": self._in_a_row, **self.counts()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`, or from an empty one as a new run.

        A rollback does not undo the counts.
        """
        for name, values in self._seen.items():
            values.clear()
            values.extend(state.get("seen", {}).get(name, ()))
        self._in_a_row = state.get("in_a_row", 0)
        self.skipped = max(self.skipped, state.get("skipped", 0))
        self.rollbacks = max(self.rollbacks, state.get("rollbacks", 0))

    def _spike(self, value: float, seen: deque[float]) -> str:
        sigma = self._run.skip_spikes
        if not sigma or len(seen) < WINDOW // 2:
            return ""
        mean, spread = statistics.fmean(seen), statistics.stdev(seen)
        if not spread or value <= mean + sigma * spread:
            return ""
        return f"{(value - mean) / spread:.1f} sigma above the last {len(seen)} (run.skip_spikes)"
