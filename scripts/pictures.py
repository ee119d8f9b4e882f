"""Drawing to files, what their titles say, and what of a run they leave out."""

from typing import Any

from phalanx.configs import programs
from phalanx.configs.knobs import counted
from phalanx.moe.report.loggers import is_finite


def pyplot() -> Any:
    """matplotlib's, without a display; ValueError if it is not installed."""
    try:
        import matplotlib
    except ImportError:
        raise ValueError(f"a picture needs matplotlib: {programs.install('matplotlib')}") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def title(facts: dict[str, Any]) -> str:
    """`first: tiny on 2 x CPU process, bf16, torch experts, sequence 256, batch 32, embedded data`.

    Args:
        facts: of `moe.report.title`, some or all; empty text without a model.
    """
    if "model" not in facts:
        return ""
    said = f"{facts['run']}: {facts['model']}" if "run" in facts else str(facts["model"])
    if "device" in facts:
        said += f" on {facts.get('ranks', 1)} x {facts['device']}"
    return ", ".join([said, *(form.format(facts[k]) for k, form in _FORMS.items() if k in facts)])


_FORMS = {
    "precision": "{}",
    "experts": "{} experts",
    "sequence": "sequence {}",
    "batch": "batch {}",
    "data": "{} data",
}


def common_title(many: list[dict[str, Any]]) -> str:
    """`title` of what several runs have in common, with `or` between up to three models."""
    if not many or not all("model" in facts for facts in many):
        return ""
    first = many[0]
    common = {k: v for k, v in first.items() if all(facts.get(k) == v for facts in many)}
    common.pop("run", None)
    models = list(dict.fromkeys(str(facts["model"]) for facts in many))
    common["model"] = " or ".join(models) if len(models) <= 3 else counted(len(models), "model")
    return title(common)


def not_finite(records: list[dict[str, Any]], key: str) -> list[int]:
    """Steps of a run at which a number is NaN or infinite, for which metrics.jsonl has null."""
    return [r["step"] for r in records if key in r and not is_finite(r[key])]


def left_out(steps: list[int]) -> str:
    """`3 steps with a loss that is NaN or infinite are left out: 7, 9, 10`."""
    named = ", ".join(map(str, steps[:5])) + (", ..." if len(steps) > 5 else "")
    several = "step" if len(steps) == 1 else "steps"
    are = "is" if len(steps) == 1 else "are"
    return f"{len(steps)} {several} with a loss that is NaN or infinite {are} left out: {named}"


def differences(many: list[dict[str, Any]]) -> list[str]:
    """Of each of several runs what not all of them have: `torch experts, batch 16`.

    Facts that some runs do not tell are left out.
    """
    forms = {"model": "{}", "ranks": "{} ranks", "device": "{}", **_FORMS}
    told = [key for key in forms if all(key in facts for facts in many)]
    differing = [key for key in told if len({str(facts[key]) for facts in many}) > 1]
    return [", ".join(forms[key].format(facts[key]) for key in differing) for facts in many]


MEAN_OF = 21
"""Most values that a point of a smooth curve is the mean of."""


def smoothing(values: int) -> int:
    """Values that a point of a smooth curve of so many is the mean of; 1 where they are too few."""
    window = min(MEAN_OF, values // 10)
    return max(1, window - 1 + window % 2)  # odd: as many on both sides


def centred_means(values: dict[int, float], window: int) -> dict[int, float]:
    """Means of `window` values in a row, an odd number, by the step in their middle.

    Near the ends of as many on both sides as there are: a line remains what it is, where means of
    the last values would lie above a curve that falls.
    """
    found, half = list(values.values()), window // 2
    means = {}
    for i, step in enumerate(values):
        reach = min(half, i, len(found) - 1 - i)
        means[step] = sum(found[i - reach : i + reach + 1]) / (2 * reach + 1)
    return means
