"""Save, verify, load and reshard: Megatron-Core's torch_dist checkpoints with a commit.

Where: after an optimizer step, from the model chunks and the optimizer to `<run>/checkpoints/step_N`, and back at
the start of a run. Invariants: a folder with a final name is complete and every byte is accounted for
(parallel.manifest); a failed or killed save leaves the checkpoint before it intact; a resumed run continues bit
for bit on the same layout, and from the same numbers on any other; a damaged checkpoint is never skipped in
silence. All methods are collective: every rank calls them in the same order.
"""

import json
import logging
import os
import pickle
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import extract_matching_values, nested_values
from megatron.core.dist_checkpointing.mapping import (
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
)
from megatron.core.dist_checkpointing.serialization import (
    get_default_save_sharded_strategy,
    load_common_state_dict,
)
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue, AsyncRequest
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.utils import unwrap_model
from torch.distributed.checkpoint import CheckpointException, FileSystemReader

from parallel import manifest, rng
from parallel.drift import CheckpointMismatch, compare
from parallel.optimizer_state import OptimizerState, set_step_count, step_count

log = logging.getLogger(__name__)
T = TypeVar("T")


class CheckpointError(RuntimeError):
    """A checkpoint could not be written; the ones before it are intact."""


class NoUsableCheckpoint(CheckpointError):
    """There are checkpoints, and none of them is valid. Starting from zero would hide that."""


