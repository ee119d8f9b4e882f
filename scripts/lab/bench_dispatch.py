"""Speed of expert-parallel exchanges, and of whole MoE layers, on the GPUs of one host.

    torchrun --standalone --nproc-per-node 4 scripts/lab/bench_dispatch.py [SUITE ...] \\
        [--json PATH]
    python scripts/lab/bench_dispatch.py [SUITE ...]
    torchrun --standalone --nproc-per-node 2 scripts/lab/bench_dispatch.py --device cpu --rounds 2

Suites (default: all):
  wire      GB/s that leave a GPU in the push of a dispatch, by SMs, idle and beside a GEMM; asked
            of routing that leaves an eighth of the rows where they are, as random on eight
  exchange  dispatch and combine, forward and backward
  plan      the routing plan of received routing
  layer     dispatch, experts and combine with routing given: Qwen3-30B-A3B, DeepSeek-V3 (with its
            shared expert), GPT-OSS-120B, and the part of its exchanges that DeepSeek-V3's waits for
  flash     forward pass of FlashDMoE's layer at 4096, 8192 and 16384 tokens a GPU
  scaling   forward pass of these layers on pairs of GPUs, against all of them
  skew      all tokens to one GPU, against the time of its experts
  replication  layers with uneven routing, with expert replication and without, against balanced
            routing; symm alone, or the first of --dispatch
  rows      dispatch of rows in FP8, quantised before, against that in bf16, and layers; as
  replication
  rail      dispatch and combine between nodes and their parts, by rows and routing, against the
            times that the cost model expects; on several nodes, or with PHALANX_NODE_GPUS
  between   layer of DeepSeek-V3 over nodes, by hier and alltoall, with weight gradients beside
            exchanges as in training, and the part of its exchanges that it waits for; where rail is

Without torchrun one GPU measures what needs no other. All is bf16, dropless, deterministic, and
captured in CUDA graphs. Times are medians of interleaved rounds, the L2 cache flushed before each,
that all ranks begin together; a time is that of the slowest rank. Routing is random, K distinct
experts a token, or balanced; what is asked is asked of random routing. `backward` is forward and
backward less forward; `dispatch` includes the plan. Every result is compared with that of
`alltoall`, bit for bit. A ratio is the other side's time, or the time that is asked, over ours.
TFLOP/s count 6 * D * F a row forward (4 without a gate) and twice that backward. On fewer than
eight GPUs a layer has that part of the experts, so that the GEMMs of a GPU are the same. A missed
bar is no error: exit code 1 is for failures and wrong results.
"""

import argparse
import functools
import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from phalanx.configs import programs
from phalanx.configs.tables.transports import AUTO_SMS
from phalanx.moe.report.console import quiet
from phalanx.scripts.cluster.facts import facts
from phalanx.scripts.lab.bench.models import cases
from phalanx.scripts.lab.bench.records import Report, shape_text

TRANSPORTS = ("symm", "alltoall")
RUNS = {
    "wire": "dispatch.exchange",
    "exchange": "dispatch.exchange",
    "plan": "dispatch.exchange",
    "layer": "dispatch.whole",
    "flash": "dispatch.whole",
    "scaling": "dispatch.whole",
    "skew": "dispatch.whole",
    "replication": "dispatch.replication",
    "rows": "dispatch.replication",
    "rail": "dispatch.rail",
    "between": "dispatch.between",
}  # each a function of the same name


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = programs.parser("bench_dispatch", __doc__)
    add = parser.add_argument
    add("suites", nargs="*", metavar="SUITE", help=f"of {', '.join(RUNS)}")
    add("--dispatch", metavar="LIST", help=f"default: those of {','.join(TRANSPORTS)} that can run")
    add(
        "--comm-sms",
        type=int,
        default=AUTO_SMS,
        metavar="N",
        help="SMs of symm in a layer, as parallel.comm_sms; default: %(default)s",
    )
    add("--tokens", type=int, metavar="T", help="of a rank; default: 8192, and flash its three")
    add("--rounds", type=int, default=20, metavar="N", help="default: %(default)s")
    add("--json", type=Path, metavar="PATH", help="write the results, after every shape")
    add("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: tiny shapes, for a trial")
    args = parser.parse_args(argv)
    for suite in args.suites:
        if suite not in RUNS:
            parser.error(f"{suite}: a suite is one of {', '.join(RUNS)}")
    args.demanded = args.dispatch is not None
    args.dispatch = tuple(args.dispatch.split(",")) if args.demanded else TRANSPORTS
    for name in args.dispatch:
        if name not in TRANSPORTS:
            parser.error(f"--dispatch {name}: a transport is one of {', '.join(TRANSPORTS)}")
    for option in ("rounds", "tokens"):
        value = getattr(args, option)
        if value is not None and value < 1:
            parser.error(f"--{option} {value}: must be at least 1")
    if args.comm_sms < 0:
        parser.error(f"--comm-sms {args.comm_sms}: must be at least 0")
    args.suites = args.suites or list(RUNS)
    return args


