"""The model card of an exported folder: what is on record about the model and its training.

Facts are those of the checkpoint, of the records in the folder of its run, and of the data where it
is here. What is on no record has no row. A card is for people: its license is left to them, as are
uses, limits and evaluations.
"""

import statistics
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from phalanx.configs.arithmetic.accounting import active_parameters, parameters
from phalanx.configs.knobs import pluralize
from phalanx.configs.schema import DataConfig, ModelConfig
from phalanx.moe.data.blend import parse_blend
from phalanx.moe.data.host_cache import DataError
from phalanx.moe.data.token_files import open_corpus
from phalanx.moe.report.loggers import lines
from phalanx.moe.text import count
from phalanx.parallel.checkpoint import commit
from phalanx.parallel.checkpoint.trained_tokens import trained_tokens
from phalanx.parallel.object_store import Place

CARD = "README.md"
_LOSSES = 10  # steps whose mean loss is told
_LAYOUT = ("tensor", "pipeline", "context", "expert")  # knobs below `parallel.`
_PACKAGES = ("torch", "megatron-core")

Rows = list[tuple[str, str]]


@dataclass(frozen=True)
class Source:
    """The facts from which a card is made.

    Args:
        checkpoint: its folder or address.
        common: what it holds besides tensors.
        values: the knobs of its configuration, by their paths.
        family: `model_type` of Hugging Face.
        dtype: of the exported weights.
    """

    checkpoint: Place
    common: Mapping[str, Any]
    values: Mapping[str, Any]
    model: ModelConfig
    family: str
    context: int
    dtype: str


def card(source: Source) -> str:
    """Text of a README.md."""
    name = _name(source)
    front = [
        "---",
        "library_name: transformers",
        "pipeline_tag: text-generation",
        "tags:",
        *(f"- {tag}" for tag in ("phalanx", source.family, *_mixture(source.model))),
        "# license: is yours to choose",
        "---",
    ]
    folder = _run_folder(source)
    records = lines(folder / "metrics.jsonl") if folder else []
    sections = {
        "Model": _model(source),
        "Training": _training(source, records),
        "Made with": _made_with(source, records),
    }
    text = [*front, "", f"# {name}", "", _summary(source), ""]
    for title, rows in sections.items():
        if rows:
            text += [f"## {title}", "", *_table(rows), ""]
    if data := list(_data(source)):
        head = ("tokens", "share", "documents", "tokenizer", "digest")
        text += ["## Data", "", *_table_of(("data", *head), data), ""]
    return "\n".join([*text, "## Use", "", _USE])


_USE = """\
```python
from transformers import AutoModelForCausalLM, AutoTokenizer

folder = "."  # this one
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
tokens = tokenizer("Once upon a time", return_tensors="pt")
print(tokenizer.decode(model.generate(**tokens, max_new_tokens=40)[0]))
```
"""


def _name(source: Source) -> str:
    path = source.checkpoint
    of_run = path.parent.name == "checkpoints"
    return str(path.parent.parent.name if of_run else source.model.name or path.name)


def _mixture(m: ModelConfig) -> list[str]:
    return ["mixture-of-experts"] if _is_mixture(m) else []


def _is_mixture(m: ModelConfig) -> bool:
    return m.moe.dense_layers < m.layers


def _summary(source: Source) -> str:
    m = source.model
    kind = "mixture of experts" if _is_mixture(m) else "dense model"
    total, active = parameters(m, mtp=False).total, active_parameters(m).total
    uses = f", of which a token uses {count(active)}" if _is_mixture(m) else ""
    return (
        f"A language model, {'a ' + kind} of {count(total)} parameters{uses}, in the format of "
        f"`{source.family}`."
    )


def _model(source: Source) -> Rows:
    m, a = source.model, source.model.attention
    total, active = parameters(m, mtp=False).total, active_parameters(m).total
    rows = [("parameters", f"{total:,}")]
    if _is_mixture(m):
        rows.append(("active parameters of a token, without embedding", f"{active:,}"))
        dense = f", the first {m.moe.dense_layers} dense" if m.moe.dense_layers else ""
        rows.append(("layers", f"{m.layers}{dense}"))
        rows.append(("experts", f"{m.moe.experts}, of which a token uses {m.moe.top_k}"))
        rows.append(("width of an expert", f"{m.moe.ffn:,}"))
        if m.moe.shared_ffn:
            rows.append(("width of the shared experts", f"{m.moe.shared_ffn:,}"))
    else:
        rows.append(("layers", str(m.layers)))
        rows.append(("width of an MLP", f"{m.dense_ffn:,}"))
    rows.append(("hidden size", f"{m.hidden:,}"))
    if a.kind == "mla":
        rows.append(("attention", f"latent, {pluralize(a.heads, 'head')}"))
    else:
        pair = "key-value head"
        rows.append(("attention", f"{pluralize(a.heads, 'head')}, {pluralize(a.kv_heads, pair)}"))
    if a.window:
        rows.append(("sliding window", f"{a.window:,}"))
    rows.append(("vocabulary", f"{m.vocab_size:,}"))
    rows.append(("context", f"{source.context:,}"))
    rows.append(("weights", source.dtype))
    return rows


