"""`phalanx.jax.grouped_mlp` on a CPU: the reference, and what is lowered for a GPU."""

import json
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("jax", reason="needs phalanx-moe[jax]")

import jax
import jax.numpy as jnp

from phalanx.jax import Activation, grouped_mlp
from phalanx.kernels.api import grouped_experts_sorted
from tests.imports import ROOT

S, D, F, E = 24, 16, 8, 5
COUNTS = {
    "uneven": [7, 0, 1, 9, 3],
    "all in one": [0, 0, 24, 0, 0],
    "no rows": [0, 0, 0, 0, 0],
    "more than there are": [20, 3, 9, 0, 1],
}
ACTS = [
    *(Activation("swiglu"), Activation("geglu"), Activation("squared_relu")),
    Activation("quick_geglu", limit=0.5, offset=1.0),
]
NAMES = ("out", "dx", "dw1", "dw2", "dprob")
LOWERED = """
import json, re, sys
import phalanx.jax
imported = sorted({"torch", "cutlass"} & {*sys.modules})
import jax, jax.numpy as jnp

def loss(x, w1, w2, prob, counts):
    return phalanx.jax.grouped_mlp(x, counts, w1, w2, prob).astype(jnp.float32).var()

S, D, F, E = 256, 128, 192, 4
shapes = (S, D), (E, 2 * F, D), (E, D, F)
args = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
args += [jax.ShapeDtypeStruct(n, t) for n, t in (((S,), jnp.float32), ((E,), jnp.int32))]
traced = jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3))).trace(*args)
texts = {to: traced.lower(lowering_platforms=(to,)).as_text() for to in ("cuda", "cpu")}
calls = {to: re.findall(r"custom_call @CuteDSL.*", text) for to, text in texts.items()}
found = {
    "imported": imported,
    "later": sorted({"torch"} & {*sys.modules}),
    "calls": {to: len(lines) for to, lines in calls.items()},
    "aliased": sum("output_operand_alias" in line for line in calls["cuda"]),
    "dots": {to: "dot_general" in text for to, text in texts.items()},
}
print(json.dumps(found))
"""


def problem(act: Activation, dtype: Any = np.float64) -> list[Any]:
    """x, w1, w2, prob and the gradient of out."""
    draw = np.random.default_rng(0)
    shapes = (S, D), (E, act.width(F), D), (E, D, F), (S,), (S, D)
    return [draw.standard_normal(shape).astype(dtype) for shape in shapes]


def ours(
    counts: list[int], act: Activation, arrays: list[Any], backend: str = "auto"
) -> list[np.ndarray]:
    """Output and gradients, in fp64."""

    @jax.jit
    def step(counts: Any, x: Any, w1: Any, w2: Any, prob: Any, dy: Any) -> Any:
        def mlp(*args: Any) -> Any:
            return grouped_mlp(args[0], counts, *args[1:], act, backend=backend)

        out, gradients = jax.vjp(mlp, x, w1, w2, prob)
        return out, *gradients(dy)

    return [np.asarray(a, np.float64) for a in step(jnp.array(counts), *map(jnp.asarray, arrays))]


def wanted(counts: list[int], act: Activation, arrays: list[Any]) -> list[np.ndarray]:
    """The same by a loop over the experts and autograd in fp64; without rows that do not fit."""
    ends = np.minimum(np.cumsum(counts), S)
    fitting = np.diff(ends, prepend=0).tolist()
    *tensors, dy = (torch.tensor(np.asarray(a, np.float64)) for a in arrays)
    x, w1, w2, prob = (t.requires_grad_() for t in tensors)
    out = grouped_experts_sorted(*(x, fitting, prob, w1, w2), activation=act, backend="reference")
    out.backward(dy)
    return [t.detach().numpy() for t in (out, x.grad, w1.grad, w2.grad, prob.grad)]


@pytest.mark.parametrize("act", ACTS, ids=lambda act: act.kind)
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_output_and_gradients_are_those_of_autograd(counts: list[int], act: Activation) -> None:
    arrays = problem(act, np.float32)
    rows = min(sum(counts), S)
    padded = [a.copy() for a in arrays]
    for i in (0, 4):  # what the padding holds does not matter
        arrays[i][rows:] = 0
        padded[i][rows:] = np.nan
    found, exact = ours(counts, act, padded), wanted(counts, act, arrays)
    for name, a, b in zip(NAMES, found, exact, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5, err_msg=name)
    for a in (found[0], found[1], found[4]):
        assert not a[rows:].any()


