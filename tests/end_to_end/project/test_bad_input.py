"""Bad input ends with one line that names the cause and the fix, an exit code, and no files.

`CASES` lists the inputs. `python -m tests.end_to_end.project.test_bad_input` prints a part of
them, with the answers, as a table.
"""

import contextlib
import functools
import io
import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from phalanx.configs import load
from tests.support.advice import advised
from tests.support.distributed import run_distributed
from tests.support.runs import TINY, announced, run, write_corpus
from tests.support.scheduling import mostly_slow

ROOT = Path(__file__).resolve().parents[3]
COMMAND = [*TINY, "run.steps=2"]

Prepare = Callable[[Path], Any]
"""Writes the bad input to a folder."""


class Case(NamedTuple):
    """One bad input. `{0}` is the folder that `files` has filled."""

    args: str
    """Command line, on top of a small valid one."""
    cause: str
    fix: str
    files: Prepare | None = None
    code: int = 2
    env: tuple[tuple[str, str], ...] = ()


# --- files ----------------------------------------------------------------------------------------


def corpus(folder: Path, name: str = "text", documents: list[list[int]] | None = None) -> None:
    write_corpus(folder / name, documents)


def with_corpus(change: Prepare) -> Prepare:
    def prepare(folder: Path) -> None:
        corpus(folder)
        change(folder)

    return prepare


def without(name: str) -> Prepare:
    return with_corpus(lambda folder: (folder / name).unlink())


def cut(name: str, size: int) -> Prepare:
    return with_corpus(lambda f: os.truncate(f / name, (f / name).stat().st_size - size))


def patched(name: str, at: int, raw: bytes) -> Prepare:
    def patch(folder: Path) -> None:
        with (folder / name).open("r+b") as file:
            file.seek(at)
            file.write(raw)

    return with_corpus(patch)


def written(name: str, raw: bytes | str) -> Prepare:
    def write(folder: Path) -> None:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(raw.encode() if isinstance(raw, str) else raw)

    return with_corpus(write)


def sidecar(folder: Path, name: str = "text", **change: Any) -> None:
    size = (folder / f"{name}.bin").stat().st_size // 2
    count = struct.unpack("<Q", (folder / f"{name}.idx").read_bytes()[26:34])[0] - 1
    content = {"tokenizer": "bytes", "tokenizer_sha256": "", "vocab_size": 256, "eod": 0}
    content |= {"dtype": "uint16", "documents": count, "tokens": size, "plan": ""}
    (folder / f"{name}.json").write_text(json.dumps(content | change))


def two_tokenizers(folder: Path) -> None:
    for name in ("text", "other"):
        corpus(folder, name)
        sidecar(folder, name, tokenizer=name, tokenizer_sha256=name)


def far_tokens(folder: Path) -> None:
    corpus(folder, documents=[[7] * 40, [7, 300] * 20, [7] * 40])


@functools.cache
def sound() -> tempfile.TemporaryDirectory[str]:
    """Folder of a run of two steps, copied by tests that need one."""
    folder = tempfile.TemporaryDirectory()
    assert answer([*COMMAND, "data=synthetic", f"run.dir={folder.name}/runs"], {}).code == 0
    return folder


def trained(folder: Path, change: Prepare = lambda _: None) -> None:
    """A run of two steps, damaged."""
    shutil.copytree(f"{sound().name}/runs", folder / "runs")
    change(folder / "runs/run/checkpoints/step_00000002")


def flipped(checkpoint: Path) -> None:
    path = next(checkpoint.glob("*.distcp"))
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


def cleared(checkpoint: Path) -> None:
    for path in checkpoint.iterdir():
        path.unlink()


INDEXED = "data=indexed data.blend=[{0}/text]"
RANDOM = "data=synthetic"
YAML = "optim=bad"
NO_CREDENTIALS = (("AWS_EC2_METADATA_DISABLED", "true"), ("AWS_SHARED_CREDENTIALS_FILE", "/none"))

