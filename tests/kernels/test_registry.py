"""Choice of kernel backends, and its messages."""

import importlib
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from phalanx.configs.knobs import get
from phalanx.kernels.availability import FLASH_ATTN
from phalanx.kernels.core_attention.core import attention
from phalanx.kernels.registry import (
    Choice,
    Facts,
    KernelUnavailable,
    resolve,
    table,
)
from tests.kernels.problems import ACTIVATIONS, make, run
from tests.support.advice import advised, tried

CPU = Facts("cpu", None, torch.bfloat16, hidden=64, ffn=48, packages=frozenset(), compiles=True)
H200 = replace(CPU, device="cuda", capability=(9, 0), packages=frozenset({"triton"}))
B200 = replace(CPU, device="cuda", capability=(10, 0), ffn=128)
GPT_OSS = dict(activation="quick_geglu", activation_limit=7.0, activation_offset=1.0)
WITH_CUDNN = replace(B200, packages=frozenset({"triton", "nvidia_cudnn_frontend"}))
WITH_TE = replace(H200, packages=frozenset({"triton", "transformer_engine"}))
WITH_DSL = replace(H200, ffn=128, packages=frozenset({"triton", "nvidia_cutlass_dsl"}))
WITH_FA4 = replace(H200, packages=WITH_TE.packages | {"flash_attn_4"})
FA4_ALONE = replace(H200, packages=frozenset({"triton", "flash_attn_4"}))
WITH_QUACK = replace(H200, packages=WITH_FA4.packages | {"quack"})
A100 = replace(H200, capability=(8, 0))


