#!/usr/bin/env python
"""Write docs/cards: a page for each model that was trained here, from its records.

    python scripts/lab/release/model_cards.py [--check]

A card describes the model, its measurements (docs/measured/training/own_*.yaml), the losses of its
runs: every docs/measured/**/losses_MODEL*.png, drawn by scripts/lab/plot_losses.py from the .json
next to it; and the difference of a small model's logits to those of transformers
(docs/measured/parity_transformers.json). --check writes nothing, and exits with 1 if a page is out
of date.
"""

import json
import os
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # a checkout that is not installed

from phalanx.configs import programs
from phalanx.configs.arithmetic.accounting import flops_per_token
from phalanx.configs.load import load
from phalanx.configs.records import OwnRecord, own
from phalanx.moe.hf.families import family_of
from phalanx.moe.text import model_size, work

ROOT = Path(__file__).resolve().parents[3]
CARDS, MEASURED = ROOT / "docs" / "cards", ROOT / "docs" / "measured"
PARITY = MEASURED / "parity_transformers.json"
SEQUENCE = 4096


def card(model: str, records: dict[str, OwnRecord]) -> str:
    """The page of a model, an option of `model=`, from its records by file name."""
    path = ROOT / "configs" / "model" / f"{model}.yaml"
    about_model = [
        line[2:] for line in path.read_text("utf-8").splitlines() if line.startswith("# ")
    ]
    cfg = load([f"model={model}"]).model
    of_token = work(flops_per_token(cfg, SEQUENCE))
    latest = max(records.values(), key=lambda r: r.date)
    parts = [
        f"# {model}",
        " ".join(about_model),
        f"{model_size(cfg)}, {of_token} a token of a sequence of {SEQUENCE}. "
        f"[Configuration](../../configs/model/{model}.yaml).",
        "## Measured",
        "Tokens per second and GPU are means of steps 41 to 50 from scratch, with their deviation; "
        "each record has its command, versions and remarks.",
        _table(records),
        f"The latest one, at commit {latest.commit}:",
        f"```bash\n{_alone(latest.command)}\n```",
    ]
    pictures = sorted(MEASURED.rglob(f"losses_{model}*.png"))
    if pictures:
        parts.append("## Losses")
    for picture in pictures:
        losses = _from_cards(picture.with_suffix(".json"))
        parts.append(f"![losses of runs of {model} over each other]({_from_cards(picture)})")
        parts.append(f"[Losses of every step]({losses}), drawn by `scripts/lab/plot_losses.py`.")
    parts += ["## Parity with transformers", _parity(model, family_of(cfg))]
    return "\n\n".join(map(_wrapped, parts)) + "\n"


def index(models: Sequence[str]) -> str:
    """The page that lists all cards."""
    links = "\n".join(f"- [{model}]({model}.md)" for model in models)
    about = _wrapped(
        "One page for each model that was trained here, from [records](../measured/training) by "
        "`scripts/lab/release/model_cards.py`."
    )
    return f"# Model cards\n\n{about}\n\n{links}\n"


def _wrapped(part: str) -> str:
    """A part of a page in lines of at most 120 columns, unless it is a table, code or a picture."""
    if part.startswith(("|", "```", "!", "#")):
        return part
    return textwrap.fill(part, 120, break_long_words=False, break_on_hyphens=False)


def _table(records: dict[str, OwnRecord]) -> str:
    rows = [
        "| record | GPUs | layout | precision | routing | tokens/s/GPU | TFLOP/s/GPU | peak, GiB "
        "| loss at 50 |",
        "|---|---|---|---|---|---:|---:|---:|---:|",
    ]
    for name, r in sorted(records.items(), key=lambda item: -item[1].tokens_per_second_per_gpu):
        speed = f"{r.tokens_per_second_per_gpu:,.0f} ± {r.tokens_per_second_per_gpu_sd:,.0f}"
        rows.append(
            f"| [{name}](../measured/training/{name}.yaml) | {r.hardware} | {r.layout} | {r.dtype} "
            f"| {r.routing} | {speed} | {r.tflops_per_gpu:.0f} | {r.peak_memory_gib:.0f} "
            f"| {r.loss_at_50:.3f} |"
        )
    return "\n".join(rows)


def _parity(model: str, family: str) -> str:
    """Parity of the small model that is closest to a model."""
    record = json.loads(PARITY.read_text("utf-8"))
    name = next((name for name in record["errors"] if model.startswith(name)), family)
    errors = record["errors"][name]
    return (
        f"Logits of a small model of these parts with random weights, imported from transformers "
        f"{record['transformers']} and computed on a CPU, differ from its own by at most "
        f"{errors['fp32']:.1e} of a token's in fp32. In bf16 they are {errors['bf16']:.2g} from "
        f"those in fp32, and its own {errors['transformers_bf16']:.2g} "
        f"([all families]({_from_cards(PARITY)}), by `{record['command']}`)."
    )


def _alone(command: str) -> str:
    """A recorded command with --standalone, so that it does not share a rendezvous port."""
    if "--nnodes" in command or "--standalone" in command:
        return command
    return command.replace("torchrun ", "torchrun --standalone ", 1)


def _from_cards(path: Path) -> str:
    return os.path.relpath(path, CARDS)


def pages() -> dict[Path, str]:
    by_model: dict[str, dict[str, OwnRecord]] = {}
    for name, record in own().items():
        by_model.setdefault(record.model, {})[name] = record
    cards = {
        CARDS / f"{model}.md": card(model, own_records) for model, own_records in by_model.items()
    }
    return cards | {CARDS / "README.md": index(sorted(by_model))}


def main(words: Sequence[str] | None = None) -> int:
    p = programs.parser("model_cards", __doc__)
    p.add_argument(
        "--check", action="store_true", help="write nothing; exit code 1 if a page is out of date"
    )
    check = p.parse_args(words).check
    old = [
        (path, text)
        for path, text in pages().items()
        if not path.exists() or path.read_text("utf-8") != text
    ]
    for path, text in old:
        print(f"{'out of date' if check else 'written'}: {path.relative_to(ROOT)}")
        if not check:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
    return int(check and bool(old))


if __name__ == "__main__":
    sys.exit(main())
