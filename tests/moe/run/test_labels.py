"""Every label of a global batch weighs the same, however the batch is cut and dealt.

Documents are of very different lengths, and some rows have no label at all: means of micro-batches
or of ranks would differ by tens of percent.
"""

import contextlib
import functools
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from phalanx.configs.load import load
from tests.end_to_end.layouts.test_layouts import DEEPSEEK, EP1, TINY
from tests.support.distributed import run_distributed
from tests.support.runs import Rank, records, run, write_corpus
from tests.support.scheduling import mostly_slow, slow
from tests.support.training import Trained, trained

pytestmark = pytest.mark.dist

# Sums of some hundred fp32 terms in another order; 2e-7 is seen.
REL = 1e-6
MODELS = {
    # Balancing losses over a micro-batch change with it by their meaning; z_loss does not.
    "tiny": [*TINY, "model.moe.router.aux_loss=0", "model.layers=4"],
    "deepseek": [
        *[*DEEPSEEK, "model.layers=4", "model.mtp_layers=2", "model.mtp_loss=0.5"],
        *["model.moe.router.seq_aux_loss=0", "model.moe.router.z_loss=1e-2"],
    ],
}
LENGTHS = [*[1] * 40, 3, 2, 90, 1, 1, 5, 30, 2, 4, 1, 17, 8, 1, 1, 60, 2]
"""Labels of documents: a row of 16 has from 0 to 16 labels, the global batch 167 of 256."""

