"""Run a function on N gloo ranks of this machine.

Ranks are warm processes, one pool per world size for the whole session, forked from a server that
has torch (and Megatron-Core, where the tests use it) imported already. Every call gets a fresh
process group and the same random seed. After a failure or a timeout the pool is killed; the next
call starts a new one. Between calls ranks are stopped: gloo's threads wake up a hundred times a
second, and the dozens of an idle rank would take several percent of a core.
"""

import atexit
import ctypes
import faulthandler
import functools
import gc
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import connection, get_context
from multiprocessing import forkserver as server
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

_SLOWEST = "megatron.core.distributed"
"""Slowest import of a run."""

_PR_SET_PDEATHSIG = 1
_MOST_THREADS = 150
"""Most threads of a rank between calls. gloo keeps threads of groups that are still referenced;
ranks with more threads are replaced, or they would slow all others down."""


class RankFailed(RuntimeError):
    """A rank raised, died or did not finish; the message holds its traceback."""


def run_distributed(
    fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 120
) -> list[Any]:
    """Call `fn(*args)` on every rank of a gloo world and return the results in rank order.

    `fn` must be a top-level function; arguments and results are pickled. Inside, the default
    process group is initialised, RANK and WORLD_SIZE are set as a launcher does, and no GPU is
    visible. The environment is that of the session's first call: set other variables in `fn`.

    Raises:
        RankFailed: with the traceback of the first rank that raised or died, or with the stacks of
            the ranks that did not finish within `timeout` seconds. All ranks are killed.
    """
    pool = _pool(world_size)
    try:
        return pool.run(pickle.dumps((fn, args)), timeout)
    except BaseException:
        pool.stop()
        raise


def forkserver() -> Any:
    """Context whose processes are forked from a server with the imports of a run preloaded, if this
    process has imported the slowest of them."""
    context = get_context("forkserver")
    training = ["tests.support.preload"] if _SLOWEST in sys.modules else []
    context.set_forkserver_preload(["torch.distributed", *training])
    return context


def keep_imports() -> None:
    """Exclude the half million objects of imported modules from garbage collections.

    A run freezes and unfreezes all objects, which would include them again.
    """
    gc.freeze()
    gc.freeze = gc.unfreeze = lambda: None  # type: ignore[assignment]


class _Pool:
    def __init__(self, world_size: int) -> None:
        self._world, self._calls = world_size, 0
        self._ranks: list[tuple[Any, connection.Connection]] = []
        self._folder = tempfile.TemporaryDirectory(prefix="gloo-ranks-")

    def _start(self) -> None:
        context = forkserver()
        for rank in range(self._world):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(there, rank, self._world))
            process.start()
            there.close()
            self._ranks.append((process, here))

    def stop(self) -> None:
        for process, pipe in self._ranks:
            process.kill()
            process.join()
            pipe.close()
        self._ranks.clear()

    def run(self, task: bytes, timeout: float) -> list[Any]:
        if not self._ranks:
            self._start()
        self._calls += 1
        store = self._store()
        for process, pipe in self._ranks:
            os.kill(process.pid, signal.SIGCONT)
            pipe.send((store, timeout, task))
        deadline = time.monotonic() + timeout
        pending = {pipe: rank for rank, (_, pipe) in enumerate(self._ranks)}
        results = [None] * self._world
        threads = 0
        while pending:
            ready = connection.wait(list(pending), max(0.0, deadline - time.monotonic()))
            if not ready:
                late = list(pending.values())
                stacks = "\n".join(self._stacks(r) for r in late)
                raise RankFailed(f"ranks {late} still ran after {timeout} s\n{stacks}")
            for pipe in ready:
                rank = pending.pop(pipe)
                results[rank], more = self._receive(rank)
                threads = max(threads, more)
        if threads > _MOST_THREADS:
            self.stop()
        for process, _ in self._ranks:
            os.kill(process.pid, signal.SIGSTOP)
        return results

    def _receive(self, rank: int) -> tuple[Any, int]:
        """Result of a rank, and its number of threads."""
        process, pipe = self._ranks[rank]
        try:
            raised, result = pickle.loads(pipe.recv_bytes())
            threads = pickle.loads(pipe.recv_bytes())
        except (EOFError, ConnectionError):
            process.join()
            died = f"rank {rank} died: exit code {process.exitcode}\n{self._stacks(rank)}"
            raise RankFailed(died) from None
        if raised:
            raise RankFailed(f"rank {rank} of {self._world} raised\n{raised}")
        return result, threads

    def _store(self) -> str:
        return f"{self._folder.name}/{self._calls}"

    def _stacks(self, rank: int) -> str:
        """Stacks of the threads of a rank that was late or died by a signal, as it wrote them."""
        file = Path(f"{self._store()}.{rank}")
        return file.read_text() if file.exists() else ""