@pytest.mark.parametrize(
    ("op", "facts", "backend"),
    [
        ("grouped_mlp", CPU, "reference"),
        ("grouped_mlp", replace(CPU, dtype=torch.float32), "reference"),
        ("grouped_mlp", replace(CPU, experts=32), "reference"),
        ("grouped_mlp", replace(CPU, experts=33), "torch"),
        ("grouped_mlp", replace(CPU, experts=33, dtype=torch.float32), "torch"),
        ("grouped_mlp", replace(CPU, experts=33, hidden=60), "reference"),
        ("grouped_mlp", replace(CPU, hidden=60), "reference"),
        ("grouped_mlp", replace(CPU, experts=33, hidden=60, dtype=torch.float32), "torch"),
        ("grouped_mlp", replace(CPU, ffn=50, dtype=torch.float32), "reference"),
        ("grouped_mlp", replace(CPU, dtype=torch.float64), "reference"),
        ("grouped_mlp", WITH_DSL, "fused"),
        ("grouped_mlp", replace(WITH_DSL, hidden=2880, ffn=2880, experts=1024), "fused"),
        ("grouped_mlp", replace(WITH_DSL, hidden=96), "torch"),
        ("grouped_mlp", replace(WITH_DSL, ffn=96), "torch"),
        ("grouped_mlp", replace(WITH_DSL, experts=1025), "torch"),
        ("grouped_mlp", replace(WITH_DSL, slots=16), "fused"),
        ("grouped_mlp", replace(WITH_DSL, slots=20), "torch"),
        ("grouped_mlp", replace(WITH_DSL, capability=(10, 0)), "torch"),
        ("grouped_mlp", replace(WITH_DSL, dtype=torch.float32), "reference"),
        ("grouped_mlp", replace(WITH_DSL, fp8=True, recipe="fp8_block"), "fused"),
        ("grouped_mlp", replace(WITH_DSL, fp8=True, recipe="fp8_block", wgrad="bf16"), "torch"),
        ("grouped_mlp", replace(CPU, ffn=128, packages=WITH_DSL.packages), "reference"),
        ("grouped_mlp", replace(H200, ffn=128), "torch"),
        ("grouped_mlp", H200, "torch"),
        ("grouped_mlp", replace(H200, capability=(10, 0)), "torch"),
        ("grouped_mlp", replace(H200, capability=(12, 0)), "reference"),
        ("grouped_mlp", replace(H200, dtype=torch.float32), "reference"),
        ("grouped_mlp", WITH_TE, "torch"),
        ("grouped_mlp", A100, "reference"),
        ("grouped_mlp", B200, "torch"),
        ("grouped_mlp", WITH_CUDNN, "cudnn"),
        ("grouped_mlp", replace(WITH_CUDNN, capability=(10, 3)), "cudnn"),
        ("grouped_mlp", replace(WITH_CUDNN, activation="swiglu"), "cudnn"),
        ("grouped_mlp", replace(WITH_CUDNN, **GPT_OSS), "cudnn"),
        ("grouped_mlp", replace(WITH_CUDNN, **GPT_OSS, activation_alpha=1.5), "torch"),
        ("grouped_mlp", replace(WITH_CUDNN, activation="swiglu", activation_limit=7.0), "torch"),
        ("grouped_mlp", replace(WITH_CUDNN, activation="squared_relu"), "torch"),
        ("grouped_mlp", replace(WITH_CUDNN, hidden=96), "torch"),
        ("grouped_mlp", replace(WITH_CUDNN, experts=1025), "torch"),
        ("grouped_mlp", replace(WITH_CUDNN, fp8=True), "torch"),
        ("grouped_mlp", replace(WITH_CUDNN, recipe="mxfp8"), "cudnn"),
        ("grouped_mlp", replace(WITH_CUDNN, recipe="nvfp4"), "cudnn"),
        ("grouped_mlp", replace(WITH_CUDNN, recipe="mxfp8", wgrad="bf16"), "torch"),
        (
            "grouped_mlp",
            replace(WITH_CUDNN, recipe="nvfp4", **GPT_OSS, activation_alpha=1),
            "cudnn",
        ),
        ("grouped_mlp", replace(WITH_CUDNN, recipe="mxfp8", activation="geglu"), "torch"),
        ("grouped_mlp", replace(WITH_CUDNN, dtype=torch.float32), "reference"),
        ("grouped_mlp", replace(WITH_CUDNN, capability=(9, 0)), "torch"),
        ("attention", CPU, "sdpa"),
        ("attention", replace(CPU, window=8), "sdpa"),
        ("attention", replace(CPU, sinks=True), "sdpa"),
        ("attention", H200, "sdpa"),
        ("attention", replace(H200, window=8), "flex"),
        ("attention", replace(H200, sinks=True), "flex"),
        ("attention", replace(H200, context=2), "flex"),
        ("attention", replace(H200, dtype=torch.float32), "flex"),
        ("attention", replace(H200, sinks=True, compiles=False), "reference"),
        ("attention", replace(H200, sinks=True, packages=frozenset()), "reference"),
        ("attention", replace(H200, sinks=True, head_dim=8, v_dim=16), "reference"),
        ("attention", WITH_TE, "te"),
        ("attention", replace(WITH_TE, sinks=True, window=8), "te"),
        ("attention", replace(WITH_TE, dtype=torch.float32), "flex"),
        ("attention", WITH_FA4, "fa4"),
        ("attention", replace(WITH_FA4, sinks=True, window=8, head_dim=64, v_dim=64), "fa4"),
        ("attention", replace(WITH_FA4, head_dim=192, v_dim=128), "fa4"),
        ("attention", replace(WITH_FA4, head_dim=64, v_dim=32), "te"),
        ("attention", replace(WITH_FA4, dtype=torch.float32), "flex"),
        ("attention", replace(WITH_FA4, capability=(10, 0)), "te"),
        ("attention", replace(WITH_FA4, context=2), "fa4"),
        ("attention", replace(WITH_FA4, documents=True), "fa4"),
        ("attention", replace(WITH_FA4, documents=True, head_dim=80, v_dim=80), "flex"),
        ("attention", replace(H200, documents=True), "flex"),
        ("attention", replace(CPU, documents=True), "sdpa"),
        ("attention", replace(WITH_FA4, documents=True, context=2), "flex"),
        ("attention", replace(CPU, documents=True, context=2), "sdpa"),
        ("attention", replace(WITH_TE, window=8, max_logits=True), "te"),
        ("attention", replace(WITH_TE, context=2), "te"),
        ("attention", replace(WITH_TE, context=2, max_logits=True), "flex"),
        ("attention", replace(WITH_FA4, context=2, window=8), "fa4"),
        ("attention", replace(WITH_FA4, context=2, sinks=True), "fa4"),
        ("attention", replace(FA4_ALONE, context=2), "fa4"),
        ("attention", replace(FA4_ALONE, context=2, sinks=True, window=8), "fa4"),
        ("attention", replace(CPU, packages=WITH_FA4.packages), "sdpa"),
        ("norm", CPU, "torch"),
        ("norm", H200, "torch"),
        ("norm", WITH_TE, "te"),
        ("norm", WITH_QUACK, "quack"),
        ("norm", replace(WITH_QUACK, norms=(2880, 128)), "quack"),
        ("norm", replace(WITH_QUACK, norms=(2880, 100)), "te"),
        ("norm", replace(WITH_QUACK, norms=(16384,)), "te"),
        ("norm", replace(WITH_QUACK, dtype=torch.float32), "te"),
        ("norm", replace(WITH_QUACK, capability=(10, 0)), "te"),
        ("norm", replace(CPU, packages=WITH_QUACK.packages), "torch"),
    ],
)
@pytest.mark.extras
def test_auto(op, facts, backend):
    assert resolve(op, "auto", facts).backend == backend


