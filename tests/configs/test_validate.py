"""The rules between knobs: what is refused, and that the named override fixes it."""

import copy
import random
import shlex
from dataclasses import replace

import pytest

from phalanx.configs.knobs import spelled
from phalanx.configs.load import load
from phalanx.configs.schema import Config
from phalanx.configs.tables.transports import TRANSPORTS
from phalanx.configs.validate import ConfigError, validate

MASK = "data.document_mask=true"
FP8 = "precision=fp8_block"


def problems(cfg: Config, world: int = 1) -> list[str]:
    try:
        validate(cfg, world)
    except ConfigError as error:
        return str(error).splitlines()
    return []


def named(line: str) -> list[str]:
    """The overrides that a problem names, as the words that a shell makes of them."""
    return shlex.split(line.rpartition("; set ")[2])


@pytest.mark.parametrize(
    ("overrides", "world", "problem", "fix"),
    [
        ("model.attention.kind=gqaa", 1, "is not one of gqa, mla", "model.attention.kind=gqa"),
        ("kernels.backend=cutlass", 1, "is not one of", "kernels.backend="),
        ("model.layers=0", 1, "must be at least 1", "model.layers=2"),
        ("optim.lr=0", 1, "must be above 0", "optim.lr=0.003"),
        ("optim.lr=nan", 1, "must be finite", "optim.lr="),
        ("optim.beta1=1", 1, "must be below 1", "optim.beta1=0.9"),
        ("optim.clip_grad=-1", 1, "must be at least 0", "optim.clip_grad=1.0"),
        ("parallel.world_size=-8", 1, "must be at least 0", "parallel.world_size=0"),
        ("run.save_interval=-2", 1, "must be at least -1", "run.save_interval=0"),
        # attention
        ("model.attention.kv_heads=3", 1, "does not divide heads=4", "kv_heads=2"),
        ("model.attention.head_dim=33", 1, "must be even", "head_dim=34"),
        ("model=tiny_deepseek model.attention.qk_rope_dim=15", 1, "even", "qk_rope_dim=16"),
        ("model=tiny_deepseek model.attention.sinks=true", 1, "is of gqa", "sinks=false"),
        ("model=tiny_deepseek model.attention.window=8", 1, "is of gqa", "window=0"),
        ("model.attention.yarn.beta_fast=0.5", 1, "below beta_slow", "beta_fast=32.0"),
        ("model=tiny_deepseek model.attention.qkv_bias=true", 1, "is of gqa", "qkv_bias=false"),
        ("model=tiny_deepseek model.attention.rotary_dim=8", 1, "is of gqa", "rotary_dim=0"),
        ("model.attention.rotary_dim=7", 1, "must be even", "rotary_dim=8"),
        ("model.attention.rotary_dim=34", 1, "is more than head_dim=32", "rotary_dim=0"),
        (
            "model.attention.rotary_dim=16 model.attention.yarn.factor=4",
            1,
            "is not possible with YaRN",
            "rotary_dim=0",
        ),
        ("model.attention.qk_norm_over=all", 1, "is not one of head, projection", "qk_norm_over="),
        (
            "model.attention.qk_norm_over=projection",
            1,
            "needs qk_norm=true",
            "qk_norm_over=head",
        ),
        (
            "model.attention.qk_norm=true model.attention.qk_norm_over=projection "
            "parallel.tensor=2",
            2,
            "would split the heads",
            "parallel.tensor=1",
        ),
        (
            "model=tiny_deepseek model.attention.output_gate=true",
            1,
            "is of gqa",
            "output_gate=false",
        ),
        # linear attention
        (
            "model.linear_attention.full_attention_interval=0",
            1,
            "must be at least 1",
            "full_attention_interval=1",
        ),
        ("model.linear_attention.key_heads=0", 1, "must be at least 1", "key_heads=16"),
        (
            "model=tiny_qwen3_next model.linear_attention.key_heads=3",
            1,
            "does not divide value_heads=4",
            "key_heads=2",
        ),
        (
            "model=tiny_qwen3_next parallel.context=4",
            4,
            "x tensor=1 does not divide model.linear_attention.key_heads=2;",
            "parallel.context=2",
        ),
        (
            "model=tiny_qwen3_next parallel.context=2 parallel.tensor=2 "
            "model.linear_attention.value_heads=2",
            4,
            "x tensor=2 does not divide model.linear_attention.key_heads=2, "
            "model.linear_attention.value_heads=2;",
            "parallel.context=1",
        ),
        (
            "model=tiny_qwen3_next parallel.context=6 model.linear_attention.key_heads=8 "
            "model.linear_attention.value_heads=8 data.sequence_length=48",
            6,
            "x tensor=1 does not divide model.linear_attention.key_heads=8",
            "parallel.context=2",
        ),
        (
            "model=tiny_qwen3_next model.bias=true model.moe.shared_ffn=0 "
            "model.moe.shared_gate=false",
            1,
            "is not possible with linear attention",
            "model.bias=false",
        ),
        (
            "model=tiny_qwen3_next parallel.tensor=4",
            4,
            "does not divide model.linear_attention.key_heads=2",
            "parallel.tensor=2",
        ),
        ("model.moe.shared_gate=true", 1, "needs shared experts", "shared_gate=false"),
        (
            "model=tiny_qwen3_next precision=fp32 run.graph=full_iteration",
            1,
            "linear attention in fp32 is that of torch",
            "run.graph=auto",
        ),
        # experts and router
        ("model.moe.top_k=9", 1, "more than experts=8", "model.moe.top_k=8"),
        ("model.moe.router.groups=3", 1, "does not divide experts=8", "router.groups=2"),
        ("model.moe.router.group_topk=2", 1, "more than groups=1", "group_topk=1"),
        ("model.moe.router.rounding=even", 1, "is not one of none, nearest", "rounding="),
        ("model.moe.router.rounding_tile=0", 1, "must be at least 1", "rounding_tile=128"),
        (
            "model.moe.router.rounding=up model.moe.router.force_balance=true",
            1,
            "not possible with force_balance",
            "model.moe.router.rounding=none",
        ),
        (
            "model.moe.router.replay=a model.moe.router.force_balance=true",
            1,
            "not possible with replay",
            "model.moe.router.force_balance=false",
        ),
        (
            "model.moe.router.replay=a model.moe.router.rounding=down",
            1,
            "not possible with replay",
            "model.moe.router.rounding=none",
        ),
        (
            "run.record_routing=a kernels=megatron",
            1,
            "not possible with kernels.backend=megatron",
            "run.record_routing=",
        ),
        ("model.moe.router.replay=s3://a/b", 1, "is an address", "model.moe.router.replay="),
        (
            "model.moe.router.rounding=nearest kernels=megatron",
            1,
            "not possible with kernels.backend=megatron",
            "model.moe.router.rounding=none",
        ),
        (
            "parallel.expert_replication=2 kernels=megatron",
            2,
            "not possible with",
            "parallel.expert_replication=0",
        ),
        (
            "parallel.expert_replication=2 kernels=cudnn",
            2,
            "not possible with",
            "parallel.expert_replication=0",
        ),
        (
            "parallel.expert_replication=1 parallel.dispatch=deepep",
            2,
            "not possible with parallel.dispatch=deepep, only with symm or hier or alltoall",
            "parallel.expert_replication=0",
        ),
        (
            "parallel.expert_replication=1 model.moe.experts=16 parallel.expert=16 "
            "parallel.dispatch=symm",
            16,
            "serves 512 experts on 8 ranks, not 16 on 16",
            "parallel.expert_replication=0",
        ),
        (
            "parallel.expert_replication=-1",
            1,
            "must be at least 0",
            "parallel.expert_replication=0",
        ),
        (
            "parallel.expert_replication=some",
            1,
            "is not one of auto, and no number",
            "parallel.expert_replication=auto",
        ),
        ("kernels.sm_margin.wgrad=-8", 1, "must be at least 0", "kernels.sm_margin.wgrad=0"),
        (
            "model.moe.router.groups=8 model.moe.top_k=3",
            1,
            "leaves 1 expert to choose top_k=3 from",
            "group_topk=3",
        ),
        ("model.moe.router.bias_rate=1e-3", 1, "needs score=sigmoid", "bias_rate=0"),
        (
            "model=tiny_deepseek model.moe.router.softmax_over=topk",
            1,
            "needs score=softmax",
            "softmax_over=all",
        ),
        (
            "model.moe.router.softmax_over=topk model.moe.top_k=1",
            1,
            "gives one expert (top_k=1) the weight 1",
            "model.moe.router.softmax_over=all",
        ),
        ("model.moe.dense_layers=5", 1, "more than layers=4", "dense_layers=4"),
        ("model=tiny_gpt_oss model.moe.shared_ffn=64", 1, "shared experts", "model.bias=false"),
        (
            "model.moe.activation=squared_relu model.moe.activation_limit=7",
            1,
            "needs a gated activation",
            "activation_limit=0",
        ),
        # layout
        ("parallel.tensor=3", 6, "does not divide model.vocab_size=256", "parallel.tensor=2"),
        ("parallel.tensor=2", 3, "world_size=3", "parallel.tensor=1"),
        (
            "parallel.tensor=4 model.attention.kv_heads=4 model.attention.heads=4",
            6,
            "world_size=6",
            "parallel.tensor=2",
        ),
        (
            "model=tiny_deepseek parallel.tensor=8 data.sequence_length=64",
            8,
            "heads=4",
            "parallel.tensor=4",
        ),
        (
            "parallel.context=4 data.micro_batch=1",
            6,
            "does not divide 6 ranks",
            "parallel.context=3",
        ),
        ("parallel.pipeline=4", 6, "does not divide 6 ranks", "parallel.pipeline=2"),
        (
            "parallel.pipeline=3 data.global_batch=32",
            6,
            "does not divide model.layers=4",
            "parallel.pipeline=2",
        ),
        ("parallel.virtual_pipeline=2", 2, "needs more than one stage", "virtual_pipeline=1"),
        (
            "parallel.pipeline=2 parallel.virtual_pipeline=3",
            2,
            "the 2 layers of a stage",
            "virtual_pipeline=2",
        ),
        ("parallel.expert=3", 6, "must divide model.moe.experts=8", "parallel.expert=2"),
        ("parallel.expert=4", 2, "the 2 ranks of a stage", "parallel.expert=2"),
        ("parallel.expert=2 parallel.pipeline=2", 2, "the 1 rank of a stage", "expert=1"),
        ("parallel.dispatch=local", 2, "the experts are on 2 ranks", "dispatch=alltoall"),
        (
            "parallel.dispatch=alltoall parallel.comm_sms=16",
            2,
            "parallel.comm_sms=16 has no effect with parallel.dispatch=alltoall",
            "parallel.comm_sms=auto",
        ),
        ("parallel.comm_sms=-1", 2, "must be at least 0", "parallel.comm_sms=0"),
        ("parallel.comm_sms=all", 2, "is not one of auto, and no number", "comm_sms=auto"),
        ("parallel.comm_sms=3000000000", 2, "must be at most", "parallel.comm_sms=auto"),
        ("data.micro_batch=5", 2, "micro_batch=5 x 2 data parallel ranks", "data.global_batch=40"),
        (
            "parallel.pipeline=2 parallel.virtual_pipeline=2 data.global_batch=12",
            2,
            "makes 3 micro-batches",
            "data.global_batch=16",
        ),
        ("parallel.tensor=2 data.sequence_length=33", 2, "multiple of 2", "sequence_length=34"),
        ("parallel.context=2 data.sequence_length=34", 2, "multiple of 4", "sequence_length=36"),
        (
            "parallel.context=2 parallel.tensor=4 model.attention.heads=4 data.sequence_length=12",
            8,
            "multiple of 8",
            "sequence_length=16",
        ),
        (
            "parallel.pipeline=2 parallel.pipeline_layout='Ett|tL'",
            2,
            "holds 1 E, 3 t, 0 m",
            "pipeline_layout=",
        ),
        (
            "parallel.pipeline=2 parallel.pipeline_layout='Et|t|t|tL'",
            2,
            "has 4 chunks",
            "pipeline_layout=",
        ),
        (
            "parallel.pipeline=2 parallel.pipeline_layout='Ett|xttL'",
            2,
            "unknown letters x",
            "pipeline_layout=",
        ),
        (
            "model=tiny_deepseek parallel.pipeline=2 parallel.virtual_pipeline=2 "
            "parallel.pipeline_layout='Ett|tt|m|L'",
            2,
            "has m in chunk 3",
            "pipeline_layout=",
        ),
        (
            "model=tiny_deepseek model.mtp_layers=2 parallel.pipeline=2 "
            "parallel.pipeline_layout='Ettttm|mL'",
            2,
            "spreads the m",
            "pipeline_layout=",
        ),
        # data
        ("model.vocab_size=100", 1, "too small for bytes", "model.vocab_size=256"),
        ("data.split=all", 1, "must be weights", 'data.split="98,2"'),
        ("data.split=1 run.eval_interval=5", 1, "validates on nothing", "run.eval_interval=0"),
        ("data=indexed", 1, "names no .bin/.idx files", "data.blend=[prefix]"),
        ("data.blend=[a]", 1, "is not read with data.source=embedded", "data.source=indexed"),
        ("data=indexed data.blend=[0.5,a,b]", 1, "weights and prefixes in turn", "data.blend="),
        ("data=indexed data.blend=[a,0.5]", 1, "weights and prefixes in turn", "data.blend="),
        ("data=indexed data.blend=[0,a,0.0,b]", 1, "a weight above 0", "data.blend="),
        ("data.max_documents=8", 1, "needs data.document_mask=true", "data.max_documents=0"),
        (f"{MASK} data=synthetic", 1, "have none", "data.document_mask=false"),
        (
            f"{MASK} parallel.context=2 kernels.attention=fa4",
            2,
            "in sequences that ranks share",
            "kernels.attention=auto",
        ),
        (f"{MASK} kernels.attention=te", 1, "end inside a sequence", "kernels.attention=auto"),
        (
            f"{MASK} model=tiny_deepseek",
            1,
            "makes one, and model.moe.router.seq_aux_loss is of each",
            "data.micro_batch=1",
        ),
        # optimizer, run, kernels
        ("optim.min_lr=1", 1, "is above lr=0.002", "optim.min_lr=0.002"),
        ("optim.decay_steps=10", 1, "within the warm-up of 10 steps", "optim.decay_steps=11"),
        (
            "optim.schedule=WSD optim.warmup_steps=95 run.steps=100",
            1,
            "reaches into the last tenth of 100 steps",
            "optim.warmup_steps=90",
        ),
        (
            "optim.schedule=WSD optim.warmup_steps=95 optim.decay_steps=95",
            1,
            "within the warm-up of 95 steps",
            "optim.decay_steps=106",
        ),
        ("optim.moments=bf16 optim.beta2=0.999", 1, "rounds decay away", "optim.beta2=0.99"),
        ("optim.kind=mun", 1, "is not one of adamw, muon", "optim.kind=muon"),
        ("optim=muon optim.momentum=1", 1, "must be below 1", "optim.momentum=0.95"),
        (
            "optim=muon optim.moments=bf16 optim.momentum=0.995",
            1,
            "rounds decay away",
            "optim.momentum=0.99",
        ),
        (
            "optim=muon parallel.tensor=2 model.attention.kv_heads=1",
            2,
            "updates whole",
            "parallel.tensor=1",
        ),
        ("optim=muon optim.ns_steps=0", 1, "must be at least 1", "optim.ns_steps=5"),
        ("optim.qk_clip=-1", 1, "must be at least 0", "optim.qk_clip=0"),
        ("optim.qk_clip=inf", 1, "must be finite", "optim.qk_clip=0.0"),
        ("optim.max_logit_every=-1", 1, "must be at least 0", "optim.max_logit_every=0"),
        (
            "optim.qk_clip=100 model.attention.qk_norm=true",
            1,
            "in front of a norm that undoes it",
            "optim.qk_clip=0",
        ),
        (
            "optim.qk_clip=100 model.linear_attention.full_attention_interval=5",
            1,
            "all layers have linear attention",
            "optim.qk_clip=0",
        ),
        (
            "optim.max_logit_every=5 kernels.attention=te parallel.context=2",
            2,
            "leaves out the largest logits",
            "kernels.attention=auto",
        ),
        ("optim.moments=fp16", 1, "is not one of fp32, bf16", "optim.moments="),
        ("run.recompute=norms", 1, "has 'norms', none of norm, mla_up", "run.recompute=[norm]"),
        ("run.recompute=[norm,mlp,norm]", 1, "names one twice", "run.recompute=[norm,mlp]"),
        ("run.recompute=[norm,full]", 1, "has norm in full already", "run.recompute=[full]"),
        ("run.recompute=[moe,expert_h]", 1, "expert_h in moe", "run.recompute=[moe]"),
        ("run.recompute=[mla_up]", 1, "is of model.attention.kind=mla", "run.recompute=[]"),
        ("run.recompute=[moe_act,mlp]", 1, "always do it", "run.recompute=[mlp]"),
        ("run.recompute=expert_h kernels=megatron", 1, "not of Megatron", "run.recompute=[]"),
        ("run.offload=[norm]", 1, "has 'norm', none of residual, att", "run.offload=[]"),
        ("run.offload=expert_h kernels=megatron", 1, "not of Megatron", "run.offload=[]"),
        ("run.offload=attention parallel.context=2", 2, "is gathered", "run.offload=[]"),
        (
            "run.offload=[residual,expert_h] run.recompute=moe",
            1,
            "moved and computed again (run.recompute=moe)",
            "run.offload=[residual]",
        ),
        ("run.offload=[attention] run.recompute=full", 1, "moved and computed", "offload=[]"),
        ("run.name=a/b", 1, "name of one folder", "run.name=tiny"),
        ("run.profile=[3]", 1, "[first,last] within steps 1 to 80", "run.profile=[10,12]"),
        ("run.profile=[5,200]", 1, "[first,last] within steps 1 to 80", "run.profile=[10,12]"),
        ("run.device=cpu kernels=te", 1, "needs CUDA", "kernels.attention=auto"),
        ("precision=fp32 kernels=fused", 1, "needs bf16 on CUDA", "precision.recipe=bf16"),
        ("precision=fp32 parallel.grad_dtype=bf16", 1, "would round", "grad_dtype=fp32"),
        # fp8_block
        (
            "precision.hidden=fp8",
            1,
            "is a switch of fp8_block, and precision is bf16",
            "hidden=bf16",
        ),
        ("precision=fp32 precision.dense=bf16", 1, "precision is fp32", "precision.dense=fp8"),
        (f"{FP8} kernels=megatron run.device=cpu", 1, "needs CUDA", "kernels.backend=auto"),
        (f"{FP8} kernels=megatron precision.wgrad=bf16", 1, "not possible", "wgrad=fp8"),
        (f"{FP8} kernels=megatron precision.weights=scratch", 1, "not possible", "weights=auto"),
        (
            f"{FP8} kernels=megatron precision.bf16_last_layers=3 parallel.pipeline=2",
            2,
            "more than the 2 layers of a stage",
            "precision.bf16_last_layers=2",
        ),
        (f"{FP8} precision.bf16_first_layers=4", 1, "none of model.layers=4", "first_layers=3"),
        (
            f"{FP8} precision.bf16_first_layers=2 precision.bf16_last_layers=2",
            1,
            "leaves none of model.layers=4 in FP8",
            "precision.bf16_first_layers=1",
        ),
        (
            f"{FP8} precision.dispatch=fp8",
            2,
            "parallel.dispatch=auto, which may take hier, only by symm or alltoall;",
            "precision.dispatch=bf16",
        ),
        *[
            (
                f"{FP8} precision.dispatch=fp8 parallel.dispatch={name}{replication}",
                2,
                f"cannot travel by parallel.dispatch={name}, only by symm or alltoall;",
                "precision.dispatch=bf16",
            )
            for name, replication in (
                ("deepep", ""),
                ("hier", ""),
                ("hier", " parallel.expert_replication=2"),
            )
        ],
        # mxfp8 and nvfp4
        *[
            (f"precision={recipe} kernels={k}", 1, f"has no {recipe}", "kernels.backend=auto")
            for recipe in ("mxfp8", "nvfp4")
            for k in ("fused", "megatron")
        ],
        (
            "precision=mxfp8 precision.hidden=fp8",
            1,
            "is a switch of fp8_block, and precision is mxfp8",
            "precision.hidden=bf16",
        ),
        (
            f"{FP8} precision.stochastic_rounding=false",
            1,
            "is a switch of nvfp4, and precision is fp8_block",
            "precision.stochastic_rounding=true",
        ),
        (
            "precision.dense=bf16",
            1,
            "is a switch of fp8_block, mxfp8 or nvfp4, and precision is bf16",
            "precision.dense=fp8",
        ),
        (
            "precision=nvfp4 precision.bf16_last_layers=4",
            1,
            "leaves none of model.layers=4 in nvfp4",
            "precision.bf16_last_layers=3",
        ),
        ("precision=mxfp8 precision.dispatch=fp8", 1, "precision is mxfp8", "dispatch=bf16"),
    ],
)
def test_problem_names_the_override_that_fixes_it(
    overrides: str, world: int, problem: str, fix: str
) -> None:
    given = overrides.split(" ")
    lines = problems(load(given), world)
    assert any(problem in line and fix in " ".join(named(line)) for line in lines), lines
    assert problems(load([*given, *(word for line in lines for word in named(line))]), world) == []


