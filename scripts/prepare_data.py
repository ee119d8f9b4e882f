#!/usr/bin/env python
"""Turn text into Megatron .bin/.idx: prefix.bin, prefix.idx, and prefix.json that describes them.

Inputs are cut into chunks; worker processes turn each into a shard (ids and document lengths) in
prefix.parts/, and the shards are joined in input order. The output depends neither on the number
of workers nor on interruptions: the same command reuses finished shards. Rejected input leaves no
files. Output files appear only when all shards are joined. Rows without text or tokens are left out
and counted, and so are broken ones, up to the number of --skip-bad. Importing this module imports
neither torch nor Megatron-Core, which would take seconds.
"""

import argparse
import contextlib
import fcntl
import hashlib
import multiprocessing
import os
import shutil
import signal
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, replace
from multiprocessing import connection
from pathlib import Path
from pkgutil import resolve_name

import numpy as np
from tokenizers import Tokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a checkout that is not installed

from phalanx.configs import programs
from phalanx.configs.knobs import pluralize
from phalanx.configs.tables.rows import JOIN, READ_TEMPLATE, SUPERVISED, WRITE_SHARD
from phalanx.moe.data.documents import (
    Counts,
    Shard,
    Supervised,
    Tokenization,
    chat_template_beside,
    make_shards,
    write_shard,
)
from phalanx.moe.data.host_cache import DataError, digest, sync
from phalanx.moe.data.inputs import NAMES, find_inputs, kind_of
from phalanx.moe.data.text_rows import (
    WHOLE,
    Limit,
    Reading,
    TooManyBad,
    by_reason,
    listing,
    read_keys,
)
from phalanx.moe.data.token_files import (
    BYTES,
    BYTES_EOD,
    Sidecar,
    smallest_dtype,
    tokenizer_beside,
    write_index,
)
from phalanx.moe.data.tokenizer.encoder import (
    CHOICES,
    HELP,
    PLAIN,
    SPECIAL,
    listed,
    load_tokenizer,
    meaning,
)
from phalanx.moe.report.progress import progress
from phalanx.parallel.object_store import folder_argument
from phalanx.scripts.output.reader import may_leave

EXAMPLES = r"""examples:
  prepare_data.py wiki/*.jsonl --tokenizer tokenizer.json --eod '<|endoftext|>' --output data/wiki
  prepare_data.py books/ --bytes --output data/books        a folder of .txt files, ids are bytes
  prepare_data.py part-*.parquet --key content --tokenizer t.json --eod '</s>' --output data/code
  prepare_data.py chats.jsonl --rows messages --sequence-length 2048 --tokenizer t.json \
    --eod '<|end|>' --output data/chats
  prepare_data.py crawl/ --key text --key parquet=content --skip-bad 0.1% --bytes --output data/c

An interrupted run continues when the same command is given again. Train on the result with
  train.py data.source=indexed data.blend=[data/wiki]
The disk must hold the output twice while it is being joined."""


