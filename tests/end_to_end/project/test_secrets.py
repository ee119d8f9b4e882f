"""No secret is written: not by a run, and not by one that fails."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import megatron.core.distributed
import megatron.core.models.gpt.gpt_model  # noqa: F401
import pytest

from phalanx.configs.redact import redacted
from tests.support.launch import Launch
from tests.support.runs import SMALL, TINY

KEY, PASSWORD = "0123456789abcdef0123", "hunter22"
ADDRESS = f"https://me:{PASSWORD}@host/data"


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        (ADDRESS, "https://***@host/data"),
        (f"cannot read s3://{KEY}@bucket/x, retry", "cannot read s3://***@bucket/x, retry"),
        (f"https://h/x?a=1&X-Amz-Signature={KEY}&b=2", "https://h/x?a=1&X-Amz-Signature=***&b=2"),
        (f"key {KEY}.", "key ***."),
        ("mail me@host, see https://host/a@b", "mail me@host, see https://host/a@b"),
        ("/home/me/key.json", "/home/me/key.json"),
        ("tokens 12345678", "tokens 12345678"),
    ],
)
def test_what_is_a_secret(text: str, clean: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("GOOGLE_CREDENTIALS", "/home/me/key.json")
    monkeypatch.setenv("SHORT_TOKEN", "1234567")
    monkeypatch.setenv("TOKENS_PER_STEP", "12345678")
    assert redacted(text) == clean
    assert redacted({"a": [text, 1, None], "b": (text,)}) == {"a": [clean, 1, None], "b": (clean,)}


@contextmanager
def secrets(rank: int) -> Iterator[None]:
    os.environ["WANDB_API_KEY"] = KEY
    sys.argv[1:] = [f"model.name={ADDRESS}"]  # which wandb would read
    yield


def written(folder: Path) -> bytes:
    return b"\n".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())


@pytest.mark.dist
def test_a_run_writes_none(tmp_path: Path) -> None:
    named = [f"model.name='{ADDRESS}'", f"run.project={KEY}", "run.wandb=offline"]
    command = [*TINY, "data=synthetic", *named]
    command += ["run.steps=1", "run.tensorboard=true", f"run.dir={tmp_path}"]
    with Launch(1, command, tmp_path / "out", secrets) as launch:
        assert launch.wait() == [0], launch.output(0)
    everything = written(tmp_path)
    assert KEY.encode() not in everything and PASSWORD.encode() not in everything
    assert "https://***@host/data" in launch.output(0)
    for kept in ("run/wandb", "run/checkpoints"):  # the configuration is there, without the secret
        assert b"https://***@host/data" in written(tmp_path / kept)


@pytest.mark.dist
@pytest.mark.parametrize("override", ["run.dir=/proc/{}/runs", "data.split='{}'"])
def test_an_error_tells_none(override: str, tmp_path: Path) -> None:
    """An error at the start of the run, and one of the command line."""
    command = [*SMALL, "data=synthetic", "run.steps=1", f"run.dir={tmp_path}"]
    with Launch(1, [*command, override.format(KEY)], tmp_path / "out", secrets) as launch:
        assert launch.wait() == [2], launch.output(0)
    assert "error: " in launch.output(0) and "***" in launch.output(0)
    assert KEY.encode() not in written(tmp_path)
