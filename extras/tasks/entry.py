"""Entry to scores of tasks: the callback of a run, and a function of a checkpoint."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch.profiler import record_function

from phalanx.configs.schema import Config
from phalanx.extras.tasks.averaged import averaged
from phalanx.extras.tasks.formats import read_tasks
from phalanx.extras.tasks.forward import RunForward, checkpoint_forward
from phalanx.extras.tasks.prepared import prepared
from phalanx.extras.tasks.requests import requests_of
from phalanx.extras.tasks.scoring import NotFinite, Scores, lines_of, numbers_of, score
from phalanx.moe.data.tokenizer.codec import Codec
from phalanx.moe.report.metrics import Metrics
from phalanx.moe.run.callbacks.callback import Callback
from phalanx.moe.run.progress import Progress
from phalanx.moe.run.step import Step
from phalanx.parallel.fault.activity import set_activity
from phalanx.parallel.fault.agreement import on_main

if TYPE_CHECKING:
    from phalanx.moe.inference.predictor import Predictor


class TaskScores(Callback):
    """Scores of `run.tasks`, of the weights and of their averages. Collective to make.

    Rank 0 reads the files, which other hosts need not have.
    """

    def __init__(self, cfg: Config, step: Step, progress: Progress, metrics: Metrics) -> None:
        super().__init__(cfg.run.eval_interval)
        self._cfg, self._step, self._progress, self._metrics = cfg, step, progress, metrics
        self._tasks, self._codec = on_main(lambda: prepared(cfg))

    def due(self, step: int) -> bool:
        """After every validation, and after the last step."""
        return super().due(step) or step == self._cfg.run.steps

    def __call__(self, step: int) -> None:
        engine = self._step.job.engine
        set_activity(f"step {step}: tasks")
        engine.eval()
        with torch.no_grad(), record_function("tasks"):
            self._score(step, "tasks", "")
            if self._cfg.optim.ema:
                with averaged(engine):
                    self._score(step, "tasks_ema", " of the moving averages")
        engine.train()
        self._metrics.clock.lap("validation")

    def _score(self, step: int, prefix: str, of: str) -> None:
        forward = RunForward(self._cfg, self._step)
        try:
            scores: Scores = score(self._tasks, forward, self._codec)
        except NotFinite as error:  # on all ranks
            self._metrics.event(
                f"no scores{of} after step {step}: likelihoods of {error} are NaN or infinite"
            )
            return
        finally:
            self._metrics.reruns(forward.reruns, f"scoring after step {step}")
        numbers = {f"{prefix}/{name}": value for name, value in numbers_of(scores).items()}
        self._metrics.text(f"-- scores{of} after step {step}\n{lines_of(scores)}")
        self._metrics.log({"step": step, "tokens": self._progress.tokens} | numbers)


def checkpoint_scores(
    predictor: "Predictor",
    codec: Codec,
    paths: Sequence[str],
    *,
    context: int,
    tokens: int,
    progress: Callable[[int], object],
) -> tuple[dict[str, float], str]:
    """Scores of files by `task/score`, and lines that show them.

    Args:
        context: most tokens of a sequence.
        tokens: most tokens of a forward pass, unless one sequence has more.
        progress: called with the number of sequences done since the last call.

    Raises:
        DataError: a file cannot be scored.
    """
    requests = [requests_of(task, codec, context) for task in read_tasks(paths)]
    scores = score(requests, checkpoint_forward(predictor, tokens, progress), codec)
    return numbers_of(scores), lines_of(scores)