CASES = {
    # the command line
    "unknown knob": Case("run.stesp=3", "run.stesp: no such knob", "did you mean run.steps?"),
    "knob in the wrong section": Case("run.lr=1", "run.lr: no such knob", "mean optim.lr?"),
    "dashes": Case("--run.steps=3", "--run.steps=3: no such option", "did you mean run.steps=...?"),
    "unknown option": Case("--fast", "--fast: no such option", "knobs are written without dashes"),
    "unknown model": Case("model=tiny_gpt", "no such option", "did you mean model=tiny_gpt_oss"),
    "option of no group": Case("kernels=cuda", "kernels=cuda: no such option", "options: auto, "),
    "more than the host has": Case(  # nor has its disk as much, which a check says too
        "model.vocab_size=2000000000 run.save_interval=-1",
        "most of it is model.vocab_size=2000000000",
        "set model.",
    ),
    "one expert and softmax over it": Case(
        "model.moe.top_k=1 model.moe.router.softmax_over=topk",
        "softmax_over=topk gives one expert (top_k=1) the weight 1",
        "set model.moe.router.softmax_over=all",
    ),
    "two dots": Case("run..steps=20", "no such knob", "did you mean run.steps?"),
    "comma after a number": Case("run.steps=20,", "expected an integer", "as in run.steps=100"),
    "file of an option": Case(
        "experiment=configs/experiment/olmoe_8gpu.yaml", "no such", "mean experiment=olmoe_8gpu"
    ),
    "value of an option": Case("--check=true", "--check: ignored", "write --check"),
    "one name for a list": Case(
        "data=indexed data.blend=a", "expected a list", "as in data.blend='[a]'"
    ),
    "switch by another word": Case(
        "run.dry_run=yes", "run.dry_run=yes is not", "set run.dry_run=true"
    ),
    "graph that is on": Case(
        "run.device=auto run.graph=on", "run.graph=on", "set run.graph=full_it"
    ),
    "device by another word": Case("run.device=gpu", "run.device=gpu is", "set run.device=cuda"),
    "longer than positions": Case(
        "data.sequence_length=100000000",
        "is more than 16,777,216, up to which fp32 tells positions apart",
        "set data.sequence_length=16777216",
    ),
    "logits that do not fit": Case(
        "data.sequence_length=16000000 data.micro_batch=1024 data.global_batch=1024",
        "most of it is logits of data.micro_batch=1024 of data.sequence_length=16000000",
        "set data.micro_batch=",
    ),
    "no sign of a group": Case("model tiny", "model tiny: write", "model=tiny, as one word"),
    "no folder": Case("run.dir=", "run.dir= must be a folder", "set run.dir=runs"),
    "section": Case("optim=adam", "optim=adam: no such option", "did you mean optim=adamw"),
    "text for a number": Case("run.steps=many", "expected an integer", "as in run.steps=100"),
    "text for a switch": Case("run.deterministic=maybe", "expected true or false", "=false"),
    "name that cannot be computed again": Case(
        "run.recompute=[norm,rope]",
        "has 'rope', none of norm, mla_up",
        "set run.recompute='[norm]'",
    ),
    "moved and computed again": Case(
        "run.recompute=moe run.offload=expert_h", "would be moved and computed", "run.offload='[]'"
    ),
    "text for a list": Case("run.profile=x", "expected a list", "as in run.profile='[1,2]'"),
    "open bracket": Case("data.blend=[a", "cannot be read", "as in data.blend='[a,b]'"),
    "open quote": Case("run.name='a", "cannot be read", "quote the value twice"),
    "line break": Case("run.name=a\nb", "run.name=a\\nb: cannot be read", "quote the value"),
    # values
    "not a choice": Case("kernels.backend=fast", "is not one of auto, fused", "set kernels.bac"),
    "zero": Case("optim.lr=0", "optim.lr=0.0 must be above 0", "set optim.lr=0.003"),
    "negative": Case("run.steps=-1", "run.steps=-1 must be at least 1", "set run.steps="),
    "not finite": Case("optim.lr=nan", "optim.lr=nan must be finite", "set optim.lr=0.003"),
    "huge": Case("data.seed=99999999999", "must be at most 2147483647", "set data.seed=1234"),
    "beta of one": Case("optim.beta2=1", "optim.beta2=1.0 must be below 1", "set optim.beta2=0.95"),
    "rates the wrong way round": Case(
        "optim.min_lr=1", "is above lr=0.01", "set optim.min_lr=0.01"
    ),
    "name with a path": Case(
        "run.name=../x", "must be the name of one folder", "set run.name=tiny"
    ),
    "profile beyond the run": Case(
        "run.profile=[5,90]", "within steps 1 to 2", "run.profile='[1,2]'"
    ),
    "profile of three": Case(
        "run.profile=[1,1,1]", "must be [first,last]", "set run.profile='[1,2]'"
    ),
    "policy that is none": Case(
        "run.bad_steps=ignore", "is not one of stop, skip", "set run.bad_st"
    ),
    "graph of a layer that counts": Case(
        "run.device=auto run.graph=full_iteration kernels.backend=megatron",
        "run.graph=full_iteration cannot run: megatron experts count their rows on the host",
        "set run.graph=auto",
    ),
    "text for a number or auto": Case(
        "parallel.comm_sms=1.5", "expected an integer or auto", "as in parallel.comm_sms=auto"
    ),
    "QK-clip of normalised heads": Case(
        "optim.qk_clip=100 model.attention.qk_norm=true",
        "optim.qk_clip=100.0 rescales weights in front of a norm",
        "set optim.qk_clip=0",
    ),
    "logits, never": Case("optim.max_logit_every=-1", "must be at least 0", "set optim.max_logit"),
    "decay within warm-up": Case("optim.decay_steps=2", "ends within the warm-up", "decay_steps=3"),
    # combinations
    "batch": Case(
        "data.global_batch=7", "is no multiple of micro_batch=", "set data.global_batch="
    ),
    "tensor": Case(
        "parallel.tensor=3", "parallel.tensor=3 does not divide", "set parallel.tensor=1"
    ),
    "pipeline": Case("parallel.pipeline=3", "does not divide", "set parallel.pipeline=1"),
    "experts": Case(
        "parallel.expert=3", "must divide model.moe.experts=8", "set parallel.expert=1"
    ),
    "top-k": Case("model.moe.top_k=9", "is more than experts=8", "set model.moe.top_k=8"),
    "odd head": Case("model.attention.head_dim=9", "must be even to be rotated", "head_dim=10"),
    "kernels of a GPU": Case("kernels.backend=te", "needs CUDA", "set kernels.backend=auto"),
    # YAML files
    "YAML: unknown knob": Case(
        YAML, "no such knob", "did you", written("optim/bad.yaml", "lrr: 1\n")
    ),
    "YAML: wrong type": Case(YAML, "optim.lr", "as in", written("optim/bad.yaml", "lr: fast\n")),
    "YAML: syntax": Case(YAML, "bad.yaml", "line 2", written("optim/bad.yaml", "lr: 1\n  b: [\n")),
    "YAML: tab": Case(YAML, "bad.yaml", "line 2", written("optim/bad.yaml", "lr:\n\tx: 1\n")),
    "YAML: a list": Case(
        YAML, "is not a section", "expected lines", written("optim/bad.yaml", "- lr\n- 1\n")
    ),
    "YAML: twice": Case(
        YAML, "duplicate key lr", "line 2", written("optim/bad.yaml", "lr: 1\nlr: 2\n")
    ),
    "YAML: not text": Case(
        YAML,
        "optim/bad.yaml: is no UTF-8",
        "write the file again",
        written("optim/bad.yaml", b"lr: \xff\xfe\n"),
    ),
    # data
    "data: no text for samples": Case(
        f"{RANDOM} run.sample_every=1", "goes on with text, and random", "set run.sample_every=0"
    ),
    "data: none": Case("data=indexed", "names no .bin/.idx files", "set data.blend='[prefix]'"),
    "data: unused": Case("data.blend=[a]", "is not read with data.source", "data.source=indexed"),
    "data: weights": Case(
        "data=indexed data.blend=[1,a,b]", "prefixes, or weights and", "set data."
    ),
    "data: split": Case("data.split=0", "weights of training and validation", "data.split="),
    "data: no documents": Case(
        "data=synthetic data.document_mask=true", "have none", "set data.document_mask=false"
    ),
    "data: documents of a backend": Case(
        "data.document_mask=true kernels.attention=te run.device=auto",
        "kernels.attention=te has no documents that end",
        "set kernels.attention=auto",
    ),
    "data: places": Case("data.max_documents=9", "needs data.document_mask=true", "=0"),
    "data: no .bin": Case(INDEXED, "text.bin does not exist", "prefixes", without("text.bin")),
    "data: short .bin": Case(INDEXED, "text.bin is truncated", "rebuild both", cut("text.bin", 2)),
    "data: order": Case(
        INDEXED, "are out of order", "rebuild it", patched("text.idx", 34, b"\xff\xff\xff\xff")
    ),
    "data: sidecar": Case(INDEXED, "not a JSON object", "move it away", written("text.json", "[")),
    "data: tokenizer": Case(
        INDEXED, "token", "set model.vocab_size=1024", with_corpus(partial(sidecar, vocab_size=999))
    ),
    "data: tokenizers": Case(
        "data=indexed data.blend=[{0}/text,{0}/other]",
        "mixes tokenizers",
        "prepare all with one",
        two_tokenizers,
    ),
    "data: short": Case(
        f"{INDEXED} data.sequence_length=99999", "is longer than the data", "data.split=", corpus
    ),
    "data: token": Case(
        f"{INDEXED} data.split='1'", "token id 300, but model.vocab_size=256", "set mod", far_tokens
    ),
    "data: cache": Case(
        f"{INDEXED} data.cache={{0}}/text.bin/c", "cannot be written", "set data.cache to", corpus
    ),
    # checkpoints
    "resume: nothing": Case(
        f"{RANDOM} run.resume={{0}}/step_9", "no valid checkpoint", "run.resume=", None, 44
    ),
    "resume: a word": Case(
        f"{RANDOM} run.resume=latest", "no such folder", "takes auto, never or a", None, 44
    ),
    "resume: a file": Case(
        f"{RANDOM} run.resume={{0}}/x", "no valid checkpoint", "run.resume=", written("x", ""), 44
    ),
    "resume: the run folder": Case(
        f"{RANDOM} run.name=other run.resume={{0}}/runs/run",
        "no valid",
        "did you mean run.resume=",
        trained,
        44,
    ),
    "resume: a flipped bit": Case(
        f"{RANDOM} run.steps=4", "", "run.resume=never", partial(trained, change=flipped), 44
    ),
    "resume: no manifest": Case(
        f"{RANDOM} run.steps=4",
        *("", "run.resume=never"),
        partial(trained, change=lambda path: (path / "COMMIT.json").unlink()),
        44,
    ),
    "resume: an empty folder": Case(
        f"{RANDOM} run.steps=4", "", "run.resume=never", partial(trained, change=cleared), 44
    ),
    # the machine
    "no GPU": Case(f"{RANDOM} run.device=cuda", "torch sees no GPU here", "set run.device=auto"),
    "no GPU for a graph": Case(
        f"{RANDOM} run.device=auto run.graph=full_iteration",
        "run.graph=full_iteration cannot run: needs CUDA",
        "set run.graph=auto",
    ),
    "kernels that cannot run": Case(
        f"{RANDOM} kernels.attention=flex", "cannot run here: needs CUDA", "use kernels.attention="
    ),
    "run folder below a file": Case(
        f"{RANDOM} run.dir={{0}}/text.bin/runs", "cannot write to", "run.dir", corpus
    ),
    "run folder in an object store": Case(
        f"{RANDOM} run.dir=s3://bucket/runs",
        "run.dir=s3://bucket/runs is an address",
        "run.checkpoints takes an address for checkpoints alone; set run.dir=runs",
    ),
    "cache in an object store": Case(
        f"{RANDOM} data.cache=s3://bucket/cache",
        "data.cache=s3://bucket/cache is an",
        "data.cache=",
    ),
    "checkpoints in a folder of their own": Case(
        f"{RANDOM} run.checkpoints=/data/checkpoints",
        "is no address, as in s3://bucket/",
        "run.dir",
    ),
    "checkpoints with a password": Case(
        f"{RANDOM} run.checkpoints=s3://me:pass/word@bucket/x",
        "run.checkpoints=s3://***@bucket/x has a user or password in it; credentials belong",
        "set run.checkpoints=s3://bucket/x",
    ),
    "checkpoints without a bucket": Case(
        f"{RANDOM} run.checkpoints=s3://", "names no bucket", "=s3://bucket/prefix"
    ),
    "checkpoints in a file of this machine": Case(
        f"{RANDOM} run.checkpoints=file:///tmp/x", "is a file of this machine", "set run.ch"
    ),
    "resume: a store that nobody knows": Case(
        f"{RANDOM} run.checkpoints=warehouse://x/y", "fsspec knows no warehouse://", "run.checkpoin"
    ),
    "resume: a store without its package": Case(
        f"{RANDOM} run.checkpoints=gs://bucket/runs",
        "gs:// needs gcsfs, which is not installed",
        "pip install gcsfs==",
    ),
    "resume: a store without credentials": Case(
        f"{RANDOM} run.checkpoints=s3://bucket/runs",
        "cannot write to s3://bucket/runs/run (run.checkpoints): cannot write s3://",
        "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
        env=NO_CREDENTIALS,
    ),
    "resume: never, and a store without credentials": Case(
        f"{RANDOM} run.checkpoints=s3://bucket/runs run.resume=never",
        "(run.checkpoints)",
        "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
        env=NO_CREDENTIALS,
    ),
    "data: a store without its package": Case(
        "data=indexed data.blend=[gs://bucket/text]", "gs:// needs gcsfs", "pip install gcsfs=="
    ),
    "data with a query": Case(
        "data=indexed data.blend=['https://host/text?key=x']",
        "has an address that has what no address of an object may have",
        "set data.blend='[https://host/text]'",
    ),
    "data: a store without credentials": Case(
        "data=indexed data.blend=[s3://bucket/text]",
        "cannot read s3://bucket/text.bin: Unable to locate credentials",
        "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
        env=NO_CREDENTIALS,
    ),
    "data: not in the store": Case(
        "data=indexed data.blend=[memory://nothing/text]",
        "memory://nothing/text.bin does not exist",
        "data.blend takes prefixes",
    ),
    "resume: not in the store": Case(
        f"{RANDOM} run.resume=memory://nothing/step_1",
        "run.resume=memory://nothing/step_1 is no valid checkpoint: no such folder",
        "run.resume takes auto, never",
        None,
        44,
    ),
    "long run on test data": Case(
        "run.save_interval=500 run.steps=99999999",
        "is a test corpus of",
        "name a corpus with data=indexed",
    ),
    "read-only run folder": Case(f"{RANDOM} run.dir=/proc/runs", "cannot write to", "run.dir"),
    # the environment
    "WORLD_SIZE": Case("", "WORLD_SIZE=two", "torchrun", env=(("WORLD_SIZE", "two"),)),
    "no ranks": Case("", "RANK=0", "torchrun", env=(("WORLD_SIZE", "0"),)),
    "RANK": Case("", "RANK=-1", "start with torchrun", env=(("RANK", "-1"),)),
    "LOCAL_RANK": Case("", "LOCAL_RANK= ", "start with torchrun", env=(("LOCAL_RANK", " "),)),
    "RANK beyond": Case("", "RANK=3", "start with torchrun", env=(("RANK", "3"),)),
}
SHOWN = [
    *["unknown knob", "dashes", "text for a number", "not finite", "batch", "experts"],
    *["YAML: wrong type", "data: short .bin", "data: order", "data: token"],
    *["resume: the run folder", "resume: a flipped bit", "no GPU", "WORLD_SIZE"],
]