@may_leave
def main(argv: Sequence[str] | None = None) -> int:
    """Command line. Returns the exit code: 0 done, 1 bad input, 130 interrupted."""
    args = parser().parse_args(argv)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # processes, not threads
    try:
        prepare(args)
    except DataError as error:
        print(f"prepare_data: {error}", file=sys.stderr)
        return 1
    except BrokenProcessPool:
        print(
            "prepare_data: a worker was killed, perhaps for want of memory; the same command "
            "continues, with fewer --workers if need be",
            file=sys.stderr,
        )
        return 1
    except OSError as error:
        print(f"prepare_data: {error.filename or args.output}: {error.strerror}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("prepare_data: interrupted; the same command continues", file=sys.stderr)
        return 130
    return 0


def parser() -> argparse.ArgumentParser:
    p = programs.parser(
        "prepare_data",
        "Tokenize text into Megatron .bin/.idx files for data.source=indexed.",
        epilog=EXAMPLES,
    )
    p.add_argument(
        "inputs",
        nargs="+",
        metavar="INPUT",
        help=f"files, {NAMES}, or folders that are searched for them, without what is hidden and "
        "README-like files; files left out are listed",
    )
    p.add_argument(
        "--output",
        type=folder_argument,
        required=True,
        metavar="PREFIX",
        help="path without .bin/.idx",
    )
    vocabulary = p.add_mutually_exclusive_group(required=True)
    vocabulary.add_argument("--tokenizer", metavar="FILE", help="tokenizer.json of Hugging Face")
    vocabulary.add_argument(
        "--bytes", action="store_true", help="ids are UTF-8 bytes (vocabulary 256)"
    )
    p.add_argument(
        "--eod", metavar="TOKEN", help="token that ends a document; needed with --tokenizer"
    )
    p.add_argument("--special-text", choices=CHOICES, default=PLAIN, help=HELP)
    rows = p.add_argument_group("prompts and answers")
    rows.add_argument(
        "--rows",
        choices=["text", *SUPERVISED],
        default="text",
        help="what a JSON object holds: text; messages of a chat, written by a template; or pairs, "
        "a prompt and a completion or response. Only answers count in the loss",
    )
    rows.add_argument(
        "--chat-template",
        metavar="FILE",
        help="jinja file (default: that beside --tokenizer, or in its tokenizer_config.json)",
    )
    rows.add_argument(
        "--sequence-length",
        type=int,
        metavar="N",
        help="data.sequence_length of the training, into which whole rows are packed",
    )
    rows.add_argument(
        "--long",
        choices=["drop", "cut"],
        default="drop",
        help="what is done with rows of more tokens, which are counted (default: %(default)s)",
    )
    p.add_argument(
        "--key",
        action="append",
        default=[],
        metavar="[KIND=]NAME",
        help="JSON key or Parquet column that holds the text (default: text); with KIND= of jsonl, "
        "json or parquet files alone",
    )
    p.add_argument(
        "--lines", action="store_true", help="each line of a .txt is a document, not each file"
    )
    p.add_argument(
        "--skip-bad",
        default="0",
        metavar="N",
        help="leave out up to N broken rows, or a share of all as in 0.1%%, and list their places "
        "in PREFIX.bad_rows.tsv (default: stop at the first)",
    )
    p.add_argument(
        "--workers",
        type=int,
        default=os.cpu_count() or 1,
        metavar="N",
        help="worker processes (default: the %(default)s cores of this machine)",
    )
    p.add_argument(
        "--chunk-mb",
        type=float,
        default=32.0,
        metavar="MB",
        help="input of one shard, the unit of work and of resuming (default: %(default)s)",
    )
    p.add_argument("--overwrite", action="store_true", help="replace what another command made")
    return p


def prepare(args: argparse.Namespace) -> None:
    """Tokenize and join. Raises DataError, in which case there are no output files."""
    if args.workers < 1 or args.chunk_mb <= 0:
        raise DataError("--workers and --chunk-mb must be positive")
    limit = Limit.read(args.skip_bad)
    recipe, described = make_recipe(args)
    inputs = find_inputs(args.inputs)
    for path in inputs.files if recipe.supervised else ():
        if kind_of(path) not in ("jsonl", "json"):
            raise DataError(f"{path} has no JSON objects, which --rows {args.rows} reads")
    print(*inputs.report(), sep="\n")
    shards = make_shards(inputs.files, recipe.reading, max(1, int(args.chunk_mb * 2**20)))
    stats = [(path, os.stat(path).st_size, os.stat(path).st_mtime_ns) for path in inputs.files]
    plan = plan_of(stats, recipe, described, args.chunk_mb)
    before = plan_of(stats, replace(recipe, special_text=SPECIAL), described, args.chunk_mb)
    output = Path(args.output).expanduser().absolute()
    for path in map(str, output_files(output)):
        if path in inputs.files:
            raise DataError(f"--output {output} would replace the input {path}; give another one")
    if is_done(output, (plan, before), args.overwrite, limit):
        print(f"{output}.bin and .idx are complete already")
        shutil.rmtree(f"{output}.parts", ignore_errors=True)
        return
    with parts_folder(output, plan, args.overwrite) as folder:
        todo = [shard for shard in shards if not shard.lengths(folder).exists()]
        if len(todo) < len(shards):
            existing = len(shards) - len(todo)
            print(f"continuing: {existing} of {pluralize(len(shards), 'shard')} there already")
        try:
            tokenize(shards, todo, recipe, folder, args.workers, limit)
            join(shards, recipe, replace(described, plan=plan), folder, output, limit)
        except TooManyBad:  # the shards remain valid for a higher limit
            raise
        except DataError:  # no shard is valid for the corrected input
            shutil.rmtree(folder)
            raise
        shutil.rmtree(folder)


# --- plan -----------------------------------------------------------------------------------------


def make_recipe(args: argparse.Namespace) -> tuple[Tokenization, Sidecar]:
    """Recipe, and the description of the result without its counts."""
    if args.bytes:
        name, sha256, vocab_size, eod, path, means = BYTES, "", 256, BYTES_EOD, "", ""
        if args.eod is not None:
            raise DataError(
                f"--eod is for --tokenizer; with --bytes byte {BYTES_EOD} ends documents"
            )
    else:
        source = Path(args.tokenizer).expanduser()
        source = source / "tokenizer.json" if source.is_dir() else source
        if not source.is_file():
            raise DataError(f"--tokenizer {source} does not exist")
        path = str(source.absolute())
        tokenizer = load_tokenizer(path)
        eod = find_eod(tokenizer, args.eod, path)
        vocab_size = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        name = f"{source.absolute().parent.name}/{source.name}"
        sha256 = hashlib.sha256(source.read_bytes()).hexdigest()
        means = meaning(tokenizer)
    dtype, choice, rows = smallest_dtype(vocab_size), args.special_text, supervised(args, path)
    described = Sidecar(
        name,
        sha256,
        vocab_size,
        eod,
        dtype,
        documents=0,
        tokens=0,
        tokenizer_meaning=means,
        special_text=choice,
    )
    reading = Reading(WHOLE) if rows else replace(read_keys(args.key), lines=args.lines)
    return Tokenization(path, eod, dtype, reading, choice, rows), described


def supervised(args: argparse.Namespace, tokenizer: str) -> Supervised | None:
    """Rows that have prompts and answers; None for text. Raises DataError."""
    template, length = args.chat_template, args.sequence_length
    if args.rows == "text":
        if template or length:
            raise DataError(
                "--chat-template and --sequence-length are for --rows messages or pairs"
            )
        return None
    if args.key or args.lines:
        raise DataError(
            f"--key and --lines are for --rows text; --rows {args.rows} has its own keys"
        )
    if not length or length < 2:
        raise DataError(
            f"--rows {args.rows} needs --sequence-length N, above 1: rows are packed into "
            "sequences of the training, data.sequence_length"
        )
    if args.rows != "messages":
        if template:
            raise DataError("--chat-template is for --rows messages; a pair has no template")
        return Supervised(args.rows, length, args.long)
    if args.bytes:
        raise DataError("--rows messages needs --tokenizer: bytes have no token that ends a turn")
    file = str(Path(template).expanduser()) if template else ""
    return Supervised(args.rows, length, args.long, *resolve_name(READ_TEMPLATE)(file, tokenizer))


def plan_of(
    stats: Sequence[object], recipe: Tokenization, described: Sidecar, chunk_mb: float
) -> str:
    """Digest of inputs and options; with `special` that of versions which knew no other choice."""
    later = {"special_text", "special_spelled", "tokenizer_meaning", "labels", "packed"}
    later |= set() if recipe.supervised else {"supervised"}
    options = [
        {k: v for k, v in asdict(each).items() if k not in later} for each in (recipe, described)
    ]
    choice = [] if recipe.special_text == SPECIAL else [recipe.special_text]
    return digest([stats, *options, chunk_mb, *choice])


def find_eod(tokenizer: Tokenizer, token: str | None, path: str) -> int:
    special = [t.content for t in tokenizer.get_added_tokens_decoder().values() if t.special]
    shown = ", ".join(sorted(special)[:20]) or "none"
    if token is None:
        raise DataError(
            f"--eod is needed: the token that ends a document; special in {path}: {shown}"
        )
    number = tokenizer.token_to_id(token)
    if number is None:
        raise DataError(f"--eod {token} is not a token of {path}; its special tokens: {shown}")
    return number


def is_done(output: Path, plans: tuple[str, str], overwrite: bool, limit: Limit) -> bool:
    """True if a complete result of the same command exists.

    `plans` are of the command, and with --special-text special. Raises DataError for files of
    another command, or a result with more bad rows than `limit`.
    """
    existing = [path for path in output_files(output) if path.exists()]
    if overwrite or not existing:
        return False
    described = None
    with contextlib.suppress(DataError, FileNotFoundError):
        described = Sidecar.read(output_files(output)[0])
    plan, before = plans
    if described is not None and described.plan == plan:
        rows = None if described.packed else described.documents + described.skipped
        if not limit.allows(described.bad_rows, rows):  # without their number a share is not known
            raise DataError(
                f"{output} was made without {described.bad_rows:,} bad rows, more than --skip-bad "
                f"{limit.text}; fix them, or give another --output, or --overwrite"
            )
        return len(existing) == (5 if described.labels else 3)
    if described is not None and described.plan == before:
        raise DataError(
            f"{output} was made with --special-text special, as by all earlier versions; give that "
            "to keep it, or --overwrite"
        )
    raise DataError(
        f"{existing[0]} exists, of other inputs or options; give another --output, or --overwrite"
    )


def output_files(output: Path) -> list[Path]:
    """.json, .bin, .idx, in the order in which they appear: the first identifies the others.

    The last two are the loss mask of supervised rows.
    """
    return [Path(f"{output}.{end}") for end in ("json", "bin", "idx", "mask.bin", "mask.idx")]


@contextlib.contextmanager
def parts_folder(output: Path, plan: str, overwrite: bool) -> Iterator[Path]:
    folder = Path(f"{output}.parts")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / "lock").open("ab")
    except OSError as error:
        raise DataError(f"--output: {folder} cannot be written: {error.strerror}") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise DataError(f"another process is writing {folder}") from None
        note = folder / "plan"
        if note.exists() and note.read_text() != plan:
            if not overwrite:
                raise DataError(
                    f"{folder} is of a run with other inputs or options; delete it, or --overwrite"
                )
            for path in folder.glob("[0-9]*"):
                path.unlink()
        note.write_text(plan)
        yield folder