@functools.cache
def _pool(world_size: int) -> _Pool:
    pool = _Pool(world_size)
    atexit.register(pool.stop)  # runs before multiprocessing joins its children
    return pool


def _serve(pipe: connection.Connection, rank: int, world_size: int) -> None:
    torch.set_num_threads(1)
    keep_imports()
    if sys.platform == "linux":
        # A stopped rank does not notice the end of the session. The fork server does, once no rank
        # holds its alive pipe, and PDEATHSIG ends the ranks with it.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        os.close(server._forkserver._forkserver_alive_fd)  # type: ignore[attr-defined]
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    _share_a_device()
    while True:
        try:
            store, timeout, task = pipe.recv()
        except EOFError:  # the session is over
            return
        with open(f"{store}.{rank}", "w") as stacks:
            faulthandler.enable(file=stacks)  # SIGSEGV and the like
            faulthandler.dump_traceback_later(0.9 * timeout, file=stacks)
            try:
                answer = pickle.dumps((None, _call(store, timeout, rank, world_size, task)))
            except BaseException:
                answer = pickle.dumps((traceback.format_exc(), None))
            faulthandler.cancel_dump_traceback_later()
            pipe.send_bytes(answer)
            pipe.send_bytes(pickle.dumps(len(os.listdir("/proc/self/task"))))
            faulthandler.disable()


def _share_a_device() -> None:
    """Make all later groups of this process share one gloo device, and thus one thread.

    A device's thread wakes up a hundred times a second, and a run has two dozen groups. Each has
    one worker thread: in PyTorch 2.11 two would share a string (parallel/megatron/param_gather.py).
    """
    gloo = c10d.ProcessGroupGloo
    device = gloo.create_default_device()

    class Sharing(gloo):  # type: ignore[misc, valid-type]
        def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
            options = gloo._Options()
            options._devices, options._timeout, options._threads = [device], timeout, 1
            super().__init__(store, rank, size, options)

    c10d.ProcessGroupGloo = Sharing  # type: ignore[misc]


def _call(store: str, timeout: float, rank: int, world_size: int, task: bytes) -> Any:
    # State of the previous call; by now every rank has certainly left its collectives.
    if (state := sys.modules.get("megatron.core.parallel_state")) is not None:
        state.destroy_model_parallel()
        _forget_models()
    if dist.is_initialized():
        dist.destroy_process_group()
        gc.collect()  # groups referenced by garbage would keep their threads
    where = {"init_method": f"file://{store}", "rank": rank, "world_size": world_size}
    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout), **where)
    torch.manual_seed(0)
    fn, args = pickle.loads(task)
    return fn(*args)


_SCALERS: dict[str, tuple[str, torch.Tensor | None]] = {
    "megatron.core.transformer.moe.moe_utils": ("MoEAuxLossAutoScaler", None),
    "megatron.core.transformer.multi_token_prediction": ("MTPLossAutoScaler", torch.tensor(1.0)),
}
"""Classes that have scales of auxiliary losses as attributes, and the first scale, by module."""


def _forget_models() -> None:
    """Reset scales of auxiliary losses, and clear Megatron-Core's caches of rotary embeddings.

    The keys of these are modules, whose hooks reference a model and its process groups, each with
    threads.
    """
    for name, (scaler, first) in _SCALERS.items():
        if (module := sys.modules.get(name)) is not None:
            getattr(module, scaler).main_loss_backward_scale = first
    if (losses := sys.modules.get("megatron.core.transformer.moe.moe_logging")) is not None:
        losses.set_moe_metrics_tracker(None)  # it has the layer count of the previous model
    for name in ("rotary_pos_embedding", "yarn_rotary_pos_embedding"):
        module = sys.modules.get(f"megatron.core.models.common.embeddings.{name}")
        for part in vars(module).values() if module else ():
            for method in vars(part).values() if isinstance(part, type) else ():
                if hasattr(method, "cache_clear"):
                    method.cache_clear()
