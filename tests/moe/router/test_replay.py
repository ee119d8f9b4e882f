"""Recorded routing: the file, what it fits, and the routers that replay it."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from phalanx.configs.load import load
from phalanx.configs.schema import ModelConfig, RouterConfig
from phalanx.moe.router.recording import (
    FORMAT,
    Ids,
    RecordingFacts,
    layer_name,
    layer_names,
    mismatch,
    read_facts,
    read_layer,
    write,
)
from tests.moe.cases import HIDDEN, draw, fill, install, model, transformer
from tests.support.distributed import run_distributed
from tests.support.runs import SMALL, run
from tests.support.sync_free import sync_free

EXPERTS, TOP_K, TOKENS = 16, 4, 12


def chosen(layers: int, experts: int = EXPERTS, tokens: int = TOKENS) -> dict[str, Ids]:
    g = torch.Generator().manual_seed(layers)
    return {
        layer_name(n + 1, False): torch.rand(tokens, experts, generator=g)
        .topk(TOP_K)
        .indices.numpy()
        for n in range(layers)
    }


@pytest.mark.parametrize("experts", [16, 256, 257, 512])
def test_a_file_holds_what_was_written(experts: int, tmp_path: Path) -> None:
    ids, path = chosen(3, experts), tmp_path / "new" / "routing.safetensors"
    facts = write(path, ids, model="tiny", experts=experts, step=7)
    assert facts == read_facts(path)
    names = ("layer.1", "layer.2", "layer.3")
    assert facts == RecordingFacts("tiny", experts, TOP_K, TOKENS, 7, names)
    for name in names:
        read = read_layer(path, name)
        assert np.array_equal(read, ids[name])
        assert read.itemsize == (1 if experts <= 256 else 2)


@pytest.mark.parametrize("bad", [-1, EXPERTS, 256, 65_537])
def test_a_choice_that_is_no_expert_is_not_written(bad: int, tmp_path: Path) -> None:
    ids = chosen(2)
    ids["layer.2"][3, 1] = bad
    with pytest.raises(ValueError, match=rf"layer.2 has ids from .*{bad}.* of 16 experts"):
        write(tmp_path / "routing.safetensors", ids, model="tiny", experts=EXPERTS, step=7)


def test_what_is_no_recording_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="none.x cannot be read: there is no such file"):
        read_facts(tmp_path / "none.x")
    (tmp_path / "text").write_text("no tensors")
    with pytest.raises(ValueError, match="text cannot be read"):
        read_facts(tmp_path / "text")
    save_file({"a": np.zeros(3)}, tmp_path / "weights")
    with pytest.raises(ValueError, match="not a recorded routing, which run.record_routing writes"):
        read_facts(tmp_path / "weights")


@pytest.mark.parametrize(
    ("override", "why"),
    [
        ("model.layers=3", None),
        ("model.layers=2", None),
        ("model.layers=4", "without layer.4 of this model"),
        ("model.mtp_layers=1", "without prediction.1 of this model"),
        ("model.moe.top_k=3", "with model.moe.top_k=2, but this run has 3"),
        ("model.moe.experts=16", "with model.moe.experts=8, but this run has 16"),
    ],
)
def test_what_a_model_can_replay(override: str, why: str | None) -> None:
    facts = RecordingFacts("other", 8, 2, 100, 5, ("layer.1", "layer.2", "layer.3"))
    found = mismatch(facts, load(["model=tiny", "model.layers=3", override]).model)
    assert found == (None if why is None else found) and (why or "") in (found or "")


def test_layers_with_experts_have_names() -> None:
    of = ModelConfig(layers=4, mtp_layers=1)
    of.moe.dense_layers = 2
    assert list(layer_names(of)) == ["layer.3", "layer.4", "prediction.1"]


def _replays(path: str, layer: int, want: Ids, score: str) -> None:
    install()
    from phalanx.kernels.routing.topk_scores import probabilities
    from phalanx.moe.router.router import Router
    from phalanx.parallel.groups import create

    pg = create(expert=2).pg
    m = model({"replay": path, "score": score}, moe={"experts": EXPERTS, "top_k": TOP_K})
    r = Router(config=transformer(m), options=m.moe.router, top_k=TOP_K, pg_collection=pg)
    r.set_layer_number(layer)
    fill(r)
    tokens = 10
    x = draw(tokens, 1, HIDDEN, seed=50).requires_grad_()
    with sync_free():
        idx, prob = r(x)
    first = pg.ep.rank() * tokens
    rows = [(first + n) % TOKENS for n in range(tokens)]
    assert idx.tolist() == want[rows].tolist() and torch.equal(r(x)[0], idx)
    logits = x.view(tokens, HIDDEN) @ r.weight.T
    torch.testing.assert_close(prob, probabilities(logits, idx.long(), m.moe.router))
    prob.square().sum().backward()
    assert r.weight.grad.abs().sum() > 0


@pytest.mark.dist
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_a_router_takes_the_recorded_experts(score: str, tmp_path: Path) -> None:
    ids, path = chosen(2), tmp_path / "routing"
    write(path, ids, model="tiny", experts=EXPERTS, step=7)
    run_distributed(_replays, 2, str(path), 2, ids["layer.2"], score)


def _stock(path: str, want: Ids) -> None:
    install()
    from phalanx.extras.baseline.stock_moe import StockRouter
    from phalanx.parallel.groups import create

    pg = create().pg
    m = model({"replay": path}, moe={"experts": EXPERTS, "top_k": TOP_K})
    router = StockRouter(config=transformer(m), options=m.moe.router, pg_collection=pg)
    router.set_layer_number(1)
    _, chosen_TE = router(draw(TOKENS, 1, HIDDEN, seed=3))
    found: list[list[int]] = [row.nonzero().flatten().tolist() for row in chosen_TE]
    assert found == [sorted(row) for row in want.tolist()]


@pytest.mark.dist
def test_megatron_cores_router_takes_them_too(tmp_path: Path) -> None:
    ids, path = chosen(1), tmp_path / "routing"
    write(path, ids, model="tiny", experts=EXPERTS, step=7)
    run_distributed(_stock, 1, str(path), ids["layer.1"])


def test_a_rounded_choice_cannot_be_replayed() -> None:
    from phalanx.moe.router.router import check

    o: Any = dict(replay="a", rounding="up")
    with pytest.raises(ValueError, match=r"replay chooses experts itself: set .*rounding=none"):
        check(RouterConfig(**o), experts=8, top_k=2)


@pytest.mark.parametrize(
    ("ids", "why"),
    [
        ([[0, 8]], "layer.1 has expert 8 of token 0"),
        ([[1, 1]], "layer.1 has an expert twice of token 0"),
        ([[1, 2], [3, 4]], r"layer.1 is uint8 \[2, 2\], not integers \[1, 2\]"),
    ],
)
def test_a_file_of_another_program_is_checked(
    ids: list[list[int]], why: str, tmp_path: Path
) -> None:
    facts = {"model": "mine", "experts": 8, "top_k": 2, "tokens": 1, "step": 0}
    metadata = {"format": FORMAT, "facts": json.dumps(facts | {"layers": ["layer.1"]})}
    save_file({"layer.1": np.array(ids, np.uint8)}, tmp_path / "mine", metadata)
    with pytest.raises(ValueError, match=why):
        read_layer(tmp_path / "mine", "layer.1")
    with pytest.raises(ValueError, match="has no layer.2"):
        read_layer(tmp_path / "mine", "layer.2")
    save_file({"a": np.zeros(1)}, tmp_path / "other", {"format": FORMAT, "facts": "{}"})
    with pytest.raises(ValueError, match="has no facts in its metadata: JSON with model, experts,"):
        read_facts(tmp_path / "other")


@pytest.mark.dist
def test_a_run_refuses_it_in_a_line(tmp_path: Path) -> None:
    ids = {f"layer.{n}": np.array([[0, 1], [2, 9]], np.uint8) for n in (1, 2)}
    facts = {"model": "mine", "experts": 8, "top_k": 2, "tokens": 2, "step": 0, "layers": [*ids]}
    save_file(ids, tmp_path / "mine", {"format": FORMAT, "facts": json.dumps(facts)})
    words = ["model=tiny", *SMALL, "model.attention.head_dim=8", "data=synthetic"]
    replay = f"model.moe.router.replay={tmp_path / 'mine'}"
    (main,) = run(1, [*words, f"run.dir={tmp_path}", replay])
    assert main.code == 2
    assert "layer.1 has expert 9 of token 1, and experts are 0 to 7" in main.err
    assert main.err.count("\n") == 1