def test_auto_takes_what_has_fp8():
    assert resolve("grouped_mlp", "auto", replace(CPU, fp8=True)).backend == "reference"
    assert resolve("grouped_mlp", "auto", replace(WITH_DSL, fp8=True)).backend == "fused"


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
def test_recipes_of_blackwell_are_emulated_and_auto_says_so(recipe):
    here = replace(WITH_DSL, recipe=recipe)
    choice = resolve("grouped_mlp", "auto", here)
    assert choice.backend == "torch" and f"not fused: has no {recipe}" in choice.reason
    for backend in ("fused", "megatron"):
        why = f"={backend} cannot run here: has no {recipe}.*use kernels.backend=torch or"
        with pytest.raises(KernelUnavailable, match=why):
            resolve("grouped_mlp", backend, here)
    assert resolve("grouped_mlp", "auto", replace(CPU, recipe=recipe)).backend == "reference"


@pytest.mark.extras
def test_fp8_of_the_stock_layer_needs_transformer_engine():
    for facts, why in ((CPU, "needs CUDA"), (H200, "needs Transformer Engine: pip")):
        with pytest.raises(KernelUnavailable, match=f"fp8_block by Transformer Engine: {why}"):
            resolve("grouped_mlp", "megatron", replace(facts, fp8=True))
    assert resolve("grouped_mlp", "megatron", replace(WITH_TE, fp8=True)).backend == "megatron"


def test_auto_says_what_it_passed_over():
    reason = resolve("grouped_mlp", "auto", A100).reason
    assert "not fused: needs CUDA capability 9.x, not 8.0" in reason
    assert "not te: needs Transformer Engine" in reason
    assert "not torch: needs CUDA capability 9.x or 10.x, not 8.0" in reason
    assert "megatron" not in reason.replace("kernels=megatron", "")
    assert resolve("norm", "auto", WITH_QUACK).reason == "auto"
    assert "; not quack: needs QuACK: pip install flash-" in resolve("norm", "auto", WITH_TE).reason
    slower = "not torch: on a CPU slower than reference, which skips padding"
    assert slower in resolve("grouped_mlp", "auto", CPU).reason
    assert "slower" not in resolve("grouped_mlp", "auto", A100).reason


