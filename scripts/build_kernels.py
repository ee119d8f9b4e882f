"""Compile all kernels that the library can choose into the on-disk cache, ahead of a run.

    python scripts/build_kernels.py [--dir FOLDER] [--jobs N] [--only TEXT] [--list]
        [--functions] [--run OVERRIDE ...]

Kernels of flash-attn-4 and QuACK are compiled for sizes of a model. Without --run these are sizes
of the models in configs/model. --run takes the overrides of a run, as train.py does, and compiles
what that run needs in their place, whatever the model; parallel.world_size says for how many ranks,
if the experiment does not. Kernels in Triton are compiled for the launches of the shipped models;
others are compiled when a run first launches them, and kept. --functions adds the kernels that only
the functions of phalanx.kernels.api launch, as the adapters do.

    python scripts/build_kernels.py --run experiment=proof_moe_long data.document_mask=true

Needs no GPU. Kernels in the cache are left alone, so a second call does nothing. A run finds
the kernels if its $PHALANX_KERNEL_CACHE names the same folder; without it, both use the default.
Kernels are for sm_90a, this machine type, this version of CuTe DSL and these sources: rebuild
after any of them has changed. Kernels of flash-attn-4, several for an attention layer, and of QuACK
are also specific to this CPU's instruction set. Exit code 1 if a kernel cannot be built, 2 if the
overrides are wrong.
"""

import argparse
import multiprocessing
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from phalanx.configs import programs
from phalanx.configs.knobs import pluralize
from phalanx.kernels.cache import Cache, folder
from phalanx.kernels.limits import Refusal
from phalanx.scripts.output.reader import may_leave

if TYPE_CHECKING:
    from phalanx.kernels.core_attention.fa4 import AttentionLayer
    from phalanx.kernels.rms_norm.quack_library import Rows


class Wanted(NamedTuple):
    """Kernels to build beside those that train any model."""

    layers: Sequence["AttentionLayer"] | None = None
    """Keys of flash-attn-4's kernels; None: those of the models in configs/model."""
    rows: Sequence["Rows"] | None = None
    """Keys of QuACK's kernels, likewise."""
    functions: bool = False
    """Kernels of the public functions too."""


@dataclass(frozen=True)
class Target:
    """A kernel, or all kernels of an attention layer."""

    label: str
    is_built: Callable[[Path], bool]  # whether a cache folder has all its entries
    build: Callable[[Path], object]  # compiles the entries that a cache folder lacks


def targets(wanted: Wanted) -> list[Target]:
    """All kernels that the library can choose, in the same order in every process."""
    from phalanx.kernels.core_attention import fa4
    from phalanx.kernels.rms_norm import quack_library
    from phalanx.kernels.sm90.jit import launch
    from phalanx.kernels.sm90.jit.shipped import COMPILED, SHIPPED, with_capabilities

    ours = COMPILED if wanted.functions else SHIPPED
    layers = fa4.SHIPPED if wanted.layers is None else wanted.layers
    norms = quack_library.SHIPPED if wanted.rows is None else wanted.rows
    found = [
        Target(
            f"{kernel.__name__} {config}",
            partial(_has, partial(_entries, launch.entry_name, kernel, config)),
            partial(_build, launch.build, kernel, config),
        )
        for kernel, config in with_capabilities(ours)
    ]
    for layer in layers:
        entries = partial(_has, partial(fa4.entries, layer))
        found.append(Target(f"flash-attn-4 {layer}", entries, partial(fa4.build, layer)))
    for rows in norms:
        make = partial(quack_library.build, rows)
        found.append(Target(f"QuACK {rows}", partial(_has, partial(_entry, rows)), make))
    if find_spec("triton"):
        from phalanx.kernels.triton_table import launches

        found += [Target(each.label, each.is_built, each.build) for each in launches()]
    return found


def of_run(overrides: Sequence[str]) -> Wanted:
    """Kernels that a run with these overrides launches; SystemExit 2 after mistakes."""
    from phalanx.configs.load import from_argv
    from phalanx.kernels.registry import KernelUnavailable
    from phalanx.moe.report.console import quiet

    quiet()
    cfg = from_argv(["--check", *overrides])  # for the ranks of the run, not of this machine
    from phalanx.parallel.megatron.imports import importing_megatron

    with importing_megatron():
        from phalanx.moe.model.kernel_facts import attention_layers, norm_rows
    try:
        return Wanted(attention_layers(cfg), norm_rows(cfg))
    except KernelUnavailable as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def _has(entries: Callable[[], Iterable[str]], cache_folder: Path) -> bool:
    cache = Cache(cache_folder)
    return all(cache.has(name) for name in entries())


def _entries(entry_name: Callable[..., str], kernel: Any, config: Any) -> list[str]:
    return [entry_name(kernel, config)]


def _entry(rows: Any) -> list[str]:
    return [rows.entry]


