#!/usr/bin/env python
"""Convert weights of Hugging Face models to checkpoints and back (docs/huggingface.md).

One process, no GPU, and memory for one piece of a tensor, however large the model.
"""

import argparse
import copy
import functools
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a checkout that is not installed

from phalanx.configs import programs
from phalanx.configs.knobs import get, overrides, put, spelled
from phalanx.configs.load import load, options
from phalanx.configs.schema import Config
from phalanx.configs.validate import ConfigError, validate
from phalanx.moe.hf.families import family_of
from phalanx.moe.report.progress import progress
from phalanx.parallel.checkpoint.saved_config import CheckpointError, checkpoint_of
from phalanx.parallel.checkpoint.saved_knobs import CheckpointMismatch
from phalanx.parallel.object_store import argument, folder_argument
from phalanx.scripts.output.reader import may_leave

EXAMPLES = """examples:
  convert_hf.py import DeepSeek-V3 imported/deepseek_v3
  convert_hf.py export runs/mine/checkpoints/step_00001000 exported
  convert_hf.py export s3://bucket/runs/mine exported

A run starts from an imported checkpoint with the overrides that import prints and
run.resume=<folder>, on any layout. MXFP4 and block-scaled FP8 become bf16."""

BALANCING = tuple(f"moe.router.{loss}aux_loss" for loss in ("", "seq_", "global_"))
"""Knobs below `model.` whose coefficient a config.json may hold."""

TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")

CHOSEN = (
    "optim.lr",
    "optim.min_lr",
    "optim.warmup_steps",
    "optim.schedule",
    "optim.weight_decay",
    "data.source",
    "data.sequence_length",
    "data.global_batch",
    "run.steps",
)
"""Knobs that no config.json determines and that a run from an import should choose on purpose."""


