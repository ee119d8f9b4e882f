"""From command line to typed configuration: YAML groups and overrides, composed by Hydra, converted to `schema.Config`.

Overrides are checked one by one against the schema first, so that every mistake is reported at once and with the
near miss that was meant. Hydra's compose API is used instead of `@hydra.main`: nothing is written, no folder is
changed and logging stays ours, whatever number of ranks read the same command line.
"""

import argparse
import difflib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException
from yaml import YAMLError

from configs.knobs import did_you_mean, get, knobs, sections, suggest
from configs.schema import Config
from configs.validate import ConfigError, validate

FOLDER = Path(__file__).resolve().parent
GROUPS = ("model", "kernels", "parallel", "data", "optim", "run", "experiment")


@dataclass(frozen=True)
class Composed:
    """A composed configuration and the option that each group took."""

    tree: DictConfig
    choices: dict[str, str | None]

    def yaml(self) -> str:
        """The resolved configuration as YAML; the group choices are comments on top."""
        chosen = " ".join(f"{group}={option}" for group, option in self.choices.items() if option)
        return f"# {chosen}\n{OmegaConf.to_yaml(self.tree, resolve=True)}"


def from_argv(argv: Sequence[str], world_size: int | None = None) -> Config:
    """Configuration of the command line `argv`, valid for `world_size` ranks (default: torchrun's WORLD_SIZE, or 1).

    Answers `--help` and `--cfg job` and exits with 0; reports every mistake on its own line and exits with 2.
    Only rank 0 prints.
    """
    ranks = int(os.environ.get("WORLD_SIZE", "1")) if world_size is None else world_size
    try:
        args = _parse(argv)
        if args.help:
            _leave(usage())
        if args.cfg:
            _leave(compose(args.overrides).yaml())
        config = load(args.overrides)
        validate(config, ranks)
    except ConfigError as error:
        _leave("".join(f"error: {line}\n" for line in str(error).splitlines()), code=2)
    return config


def load(overrides: Sequence[str]) -> Config:
    """Typed configuration of Hydra `overrides`, as in ["model=tiny", "run.steps=20"]; not yet validated.

    Raises ConfigError with one line per mistake: unknown option, unknown knob, wrong type.
    """
    tree = compose(overrides).tree
    try:
        config = OmegaConf.to_object(tree)
    except OmegaConfBaseException as error:
        raise ConfigError(_explain(error)) from error
    assert isinstance(config, Config)
    return config


def compose(overrides: Sequence[str]) -> Composed:
    """Compose config.yaml and the groups under `overrides`. Raises ConfigError, one line per mistake."""
    mistakes = [line for text in overrides for line in _check(text)]
    if mistakes:
        raise ConfigError("\n".join(mistakes))
    ConfigStore.instance().store(name="schema", node=Config)
    try:
        with initialize_config_dir(version_base="1.3", config_dir=str(FOLDER)):
            tree = hydra_compose("config", overrides=list(overrides), return_hydra_config=True)
    except (HydraException, OmegaConfBaseException, YAMLError) as error:
        raise ConfigError(_explain(error)) from error
    chosen = tree.hydra.runtime.choices
    OmegaConf.set_struct(tree, False)
    del tree["hydra"]
    return Composed(tree, {group: chosen.get(group) for group in GROUPS})


def options(group: str) -> list[str]:
    """Names of the YAML files of a group."""
    return sorted(path.stem for path in (FOLDER / group).glob("*.yaml"))


def usage() -> str:
    """The text of `--help`."""
    lines = [
        "usage: torchrun --nproc-per-node N train.py [group=option ...] [group.knob=value ...]",
        "",
        "Groups:",
        *(f"  {group:<11}{', '.join(options(group))}" for group in GROUPS),
        "",
        "Options:",
        "  --cfg job    print the configuration that this command line gives, and exit",
        "  -h, --help   print this text, and exit",
        "",
        "All knobs with their meaning: python -m configs.docs (also in README.md).",
        "Example: train.py experiment=gpt_oss_20b_8gpu run=bench kernels=torch data.global_batch=64",
    ]
    return "\n".join(lines) + "\n"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("-h", "--help", action="store_true")
    parser.add_argument("-c", "--cfg", choices=["job"])
    known, unknown = parser.parse_known_intermixed_args(list(argv))
    if unknown:
        option = unknown[0]
        name = option.lstrip("-").replace("-", "_").partition("=")[0]
        meant = [f"{path}=..." for path in suggest(name)]
        raise ConfigError(
            f"{option}: no such option; knobs are set without dashes" + did_you_mean(meant)
        )
    return known


def _leave(text: str, code: int = 0) -> NoReturn:
    if os.environ.get("RANK", "0") == "0":
        print(text, end="", file=sys.stderr if code else sys.stdout)
    sys.exit(code)


def _check(text: str) -> list[str]:
    """What is wrong with one override, judged by itself."""
    if "=" not in text and not text.startswith("~"):
        return [f"{text}: expected <knob>=<value> or <group>=<option>"]
    try:
        override = OverridesParser.create().parse_override(text)
    except HydraException:
        key, _, value = text.partition("=")
        return [f"{text}: cannot read the value; quote it twice, as in {key}=\"'{value}'\""]
    if not (override.type is not None and override.type.name == "CHANGE"):
        return [f"{text}: every knob exists already; write <knob>=<value> without +, ++ or ~"]
    if override.is_sweep_override():
        return [
            f"{text}: takes one value, not a sweep; a list is written {override.key_or_group}=[a,b]"
        ]
    if override.key_or_group in GROUPS:
        return _check_option(override)
    return _check_value(override)


def _check_option(override: Override) -> list[str]:
    group, option = override.key_or_group, override.value()
    known = options(group)
    if option in known or (option is None and group == "experiment"):
        return []
    near = difflib.get_close_matches(str(option), known, n=1, cutoff=0.5)
    near += [name for name in known if str(option) in name and name not in near][: 2 - len(near)]
    meant = did_you_mean([f"{group}={name}" for name in near])
    return [f"{group}={option}: no such option{meant} (options: {', '.join(known)})"]


def _check_value(override: Override) -> list[str]:
    key, value = override.key_or_group, override.value()
    if key in sections() and not isinstance(value, dict):
        inner = [path for path in knobs() if path.startswith(f"{key}.")]
        return [f"{key}={value}: {key} is a section; set one of its knobs, as in {inner[0]}=..."]
    if key not in knobs() and key not in sections():
        return [f"{key}: no such knob{did_you_mean(suggest(key))}"]
    try:
        OmegaConf.update(OmegaConf.structured(Config), key, value)
    except OmegaConfBaseException as error:
        return [_explain(error)]
    return []


def _explain(error: Exception) -> str:
    """One line for an error of Hydra, OmegaConf or YAML."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OmegaConfBaseException):
        cause = cause.__cause__
    if cause is None:
        return " ".join(str(error).split())
    key = str(cause.full_key or "")
    if isinstance(cause, ConfigKeyError | ConfigAttributeError):
        return f"{key}: no such knob{did_you_mean(suggest(key))}"
    if key in knobs():
        return (
            f"{key}: {_first_line(cause)}; expected {_type_name(key)}, as in {key}={_example(key)}"
        )
    return f"{key}: {_first_line(cause)}" if key else _first_line(cause)


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0]


def _type_name(key: str) -> str:
    names = {int: "an integer", float: "a number", bool: "true or false", str: "a text"}
    return names.get(knobs()[key].type, "a list")


def _example(key: str) -> Any:
    value = get(Config(), key)
    if isinstance(value, bool):
        return str(value).lower()
    return value or "[a,b]" if isinstance(value, list) else value
