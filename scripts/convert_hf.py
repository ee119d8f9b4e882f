#!/usr/bin/env python
"""Weights of Hugging Face models to checkpoints and back: DeepSeek-V3, GPT-OSS, Qwen3-MoE.

One process, no GPU, and memory for a piece of a tensor at a time, however large the model is.
"""

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a checkout that is not installed

from tqdm import tqdm  # noqa: E402

from configs.knobs import get, put, written  # noqa: E402
from configs.load import load, options  # noqa: E402
from configs.schema import Config  # noqa: E402
from configs.validate import ConfigError, validate  # noqa: E402

EXAMPLES = """examples:
  convert_hf.py import DeepSeek-V3 imported/deepseek_v3
  convert_hf.py export runs/mine/checkpoints/step_00001000 exported --tokenizer DeepSeek-V3

A run starts from an imported checkpoint with the overrides that import prints and
run.resume=<folder>, on any layout. MXFP4 and block-scaled FP8 become bf16."""


def main(argv: Sequence[str] | None = None) -> int:
    """Command line. Returns the exit code: 0 done, 1 bad input, 130 interrupted."""
    args = parser().parse_args(argv)
    from moe.hf import ConversionError

    try:
        (import_ if args.command == "import" else export)(args)
    except (ConversionError, ConfigError) as error:
        for line in str(error).splitlines():
            print(f"convert_hf: {line}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"convert_hf: {error.filename or args.out}: {error.strerror}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("convert_hf: interrupted; nothing was written", file=sys.stderr)
        return 130
    return 0


def parser() -> argparse.ArgumentParser:
    """Options; `--help` is the manual."""
    p = argparse.ArgumentParser(
        prog="convert_hf.py",
        description="Convert between Hugging Face safetensors and checkpoints.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = p.add_subparsers(dest="command", required=True)
    p_in = commands.add_parser("import", help="a Hugging Face folder to a checkpoint")
    p_in.add_argument("folder", type=Path, help="with config.json and safetensors")
    p_in.add_argument("out", type=Path, help="the checkpoint; must not exist")
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
    p_out.add_argument("checkpoint", type=Path, help="folder of one checkpoint, of any layout")
    p_out.add_argument("out", type=Path, help="the Hugging Face folder; must not exist")
    p_out.add_argument(
        "--tokenizer", type=Path, metavar="FOLDER", help="copy the tokenizer's files from here"
    )
    p_out.add_argument("--dtype", choices=["bf16", "fp32"], help="of weights (default: as saved)")
    return p


def import_(args: argparse.Namespace) -> None:
    """Import, and print the overrides of a run that starts from the result."""
    from moe.hf.convert import determined, import_folder

    found = determined(args.folder)
    if args.no_mtp:
        found["mtp_layers"] = 0
    cfg, overrides = configured(found, args.model)
    validate(cfg, 1)
    with bar("importing") as progress:
        import_folder(args.folder, args.out, cfg.model, progress)
    print(f"{args.out}: start from it with")
    print(f"  train.py {' '.join(overrides)} run.resume={args.out}")


def export(args: argparse.Namespace) -> None:
    """Export one checkpoint."""
    import torch

    from moe.hf.convert import export_checkpoint

    dtypes = {"bf16": torch.bfloat16, "fp32": torch.float32, None: None}
    with bar("verifying", "B") as verifying, bar("exporting") as progress:
        export_checkpoint(
            args.checkpoint,
            args.out,
            dtype=dtypes[args.dtype],
            tokenizer=args.tokenizer,
            verifying=verifying,
            progress=progress,
        )
    print(f"{args.out}: transformers loads it with AutoModelForCausalLM.from_pretrained")


def configured(found: dict[str, Any], option: str | None) -> tuple[Config, list[str]]:
    """A configuration with the knobs `found` below `model.`, and the overrides that give it.

    Args:
        found: knobs that a Hugging Face folder determines.
        option: of configs/model that gives the others; the one with the fewest differences.
    """
    tried = []
    for name in [option] if option else options("model"):
        cfg = load([f"model={name}", "data=synthetic"])  # which goes with any vocabulary
        wanted = {f"model.{knob}": value for knob, value in found.items()}
        if found["attention.kind"] == "mla" and not cfg.model.moe.router.bias_rate:
            wanted["model.moe.router.bias_rate"] = 1e-3  # there is a bias, and this is DeepSeek's
        changed = {knob: v for knob, v in wanted.items() if get(cfg, knob) != v}
        tried.append((len(changed), name, cfg, changed))
    _, name, cfg, changed = min(tried, key=lambda each: each[:2])
    for knob, value in changed.items():
        put(cfg, knob, value)
    return cfg, [f"model={name}", *(f"{knob}={written(v)}" for knob, v in changed.items())]


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