def run(bench: Any, args: argparse.Namespace, report: Report) -> None:
    """All suites; whatever a shape raises becomes a record."""
    for suite in args.suites:
        measured = getattr(
            importlib.import_module(f"phalanx.scripts.lab.bench.{RUNS[suite]}"), suite
        )
        for model, tokens in cases(suite, args.tokens, tiny=args.device == "cpu"):
            shape = model.shape(tokens)
            report.facts["models"][shape_text(shape)] = model.name
            call = functools.partial(measured, bench, model, tokens)
            records = bench.attempt(call, suite, shape)
            report.add(records, f"{model.name}: T, D, F, E, K")
            bench.clock.free()


def unsuitable(device: str) -> str:
    """Why this process has no device to measure on; empty if it has one."""
    import torch

    rank, gpus = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if device == "cpu":
        return ""
    if not torch.cuda.is_available():
        return "this script measures on CUDA devices, and there is none: --device cpu tries it out"
    if rank >= gpus:
        return f"--nproc-per-node: this host has {gpus} GPUs, and there is a rank {rank}"
    return ""


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(argv)
    quiet()
    if args.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if problem := unsuitable(args.device):
        print(problem, file=sys.stderr)
        return 1
    from phalanx.parallel import runtime
    from phalanx.scripts.lab.bench.dispatch.ends import TIMEOUT

    process = runtime.start(seed=0, timeout=TIMEOUT, deterministic=False)
    try:
        return _measure(args, process, sys.argv[1:] if argv is None else list(argv))
    finally:
        runtime.stop(process)


def _measure(args: argparse.Namespace, process: Any, command: list[str]) -> int:
    import torch

    from phalanx.kernels.registry import Facts, resolve
    from phalanx.parallel.dispatcher.exchange import SymmOptions
    from phalanx.scripts.lab.bench.clocks import Cpu, Gpu
    from phalanx.scripts.lab.bench.dispatch.ends import TIMEOUT
    from phalanx.scripts.lab.bench.problems import BF16
    from phalanx.scripts.lab.bench.timing import Bench

    cuda = args.device == "cuda"
    capability = torch.cuda.get_device_capability() if cuda else None
    backend = resolve("grouped_mlp", "auto", Facts(args.device, capability, BF16)).backend
    transports = args.dispatch if process.world > 1 or args.demanded else ("local",)
    bench = Bench(
        Gpu(process.connections) if cuda else Cpu(),
        args.rounds,
        demanded=args.demanded,
        backend=backend,
        transports=transports,
        exchange=SymmOptions(args.comm_sms, TIMEOUT),
        connections=process.connections,
    )
    run_facts = facts(bench.clock.device, command, name="" if cuda else "CPU")
    run_facts |= {
        "experts": backend,
        "comm_sms": str(args.comm_sms),
        "ranks": str(process.world),
        "gpus": process.world if cuda else 0,
        "models": {},
    }
    if cuda:
        run_facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    report = Report(args.json, run_facts, shown=process.is_main)
    report.start()
    run(bench, args, report)
    return report.finish(bench.clock.device)


if __name__ == "__main__":
    sys.exit(main())