def tokenize(
    shards: Sequence[Shard],
    todo: Sequence[Shard],
    recipe: Tokenization,
    folder: Path,
    workers: int,
    limit: Limit,
) -> None:
    """Write all shards of `todo`, with progress over the bytes of all shards."""
    write = resolve_name(WRITE_SHARD) if recipe.supervised else write_shard
    total, left = (sum(shard.size for shard in some) for some in (shards, todo))
    bar = progress("tokenizing", total=total, initial=total - left, unit="B", unit_scale=True)
    missing = {shard.number for shard in todo}
    bad = [b for s in shards if s.number not in missing for b in Counts.read(s.counts(folder)).bad]

    def finished(shard: Shard, size: int) -> None:
        bar.update(size)
        if more := Counts.read(shard.counts(folder)).bad:
            bad.extend(more)
            bar.set_postfix_str(f"{len(bad):,} bad rows")
            limit.check(bad)

    with bar:
        limit.check(bad)
        if workers == 1:
            for shard in todo:
                finished(shard, write(shard, recipe, folder, limit))
            return
        spawn = multiprocessing.get_context("spawn")
        pool = ProcessPoolExecutor(min(workers, max(1, len(todo))), spawn, watch_parent)
        try:
            tasks = {pool.submit(write, s, recipe, folder, limit): s for s in todo}
            for done in as_completed(tasks):
                finished(tasks[done], done.result())
        finally:
            pool.shutdown(cancel_futures=True)