CP2, PP2, TP2 = ({f"parallel.{kind}": 2} | EP1 for kind in ("context", "pipeline", "tensor"))
VP2 = PP2 | {"parallel.virtual_pipeline": 2}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "data": (2, EP1),
    "data_4": (4, EP1),
    "expert": (2, {"parallel.expert": 2}),
    "context": (2, CP2),
    "pipeline": (2, PP2),
    "interleaved": (2, VP2),
    "tensor": (2, TP2),
    "context_data": (4, CP2),
    "context_tensor": (4, CP2 | TP2),
    "context_pipeline": (4, CP2 | PP2),
    "interleaved_data": (4, VP2),
}
MOST = {"data": 8, "data_4": 4, "expert": 8, "interleaved": 4, "context_data": 8}
MOST |= {"interleaved_data": 4}
"""Sequences of a micro-batch, of the 16 of the global batch, where not all are of one."""
CASES = [(layout, 4) for layout in ("one", "data", "context", "interleaved")]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Changes of a run that trains on the documents."""
    return documents(tmp_path_factory.mktemp("corpus"), LENGTHS * 4)


def documents(folder: Path, lengths: Sequence[int]) -> dict[str, Any]:
    random = torch.Generator().manual_seed(1)
    ids = [torch.randint(0, 64, (n,), generator=random).tolist() for n in lengths]
    data = {"source": "indexed", "blend": [write_corpus(folder / "text", ids)], "split": "90,10"}
    data |= {"cache": str(folder / "cache"), "document_mask": True, "global_batch": 16}
    return {f"data.{name}": value for name, value in data.items()} | {"run.steps": 1}


@pytest.fixture(scope="module")
def alone(corpus: dict[str, Any]) -> Callable[[str], Trained]:
    """The run of a model in one process, a sequence at a time."""
    return functools.cache(lambda name: trained(1, MODELS[name], corpus))


@pytest.mark.parametrize(
    ("name", "layout", "micro_batch"),
    [
        *(("deepseek", *case) for case in CASES),
        *slow(
            *(
                (name, layout, size)
                for name in MODELS
                for layout in LAYOUTS
                for size in (1, 4, 16)
                if size <= MOST.get(layout, 16) and (name == "tiny" or (layout, size) not in CASES)
            )
        ),
    ],
)
def test_every_label_weighs_the_same(
    name: str,
    layout: str,
    micro_batch: int,
    corpus: dict[str, Any],
    alone: Callable[[str], Trained],
) -> None:
    world, sizes = LAYOUTS[layout]
    run = trained(world, MODELS[name], corpus | sizes | {"data.micro_batch": micro_batch})
    one = alone(name)
    for number in ("loss", "grad_norm", *(["mtp_loss"] if name == "deepseek" else [])):
        assert run.series(number) == pytest.approx(one.series(number), rel=REL), number
    assert run.valid_loss == pytest.approx(one.valid_loss, rel=REL)
    assert run.series("labels") == one.series("labels") and run.series("labels")[0] < 256
    for key, weight in one.after.items():
        error = (run.after[key] - weight).norm() / weight.norm()
        assert error <= REL, f"{key}: {error:.1e}"


@pytest.mark.extras  # of context ranks
def test_tokens_ahead_weigh_the_same_without_masks() -> None:
    """The last tokens of a sequence, which have no label ahead, are all on one context rank."""
    given = {"data.micro_batch": 2, "run.steps": 1}
    one, two = (trained(n, MODELS["deepseek"], given | more) for n, more in ((1, {}), (2, CP2)))
    for number in ("mtp_loss", "grad_norm"):
        assert two.series(number) == pytest.approx(one.series(number), rel=REL), number
    assert two.series("labels") == [4 * 16]


# --- what a loss and its gradients are --------------------------------------------------------


Seen = tuple[float, float, list[float]]
"""Sum of the losses of a rank that count, their number, and the totals of the step."""


def masked(trainer: Any, share: float, seed: int) -> list[dict[str, Tensor]]:
    """Micro-batches of a step, of whose labels a share counts, without documents."""
    random = torch.Generator().manual_seed(seed)
    batches = trainer.data.loader.next_step()
    for batch in batches:
        batch["loss_mask"] = torch.rand(batch["labels"].shape, generator=random) < share
    return batches


def trainer_of(overrides: Sequence[str]) -> Any:
    from phalanx.moe.run.start import make_trainer
    from phalanx.parallel.fault.signals import StopSignal
    from phalanx.parallel.runtime import start

    with contextlib.redirect_stdout(io.StringIO()):
        runtime = start(seed=1, timeout=60, deterministic=False)
        return make_trainer(
            load([*TINY, "data=synthetic", "run.device=cpu", *overrides]), runtime, StopSignal()
        )


def _losses(overrides: list[str], shares: list[float]) -> list[Seen]:
    """Losses and totals of a step, for each share of labels that count."""
    from phalanx.kernels.library_objects import replaced
    from phalanx.moe.model.gpt import LanguageModel
    from phalanx.moe.router import balance

    found: list[Tensor] = []
    compute = LanguageModel.compute_language_model_loss

    def watched(self: Any, *args: Any) -> Tensor:
        found.append(compute(self, *args))
        return found[-1]

    trainer, steps = trainer_of(overrides), list[Seen]()
    for share in shares:
        found.clear()
        batches = masked(trainer, share, trainer.job.groups.data_rank)
        masks = [trainer.compute.context_shard(batch)["loss_mask"] for batch in batches]
        with replaced(LanguageModel, "compute_language_model_loss", watched):
            totals = trainer.compute(batches, balance.snapshot(trainer.job.engine.modules))
        pairs = list(zip(found, masks, strict=True))
        sums = sum(float((loss.detach().double() * mask).sum()) for loss, mask in pairs)
        labels = sum(int(mask.sum()) for mask in masks)
        steps.append((sums, labels, [totals.loss, totals.labels, totals.norm]))
    trainer.data.loader.close()
    return steps


@mostly_slow("layout", ["one", "data", "context"], "data", "context")
def test_the_loss_is_the_sum_over_labels_by_their_number(layout: str, tmp_path: Path) -> None:
    """Also of less than one label a micro-batch."""
    world, sizes = LAYOUTS[layout]
    given = [f"{key}={value}" for key, value in sizes.items()]
    place = [f"run.dir={tmp_path}", "data.global_batch=8"]
    shares = [0.5, 0.02]
    all_ranks = run_distributed(_losses, world, [*place, *given], shares)
    for share, ranks in zip(shares, zip(*all_ranks, strict=True), strict=True):
        nats, labels = (sum(rank[i] for rank in ranks) for i in (0, 1))
        for *_, (loss, number, norm) in ranks:
            assert number == labels > 0 and (share > 0.1 or labels < 8) and norm > 0
            assert loss == pytest.approx(nats / labels, rel=REL)


def _gradients(overrides: list[str], shares: list[float]) -> list[Tensor]:
    """Gradients of a step for each share of labels that count, of all parameters, concatenated."""
    from phalanx.moe.router import balance

    trainer, found = trainer_of(overrides), []
    modules = trainer.job.engine.modules
    for share in shares:
        trainer.data.loader.load_state_dict({"consumed_samples": 0})
        trainer.compute(masked(trainer, share, 5), balance.snapshot(modules))
        found.append(torch.cat([p.main_grad.flatten() for m in modules for p in m.parameters()]))
    trainer.data.loader.close()
    return [gradient.double().clone() for gradient in found]


ROUTERS = [f"model.moe.router.{name}=0.1" for name in ("aux_loss", "seq_aux_loss", "z_loss")]
NONE = [text.replace("0.1", "0") for text in ROUTERS]


@mostly_slow("layout", ["data", "context"], "context")
def test_losses_of_routers_are_means_over_all_tokens(layout: str, tmp_path: Path) -> None:
    """Tokens are routed whether their labels count or not.

    So these losses add the same to the gradient with any mask.
    """
    world, sizes = LAYOUTS[layout]
    given = [f"run.dir={tmp_path}", *(f"{key}={value}" for key, value in sizes.items())]
    shares = [2.0, 0.5, 0.05]
    with_them, without = (
        run_distributed(_gradients, world, [*given, *routers], shares)
        for routers in (ROUTERS, NONE)
    )
    for rank in range(world):
        whole, *others = (a - b for a, b in zip(with_them[rank], without[rank], strict=True))
        assert whole.norm() > 0.01 * without[rank][0].norm()
        for added in others:
            assert (added - whole).norm() < 1e-5 * whole.norm()


@mostly_slow("size", [2, 8], 2)
@mostly_slow("recipe", ["bf16", "fp8_block"], "fp8_block")
def test_gradients_of_few_digits_keep_their_magnitude(
    recipe: str, size: int, corpus: dict[str, Any], alone: Callable[[str], Trained]
) -> None:
    """Reduced bf16 gradients and FP8 operands, as without masks, are of divided losses."""
    numbers = {"precision.recipe": recipe, "parallel.grad_dtype": "bf16"}
    exact = alone("deepseek").series("grad_norm")
    run = trained(2, MODELS["deepseek"], corpus | EP1 | numbers | {"data.micro_batch": size})
    assert run.series("grad_norm") == pytest.approx(exact, rel=0.03)


# --- no label ---------------------------------------------------------------------------------


def ran(folder: Path, lengths: Sequence[int], *more: str) -> tuple[Rank, list[dict[str, Any]]]:
    """Output of a run on two ranks over documents, and its records."""
    changes = documents(folder, lengths)
    data = [f"data.blend={changes['data.blend']}".replace("'", ""), "data.split='90,10'"]
    data += [f"data.cache={folder}/cache", "data=indexed", "data.document_mask=true"]
    place = [f"run.dir={folder}", "run.name=run", "run.save_interval=-1", "run.device=cpu"]
    main, _ = run(2, [*TINY, *data, *place, "parallel.expert=1", *more])
    return main, records(folder / "run")


def test_a_step_without_a_label_is_skipped_and_said(tmp_path: Path) -> None:
    more = "run.steps=3", "run.max_bad_steps=2", "model.mtp_layers=1"
    main, steps = ran(tmp_path, [1] * 400, *more)
    assert main.code == 43
    assert main.out.count("-- skipped: step 1 has no loss: none of its labels counts\n") == 1
    why = "error: step 3 has no loss: none of its labels counts, after 2 steps skipped in a row"
    assert main.err.startswith(why)
    assert len(steps) == 2 and steps[1]["skipped"] == 2
    for step in steps:
        assert step["labels"] == 0 and not {"loss", "mtp_loss"} & step.keys()


def test_a_validation_without_a_label_is_said(tmp_path: Path) -> None:
    lengths = [17] * 300 + [1] * 300
    main, steps = ran(tmp_path, lengths, "run.steps=2", "run.eval_interval=1", "run.eval_batches=2")
    assert main.code == 0, main.err
    said = "the validation after step 1 has no loss: none of its labels counts; raise"
    assert main.out.count(f"-- {said}") == 1
    assert all("loss" in step and "valid_loss" not in step for step in steps)


def test_tokens_ahead_without_a_label_have_no_loss(tmp_path: Path) -> None:
    """Documents of two tokens have nothing that is predicted two ahead."""
    more = "run.steps=1", "model.mtp_layers=1"
    main, (step,) = ran(tmp_path, [2] * 400, *more)
    assert main.code == 0, main.err
    assert step["loss"] > 0 and step["labels"] == 32 and "mtp_loss" not in step
