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

import numpy as np
from tokenizers import Tokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a checkout that is not installed

from phalanx.configs import programs
from phalanx.configs.knobs import pluralize
from phalanx.moe.data.documents import (
    Counts,
    Shard,
    Tokenization,
    make_shards,
    write_shard,
)
from phalanx.moe.data.host_cache import DataError, digest, sync
from phalanx.moe.data.inputs import NAMES, find_inputs
from phalanx.moe.data.text_rows import Limit, TooManyBad, by_reason, listing, read_keys
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

EXAMPLES = """examples:
  prepare_data.py wiki/*.jsonl --tokenizer tokenizer.json --eod '<|endoftext|>' --output data/wiki
  prepare_data.py books/ --bytes --output data/books        a folder of .txt files, ids are bytes
  prepare_data.py part-*.parquet --key content --tokenizer t.json --eod '</s>' --output data/code
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
    dtype, choice = smallest_dtype(vocab_size), args.special_text
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
    reading = replace(read_keys(args.key), lines=args.lines)
    return Tokenization(path, eod, dtype, reading, choice), described


def plan_of(
    stats: Sequence[object], recipe: Tokenization, described: Sidecar, chunk_mb: float
) -> str:
    """Digest of inputs and options; with `special` that of versions which knew no other choice."""
    later = ("special_text", "special_spelled", "tokenizer_meaning")
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
        if not limit.allows(described.bad_rows, described.documents + described.skipped):
            raise DataError(
                f"{output} was made without {described.bad_rows:,} bad rows, more than --skip-bad "
                f"{limit.text}; fix them, or give another --output, or --overwrite"
            )
        return len(existing) == 3
    if described is not None and described.plan == before:
        raise DataError(
            f"{output} was made with --special-text special, as by all earlier versions; give that "
            "to keep it, or --overwrite"
        )
    raise DataError(
        f"{existing[0]} exists, of other inputs or options; give another --output, or --overwrite"
    )


def output_files(output: Path) -> tuple[Path, Path, Path]:
    """.json, .bin, .idx, in the order in which they appear: the first identifies the others."""
    return Path(f"{output}.json"), Path(f"{output}.bin"), Path(f"{output}.idx")


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
                finished(shard, write_shard(shard, recipe, folder, limit))
            return
        spawn = multiprocessing.get_context("spawn")
        pool = ProcessPoolExecutor(min(workers, max(1, len(todo))), spawn, watch_parent)
        try:
            tasks = {pool.submit(write_shard, s, recipe, folder, limit): s for s in todo}
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
    joined_files = [folder / "joined.json", folder / "joined.bin", folder / "joined.idx"]
    with joined_files[1].open("wb") as joined:
        for shard in shards:
            with shard.ids(folder).open("rb") as stream:
                shutil.copyfileobj(stream, joined, 1 << 22)
    # np.zeros: without any shard the concatenation would be empty.
    lengths = np.concatenate([np.zeros(0, np.int32), *(np.load(s.lengths(folder)) for s in shards)])
    write_index(joined_files[2], recipe.dtype, lengths)
    counts = [Counts.read(shard.counts(folder)) for shard in shards]
    empty, without_tokens = sum(c.empty for c in counts), sum(c.without_tokens for c in counts)
    bad = [each for c in counts for each in c.bad]
    limit.check(bad, len(lengths) + empty + without_tokens + len(bad))
    skipped = f"rows skipped: {empty:,} empty, {without_tokens:,} without tokens"
    for reason, some in by_reason(bad).items():
        skipped += f", {len(some):,} bad: {reason}"
    if not len(lengths):
        raise DataError(f"the inputs hold no text; {skipped}")
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
    for temporary, final in zip(joined_files, output_files(output), strict=True):
        sync(temporary)
        os.replace(temporary, final)
    print(
        f"{output}: {pluralize(f'{described.documents:,}', 'document')}, "
        f"{pluralize(f'{described.tokens:,}', 'token')} of "
        f"{described.tokenizer}, {described.text_bytes:,} bytes of text; {skipped}"
    )
    if spelled:
        spelling = pluralize(f"{sum(c.spelling for c in counts):,}", "document")
        became = {SPECIAL: "each became the token"}.get(recipe.special_text, "encoded as text")
        print(f"special tokens spelled in {spelling}, {became}: {listed(spelled)}")


def keep_tokenizer(recipe: Tokenization, output: Path) -> None:
    """Copy tokenizer.json next to the output, for sampling from a model trained on it."""
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
