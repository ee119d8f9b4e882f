"""Shared parts of the commands that read a checkpoint: options, progress, errors."""

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from phalanx.configs import programs
from phalanx.moe.data.tokenizer.encoder import CHOICES, HELP
from phalanx.moe.report.console import quiet
from phalanx.moe.report.progress import progress
from phalanx.parallel.checkpoint import commit
from phalanx.parallel.checkpoint.saved_config import CheckpointError, checkpoint_of
from phalanx.parallel.object_store import argument

if TYPE_CHECKING:
    from phalanx.moe.inference.predictor import Predictor


TEMPLATE_HELP = "Jinja template of chats (default: that beside the tokenizer, or the run's data)"
NO_TEMPLATE = (
    "neither the tokenizer nor the run's data has a chat template: give --tokenizer FOLDER with "
    "one, or --chat-template FILE"
)


def parser(script: str, manual: str | None, special_text: str) -> argparse.ArgumentParser:
    """Parser with the options for checkpoint, tokenizer and device.

    The `manual` is the script's docstring, `special_text` the default of --special-text.
    """
    command = programs.parser(script, manual)
    add = command.add_argument
    add(
        "run", type=argument, metavar="RUN", help="folder or address of a run, or of one checkpoint"
    )
    add("--step", type=int, metavar="N", help="checkpoint of this step (default: the newest)")
    add(
        "--tokenizer",
        metavar="FILE",
        help="tokenizer.json of Hugging Face, or bytes (default: that of the run's data)",
    )
    add("--eod", metavar="TOKEN", help="token that ends a document, if it is not known")
    add("--special-text", choices=CHOICES, default=special_text, help=HELP)
    add("--context", type=int, metavar="N", help="context length in tokens (default: as trained)")
    add(
        "--device",
        choices=["auto", "cuda", "cpu"],
        default="auto",
        help="default: a GPU if there is one",
    )
    add("--no-verify", action="store_true", help="compare sizes of files, not their checksums")
    return command


@contextmanager
def predictor_of(args: argparse.Namespace) -> Iterator["Predictor"]:
    """The model that the options name; sets `args.context` if the option was left out.

    Raises ValueError, CheckpointError and OSError, which `report_errors` reports.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("this takes one process: start it with python, not with torchrun or srun")
    path = checkpoint_of(args.run, args.step)
    print(f"-- loading {path}", file=sys.stderr, flush=True)  # imports alone take seconds
    if args.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    import torch

    if args.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch sees no GPU here; leave the option out")
    from phalanx.parallel.megatron.imports import importing_megatron

    with importing_megatron():
        from phalanx.moe.inference.predictor import opened

    files = commit.read_commit(path).files.values()
    size = sum(size for size, _ in files)
    bar = progress("verifying", total=size, unit="B", unit_scale=True, disable=args.no_verify)
    with bar, opened(path, None if args.no_verify else bar.update) as predictor:
        bar.close()
        args.context = args.context or predictor.cfg.data.sequence_length
        yield predictor


def positive(**values: int | None) -> None:
    """Raise ValueError for an option below 1."""
    for name, value in values.items():
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} {value}: must be at least 1")


def report_errors(program: str, work: Callable[[], None]) -> int:
    """Run a program; a user's mistake is reported in one line on stderr.

    Returns the exit code: 0 done, 2 bad input, 130 interrupted.
    """
    quiet()
    try:
        work()
    except (ValueError, CheckpointError, commit.Invalid) as error:
        line = " ".join(str(error).split())
    except RuntimeError as error:
        if type(error).__name__ != "OutOfMemoryError":  # torch's; torch is not imported here
            raise
        line = "the GPU has not enough memory: lower --context or --batch, or use --device cpu"
    except OSError as error:
        line = f"{error.filename or ''}: {error.strerror or error}".removeprefix(": ")
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    else:
        return 0
    print(f"{program}: {line}", file=sys.stderr)
    return 2