def watch_parent() -> None:
    """Initialize a worker: ignore interrupts, and exit when the parent has ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


# --- result ---------------------------------------------------------------------------------------


def join(
    shards: Sequence[Shard],
    recipe: Tokenization,
    described: Sidecar,
    folder: Path,
    output: Path,
    limit: Limit,
) -> None:
    """Concatenate the shards in order, then rename the written files to their final names."""
    print(f"joining {pluralize(len(shards), 'shard')}")
    joined_files = output_files(folder / "joined")
    # np.zeros: without any shard the concatenation would be empty.
    lengths = np.concatenate([np.zeros(0, np.int32), *(np.load(s.lengths(folder)) for s in shards)])
    rows, lines = len(lengths), list[str]()
    if recipe.supervised:
        lengths, described, lines = resolve_name(JOIN)(shards, recipe, described, folder)
    else:
        del joined_files[3:]
        with joined_files[1].open("wb") as joined:
            for shard in shards:
                with shard.ids(folder).open("rb") as stream:
                    shutil.copyfileobj(stream, joined, 1 << 22)
    write_index(joined_files[2], recipe.dtype, lengths)
    counts = [Counts.read(shard.counts(folder)) for shard in shards]
    empty, without_tokens = sum(c.empty for c in counts), sum(c.without_tokens for c in counts)
    bad = [each for c in counts for each in c.bad]
    limit.check(bad, rows + empty + without_tokens + len(bad))
    skipped = f"rows skipped: {empty:,} empty, {without_tokens:,} without tokens"
    for reason, some in by_reason(bad).items():
        skipped += f", {len(some):,} bad: {reason}"
    if not len(lengths):
        raise DataError("; ".join(["the inputs hold no text", skipped, *lines]))
    spelled = sum((Counter(c.spelled) for c in counts), Counter[str]())
    described = replace(
        described,
        documents=len(lengths),
        tokens=int(lengths.sum(dtype=np.int64)),
        text_bytes=sum(c.text_bytes for c in counts),
        skipped=empty + without_tokens + len(bad),
        bad_rows=len(bad),
        special_spelled=spelled.total(),
    )
    described.write(joined_files[0])
    keep_tokenizer(recipe, output)
    bad_rows_file = Path(f"{output}.bad_rows.tsv")
    bad_rows_file.unlink(missing_ok=True)  # from a replaced output
    if bad:
        with (folder / "bad_rows").open("w", encoding="utf-8") as stream:
            stream.writelines(listing(bad))
        os.replace(folder / "bad_rows", bad_rows_file)
        skipped += f" (places: {bad_rows_file})"
    for final in output_files(output)[len(joined_files) :]:
        final.unlink(missing_ok=True)  # from a replaced output
    for temporary, final in zip(joined_files, output_files(output), strict=False):
        sync(temporary)
        os.replace(temporary, final)
    size = "" if recipe.supervised else f", {described.text_bytes:,} bytes of text"
    print(
        f"{output}: {pluralize(f'{described.documents:,}', 'document')}, "
        f"{pluralize(f'{described.tokens:,}', 'token')} of {described.tokenizer}{size}; {skipped}"
    )
    print(*lines, sep="\n", end="\n" * bool(lines))
    if spelled:
        spelling = pluralize(f"{sum(c.spelling for c in counts):,}", "document")
        became = {SPECIAL: "each became the token"}.get(recipe.special_text, "encoded as text")
        print(f"special tokens spelled in {spelling}, {became}: {listed(spelled)}")


def keep_tokenizer(recipe: Tokenization, output: Path) -> None:
    """Copy tokenizer.json next to the output, for sampling from a model trained on it.

    So is the chat template, for chats with it and for an export.
    """
    template = chat_template_beside(str(output))
    if recipe.supervised and recipe.supervised.template:
        template.write_text(recipe.supervised.template, "utf-8")
    else:
        template.unlink(missing_ok=True)
    copy = tokenizer_beside(str(output))
    if recipe.tokenizer:
        new = Path(f"{copy}.new")
        shutil.copyfile(recipe.tokenizer, new)
        sync(new)
        os.replace(new, copy)
    else:
        copy.unlink(missing_ok=True)  # from a replaced output


if __name__ == "__main__":
    sys.exit(main())
