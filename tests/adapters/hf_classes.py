"""Every class of experts that transformers dispatches, at a tiny size, found by its decorator."""

import contextlib
import importlib
import inspect
import re
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

EXPERTS, HIDDEN, WIDTH = 5, 24, 20
_SIZES = {
    "hidden_size": HIDDEN,
    "moe_hidden_size": HIDDEN,
    "intermediate_size": WIDTH,
    "moe_intermediate_size": WIDTH,
    "num_experts": EXPERTS,
    "num_local_experts": EXPERTS,
    "n_routed_experts": EXPERTS,
    "moe_num_experts": EXPERTS,
}
_DECORATED = re.compile(r"^@use_experts_implementation\b.*\nclass (\w+)", re.M)


def decorated() -> dict[str, str]:
    """Modules of all decorated classes, by the names of the classes."""
    models = Path(transformers.__file__).parent / "models"
    return {
        name: f"transformers.models.{path.parent.name}.{path.stem}"
        for path in sorted(models.glob("*/modeling_*.py"))
        for name in _DECORATED.findall(path.read_text("utf-8"))
    }


def experts(module: str, name: str, implementation: str) -> Any:
    """Experts of a class, fp32, with random parameters."""
    modeling = importlib.import_module(module)
    made_by = getattr(modeling, name)
    own_size = "intermediate_size" in inspect.signature(made_by).parameters
    for config in _configs(modeling):
        with contextlib.suppress(AttributeError, TypeError), torch.device("meta"):
            made = made_by(config, **({"intermediate_size": WIDTH} if own_size else {}))
            if made.down_proj.shape[0] == EXPERTS:
                break
    else:
        raise AssertionError(f"{name} takes none of the configs of {module}")
    made = made.to_empty(device="cpu")
    made.config._experts_implementation = implementation
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(0, 0.3, generator=generator)
    return made


def _configs(modeling: Any) -> Iterator[Any]:
    """Configs of a module's models and of their parts, small."""
    models = [c for c in vars(modeling).values() if inspect.isclass(c)]
    models = [c for c in models if issubclass(c, PreTrainedModel) and c.config_class]
    models = [c for c in models if c.__module__ == modeling.__name__]
    classes = {k for m in models for k in typing.get_args(m.config_class) or (m.config_class,)}
    for config_class in sorted(classes, key=lambda c: c.__name__):
        yield from _parts(config_class())


def _parts(config: Any) -> Iterator[Any]:
    for key, size in _SIZES.items():
        if hasattr(config, key):
            is_list = isinstance(getattr(config, key), list)
            setattr(config, key, [size, size] if is_list else size)
    yield config
    for key in config.sub_configs:
        if (part := getattr(config, key, None)) is not None:
            yield from _parts(part)
