"""Fields of an untrusted config.json, in the types of the knobs.

No field is ignored: one that no rule has read must be on a short list of harmless ones.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from phalanx.configs.knobs import knobs
from phalanx.moe.data.tokenizer.special_tokens import shown
from phalanx.moe.hf import ConversionError

_OTHER_NAMES = {
    "num_experts": "num_local_experts",
    "n_routed_experts": "num_local_experts",
    "num_local_experts": "num_experts",
    "num_experts_per_tok": "experts_per_token",
    "num_nextn_predict_layers": "num_mtp_layers",
}
"""Name of a field in newer or older files."""

_ABSENT = {"tie_word_embeddings": False, "swiglu_alpha": 1.702, "swiglu_limit": 7.0}
"""Defaults of transformers for fields that a published config.json may leave out."""

_BEYOND = 100
"""Limit of a size, as a multiple of the largest published one. Without it, the list of layers of
an invalid file could take all memory before other checks."""


class Fields(Mapping[str, Any]):
    """A JSON object that records which of its fields have been read.

    Args:
        values: the object.
        where: its name in messages.
    """

    def __init__(self, values: dict[str, Any], where: str = "config.json") -> None:
        self._values, self.where = values, where
        self._read: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self._read.add(name)
        return self._values[name]

    def __contains__(self, name: object) -> bool:
        return name in self._values  # asking is not reading

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def inner(self, name: str) -> "Fields | None":
        """The object in a field; None if the field is absent or empty.

        Raises:
            ConversionError: it is something else.
        """
        value = self.get(name)
        if not value:
            return None
        if not isinstance(value, dict):
            raise ConversionError(f"{self.where} has {name}={shown(value)}; expected a JSON object")
        return Fields(value, f"{name} of {self.where}")

    def one(self, *names: str) -> Any:
        """The common value of those of these fields that exist; None without any.

        Raises:
            ConversionError: two of them differ.
        """
        present = [name for name in names if name in self]
        for name in present[1:]:
            if self[name] != self[present[0]]:
                both = f"{present[0]}={shown(self[present[0]])} and {name}={shown(self[name])}"
                raise ConversionError(f"{self.where} has {both}, which mean the same and differ")
        return self[present[0]] if present else None

    def demand(self, values: Mapping[str, Any]) -> None:
        """Read fields with a single supported value, which is also their default.

        Raises:
            ConversionError: one has another value.
        """
        for name, value in values.items():
            if (actual := self.get(name, value)) != value:
                raise ConversionError(
                    f"{self.where} has {name}={shown(actual)}; only {shown(value)} can be imported"
                )

    def refuse_unread(self, harmless: frozenset[str] = frozenset()) -> None:
        """Check that every field has been read or is harmless.

        Raises:
            ConversionError: a field is neither.
        """
        for name in sorted(self._values.keys() - self._read - harmless):
            raise ConversionError(
                f"{self.where} has {name}={shown(self._values[name])}, which is not known here; "
                "remove it if the model is the same without it"
            )


def value_of(config: Fields, name: str, knob: str) -> Any:
    """The value of a field in the type of `model.<knob>`.

    Raises:
        ConversionError: it is missing, or of another type.
    """
    kind = knobs()[f"model.{knob}"].type
    value: Any = config.one(name, _OTHER_NAMES.get(name, name))
    if value is None and name not in config:
        value = _ABSENT.get(name)
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind or (kind is float and not math.isfinite(value)):
        found = f"{name}={shown(value)}" if name in config else f"no {name}"
        raise ConversionError(f"{config.where} has {found}; expected {kind.__name__}")
    most = knobs()[f"model.{knob}"].facts.largest_published
    if most is not None and value > _BEYOND * most:
        raise ConversionError(
            f"{config.where} has {name}={shown(value)}; published models have at most {most:,}"
        )
    return value


def number(config: Fields, name: str, absent: int | None = None, least: int = 0) -> int:
    """The value of an integer field.

    Raises:
        ConversionError: it is missing, no integer, or less than `least`.
    """
    value = config.one(name, _OTHER_NAMES.get(name, name))
    if value is None and name not in config:
        value = absent
    if type(value) is not int or value < least:
        expected = f"a number of {least} or more" if least else "a number"
        raise ConversionError(f"{config.where} has {name}={shown(value)}; expected {expected}")
    return value