@pytest.mark.parametrize(
    ("overrides", "world"),
    [
        ("parallel.tensor=4", 4),  # two key-value heads on four ranks: each has a copy of one
        ("parallel.context=2 parallel.tensor=2", 4),
        ("parallel.pipeline=2 parallel.virtual_pipeline=2", 4),
        ("parallel.pipeline=2 parallel.pipeline_layout='Ett|ttL'", 2),
        ("parallel.pipeline=2 parallel.pipeline_layout='Et*3|tL'", 2),
        ("model=tiny_deepseek parallel.pipeline=2 parallel.pipeline_layout='E(t)*4|mL'", 2),
        ("model=tiny_deepseek parallel.pipeline=2 parallel.pipeline_layout='Ettttm|L'", 2),
        ("parallel.expert=4", 8),
        ("data=indexed data.blend=[a]", 1),
        ("data=indexed data.blend=[a,b]", 1),
        ("data=indexed data.blend=[0.7,a,3e-1,b]", 1),
        ("run.profile=[1,80]", 1),
        ("run.steps=1", 1),  # within the warm-up
        ("optim.schedule=WSD optim.warmup_steps=90 run.steps=100", 1),
        ("precision=fp32 kernels=torch run.device=cpu", 1),
        *[(f"{FP8} kernels={k}", 1) for k in ("auto", "reference", "torch", "te", "megatron")],
        *[(f"{FP8} run.device={device} kernels=torch", 2) for device in ("cpu", "cuda")],
        (f"{FP8} kernels=megatron precision.grad_format=e5m2 precision.bf16_first_layers=1", 1),
        (f"{FP8} precision.bf16_first_layers=1 precision.bf16_last_layers=2", 1),
        (f"{FP8} precision.dispatch=fp8", 1),
        (f"{FP8} precision.dispatch=fp8 parallel.dispatch=local parallel.expert=1", 2),
        *[
            (
                f"{FP8} precision.dispatch=fp8 parallel.dispatch={name} "
                f"parallel.expert_replication={slots}",
                2,
            )
            for name in ("alltoall", "symm")
            for slots in (0, 2)
        ],
        (f"{FP8} parallel.tensor=2", 2),
        *[
            (f"precision={recipe} precision.wgrad=bf16 kernels={k}", 1)
            for recipe in ("mxfp8", "nvfp4")
            for k in ("auto", "reference", "torch")
        ],
        ("precision=nvfp4 precision.stochastic_rounding=false precision.bf16_last_layers=1", 1),
        (f"{FP8} kernels=megatron parallel.tensor=2", 2),
        ("data.split=98 run.eval_interval=0", 1),
        (f"{MASK} data.max_documents=8 data.micro_batch=4 parallel.tensor=2", 2),
        (f"{MASK} model=tiny_deepseek data.micro_batch=1 parallel.pipeline=2", 2),
    ],
)
def test_sound_configurations_pass(overrides: str, world: int) -> None:
    assert problems(load(overrides.split(" ")), world) == []


