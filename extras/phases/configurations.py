"""From `run.phases` to a configuration of each phase, checked before the first one begins."""

import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace

from phalanx.configs.arithmetic import batch_sizes
from phalanx.configs.arithmetic.batch_sizes import samples_after, steps_to
from phalanx.configs.inject import parse as fault
from phalanx.configs.knobs import visible
from phalanx.configs.load import GROUPS, Ended, compose
from phalanx.configs.redact import redacted
from phalanx.configs.schema import Config, PhaseConfig
from phalanx.configs.validate import ConfigError, validate
from phalanx.extras.phases.walk import beyond, reached
from phalanx.moe.data.host_cache import DataError
from phalanx.moe.data.tokenizer.special_tokens import check_goes_on
from phalanx.parallel.checkpoint.saved_knobs import leaves, shown
from phalanx.parallel.checkpoint.start import must_agree
from phalanx.parallel.fault.launcher import launcher_world

OF_THE_RUN = (
    *("run.name", "run.dir", "run.checkpoints", "run.steps", "run.phases", "run.device"),
    *("run.resume", "run.start_over", "run.seed", "run.dry_run", "run.machine", "run.inject"),
    *("parallel.world_size", "parallel.timeout", "model.vocab_size", "experiment", "model"),
)
"""Knobs and groups that a phase cannot change: they are of the run, or of its processes."""


def configurations(cfg: Config, argv: Sequence[str]) -> list[Config]:
    """Configurations of the phases of a run, each with the phases up to its own.

    A phase has the overrides of those before it, and its own after them.

    Args:
        cfg: configuration of the run, without its phases' overrides.
        argv: command line.

    Raises:
        Ended: mistakes, each on a line on stderr of rank 0.
    """
    try:
        problems = list(_problems(cfg.run.phases))
        if problems:
            raise ConfigError("\n".join(problems))
        found = list(_each(cfg, [word for word in argv if not word.startswith("-")]))
        if "--check" in argv and (problem := beyond(found, reached(found[0]))):
            raise ConfigError(problem)
        return found
    except ConfigError as error:
        text = redacted("".join(f"error: {line}\n" for line in str(error).splitlines()))
        if os.environ.get("RANK", "0") == "0":
            print(text, end="", file=sys.stderr)
        raise Ended(2, text) from None


def _problems(phases: Sequence[PhaseConfig]) -> Iterator[str]:
    seen = set[str]()
    for number, phase in enumerate(phases, 1):
        if not phase.name or phase.name in seen:
            said = f"{visible(phase.name)!r} is the name of two phases" if phase.name else ""
            yield f"run.phases: {said or f'phase {number} has no name'}; give each one of its own"
        seen.add(phase.name)
        where = f"run.phases: phase {visible(phase.name) or number}"
        if (phase.steps > 0) == (phase.tokens > 0) or min(phase.steps, phase.tokens) < 0:
            yield f"{where} has steps={phase.steps} and tokens={phase.tokens:g}; set one above 0"
        if phase.first or phase.schedule_begin:
            yield f"{where}: first and schedule_begin follow from the phases before; remove them"
        for word in phase.overrides:
            name = _name(word)
            if name in OF_THE_RUN or name.startswith("run.phases"):
                yield f"{where} overrides {visible(name)}, which is the run's; set it there"


def _each(cfg: Config, words: list[str]) -> Iterator[Config]:
    before, tokens, changes, others = list[PhaseConfig](), 0, list[str](), list[Config]()
    for phase in cfg.run.phases:
        try:
            changes = [*_left(changes, phase.overrides), *phase.overrides]
            chosen = _groups(changes)
            kept = [word for word in words if _name(word) not in chosen]
            own = _composed(cfg, [*kept, *changes])
            _end_batch_warmup(own, tokens)
            first = sum(other.steps for other in before)
            begin = before[-1].schedule_begin if before and phase.keep_schedule else first
            steps = phase.steps or steps_to(own.data, phase.tokens)
            before.append(replace(phase, steps=steps, first=first, schedule_begin=begin))
            own.run.phases, own.run.steps = list(before), first + steps
            last = phase.name == cfg.run.phases[-1].name
            _keep_what_happens_here(own, first, last=last)
            _validate(own)
            _check_change(others[-1] if others else own, own)
            others.append(own)
            tokens += samples_after(own.data, steps) * own.data.sequence_length
        except ConfigError as error:
            lines = str(error).splitlines()
            raise ConfigError("\n".join(f"phase {phase.name}: {line}" for line in lines)) from None
        yield own


