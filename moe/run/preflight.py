"""Checks of a run before any rank starts, without torch.

`train.py --check` runs them on the current machine. In a launch rank 0 runs them when the ranks
have met, and all ranks end with its errors before a model is built. The command line itself has
been validated.
"""

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from pkgutil import resolve_name

from phalanx.configs import programs
from phalanx.configs.arithmetic.batch_sizes import samples_after
from phalanx.configs.arithmetic.data_stages import parse
from phalanx.configs.bounds import oversized
from phalanx.configs.knobs import overrides, pluralize
from phalanx.configs.redact import redacted
from phalanx.configs.schema import Config, RunConfig
from phalanx.configs.tables.capabilities import READ_TASKS
from phalanx.configs.tables.optimizers import OPTIMIZERS
from phalanx.configs.validate import ConfigError
from phalanx.moe.data.blend import open_blend, open_held_out, parse_blend
from phalanx.moe.data.host_cache import DataError
from phalanx.moe.data.token_files import embedded_tokens
from phalanx.moe.data.tokenizer.special_tokens import check_goes_on
from phalanx.moe.plan.cost.weights import checkpoint_bytes
from phalanx.moe.router import recording
from phalanx.moe.text import count, storage
from phalanx.parallel import disk_space, folder_lock
from phalanx.parallel.checkpoint import commit, remote, saved_config
from phalanx.parallel.checkpoint import start as run_start
from phalanx.parallel.checkpoint.commit import Invalid
from phalanx.parallel.checkpoint.saved_config import CheckpointError, NoUsableCheckpoint
from phalanx.parallel.checkpoint.saved_knobs import CheckpointMismatch
from phalanx.parallel.checkpoint.start import compare
from phalanx.parallel.object_store import Place, Remote, place

_FEW_EPOCHS = 4  # epochs up to which repeated text is about as good as new (arXiv 2305.16264)
_TEST_EPOCHS = 10  # most epochs of the embedded corpus that a run with checkpoints may read
_TEST_TOKENS = 250_000_000  # most random tokens that a run with checkpoints may read

_WRONG = (ConfigError, DataError, CheckpointMismatch, CheckpointError)


@dataclass
class Findings:
    """Results of the checks."""

    errors: list[Exception] = field(default_factory=list)
    """ConfigError, DataError, CheckpointMismatch or CheckpointError, for the user."""
    notes: list[str] = field(default_factory=list)  # lines on what is allowed but may be unintended


def preflight(cfg: Config) -> Findings:
    """Check data, run folder and checkpoint of a valid config; nothing is written."""
    findings = Findings()
    findings.notes += oversized(cfg)
    checks: tuple[Callable[[Config], Iterator[str] | None], ...] = (
        _optimizer,
        _replay,
        _recompute,
        _data,
        _samples,
        _folder,
        _record,
        _checkpoint,
        _disk,
    )
    for check in checks:
        try:
            findings.notes += check(cfg) or ()
        except _WRONG as error:
            findings.errors.append(error)
    return findings


def exit_code(error: Exception) -> int:
    """Exit code for one of the errors; train.py lists them."""
    return 44 if isinstance(error, NoUsableCheckpoint) else 2


def checkpoint_root(cfg: Config) -> Place:
    """Folder of the checkpoints of a run."""
    if cfg.run.checkpoints:
        return place(cfg.run.checkpoints) / cfg.run.name
    return Path(cfg.run.dir) / cfg.run.name / "checkpoints"


def finished_lines(cfg: Config) -> list[str]:
    """Lines on a run whose newest checkpoint is that of its last step.

    Empty for another run, and if anything is wrong with the checkpoint.
    """
    root, run = checkpoint_root(cfg), cfg.run
    try:
        record = run_start.read(root)
        path = None if run_start.starts_over(run, record) else saved_config.newest(root)
        if path is None or (step := commit.read_commit(path).step) < run.steps:
            return []
        start = run_start.decide(run, record, path)
        known = saved_config.configuration(path)
        compare(known.config, redacted(asdict(cfg)), known.samples, step=known.step)
    except (*_WRONG, Invalid, OSError):
        return []
    lines = [*filter(None, [start.note]), all_steps_done(f"{path} is of step {step}", run)]
    if run.record_routing and not Path(run.record_routing).exists():
        lines.append(
            f"warning: nothing is written to run.record_routing={run.record_routing}, which needs "
            "the tokens of a step: train at least one more"
        )
    return lines


def all_steps_done(state: str, run: RunConfig) -> str:
    """Line for a run that starts with all of its steps done, with the overrides to go on."""
    more = "one more of run.phases" if run.phases else "a larger run.steps"
    return (
        f"nothing was left to do: {state}, and this run ends at step {run.steps}; {more} trains "
        f"on, {run_start.start_over_override()} or another run.name starts over"
    )


