"""From a command line to `schema.Config`: YAML groups and overrides, composed by Hydra, typed.

Overrides are first checked one by one against the schema: all mistakes are reported at once, each
with the near miss that was meant. Hydra's compose API takes the place of `@hydra.main`: nothing is
written, no folder is entered and logging stays ours, however many ranks read the line.
"""

import argparse
import difflib
import functools
import os
import pickle
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, NoReturn

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    InterpolationResolutionError,
    OmegaConfBaseException,
    ValidationError,
)
from yaml import YAMLError

from phalanx.configs import programs
from phalanx.configs.bounds import choices
from phalanx.configs.knobs import (
    REMOVED,
    did_you_mean,
    has_fields,
    knobs,
    overrides,
    pluralize,
    renamed,
    sections,
    suggest,
    visible,
    written,
)
from phalanx.configs.layout import layout_line, ranks_of_experiment
from phalanx.configs.redact import redacted
from phalanx.configs.schema import Config
from phalanx.configs.tables.programs import HELP
from phalanx.configs.validate import ConfigError, micro_batches, validate

FOLDER = Path(__file__).resolve().parent
_BYTES = 256  # vocabulary of bytes, and of random tokens where none is set
GROUPS = ("model", "kernels", "precision", "parallel", "data", "optim", "run", "experiment")


class Ended(SystemExit):
    """The command line has been answered: nothing is to be trained."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(code)
        self.text = text  # printed by rank 0


@dataclass(frozen=True)
class Composed:
    """A composed configuration and the option that each group took."""

    tree: DictConfig
    choices: dict[str, str]

    def yaml(self) -> str:
        """The resolved configuration as YAML, under a comment with the groups' choices."""
        chosen = " ".join(f"{group}={option}" for group, option in self.choices.items())
        try:
            return f"# {chosen}\n{OmegaConf.to_yaml(self.tree, resolve=True)}"
        except OmegaConfBaseException as error:
            raise ConfigError(_explain(error)) from error

    def typed(self) -> Config:
        """The configuration, or ConfigError if a value of a YAML file is of another type."""
        try:
            config = OmegaConf.to_object(self.tree)
        except OmegaConfBaseException as error:
            raise ConfigError(_explain(error)) from error
        assert isinstance(config, Config)
        return config


def from_argv(argv: Sequence[str], world_size: int | None = None) -> Config:
    """Configuration of the command line `argv` (no program's name), valid on `world_size` ranks.

    Raises:
        Ended: 0 after `--help`, `--cfg job`, which say nothing with `--check`, or a layout for
            other ranks than these (`parallel.world_size`) that is neither checked nor estimated; 2
            after mistakes, each on its own line on stderr. Only rank 0 prints.
    """
    try:
        ranks = _launched() if world_size is None else world_size
    except ConfigError as error:
        _leave(f"error: {error}\n", code=2, everyone=True)
    try:
        args = _parse(argv)
        if args.help:
            topics = [word for word in args.overrides if "=" not in word]
            text = resolve_name(HELP)(topics) if topics else usage()
            _leave("" if args.check else text)
        if args.cfg:
            text = compose(args.overrides).yaml()
            _leave("" if args.check else text)
        composed = compose(args.overrides)
        config, experiment = composed.typed(), composed.choices.get("experiment", "")
        only_looks = args.check or bool(config.run.dry_run)
        launched = world_size is not None or "WORLD_SIZE" in os.environ
        if only_looks and not launched:
            _say(_lay_out(config, experiment))
        elsewhere = config.parallel.world_size not in (0, ranks)
        any_ranks = elsewhere or bool(config.run.dry_run) or (args.check and not launched)
        searches = isinstance(config.run.dry_run, str)
        if not config.run.phases:  # which are checked one by one
            validate(config, ranks, experiment, any_ranks=any_ranks, laid_out=not searches)
        if elsewhere and not only_looks:
            _leave(_layout(config))
    except ConfigError as error:
        _leave("".join(f"error: {line}\n" for line in str(error).splitlines()), code=2)
    return config


