"""Settings, code and packages that all ranks of a run must share.

They are compared when the ranks have met (`phalanx.parallel.fault.same_settings`); data files when
they are opened (`phalanx.moe.data.loader`). Kernels and transports are not compared: each rank
chooses them, or the ranks agree on them when they are chosen.
"""

import hashlib
import json
import os
from dataclasses import asdict

import torch
import torch.distributed as dist

import phalanx
from phalanx.configs.redact import redacted
from phalanx.configs.schema import Config
from phalanx.configs.validate import ConfigError
from phalanx.moe.versions import code, packages
from phalanx.parallel.checkpoint.saved_knobs import leaves
from phalanx.parallel.fault import same_settings

HOST_LOCAL = ("run.dir", "run.device", "data.cache", "data.blend", "data.validation")
"""Knobs that may differ between hosts.

A folder may be mounted at another path; the tokens of `data.blend` and `data.validation` are
compared instead of their paths, and the kind of device instead of the knob that selects it."""
_PARTS = ("configs", "extras", "kernels", "moe", "parallel")  # folders of the package
_ADVICE = {
    "code": "bring every host to the same commit and changes",
    "device": "set run.device=cpu on every host, or see why one has no GPU",
}


def compare_settings(cfg: Config, store: dist.Store, rank: int, world: int) -> None:
    """Check that all ranks have the same settings, code and packages. Collective.

    Raises ConfigError on every rank, with the names, hosts and values that differ.
    """
    if world == 1:
        return
    values = shared_values(cfg)
    differences = same_settings.compare(store, rank, world, values, lambda: _shown(values))
    if differences:
        raise ConfigError(refusal(differences))


def shared_values(cfg: Config) -> dict[str, str]:
    """Values that this rank must share with others, by name."""
    knobs = {path: json.dumps(value) for path, value in leaves(asdict(cfg))}
    values = {path: value for path, value in knobs.items() if path not in HOST_LOCAL}
    values["device"] = "cuda" if torch.cuda.is_available() else "cpu"
    values["code"] = sources()
    return values | {f"package {name}": version for name, version in packages().items()}


def sources() -> str:
    """Digest of the sources that take part in training, uncommitted changes too; needs no git."""
    root, total = os.path.realpath(os.path.dirname(phalanx.__file__)), hashlib.sha256()
    for part in _PARTS:
        top = os.path.realpath(os.path.join(root, part))
        found = [os.path.join(folder, name) for folder, _, names in os.walk(top) for name in names]
        for path in sorted(found):
            if path.endswith((".py", ".yaml")) and os.path.isfile(path):
                total.update(f"{part}{path[len(top) :]}".encode())
                with open(path, "rb") as file:
                    total.update(file.read())
    return total.hexdigest()


def refusal(differences: list[same_settings.Difference]) -> str:
    """One line on the differences, with advice on the first."""
    first, others = differences[0], [difference.name for difference in differences[1:]]
    advice = _ADVICE.get(first.name, "start every host with the same overrides")
    if first.name.startswith("package "):
        advice = "install the same version on every host"
    if len(others) > _FEW:
        others[_FEW:] = [f"{len(others) - _FEW} more"]
    also = f"; so {'do' if len(others) > 1 else 'does'} {', '.join(others)}" if others else ""
    return f"hosts differ: {first}{also}: {advice}"


def _shown(values: dict[str, str]) -> dict[str, str]:
    """The values for display: texts without quotes, no secrets, the commit of the code."""
    commit, changed = code()
    commit_text = f"{commit[:7]}{'+' * changed}, " if commit != "unknown" else ""
    shown = {name: value.strip('"') for name, value in redacted(values).items()}
    return shown | {"code": f"{commit_text}sources {values['code'][:8]}"}


_FEW = 4  # number of names in a message after the first