def test_a_transport_carries_fp8_where_its_entry_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = load([FP8, "precision.dispatch=fp8", "parallel.dispatch=deepep"])
    assert len(problems(cfg, 2)) == 1
    monkeypatch.setitem(TRANSPORTS, "deepep", replace(TRANSPORTS["deepep"], fp8=True))
    assert problems(cfg, 2) == []


def test_all_problems_come_at_once_and_without_consequences() -> None:
    overrides = (
        "model.layers=0 precision.recipe=fp8 parallel.tensor=3 parallel.pipeline=3 data.blend=[a]"
    )
    knobs_named = [line.split("=")[0] for line in problems(load(overrides.split(" ")), 1)]
    assert knobs_named == [
        "model.layers",
        "precision.recipe",
        "data.blend",
        "parallel.tensor",
        "parallel.pipeline",
    ]


def test_validation_leaves_the_configuration_as_it_was() -> None:
    cfg = load(["model.layers=0", "parallel.tensor=3"])
    before = copy.deepcopy(cfg)
    problems(cfg)
    assert cfg == before


RANGES: dict[str, tuple[object, ...]] = {
    "parallel.tensor": (1, 2, 3, 4),
    "parallel.context": (1, 2, 3),
    "parallel.pipeline": (0, 1, 2, 3, 4),
    "parallel.virtual_pipeline": (1, 1, 2, 3),
    "parallel.pipeline_layout": ("", "", "Ett|ttL", "E(tt|)*2L", "Et"),
    "parallel.expert": (0, 1, 2, 3, 4, 16),
    "parallel.dispatch": ("auto", "local", "alltoall", "symm", "hier"),
    "parallel.expert_replication": (0, 0, 2, "auto"),
    "model.layers": (1, 4, 6),
    "model.vocab_size": (100, 256, 258),
    "model.bias": (False, True),
    "model.attention.kind": ("gqa", "mla"),
    "model.attention.heads": (3, 4, 8),
    "model.attention.kv_heads": (1, 2, 3),
    "model.attention.window": (0, 32),
    "model.moe.experts": (4, 6, 8),
    "model.moe.top_k": (1, 2, 7),
    "model.moe.shared_ffn": (0, 0, 100),
    "model.moe.dense_layers": (0, 1, 5),
    "model.moe.router.groups": (1, 2, 3, 5),
    "model.moe.router.group_topk": (1, 2, 4),
    "model.moe.router.bias_rate": (0.0, 1e-3),
    "model.moe.router.rounding": ("none", "nearest"),
    "model.moe.router.force_balance": (False, True),
    "model.moe.router.replay": ("", "", "a"),
    "data.sequence_length": (7, 32, 100),
    "data.micro_batch": (1, 3, 4),
    "data.global_batch": (0, 16, 31),
    "data.blend": ([], ["a"], ["0.5", "a", "b"]),
    "data.source": ("embedded", "indexed", "synthetic"),
    "data.document_mask": (False, True),
    "data.max_documents": (0, 8),
    "model.moe.router.seq_aux_loss": (0.0, 1e-4),
    "kernels.attention": ("auto", "te", "flex"),
    "optim.min_lr": (0.0, 1.0),
    "optim.schedule": ("cosine", "WSD"),
    "optim.warmup_steps": (0, 10, 75),
    "optim.decay_steps": (0, 10, 75, 80),
    "optim.qk_clip": (0.0, 100.0),
    "model.attention.qk_norm": (False, True),
    "precision.recipe": ("bf16", "fp32", "fp8_block", "fp8_block", "mxfp8", "nvfp4"),
    "precision.stochastic_rounding": (True, False),
    "precision.hidden": ("bf16", "fp8"),
    "precision.dispatch": ("bf16", "fp8"),
    "precision.wgrad": ("bf16", "fp8"),
    "precision.bf16_first_layers": (0, 0, 1, 6),
    "precision.bf16_last_layers": (0, 0, 2, 6),
    "run.device": ("auto", "cuda", "cpu"),
    "kernels.backend": ("auto", "torch", "te", "fused", "megatron"),
    "optim.kind": ("adamw", "muon"),
    "optim.moments": ("fp32", "bf16"),
    "optim.momentum": (0.95, 0.995),
    "optim.max_logit_every": (0, 2),
    "run.recompute": ([], ["norm"], ["mla_up", "full"], ["moe", "expert_h"], ["moe_act", "mlp"]),
    "run.offload": ([], ["residual", "residual"], ["attention"], ["expert_h", "attention"]),
    "run.checkpoints": ("", "s3://b/x", "file:///tmp/x", "runs", "s3://u:p@b/x", "s3://"),
    "run.sample_every": (0, 5),
    "model.attention.qk_norm_over": ("head", "projection"),
    "model.attention.rotary_dim": (0, 4, 5, 500),
    "model.attention.output_gate": (False, True),
    "model.attention.qkv_bias": (False, True),
    "model.linear_attention.full_attention_interval": (1, 1, 2, 9),
    "model.linear_attention.key_heads": (1, 2, 3),
    "model.linear_attention.value_heads": (2, 4, 5),
    "model.moe.shared_gate": (False, True),
}


@pytest.mark.parametrize("cases", [100, pytest.param(1000, marks=pytest.mark.slow)])
def test_the_named_overrides_together_always_fix_a_configuration(cases: int) -> None:
    draw = random.Random(0)
    broken = 0
    for _ in range(cases):
        world = draw.choice((1, 2, 3, 4, 6, 8, 12, 24))
        paths = draw.sample(list(RANGES), k=12)
        given = [f"{path}={spelled(draw.choice(RANGES[path]))}" for path in paths]
        lines = problems(load(given), world)
        broken += bool(lines)
        words = [word for line in lines for word in named(line)]
        assert problems(load([*given, *words]), world) == [], (world, lines)
    assert broken > cases / 2
