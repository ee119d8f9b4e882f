"""Both published architectures against transformers: logits and gradients in fp32, new tokens.

Sequences have 24 tokens and a query sees 6 keys, so that the choice matters.
"""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from phalanx.configs.schema import Config
from phalanx.moe.hf.weights import regions
from tests.moe.hf import models
from tests.moe.hf.models import imported, loaded, our_logits, words
from tests.moe.inference.test_decoder import TINY, differences
from tests.support.distributed import run_distributed

pytestmark = pytest.mark.dist
NAMES = ("deepseek_v32", "glm_moe_dsa")
_AUX = ("aux_loss", "seq_aux_loss", "global_aux_loss", "z_loss")


def relative(found: Tensor, exact: Tensor) -> float:
    return float((found - exact).norm() / exact.norm())


def our_gradients(cfg: Config, checkpoint: Path, ids: Tensor) -> dict[str, Tensor]:
    """Inside a rank: gradients of the mean cross entropy, by the names of transformers."""
    job, _ = loaded(cfg, checkpoint)
    engine, (model,) = job.engine, job.engine.modules
    engine.zero_grad()
    model.train()
    logits = model(ids, torch.arange(ids.size(1)).expand_as(ids), None)
    torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    own = {name: p.main_grad for name, p in model.named_parameters()}
    found: dict[str, list[tuple[int, Tensor]]] = {}
    for region in regions(cfg.model):
        if region.key in own:
            values = own[region.key].view(region.shape)[slice(*region.rows)]
            for part in region.parts:
                found.setdefault(part.name, []).append((part.rows[0], part.view(values).clone()))
    return {
        name: torch.cat([p for _, p in sorted(found[name], key=lambda x: x[0])]) for name in found
    }


@pytest.mark.parametrize("name", NAMES)
def test_logits_and_gradients_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    model, ids = models.theirs(name), words()
    model.save_pretrained(tmp_path / "theirs")
    cfg = imported(tmp_path / "theirs", tmp_path / "step")
    for loss in _AUX:
        setattr(cfg.model.moe.router, loss, 0.0)
    ((ours, _),) = run_distributed(our_logits, 1, cfg, tmp_path / "step", ids)
    result = model(ids, labels=ids)
    assert (ours - result.logits).abs().max() < 1e-5 * result.logits.abs().max()
    dense = models.theirs(name, index_topk=24)
    with torch.no_grad():
        assert relative(dense(ids).logits, result.logits) > 0.1, "with all keys they are others"

    (found,) = run_distributed(our_gradients, 1, cfg, tmp_path / "step", ids)
    result.loss.backward()
    exact = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    of_attention = [n for n in exact if "self_attn" in n]
    assert len(of_attention) == 3 * 7 and not any("indexer" in n for n in exact)
    for n in (*of_attention, "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"):
        assert relative(found[n].view_as(exact[n]), exact[n]) < 1e-4, n
    indexers = [n for n in found if "indexer" in n]
    assert len(indexers) == 3 * 5 and all(found[n].norm() > 0 for n in indexers)


def test_layers_that_share_chosen_keys_are_refused(tmp_path: Path) -> None:
    from phalanx.moe.hf import ConversionError

    models.theirs("glm_moe_dsa", indexer_types=["full", "shared", "full"]).save_pretrained(tmp_path)
    with pytest.raises(ConversionError, match="indexer_types"):
        imported(tmp_path, tmp_path / "step")


@pytest.mark.parametrize(
    "changes",
    [["top_k=5"], ["top_k=5", "interleaved=true"], ["phase=warm_up"]],
    ids=lambda c: " ".join(c),
)
def test_a_cache_changes_no_text(changes: list[str]) -> None:
    # With few heads many scores are 0, and a tie at the last chosen key goes either way.
    knobs = [f"model.attention.sparse.{change}" for change in ("heads=16", *changes)]
    overrides = ["model=tiny_deepseek_v32", "precision=fp32", *knobs, *TINY]
    worst, texts, same = run_distributed(differences, 1, overrides, 9)[0]
    assert worst < 5e-5 and same
    assert len({token for text in texts for token in text[-9:]}) > 8, "texts that could differ"
