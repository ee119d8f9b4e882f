"""Drawing to files, what their titles say, and what of a run they leave out."""

from typing import Any

from phalanx.moe.report.loggers import is_finite


def pyplot() -> Any:
    """matplotlib's, without a display; ValueError if it is not installed."""
    try:
        import matplotlib
    except ImportError:
        raise ValueError("a picture needs matplotlib: pip install -e '.[dev]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def title(facts: dict[str, Any]) -> str:
    """`tiny on 2 x CPU process, bf16, torch experts, sequence 256, batch 32, embedded data`.

    Args:
        facts: of `moe.report.title`, some or all; empty text without a model.
    """
    if "model" not in facts:
        return ""
    said = str(facts["model"])
    if "device" in facts:
        said += f" on {facts.get('ranks', 1)} x {facts['device']}"
    forms = {
        "precision": "{}",
        "experts": "{} experts",
        "sequence": "sequence {}",
        "batch": "batch {}",
        "data": "{} data",
    }
    return ", ".join([said, *(form.format(facts[k]) for k, form in forms.items() if k in facts)])


def common_title(many: list[dict[str, Any]]) -> str:
    """`title` of what several runs have in common, with `or` between up to three models."""
    if not many or not all("model" in facts for facts in many):
        return ""
    first = many[0]
    common = {k: v for k, v in first.items() if all(facts.get(k) == v for facts in many)}
    models = list(dict.fromkeys(str(facts["model"]) for facts in many))
    common["model"] = " or ".join(models) if len(models) <= 3 else f"{len(models)} models"
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


def running(values: dict[int, float], window: int) -> dict[int, float]:
    """Means of `window` values in a row, by the step of the last."""
    steps, found = list(values), list(values.values())
    ends = range(window, len(steps) + 1)
    return {steps[i - 1]: sum(found[i - window : i]) / window for i in ends}