class Checkpointer:
    """Checkpoints of one run.

    Args:
        folder: of the run's checkpoints; created, on a file system that all ranks share.
        keep: committed checkpoints to keep, at least 1.
        async_save: write in a forked process; the commit follows in `poll`, `close` or the next `save`.
        dp_cp_group: data and context parallel group; its ranks share the writing of what they replicate.

    Raises:
        CheckpointError: the folder cannot be written.
    """

    def __init__(self, folder: Path, *, keep: int, async_save: bool, dp_cp_group: Any) -> None:
        if keep < 1:
            raise ValueError(f"run.keep={keep}: at least one checkpoint must be kept")
        self.folder, self._keep, self._async = folder, keep, async_save
        self._dp_cp_group = dp_cp_group
        self._strategy = FullyParallelSaveStrategyWrapper(
            get_default_save_sharded_strategy(), dp_cp_group, do_cache_distribution=True
        )
        self._queue = AsyncCallsQueue()
        self._verified: dict[Path, manifest.Commit] = {}
        self._at: tuple[int, Path | None] = (0, None)  # what the state of this run was last saved as
        self._saves = 0
        _on_main(lambda: _probe(folder), f"cannot write checkpoints to {folder} (run.dir)")

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
            common: plain data, the same on every rank: the configuration under "config", data cursor, counters.

        Returns:
            The folder that holds or will hold it. A step that is saved already is not saved again.

        Raises:
            CheckpointError: it could not be written (or the one before it, with `async_save`).
        """
        self._finish(blocking=True)
        if self._at[0] == step and self._at[1] is not None:
            return self._at[1]
        json.dumps(common)  # plain data only: it must load without unpickling code
        final = manifest.folder_of(self.folder, step)
        unfinished = final.with_suffix(".tmp")
        _on_main(lambda: self._open(unfinished), f"cannot write checkpoint {final}")
        with _parameters_gathered(model):
            state = self._state(model)
            state |= {"common": common, "rng": _rng_object(rng.get())}
            if optimizer is not None:
                state["optimizer"] = OptimizerState(optimizer, _models(state)).shards
                state["optimizer_steps"] = max(_gather(step_count(optimizer)))
            if scheduler is not None:
                state["scheduler_steps"] = scheduler.num_steps
            mailbox = _Mailbox()
            request = self._plan(state, unfinished, mailbox)
            job = _Save(step, unfinished, final, mailbox, request.finalize_fns)
            self._start(request, job)
        self._saves += 1
        return final

    def poll(self) -> None:
        """Commit a background save if every rank has written its part. Does nothing when none is running."""
        self._finish(blocking=False)

    def close(self) -> None:
        """Wait for a background save and commit it."""
        self._finish(blocking=True)

    def _open(self, unfinished: Path) -> None:
        if not self._saves:  # what this run did not come from belongs to an earlier run of the same name
            step, path = self._at
            manifest.remove(manifest.with_suffix(self.folder, ".old"))
            for other, folder in manifest.committed(self.folder):
                if other >= step and folder != path:
                    log.warning("%s is of an earlier run: renamed to *.old", folder)
                    manifest.set_aside(folder, ".old")
        manifest.remove(manifest.with_suffix(self.folder, ".tmp"))
        unfinished.mkdir(parents=True)

    def _plan(self, state: dict[str, Any], folder: Path, mailbox: "_Mailbox") -> AsyncRequest:
        # Megatron-Core would start a server process that imports the main script again, only to hand the
        # results of the writer back.
        filesystem_async._results_queue = mailbox
        try:
            with _hushed("megatron.core.dist_checkpointing.strategies.torch"):
                return dist_checkpointing.save(
                    state,
                    str(folder),
                    self._strategy,
                    validate_access_integrity=not self._saves,
                    async_sharded_save=True,
                    async_strategy="mcore",
                )
        finally:
            filesystem_async._results_queue = None

    def _start(self, request: AsyncRequest, job: "_Save") -> None:
        nothing = request.async_fn is None
        if nothing:
            job.mailbox.put({})
        arguments = () if nothing else (request.async_fn.args[0], None, job.mailbox)
        if self._async:
            with warnings.catch_warnings():  # on fork with threads: the child only writes files
                warnings.simplefilter("ignore", DeprecationWarning)
                self._queue.schedule_async_request(
                    AsyncRequest(
                        None if nothing else _write,
                        arguments,
                        [lambda: self._complete(job)],
                        preload_fn=request.preload_fn,
                    )
                )
            return
        if not nothing:
            _write(arguments[0], request.preload_fn(), job.mailbox)
        self._complete(job)

    def _finish(self, blocking: bool) -> None:
        if self._queue.get_num_unfinalized_calls():
            self._queue.maybe_finalize_async_calls(blocking=blocking)

    def _complete(self, job: "_Save") -> None:
        """From written shards to a committed checkpoint, or to an error and no trace of it."""
        try:
            sums = _agree(job.mailbox.failure(), job.mailbox.sums)
            # Rank 0 may fail to write a file in a step that ends in a collective: join it all the same.
            for finish, rejoin in zip(job.finalize, (_report_failure, dist.barrier), strict=True):
                _agree(_attempt(finish, rejoin))
            merged = {name: value for part in sums for name, value in part.items()}
            _on_main(lambda: self._commit(job, merged), "commit")
        except CheckpointError as error:
            if dist.get_rank() == 0:
                manifest.remove([job.unfinished])
            raise CheckpointError(
                f"checkpoint of step {job.step} not written to {self.folder}: {error}; "
                "the checkpoints before it are intact"
            ) from None
        self._at = (job.step, job.final)

    def _commit(self, job: "_Save", sums: manifest.Sums) -> None:
        names = {path.name for path in job.unfinished.iterdir()}
        if lost := sorted(set(sums) - names):
            raise FileNotFoundError(f"{lost[0]} is not visible to rank 0 (is run.dir shared?)")
        files = {n: sums.get(n) or manifest.checksum(job.unfinished / n) for n in sorted(names)}
        record = manifest.Commit(job.step, dist.get_world_size(), files)
        manifest.commit(job.unfinished, job.final, record)
        older = [folder for s, folder in manifest.committed(self.folder) if s <= job.step]
        manifest.remove(older[self._keep :])

    # --- load -------------------------------------------------------------------------------------

    def newest(self) -> Path | None:
        """Newest valid checkpoint of the run, None if there is none yet. Invalid ones are renamed to *.bad.

        Raises:
            NoUsableCheckpoint: the run has checkpoints and all of them are invalid.
        """
        refused = _on_main(lambda: manifest.with_suffix(self.folder, ".bad"), "")
        for _, folder in _on_main(lambda: manifest.committed(self.folder), ""):
            commit, problems = self._verify(folder)
            if commit is not None and not problems:
                self._verified[folder] = commit
                return folder
            bad = _on_main(lambda f=folder: manifest.set_aside(f, ".bad"), f"cannot rename {folder}")
            refused.append(bad)
            _log(f"{folder} is not valid: {'; '.join(problems[:3])}. Renamed to {bad.name}")
        if refused:
            raise NoUsableCheckpoint(
                f"none of the checkpoints in {self.folder} is valid ({refused[0].name}, ...); "
                "run.resume=never starts from scratch, run.resume=<folder> from another checkpoint"
            )
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
            path: from `newest`, or of any run; the layout that wrote it may be another.
            model, optimizer, scheduler: as in `save`; what is None stays as it is.
            config: configuration of this run, compared with the checkpoint's before anything is touched.

        Raises:
            CheckpointMismatch: it is of another architecture or other data.
            NoUsableCheckpoint: it is damaged, or no checkpoint.
        """
        commit = self._verified.get(path) or self._verify_named(path)
        saved = load_common_state_dict(str(path))
        if config is not None:
            for line in compare(saved["common"].get("config", {}), config):
                _log(f"changed since the checkpoint: {line}")
        state = self._state(model)
        held = FileSystemReader(str(path)).read_metadata().state_dict_metadata
        optimizers = OptimizerState(optimizer, _models(state)) if optimizer is not None else None
        if optimizers is not None:
            state["optimizer"] = optimizers.shards
        if commit.world == dist.get_world_size():
            state["rng"] = _rng_object(None)
        else:
            _log(f"random states are of {commit.world} ranks, not {dist.get_world_size()}: kept as seeded")
        state = _readable(state, held, path)
        with _hushed("megatron.core.dist_checkpointing"):
            loaded = dist_checkpointing.load(state, str(path), validate_access_integrity=False)
        for name, module in self._named(model):
            _load_module(module, loaded[name])
        if optimizers is not None:
            optimizers.write_back()
            set_step_count(optimizer, saved["optimizer_steps"])
        if scheduler is not None:
            scheduler.num_steps = 0
            scheduler.step(saved["scheduler_steps"])
        if "rng" in loaded:
            rng.set(loaded["rng"])
        self._at = (commit.step, path if path.parent == self.folder else None)
        return saved["common"]

    def _verify(self, folder: Path) -> tuple[manifest.Commit | None, list[str]]:
        """(COMMIT.json, what is wrong with the folder), each rank reading a share of the files."""
        commit, problem = _on_main(lambda: _commit_of(folder), f"cannot read {folder}")
        if commit is None:
            return None, [problem]
        problems: list[str] = []
        error = None
        try:
            mine = manifest.share(commit.files, dist.get_rank(), dist.get_world_size())
            problems = manifest.verify(folder, mine)
        except OSError as reason:
            error = f"cannot read {folder}: {reason}"
        return commit, [line for lines in _agree(error, problems) for line in lines]

    def _verify_named(self, path: Path) -> manifest.Commit:
        commit, problems = self._verify(path)
        if commit is None or problems:
            inside = manifest.committed(path) or manifest.committed(path / "checkpoints")
            hint = f"; did you mean run.resume={inside[0][1]}?" if inside else ""
            raise NoUsableCheckpoint(f"run.resume={path} is not a valid checkpoint: {problems[0]}{hint}")
        return commit

    # --- both -------------------------------------------------------------------------------------

    def _named(self, model: Sequence[torch.nn.Module]) -> list[tuple[str, Any]]:
        modules = unwrap_model(list(model))
        names = ["model"] if len(modules) == 1 else [f"model{i}" for i in range(len(modules))]
        return list(zip(names, modules, strict=True))

    def _state(self, model: Sequence[torch.nn.Module]) -> dict[str, Any]:
        # Layers under their own keys: then a layer may differ from its neighbours and move between stages.
        metadata = {"dp_cp_group": self._dp_cp_group, "non_homogeneous_layers": True}
        return {n: m.sharded_state_dict(metadata=metadata) for n, m in self._named(model)}
