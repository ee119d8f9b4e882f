"""A tiny GPTModel (a dense and a MoE layer) under the real engine, and its checkpoints."""

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from phalanx.configs.schema import OptimConfig, ParallelConfig
from phalanx.parallel.checkpoint import commit

VOCAB, SEQUENCE, BATCH = 64, 16, 8


def build(seed: int = 1, **kw: Any) -> tuple[Any, Any]:
    """(engine, groups) of a fresh tiny model."""
    from phalanx.parallel.megatron import cpu

    cpu.install()
    from megatron.core import parallel_state as ps
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.models.gpt.gpt_model import GPTModel

    from phalanx.moe.model.init import initialize
    from phalanx.parallel.engine import Engine
    from phalanx.parallel.groups import create

    sizes = dict(tensor=1, pipeline=1, virtual_pipeline=1, expert=1)
    sizes |= {k: kw.pop(k) for k in list(kw) if k in sizes}
    groups = create(**sizes)
    shape = {k: kw.pop(k) for k in list(kw) if k in ("layers", "experts", "bf16")}
    config = _config(sizes, **shape)
    virtual = sizes["virtual_pipeline"]
    chunks = []
    for stage in range(virtual) if virtual > 1 else [None]:
        chunks.append(
            GPTModel(
                config=config,
                transformer_layer_spec=get_gpt_decoder_block_spec(
                    config, use_transformer_engine=False, vp_stage=stage
                ),
                vocab_size=VOCAB,
                max_sequence_length=SEQUENCE,
                position_embedding_type="rope",
                pg_collection=groups.pg,
                pre_process=ps.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
                post_process=ps.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
                vp_stage=stage,
            )
        )
    initialize(chunks, seed=seed, std=0.1, layers=2, dp_cp_group=groups.pg.dp_cp)
    optim = {k: kw.pop(k) for k in list(kw) if k in ("moments", "kind", "ema")}
    engine = Engine(
        config,
        chunks,
        parallel=ParallelConfig(**kw),
        optim=OptimConfig(lr=1e-2, warmup_steps=2, **optim),
        steps=20,
        device=torch.device("cpu"),
    )
    engine.train()
    return engine, groups


def _config(sizes: dict[str, int], layers: int = 2, experts: int = 4, bf16: bool = True) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    dtype = torch.bfloat16 if bf16 else torch.float32
    moe: dict[str, Any] = dict(
        num_moe_experts=experts,
        moe_ffn_hidden_size=24,
        moe_layer_freq=[0] + [1] * (layers - 1),
        moe_router_topk=2,
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        moe_router_bias_update_rate=0.01,
        moe_router_dtype="fp32",
        moe_router_load_balancing_type="none",
        moe_token_dispatcher_type="allgather",
        moe_shared_expert_intermediate_size=16,
        expert_model_parallel_size=sizes["expert"],
    )
    return TransformerConfig(
        num_layers=layers,
        hidden_size=32,
        num_attention_heads=2,
        ffn_hidden_size=48,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=F.silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        batch_p2p_comm=False,
        bf16=bf16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        tensor_model_parallel_size=sizes["tensor"],
        pipeline_model_parallel_size=sizes["pipeline"],
        virtual_pipeline_model_parallel_size=(
            sizes["virtual_pipeline"] if sizes["virtual_pipeline"] > 1 else None
        ),
        **(moe if experts else {}),
    )


def forward(batches: Iterator[torch.Tensor], chunk: torch.nn.Module) -> tuple[Any, Any]:
    """Output of a chunk for the next [micro-batch, SEQUENCE + 1] tokens, and its loss function."""
    ids = next(batches)
    mask = torch.triu(torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool), 1)[None, None]
    positions = torch.arange(SEQUENCE)[None]
    output = chunk(ids[:, :-1].contiguous(), positions, mask, labels=ids[:, 1:].contiguous())
    return output, lambda out: (
        out.float().sum(),
        torch.tensor(out.numel(), dtype=torch.int),
        {"loss": out.detach().float().mean()},
    )