def load(words: Sequence[str]) -> Config:
    """Typed configuration of overrides, as in ["model=tiny", "run.steps=20"]; not yet validated.

    Raises ConfigError, one line per mistake: unknown option, unknown knob, wrong type.
    """
    return compose(words).typed()


def compose(words: Sequence[str]) -> Composed:
    """config.yaml and its groups under the overrides `words`; ConfigError: one line per mistake.

    A vocabulary that the data determines (`model.vocab_size=0`) is filled in where no file needs to
    be read for it; else `moe.data.blend` does that.
    """
    words = [_bracketed(word) for word in words]
    mistakes = [visible(line) for line in _mistakes(words)]
    if mistakes:
        raise ConfigError("\n".join(mistakes))
    try:
        groups, values = list[str](), list[Override]()
        for word in map(_parsed, words):
            if word.key_or_group in GROUPS or word.package is not None:
                groups.append(word.input_line or "")
            else:
                values.append(word)
        composed: Composed = pickle.loads(_of_groups(FOLDER, *groups))
        for word in values:  # as Hydra does it, for which they come after all groups as well
            value = _listed(word.key_or_group, word.value())
            merge = not has_fields(word.key_or_group)
            OmegaConf.update(composed.tree, word.key_or_group, value, merge=merge, force_add=True)
        if composed.tree.data.source != "indexed" and not composed.tree.model.vocab_size:
            composed.tree.model.vocab_size = _BYTES
    except (HydraException, OmegaConfBaseException, YAMLError, ValueError, OverflowError) as error:
        # Hydra has plain ValueErrors for a defaults list or an encoding that is none.
        raise ConfigError(_explain(error)) from error
    OmegaConf.set_struct(composed.tree, False)
    return composed


@functools.cache
def _of_groups(folder: Path, *groups: str) -> bytes:
    """config.yaml of a folder with these options; Hydra takes a tenth of a second for it.

    A pickled `Composed`, as OmegaConf's trees take six times as long to copy.
    """
    _store_schema()
    with initialize_config_dir(version_base="1.3", config_dir=str(folder)):
        tree = hydra_compose("config", overrides=list(groups), return_hydra_config=True)
    chosen = tree.hydra.runtime.choices
    OmegaConf.set_struct(tree, False)
    del tree["hydra"]
    OmegaConf.set_struct(tree, True)
    choices = {group: chosen[group] for group in GROUPS if chosen.get(group)}
    return pickle.dumps(Composed(tree, choices))


@functools.cache
def _store_schema() -> None:
    """Give Hydra the schema, with which config.yaml begins; a fifth of the time of `_of_groups`."""
    ConfigStore.instance().store(name="schema", node=Config)


@functools.cache
def _defaults() -> bytes:
    return pickle.dumps(OmegaConf.structured(Config))


def options(group: str) -> list[str]:
    """Names of the YAML files of a group."""
    return sorted(path.stem for path in (FOLDER / group).glob("*.yaml"))


def _folder() -> str:
    return str(FOLDER) if programs.installed() else "configs/"


