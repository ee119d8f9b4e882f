"""Lines of metrics.jsonl that are no step, and failures, as marks and rows of the page."""

from pathlib import Path
from typing import Any

FAILURE = "failure"
_KINDS = {
    "start": "start",
    "summary": "end",
    "phase ": "phase",
    "saved: ": "checkpoint",
    "saving in the background: ": "checkpoint",
    "skipped: ": "skipped",
    "rolled back to ": "rollback",
    "stopping ": "stop",
    "warning: ": "warning",
    "kernels: ": "kernels",
    "experts needed ": "rerun",
    "blocks between nodes needed ": "rerun",
}
"""Kind of an event by how its text begins; others are notes."""


def event_of(record: dict[str, Any], title: str, *, unended: bool) -> dict[str, Any]:
    """`kind`, `step`, `time` and `text` of a line; `title` describes the run of a start.

    A start after a launch that has told no end is one after a failure.
    """
    text = record["event"]
    kind = next((kind for begin, kind in _KINDS.items() if text.startswith(begin)), "note")
    step = record["at"] if isinstance(record.get("at"), int) else 0
    if kind == "start":
        kind = "restart" if unended or step else "start"
        text = f"{f'resumed after step {step}' if step else 'start'}: {title or 'a run'}"
        text += "; the launch before ended without a summary" if unended else ""
    elif kind == "end":
        loss = record.get("loss")
        text = f"end after step {step}"
        text += f", loss {loss:.4f}" if isinstance(loss, int | float) else ""
    elif "before" in record and "after" in record:
        kind, text = "sample", f"{text}: {record['before']!s:.100} -> {record['after']!s:.300}"
    return {"kind": kind, "step": step, "time": record.get("time"), "text": text}


def failures(folder: Path) -> list[dict[str, Any]]:
    """Post-mortems of a run, each with the time of its newest file."""
    found = []
    try:
        for each in sorted((folder / "failures").iterdir()):
            files = sorted(path.name for path in each.iterdir()) if each.is_dir() else []
            if files:
                when = max((each / name).stat().st_mtime for name in files)
                text = f"failure: {each.name}/ has {', '.join(files[:6])}"
                text += f" and {len(files) - 6} more" if len(files) > 6 else ""
                found.append({"kind": FAILURE, "time": round(when, 3), "text": text})
    except OSError:
        pass  # there are none, or they are being written
    return found
