"""Build the wheel whose kernels are compiled, and the source distribution.

    python scripts/lab/release/build_wheel.py [--out FOLDER] [--jobs N] [--cache FOLDER]

Needs no GPU, but CuTe DSL and a C compiler (pip install '.[compile]', gcc). The wheel contains the
kernels of kernels/sm90/jit/shipped.py for sm_90a and this machine type, as shared libraries: who
installs it needs torch alone. The source distribution contains none; kernels of an installation
from it are compiled at their first launch, with CuTe DSL. Objects stay in the cache, so that a
second call links and packs only.
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
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from phalanx.configs import programs
from phalanx.kernels.cache import Cache, folder

ROOT = Path(__file__).resolve().parents[3]
GLIBC = "2_28"  # C library in the wheel's name; symbols are older


def library(number: int, cache: Path, target: Path) -> int:
    """Compile and link kernel `number` of a wheel; returns its size in bytes."""
    from phalanx.kernels import compiled_libraries as libraries
    from phalanx.kernels.sm90.jit import launch
    from phalanx.kernels.sm90.jit.shipped import COMPILED, with_capabilities

    kernel, config = with_capabilities(COMPILED)[number]
    path = target / launch.library_name(kernel, config)
    libraries.link(launch.build(kernel, config, Cache(cache)), launch.PREFIX, path)
    return path.stat().st_size


def libraries_of(cache: Path, target: Path, jobs: int) -> int:
    """Compile and link all kernels; returns their size in bytes together."""
    from phalanx.kernels.sm90.jit.shipped import COMPILED, with_capabilities

    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    count, total, started = len(with_capabilities(COMPILED)), 0, time.monotonic()
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as workers:
        sizes = workers.map(library, range(count), [cache] * count, [target] * count)
        for done, size in enumerate(sizes, start=1):
            total += size
            if done % 50 == 0 or done == count:
                print(f"{done} of {count} kernels, {time.monotonic() - started:.0f} s", flush=True)
    return total


def pack(libraries: Path, out: Path) -> Path:
    """Build the source distribution, and from it the wheel with the libraries; returns that."""
    with tempfile.TemporaryDirectory() as temporary:
        tree = Path(temporary) / "phalanx"
        listed = subprocess.run(
            ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
        )
        for name in filter(None, listed.stdout.split("\0")):
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tree / name, follow_symlinks=False)
        _backend("build_sdist", out, tree)
        shutil.copytree(libraries, tree / "kernels" / "compiled")
        tag = f"manylinux_{GLIBC}_{platform.machine()}"
        _backend("build_wheel", out, tree, **{"--build-option": ["--plat-name", tag]})
    return max(out.glob("*.whl"), key=lambda path: path.stat().st_mtime)


def _backend(hook: str, out: Path, tree: Path, **settings: list[str]) -> None:
    call = f"import setuptools.build_meta as b; b.{hook}({str(out.resolve())!r}, {settings!r})"
    out.mkdir(parents=True, exist_ok=True)
    done = subprocess.run([sys.executable, "-c", call], cwd=tree, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{hook} failed:\n{done.stderr[-4000:]}")


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = programs.parser("build_wheel", __doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "dist", metavar="FOLDER")
    parser.add_argument("--cache", type=Path, default=folder(), metavar="FOLDER")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), metavar="N")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(argv)
    with tempfile.TemporaryDirectory() as temporary:
        total = libraries_of(args.cache, Path(temporary), args.jobs)
        wheel = pack(Path(temporary), args.out)
    size = wheel.stat().st_size
    print(f"{wheel}: {size / 2**20:.1f} MiB, its kernels {total / 2**20:.1f} MiB unpacked")
    return 0


if __name__ == "__main__":
    sys.exit(main())