def usage() -> str:
    """The text of `--help`."""
    lines = [
        "usage: torchrun --standalone --nproc-per-node N train.py [group=option ...] "
        "[group.knob=value ...]",
        "",
        f"Groups and their options (files in {_folder()}):",
        *(f"  {group:<12}{', '.join(options(group))}" for group in GROUPS),
        "",
        "Options:",
        "  --cfg job   print the configuration that the command line gives, and exit",
        "  --check     say what is wrong with command line, data, run folder or checkpoint, and",
        "              what this machine cannot run, if anything, and exit; takes about a second",
        "  -h, --help  print this text, or that on groups and knobs that are named, as in",
        "              --help optim model.attention run.steps, and exit",
        "",
        "With parallel.world_size=N the configuration is checked for N ranks, wherever that runs;",
        "run.dry_run=true says what it would take there: memory, traffic, time, and what helps;",
        "run.dry_run=search finds the fastest layouts that fit.",
        "Without it both take the ranks that an experiment is laid out for.",
        "All knobs with their meaning: train.py --help <group> (docs/configuration.md)",
        "Example: train.py experiment=gpt_oss_20b_8gpu run=bench kernels=torch run.steps=20",
    ]
    return programs.here("\n".join(lines) + "\n")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        option = "--cfg job" if "--cfg" in message else "--check" if "--check" in message else ""
        raise ConfigError(f"{message}; write {option}" if option else message)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("-h", "--help", action="store_true")
    parser.add_argument("-c", "--cfg", choices=["job"])
    parser.add_argument("--check", action="store_true")
    args, unknown = parser.parse_known_intermixed_args(list(argv))
    if unknown:
        if unknown[0] in ("-m", "--multirun"):
            program = "scripts/lab/proof/run_experiments.py"
            raise ConfigError(
                f"{unknown[0]}: a command is one run; {program} runs lists and sweeps"
            )
        name = unknown[0].lstrip("-").replace("-", "_").partition("=")[0]
        meant = did_you_mean([f"{path}=..." for path in suggest(name)])
        raise ConfigError(
            f"{visible(unknown[0])}: no such option; knobs are written without dashes{meant}"
        )
    return args


def _lay_out(config: Config, experiment: str) -> str:
    """Set the ranks that an experiment is laid out for, if unknown; returns a line on it."""
    own = ranks_of_experiment(experiment)
    if not own or config.parallel.world_size:
        return ""
    config.parallel.world_size = own
    taken = overrides({"parallel.world_size": own})
    ranks = f"{pluralize(own, 'rank')}, one a GPU"
    return f"experiment={experiment} is for {ranks}, which this assumes: {taken}\n"


def _layout(config: Config) -> str:
    world = config.parallel.world_size
    return (
        f"{pluralize(world, 'rank')}: {layout_line(config, world)}, "
        f"{pluralize(micro_batches(config, world), 'micro-batch')} a step\n"
    )


def _launched() -> int:
    numbers = {"WORLD_SIZE": 1, "RANK": 0, "LOCAL_RANK": 0}
    for name in numbers:
        text = os.environ.get(name, str(numbers[name]))
        if not re.fullmatch(r"[0-9]{1,9}", text):
            reason = "is no number; unset it, or start with torchrun"
            raise ConfigError(visible(f"{name}={text} in the environment {reason}"))
        numbers[name] = int(text)
    if "WORLD_SIZE" in os.environ and numbers["RANK"] >= numbers["WORLD_SIZE"]:
        raise ConfigError(
            f"RANK={numbers['RANK']} in the environment is no rank of "
            f"WORLD_SIZE={numbers['WORLD_SIZE']}; unset both, or start with torchrun"
        )
    return numbers["WORLD_SIZE"]


