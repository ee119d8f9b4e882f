"""Save, verify, load and reshard: Megatron-Core's torch_dist checkpoints with a commit.

Where: after an optimizer step, from model and optimizer to `<run>/checkpoints/step_N`, and back
when a run starts. Invariants: a folder with a final name is complete and accounted for to the byte
(parallel.manifest); a save that fails or is killed leaves the checkpoints before it intact; a
resumed run goes on bit for bit on the same layout, and from the same numbers on any other; a
damaged checkpoint is never passed over in silence. All ranks call every method, in the same order.
"""

import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.serialization import (
    get_default_save_sharded_strategy,
    load_common_state_dict,
)
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelSaveStrategyWrapper,
)

from parallel import manifest, rng
from parallel.agreement import Failed, agree, gather, on_main
from parallel.drift import compare
from parallel.model_state import fitted, parameters_gathered, restore, sharded_state
from parallel.optimizer_state import OptimizerState, set_step_count, step_count
from parallel.writer import Writing, hushed

log = logging.getLogger(__name__)


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; those on disk are intact."""


class NoUsableCheckpoint(CheckpointError):
    """There are checkpoints and none of them is valid. Starting from zero would hide that."""


class Checkpointer:
    """Checkpoints of one run.

    Args:
        folder: of the run's checkpoints; created. On a file system that all ranks share.
        keep: committed checkpoints to keep, at least 1.
        async_save: write in a forked process; `poll`, the next `save` or `close` commits.
        dp_cp_group: data and context parallel group: its ranks divide the writing of replicas.

    Raises:
        CheckpointError: the folder cannot be written.
    """

    def __init__(self, folder: Path, *, keep: int, async_save: bool, dp_cp_group: Any) -> None:
        if keep < 1:
            raise ValueError(f"run.keep={keep}: at least one checkpoint has to be kept")
        self.folder, self._keep, self._async = folder, keep, async_save
        self._dp_cp_group = dp_cp_group
        self._strategy = FullyParallelSaveStrategyWrapper(
            get_default_save_sharded_strategy(), dp_cp_group, do_cache_distribution=True
        )
        self._queue = AsyncCallsQueue()
        self._verified: dict[Path, manifest.Commit] = {}
        # Step and folder of the checkpoint that holds this run's state, or did last.
        self._at: tuple[int, Path | None] = (0, None)
        self._saving_first = True
        with _told(f"cannot write to {folder} (run.dir)"):
            on_main(lambda: manifest.probe(folder))

    # --- save -------------------------------------------------------------------------------------

    def save(
        self,
        step: int,
        model: Sequence[torch.nn.Module],
        optimizer: Any,
        scheduler: Any,
        common: dict[str, Any],
    ) -> Path:
        """Save the state after `step`; with `async_save` it is on its way when this returns.

        Args:
            step: optimizer steps done.
            model: chunks of this rank, wrapped or not.
            optimizer: Megatron-Core's, or None.
            scheduler: OptimizerParamScheduler, or None.
            common: plain data, the same on every rank: the run's configuration under "config",
                data cursor, counters.

        Returns:
            The folder that holds or will hold it. A step that is saved already is left as it is.

        Raises:
            CheckpointError: it could not be written; or, with `async_save`, the one before.
        """
        self.close()
        if self._at[1] is not None and self._at[0] == step:
            return self._at[1]
        json.dumps(common)  # plain data, which loads without running code
        final = manifest.folder_of(self.folder, step)
        unfinished = manifest.unfinished(final)
        with _told(f"cannot write checkpoint {final}"):
            on_main(lambda: self._open(unfinished))
        with parameters_gathered(model):
            state = sharded_state(model, self._dp_cp_group)
            if optimizer is not None:
                state["optimizer"] = OptimizerState(optimizer, dict(state)).shards
                state["optimizer_steps"] = max(gather(step_count(optimizer)))
            if scheduler is not None:
                state["scheduler_steps"] = scheduler.num_steps
            state |= {"common": common, "rng": _per_rank("rng", rng.get())}
            writing = Writing(state, unfinished, self._strategy, validate=self._saving_first)
            self._saving_first = False
            if self._async:
                writing.fork(self._queue, lambda: self._complete(writing, step, final))
            else:
                writing.run()
                self._complete(writing, step, final)
        return final

    def poll(self) -> None:
        """Commit a background save if all ranks have written it. Free when none is on its way."""
        self._finish(blocking=False)

    def close(self) -> None:
        """Wait for a background save and commit it."""
        self._finish(blocking=True)

    def _finish(self, blocking: bool) -> None:
        if self._queue.get_num_unfinalized_calls():
            self._queue.maybe_finalize_async_calls(blocking=blocking)

    def _open(self, unfinished: Path) -> None:
        if self._saving_first:  # checkpoints that this run does not come from: an earlier one's
            manifest.remove(manifest.with_suffix(self.folder, ".old"))
            for other, folder in manifest.committed(self.folder):
                if other >= self._at[0] and folder != self._at[1]:
                    aside = manifest.set_aside(folder, ".old")
                    log.warning("%s is of an earlier run: renamed to %s", folder, aside.name)
        manifest.remove(manifest.with_suffix(self.folder, ".tmp"))
        unfinished.mkdir(parents=True)

    def _complete(self, writing: Writing, step: int, final: Path) -> None:
        try:
            sums = writing.finish()
            on_main(lambda: self._commit(step, final, sums))
        except Failed as error:
            if dist.get_rank() == 0:
                manifest.remove([manifest.unfinished(final)])
            raise CheckpointError(
                f"checkpoint of step {step} not written to {self.folder}: {error}; "
                "earlier checkpoints are intact (free space, or set run.dir)"
            ) from None
        self._at = (step, final)

    def _commit(self, step: int, final: Path, sums: manifest.Sums) -> None:
        folder = manifest.unfinished(final)
        names = sorted(path.name for path in folder.iterdir())
        if lost := sorted(set(sums) - set(names)):
            raise OSError(f"rank 0 does not see {lost[0]}: all hosts have to share run.dir")
        files = {name: sums.get(name) or manifest.checksum(folder / name) for name in names}
        manifest.commit(folder, final, manifest.Commit(step, dist.get_world_size(), files))
        done = [path for other, path in manifest.committed(self.folder) if other <= step]
        manifest.remove(done[self._keep :])

    # --- load -------------------------------------------------------------------------------------

    def newest(self) -> Path | None:
        """Newest valid checkpoint of the run, or None if it has none yet.

        Folders found to be invalid on the way are renamed to *.bad.

        Raises:
            NoUsableCheckpoint: the run has checkpoints and none is valid.
        """
        with _told(f"cannot read {self.folder}"):
            found = on_main(lambda: [path for _, path in manifest.committed(self.folder)])
            refused = on_main(lambda: manifest.with_suffix(self.folder, ".bad"))
            incomplete = on_main(lambda: manifest.with_suffix(self.folder, ".tmp"))
            earlier = on_main(lambda: manifest.with_suffix(self.folder, ".old"))
        for folder in incomplete:
            _warn(f"{folder} was never completed: ignored")
        for folder in found:
            commit, problems = self._verify(folder)
            if commit is not None and not problems:
                self._verified[folder] = commit
                return folder
            problem = f"{folder} is not valid: {'; '.join(problems[:3])}"
            with _told(f"{problem}. It cannot be renamed"):
                refused.append(on_main(partial(manifest.set_aside, folder, ".bad")))
            _warn(f"{problem}. Renamed to {refused[-1].name}")
        if refused:
            names = ", ".join(path.name for path in refused[:3])
            raise NoUsableCheckpoint(
                f"no checkpoint in {self.folder} is valid ({names}): run.resume=never starts from "
                "scratch, run.resume=<folder> from another checkpoint"
            )
        for folder in earlier:
            _warn(f"{folder} is of an earlier run: ignored (run.resume={folder} continues it)")
        return None

    def load(
        self,
        path: Path,
        model: Sequence[torch.nn.Module],
        optimizer: Any = None,
        scheduler: Any = None,
        config: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Restore a checkpoint in place and return its `common`.

        Args:
            path: from `newest`, or of any run; it may have been written on another layout.
            model: as in `save`.
            optimizer: as in `save`; None restores the model only.
            scheduler: as in `save`; None leaves it as it is.
            config: this run's; compared with the checkpoint's before anything is touched.

        Raises:
            CheckpointMismatch: it is of another architecture or other data.
            NoUsableCheckpoint: it is damaged, or no checkpoint.
        """
        commit = self._verified.get(path) or self._verify_named(path)
        with hushed():
            saved = load_common_state_dict(str(path))
        if changed := compare(saved["common"].get("config", {}), config or {}):
            _warn(f"changed since the checkpoint: {', '.join(changed)}")
        state = sharded_state(model, self._dp_cp_group)
        optimizers = None if optimizer is None else OptimizerState(optimizer, dict(state))
        if optimizers is not None:
            state["optimizer"] = optimizers.shards
        if commit.world == dist.get_world_size():
            state["rng"] = _per_rank("rng", None)
        else:
            _warn(f"{path} has random states of {commit.world} ranks: run.seed's are kept")
        with hushed():
            loaded = dist_checkpointing.load(
                fitted(state, path), str(path), validate_access_integrity=False
            )
        restore(model, loaded)
        if optimizers is not None:
            optimizers.write_back()
            set_step_count(optimizer, saved["optimizer_steps"])
        if scheduler is not None:
            scheduler.num_steps = 0
            scheduler.step(saved["scheduler_steps"])
        if "rng" in loaded:
            rng.set(loaded["rng"])
        own = path.resolve().parent == self.folder.resolve()
        self._at = (commit.step, self.folder / path.name if own else None)
        return saved["common"]

    def _verify(self, folder: Path) -> tuple[manifest.Commit | None, list[str]]:
        """(COMMIT.json, what is wrong with the folder); each rank reads a share of the files."""
        with _told(f"cannot read {folder}"):
            commit, problem = on_main(lambda: _commit_of(folder))
            if commit is None:
                return None, [problem]
            problems, error = [], None
            try:
                mine = manifest.share(commit.files, dist.get_rank(), dist.get_world_size())
                problems = manifest.verify(folder, mine)
            except OSError as reason:  # this says nothing about the checkpoint
                error = str(reason)
            agree(error)
            return commit, [line for lines in gather(problems) for line in lines]

    def _verify_named(self, path: Path) -> manifest.Commit:
        commit, problems = self._verify(path)
        if commit is None or problems:
            inside = manifest.committed(path) or manifest.committed(path / "checkpoints")
            hint = f"; did you mean run.resume={inside[0][1]}?" if inside else ""
            raise NoUsableCheckpoint(
                f"run.resume={path} is no valid checkpoint: {problems[0]}{hint}"
            )
        return commit


@contextmanager
def _told(what: str) -> Iterator[None]:
    try:
        yield
    except Failed as error:
        raise CheckpointError(f"{what}: {error}") from None


def _commit_of(folder: Path) -> tuple[manifest.Commit | None, str]:
    if not folder.is_dir():
        return None, "no such folder"
    try:
        return manifest.read_commit(folder), ""
    except manifest.Invalid as error:
        return None, str(error)


def _per_rank(key: str, value: Any) -> ShardedObject:
    return ShardedObject(key, value, (dist.get_world_size(),), (dist.get_rank(),))


def _warn(text: str) -> None:
    if dist.get_rank() == 0:
        log.warning(text)
