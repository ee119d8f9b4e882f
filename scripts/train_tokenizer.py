#!/usr/bin/env python
"""Train a byte-level BPE tokenizer on text, and compare its bytes per token with others.

The library tokenizers counts and merges (Sennrich et al., arXiv 1508.07909; bytes as in GPT-2).
Text is split before into words, runs of digits, punctuation and white space, across which nothing
merges. Every text has ids, and decodes to itself. A share of the documents, chosen by their
contents, is held out of the training: bytes per token are measured on it, with special tokens
spelled in it encoded as text, as prepare_data does.
"""

import argparse
import hashlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a checkout that is not installed

from phalanx.configs import programs
from phalanx.configs.knobs import pluralize
from phalanx.moe.data.documents import Counts, batches, with_text
from phalanx.moe.data.host_cache import DataError
from phalanx.moe.data.inputs import NAMES, find_inputs
from phalanx.moe.data.text_rows import Limit, Reading, cut, read_keys, rows
from phalanx.moe.data.tokenizer.encoder import PLAIN, TokenEncoder, load_tokenizer
from phalanx.moe.report.progress import progress
from phalanx.scripts.output.reader import may_leave

EXAMPLES = """examples:
  train_tokenizer.py wiki/*.jsonl --size 32768 --output wiki/tokenizer.json
  train_tokenizer.py crawl/ --size 131072 --digits 1 --share 0.05 --output t.json
  train_tokenizer.py books/ --size 50304 --special '<|endoftext|>' --special '<|user|>' \\
    --against other/tokenizer.json --against o200k_base --output t.json

Prepare data with it: prepare_data.py wiki/*.jsonl --tokenizer wiki/tokenizer.json \\
  --eod '<|endoftext|>' --output data/wiki"""

