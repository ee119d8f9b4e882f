"""Checkpoints: exact resume, resharding, damage, failed and killed saves, what may change.

Most cases run in gloo ranks on a tiny GPTModel (a dense and a MoE layer) under the real engine.
"""

import errno
import json
import logging
import os
import random
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from configs.schema import OptimConfig, ParallelConfig
from tests.distributed import RankFailed, run_distributed

VOCAB, SEQUENCE, BATCH = 64, 16, 8


# --- a tiny run -----------------------------------------------------------------------------------


def build(seed: int = 1, **kw: Any) -> tuple[Any, Any]:
    """(engine, groups) of a fresh tiny model."""
    from parallel import adam, cpu

    cpu.install()
    adam.install()
    from megatron.core import parallel_state as ps
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.models.gpt.gpt_model import GPTModel

    from moe.init import initialize
    from parallel.engine import Engine
    from parallel.groups import create

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
    engine = Engine(
        config,
        chunks,
        parallel=ParallelConfig(**kw),
        optim=OptimConfig(lr=1e-2, warmup_steps=2),
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


def train(engine: Any, groups: Any, first: int, last: int) -> list[tuple[float, float]]:
    """(loss of this rank, gradient norm) of steps first + 1 .. last."""
    results = []
    mask = torch.triu(torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool), 1)[None, None]
    positions = torch.arange(SEQUENCE)[None]

    def forward(batches: Iterator[torch.Tensor], chunk: torch.nn.Module) -> tuple[Any, Any]:
        ids = next(batches)
        output = chunk(ids[:, :-1].contiguous(), positions, mask, labels=ids[:, 1:].contiguous())
        return output, lambda out: (
            out.float().sum(),
            torch.tensor(out.numel(), dtype=torch.int),
            {"loss": out.detach().float().mean()},
        )

    for step in range(first, last):
        generator = torch.Generator().manual_seed(step)
        ids = torch.randint(0, VOCAB, (BATCH, SEQUENCE + 1), generator=generator)
        mine = ids.chunk(groups.data)[groups.data_rank].split(1)
        engine.zero_grad()
        reports = engine.forward_backward(
            forward,
            [iter(mine) for _ in engine.chunks],
            microbatches=len(mine),
            sequence=SEQUENCE,
            micro_batch=1,
        )
        losses = [float(report["loss"]) for report in reports]
        results.append((sum(losses), engine.step()))
    return results


def checkpointer(folder: Path, groups: Any, keep: int = 2, async_save: bool = False) -> Any:
    from parallel.checkpoint import Checkpointer

    return Checkpointer(folder, keep=keep, async_save=async_save, dp_cp_group=groups.pg.dp_cp)


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


# --- resume ---------------------------------------------------------------------------------------


def _resume(folder: Path, async_save: bool, kw: dict[str, Any]) -> None:
    engine, groups = build(**kw)
    train(engine, groups, 0, 3)
    checkpoints = checkpointer(folder, groups, async_save=async_save)
    path = save(checkpoints, 3, engine, data={"consumed": 24})
    drawn = random.random(), float(np.random.rand()), float(torch.rand(()))
    expected = train(engine, groups, 3, 6)
    checkpoints.close()

    resumed, groups = build(seed=2, **kw)
    checkpoints = checkpointer(folder, groups)
    assert checkpoints.newest() == path
    common = load(checkpoints, path, resumed)
    assert common["data"] == {"consumed": 24} and common["step"] == 3
    assert (random.random(), float(np.random.rand()), float(torch.rand(()))) == drawn
    assert resumed.scheduler.num_steps == 3
    assert train(resumed, groups, 3, 6) == expected
    assert_equal(tensors(engine), tensors(resumed))


@pytest.mark.dist
@pytest.mark.parametrize(
    "world, async_save, kw",
    [
        (1, False, {}),
        (1, True, {"bf16": False}),
        (2, False, {"expert": 2}),
        (2, True, {"expert": 2}),
        (2, False, {"expert": 1, "overlap": False}),
        (2, False, {"distributed_optimizer": False}),
        (2, False, {"distributed_optimizer": False, "bf16": False}),
        (2, False, {"pipeline": 2, "virtual_pipeline": 2, "layers": 4}),
    ],
)
def test_resume_is_bit_exact(
    tmp_path: Path, world: int, async_save: bool, kw: dict[str, Any]
) -> None:
    """Parameters, masters, moments, router bias, schedule, random states, losses are all equal."""
    run_distributed(_resume, world, tmp_path, async_save, kw)