class Answer(NamedTuple):
    code: object
    out: str
    err: str


Ask = Callable[[list[str], dict[str, str], Path | None], Answer]
"""Arguments, environment, and a folder with further YAML files -> exit code and output."""


def answer(args: list[str], env: dict[str, str], folder: Path | None = None) -> Answer:
    """Exit code and output of `train.py` on a rank."""
    (actual,) = run_distributed(_answer, 1, args, env, folder)
    return actual


def _answer(args: list[str], env: dict[str, str], folder: Path | None) -> Answer:
    from phalanx import train

    return _asked(train.main, args, env, folder)


def refusal(args: list[str], env: dict[str, str], folder: Path | None = None) -> Answer:
    """Exit code and output of `train.py`'s first checks, in this process; None if they pass."""
    return _asked(lambda args: load.from_argv(args) and None, args, env, folder)


def _asked(
    main: Callable[[list[str]], object], args: list[str], env: dict[str, str], folder: Path | None
) -> Answer:
    before, ours = dict(os.environ), load.FOLDER
    out, err = io.StringIO(), io.StringIO()
    os.environ.update(env)
    if folder is not None and (folder / "optim").is_dir():
        shutil.copytree(ours, folder / "configs", dirs_exist_ok=True)
        shutil.copytree(folder / "optim", folder / "configs/optim", dirs_exist_ok=True)
        load.FOLDER = folder / "configs"
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            return Answer(main(args), out.getvalue(), err.getvalue())
    except SystemExit as end:
        return Answer(end.code, out.getvalue(), err.getvalue())
    finally:
        load.FOLDER = ours
        os.environ.clear()
        os.environ.update(before)


