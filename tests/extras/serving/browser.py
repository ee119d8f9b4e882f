"""A page in a headless Chromium; a test that needs one is skipped where there is none."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from playwright.sync_api import Error, Page, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


@contextmanager
def opened(url: str, *, allowed: str | None = None, **options: Any) -> Iterator[Page]:
    """A page of new context options; at the end it has had no errors but `allowed` ones."""
    with sync_playwright() as playwright:
        browser = _browser(playwright)
        page = browser.new_page(**options)
        faults: list[str] = []
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("console", lambda m: faults.append(m.text) if m.type == "error" else None)
        page.goto(url)
        yield page
        browser.close()
    assert [fault for fault in faults if allowed is None or allowed not in fault] == []


def _browser(playwright: Any) -> Any:
    found = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    try:
        return playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
    except Error as error:
        if found:
            raise
        pytest.skip(f"no Chromium here (playwright install chromium): {str(error).splitlines()[0]}")
