"""Kernels of libraries that a run launches: by hand, of shipped models, and by a model's calls."""

import contextlib
import io
import tempfile
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import megatron.core.distributed
import megatron.core.models.gpt.gpt_model  # noqa: F401
import pytest
from torch import Tensor

from phalanx.configs.load import load, options
from phalanx.configs.schema import Config
from phalanx.configs.validate import validate
from phalanx.kernels.core_attention import fa4
from phalanx.kernels.core_attention.fa4 import AttentionLayer
from phalanx.kernels.registry import KernelUnavailable
from phalanx.kernels.rms_norm import quack_library
from phalanx.kernels.rms_norm.quack_library import Rows
from phalanx.moe.model.kernel_facts import attention_layers, norm_rows
from tests.support.distributed import run_distributed

# --- by hand --------------------------------------------------------------------------------------


def hidden_rows(channels: int, *, fp32_weight: bool = False) -> set[Rows]:
    """Norms before attention and the MLP, and the final one."""
    return {
        Rows(channels, step, adds, fp32_weight)
        for step in ("forward", "backward")
        for adds in (False, True)
    }


def inner_rows(*widths: int, fp32_weight: bool = False) -> set[Rows]:
    """Norms without a residual."""
    return {Rows(N, step, False, fp32_weight) for N in widths for step in ("forward", "backward")}


def keys(*overrides: str) -> tuple[set[AttentionLayer], set[Rows]]:
    """Both kinds of keys, none of them twice."""
    cfg = load(overrides)
    layers, rows = attention_layers(cfg), norm_rows(cfg)
    assert len(layers) == len(set(layers)) and len(rows) == len(set(rows))
    return set(layers), set(rows)


def layers(*overrides: str) -> set[AttentionLayer]:
    return keys(*overrides)[0]


def rows(*overrides: str) -> set[Rows]:
    return keys(*overrides)[1]


def test_the_long_run():
    # Heads have norms too, which are one kernel of ours with the rotary embedding.
    assert keys("experiment=proof_moe_long") == ({AttentionLayer(3, 128, 128)}, hidden_rows(768))


QWEN, GPT_OSS = "model=qwen3_30b_a3b", "model=gpt_oss_20b"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["model=deepseek_v3"], [AttentionLayer(1, 192, 128)]),
        (["model=deepseek_v3", "parallel.tensor=4"], [AttentionLayer(1, 192, 128)]),
        ([QWEN, "parallel.tensor=2"], [AttentionLayer(8, 128, 128)]),
        ([QWEN, "parallel.tensor=8"], [AttentionLayer(4, 128, 128)]),  # two ranks for a key head
        ([QWEN, "data.document_mask=true"], [AttentionLayer(8, 128, 128, documents=True)]),
        ([QWEN, "run.deterministic=true"], [AttentionLayer(8, 128, 128, deterministic=True)]),
        ([QWEN, "model.attention.window=64"], [AttentionLayer(8, 128, 128, window=True)]),
        ([QWEN, "parallel.context=2"], [AttentionLayer(8, 128, 128)]),
    ],
)
def test_attention(overrides, expected):
    assert layers(*overrides) == set(expected)


FULL = AttentionLayer(8, 64, 64, sinks=True)
HIDDEN = AttentionLayer(8, 64, 64, window=True, sinks=True)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], {FULL, HIDDEN}),
        (["data.sequence_length=128"], {FULL}),  # the window of 128 hides no key
        (["model.attention.window_every=1"], {HIDDEN}),
        # The first of four chunks has as many keys as the window, later ones have more.
        (["model.attention.window_every=1", "data.sequence_length=512"], {HIDDEN}),
        (
            ["model.attention.window_every=1", "data.sequence_length=512", "parallel.context=2"],
            {FULL, HIDDEN},
        ),
        (["model.layers=1"], {HIDDEN}),
        (["model.layers=1", "model.mtp_layers=1"], {HIDDEN}),  # counted from 1 again
        (["model.layers=1", "model.mtp_layers=2"], {FULL, HIDDEN}),
    ],
)
def test_windows(overrides, expected):
    assert layers(GPT_OSS, *overrides) == expected