def tried(case: Case, folder: Path, ask: Ask = answer, more: Sequence[str] = ()) -> Answer:
    """Exit code and output of a case, with further overrides."""
    if case.files is not None:
        case.files(folder)
    args = [arg.format(folder) for arg in (case.args.split(" ") if case.args else [])]
    args = [f"data.cache={folder / 'cache'}", f"run.dir={folder / 'runs'}", *args, *more]
    keys = {arg.partition("=")[0] for arg in args}
    base = [arg for arg in COMMAND if arg.partition("=")[0] not in keys]
    unique = {arg.partition("=")[0]: arg for arg in args}
    return ask([*base, *unique.values()], dict(case.env), folder)


def left(folder: Path) -> set[str]:
    """Files of the run that remain."""
    return {str(p.relative_to(folder / "runs")) for p in folder.glob("runs/**/*") if p.is_file()}


def test_there_are_enough() -> None:
    assert len(CASES) >= 60 and set(SHOWN) <= set(CASES)


LATE = [
    *[
        "more than the host has",
        "logits that do not fit",
        "no GPU",
        "no GPU for a graph",
        "kernels that cannot run",
    ],
    *["run folder below a file", "read-only run folder", "long run on test data", "RANK beyond"],
]
"""Mistakes that the command line alone does not show, and those of data and checkpoints."""
EARLY = [
    name
    for name in CASES
    if not name.startswith(("data: ", "resume: ")) and name not in (*LATE, *SHOWN)
]


