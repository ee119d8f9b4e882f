"""Estimated peaks against measured ones."""

import pytest

from phalanx.configs.formats import fp8_row
from phalanx.configs.load import load
from phalanx.configs.records import launch, own
from phalanx.configs.schema import Config
from phalanx.configs.validate import validate
from phalanx.moe.plan.cost.activations import Activations, sizes
from phalanx.moe.plan.cost.stages import exchange_bytes, stage_memory
from phalanx.moe.plan.cost.weights import cached_gradient_bytes
from phalanx.moe.plan.described import resolved

GIB = 2**30
DEEPSEEK = (
    "model=deepseek_v3_l4 model.moe.experts=16 model.moe.router.groups=1 "
    "model.moe.router.group_topk=1"
)
GPT_OSS = "model=gpt_oss_20b model.layers=4"
COMMON = (
    "run=bench data=synthetic data.sequence_length=4096 data.micro_batch=1 data.global_batch=2 "
    "model.moe.router.force_balance=true"
)
UNFUSED = "kernels.gradient_accumulation_fusion=false"
"""As Megatron-Core's layer and the dense layers around it trained at that commit."""
# One H200, torch 2.11, Transformer Engine 2.20.2, commit e7667c9 with the cross entropy of 7588848:
# GiB allocated before a step, and at its peak (torch.cuda.max_memory_allocated).
MEASURED = [
    (f"{DEEPSEEK} kernels=torch", 90.925, 97.729),
    (f"{DEEPSEEK} kernels=megatron {UNFUSED}", 88.158, 97.836),
    (f"{GPT_OSS} kernels=torch", 75.858, 78.813),
    (f"{GPT_OSS} kernels=fused", 75.858, 78.813),
    (f"{GPT_OSS} kernels=megatron {UNFUSED}", 75.186, 80.626),
    (f"{GPT_OSS} kernels=torch data.micro_batch=2", 75.857, 81.757),
    (f"{GPT_OSS} kernels=torch run.recompute=full", 75.858, 77.812),
]


def known(overrides: list[str], world: int) -> Config:
    cfg = load(overrides)
    validate(cfg, world)
    return resolved(cfg, world, 8)


@pytest.mark.parametrize(("overrides", "before", "peak"), MEASURED, ids=lambda x: str(x)[:60])
def test_peaks_of_single_steps(overrides: str, before: float, peak: float) -> None:
    """Also what is not parameters and optimizer, which would hide an error in the rest."""
    (m,) = stage_memory(known([*COMMON.split(), *overrides.split()], 1), 1)
    assert (m.weights.device_bytes + m.cached) / GIB == pytest.approx(before, rel=0.01)
    assert (m.saved + m.backward) / GIB == pytest.approx(peak - before, rel=0.05)
    assert m.peak / GIB == pytest.approx(peak, rel=0.01)


def test_a_stage_may_have_no_layer() -> None:
    layout = ["model=tiny", "parallel.pipeline=3", "parallel.pipeline_layout='E|t*4|L'"]
    embedding, layers, output = stage_memory(known(layout, 3), 3)
    assert embedding.saved == embedding.backward == 0 < embedding.weights.device_bytes
    assert embedding.peak < layers.peak and output.saved > 0


@pytest.mark.parametrize("name", own())
def test_peaks_of_records(name: str) -> None:
    """Within 10 % of each record; within 2 % where it says how many expert rows there were.

    Where it does not, though the run had to grow them (`reruns`), the record's routing had
    collapsed onto few experts (`load_max_at_50` near the most there can be), so that the case of
    one rank that gets all tokens is what compares.
    """
    record, tolerance = own()[name], 0.1
    world, overrides = launch(record.command)
    cfg, rows = known(overrides, world), None
    budgeted = not record.system.endswith("megatron")  # which takes as many rows as come
    if budgeted and record.capacity_factor is not None:
        cfg.parallel.capacity_factor, tolerance = record.capacity_factor, 0.02
    elif record.reruns:
        rows = sizes(cfg, world).worst_rows
    cfg.kernels.norm = "te"  # as `auto` was when they were made
    if cfg.parallel.dispatch == "auto":  # of commits that had no other
        cfg.parallel.dispatch = "local" if world == 1 else "alltoall"
    (m,) = stage_memory(cfg, world, rows)
    cached = 0 if "transformer-engine" in record.versions else cached_gradient_bytes(cfg, world)[0]
    assert (m.peak - cached) / GIB == pytest.approx(record.peak_memory_gib, rel=tolerance)


