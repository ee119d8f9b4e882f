"""Progress in a pipe and on a terminal."""

import os
import pty
import select
import sys
import termios

import pytest

from phalanx.moe.report import progress as module
from phalanx.moe.report.progress import progress


def work() -> None:
    with progress("verifying", total=4000, initial=1000, unit="B", unit_scale=True) as bar:
        for _ in range(3):
            bar.update(1000)


def test_a_pipe_gets_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "_EVERY", 0)
    work()
    text = capsys.readouterr().err
    assert "\r" not in text and "\x1b" not in text and text.endswith("\n")
    lines = text.splitlines()
    assert all(line.startswith("verifying: ") for line in lines)
    assert lines[0].startswith("verifying:  25%") and lines[-1].startswith("verifying: 100%")


def test_what_is_short_leaves_no_line_in_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    work()
    assert capsys.readouterr() == ("", "")


def test_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    main, other = pty.openpty()
    termios.tcsetwinsize(other, (24, 80))  # a bar is not drawn where there is no line for it
    with os.fdopen(other, "w") as terminal, os.fdopen(main, "rb") as read:
        monkeypatch.setattr(sys, "stderr", terminal)
        work()
        terminal.flush()
        text = b""
        while select.select([read], [], [], 1)[0] and b"100%" not in text:
            text += os.read(read.fileno(), 10_000)
    assert b"\rverifying:" in text and b"100%" in text