def _through_layouts(root: Path, layouts: list[dict[str, Any]]) -> None:
    """Save in the first layout; in each other, load what the one before saved and save it again."""
    path = None
    for i, kw in enumerate(layouts):
        engine, groups = build(seed=i, **kw)
        checkpoints = checkpointer(root / str(i), groups)
        if path is None:
            train(engine, groups, 0, 3)
        else:
            load(checkpoints, path, engine)
        path = save(checkpoints, 3, engine)
    train(engine, groups, 3, 4)


@pytest.mark.dist
@pytest.mark.parametrize(
    "layouts",
    [
        [{"expert": 2}, {"expert": 1}, {"expert": 2, "overlap": False}],
        [{"pipeline": 2}, {"expert": 2}, {"pipeline": 2}],
        [{"tensor": 2, "experts": 0}, {"experts": 0}, {"tensor": 2, "experts": 0}],
        [{"expert": 2}, {"distributed_optimizer": False}, {"expert": 2}],
    ],
    ids=["expert", "pipeline", "tensor", "optimizer sharding"],
)
def test_state_survives_other_layouts(tmp_path: Path, layouts: list[dict[str, Any]]) -> None:
    """Every stored tensor, optimizer state included, has the same bytes after each change."""
    run_distributed(_through_layouts, 2, tmp_path, layouts)
    first, *others = (stored(tmp_path / str(i) / "step_00000003") for i in range(len(layouts)))
    assert any(name.startswith("optimizer.state.exp_avg.") for name in first)
    for other in others:
        assert_equal(first, other)


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


def _save_alone(folder: Path) -> list[tuple[float, float]]:
    engine, groups = build()
    train(engine, groups, 0, 2)
    save(checkpointer(folder, groups), 2, engine)
    return train(engine, groups, 2, 4)


def _continue_as_two(folder: Path) -> tuple[list[tuple[float, float]], list[str]]:
    engine, groups = build(seed=7)
    checkpoints = checkpointer(folder, groups)
    lines = record()
    load(checkpoints, checkpoints.newest(), engine)
    return train(engine, groups, 2, 4), lines