def test_experts_of_one_rank_cost_most_when_all_tokens_go_there() -> None:
    cfg = known(["experiment=gpt_oss_20b_8gpu", "kernels=torch"], 8)
    s = sizes(cfg, 8)
    assert s.rows == 1.5 * 4096 * 4 and s.worst_rows == 8 * 4096 * 4
    even, worst = (stage_memory(cfg, 8, rows)[0].saved for rows in (None, s.worst_rows))
    h = 24 * 2 * 2 * 2880
    assert worst - even == (s.worst_rows - s.rows) * (h + 24 * 8)


def test_what_a_layer_keeps_for_its_backward_pass() -> None:
    """Written out once for a layer of GPT-OSS-20B on one rank, in multiples of a token's row."""
    cfg = known([*COMMON.split(), *GPT_OSS.split(), "kernels=fused"], 1)
    token = (
        5 * 2 * 2880  # two norms in and out, output of attention with its bias
        + 2 * (64 + 8 + 8 + 64) * 64  # query, key, value, output
        + 4 * 64  # statistics of the softmax
        + 4 * (2 * 2 * 2880 + 8)  # h and index of its four expert rows
        + 8 * 32
        + 16 * 4
        + 4 * 4  # scores, probabilities, places
    )
    assert Activations(cfg, 1).moe_layer().saved == 4096 * token


@pytest.mark.parametrize("experts", ["torch", "fused"])
def test_what_a_layer_keeps_in_fp8(experts: str) -> None:
    """A copy of x in FP8, as the router keeps it in bf16; h in FP8 if that is set."""
    base = [*COMMON.split(), *GPT_OSS.split(), f"kernels={experts}"]
    saved = {}
    for name in ("", "fp8_block", "hidden=fp8", "bf16_first_layers=2"):
        given = ["precision=fp8_block", "precision.dense=bf16"] if name else []
        given += [f"precision.{name}"] if "=" in name else []
        cfg = known([*base, *given], 1)
        saved[name] = stage_memory(cfg, 1)[0].saved
    row, h = 2880 + 4 * 23, 4 * 2 * 2880
    assert saved["fp8_block"] - saved[""] == 4 * 4096 * row
    assert saved["bf16_first_layers=2"] - saved[""] == 2 * 4096 * row
    assert saved["fp8_block"] - saved["hidden=fp8"] == 4 * 4096 * (2 * h - (h + 4 * 2 * 4 * 23))
    if experts == "torch":  # which alone has weight gradients in bf16
        given = ["precision=fp8_block", "precision.dense=bf16", "precision.wgrad=bf16"]
        assert stage_memory(known([*base, *given], 1), 1)[0].saved == saved[""]


@pytest.mark.parametrize("model", ["moonlight_16b_a3b", "deepseek_v3_l4", "qwen3_30b_a3b"])
def test_what_dense_linear_layers_keep_in_fp8(model: str) -> None:
    """Inputs: of the projections of attention, of shared experts, and of the dense MLP."""
    base = [*COMMON.split(), f"model={model}", "kernels=torch", "precision=fp8_block"]
    fp8, bf16 = (Activations(known([*base, f"precision.dense={d}"], 1), 1) for d in ("fp8", "bf16"))
    m, act = fp8._cfg.model, 2
    a, x = m.attention, fp8_row(m.hidden)
    if a.kind == "gqa":
        attention = x - 2 * m.hidden + fp8_row(a.heads * a.head_dim)
    else:  # both down-projections keep their input
        ranks = [a.q_lora_rank, a.kv_lora_rank] if a.q_lora_rank else [a.kv_lora_rank]
        attention = 2 * x - 2 * m.hidden + fp8_row(a.heads * a.v_dim)
        attention += sum(fp8_row(rank) - 2 * rank for rank in ranks)
    # Activated half, linear half and product are made again.
    shared = x - 2 * (act + 1) * m.moe.shared_ffn if m.moe.shared_ffn else 0
    assert fp8.moe_layer().saved - bf16.moe_layer().saved == 4096 * (attention + shared)
    mlp = x - 2 * m.hidden - 2 * (act + 1) * m.dense_ffn
    assert fp8.dense_layer().saved - bf16.dense_layer().saved == 4096 * (attention + mlp)
    assert fp8.dense_layer(fp8=False) == bf16.dense_layer()
    wide = Activations(known([*base, "precision.wgrad=bf16"], 1), 1)
    made_again = 2 * (act + 1) * m.moe.shared_ffn
    assert bf16.moe_layer().saved - wide.moe_layer().saved == 4096 * (made_again + x)


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
def test_what_emulated_recipes_keep(recipe: str) -> None:
    """Inputs as they are in bf16; dense MLPs and shared experts make their activations again."""
    base = [*COMMON.split(), "model=moonlight_16b_a3b", "kernels=torch"]
    narrow, wide = (Activations(known([*base, f"precision={p}"], 1), 1) for p in (recipe, "bf16"))
    again, m = 2 * 3, narrow._cfg.model
    assert wide.moe_layer().saved - narrow.moe_layer().saved == 4096 * again * m.moe.shared_ffn
    assert wide.dense_layer().saved - narrow.dense_layer().saved == 4096 * again * m.dense_ffn
    assert narrow.dense_layer(fp8=False) == wide.dense_layer()


