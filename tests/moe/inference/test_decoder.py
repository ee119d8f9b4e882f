"""New tokens by a cache against forward passes of whole texts, for every kind of attention."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.moe.inference.random_model import opened
from tests.support.distributed import run_distributed

pytestmark = pytest.mark.dist
TINY = ["data=embedded", "data.sequence_length=64", "run.device=cpu"]
MODELS = {
    "tiny": ["model.attention.window=5", "model.attention.window_every=2"],
    "tiny_gpt_oss": [],
    "tiny_deepseek": [],
    "tiny_qwen3_next": [],
    "tiny_dense": ["model.attention.yarn.factor=4", "model.attention.yarn.original_context=16"],
}
CONTEXT = 24


def prompts(vocabulary: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [
        torch.randint(vocabulary, (n,), generator=generator).tolist() for n in (1, 17, 6, CONTEXT)
    ]


def differences(overrides: list[str], count: int) -> tuple[float, list[list[int]], bool]:
    """Inside a rank: the largest error of a logit, over the largest logit; greedy texts of a batch;
    whether each is the text of its prompt alone without a cache."""
    from phalanx.moe.inference.generation import Batch
    from phalanx.moe.inference.sampling import Sampler

    with opened(overrides) as predictor:
        given = prompts(predictor.cfg.model.vocab_size)
        texts = [list(prompt) for prompt in given]
        worst = 0.0
        choose = [Sampler()] * len(given)
        for new in Batch(predictor, given, choose, count, context=CONTEXT):
            whole_V = predictor.next_logits(torch.tensor([texts[new.row][-CONTEXT:]]))
            error = (new.logits_V - whole_V).abs().max() / whole_V.abs().max()
            worst = max(worst, float(error))
            texts[new.row].append(new.token)
        alone = [list(prompt) for prompt in given]
        for row, prompt in enumerate(given):
            each = Batch(predictor, [prompt], choose[:1], count, context=CONTEXT, cache=False)
            alone[row] += [new.token for new in each]
    return worst, texts, texts == alone


@pytest.mark.parametrize("model", MODELS)
def test_a_cache_changes_no_text(model: str) -> None:
    overrides = [f"model={model}", "precision=fp32", *MODELS[model], *TINY]
    worst, texts, same = run_distributed(differences, 1, overrides, 9)[0]
    assert worst < 5e-5 and same
    assert len({token for text in texts for token in text[-9:]}) > 8, "texts that could differ"


@pytest.mark.parametrize("model", ["tiny_gpt_oss", "tiny_deepseek"])
def test_logits_in_bf16_differ_by_rounding(model: str) -> None:
    """In dense layers, as rounding moves a token to another expert now and then."""
    dense = ["model.moe.dense_layers=${model.layers}"]
    overrides = [f"model={model}", "precision=bf16", *dense, *MODELS[model], *TINY]
    worst, _, _ = run_distributed(differences, 1, overrides, 4)[0]
    assert 0 < worst < 0.05


def reused(overrides: list[str]) -> list[Any]:
    """Inside a rank: logits behind prompts, alone and in caches that other prompts had."""
    from phalanx.moe.inference.generation import Batch
    from phalanx.moe.inference.sampling import Sampler

    with opened(overrides) as predictor:

        def logits(prompt: list[int]) -> Tensor:
            batch = Batch(predictor, [prompt], [Sampler()], 5, context=CONTEXT)
            return torch.stack([new.logits_V.clone() for new in batch])

        short, long = [3, 1, 4], list(range(1, 16))
        first = logits(short)
        again = [logits(long), logits(short)][1]
        plain = predictor.logits(torch.tensor([short]))
        decoder = predictor.decoder
        decoder.read([short], 8)
        decoder.next([7], [3])
        return [first, again, plain, predictor.logits(torch.tensor([short]))]


@pytest.mark.parametrize("model", ["tiny_gpt_oss", "tiny_qwen3_next"])
def test_nothing_is_left_of_an_earlier_text(model: str) -> None:
    first, again, plain, after = run_distributed(
        reused, 1, [f"model={model}", "precision=fp32", *TINY]
    )[0]
    assert torch.allclose(first, again, rtol=1e-5, atol=1e-5)
    assert torch.equal(plain, after), "who uses no cache notices none"


def stopped(overrides: list[str]) -> list[list[int]]:
    """Inside a rank: tokens of each sequence, the first of which is stopped, the second ends."""
    from phalanx.moe.inference.generation import Batch

    with opened(overrides) as predictor:
        rows: list[list[int]] = [[], [], []]
        choose = [iter([5, 6, 7, 8, 9]), iter([5, 0, 7, 8, 9]), iter([5, 6, 7, 8, 9])]
        batch = Batch(
            predictor,
            [[1], [2, 3], [4]],
            [lambda logits, numbers=numbers: next(numbers) for numbers in choose],
            4,
            context=CONTEXT,
            ends=(0,),
        )
        for new in batch:
            rows[new.row].append(-1 if new.ends else new.token)
            if new.row == 0 and new.token == 6:
                batch.stop(0)
        return rows


def test_each_sequence_ends_for_itself() -> None:
    rows = run_distributed(stopped, 1, ["model=tiny", "precision=fp32", *TINY])[0]
    assert rows == [[5, 6], [5, -1], [5, 6, 7, 8]]
