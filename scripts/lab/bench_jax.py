"""The grouped MLP of JAX on one GPU: checked against its reference, then timed. Under a minute.

    python scripts/lab/bench_jax.py [--checks-only] [--shape S D F E]

Needs jax with CUDA, and CuTe DSL; no torch. The checks compare output and gradients, in bf16, with
the reference in fp32: the kernels' error must be at most 1.5 times that of the reference in bf16.
Default shape: 65,536 rows of Qwen3-30B-A3B (D 2048, F 768, 128 experts). TFLOP/s count 6 S D F
forward and three times that with the backward pass. `einsum` is what JAX has without the kernels
if all experts have S / E rows: batched products, with probabilities, recomputing nothing.
Exit code 1: a check failed.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
import numpy as np

from phalanx.jax import Activation, grouped_mlp

QWEN3_30B = (65_536, 2048, 768, 128)
CHECKED = (1280, 256, 320, 6)  # S, D, F, E
COUNTS = {
    "uneven, an empty expert, padding": (300, 0, 1, 511, 129, 200),
    "no padding": (200, 200, 200, 200, 200, 280),
    "all rows in one expert": (0, 0, 0, 1280, 0, 0),
    "no rows": (0, 0, 0, 0, 0, 0),
    "more than there are": (900, 900, 0, 0, 0, 5),
}
ACTIVATIONS: dict[str, tuple[Activation, bool]] = {
    "swiglu": (Activation("swiglu"), True),
    "squared_relu without prob": (Activation("squared_relu"), False),
    "quick_geglu of GPT-OSS": (Activation("quick_geglu", limit=7.0, offset=1.0), True),
}
NAMES = ("out", "dx", "dw1", "dw2", "dprob")
TOLERATED = 1.5
LARGEST = 0.01
"""Relative error of an output in bf16 against fp32; its three roundings make some 0.0035."""


def made(shape: tuple[int, int, int, int], act: Activation, prob: bool) -> list[Any]:
    """x, w1, w2, prob and the gradient of out, in bf16 and fp32."""
    S, D, F, E = shape
    keys = jax.random.split(jax.random.key(0), 5)
    normal = lambda i, *size: jax.random.normal(keys[i], size, jnp.bfloat16)  # noqa: E731
    w1 = normal(1, E, act.width(F), D) * D**-0.5
    p = jax.random.uniform(keys[3], (S,)) if prob else None
    return [normal(0, S, D), w1, normal(2, E, D, F) * F**-0.5, p, normal(4, S, D)]


def with_gradients(act: Activation, backend: str) -> Callable[..., Any]:
    """Function of counts, x, w1, w2, prob and out's gradient: out and all gradients."""

    def step(counts: Any, x: Any, w1: Any, w2: Any, prob: Any, dy: Any) -> tuple[Any, ...]:
        def mlp(x: Any, w1: Any, w2: Any, prob: Any) -> Any:
            return grouped_mlp(x, counts, w1, w2, prob, act, backend=backend)

        out, gradients = jax.vjp(mlp, x, w1, w2, prob)
        return out, *gradients(dy)

    return jax.jit(step)


def check(name: str) -> list[str]:
    """Failures of an activation for all counts, each a line; prints the errors."""
    act, prob = ACTIVATIONS[name]
    arrays = made(CHECKED, act, prob)
    exact = [a if a is None else a.astype(jnp.float32) for a in arrays]
    fused, auto, plain = (with_gradients(act, name) for name in ("fused", "auto", "reference"))
    failures = []
    for case, counts in COUNTS.items():
        rows = min(sum(counts), CHECKED[0])
        # What the padding holds must not matter.
        given = [arrays[0].at[rows:].set(jnp.nan), *arrays[1:4], arrays[4].at[rows:].set(jnp.nan)]
        ours, again = (step(jnp.array(counts), *given) for step in (fused, auto))
        with jax.default_matmul_precision("highest"):
            truth = plain(jnp.array(counts), *exact)
            theirs = plain(jnp.array(counts), *arrays)
        worst = 0.0
        for which, a, b, c, d in zip(NAMES, ours, again, theirs, truth, strict=True):
            if d is None:
                continue
            a, b, c, d = (np.asarray(x, np.float64) for x in (a, b, c, d))
            scale = np.linalg.norm(d) or 1.0
            error, allowed = (np.linalg.norm(x - d) / scale for x in (a, c))
            worst = max(worst, error)
            where = f"{name}, {case}: {which}"
            if not error <= TOLERATED * allowed + 1e-7:  # NaN too
                failures.append(f"{where}: error {error:.2e}, of the reference {allowed:.2e}")
            if not np.array_equal(a, b):
                failures.append(f"{where}: backend='auto' differs from 'fused'")
            if which in ("out", "dx", "dprob") and a[rows:].any():
                failures.append(f"{where}: not 0 in the padding")
        print(f"  {name}, {case}: largest relative error {worst:.1e}", flush=True)
    return failures


