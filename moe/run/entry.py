"""One training process, from its first contact with the other ranks to its exit code."""

import os
import sys
from contextlib import nullcontext, suppress
from pathlib import Path
from pkgutil import resolve_name

import torch.distributed as dist

from phalanx.configs.schema import Config
from phalanx.configs.tables.capabilities import PHASES
from phalanx.moe.plan.described import agreed_plan
from phalanx.moe.run.failure import emit_error, exit_with
from phalanx.moe.run.launch import Launch
from phalanx.moe.run.memory_check import check_memory, explain_out_of_memory
from phalanx.moe.run.preflight import finished_lines
from phalanx.moe.run.shared import compare_settings
from phalanx.moe.run.start import make_trainer
from phalanx.moe.run.trainer import Trainer
from phalanx.parallel.checkpoint.start import OtherPhase
from phalanx.parallel.cuda_graph import own_stream
from phalanx.parallel.fault.activity import set_activity
from phalanx.parallel.fault.agreement import on_main
from phalanx.parallel.fault.guard import Guard
from phalanx.parallel.fault.launcher import launcher_world
from phalanx.parallel.fault.signals import AGAIN, StopSignal
from phalanx.parallel.fault.watchdog import Watchdog
from phalanx.parallel.run_folder import check_shared, lock
from phalanx.parallel.runtime import Runtime, start
from phalanx.parallel.runtime import end as end_runtime
from phalanx.parallel.runtime import stop as stop_runtime


def run(
    cfg: Config, stop: StopSignal, guard: Guard, launch: Launch, *, ends_process: bool = False
) -> int:
    """Train, and return the process's exit code (see train.py).

    Args:
        cfg: validated config.
        stop, guard: active signal handler and guard process.
        launch: record of this start for the run folder.
        ends_process: the process ends with the run, so that process groups need no teardown.
    """
    trainer: Trainer | None = None
    watchdog: Watchdog | None = None
    runtime: Runtime | None = None
    folder = Path(cfg.run.dir) / cfg.run.name
    try:

        def met(store: dist.Store) -> None:
            nonlocal watchdog, cfg
            rank, world = int(os.environ.get("RANK", "0")), launcher_world()
            limit = cfg.parallel.timeout
            watchdog = Watchdog(guard, store, rank, world, limit, folder, emit_error)
            if cfg.run.phases:
                cfg = resolve_name(PHASES["present"])(launch.phases, store, rank)
            set_activity("start: comparison of settings")
            compare_settings(cfg, store, rank, world)
            set_activity("start: process groups")

        set_activity("start: device and rendezvous")
        runtime = start(
            seed=cfg.run.seed,
            timeout=cfg.parallel.timeout,
            deterministic=cfg.run.deterministic,
            met=met,
        )
        assert watchdog is not None
        set_activity("start: what is left")
        # A single rank has checked this before it imported torch (train.py).
        if runtime.world > 1 and (lines := on_main(lambda: finished_lines(cfg))):
            for line in lines if runtime.is_main else ():
                print(f"-- {line}", flush=True)
            watchdog.close()
            end_runtime(runtime) if ends_process else stop_runtime(runtime)
            return 0
        set_activity("start: plan")
        plan, facts = agreed_plan(cfg, runtime)
        # Before anything is built: a graph needs its stream from the start.
        stream = own_stream(runtime.device) if plan.captured else nullcontext()
        with explain_out_of_memory(cfg, runtime.world, folder), stream:
            warnings = check_memory(cfg, plan, facts)
            for text in warnings if runtime.is_main else ():
                print(f"warning: {text}", file=sys.stderr, flush=True)
            set_activity("start: run folder")
            held = lock(folder, guard, lambda text: print(f"-- {text}", flush=True))
            if cfg.run.save_interval >= 0 and not cfg.run.checkpoints:
                check_shared(folder)
            own, code = held if runtime.is_main else None, AGAIN
            with suppress(OtherPhase):  # of the valid checkpoint before damaged ones
                trainer = make_trainer(cfg, runtime, stop, launch, own, plan)
                trainer.fit()
                done = trainer.step >= cfg.run.steps
                if not done or cfg is launch.phases[-1]:
                    code = 0 if done else cfg.run.requeue_code
        watchdog.close()
    except Exception as error:
        rank, training = int(os.environ.get("RANK", "0")), trainer is not None
        if ends_process:
            # With its frames and their tensors: freeing pinned memory after the device has failed
            # would end the process by an error in a destructor, with another code.
            sys.last_exc = error
        shared = None if runtime is None else runtime.connections
        return exit_with(
            error, stop, rank=rank, training=training, watchdog=watchdog, connections=shared
        )
    end_runtime(runtime) if ends_process else stop_runtime(runtime)
    return code
