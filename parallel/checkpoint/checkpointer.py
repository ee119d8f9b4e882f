"""Save, verify, load and reshard: Megatron-Core's torch_dist checkpoints with a commit.

Invariants: a folder with a final name is complete and accounted for to the byte
(parallel.checkpoint.commit); a save that fails or is killed leaves the checkpoints before it
intact; a resumed run goes on bit for bit on the same layout, and from the same numbers on any
other; a damaged checkpoint is never passed over in silence. All ranks call every method, in the
same order.
"""

import json
import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelSaveStrategyWrapper,
)
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata

from phalanx.configs.knobs import pluralize
from phalanx.configs.schema import RunConfig
from phalanx.parallel import random_states as rng
from phalanx.parallel.checkpoint import commit, safe_pickle
from phalanx.parallel.checkpoint import start as run_start
from phalanx.parallel.checkpoint.model_state import (
    check_fit,
    parameters_gathered,
    parameters_whole,
    restore,
    sharded_state,
)
from phalanx.parallel.checkpoint.optimizer_state import (
    OptimizerState,
    begin_anew,
    check_kind,
    set_step_count,
    step_count,
)
from phalanx.parallel.checkpoint.saved_config import (
    CheckpointError,
    NoUsableCheckpoint,
    compared,
)
from phalanx.parallel.checkpoint.saved_knobs import understood
from phalanx.parallel.checkpoint.start import Start, compare, start_over_override
from phalanx.parallel.checkpoint.target import Folder, Store
from phalanx.parallel.checkpoint.verify import (
    newest,
    report_errors,
    set_aside_message,
    verified,
    warn,
)
from phalanx.parallel.checkpoint.weights import read_state
from phalanx.parallel.checkpoint.writer import Staging, Writing
from phalanx.parallel.fault.agreement import Failed, agree, failing_together, gather, on_main
from phalanx.parallel.object_store import Place, Remote

log = logging.getLogger(__name__)