def train(engine: Any, groups: Any, first: int, last: int) -> list[tuple[float, float]]:
    """(loss of this rank, gradient norm) of steps first + 1 .. last."""
    results = []
    for step in range(first, last):
        generator = torch.Generator().manual_seed(step)
        ids = torch.randint(0, VOCAB, (BATCH, SEQUENCE + 1), generator=generator)
        mine = ids.chunk(groups.data)[groups.data_rank].split(2)
        engine.zero_grad()
        reports = engine.forward_backward(
            forward,
            [iter(mine) for _ in engine.chunks],
            microbatches=len(mine),
            sequence=SEQUENCE,
            micro_batch=2,
        )
        losses = [float(report["loss"]) for report in reports]
        results.append((sum(losses), engine.step()))
    return results


def checkpointer(
    folder: Path, groups: Any, keep_last: int = 2, keep_every: int = 0, async_save: bool = False
) -> Any:
    from phalanx.parallel.checkpoint.checkpointer import Checkpointer

    return Checkpointer(
        folder,
        keep_last=keep_last,
        keep_every=keep_every,
        async_save=async_save,
        dp_cp_group=groups.pg.dp_cp,
    )


def save(checkpoints: Any, step: int, engine: Any, **common: Any) -> Path:
    common = {"config": {"model": {"layers": 2}}, "step": step, **common}
    return checkpoints.save(step, engine.chunks, engine.optimizer, engine.scheduler, common)


def load(checkpoints: Any, path: Path, engine: Any, config: Any = None) -> dict[str, Any]:
    return checkpoints.load(path, engine.chunks, engine.optimizer, engine.scheduler, config)


def tensors(engine: Any) -> dict[str, torch.Tensor]:
    """Everything that a resumed run continues from: parameters, buffers, master copies, moments."""
    state = {}
    for i, module in enumerate(engine.modules):
        state |= {f"{i}.{k}": v for k, v in module.state_dict().items() if torch.is_tensor(v)}
    for i, part in enumerate(engine.optimizer.chained_optimizers):
        for j, group in enumerate(part.optimizer.param_groups):
            for k, main in enumerate(group["params"]):
                state[f"main {i} {j} {k}"] = main.detach()
                for name, moment in part.optimizer.state[main].items():
                    state[f"{name} {i} {j} {k}"] = moment
    return {name: value.clone() for name, value in state.items()}


def assert_equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    different = [name for name in a if not torch.equal(a[name], b[name])]
    assert not different, different


def stored(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, whole, read without Megatron-Core."""
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load as load_whole

    held = FileSystemReader(str(path)).read_metadata().state_dict_metadata
    state = {
        name: torch.empty(what.size, dtype=what.properties.dtype)
        for name, what in held.items()
        if isinstance(what, TensorStorageMetadata)
    }
    load_whole(state, storage_reader=FileSystemReader(str(path)), no_dist=True)
    return state


def record() -> list[str]:
    """Lines logged by the checkpointer from now on; stderr has them as well, as before."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda r: lines.append(r.getMessage())  # type: ignore[method-assign]
    logging.getLogger("phalanx.parallel.checkpoint.verify").handlers = [
        handler,
        logging.lastResort,  # type: ignore[list-item]
    ]
    return lines


def two_checkpoints(folder: Path) -> None:
    engine, groups = build()
    checkpoints = checkpointer(folder, groups)
    for step in (1, 2):
        train(engine, groups, step - 1, step)
        save(checkpoints, step, engine)


def largest(folder: Path) -> Path:
    return max(folder.glob("*.distcp"), key=lambda path: path.stat().st_size)


def find_newest(folder: Path) -> tuple[str | None, list[str]]:
    """(name of the checkpoint that a run would go on from, warnings)."""
    from phalanx.parallel.megatron import cpu

    cpu.install()
    from phalanx.parallel.groups import create

    lines = record()
    found = checkpointer(folder, create()).newest()
    return found and found.name, lines


def reseal(folder: Path, **changes: Any) -> None:
    """Make COMMIT.json agree with the files of the folder, as somebody who means harm would."""
    path = folder / commit.COMMIT
    record = json.loads(path.read_text())
    del record["seal"]
    names = [other.name for other in folder.iterdir() if other != path]
    record["files"] = {name: commit.checksum(folder / name) for name in names}
    record |= changes
    path.write_text(json.dumps(record | {"seal": commit._seal(record)}))