@pytest.mark.parametrize("name", EARLY)
def test_a_bad_command_line(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    actual = tried(case, tmp_path, refusal)
    (line,) = actual.err.splitlines()
    assert (actual.code, actual.out) == (case.code, "")
    assert line.startswith("error: ") and case.cause in line and case.fix in line
    if all(word.partition("=")[0] and "=" in word for word in case.args.split(" ")):
        for words in advised(line):  # which takes the place of what was wrong
            repeated = tried(case._replace(files=None), tmp_path, refusal, words)
            assert case.cause not in repeated.err and repeated.code in (None, 2), words


@pytest.mark.dist
@pytest.mark.parametrize("name", [name for name in CASES if name not in EARLY])
def test_bad_input(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    actual = tried(case, tmp_path)
    assert actual.code == case.code and "Traceback" not in actual.err
    *before, line = actual.err.splitlines()
    assert line.startswith("error: ") and case.cause in line and case.fix in line
    if name.startswith("resume: "):  # what was renamed is told before
        assert all("Renamed to step_00000002.bad" in reported for reported in before)
    elif name == "data: token":  # the only one that is not found before the first step
        names = {path.partition("/launches/")[0] for path in left(tmp_path)}
        kept = {"run/config.yaml", "run/console.log", "run", "run/metrics.jsonl"}
        kept.add("run/checkpoints/START.json")
        assert names == kept and line in (tmp_path / "runs/run/console.log").read_text()
    else:
        assert before == [] and announced(actual.out) and left(tmp_path) == set()


# Only the ranks can know: a token in the middle, a checksum, the cache of another host.
UNSEEN = ("data: token", "data: cache", "resume: a flipped bit")


SEEN = [
    name
    for name, case in CASES.items()
    if not name.startswith(UNSEEN) and (case.files or "run folder" in name or name in LATE)
]


@pytest.mark.dist
@mostly_slow("name", SEEN, *SEEN[::3])
def test_a_check_tells_it_before_a_launch(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    actual = tried(case._replace(args=f"{case.args} --check"), tmp_path)
    *notes, line = actual.err.splitlines()
    assert not any(note.startswith("error: ") for note in notes)
    assert line.startswith("error: ") and case.cause in line and case.fix in line
    assert actual.code == case.code and actual.out == ""
    assert not list(tmp_path.glob("runs/**/*.bad"))  # it changes nothing
    for words in advised(line):
        repeated = tried(case._replace(files=None), tmp_path, more=[*words, "--check"])
        assert case.cause not in repeated.err and repeated.code in (0, 2, 44), words


@pytest.mark.dist
def test_a_checkpoint_of_another_model(tmp_path: Path) -> None:
    trained(tmp_path)
    command = [*COMMAND, f"run.dir={tmp_path / 'runs'}", "data=synthetic"]
    files = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    command += ["run.steps=4", "model.moe.ffn=24", "model.moe.top_k=1"]
    (main,) = run(1, command)
    assert main.code == 2 and announced(main.out)
    *lines, last = main.err.splitlines()
    assert lines == [
        "error: this run is not configured as its checkpoint:",
        "                   checkpoint  now",
        "  model.moe.top_k  2           1",
        "  model.moe.ffn    16          24",
        "go on with model.moe.top_k=2 model.moe.ffn=16,",
    ]
    anew, _, over = last.rpartition(" and another run.name or ")
    assert anew == "or start anew with run.resume=never" and over.startswith("run.start_over=")
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == files
    (main,) = run(1, [*command, anew.split()[-1], over])
    assert main.code == 0 and "from scratch (run.start_over=" in main.out


# --- a real process -------------------------------------------------------------------------------


def train_py(*args: str, rank: int = 0) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"WORLD_SIZE": "2", "RANK": str(rank)}
    command = [sys.executable, "train.py", *args]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("options", [[], ["--check"]])
def test_exit_code(options: list[str]) -> None:
    finished = train_py(*options, "run.stesp=3")
    line = "error: run.stesp: no such knob; did you mean run.steps?\n"
    assert (finished.returncode, finished.stdout, finished.stderr) == (2, "", line)


@mostly_slow("args", [["run.steps=7"], ["--help"], ["--cfg", "job"]], ["run.steps=7"])
def test_a_check_of_what_is_right_is_silent(args: list[str]) -> None:
    finished = train_py("--check", *args)
    assert (finished.returncode, finished.stdout, finished.stderr) == (0, "", "")


# --- the table ------------------------------------------------------------------------------------


def table() -> str:
    """Markdown table of the answers to the cases `SHOWN`."""
    rows = ["| input | code | answer |", "|---|---|---|"]
    for name in SHOWN:
        with tempfile.TemporaryDirectory() as folder:
            case, actual = CASES[name], tried(CASES[name], Path(folder))
            line = actual.err.splitlines()[-1].removeprefix("error: ").replace(f"{folder}/", "")
        env = " ".join(f"{key}={value}" for key, value in case.env)
        given = f"`{env or case.args.format('').replace('/text', 'text')}`"
        what = f"{name.partition(': ')[2]}: {given}" if case.files else given
        rows.append(f"| {what} | {actual.code} | {line.replace('|', '&#124;')} |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(table())