@pytest.mark.parametrize(
    ("op", "wanted", "facts", "message"),
    [
        (
            "grouped_mlp",
            "fused",
            H200,
            "kernels.backend=fused cannot run here: needs whole boxes of 64 channels: "
            "model.hidden=64 and model.moe.ffn=48 must be multiples of 64; use "
            "kernels.backend=torch or kernels.backend=auto",
        ),
        (
            "grouped_mlp",
            "fused",
            replace(H200, ffn=128),
            "kernels.backend=fused cannot run here: needs the compiler of its kernels: "
            "pip install 'nvidia-cutlass-dsl[cu13]==4.8.1'; use "
            "kernels.backend=torch or kernels.backend=auto",
        ),
        (
            "grouped_mlp",
            "fused",
            replace(WITH_DSL, experts=2048),
            "kernels.backend=fused cannot run here: needs at most 1024 experts on a rank, not "
            "2048: raise parallel.expert; use kernels.backend=torch or kernels.backend=auto",
        ),
        (
            "grouped_mlp",
            "cudnn",
            replace(WITH_CUDNN, capability=(9, 0)),
            "kernels.backend=cudnn cannot run here: needs CUDA capability 10.x, not 9.0; use "
            "kernels.backend=torch or kernels.backend=auto",
        ),
        (
            "grouped_mlp",
            "cudnn",
            B200,
            "kernels.backend=cudnn cannot run here: needs cuDNN's frontend: pip install "
            "nvidia-cudnn-frontend==1.32.0; use kernels.backend=torch or kernels.backend=auto",
        ),
        (
            "grouped_mlp",
            "torch",
            replace(CPU, hidden=60, ffn=44),
            "kernels.backend=torch cannot run here: needs rows of whole 16 bytes: model.hidden=60 "
            "and model.moe.ffn=44 must be multiples of 8; use "
            "kernels.backend=reference or kernels.backend=auto",
        ),
        (
            "attention",
            "flex",
            CPU,
            "kernels.attention=flex cannot run here: needs CUDA; use kernels.attention=sdpa or "
            "kernels.attention=auto",
        ),
        (
            "attention",
            "fa4",
            replace(H200, head_dim=64, v_dim=64),
            "kernels.attention=fa4 cannot run here: needs flash-attn-4: pip install "
            "flash-attn-4==4.0.0b36 quack-kernels==0.6.5; use kernels.attention=sdpa or "
            "kernels.attention=auto",
        ),
        (
            "attention",
            "fa4",
            replace(WITH_FA4, capability=(8, 0)),
            "kernels.attention=fa4 cannot run here: needs CUDA capability 9.0, not 8.0; use "
            "kernels.attention=te or kernels.attention=auto",
        ),
        (
            "attention",
            "fa4",
            replace(WITH_FA4, head_dim=20, v_dim=20),
            "kernels.attention=fa4 cannot run here: needs heads of 32 to 256 channels, in "
            "multiples of 32, not 20; use kernels.attention=te or kernels.attention=auto",
        ),
        (
            "norm",
            "te",
            H200,
            "kernels.norm=te cannot run here: needs Transformer Engine: pip install "
            "'transformer-engine[pytorch,core_cu13]==2.20.2'; use kernels.norm=torch or "
            "kernels.norm=auto",
        ),
    ],
)
def test_forced_choice_that_cannot_run(op, wanted, facts, message):
    with pytest.raises(KernelUnavailable) as e:
        resolve(op, wanted, facts)
    assert str(e.value) == message
    found = advised(message)
    assert len(found) == 2
    for (word,) in found:
        knob, _, _backend = word.partition("=")
        assert resolve(op, get(tried([f"{knob}={wanted}"], [word]), knob), facts)


@pytest.mark.parametrize("facts", [CPU, H200, WITH_TE, A100])
@pytest.mark.parametrize(
    ("op", "wanted"),
    [
        ("grouped_mlp", "megatron"),
        ("grouped_mlp", "reference"),
        ("attention", "reference"),
        ("norm", "torch"),
    ],
)
def test_forced_choice_that_always_runs(op, wanted, facts):
    choice = resolve(op, wanted, facts)
    assert (choice.op, choice.backend) == (op, wanted)
    assert choice.reason.endswith(f"={wanted}")


@pytest.mark.parametrize(
    ("op", "wanted", "message"),
    [
        ("router", "auto", "unknown op 'router': use one of grouped_mlp, attention, linear_att"),
        ("norm", "apex", "kernels.norm=apex is unknown: use one of quack, te, torch or auto"),
    ],
)
def test_unknown_names(op, wanted, message):
    with pytest.raises(ValueError, match=message):
        resolve(op, wanted, CPU)


def test_table_is_aligned():
    text = table([Choice("grouped_mlp", "torch", "auto"), Choice("norm", "te", "kernels.norm=te")])
    assert text.splitlines() == [
        "op           backend  reason",
        "grouped_mlp  torch    auto",
        "norm         te       kernels.norm=te",
    ]