def test_ranks_that_share_out_heads_have_groups_of_their_own():
    """Eight ranks have copies of Qwen3's four key-value heads, and four query heads each."""
    model = ["model=qwen3_30b_a3b", "data.document_mask=true"]
    for ranks, group in ((2, 8), (8, 4), (16, 2)):
        found = layers(*model, f"parallel.context={ranks}")
        assert found == {AttentionLayer(group, 128, 128, documents=True)}


def test_windows_of_packed_documents():
    packed = [GPT_OSS, "data.document_mask=true", "data.sequence_length=128"]
    windows = [
        {layer.window for layer in layers(*packed, f"data.micro_batch={size}")} for size in (1, 2)
    ]
    assert windows == [{False}, {False, True}]


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([QWEN], hidden_rows(2048)),
        ([QWEN, "parallel.tensor=8"], hidden_rows(2048) | inner_rows(128)),
        (["model=deepseek_v3"], hidden_rows(7168) | inner_rows(1536, 512)),
        (["model=moonlight_16b_a3b"], hidden_rows(2048) | inner_rows(512)),
        (["model=olmoe_1b_7b"], hidden_rows(2048)),  # as wide as queries and keys
        (["model=minimax_m2"], hidden_rows(3072) | inner_rows(6144, 1024)),
    ],
)
def test_norms(overrides, expected):
    assert rows(*overrides) == expected


# --- other implementations ------------------------------------------------------------------------


def test_other_implementations_have_none():
    model, norms = "model=qwen3_30b_a3b", hidden_rows(2048)
    assert keys(model, "kernels.attention=flex") == (set(), norms)
    assert keys(model, "kernels.norm=torch") == ({AttentionLayer(8, 128, 128)}, set())
    assert keys(model, "precision=fp32") == keys(model, "run.device=cpu") == (set(), set())
    assert keys(model, "precision=fp8_block") == keys(model, "kernels=megatron") == keys(model)
    assert keys(model, "model.attention.head_dim=80") == (set(), norms)
    assert keys(model, "model.hidden=9216") == ({AttentionLayer(8, 128, 128)}, set())


@pytest.mark.extras  # of context ranks
def test_heads_that_ranks_cannot_share_out_have_none():
    assert layers(QWEN, "data.document_mask=true", "parallel.context=3") == set()


def test_a_named_library_that_cannot_run_the_model_is_an_error():
    with pytest.raises(KernelUnavailable, match="kernels.attention=fa4 cannot run here: needs hea"):
        layers("model=tiny_gpt_oss", "kernels.attention=fa4")


# --- models of configs/model ----------------------------------------------------------------------

MODELS = [name for name in options("model") if not name.startswith("tiny")]
NOT_SHIPPED = {
    "glm_4_5": hidden_rows(5120),
    "glm_4_5_air": hidden_rows(4096),
    "glm_5": hidden_rows(6144),
    "minimax_m2": hidden_rows(3072) | inner_rows(6144, 1024),
    "mixtral_8x22b": hidden_rows(6144),
    "mixtral_8x7b": hidden_rows(4096),
    "qwen3_235b_a22b": hidden_rows(4096),
}
"""Norms that are compiled by `--run` or in the first step only."""


@pytest.mark.parametrize("model", MODELS)
def test_kernels_of_models_are_shipped(model):
    needed_layers, needed_rows = keys(f"model={model}")
    assert needed_layers and needed_layers <= set(fa4.SHIPPED)
    assert needed_rows - set(quack_library.SHIPPED) == NOT_SHIPPED.get(model, set())
    assert len(needed_rows) >= 4


# --- calls of a model -----------------------------------------------------------------------------


class Calls(NamedTuple):
    """Calls of kernels of one rank, as keys."""

    layers: set[AttentionLayer]
    rows: set[Rows]