def test_received_tokens_are_kept_in_fp8() -> None:
    given = ["experiment=gpt_oss_20b_8gpu", "kernels=torch", "parallel.dispatch=alltoall"]
    given += ["parallel.overlap_microbatches=off"]
    fp8 = ["precision=fp8_block", "precision.dense=bf16"]
    before, after = (
        Activations(known([*given, *more], 8), 8).moe_layer().saved for more in ([], fp8)
    )
    assert before - after == 8 * 4096 * (2 * 2880 - (2880 + 4 * 23))


@pytest.mark.parametrize("how", ["norm", "mla_up", "attention", "mlp", "expert_h", "moe", "full"])
def test_recomputation_never_costs_memory(how: str) -> None:
    base = ["experiment=moonlight_8gpu"]
    (plain,), (less,) = (
        stage_memory(known([*base, f"run.recompute={r}"], 8), 8) for r in ("none", how)
    )
    assert less.peak < plain.peak and less.saved < plain.saved


@pytest.mark.parametrize("knob", ["eval_interval", "sample_every"])
def test_a_validation_cannot_use_the_memory_of_captured_steps(knob: str) -> None:
    base = ["experiment=gpt_oss_20b_8gpu", "run.eval_interval=0"]
    peaks = {
        (graph, interval): stage_memory(
            known([*base, f"run.graph={graph}", f"run.{knob}={interval}"], 8), 8
        )[0].peak
        for graph in ("auto", "off")
        for interval in (0, 500)
    }
    logits = 2 * 4096 * 201_088
    assert peaks["auto", 0] == peaks["off", 0] == peaks["off", 500]
    assert logits < peaks["auto", 500] - peaks["auto", 0] < 1.1 * logits


def test_received_tokens_are_kept_as_the_knob_says() -> None:
    base = ["experiment=gpt_oss_20b_8gpu"]
    again, keep = (known([*base, f"parallel.save_x={x}"], 8) for x in ("redispatch", "keep"))
    assert again.parallel.dispatch == "symm"
    more = stage_memory(keep, 8)[0].saved - stage_memory(again, 8)[0].saved
    assert more == 24 * 8 * 4096 * 2 * 2880
    assert exchange_bytes(again, 8) >= 3 * 8 * 4096 * 2 * 2880


def test_places_of_documents_take_scratch() -> None:
    """128 places of 128 rows in fp32: gradients of 32 query heads, and of 4 that they share."""
    cfg = load(["experiment=qwen3_30b_8gpu", "data=embedded", "kernels.attention=fa4"])
    assert (cfg.data.sequence_length, cfg.data.micro_batch, cfg.parallel.tensor) == (4096, 1, 1)

    def cached(mask: bool, places: int = 0, attention: str = "fa4") -> int:
        cfg.data.document_mask, cfg.data.max_documents = mask, places
        cfg.kernels.attention = attention
        return stage_memory(resolved(cfg, 8, 8), 8)[0].cached

    more = 128 * 128 * 4 * (32 + 2 * 4) * 128
    assert cached(True) - cached(False) == more
    assert cached(True, places=32) - cached(False) == more // 4
    assert cached(True, attention="flex") == cached(False, attention="flex")
