#!/usr/bin/env python
"""Weights of Hugging Face models to checkpoints and back (docs/huggingface.md).

One process, no GPU, and memory for a piece of a tensor at a time, however large the model is.
"""

import argparse
import copy
import functools
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a checkout that is not installed

from tqdm import tqdm  # noqa: E402

from phalanx.configs import programs  # noqa: E402
from phalanx.configs.knobs import get, put, written  # noqa: E402
from phalanx.configs.load import load, options  # noqa: E402
from phalanx.configs.schema import Config  # noqa: E402
from phalanx.configs.validate import ConfigError, validate  # noqa: E402
from phalanx.parallel.checkpoint.saved_config import CheckpointError, checkpoint_of  # noqa: E402
from phalanx.parallel.object_store import argument, folder_argument  # noqa: E402
from phalanx.scripts.reader import may_leave  # noqa: E402

EXAMPLES = """examples:
  convert_hf.py import DeepSeek-V3 imported/deepseek_v3
  convert_hf.py export runs/mine/checkpoints/step_00001000 exported --tokenizer DeepSeek-V3
  convert_hf.py export s3://bucket/runs/mine exported

A run starts from an imported checkpoint with the overrides that import prints and
run.resume=<folder>, on any layout. MXFP4 and block-scaled FP8 become bf16."""

BALANCING = tuple(f"moe.router.{loss}aux_loss" for loss in ("", "seq_", "global_"))
"""Knobs below `model.` that a config.json may hold the coefficient of."""

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
"""Knobs of which no config.json tells, and that a run from an import should not leave to chance."""


@may_leave
def main(argv: Sequence[str] | None = None) -> int:
    """Command line. Returns the exit code: 0 done, 1 bad input, 130 interrupted."""
    args = parser().parse_args(argv)
    from phalanx.moe.hf import ConversionError

    try:
        (import_ if args.command == "import" else export)(args)
    except (ConversionError, ConfigError, CheckpointError) as error:
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
    """Options; `--help` is the manual."""
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
        help="option of configs/model for what config.json does not say (default: the nearest)",
    )
    p_in.add_argument(
        "--no-mtp", action="store_true", help="leave out layers of multi-token prediction"
    )
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
        help="copy the tokenizer's files from here",
    )
    p_out.add_argument("--dtype", choices=["bf16", "fp32"], help="of weights (default: as saved)")
    return p


def import_(args: argparse.Namespace) -> None:
    """Import, and print the overrides of a run that starts from the result."""
    from phalanx.moe.hf.convert import determined, import_folder

    found = determined(args.folder)
    if args.no_mtp:
        found["mtp_layers"] = 0
    cfg, overrides = configured(found, args.model)
    validate(cfg, 1)
    with bar("importing") as progress:
        import_folder(args.folder, args.out, cfg.model, progress)
    print(f"{args.out}: start from it with")
    print(f"  {programs.here('train.py')} {' '.join(overrides)} run.resume={args.out}")
    print(said(load(overrides), found))


def export(args: argparse.Namespace) -> None:
    """Export one checkpoint."""
    import torch

    from phalanx.moe.hf.config import TOKENS
    from phalanx.moe.hf.convert import export_checkpoint

    path = checkpoint_of(args.checkpoint)
    dtypes = {"bf16": torch.bfloat16, "fp32": torch.float32, None: None}
    with bar("verifying", "B") as verifying, bar("exporting") as progress:
        config = export_checkpoint(
            path,
            args.out,
            dtype=dtypes[args.dtype],
            tokenizer=args.tokenizer,
            verifying=verifying,
            progress=progress,
        )
    print(f"{args.out}: of {path}")
    print("  transformers loads it with AutoModelForCausalLM.from_pretrained")
    tokens = {name: config[name] for name in TOKENS}
    if known := [f"{name}={ids}" for name, ids in tokens.items() if ids is not None]:
        print(f"  {' '.join(known)}")
    if unknown := [name for name, ids in tokens.items() if ids is None]:
        print(f"  not known, left empty: {', '.join(unknown)} (--tokenizer FOLDER may tell)")


def configured(found: dict[str, Any], option: str | None) -> tuple[Config, list[str]]:
    """A configuration with the knobs `found` below `model.`, and the overrides that give it.

    Args:
        found: knobs that a Hugging Face folder determines.
        option: of configs/model that gives the others; the one with the fewest differences.
    """
    tried = []
    for name in [option] if option else options("model"):
        cfg = copy.deepcopy(_option(name))
        wanted = {f"model.{knob}": value for knob, value in found.items()}
        if _chooses_by_bias(found) and not cfg.model.moe.router.bias_rate:
            wanted["model.moe.router.bias_rate"] = 1e-3  # there is a bias, and this is DeepSeek's
        changed = {knob: v for knob, v in wanted.items() if get(cfg, knob) != v}
        tried.append((len(changed), name, cfg, changed))
    _, name, cfg, changed = min(tried, key=lambda each: each[:2])
    for knob, value in changed.items():
        put(cfg, knob, value)
    return cfg, [f"model={name}", *(f"{knob}={written(v)}" for knob, v in changed.items())]


def _chooses_by_bias(found: dict[str, Any]) -> bool:
    """All families that score by sigmoids have a bias for the choice of experts."""
    return bool(found["moe.router.score"] == "sigmoid")


@functools.cache
def _option(name: str) -> Config:
    """That of an option of configs/model, on data that goes with any vocabulary."""
    return load([f"model={name}", "data=synthetic"])


def said(cfg: Config, found: dict[str, Any]) -> str:
    """Lines on the training that a config.json tells of, and on what the user is left to choose.

    Args:
        cfg: of a run that starts from the import, without further overrides.
        found: knobs that the Hugging Face folder determines.
    """
    losses = [f"model.{knob}" for knob in found if knob in BALANCING and found[knob]]
    chosen = [f"model.{knob}" for knob in BALANCING if knob not in found] + list(CHOSEN)
    if _chooses_by_bias(found):
        chosen.insert(0, "model.moe.router.bias_rate")
    if found["mtp_layers"]:
        chosen.insert(0, "model.mtp_loss")
    lines = []
    if losses:
        lines.append("of training, config.json says:")
        lines.append(f"  {_overrides(cfg, losses)}")
    lines.append("what it does not say is yours to choose; without overrides the run takes:")
    lines.append(f"  {_overrides(cfg, chosen)}")
    return "\n".join(lines)


def _overrides(cfg: Config, paths: Iterable[str]) -> str:
    return " ".join(f"{path}={written(get(cfg, path))}" for path in paths)


@contextmanager
def bar(what: str, unit: str = " pieces") -> Iterator[Callable[[int, int], None]]:
    """A progress bar on stderr that appears with the first progress."""
    shown: list[Any] = []

    def advance(done: int, total: int) -> None:
        if not shown:
            shown.append(tqdm(total=total, desc=what, unit=unit, unit_scale=unit == "B"))
        shown[0].update(done)

    try:
        yield advance
    finally:
        for each in shown:
            each.close()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