@contextlib.contextmanager
def recorded(calls: Calls) -> Iterator[None]:
    """Inside, what a model asks of attention and norms is added to `calls`."""
    from phalanx.moe.model import attention, norm

    attend, rms_norm, fork = attention.attention, norm.rms_norm, norm.fork

    def recording_attend(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> Tensor:
        sinks, documents = given["sinks_H"] is not None, given["documents"] is not None
        window = 0 < given["window"] < k.size(2)
        calls.layers.add(
            AttentionLayer(
                q.size(1) // k.size(1),
                q.size(3),
                v.size(3),
                window=window,
                sinks=sinks,
                documents=documents,
            )
        )
        return attend(q, k, v, **given)

    def recording_norm(x: Tensor, weight: Tensor, eps: float, **given: Any) -> Tensor:
        normed = rms_norm(x, weight, eps, **given)
        watch(normed, None, Rows(weight.numel(), "forward", False, given["centered"]))
        return normed

    def recording_fork(
        x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, **given: Any
    ) -> tuple[Tensor, Tensor]:
        normed, total = fork(x, residual, weight, eps, **given)
        total = total.view_as(total)  # apart from x, which has gradients of its own
        added = residual is not None
        watch(normed, total, Rows(weight.numel(), "forward", added, given["centered"]))
        return normed, total

    def watch(normed: Tensor, total: Tensor | None, key: Rows) -> None:
        calls.rows.add(key)
        reached: set[str] = set()

        def reach(name: str) -> Callable[[Tensor], None]:
            def reached_by(gradient: Tensor) -> None:
                reached.add(name)
                if "normed" in reached and (total is None or "total" in reached):
                    adds = total is not None
                    calls.rows.add(Rows(key.channels, "backward", adds, key.fp32_weight))

            return reached_by

        for name, tensor in (("normed", normed), ("total", total)):
            if tensor is not None and tensor.requires_grad:
                tensor.register_hook(reach(name))

    with (
        mock.patch.object(attention, "attention", recording_attend),
        mock.patch.object(norm, "rms_norm", recording_norm),
        mock.patch.object(norm, "fork", recording_fork),
    ):
        yield


def _launched(cfg: Config) -> Calls:
    """Calls of a step on this rank, and of the validation after it."""
    from phalanx.parallel.fault.signals import StopSignal
    from phalanx.parallel.runtime import start

    runtime, calls = start(seed=1, timeout=60, deterministic=False), Calls(set(), set())
    from phalanx.moe.run.start import make_trainer

    with tempfile.TemporaryDirectory() as cfg.run.dir, contextlib.redirect_stdout(io.StringIO()):
        trainer = make_trainer(cfg, runtime, StopSignal())
        with recorded(calls):
            trainer.fit()
    return calls


RUN = [
    *["data.sequence_length=64", "data.micro_batch=2", "data.global_batch=8", "run.steps=1"],
    *["run.eval_interval=1", "run.eval_batches=1", "run.save_interval=-1"],
]
ON_CPU = ["run.device=cpu", "precision=fp32"]
QK_NORM = ["model=tiny", "model.layers=2", "model.attention.qk_norm=true"]
LATENT = [
    *["model=tiny_deepseek", "model.layers=2", "model.attention.qk_nope_dim=64"],
    *["model.attention.qk_rope_dim=32", "model.attention.v_dim=64"],
]
WINDOWS = [
    *["model=tiny_gpt_oss", "model.layers=2", "model.attention.head_dim=32"],
    *["model.hidden=192", "model.moe.ffn=32"],
]


@pytest.mark.parametrize(
    ("overrides", "world"),
    [
        pytest.param(["model=tiny", "model.layers=2"], 1, id="grouped"),
        pytest.param([*QK_NORM, "model.attention.qk_norm_over=projection"], 1, id="projection"),
        pytest.param([*QK_NORM, "parallel.tensor=4"], 4, id="shared_heads"),
        pytest.param(WINDOWS, 1, id="windows"),
        pytest.param(
            [*WINDOWS, "model.attention.window_every=1", "parallel.context=2"], 2, id="chunks"
        ),
        pytest.param([*WINDOWS, "data=embedded", "data.document_mask=true"], 1, id="documents"),
        pytest.param(LATENT, 1, id="latent"),
        pytest.param(["model=tiny_qwen3_next"], 1, id="linear"),
    ],
)
def test_a_model_calls_what_is_listed(overrides, world):
    cfg = load([*overrides, *RUN, *ON_CPU])
    validate(cfg, world)
    ranks = run_distributed(_launched, world, cfg, timeout=300)
    called = tuple(set().union(*kind) for kind in zip(*ranks, strict=True))
    assert called == keys(*overrides, *RUN)