def milliseconds(function: Callable[..., Any], *args: Any) -> float:
    """Median time of a call, without its compilation, of 5 rounds of 10 calls."""
    jax.block_until_ready([function(*args) for _ in range(3)])
    rounds = []
    for _ in range(5):
        begin = time.perf_counter()
        for _ in range(10):
            result = function(*args)
        jax.block_until_ready(result)
        rounds.append(100 * (time.perf_counter() - begin))
    return sorted(rounds)[2]


def of_equal_experts(x: Any, w1: Any, w2: Any, prob: Any) -> Any:
    """SwiGLU experts that all have S / E rows."""
    (S, D), E = x.shape, len(w1)
    h = jnp.einsum("esd,ehd->esh", x.reshape(E, -1, D), w1).astype(jnp.float32)
    gate, up = jnp.split(h, 2, axis=-1)
    a = jax.nn.silu(gate) * up * prob.reshape(E, -1, 1)
    return jnp.einsum("esf,edf->esd", a.astype(x.dtype), w2).reshape(S, D)


def error_of_experts(out: Any, sizes: Any, x: Any, w1: Any, w2: Any, prob: Any) -> float:
    """Largest relative error of three SwiGLU experts, against fp32."""
    errors, ends = [], np.cumsum(sizes)
    for e in (0, len(w1) // 2, len(w1) - 1):
        rows = slice(int(ends[e] - sizes[e]), int(ends[e]))
        own_x, own_w1, own_w2 = (
            a.astype(jnp.float32) for a in (x[rows], w1[e : e + 1], w2[e : e + 1])
        )
        with jax.default_matmul_precision("highest"):
            exact = of_equal_experts(own_x, own_w1, own_w2, prob[rows])
        errors.append(float(jnp.linalg.norm(out[rows] - exact) / jnp.linalg.norm(exact)))
    return float(np.max(errors))  # NaN if one is


def bench(shape: tuple[int, int, int, int]) -> list[str]:
    """Print times of equal and of uneven experts; returns failures."""
    S, D, F, E = shape
    act = ACTIVATIONS["swiglu"][0]
    x, w1, w2, prob, dy = made(shape, act, True)
    share = np.random.default_rng(0).dirichlet(np.full(E, 4.0))
    floor = np.floor(share * S).astype(int)
    counts = {"equal experts": np.full(E, S // E), "uneven experts": floor}
    step = with_gradients(act, "fused")
    forward = jax.jit(
        lambda counts, *args: grouped_mlp(args[0], counts, *args[1:], backend="fused")
    )
    equal = jax.jit(of_equal_experts)
    equal_step = jax.jit(lambda *args: jax.vjp(of_equal_experts, *args[:4])[1](args[4]))
    print(f"{S:,} rows, D {D}, F {F}, {E} experts, bf16", flush=True)

    def row(name: str, rows: int, passes: int, function: Callable[..., Any], *args: Any) -> None:
        ms = milliseconds(function, *args)
        tflops = passes * 6e-9 * rows * D * F / ms
        print(f"  {name:<52} {ms:8.3f} ms {tflops:7.0f} TFLOP/s", flush=True)

    failures = []
    for name, sizes in counts.items():
        given, rows = jnp.asarray(sizes, jnp.int32), int(sizes.sum())
        row(f"kernels, {name}: forward", rows, 1, forward, given, x, w1, w2, prob)
        row(f"kernels, {name}: forward and backward", rows, 3, step, given, x, w1, w2, prob, dy)
        error = error_of_experts(forward(given, x, w1, w2, prob), sizes, x, w1, w2, prob)
        if not error < LARGEST:
            failures.append(f"{name}: error {error:.1e} of the output, above {LARGEST}")
    if S % E == 0:
        row("einsum, equal experts: forward", S, 1, equal, x, w1, w2, prob)
        row("einsum, equal experts: forward and backward", S, 3, equal_step, x, w1, w2, prob, dy)
    return failures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--checks-only", action="store_true", help="time nothing")
    parser.add_argument("--shape", nargs=4, type=int, default=QWEN3_30B, metavar=tuple("SDFE"))
    args = parser.parse_args()
    device = jax.devices()[0]
    if getattr(device, "compute_capability", "") != "9.0":
        print(f"bench_jax.py needs a Hopper GPU, and jax has {device.device_kind}")
        return 1
    print(f"{device.device_kind}, jax {jax.__version__}", flush=True)
    failures = [failure for name in ACTIVATIONS for failure in check(name)]
    if not args.checks_only:
        failures += bench(tuple(args.shape))
    print("\n".join(failures) or "checks passed", flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