def _say(text: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        print(redacted(text), end="", file=sys.stderr)


def _leave(text: str, code: int = 0, everyone: bool = False) -> NoReturn:
    text = redacted(text)
    if everyone or os.environ.get("RANK", "0") == "0":
        print(text, end="", file=sys.stderr if code else sys.stdout)
    raise Ended(code, text)


def _mistakes(words: Sequence[str]) -> Iterator[str]:
    left = list(words)
    tree: DictConfig = pickle.loads(_defaults())
    while left:
        used, value = _spread(left)
        text = " ".join(left[:used])
        name = left[0].removesuffix("=")
        del left[:used]
        if used == 1:
            yield from _check(text, tree)
        else:
            yield f"{text}: write {name}={value}, as one word"


def _spread(words: Sequence[str]) -> tuple[int, str]:
    """Number of first words that are one override, with spaces at its sign; and its value."""
    first, *rest = words[:3]
    name, names = first.removesuffix("="), (*knobs(), *GROUPS)
    if name not in names or not rest:
        return 1, ""
    signed = first == name and rest[0].startswith("=")
    alone = signed and rest[0] == "=" and len(rest) > 1
    value = rest[1] if alone else rest[0][signed:]
    if not value or "=" in value or value in names:
        return 1, ""
    return 2 + alone, value


@functools.cache
def _parsed(word: str) -> Override:
    return OverridesParser.create().parse_override(word)


def _check(text: str, tree: DictConfig) -> list[str]:
    """Return the problem of one override, judged by itself; its value is tried in `tree`."""
    if text.startswith("=") or ("=" not in text and not text.startswith("~")):
        name, _, value = (
            part.strip() for part in re.sub(r"[:\s]", "=", text, count=1).partition("=")
        )
        if value and name in (*knobs(), *GROUPS):
            return [f"{text}: write {shlex.quote(f'{name}={value}')}"]
        example = f", as in {text}={_example(text)}" if text in knobs() else ""
        return [f"{text}: expected <knob>=<value> or <group>=<option>{example}"]
    try:
        override = _parsed(text)
    except HydraException:
        return [f"{text}: {_unreadable(text)}"]
    if override.package is not None:
        group = override.key_or_group or override.package
        return [f"{text}: write {group}={override.value()}, without @"]
    key = override.key_or_group
    if override.type != OverrideType.CHANGE:
        return [f"{text}: all knobs exist already; write <knob>=<value>, without +, ++ or ~"]
    if override.is_sweep_override():
        return [f"{text}: one value at a time; {_unswept(key, text.partition('=')[2])}"]
    return _check_option(override) if key in GROUPS else _check_value(override, tree)


def _unreadable(text: str) -> str:
    """Return the problem of an override that Hydra cannot read, and how to write it."""
    name, _, value = (part.strip() for part in text.partition("="))
    names = (*knobs(), *GROUPS)
    if name not in names:
        return f"no such knob{did_you_mean(suggest(name.strip('.')))}"
    several = [_tight(part) for part in re.split(r"[\s,;]+(?=[\w.]+\s*=)", text)]
    if len(several) > 1 and all(part.partition("=")[0] in names for part in several):
        return f"write {' '.join(map(shlex.quote, several))}, as separate words"
    if (tight := _tight(text)) != text:
        try:
            _parsed(tight)
        except HydraException:
            return _unreadable(tight)
        return f"write {shlex.quote(tight)}"
    if value.startswith("["):
        example = _example(name) if name in knobs() else written(["a", "b"])
        return f"cannot be read; write a list without spaces, as in {name}={example}"
    if name in knobs() and knobs()[name].type in (int, float, bool, int | str, list[int]):
        return _expected(name)
    return f"cannot be read; quote the value twice: {overrides({name: value})}"


def _tight(text: str) -> str:
    """An override without spaces or more signs around its sign."""
    name, _, value = text.partition("=")
    return f"{name.strip()}={value.lstrip('= ').strip()}"


def _unswept(knob: str, text: str) -> str:
    """Return the spelling of a value that Hydra takes for several, as it does with commas."""
    kind = knobs()[knob].type if knob in knobs() else None
    if kind is str:
        return f"quote it twice: {overrides({knob: text})}"
    if kind in (list[str], list[int]) and "(" not in text:
        return f"write a list: {overrides({knob: text.split(',')})}"
    return _expected(knob) if kind else "no sweeps"


def _check_option(override: Override) -> list[str]:
    group, option = override.key_or_group, str(override.value())
    known = options(group)
    if option in known:
        return []
    option = Path(option).stem  # of somebody who names the file
    near = [name for name in known if option and option in name]
    near += [name for name in difflib.get_close_matches(option, known, n=2) if name not in near]
    meant = did_you_mean([f"{group}={name}" for name in near[:2]])
    if group == "data" and not near:
        meant = "; data of your own: data=indexed 'data.blend=[<prefix>]'"
    return [f"{override.input_line}: no such option{meant} (options: {', '.join(known)})"]


def _check_value(override: Override, tree: DictConfig) -> list[str]:
    key, value = override.key_or_group, _listed(override.key_or_group, override.value())
    if key in sections() and not isinstance(value, dict):
        inner = next(path for path in knobs() if path.startswith(f"{key}."))
        return [f"{key}: is a section; set one of its knobs, as in {inner}=..."]
    if present := renamed().get(key):
        name = present.facts.group or present.path
        return [f"{override.input_line}: is now {overrides({name: value})}"]
    if key in REMOVED:
        return [f"{override.input_line}: no longer exists, as {REMOVED[key].always}; remove it"]
    if has_fields(key.rpartition(".")[0]) or (has_fields(key) and isinstance(value, dict)):
        return []  # which the rules of the capability check
    if key not in knobs() and key not in sections():
        return [f"{key}: no such knob{did_you_mean(suggest(key))}"]
    wrong = f"{override.input_line}: {_expected(key, value)}" if key in knobs() else ""
    if wrong and isinstance(value, dict):  # which OmegaConf would merge
        return [wrong]
    try:
        OmegaConf.update(tree, key, value)
    except (ValidationError, OverflowError) as error:
        return [wrong or _explain(error)]
    except OmegaConfBaseException as error:
        return [_explain(error)]
    return []


def _listed(knob: str, value: Any) -> Any:
    """One name where a list of names is asked for is that list, and `none` the empty one."""
    if not (_takes_names(knob) and isinstance(value, str)):
        return value
    return [] if value == "none" else [value]


def _bracketed(word: str) -> str:
    knob, _, value = word.partition("=")
    bare = "," in value and value[0] not in "[{'\"$"
    return f"{knob}=[{value}]" if bare and _takes_names(knob) else word


def _takes_names(knob: str) -> bool:
    return knob in ("run.inject", "data.stages", "data.batch_warmup") or (
        knob in knobs() and knobs()[knob].type == list[str] and knob in choices()
    )


def _explain(error: Exception) -> str:
    """One line for an error of Hydra, OmegaConf or YAML, wherever the value came from."""
    if isinstance(error, UnicodeDecodeError):
        return f"{_undecodable()}: is no UTF-8 text; write the file again ({error})"
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OmegaConfBaseException):
        cause = cause.__cause__ or cause.__context__
    if cause is None:
        return visible(" ".join(str(error).split()))
    file = re.match(r"In '(.+?)'", str(error))
    where = f"configs/{file[1]}.yaml: " if file else ""
    key, what = str(cause.full_key or ""), str(cause).splitlines()[0].rstrip(".")
    knob = key.partition("[")[0]
    if isinstance(cause, ConfigKeyError | ConfigAttributeError):
        return f"{where}{key}: no such knob{did_you_mean(suggest(key))}"
    if isinstance(cause, InterpolationResolutionError):
        what += "; ${...} takes the value of another knob, as in ${model.name}"
    if what.startswith("Merge error"):
        what = f"is not a section; expected lines of <knob>: <value> ({what})"
    if isinstance(cause, ValidationError) and knob in knobs():
        return f"{where}{key}: {what}; {_expected(knob, in_file=bool(where))}"
    return visible(f"{where}{key}: {what}" if key else f"{where}{what}")