def test_bf16_is_rounded_where_the_kernels_round() -> None:
    """h, the activations, the output and gradients, once each."""
    arrays = [jnp.asarray(a, jnp.bfloat16) for a in problem(ACTS[0], np.float32)]
    counts = COUNTS["uneven"]
    found, exact = ours(counts, ACTS[0], arrays), wanted(counts, ACTS[0], arrays)
    for name, a, b in zip(NAMES, found, exact, strict=True):
        assert 0 < np.linalg.norm(a - b) < 6e-3 * np.linalg.norm(b), name


def test_without_prob_it_is_1() -> None:
    x, w1, w2, *_ = map(jnp.asarray, problem(ACTS[0], np.float32))
    counts = jnp.array(COUNTS["uneven"])
    ones = grouped_mlp(x, counts, w1, w2, jnp.ones(S))
    np.testing.assert_array_equal(grouped_mlp(x, counts, w1, w2), ones)


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_both_names_run_the_reference_on_a_cpu(backend: str) -> None:
    """In bf16 and with sizes for which the kernels are traced too."""
    draw = np.random.default_rng(0)
    shapes = (S, 64), (E, 2 * 64, 64), (E, 64, 64), (S,), (S, 64)
    arrays = [jnp.asarray(draw.standard_normal(shape), jnp.bfloat16) for shape in shapes]
    found = ours(COUNTS["uneven"], ACTS[0], arrays, backend)
    exact = wanted(COUNTS["uneven"], ACTS[0], arrays)
    assert np.linalg.norm(found[1] - exact[1]) < 6e-3 * np.linalg.norm(exact[1])


def test_gradients_of_weights_are_summed_over_a_mesh() -> None:
    """With the check of what varies over an axis, which custom calls do not say by themselves."""
    draw = np.random.default_rng(0)
    shapes = (S, 64), (E, 2 * 64, 64), (E, 64, 64)
    arrays = [jnp.asarray(draw.standard_normal(shape), jnp.bfloat16) for shape in shapes]
    counts = jnp.array(COUNTS["uneven"])
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))

    def mlp(x: Any, w1: Any, w2: Any) -> Any:
        return grouped_mlp(x, counts, w1, w2)

    rows, every = jax.P("data"), jax.P()
    sharded = jax.shard_map(mlp, mesh=mesh, in_specs=(rows, every, every), out_specs=rows)
    found, exact = (
        jax.jit(jax.grad(lambda *a, f=f: jnp.square(f(*a)).sum(), argnums=(0, 1, 2)))(*arrays)
        for f in (sharded, mlp)
    )
    for a, b in zip(found, exact, strict=True):
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


def test_lowered_for_a_gpu_without_one_and_without_torch() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOWERED], capture_output=True, text=True, cwd=ROOT, timeout=300
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["imported"] == found["later"] == []
    # fc1, fc2, their data gradients, two weight gradients, and clearing, of which each is in the
    # text once.
    assert found["calls"] == {"cuda": 7, "cpu": 0}
    assert found["aliased"] == 7  # counters, and what is cleared in place
    assert found["dots"] == {"cuda": False, "cpu": True}


X, W1, W2 = jnp.ones((S, D)), jnp.ones((E, 2 * F, D)), jnp.ones((E, D, F))
N = jnp.ones(E, jnp.int32)


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((X[0], N, W1, W2), {}, "x must be rows [S, D] of floats, not float32 [16]"),
        ((X, N[1:], W1, W2), {}, "counts must be [E], here [5], not [4]"),
        ((X, N, W1[:, 1:], W2), {}, "w1 must be [E, 2 F, D], here [5, 16, 16], not [5, 15, 16]"),
        ((X, N, W1, W2[0]), {}, "w2 must be [E, D, F], here [1, 16, 1], not [16, 8]"),
        ((X, N, W1, W2.astype(jnp.bfloat16)), {}, "w2 must be float32 as x, not bfloat16"),
        ((X, N / 1, W1, W2), {}, "counts must be integers, not float32"),
        ((X, N, W1, W2, N), {}, "prob must be [S], here [24], not [5]"),
        ((X, N, W1, W2), {"backend": "cuda"}, "unknown backend 'cuda': use one of auto, fused, "),
        ((X, N, W1, W2), {"backend": "fused"}, "backend='fused' needs bfloat16, not float32: use "),
        (([X], N, W1, W2), {}, "x must be rows [S, D] of floats, not float32 [1, 24, 16]"),
        ((X, N, W1, W2), {"activation": "silu"}, "unknown activation 'silu': use one of swiglu, "),
    ],
)
def test_what_does_not_fit_is_an_error(args: Any, kwargs: Any, message: str) -> None:
    with pytest.raises(ValueError) as error:
        grouped_mlp(*args, **kwargs)
    assert str(error.value).startswith(message)