BYTES = 256
_PIECE = 1 << 25  # bytes of a part of a large input file
_MOST_HELD_OUT = 1 << 25  # bytes of held-out text on which tokenizers are compared
_SPLIT = (
    r"'(?i:[sdmt]|ll|ve|re)|\p{N}{1,%d}| ?[\p{L}\p{M}]+| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Words, each with the space before it; digits; punctuation; white space."""


@may_leave
def main(argv: Sequence[str] | None = None) -> int:
    """Command line. Returns the exit code: 0 done, 1 bad input, 130 interrupted."""
    args = parser().parse_args(argv)
    try:
        run(args)
    except DataError as error:
        print(f"train_tokenizer: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"train_tokenizer: {error.filename or args.output}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("train_tokenizer: interrupted; nothing was written", file=sys.stderr)
        return 130
    return 0


def parser() -> argparse.ArgumentParser:
    p = programs.parser("train_tokenizer", __doc__, epilog=EXAMPLES)
    p.add_argument("inputs", nargs="+", metavar="INPUT", help=f"files, {NAMES}, or folders of them")
    p.add_argument(
        "--size",
        type=int,
        required=True,
        metavar="N",
        help="tokens: bytes, merges and special tokens; multiples of 128 fill the tiles of GPUs",
    )
    p.add_argument("--output", required=True, metavar="FILE", help="tokenizer.json to write")
    p.add_argument(
        "--special",
        action="append",
        default=[],
        metavar="TOKEN",
        help="special token, which no text has by its spelling (default: <|endoftext|>)",
    )
    p.add_argument(
        "--digits", type=int, default=3, metavar="N", help="most digits of a token (default: 3)"
    )
    p.add_argument(
        "--share",
        type=float,
        default=1.0,
        metavar="X",
        help="share of the documents that is used, chosen by their contents (default: all); counts "
        "of words take memory of some times the distinct words",
    )
    p.add_argument(
        "--held-out",
        type=float,
        default=0.01,
        metavar="X",
        help="share of the used documents that is held out of the training (default: 0.01)",
    )
    p.add_argument(
        "--against",
        action="append",
        default=[],
        metavar="TOKENIZER",
        help="tokenizer.json, or an encoding of the package tiktoken such as gpt2 or o200k_base "
        "where its vocabulary is on this machine, to compare with",
    )
    p.add_argument(
        "--key",
        action="append",
        default=[],
        metavar="[KIND=]NAME",
        help="JSON key or Parquet column of the text, as for prepare_data (default: text)",
    )
    p.add_argument("--lines", action="store_true", help="each line of a .txt is a document")
    p.add_argument("--skip-bad", default="0", metavar="N", help="as for prepare_data (default: 0)")
    p.add_argument("--overwrite", action="store_true", help="replace an existing --output")
    return p


def run(args: argparse.Namespace) -> None:
    """Train, compare, write. Raises DataError, in which case nothing is written."""
    special, output = args.special or ["<|endoftext|>"], Path(args.output).expanduser()
    _check(args, special, output)
    others = {name: counter_of(name) for name in args.against}
    inputs = find_inputs(args.inputs)
    print(*inputs.report(), sep="\n")
    reading, limit = replace(read_keys(args.key), lines=args.lines), Limit.read(args.skip_bad)
    held_out: list[str] = []
    seen = 0

    def training() -> Iterator[list[str]]:
        nonlocal seen
        kept = 0
        for batch in batches(documents(inputs.files, reading, limit)):
            used = [text for text in batch if _place(text, "use") < args.share]
            learned = []
            for text in used:
                if _place(text, "hold out") >= args.held_out:
                    learned.append(text)
                elif kept < _MOST_HELD_OUT:
                    kept += len(text.encode(errors="surrogatepass"))
                    held_out.append(text)
            seen += len(learned)
            yield learned

    tokenizer = train(training(), size=args.size, special=special, digits=args.digits)
    if not seen:
        raise DataError("the inputs hold no text to learn from, or --share leaves none of it")
    made = tokenizer.get_vocab_size()
    if made < args.size:
        print(
            f"warning: {made:,} tokens instead of {args.size:,}: no other pair occurs twice in "
            "this text"
        )
    if held_out:
        report(tokenizer, held_out, others)
    output.parent.mkdir(parents=True, exist_ok=True)
    new = output.with_name(f"{output.name}.new")
    tokenizer.save(str(new))
    os.replace(new, output)
    digest = hashlib.sha256(output.read_bytes()).hexdigest()
    print(f"{output}: {made:,} tokens, sha256 {digest[:16]}...")


def _check(args: argparse.Namespace, special: Sequence[str], output: Path) -> None:
    if args.size <= BYTES + len(special):
        raise DataError(
            f"--size {args.size} has no room for merges: more than {BYTES} bytes and "
            f"{pluralize(len(special), 'special token')}"
        )
    if len({*special}) < len(special) or "" in special:
        raise DataError(f"--special: {', '.join(map(repr, special))} must differ, and not be empty")
    if args.digits < 1:
        raise DataError(f"--digits {args.digits} must be at least 1")
    if not 0 < args.share <= 1:
        raise DataError(f"--share {args.share} must be above 0 and at most 1")
    if not 0 <= args.held_out < 1:
        raise DataError(f"--held-out {args.held_out} must be at least 0 and below 1")
    if output.is_dir():
        raise DataError(f"--output {output} is a folder; name a file in it, as tokenizer.json")
    if output.exists() and not args.overwrite:
        raise DataError(f"--output {output} exists; give another file, or --overwrite")


def train(
    texts: Iterable[Sequence[str]], *, size: int, special: Sequence[str], digits: int
) -> Tokenizer:
    """Byte-level BPE tokenizer of `size` tokens at most, special tokens first.

    The result depends on the texts and not on their order in batches.
    """
    tokenizer = Tokenizer(models.BPE())
    words = pre_tokenizers.Split(Regex(_SPLIT % digits), behavior="isolated")
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, as_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        min_frequency=2,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in special],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    with progress("reading text", unit=" documents", unit_scale=True) as bar:

        def counted() -> Iterator[Sequence[str]]:
            for batch in texts:
                yield batch
                bar.update(len(batch))

        tokenizer.train_from_iterator(counted(), trainer)
    return tokenizer


def documents(files: Sequence[str], reading: Reading, limit: Limit) -> Iterator[str]:
    """Texts of files, without empty rows. Raises DataError at broken rows beyond the limit."""
    counts = Counts()
    for path in files:
        for piece, _ in cut(path, reading, _PIECE):
            yield from with_text(rows(piece, reading), counts, limit)


def report(
    tokenizer: Tokenizer,
    texts: Sequence[str],
    others: dict[str, Callable[[Sequence[str]], int]],
) -> None:
    """Print bytes per token of held-out texts, which must decode to themselves.

    Raises:
        DataError: a text does not.
    """
    size = sum(len(text.encode(errors="surrogatepass")) for text in texts)
    print(f"held out: {pluralize(f'{len(texts):,}', 'document')}, {pluralize(f'{size:,}', 'byte')}")
    tokens = {"this tokenizer": 0}
    for text, ids in zip(texts, _plain(tokenizer).encode(texts), strict=True):
        if tokenizer.decode(ids.tolist(), skip_special_tokens=False) != text:
            raise DataError(f"a held-out text does not decode to itself: {text[:80]!r}")
        tokens["this tokenizer"] += len(ids)
    tokens |= {name: count(texts) for name, count in others.items()}
    for name, number in tokens.items():
        print(f"  {size / max(1, number):6.3f} bytes per token, {number:12,} tokens: {name}")


def counter_of(name: str) -> Callable[[Sequence[str]], int]:
    """Function that counts the tokens of texts by a tokenizer.json or an encoding of tiktoken.

    Raises:
        DataError: it is neither, or its vocabulary is not on this machine.
    """
    if Path(name).expanduser().is_file():
        encoder = _plain(load_tokenizer(str(Path(name).expanduser())))
        return lambda texts: sum(len(ids) for ids in encoder.encode(texts))
    try:
        import tiktoken

        encoding = tiktoken.get_encoding(name)
    except ImportError:
        raise DataError(f"--against {name} is no file, and tiktoken is not installed") from None
    except Exception as error:  # no such encoding, or a download that fails, by many types
        raise DataError(f"--against {name} is no file, nor in tiktoken: {error}") from None
    return lambda texts: sum(len(encoding.encode_ordinary(text)) for text in texts)


def _plain(tokenizer: Tokenizer) -> TokenEncoder:
    """Encoder of a copy, as its settings change."""
    return TokenEncoder(Tokenizer.from_str(tokenizer.to_str()), (), PLAIN)


def _place(text: str, purpose: str) -> float:
    """Place of a text in [0, 1), by its contents: the same in any order and on any machine."""
    data = f"{purpose}\0{text}".encode(errors="surrogatepass")
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest()) / 2**64


if __name__ == "__main__":
    sys.exit(main())