def _left(words: Sequence[str], later: Sequence[str]) -> list[str]:
    """Overrides of earlier phases without those of a group that later ones choose anew."""
    groups = _groups(later)
    return [word for word in words if _name(word).partition(".")[0] not in groups]


def _groups(words: Sequence[str]) -> set[str]:
    """Groups of which overrides choose an option."""
    return {_name(word) for word in words} & {*GROUPS}


def _name(word: str) -> str:
    return word.partition("=")[0].strip()


def _composed(cfg: Config, words: list[str]) -> Config:
    """The configuration of a phase, on the ranks of its run."""
    own = compose(words).typed()
    own.parallel.world_size = cfg.parallel.world_size  # of a check that has assumed one
    own.model.vocab_size = own.model.vocab_size or cfg.model.vocab_size
    return own


def _end_batch_warmup(own: Config, tokens: int) -> None:
    """Leave out sizes of the batch that are those of earlier phases."""
    data = own.data
    if not tokens or not data.batch_warmup or list(batch_sizes.problems(own)):
        return
    if batch_sizes.parse(data.batch_warmup[-1]).tokens > tokens:
        raise ConfigError(
            f"data.batch_warmup ends after the {tokens:,} tokens of the phases before, and has to "
            "end within the first phase; shorten it, or make that phase longer"
        )
    data.batch_warmup = []


def _keep_what_happens_here(own: Config, first: int, *, last: bool) -> None:
    """Leave out faults and traces of steps of other phases."""
    run = own.run
    if run.profile and (run.profile[-1] <= first or run.profile[0] > run.steps) and not last:
        run.profile = []
    if not last:
        run.inject = [text for text in run.inject if not _after(text, run.steps)]


def _after(text: str, step: int) -> bool:
    try:
        return fault(text).step > step
    except ValueError:
        return False  # which is told


def _check_change(before: Config, own: Config) -> None:
    """Refuse what a checkpoint of the phase before does not fit, as that phase's end would."""
    old, new = dict(leaves(asdict(before))), dict(leaves(asdict(own)))
    for key in (key for key in new if key != "run.phases" and old[key] != new[key]):
        if must_agree(key, old[key], new[key], begins=True):
            change = f"{key}={shown(old[key])} may not become {shown(new[key])}"
            raise ConfigError(f"{change} between phases (docs/checkpoints.md); leave it out")
    try:
        check_goes_on(asdict(before.data), asdict(own.data))
    except DataError as error:
        raise ConfigError(str(error)) from None
    was, becomes = (each.model.attention.sparse.get("phase") for each in (before, own))
    if becomes == "warm_up" and was != becomes:
        raise ConfigError(
            "model.attention.sparse.phase=warm_up trains the indexer alone, before any sparse "
            "phase; put it first or set model.attention.sparse.phase=sparse"
        )


def _validate(own: Config) -> None:
    if own.run.save_interval < 0:
        raise ConfigError(
            "run.save_interval=-1 saves no checkpoint, with which a phase begins; set "
            "run.save_interval=0 to save at the end of each"
        )
    ranks, world = launcher_world(), own.parallel.world_size
    elsewhere = world not in (0, ranks) or "WORLD_SIZE" not in os.environ
    searches = isinstance(own.run.dry_run, str)
    validate(own, ranks, "", any_ranks=elsewhere or bool(own.run.dry_run), laid_out=not searches)
