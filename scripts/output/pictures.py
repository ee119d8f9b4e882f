"""Helpers of pictures: matplotlib, titles, smoothing, and steps that are left out."""

from collections.abc import Sequence
from typing import Any

from phalanx.configs import programs
from phalanx.configs.knobs import pluralize
from phalanx.moe.report.loggers import is_finite
from phalanx.moe.text import devices


def pyplot() -> Any:
    """matplotlib.pyplot without a display; ValueError if it is not installed."""
    try:
        import matplotlib
    except ImportError:
        raise ValueError(f"a picture needs matplotlib: {programs.install('matplotlib')}") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def title(facts: dict[str, Any]) -> str:
    """`first: tiny on 2 CPU processes, bf16, torch experts, sequence 256, batch 32, embedded data`.

    `facts` are some or all of `moe.report.start_page`; without a model the title is empty.
    """
    if "model" not in facts:
        return ""
    text = f"{facts['run']}: {facts['model']}" if "run" in facts else str(facts["model"])
    if "device" in facts:
        text += f" on {devices(facts.get('ranks', 1), facts['device'])}"
    return ", ".join([text, *(form.format(facts[k]) for k, form in _FORMS.items() if k in facts)])


_FORMS = {
    "precision": "{}",
    "experts": "{} experts",
    "sequence": "sequence {}",
    "batch": "batch {}",
    "data": "{} data",
}


def common_title(many: list[dict[str, Any]]) -> str:
    """`title` of the facts that several runs share, with `or` between up to three models."""
    if not many or not all("model" in facts for facts in many):
        return ""
    first = many[0]
    common = {k: v for k, v in first.items() if all(facts.get(k) == v for facts in many)}
    common.pop("run", None)
    models = list(dict.fromkeys(str(facts["model"]) for facts in many))
    common["model"] = " or ".join(models) if len(models) <= 3 else pluralize(len(models), "model")
    return title(common)


def not_finite(records: list[dict[str, Any]], key: str) -> list[int]:
    """Steps of a run at which a number is NaN or infinite (null in metrics.jsonl)."""
    return [r["step"] for r in records if key in r and not is_finite(r[key])]


def left_out(steps: Sequence[int]) -> str:
    """`3 steps with a loss that is NaN or infinite are left out: 7, 9, 10`."""
    named = ", ".join(map(str, steps[:5])) + (", ..." if len(steps) > 5 else "")
    several = "step" if len(steps) == 1 else "steps"
    are = "is" if len(steps) == 1 else "are"
    return f"{len(steps)} {several} with a loss that is NaN or infinite {are} left out: {named}"


def differences(many: list[dict[str, Any]]) -> list[str]:
    """Facts of each run that not all runs share: `torch experts, batch 16`; of those all record."""
    many = [f | {"ranks": pluralize(f["ranks"], "rank")} if "ranks" in f else f for f in many]
    forms = {"model": "{}", "ranks": "{}", "device": "{}", **_FORMS}
    known = [key for key in forms if all(key in facts for facts in many)]
    differing = [key for key in known if len({str(facts[key]) for facts in many}) > 1]
    return [", ".join(forms[key].format(facts[key]) for key in differing) for facts in many]


MEAN_OF = 21  # largest window of a smoothed curve


def smoothing(values: int) -> int:
    """Window that smooths a curve of `values` points; 1 if they are too few."""
    window = min(MEAN_OF, values // 10)
    return max(1, window - 1 + window % 2)  # odd: as many on both sides


def centred_means(values: dict[int, float], window: int) -> dict[int, float]:
    """Centred means of `window` consecutive values (an odd number), by step.

    The window shrinks near the ends and stays centred: one-sided means would lie above a falling
    curve.
    """
    numbers, half = list(values.values()), window // 2
    means = {}
    for i, step in enumerate(values):
        reach = min(half, i, len(numbers) - 1 - i)
        means[step] = sum(numbers[i - reach : i + reach + 1]) / (2 * reach + 1)
    return means