def _training(source: Source, records: list[dict[str, Any]]) -> Rows:
    common, values = source.common, source.values
    if common.get("weights_only"):
        return []  # imported or averaged: nothing here was trained
    record = commit.read_commit(source.checkpoint)
    rows = [("step", f"{record.step:,}")]
    length = values.get("data.sequence_length")
    if length and (tokens := trained_tokens(common, length)) > 0:
        rows.append(("tokens", f"{tokens:,}"))
        rows.append(("sequence length", f"{length:,}"))
    if values.get("data.source", "indexed") != "indexed":  # others have a table
        rows.append(("data", str(values["data.source"])))
    losses = common.get("health", {}).get("seen", {}).get("loss", [])[-_LOSSES:]
    if losses:
        mean = statistics.fmean(losses)
        rows.append((f"training loss, mean of {pluralize(len(losses), 'step')}", f"{mean:.4f}"))
    scores = _validation(records, record.step)
    if "valid_loss" in scores:
        at = f"after step {scores['step']:,}"
        rows.append((f"validation loss {at}", f"{scores['valid_loss']:.4f}"))
    if "valid_bits_per_byte" in scores:
        rows.append(("validation, bits per byte", f"{scores['valid_bits_per_byte']:.4f}"))
    knobs = {
        "optim.kind": "optimizer",
        "optim.lr": "learning rate",
        "optim.schedule": "schedule",
        "data.global_batch": "sequences of a step",
        "precision.recipe": "precision",
        "run.seed": "seed",
    }
    rows += [(name, _shown(values[knob])) for knob, name in knobs.items() if knob in values]
    sizes = ((name, values.get(f"parallel.{name}")) for name in _LAYOUT)
    split = [f"{name} {size}" for name, size in sizes if isinstance(size, int) and size > 1]
    rows.append(("layout", ", ".join([pluralize(record.world, "rank"), *split])))
    return rows


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _validation(records: list[dict[str, Any]], step: int) -> dict[str, Any]:
    """The last validation up to a step."""
    found: dict[str, Any] = {}
    for record in records:
        if "valid_loss" in record and record.get("step", 0) <= step:
            found = record
    return found


def _run_folder(source: Source) -> Path | None:
    path = source.checkpoint
    if not isinstance(path, Path) or path.parent.name != "checkpoints":
        return None
    return path.parent.parent


def _made_with(source: Source, records: list[dict[str, Any]]) -> Rows:
    """Commit and versions of the launch that wrote the checkpoint: the last one before it."""
    import yaml

    if (folder := _run_folder(source)) is None:
        return []
    saved = f"saved: checkpoint of step {commit.read_commit(source.checkpoint).step} "
    written = [r["time"] for r in records if str(r.get("event")).startswith(saved)]
    launches = []
    for file in (folder / "launches").glob("*.yaml"):
        with suppress(OSError, yaml.YAMLError, ValueError, TypeError, KeyError):
            launch = yaml.safe_load(file.read_text())
            began = datetime.strptime(str(launch["time"]), "%Y-%m-%d %H:%M:%S %z").timestamp()
            launches.append((began, dict(launch["code"]), dict(launch["versions"])))
    before = [launch for launch in launches if written and launch[0] <= written[-1]]
    if not before:
        return []
    _, code, versions = max(before, key=lambda launch: launch[0])
    rows = []
    if code.get("commit", "unknown") != "unknown":
        changed = ", with changes" if code.get("changed") else ""
        rows.append(("commit of Phalanx", f"{code['commit']}{changed}"))
    return rows + [(name, str(versions[name])) for name in _PACKAGES if versions.get(name)]


def _data(source: Source) -> Iterator[tuple[str, ...]]:
    """A row of each corpus: name, tokens, share, documents, tokenizer, digest."""
    values = source.values
    if source.common.get("weights_only") or values.get("data.source") != "indexed":
        return
    try:
        prefixes, weights = parse_blend(DataConfig(blend=list(values.get("data.blend", ()))))
    except DataError:
        return
    total = sum(weights) if weights else 0
    for number, prefix in enumerate(prefixes):
        share = f"{weights[number] / total:.1%}" if weights and total else ""
        tokens = documents = tokenizer = digest = ""
        with suppress(DataError, OSError):  # where the data is here
            corpus = open_corpus(prefix)
            tokens, documents = f"{int(corpus.lengths.sum()):,}", f"{corpus.documents:,}"
            digest = f"`{corpus.stamp}`"
            if (side := corpus.sidecar) is not None:
                own = f" `{side.tokenizer_sha256[:16]}`" if side.tokenizer_sha256 else ""
                tokenizer = f"{side.tokenizer.rpartition('/')[2]}{own}"
        yield prefix.rpartition("/")[2], tokens, share, documents, tokenizer, digest


def _table(rows: Rows) -> list[str]:
    return _table_of(("", ""), rows)


def _table_of(head: tuple[str, ...], rows: list[Any]) -> list[str]:
    """A table without the columns that are empty in all rows."""
    kept = [n for n, name in enumerate(head) if not name or any(row[n] for row in rows)]
    table = [[head[n] for n in kept], ["---" for _ in kept]]
    table += [[row[n] for n in kept] for row in rows]
    return [f"| {' | '.join(line)} |" for line in table]