class Checkpointer:
    """Checkpoints of one run.

    Args:
        folder: on a file system that all ranks share, or a prefix of an object store; created.
        keep_last: newest committed checkpoints to keep, at least 1.
        keep_every: keep for good those of steps that are multiples of it; 0 for none.
        keep_steps: steps whose checkpoints are kept for good too.
        async_save: write in a forked process; `poll`, the next `save` or `close` commits.
        dp_cp_group: data and context parallel group: its ranks divide the writing of replicas.
        may_write: called by rank 0 before folders get or lose a name; raises if the run may not.
        staging: for an object store, folder whose `rank_<n>` this rank writes to before it uploads.

    Raises:
        CheckpointError: the folder cannot be written.
    """

    def __init__(
        self,
        folder: Place,
        *,
        keep_last: int,
        keep_every: int = 0,
        keep_steps: Sequence[int] = (),
        async_save: bool,
        dp_cp_group: Any,
        may_write: Callable[[], None] = lambda: None,
        staging: Path | None = None,
    ) -> None:
        if keep_last < 1:
            raise ValueError(f"run.keep_last={keep_last}: at least one checkpoint has to be kept")
        self.folder, self._async = folder, async_save
        kept = {"keep_last": keep_last, "keep_every": keep_every, "keep_steps": keep_steps}
        self._keep: dict[str, Any] = kept
        self._dp_cp_group, self._may_write = dp_cp_group, may_write
        self._strategy = FullyParallelSaveStrategyWrapper(
            get_default_save_sharded_strategy(), dp_cp_group, do_cache_distribution=True
        )
        self._queue, self._staging = AsyncCallsQueue(), Staging()
        # Set aside before this launch; they go once it has saved. None until that is known.
        self._earlier: list[Place] | None = None
        self._cleaner: threading.Thread | None = None
        self._verified: dict[Place, commit.Commit] = {}
        # Step and folder of the checkpoint that holds this run's state, or did last.
        self._at: tuple[int, Place | None] = (0, None)
        self._saving_first = True
        self._rng = rng.get()  # of a new run; for checkpoints without any
        self._record = run_start.Record()
        self._target = Store(folder, staging) if isinstance(folder, Remote) else Folder(folder)
        with report_errors(f"cannot write to {folder} ({self._target.knob})"):
            on_main(self._target.probe)

    # --- save -------------------------------------------------------------------------------------

    def save(
        self,
        step: int,
        model: Sequence[torch.nn.Module],
        optimizer: Any,
        scheduler: Any,
        common: dict[str, Any],
    ) -> Place:
        """Save the state after `step`; with `async_save` it is on its way when this returns.

        Args:
            model: chunks of this rank, wrapped or not.
            common: plain data, the same on every rank, with the run's configuration under "config".

        Returns:
            The folder that holds or will hold it. A step that is saved already is left as it is.

        Raises:
            CheckpointError: it could not be written; or, with `async_save`, the one before.
        """
        self.close()
        if self._at[1] is not None and self._at[0] == step:
            return self._at[1]
        json.dumps(common)  # plain data, which loads without running code
        with report_errors(
            f"cannot write checkpoint of step {step} to {self.folder} ({self._target.knob})"
        ):
            final = on_main(lambda: self._open(step))
            agree(self._target.open(final))
        with parameters_gathered(model):
            state = sharded_state(model, self._dp_cp_group)
            if optimizer is not None:
                state["optimizer"] = OptimizerState(optimizer, dict(state)).shards
                state["optimizer_steps"] = max(gather(step_count(optimizer)))
            if scheduler is not None:
                state["scheduler_steps"] = scheduler.num_steps
            state |= {"common": common, "rng": _per_rank("rng", rng.get())}
            unfinished, to = self._target.unfinished(final), self._target.uploads_to(final)
            writing = Writing(state, unfinished, self._strategy, self._saving_first, to)
            self._saving_first = False
            if self._async:
                with report_errors(
                    f"cannot copy checkpoint {final} to the host (run.async_save=off)"
                ):
                    writing.fork(
                        self._staging, self._queue, lambda: self._complete(writing, step, final)
                    )
            else:
                writing.run()
                self._complete(writing, step, final)
        return final

    def poll(self) -> None:
        """Commit a background save if all ranks have written it. Free when none is on its way."""
        self._finish(blocking=False)

    @property
    def unfinished(self) -> bool:
        return self._queue.get_num_unfinalized_calls() > 0

    def close(self) -> None:
        self._finish(blocking=True)
        if self._cleaner is not None:
            self._cleaner.join()

    def _finish(self, blocking: bool) -> None:
        if self._queue.get_num_unfinalized_calls():
            self._queue.maybe_finalize_async_calls(blocking=blocking)

    def _open(self, step: int) -> Any:
        """Make room; where the checkpoint of `step` will be. On rank 0."""
        self._check()
        if self._earlier is None:
            self._earlier = commit.with_suffix(self.folder, ".old")
        if self._saving_first:
            commit.recover(self.folder)
            for other, folder in commit.committed(self.folder):
                if other >= self._at[0] and folder != self._at[1]:
                    raise OSError(
                        f"{folder} was not there when this run started; start it again to go on "
                        f"from that, or with {start_over_override()} to set it aside"
                    )
        commit.remove(commit.with_suffix(self.folder, ".tmp"))
        return commit.folder_of(self.folder, step)

    def _check(self) -> None:
        self._may_write()
        self._target.check()

    def _complete(self, writing: Writing, step: int, final: Any) -> None:
        try:
            sums = writing.finish()
            on_main(lambda: self._commit(step, final, sums))
        except Failed as error:
            self._target.drop(final)
            raise CheckpointError(
                f"checkpoint of step {step} not written to {self.folder}: {error}; "
                f"{self._left()} ({self._target.way_out})"
            ) from None
        self._target.clear()
        self._at = (step, final)

    def _left(self) -> str:
        try:
            steps = on_main(lambda: [step for step, _ in commit.committed(self.folder)])
        except Failed:
            return "earlier checkpoints have not been touched"
        if not steps:
            return "there is no earlier checkpoint"
        return f"earlier checkpoints are intact, the newest is of step {steps[0]}"

    def _commit(self, step: int, final: Any, sums: commit.Sums) -> None:
        self._check()
        self._target.commit(final, sums, step, dist.get_world_size())
        # Only now is there a valid checkpoint besides those that go.
        own = [(other, path) for other, path in commit.committed(self.folder) if other <= step]
        done = [*(self._earlier or ()), *commit.superseded(own, **self._keep)]
        self._earlier = []
        # Large files take a while to delete; a background save must not make training wait.
        self._cleaner = threading.Thread(target=commit.remove, args=(done,), daemon=True)
        self._cleaner.start()
        if not self._async:
            self._cleaner.join()

    # --- start ------------------------------------------------------------------------------------

    def start(self, run: RunConfig) -> Start:
        """Return the start of this launch; invalid folders become *.bad.

        Raises:
            ConfigError: the run has checkpoints and did not start where `run.resume` says.
            NoneValid: it has some and none is valid, and it does not start over.
        """
        with report_errors(f"cannot read {self.folder / run_start.NAME}"):
            self._record = on_main(lambda: run_start.read(self.folder))
        over = run_start.starts_over(run, self._record)
        return run_start.decide(run, self._record, None if over else self.newest())

    def started(self, begin: Start) -> None:
        """Keep where the run starts, once nothing is left that could be in its way."""
        with report_errors(
            f"cannot keep the start of the run in {self.folder} ({self._target.knob})"
        ):
            on_main(lambda: self._started(begin))

    def _started(self, begin: Start) -> None:
        self._check()
        if begin.over:
            self._set_aside(begin.path)
        if begin.record != self._record:
            run_start.write(self.folder, begin.record)

    def _set_aside(self, origin: Place | None) -> None:
        """All checkpoints; but if the run starts from one of them, only those after it."""
        commit.recover(self.folder)
        self._earlier = commit.with_suffix(self.folder, ".old")
        for folder in commit.with_suffix(self.folder, ".bad"):
            commit.set_aside(folder, ".old")
        found = commit.committed(self.folder)
        kept = [step for step, folder in found if self._own(origin) == folder]
        for step, folder in found:
            if not kept or step > kept[0]:
                aside = commit.set_aside(folder, ".old")
                log.warning(
                    "%s is of an earlier start: %s", folder, set_aside_message(aside, "old")
                )

    def _own(self, path: Place | None) -> Place | None:
        if path is None:
            return None
        own = path.parent == self.folder or path.resolve().parent == self.folder.resolve()
        return self.folder / path.name if own else None

    # --- load -------------------------------------------------------------------------------------

    def newest(self) -> Place | None:
        """Newest valid checkpoint of the run, or None if it has none yet; see `verify.newest`."""
        found = newest(self.folder)
        if found is None:
            return None
        path, self._verified[path] = found
        return path

    def load(
        self,
        path: Place,
        model: Sequence[torch.nn.Module],
        optimizer: Any = None,
        scheduler: Any = None,
        config: dict[str, Any] | None = None,
        *,
        begins: bool = False,
    ) -> dict[str, Any]:
        """Restore a checkpoint in place and return its `common`.

        What it lacks is that of a new run, whatever has been trained before: of weights alone
        moments, their steps and the schedule, and of another number of ranks the random states.

        Args:
            path: from `newest`, or of any run; it may have been written on another layout.
            optimizer: None restores the model only.
            scheduler: None leaves it as it is.
            config: this run's; compared with the checkpoint's before anything is touched.
            begins: the run begins with this checkpoint of another one.

        Raises:
            CheckpointMismatch: it is of another architecture, other data or another optimizer.
            NoUsableCheckpoint: it is damaged, or no checkpoint.
        """
        record = self._verified.get(path) or verified(path)
        metadata, saved = self._described(path, record)
        known = compared(saved["common"])
        seen = known.config, config or {}, known.samples
        if changed := compare(*seen, step=known.step, begins=begins):
            warn(f"changed since the checkpoint: {', '.join(changed)}")
        if ignored := understood(saved["common"].get("config", {})).ignored_note():
            warn(f"{path}: {ignored}")
        bare = bool(saved["common"].get("weights_only"))  # imported, or averaged (moe.hf)
        with parameters_whole(model):
            state = sharded_state(model, self._dp_cp_group)
            optimizers = None
            if optimizer is not None and not bare:
                stored = metadata.state_dict_metadata
                check_kind(optimizer, stored, path)
                optimizers = OptimizerState(optimizer, dict(state), stored)
                state["optimizer"] = optimizers.shards
            check_fit(state, metadata, path)
            states, loaded = self._read(path, state, 0 if bare else record.world, metadata)
            restore(model, loaded)
            if optimizers is not None:
                optimizers.write_back()
                set_step_count(optimizer, saved["optimizer_steps"])
            elif optimizer is not None:
                begin_anew(optimizer)
        if scheduler is not None:
            scheduler.num_steps = 0
            scheduler.step(0 if bare else saved["scheduler_steps"])
        if bare:
            warn(f"{path} holds weights only: optimizer and random states are those of a new run")
        elif states is None:
            ranks = pluralize(record.world, "rank")
            warn(f"{path} has random states of {ranks}: those of run.seed are kept")
        rng.set(self._rng if states is None else states)
        self._at = (record.step, self._own(path))
        return saved["common"]

    def _described(self, path: Place, record: commit.Commit) -> tuple[Metadata, dict[str, Any]]:
        """Names and places of what it holds, and what all ranks share of it."""
        refused = report_errors(f"{path} cannot be read", NoUsableCheckpoint)
        with refused, failing_together(commit.Invalid, OSError):
            metadata = safe_pickle.read_metadata(path, record.files)
            return metadata, safe_pickle.read_common(path, metadata)

    def _read(
        self, path: Place, state: dict[str, Any], world: int, metadata: Metadata
    ) -> tuple[dict[str, Any] | None, dict[str, Any]]:
        """(random states of this rank if there are any, `state` loaded)."""
        ranks, rank = dist.get_world_size(), dist.get_rank()
        errors = CheckpointException, CheckpointingException, commit.Invalid, OSError
        refused = report_errors(f"{path} cannot be read", NoUsableCheckpoint)
        states = None
        with refused, failing_together(*errors, text=safe_pickle.reason):
            if world == ranks:
                states = safe_pickle.read_object(path, metadata, "rng", rank, ranks)
            return states, read_state(path, state)


def _per_rank(key: str, value: Any) -> ShardedObject:
    return ShardedObject(key, value, (dist.get_world_size(),), (dist.get_rank(),))