def newest_checkpoint(cfg: Config) -> str:
    """Phrase on the checkpoint to resume from, for a user who has stopped the run."""
    root = checkpoint_root(cfg)
    if not isinstance(root, Path):
        return f"checkpoints are in {root}"  # listing a store would delay the exit
    try:
        checkpoints = commit.committed(root)
    except OSError:
        checkpoints = []
    if not checkpoints:
        return "there is no checkpoint"
    return f"the newest checkpoint is {checkpoints[0][1]}"


def _optimizer(cfg: Config) -> None:
    """Check that the library of the optimizer is installed."""
    package = OPTIMIZERS[cfg.optim.kind].package
    if package and importlib.util.find_spec(package.replace("-", "_")) is None:
        without = next(name for name, facts in OPTIMIZERS.items() if not facts.package)
        raise ConfigError(
            f"optim.kind={cfg.optim.kind} needs {package}, which is not installed: reinstall this "
            f"project's dependencies, or set optim.kind={without}"
        )


def _replay(cfg: Config) -> Iterator[str]:
    """Check that a recorded routing exists and fits the model."""
    if path := cfg.model.moe.router.replay:
        try:
            facts = recording.read_facts(path)
        except ValueError as error:
            raise ConfigError(f"{error} (model.moe.router.replay)") from None
        if reason := recording.mismatch(facts, cfg.model):
            raise ConfigError(f"model.moe.router.replay={path} {reason}")
        yield (
            f"routing: replayed from {path}, {facts.tokens:,} tokens of {facts.model} after step "
            f"{facts.step}"
        )


def _recompute(cfg: Config) -> None:
    """Check that the library for recomputing a part is installed."""
    if "moe_act" in cfg.run.recompute and importlib.util.find_spec("transformer_engine") is None:
        instead = ["moe" if name == "moe_act" else name for name in cfg.run.recompute]
        raise ConfigError(
            "run.recompute=moe_act needs Transformer Engine, which is not installed: "
            f"{programs.install('transformer-engine')}, or set "
            f"{overrides({'run.recompute': instead})}"
        )


def _data(cfg: Config) -> Iterator[str]:
    """Check that there is data, that it fits the vocabulary, and that it is enough for the run."""
    first = cfg.run.phases[-1].first if cfg.run.phases else 0
    wanted = samples_after(cfg.data, cfg.run.steps - first) * cfg.data.sequence_length
    if cfg.data.source == "indexed":
        yield from _corpora(cfg, wanted)
    elif cfg.data.source == "synthetic":
        _only_test_data(cfg, wanted, _TEST_TOKENS, "random tokens", f"{count(wanted)} of them")
    elif available := embedded_tokens():  # without any, building the dataset reports the reason
        corpus, epochs = f"a test corpus of {count(available)} tokens", wanted / available
        read = f"{count(wanted)} = {epochs:,.0f} epochs"
        _only_test_data(cfg, wanted, _TEST_EPOCHS * available, corpus, read)
        yield from _reading("embedded corpus", available, epochs)


def _samples(cfg: Config) -> None:
    """Check that the tokenizer of samples and tasks is known, and the files of tasks."""
    if cfg.run.sample_every:
        from phalanx.moe.data.tokenizer.codec import codec_of_run

        codec_of_run(cfg)
    if cfg.run.tasks:
        resolve_name(READ_TASKS)(cfg)


def _corpora(cfg: Config, wanted: int) -> Iterator[str]:
    run, data = cfg.run, cfg.data
    valid = run.eval_batches * data.global_batch if run.eval_interval else 0
    sizes = (samples_after(data, run.steps), 0 if data.validation else valid)
    prefixes, weights = parse_blend(data)
    blend = open_blend(prefixes, weights, data, cfg.model.vocab_size, sizes)
    if data.validation and valid:
        open_held_out(blend, data, cfg.model.vocab_size, valid)
    for stage in map(parse, data.stages):
        if stage.tokens >= wanted and not run.phases:
            yield (
                f"data: the stage from {count(stage.tokens)} tokens on does not begin, as the run "
                f"reads {count(wanted)}"
            )
    epochs = blend.epochs(wanted)
    for prefix, (training, _), times in zip(prefixes, blend.parts, epochs, strict=True):
        yield from _reading(prefix, training.tokens, times)


def _reading(corpus: str, tokens: int, epochs: float) -> Iterator[str]:
    """Note on a corpus that is read more than a few times."""
    if epochs > _FEW_EPOCHS:
        read = f"{count(tokens * epochs)} = {epochs:,.1f} epochs"
        yield f"data: {corpus} of {count(tokens)} tokens, the run reads {read}"