def _build(build: Callable[..., object], kernel: Any, config: Any, cache_folder: Path) -> object:
    return build(kernel, config, Cache(cache_folder))


def build(number: int, wanted: Wanted, cache_folder: Path) -> tuple[float, str]:
    """Build `targets(wanted)[number]` in a worker process; returns seconds, and the error or ""."""
    started, why = time.monotonic(), ""
    try:
        targets(wanted)[number].build(cache_folder)
    except Exception as error:  # not every exception of the compiler can be pickled
        why = reason(error)
    return time.monotonic() - started, why


def reason(error: BaseException) -> str:
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(error))
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines)[:300]}"


def build_all(missing: dict[int, str], wanted: Wanted, cache_folder: Path, jobs: int) -> int:
    """Build targets (number to label), print a line for each, and return the number of failures."""
    failed = 0
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # warnings about tensors without memory
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(jobs, len(missing)), mp_context=context) as workers:
        running: dict[Future[tuple[float, str]], str] = {
            workers.submit(build, number, wanted, cache_folder): label
            for number, label in missing.items()
        }
        for done, future in enumerate(as_completed(running), start=1):
            crash = future.exception()  # set if the worker process died
            seconds, error = (0.0, reason(crash)) if crash else future.result()
            failed += bool(error)
            result = f"FAILED  {error}" if error else f"{seconds:.1f} s"
            progress(f"[{done}/{len(missing)}] {running[future]}  {result}", keep=bool(error))
    return failed


def progress(line: str, *, keep: bool) -> None:
    """Print a line; on a terminal the next line overwrites it unless `keep`."""
    if not sys.stdout.isatty():
        print(line, flush=True)
        return
    width = os.get_terminal_size().columns - 1
    print(f"\r\033[K{line if keep else line[:width]}", end="\n" if keep else "", flush=True)


def unwritable(cache_folder: Path) -> Refusal:
    """Create a cache folder; return why it cannot be written, or None."""
    try:
        cache_folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=cache_folder).close()
    except OSError as error:
        return f"cannot write to {cache_folder}: {error.strerror}; --dir names another folder"
    return None


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = programs.parser("build_kernels", __doc__)
    parser.add_argument(
        "--dir",
        type=Path,
        default=folder(),
        metavar="FOLDER",
        help="cache to build into (default: $PHALANX_KERNEL_CACHE or ~/.cache/phalanx/kernels)",
    )
    parser.add_argument(
        "--jobs",
        type=int,
        default=len(os.sched_getaffinity(0)),
        metavar="N",
        help="processes that compile (default: one a CPU, here %(default)s)",
    )
    parser.add_argument(
        "--only",
        default="",
        metavar="TEXT",
        help="only kernels and attention layers whose line, as --list prints it, contains TEXT",
    )
    parser.add_argument(
        "--list", action="store_true", help="list cached and missing kernels, build nothing"
    )
    parser.add_argument(
        "--functions",
        action="store_true",
        help="also kernels that only the functions of phalanx.kernels.api launch, as adapters do",
    )
    parser.add_argument(
        "--run",
        nargs="+",
        metavar="OVERRIDE",
        help="kernels of flash-attn-4 and QuACK for the run that these overrides give",
    )
    args = parser.parse_args(argv)
    if args.jobs < 1:
        parser.error(f"--jobs {args.jobs}: must be at least 1")
    return args


@may_leave
def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(argv)
    try:
        wanted = of_run(args.run) if args.run else Wanted()
    except ModuleNotFoundError as missing_module:
        programs.leave_without(missing_module)
    try:
        wanted = wanted._replace(functions=args.functions)
        known = targets(wanted)
    except ModuleNotFoundError as missing_module:
        if (missing_module.name or "").startswith("phalanx"):
            raise
        needs = programs.install("nvidia-cutlass-dsl", "flash-attn-4", "quack-kernels")
        print(f"no package {missing_module.name}, which compiles kernels: {needs}", file=sys.stderr)
        return 1
    cached, missing = dict[int, str](), dict[int, str]()
    for number, target in enumerate(known):
        if args.only in target.label:
            (cached if target.is_built(args.dir) else missing)[number] = target.label
    if args.list:
        for number in sorted(cached | missing):
            print(
                f"missing {missing[number]}" if number in missing else f"cached  {cached[number]}"
            )
        return 0
    if not cached and not missing:
        print(f"no kernel contains {args.only!r}; --list shows them", file=sys.stderr)
        return 1
    if missing and (why := unwritable(args.dir)):
        print(why, file=sys.stderr)
        return 1
    started = time.monotonic()
    failed = build_all(missing, wanted, args.dir, args.jobs) if missing else 0
    progress(
        f"{pluralize(len(missing) - failed, 'kernel')} built, {len(cached)} were cached, "
        f"{failed} failed, in {time.monotonic() - started:.1f} s: {args.dir}",
        keep=True,
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