def test_table_breaks_reasons_into_lines():
    reason = "auto; not fused: needs what is a long story to tell in a table; not te: needs CUDA 13"
    assert table([Choice("norm", "torch", reason)], width=50).splitlines() == [
        "op    backend  reason",
        "norm  torch    auto",
        "               not fused: needs what is a long",
        "                 story to tell in a table",
        "               not te: needs CUDA 13",
    ]
    for facts in (CPU, H200, replace(H200, dtype=torch.float32, sinks=True)):
        chosen = [resolve(op, "auto", facts) for op in ("grouped_mlp", "attention", "norm")]
        assert max(map(len, table(chosen).splitlines())) <= 96


def test_without_a_gpu_the_table_says_once_that_kernels_need_cuda():
    lines = table([resolve(op, "auto", CPU) for op in ("grouped_mlp", "attention", "norm")])
    assert lines.count("CUDA") == 1 and "left out: fused, cudnn, te, fa4, quack" in lines
    assert lines.splitlines()[-1].startswith("Kernels need CUDA, of which there is none here;")
    h200 = table([resolve(op, "auto", H200) for op in ("grouped_mlp", "attention", "norm")])
    assert "none here" not in h200


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("hidden", [32, 30])
def test_chosen_experts_run(dtype, hidden):
    backend = resolve("grouped_mlp", "auto", Facts("cpu", None, dtype, hidden=hidden, ffn=24))
    run(make(ACTIVATIONS[0], dtype, D=hidden), backend.backend)


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("window", [0, 4])
def test_chosen_attention_runs(sinks, window):
    backend = resolve(
        "attention", "auto", Facts("cpu", None, torch.float32, sinks=sinks, window=window)
    )
    q, k, v = torch.randn(1, 4, 8, 16), torch.randn(1, 2, 8, 16), torch.randn(1, 2, 8, 16)
    extra = torch.zeros(4) if sinks else None
    attention(q, k, v, scale=0.25, window=window, sinks_H=extra, backend=backend.backend)


def test_facts_know_this_machine():
    facts = Facts("cpu", None, torch.float32)
    assert ("triton" in facts.packages) == _imports("triton")
    assert ("nvidia_cutlass_dsl" in facts.packages) == _imports("cutlass")
    assert ("flash_attn_4" in facts.packages) == _imports("flash_attn.cute")


def test_an_older_flash_attn_is_not_version_4(tmp_path, monkeypatch):
    folder = tmp_path / "flash_attn"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise ImportError('not to be imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "flash_attn", raising=False)
    assert "flash_attn_4" not in Facts("cpu", None, torch.float32).packages


def test_limits_of_the_fused_kernels_are_theirs():
    from phalanx.kernels.sm90.experts import combine
    from phalanx.kernels.sm90.routing import plan

    for fact, most in {"experts": plan.MAX_EXPERTS, "slots": combine.MAX_SLOTS}.items():
        assert resolve("grouped_mlp", "auto", replace(WITH_DSL, **{fact: most})).backend == "fused"
        over = resolve("grouped_mlp", "auto", replace(WITH_DSL, **{fact: most + 1}))
        assert f"needs at most {most} experts" in over.reason


def test_the_compiler_to_install_is_the_pinned_one():
    page = Path(__file__).resolve().parents[2] / "pyproject.toml"
    extras = tomllib.loads(page.read_text())["project"]["optional-dependencies"]
    wanted = [*extras["compile"], *extras["train"]]
    reason = resolve("grouped_mlp", "auto", replace(H200, ffn=128)).reason
    assert any(f"pip install '{one}'" in reason for one in wanted)
    for one in FLASH_ATTN.split():
        assert one in wanted


def test_what_is_slower_runs_where_it_is_asked_for():
    assert resolve("grouped_mlp", "torch", CPU) == Choice(
        "grouped_mlp", "torch", "kernels.backend=torch"
    )


def test_import_is_light():
    code = (
        "import sys, torch; before = set(sys.modules); import phalanx.kernels.registry as r;"
        "f = r.Facts('cuda', (9, 0), torch.bfloat16);"
        "[r.resolve(op, 'auto', f) for op in ('grouped_mlp', 'attention', 'norm')];"
        "print(*sorted({m.split('.')[0] for m in set(sys.modules) - before}))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "phalanx" in out.stdout.split()
    assert not {"triton", "transformer_engine", "megatron", "torch"} & set(out.stdout.split())


def _imports(name: str) -> bool:
    try:
        importlib.import_module(name)
    except ImportError:
        return False
    return True