def _only_test_data(cfg: Config, wanted: int, limit: int, corpus: str, read: str) -> None:
    """Reject test data for a run with checkpoints that reads more than `limit` tokens."""
    if cfg.run.save_interval <= 0 or wanted <= limit:
        return
    steps = max(1, cfg.run.steps * limit // wanted)
    raise ConfigError(
        f"data.source={cfg.data.source} is {corpus}, and this run of "
        f"{pluralize(cfg.run.steps, 'step')} with checkpoints on its way "
        f"(run.save_interval={cfg.run.save_interval}) would read {read}; "
        "name a corpus with data=indexed 'data.blend=[<prefix>]', or set "
        f"run=bench run.save_interval=-1 or run.steps={steps}"
    )


def _folder(cfg: Config) -> Iterator[str]:
    """Check that the run folder can be written or created, and that no other run uses it."""
    folder = Path(cfg.run.dir) / cfg.run.name
    try:
        _try_to_write(folder)
        note = folder_lock.look(folder.absolute() / folder_lock.NAME)
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(f"cannot write to {folder} (run.dir, run.name): {reason}") from None
    except folder_lock.InUse as error:
        raise ConfigError(str(error)) from None
    if note:
        yield note


def _record(cfg: Config) -> None:
    """Check that the routing can be written, which is done after the last step."""
    if path := cfg.run.record_routing:
        try:
            if Path(path).is_dir():
                raise IsADirectoryError("it is a folder")
            _try_to_write(Path(path).parent)
        except OSError as error:
            reason = error.strerror or error
            raise ConfigError(f"cannot write to run.record_routing={path}: {reason}") from None


def _try_to_write(folder: Path) -> None:
    """Write to a folder, or where it would be made. Raises OSError."""
    existing = folder.absolute()
    while not existing.exists():
        existing = existing.parent
    commit.try_to_write(existing)


def _checkpoint(cfg: Config) -> Iterator[str]:
    """Check that the checkpoint to resume from is complete, and of the same model, dtype, data."""
    root = checkpoint_root(cfg)
    if isinstance(root, Remote) and cfg.run.save_interval >= 0:
        try:
            remote.probe(root)
        except OSError as error:
            raise CheckpointError(f"cannot write to {root} (run.checkpoints): {error}") from None
    try:
        record = run_start.read(root)
        over = run_start.starts_over(cfg.run, record)
        newest = None if over else saved_config.newest(root)
        start = run_start.decide(cfg.run, record, newest)
        path = start.path
        if newest is None and not over and cfg.run.resume in ("auto", "never"):
            _check_moved(cfg, root)
        if path is not None and path != newest and (problem := saved_config.lacking(path)):
            raise saved_config.not_valid(path, problem)
        if start.note:
            yield start.note
        if path is not None:
            known = saved_config.configuration(path)
            config, begins = redacted(asdict(cfg)), start.begins
            compare(known.config, config, known.samples, step=known.step, begins=begins)
            check_goes_on(known.data, config["data"])
    except run_start.OtherPhase:
        pass  # of a run that is checked as a whole
    except Invalid:
        pass  # all ranks verify its checksums at the start, report the problem and set it aside
    except OSError as error:
        knobs = f"{'run.checkpoints' if isinstance(root, Remote) else 'run.dir'}, run.resume"
        if error.filename is None:  # raised by this project, with a full message
            raise CheckpointError(f"{error} ({knobs})") from None
        raise CheckpointError(f"cannot read {error.filename} ({knobs}): {error.strerror}") from None


def _disk(cfg: Config) -> Iterator[str]:
    """Check that the disk has room for the checkpoints, before the steps that they would save."""
    root, run = checkpoint_root(cfg), cfg.run
    if isinstance(root, Remote) or run.save_interval < 0:
        return
    try:
        over = run_start.starts_over(run, run_start.read(root))
        first = 0 if over else next((step for step, _ in commit.committed(root)), 0)
        room = disk_space.room(root, run.keep_every)
    except (*_WRONG, OSError):
        return  # which other checks report
    number = disk_space.saves(first, run.steps, run.save_interval)
    if room is None or not number:
        return
    size, most = checkpoint_bytes(cfg), min(number, run.keep_last + 1)
    has = f"the disk of {root} (run.dir) has {storage(room.free)} free"
    if room.free < size:
        raise ConfigError(
            f"a checkpoint of this run takes {storage(size)}, and {has}: free space, set run.dir "
            "to a larger disk, or run.save_interval=-1 to save none"
        )
    if room.free + room.held < most * size:
        fewer = (room.free + room.held) // size - 1
        keep = f"run.keep_last={fewer} or " if 0 < fewer < run.keep_last else ""
        yield (
            f"warning: {most} checkpoints of {storage(size)} are there at once with "
            f"run.keep_last={run.keep_last}, one of them being written, and {has}: free space, or "
            f"set {keep}run.dir to a larger disk"
        )


def _check_moved(cfg: Config, root: Place) -> None:
    """Check that a run without a checkpoint in `root` has none where its newest launch kept them.

    Raises:
        ConfigError: it has some there, and would start from scratch without them.
        OSError: the folder cannot be read.
    """
    folder = Path(cfg.run.dir) / cfg.run.name
    previous = saved_config.root_of(folder)
    if previous != root and commit.committed(previous):
        value = "" if isinstance(previous, Path) else previous.parent
        raise ConfigError(
            f"the checkpoints of {folder} are in {previous}: set run.checkpoints={value} to "
            f"continue from them, or {run_start.start_over_override()} to start over and leave them"
        )
