"""Build the wheel whose kernels are compiled, and the source distribution.

    python scripts/lab/release/build_wheel.py [--kernels all|common|none] [--list] [--out FOLDER]
        [--jobs N] [--cache FOLDER]

Needs no GPU, but CuTe DSL and a C compiler (pip install '.[compile]', gcc). The wheel contains
kernels for sm_90a and this machine type, as shared libraries: who installs it needs torch alone.

all     those of kernels/sm90/jit/shipped.py (default)
common  those of `kernels.functional.moe.MoE` in bf16 with the sizes of published models in
        configs/model, with gradients and without (scripts/lab/release/model_kernels.py); needs
        '.[train]'
none    no kernels: a plain wheel for any machine, built in seconds

A kernel takes some 7 s of CPU; --list prints the kernels and the time, and builds nothing. Objects
stay in the cache, so that a second call links and packs only. The source distribution contains no
kernels; what an installation has not is compiled at its first launch, with CuTe DSL.
"""

import argparse
import multiprocessing
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from phalanx.configs import programs
from phalanx.configs.knobs import pluralize
from phalanx.kernels.cache import Cache, folder

ROOT = Path(__file__).resolve().parents[3]
SECONDS = 7  # of CPU to compile a kernel, on average
GLIBC = "2_28"  # C library in the wheel's name; symbols are older


def selected(which: str) -> dict[tuple[type, Any], list[str]]:
    """Kernels of a choice of `--kernels`, and for `common` the models that launch each."""
    if which == "none":
        return {}
    if which == "common":
        from phalanx.scripts.lab.release.model_kernels import common

        return common()
    from phalanx.kernels.sm90.jit.shipped import COMPILED, with_capabilities

    return {kernel: [] for kernel in with_capabilities(COMPILED)}


def library(key: tuple[type, Any], cache: Path, target: Path) -> int:
    """Compile and link a kernel of a wheel; returns its size in bytes."""
    from phalanx.kernels import compiled_libraries as libraries
    from phalanx.kernels.sm90.jit import launch

    path = target / launch.library_name(*key)
    libraries.link(launch.build(*key, Cache(cache)), launch.PREFIX, path)
    return path.stat().st_size


def libraries_of(keys: Sequence[tuple[type, Any]], cache: Path, target: Path, jobs: int) -> int:
    """Compile and link kernels; returns their size in bytes together."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    total, started = 0, time.monotonic()
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as workers:
        sizes = workers.map(library, keys, repeat(cache), repeat(target))
        for done, size in enumerate(sizes, start=1):
            total += size
            if done % 50 == 0 or done == len(keys):
                seconds = time.monotonic() - started
                print(f"{done} of {len(keys)} kernels, {seconds:.0f} s", flush=True)
    return total


def duration(kernels: int, jobs: int) -> str:
    """How long kernels take that are not in the cache."""
    minutes = kernels * SECONDS / jobs / 60
    return f"{pluralize(kernels, 'kernel')}, {minutes:.0f} min with --jobs {jobs}"


def pack(libraries: Path, out: Path) -> Path:
    """Build the source distribution, and from it the wheel with the libraries, if there are any."""
    with tempfile.TemporaryDirectory() as temporary:
        tree = Path(temporary) / "phalanx"
        listed = subprocess.run(
            ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
        )
        for name in filter(None, listed.stdout.split("\0")):
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tree / name, follow_symlinks=False)
        _backend("build_sdist", out, tree)
        tag = list[str]()
        if any(libraries.iterdir()):
            shutil.copytree(libraries, tree / "kernels" / "compiled")
            tag = ["--plat-name", f"manylinux_{GLIBC}_{platform.machine()}"]
        _backend("build_wheel", out, tree, **{"--build-option": tag})
    return max(out.glob("*.whl"), key=lambda path: path.stat().st_mtime)


def _backend(hook: str, out: Path, tree: Path, **settings: list[str]) -> None:
    call = f"import setuptools.build_meta as b; b.{hook}({str(out.resolve())!r}, {settings!r})"
    out.mkdir(parents=True, exist_ok=True)
    done = subprocess.run([sys.executable, "-c", call], cwd=tree, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{hook} failed:\n{done.stderr[-4000:]}")


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = programs.parser("build_wheel", __doc__)
    parser.add_argument("--kernels", choices=("all", "common", "none"), default="all")
    parser.add_argument("--list", action="store_true", help="print the kernels, build nothing")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", metavar="FOLDER")
    parser.add_argument("--cache", type=Path, default=folder(), metavar="FOLDER")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), metavar="N")
    args = parser.parse_args(argv)
    if args.jobs < 1:
        parser.error(f"--jobs {args.jobs}: must be at least 1")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(argv)
    keys = selected(args.kernels)
    if args.list:
        for (kernel, config), models in keys.items():
            print(f"{kernel.__name__} {config}", *([", ".join(models)] if models else []), sep="  ")
    print(f"{duration(len(keys), args.jobs)}, less those in {args.cache}", flush=True)
    if args.list:
        return 0
    with tempfile.TemporaryDirectory() as temporary:
        total = libraries_of([*keys], args.cache, Path(temporary), args.jobs) if keys else 0
        wheel = pack(Path(temporary), args.out)
    size = wheel.stat().st_size
    print(f"{wheel}: {size / 2**20:.1f} MiB, its kernels {total / 2**20:.1f} MiB unpacked")
    return 0


if __name__ == "__main__":
    sys.exit(main())