def _undecodable() -> str:
    for path in FOLDER.rglob("*.yaml"):
        try:
            path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            return f"configs/{path.relative_to(FOLDER)}"
    return "a file of configs"


def _expected(knob: str, value: Any = None, *, in_file: bool = False) -> str:
    """`expected an integer, as in run.steps=100`, or in a YAML file as in `steps: 100`.

    The example of a list of texts has `value`, if that is a text.
    """
    names: dict[Any, str] = {
        int: "an integer",
        int | str: "an integer or auto",
        float: "a number",
        bool: "true or false",
        bool | str: "true or false, or a text",
        str: "a text",
        dict[str, Any]: "fields",
    }
    one = isinstance(value, str) and value and knobs()[knob].type == list[str]
    example = written([value]) if one else _example(knob)
    form = f"{knob.rpartition('.')[2]}: " if in_file else f"{knob}="
    return f"expected {names.get(knobs()[knob].type, 'a list')}, as in {form}{example}"


def _example(knob: str) -> str:
    kind, default = knobs()[knob].type, knobs()[knob].default
    if knob == "run.phases":
        return shlex.quote("[{name:a,steps:9},{name:b,steps:1}]")
    if default != []:
        return written(default)
    return written([1, 2] if kind == list[int] else list(choices().get(knob, ("a", "b"))[:2]))