@may_leave
def main(argv: Sequence[str] | None = None) -> int:
    """Command line. Returns the exit code: 0 done, 1 bad input, 130 interrupted."""
    args = parser().parse_args(argv)
    from phalanx.moe.hf import ConversionError

    try:
        (import_ if args.command == "import" else export)(args)
    except (ConversionError, ConfigError, CheckpointError, CheckpointMismatch) as error:
        for line in str(error).splitlines():
            print(f"convert_hf: {line}", file=sys.stderr)
        return 1
    except OSError as error:
        where = f"{error.filename or args.out}: " if error.strerror else ""
        print(f"convert_hf: {where}{error.strerror or error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("convert_hf: interrupted; nothing was written", file=sys.stderr)
        return 130
    return 0


def parser() -> argparse.ArgumentParser:
    p = programs.parser(
        "convert_hf",
        "Convert between Hugging Face safetensors and checkpoints.",
        epilog=EXAMPLES,
    )
    commands = p.add_subparsers(dest="command", required=True)
    p_in = commands.add_parser("import", help="a Hugging Face folder to a checkpoint")
    p_in.add_argument("folder", type=folder_argument, help="with config.json and safetensors")
    p_in.add_argument("out", type=folder_argument, help="the checkpoint; must not exist")
    p_in.add_argument(
        "--model",
        metavar="OPTION",
        choices=options("model"),
        help="option of configs/model for other knobs than config.json's (default: the nearest)",
    )
    p_in.add_argument(
        "--no-mtp", action="store_true", help="leave out layers of multi-token prediction"
    )
    _tokens(p_in, "those of its config.json and generation_config.json")
    p_out = commands.add_parser("export", help="a checkpoint to a Hugging Face folder")
    p_out.add_argument(
        "checkpoint",
        type=argument,
        help="folder or address of one checkpoint, or of a run: its newest",
    )
    p_out.add_argument("out", type=folder_argument, help="the Hugging Face folder; must not exist")
    p_out.add_argument(
        "--tokenizer",
        type=folder_argument,
        metavar="FOLDER",
        help="copy the tokenizer's files from here (default: the tokenizer of the run's data)",
    )
    p_out.add_argument(
        "--chat-template",
        type=folder_argument,
        metavar="FILE",
        help="Jinja template of chats (default: that of --tokenizer, if it has one)",
    )
    p_out.add_argument(
        "--shard-size",
        type=_bytes,
        metavar="SIZE",
        help="most bytes of weights in a file, such as 500MB (default: 5GB)",
    )
    p_out.add_argument("--dtype", choices=["bf16", "fp32"], help="of weights (default: as saved)")
    _tokens(p_out, "what data, tokenizer or imported model say")
    return p


def _tokens(p: argparse.ArgumentParser, replaced: str) -> None:
    for name in TOKENS:
        p.add_argument(
            f"--{name.replace('_', '-')}",
            type=_ids,
            metavar="ID[,ID]",
            help=f"in place of {replaced}; or none",
        )


def _ids(text: str) -> list[int]:
    try:
        return [] if text == "none" else [int(word) for word in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: expected ids, or none") from None


_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "": 1}


def _bytes(text: str) -> int:
    found = re.fullmatch(r"(\d+)\s*([KMG]B|)", text.strip(), re.IGNORECASE)
    if found is None or not int(found[1]):
        raise argparse.ArgumentTypeError(f"{text!r}: expected a size, such as 500MB or 5GB")
    return int(found[1]) * _UNITS[found[2].upper()]


def special_tokens(args: argparse.Namespace) -> dict[str, int | list[int] | None]:
    options_ = {name: getattr(args, name) for name in TOKENS}
    return {
        name: ids[0] if len(ids) == 1 else ids or None
        for name, ids in options_.items()
        if ids is not None
    }


def import_(args: argparse.Namespace) -> None:
    """Import, and print the overrides of a run that starts from the result."""
    from phalanx.moe.hf.convert import determined, import_folder

    tokens = special_tokens(args)
    determined_knobs = determined(args.folder, tokens)
    if args.no_mtp:
        determined_knobs["mtp_layers"] = 0
    cfg, model_overrides = configured(determined_knobs, args.model)
    validate(cfg, 1)
    with bars() as bar:
        import_folder(args.folder, args.out, cfg.model, bar("importing"), tokens)
    print(f"{args.out}: start from it with")
    words = [*model_overrides, f"run.resume={spelled(str(args.out))}"]
    print(f"  {programs.here('train.py')} {shlex.join(words)}")
    print(training_notes(load(model_overrides), determined_knobs))


def export(args: argparse.Namespace) -> None:
    import torch

    from phalanx.moe.hf.convert import SHARD, export_checkpoint

    path, tokens = checkpoint_of(args.checkpoint), special_tokens(args)
    dtypes = {"bf16": torch.bfloat16, "fp32": torch.float32, None: None}
    with bars() as bar:
        special = export_checkpoint(
            path,
            args.out,
            dtype=dtypes[args.dtype],
            tokenizer=args.tokenizer,
            chat_template=args.chat_template,
            shard_bytes=args.shard_size or SHARD,
            tokens=tokens,
            verifying=bar("verifying", "B"),
            progress=bar("exporting"),
        )
    print(f"{args.out}: of {path}")
    print("  transformers loads it with AutoModelForCausalLM.from_pretrained")
    if special.ids:
        print(f"  {' '.join(f'{name}={ids}' for name, ids in special.ids.items())}")
    if unknown := [name for name in TOKENS if name not in {*special.ids, *tokens}]:
        print(f"  not known, left empty: {', '.join(unknown)} (--tokenizer FOLDER may tell)")
    for note in special.notes:
        print(f"  {note}")
    print("  README.md is a model card with what is on record; license and uses are yours to add")


def configured(determined_knobs: dict[str, Any], option: str | None) -> tuple[Config, list[str]]:
    """A configuration with the determined knobs below `model.`, and the overrides that produce it.

    `option` of configs/model has the other knobs; by default the nearest one, of the same family if
    there is one, with the fewest other values.
    """
    candidates = []
    for name in [option] if option else options("model"):
        cfg = copy.deepcopy(_option(name))
        values = {f"model.{knob}": value for knob, value in determined_knobs.items()}
        if _chooses_by_bias(determined_knobs) and not cfg.model.moe.router.bias_rate:
            values["model.moe.router.bias_rate"] = 1e-3  # there is a bias, and this is DeepSeek's
        changed = {knob: v for knob, v in values.items() if get(cfg, knob) != v}
        family = family_of(cfg.model)
        for knob, value in changed.items():
            put(cfg, knob, value)
        # Sizes may be those of another family by chance.
        candidates.append((family_of(cfg.model) != family, len(changed), name, cfg, changed))
    *_, name, cfg, changed = min(candidates, key=lambda each: each[:3])
    return cfg, [f"model={name}", *(f"{knob}={spelled(v)}" for knob, v in changed.items())]


def _chooses_by_bias(determined_knobs: dict[str, Any]) -> bool:
    """True if the family selects experts with a bias: all that score by sigmoids do."""
    return bool(determined_knobs.get("moe.router.score") == "sigmoid")


@functools.cache
def _option(name: str) -> Config:
    """Configuration of an option of configs/model, with data that fits any vocabulary."""
    cfg = load([f"model={name}", "data=indexed"])  # 0 where the vocabulary is that of the data
    cfg.data.source = "synthetic"
    return cfg


def training_notes(cfg: Config, determined_knobs: dict[str, Any]) -> str:
    """Lines on training knobs that config.json sets, and on those that are left to the user."""
    losses = [
        f"model.{knob}" for knob in determined_knobs if knob in BALANCING and determined_knobs[knob]
    ]
    open_knobs = [f"model.{knob}" for knob in BALANCING if knob not in determined_knobs] + list(
        CHOSEN
    )
    if _chooses_by_bias(determined_knobs):
        open_knobs.insert(0, "model.moe.router.bias_rate")
    if determined_knobs["mtp_layers"]:
        open_knobs.insert(0, "model.mtp_loss")
    lines = []
    if losses:
        lines.append("of training, config.json says:")
        lines.append(f"  {_values(cfg, losses)}")
    lines.append("what it does not say is yours to choose; without overrides the run takes:")
    lines.append(f"  {_values(cfg, open_knobs)}")
    return "\n".join(lines)


def _values(cfg: Config, paths: Iterable[str]) -> str:
    return overrides({path: get(cfg, path) for path in paths})


Advance = Callable[[int, int], None]


@contextmanager
def bars() -> Iterator[Callable[..., Advance]]:
    """Progress bars on stderr, one at a time, as two would move the cursor.

    Each appears with its first progress and is closed when the next one appears.
    """
    with ExitStack() as open_one:

        def bar(label: str, unit: str = " pieces") -> Advance:
            shown: list[Any] = []

            def advance(completed: int, total: int) -> None:
                if not shown:
                    open_one.close()
                    new_bar = progress(label, total=total, unit=unit, unit_scale=unit == "B")
                    shown.append(open_one.enter_context(new_bar))
                shown[0].update(completed)

            return advance

        yield bar


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