def record() -> list[str]:
    """Lines logged by the checkpointer from now on."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda r: lines.append(r.getMessage())  # type: ignore[method-assign]
    logging.getLogger("parallel.checkpoint").handlers = [handler]
    return lines


@pytest.mark.dist
def test_another_number_of_ranks(tmp_path: Path) -> None:
    """The same losses to rounding; random states are not restored, and that is said once."""
    alone = run_distributed(_save_alone, 1, tmp_path)[0]
    (first, lines), (second, silent) = run_distributed(_continue_as_two, 2, tmp_path)
    assert len(lines) == 1 and "random states of 1 ranks" in lines[0]
    assert silent == []
    for (whole, norm), (a, _), (b, other) in zip(alone, first, second, strict=True):
        assert whole == pytest.approx(a + b, rel=1e-3)
        assert norm == pytest.approx(other, rel=2e-2)


# --- damage ---------------------------------------------------------------------------------------


def _two_checkpoints(folder: Path) -> None:
    engine, groups = build()
    checkpoints = checkpointer(folder, groups)
    for step in (1, 2):
        train(engine, groups, step - 1, step)
        save(checkpoints, step, engine)


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("template")
    run_distributed(_two_checkpoints, 1, folder)
    return folder


@pytest.fixture
def run(template: Path, tmp_path: Path) -> Path:
    """A copy of a run with the checkpoints of steps 1 and 2."""
    return Path(shutil.copytree(template, tmp_path / "checkpoints"))


def _newest(folder: Path) -> tuple[str | None, list[str]]:
    from parallel import cpu

    cpu.install()
    from parallel.groups import create

    lines = record()
    found = checkpointer(folder, create()).newest()
    return found and found.name, lines


def largest(folder: Path) -> Path:
    return max(folder.glob("*.distcp"), key=lambda path: path.stat().st_size)


def flip(folder: Path) -> str:
    path = largest(folder)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    return path.name


def truncate(folder: Path) -> str:
    path = largest(folder)
    os.truncate(path, path.stat().st_size - 1)
    return path.name


def delete_shard(folder: Path) -> str:
    path = largest(folder)
    path.unlink()
    return path.name


def delete_metadata(folder: Path) -> str:
    (folder / ".metadata").unlink()
    return ".metadata"


def delete_commit(folder: Path) -> str:
    (folder / "COMMIT.json").unlink()
    return "COMMIT.json is missing"


def edit_commit(folder: Path) -> str:
    path = folder / "COMMIT.json"
    path.write_text(path.read_text().replace('"step": 2', '"step": 3'))
    return "COMMIT.json was changed"


def garble_commit(folder: Path) -> str:
    (folder / "COMMIT.json").write_bytes(b"{\x00")
    return "COMMIT.json is not readable"


def empty(folder: Path) -> str:
    shutil.rmtree(folder)
    folder.mkdir()
    return "COMMIT.json is missing"


DAMAGES = [flip, truncate, delete_shard, delete_metadata]
DAMAGES += [delete_commit, edit_commit, garble_commit, empty]


@pytest.mark.dist
@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_found_and_the_checkpoint_before_is_used(run: Path, damage: Any) -> None:
    told = damage(run / "step_00000002")
    name, lines = run_distributed(_newest, 1, run)[0]
    assert name == "step_00000001"
    assert len(lines) == 1 and told in lines[0] and "step_00000002.bad" in lines[0]
    assert sorted(path.name for path in run.iterdir()) == ["step_00000001", "step_00000002.bad"]


@pytest.mark.dist
def test_ranks_share_the_verification(run: Path) -> None:
    told = flip(run / "step_00000002")
    (name, lines), (other, silent) = run_distributed(_newest, 2, run)
    assert name == other == "step_00000001"
    assert told in lines[0] and silent == []


@pytest.mark.dist
def test_no_valid_checkpoint_is_an_error_every_time(run: Path) -> None:
    """Also at the second start, when all of them were renamed by the first."""
    flip(run / "step_00000001")
    delete_commit(run / "step_00000002")
    for _ in range(2):
        with pytest.raises(RankFailed, match="NoUsableCheckpoint.*run.resume=never"):
            run_distributed(_newest, 1, run)


@pytest.mark.dist
def test_no_checkpoint_yet(tmp_path: Path) -> None:
    assert run_distributed(_newest, 1, tmp_path / "new") == [(None, [])]


@pytest.mark.dist
def test_what_is_ignored_is_told(run: Path) -> None:
    (run / "step_00000001").rename(run / "step_00000001.tmp")
    (run / "step_00000002").rename(run / "step_00000002.old")
    ((name, lines),) = run_distributed(_newest, 1, run)
    assert name is None
    assert "step_00000001.tmp was never completed" in lines[0]
    assert "step_00000002.old is of an earlier run" in lines[1] and len(lines) == 2


def _load_from(path: Path, folder: Path) -> None:
    engine, groups = build()
    load(checkpointer(folder, groups), path, engine)


@pytest.mark.dist
def test_a_named_checkpoint_has_to_be_valid_and_is_not_renamed(run: Path, tmp_path: Path) -> None:
    told = truncate(run / "step_00000002")
    with pytest.raises(RankFailed, match=rf"NoUsableCheckpoint.*{told}"):
        run_distributed(_load_from, 1, run / "step_00000002", tmp_path / "other")
    assert (run / "step_00000002").exists()
    with pytest.raises(RankFailed, match=r"did you mean run.resume=.*step_00000002"):
        run_distributed(_load_from, 1, run, tmp_path / "other")


# --- saves that fail or are killed ----------------------------------------------------------------


def _fails_on_full_disk(folder: Path, victim: int, async_save: bool) -> list[str]:
    engine, groups = build(expert=2)
    checkpoints = checkpointer(folder, groups, async_save=async_save)
    train(engine, groups, 0, 1)
    save(checkpoints, 1, engine)
    checkpoints.close()
    train(engine, groups, 1, 2)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == victim:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    messages = []
    try:
        save(checkpoints, 2, engine)
        checkpoints.close()
    except RuntimeError as error:
        messages.append(str(error))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    dist.barrier()
    left = sorted(path.name for path in folder.iterdir())
    assert left == ["step_00000001"], left
    assert checkpoints.newest() == folder / "step_00000001"
    save(checkpoints, 2, engine)  # there is space again
    checkpoints.close()
    assert checkpoints.newest() == folder / "step_00000002"
    return messages


@pytest.mark.dist
@pytest.mark.parametrize("victim, async_save", [(0, False), (1, False), (1, True)])
def test_full_disk(tmp_path: Path, victim: int, async_save: bool) -> None:
    """One line on every rank, the checkpoint before intact, nothing half-written left."""
    messages = run_distributed(_fails_on_full_disk, 2, tmp_path, victim, async_save)
    assert messages[0] == messages[1] and len(messages[0]) == 1
    assert os.strerror(errno.EFBIG) in messages[0][0] and "\n" not in messages[0][0]
    assert str(tmp_path) in messages[0][0] and "run.dir" in messages[0][0]


def _fails_on_metadata(folder: Path, name: str) -> str:
    from megatron.core.dist_checkpointing import serialization
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

    def full(*args: Any, **kw: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    engine, groups = build()
    checkpoints = checkpointer(folder, groups)
    target = FileSystemWriterAsync if name == "finish" else serialization
    with pytest.MonkeyPatch.context() as patch, pytest.raises(RuntimeError) as caught:
        patch.setattr(target, name, full)
        save(checkpoints, 1, engine)
    dist.barrier()
    assert not list(folder.iterdir())
    return str(caught.value)


@pytest.mark.dist
@pytest.mark.parametrize("name", ["finish", "save_config"])
def test_rank_0_failing_alone_does_not_hang_the_others(tmp_path: Path, name: str) -> None:
    first, second = run_distributed(_fails_on_metadata, 2, tmp_path, name)
    assert first == second and os.strerror(errno.ENOSPC) in first


def _unwritable(folder: Path) -> str:
    from parallel import cpu

    cpu.install()
    from parallel.groups import create

    with pytest.raises(RuntimeError) as caught:
        checkpointer(folder, create())
    return str(caught.value)


@pytest.mark.dist
def test_unwritable_folder_is_told_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    first, second = run_distributed(_unwritable, 2, tmp_path / "file" / "checkpoints")
    assert first == second
    assert "run.dir" in first and os.strerror(errno.ENOTDIR) in first and "\n" not in first


PHASES = {
    "no shard is written": ("parallel.writer", "_write"),
    "shards are not all known": ("parallel.writer", "gather"),
    "no COMMIT.json": ("parallel.manifest", "_seal"),
    "not renamed": ("parallel.manifest", "os.replace"),
    "older one not removed": ("parallel.manifest", "remove"),
}


def _killed(folder: Path, module: str, name: str, async_save: bool) -> None:
    import importlib

    engine, groups = build()
    checkpoints = checkpointer(folder, groups, keep=1, async_save=async_save)
    train(engine, groups, 0, 1)
    save(checkpoints, 1, engine)
    checkpoints.close()
    train(engine, groups, 1, 2)
    target = importlib.import_module(module)
    for part in name.split(".")[:-1]:
        target = getattr(target, part)
    calls = []

    def die(*args: Any, **kw: Any) -> Any:
        if name != "remove" or any(path.name == "step_00000001" for path in args[0]):
            os._exit(9)
        calls.append(args)

    setattr(target, name.split(".")[-1], die)
    save(checkpoints, 2, engine)
    checkpoints.close()


def _continue(folder: Path) -> tuple[str, list[tuple[float, float]]]:
    engine, groups = build(seed=5)
    checkpoints = checkpointer(folder, groups, keep=1)
    path = checkpoints.newest()
    step = load(checkpoints, path, engine)["step"]
    losses = train(engine, groups, step, 3)
    save(checkpoints, 3, engine)
    assert [p.name for p in folder.iterdir()] == ["step_00000003"]
    return path.name, losses


def _uninterrupted() -> list[tuple[float, float]]:
    return train(*build(), 0, 3)


@pytest.fixture(scope="module")
def expected() -> list[tuple[float, float]]:
    return run_distributed(_uninterrupted, 1)[0]


@pytest.mark.dist
@pytest.mark.parametrize("phase", PHASES)
def test_killed_while_saving(
    tmp_path: Path, phase: str, expected: list[tuple[float, float]]
) -> None:
    """The run goes on from the newest complete checkpoint, bit for bit, and clears what is left."""
    with pytest.raises(RankFailed, match="exit code 9"):
        run_distributed(_killed, 1, tmp_path, *PHASES[phase], False)
    name, losses = run_distributed(_continue, 1, tmp_path)[0]
    step = 2 if phase == "older one not removed" else 1
    assert name == f"step_{step:08d}"
    assert losses == expected[step:]


def _writer_killed(folder: Path) -> str:
    from parallel import writer

    engine, groups = build()
    checkpoints = checkpointer(folder, groups, async_save=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "_write", lambda *args: os._exit(9))
        save(checkpoints, 1, engine)
    with pytest.raises(RuntimeError) as caught:
        checkpoints.close()
    assert not list(folder.iterdir())
    save(checkpoints, 2, engine)
    checkpoints.close()
    assert checkpoints.newest() == folder / "step_00000002"
    return str(caught.value)


@pytest.mark.dist
def test_background_writer_killed(tmp_path: Path) -> None:
    assert "writer was killed" in run_distributed(_writer_killed, 1, tmp_path)[0]


def _background(folder: Path) -> list[tuple[str, ...]]:
    import time

    engine, groups = build()
    checkpoints = checkpointer(folder, groups, async_save=True)
    seen = []
    train(engine, groups, 0, 1)
    save(checkpoints, 1, engine)
    seen.append(tuple(path.name for path in folder.iterdir()))
    before = tensors(engine)
    train(engine, groups, 1, 2)  # the save must not see this step
    deadline = time.monotonic() + 30
    while not (folder / "step_00000001").exists() and time.monotonic() < deadline:
        checkpoints.poll()
    seen.append(tuple(path.name for path in folder.iterdir()))
    load(checkpoints, folder / "step_00000001", engine)
    assert_equal(before, tensors(engine))
    return seen


@pytest.mark.dist
def test_background_save_is_of_its_step_and_committed_by_poll(tmp_path: Path) -> None:
    seen = run_distributed(_background, 2, tmp_path)[0]
    assert seen == [("step_00000001.tmp",), ("step_00000001",)]


# --- which checkpoints are there ------------------------------------------------------------------


def _keeps(folder: Path) -> list[list[str]]:
    def names() -> list[str]:
        return sorted(path.name for path in folder.iterdir())

    engine, groups = build()
    checkpoints = checkpointer(folder, groups, keep=2)
    seen = []
    for step in (1, 2, 3):
        save(checkpoints, step, engine)
    path = save(checkpoints, 3, engine)
    stamp = (path / "COMMIT.json").stat().st_mtime_ns
    assert save(checkpoints, 3, engine) == path
    assert (path / "COMMIT.json").stat().st_mtime_ns == stamp  # a step is saved once
    seen.append(names())
    again = checkpointer(folder, groups, keep=2)  # run.resume=never in the same folder
    save(again, 1, engine)
    seen.append(names())
    back = checkpointer(folder, groups, keep=2)  # goes on from an older step
    load(back, folder / "step_00000001", engine)
    save(back, 2, engine)
    seen.append(names())
    return seen


@pytest.mark.dist
def test_keeps_the_newest_and_sets_an_earlier_run_aside(tmp_path: Path) -> None:
    kept, restarted, resumed = run_distributed(_keeps, 1, tmp_path)[0]
    assert kept == ["step_00000002", "step_00000003"]
    assert restarted == ["step_00000001", "step_00000002.old", "step_00000003.old"]
    assert resumed == ["step_00000001", "step_00000002"]


def _commit_record(folder: Path) -> None:
    engine, groups = build(expert=2)
    save(checkpointer(folder, groups), 4, engine)


@pytest.mark.dist
def test_commit_lists_every_file(tmp_path: Path) -> None:
    run_distributed(_commit_record, 2, tmp_path)
    folder = tmp_path / "step_00000004"
    record = json.loads((folder / "COMMIT.json").read_text())
    assert (record["step"], record["world"]) == (4, 2)
    files = {path.name: path.stat().st_size for path in folder.iterdir()}
    files.pop("COMMIT.json")
    assert {name: size for name, (size, _) in record["files"].items()} == files
    assert {name[:4] for name in files if name.endswith(".distcp")} == {"__0_", "__1_"}


# --- what may change ------------------------------------------------------------------------------


def _refuses(folder: Path, path: Path) -> tuple[str, str, list[str]]:
    from parallel.drift import CheckpointMismatch

    engine, groups = build(seed=4)
    checkpoints = checkpointer(folder, groups)
    before = tensors(engine)
    with pytest.raises(CheckpointMismatch) as knob:
        load(checkpoints, path, engine, {"model": {"layers": 3}})
    assert_equal(before, tensors(engine))
    lines = record()
    load(checkpoints, path, engine, {"model": {"layers": 2}, "optim": {"lr": 1.0}})
    other, groups = build(experts=8)
    with pytest.raises(CheckpointMismatch) as shape:
        load(checkpoints, path, other)
    return str(knob.value), str(shape.value), lines


@pytest.mark.dist
def test_another_model_is_refused_before_anything_is_touched(run: Path, tmp_path: Path) -> None:
    path = run / "step_00000002"
    knob, shape, lines = run_distributed(_refuses, 1, tmp_path / "other", path)[0]
    assert "model.layers" in knob and "run.resume=never" in knob
    assert "has shape [4, 48, 32], not [8, 48, 32]" in shape or "[4, 32]" in shape
    assert lines == []


CONFIG: dict[str, Any] = {
    "model": {"name": "a", "layers": 4, "moe": {"router": {"aux_loss": 0.1, "bias_rate": 1e-3}}},
    "data": {"seed": 1, "blend": ["x"], "micro_batch": 2, "sequence_length": 16},
    "optim": {"lr": 1e-3},
    "parallel": {"expert": 2},
    "run": {"precision": "bf16", "steps": 10},
}


def changed(path: str, value: Any) -> dict[str, Any]:
    config = json.loads(json.dumps(CONFIG))
    *groups, key = path.split(".")
    section = config
    for group in groups:
        section = section[group]
    section[key] = value
    return config


@pytest.mark.parametrize(
    "knob, value",
    [
        ("model.layers", 6),
        ("model.moe.router.bias_rate", 0.0),
        ("run.precision", "fp32"),
        ("data.seed", 2),
        ("data.blend", ["y"]),
        ("data.sequence_length", 32),
    ],
)
def test_drift_refused(knob: str, value: Any) -> None:
    from parallel.drift import CheckpointMismatch, compare

    with pytest.raises(CheckpointMismatch) as caught:
        compare(CONFIG, changed(knob, value))
    assert knob in str(caught.value) and "run.resume=never" in str(caught.value)


@pytest.mark.parametrize(
    "knob, value",
    [
        ("model.name", "b"),
        ("model.moe.router.aux_loss", 0.2),
        ("model.moe.router.bias_rate", 1e-4),
        ("model.new_knob", 1),
        ("optim.lr", 1.0),
        ("parallel.expert", 4),
        ("run.steps", 20),
        ("data.micro_batch", 1),
    ],
)
def test_drift_allowed_and_told(knob: str, value: Any) -> None:
    from parallel.drift import compare

    lines = compare(CONFIG, changed(knob, value))
    assert [line.split()[0] for line in lines] == ([] if "new" in knob else [knob])


def test_drift_diff_reads_well() -> None:
    from parallel.drift import CheckpointMismatch, compare

    config = changed("model.layers", 6)
    config["data"]["seed"] = 7
    with pytest.raises(CheckpointMismatch) as caught:
        compare(CONFIG, config)
    assert str(caught.value).splitlines() == [
        "this run is not configured as its checkpoint:",
        "                checkpoint  now",
        "  model.layers  4           6",
        "  data.seed     1           7",
        "go on with model.layers=4 data.seed=1,",
        "or start anew with another run.name or with run.resume=never",
    ]


@pytest.mark.parametrize("shape", [(), (7,), (3, 4), (1, 5), (2, 3, 4), (3, 1, 2, 2)])
def test_boxes_cover_a_range_in_order(shape: tuple[int, ...]) -> None:
    from parallel.optimizer_state import rectangles

    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    for start in range(whole.numel() + 1):
        for stop in range(start, whole.numel() + 1):
            boxes = rectangles(shape, start, stop)
            assert len(boxes) <= max(1, 2 * len(shape) - 1)
            parts = [
                whole[tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))]
                for offset, size in boxes
            ]
            found = [i for part in parts for i in part.flatten().tolist()]
            assert found == list(range(start, stop))
