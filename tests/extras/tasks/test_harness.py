"""The scores are those of lm-evaluation-harness, by transformers on the exported model."""

import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.extras.tasks import examples
from tests.extras.tasks.conftest import Trained, write
from tests.support.distributed import run_distributed

lm_eval = pytest.importorskip("lm_eval")

LIKELIHOOD = 2e-4  # nats between two implementations of a model in fp32


def results_here(trained: Trained, files: list[str]) -> dict[str, Any]:
    """Inside a rank: scores, likelihoods of options or windows, and answers, by task."""
    from phalanx.extras.tasks.formats import read_tasks
    from phalanx.extras.tasks.forward import checkpoint_forward
    from phalanx.extras.tasks.metrics import scores_of
    from phalanx.extras.tasks.requests import requests_of
    from phalanx.extras.tasks.scoring import generate
    from phalanx.moe.data.tokenizer.codec import codec_of
    from phalanx.moe.inference.predictor import opened

    found = {}
    with opened(trained.step) as predictor:
        codec = codec_of(predictor.common, 384, None)
        forward = checkpoint_forward(predictor, 256, lambda n: None)
        for task in read_tasks(files):
            requests = requests_of(task, codec, 64)
            if task.kind == "answer":
                answers = generate(requests, forward, codec)
                found[task.name] = scores_of(requests, [], answers), answers
                continue
            rows = [each.alternatives for each in forward(requests.rows)]
            likelihoods = [[rows[p.row][p.alternative] for p in some] for some in requests.parts]
            found[task.name] = scores_of(requests, rows), likelihoods
    return found


def task(name: str, folder: Path, rows: list[Any], **more: Any) -> dict[str, Any]:
    """A task of the harness on a file."""
    files = {"test": write(folder / f"{name}.jsonl", rows)}
    if dev := more.pop("dev", None):
        files["dev"] = write(folder / f"{name}_dev.jsonl", dev)
    metrics = more.pop("metrics", ["acc", "acc_norm", "acc_bytes"])
    return {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": files},
        "test_split": "test",
        "metric_list": [{"metric": metric} for metric in metrics],
        "output_type": "multiple_choice",
        **more,
    }


def harness_tasks(folder: Path) -> list[dict[str, Any]]:
    """The same tasks, as the harness defines those of these names."""
    from lm_eval.tasks.hellaswag.utils import process_docs

    folder.mkdir()
    options = "".join(f"\n{letter}. {{{{choices[{i}]}}}}" for i, letter in enumerate("ABCD"))
    about = "The following are multiple choice questions (with answers) about some law.\n\n"
    answers = [each | {"answer": str(each["answer"])} for each in examples.ANSWERS]
    return [
        task(
            "arc",
            folder,
            examples.ARC,
            doc_to_text="Question: {{question}}\nAnswer:",
            doc_to_target="{{choices.label.index(answerKey)}}",
            doc_to_choice="{{choices.text}}",
        ),
        task(
            "hellaswag",
            folder,
            examples.HELLASWAG,
            process_docs=process_docs,
            doc_to_text="{{query}}",
            doc_to_target="{{label}}",
            doc_to_choice="choices",
        ),
        task(
            "mmlu",
            folder,
            examples.MMLU,
            dev=examples.MMLU_DEV,
            fewshot_split="dev",
            num_fewshot=2,
            fewshot_config={"sampler": "first_n"},
            description=about,
            doc_to_text="{{question.strip()}}" + options + "\nAnswer:",
            doc_to_choice=list("ABCD"),
            doc_to_target="answer",
        ),
        task(
            "choices",
            folder,
            examples.CHOICES,
            doc_to_text="query",
            doc_to_choice="choices",
            doc_to_target="gold",
            target_delimiter="",
        ),
        task(
            "schema",
            folder,
            examples.SCHEMA,
            doc_to_text="{{gold}}",
            doc_to_target="continuation",
            doc_to_choice="context_options",
        ),
        task(
            "continuation",
            folder,
            examples.CONTINUATION,
            output_type="loglikelihood",
            doc_to_text="context",
            doc_to_target="continuation",
            metrics=["acc", "perplexity"],
        ),
        task(
            "texts",
            folder,
            examples.TEXTS,
            output_type="loglikelihood_rolling",
            doc_to_text="",
            doc_to_target="text",
            metrics=["word_perplexity", "byte_perplexity", "bits_per_byte"],
        ),
        task(
            "answers",
            folder,
            answers,
            output_type="generate_until",
            doc_to_text="question",
            doc_to_target="answer",
            generation_kwargs={"until": ["\n", ":"], "max_gen_toks": 6, "do_sample": False},
            filter_list=[
                {
                    "name": "none",
                    "filter": [{"function": "remove_whitespace"}, {"function": "take_first"}],
                }
            ],
            metrics=["exact_match"],
        ),
    ]


@pytest.mark.dist
def test_scores_are_those_of_the_harness(trained: Trained, exported: Path, tmp_path: Path) -> None:
    files = [path for path in trained.tasks if not path.endswith("mmlu.jsonl")]
    write(tmp_path / "dev.jsonl", examples.MMLU_DEV)
    few = {"task": {"fewshot": 2, "fewshot_file": "dev.jsonl"}}
    files.append(write(tmp_path / "mmlu.jsonl", [few, *examples.MMLU]))
    ours = run_distributed(results_here, 1, trained, files)[0]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    with mock.patch.dict(os.environ, offline):
        theirs = _evaluated(exported, harness_tasks(tmp_path / "harness"), tmp_path / "cache")
    assert ours.keys() == theirs["results"].keys() and len(ours) == 8
    for name, (scores, found) in ours.items():
        samples = sorted(theirs["samples"][name], key=lambda sample: sample["doc_id"])
        assert len(samples) == len(found)
        for sample, own in zip(samples, found, strict=True):
            responses = sample["filtered_resps"]
            if name == "answers":
                assert responses == [own.split("\n")[0].split(":")[0].strip()], name
            elif name == "texts":
                total = sum(window.nats for window in own)
                assert total == pytest.approx(responses[0], abs=LIKELIHOOD), name
            else:
                nats = [option.nats for option in own]
                assert nats == pytest.approx([r[0] for r in responses], abs=LIKELIHOOD), name
                assert [option.greedy for option in own] == [r[1] for r in responses]
        for key, value in theirs["results"][name].items():
            metric, _, of = key.partition(",")
            if of == "none" and not metric.endswith("_stderr"):
                assert scores[metric] == pytest.approx(value, rel=1e-4), (name, metric)
    assert 0 < ours["answers"][0]["exact_match"] < 1 and 0 < ours["continuation"][0]["acc"] < 1
    assert any(len(windows) > 1 for windows in ours["texts"][1])


def _evaluated(model: Path, tasks: list[dict[str, Any]], cache: Path) -> dict[str, Any]:
    import datasets
    from lm_eval.models.huggingface import HFLM

    with mock.patch.object(datasets.config, "HF_DATASETS_CACHE", cache):
        return lm_eval.simple_evaluate(
            model=HFLM(pretrained=str(model), device="cpu", dtype="float32", batch_size=4),
            tasks=tasks,
            bootstrap_iters=0,
            log_samples=True,
        )
