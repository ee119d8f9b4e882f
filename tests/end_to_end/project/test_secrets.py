"""No secret is written: not by a run, and not by one that fails."""

import gzip
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

KEY, PASSWORD, SLASHED = "0123456789abcdef0123", "hunter22", "/bPxRfiCYEXAMPLE+KEY"
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
        # A key may begin as a path does, and has other characters in an address.
        (f"secret {SLASHED}: refused", "secret ***: refused"),
        ("https://h/%2FbPxRfiCYEXAMPLE%2BKEY/x", "https://h/***/x"),
        ("token ~.~tilde", "token ***"),
        ("https://me:p@ss@host/a@b", "https://***@host/a@b"),
        # Short ones are replaced as words; flags and single numbers are none.
        ("pin=1234567, 'pw12'.", "pin=***, '***'."),
        ("xpw12 pw123 pw12-a /pw12/ a.pw12 pw12.py", "xpw12 pw123 pw12-a /pw12/ a.pw12 pw12.py"),
        ("step 1: a True friend", "step 1: a True friend"),
        # Each line of a key, as output is by lines.
        ("MIIEvQIBADANBgkq", "***"),
        # Places of secrets are told.
        ("no /home/me/.aws/credentials", "no /home/me/.aws/credentials"),
    ],
)
def test_what_is_a_secret(text: str, clean: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("GOOGLE_CREDENTIALS", "/home/me/key.json")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/home/me/.aws/credentials")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SLASHED)
    monkeypatch.setenv("GH_TOKEN", "~.~tilde")
    monkeypatch.setenv("SHORT_TOKEN", "1234567")
    monkeypatch.setenv("PGPASSWORD", "pw12")
    monkeypatch.setenv("HF_HUB_DISABLE_IMPLICIT_TOKEN", "1")
    monkeypatch.setenv("USE_AUTH_TOKEN", "true")
    monkeypatch.setenv("SSH_PRIVATE_KEY", "-----BEGIN-----\nMIIEvQIBADANBgkq\n")
    monkeypatch.setenv("TOKENS_PER_STEP", "12345678")
    assert redacted(text) == clean
    assert redacted({"a": [text, 1, None], "b": (text,)}) == {"a": [clean, 1, None], "b": (clean,)}


@contextmanager
def secrets(rank: int) -> Iterator[None]:
    os.environ["WANDB_API_KEY"] = KEY
    os.environ["AWS_SECRET_ACCESS_KEY"] = SLASHED
    sys.argv[1:] = [f"model.name={ADDRESS}"]  # which wandb would read
    yield


def written(folder: Path) -> bytes:
    """Contents of all files of a folder, or of one file, as they are before compression."""
    paths = [folder] if folder.is_file() else [p for p in folder.rglob("*") if p.is_file()]
    found = [
        gzip.decompress(p.read_bytes()) if p.suffix == ".gz" else p.read_bytes() for p in paths
    ]
    return b"\n".join(found)


@pytest.mark.dist
@pytest.mark.extras  # records its routing
def test_a_run_writes_none(tmp_path: Path) -> None:
    named = [f"model.name='{ADDRESS}{SLASHED}'", f"run.project={KEY}", "run.wandb=offline"]
    command = [*TINY, "data=synthetic", *named, f"run.record_routing={tmp_path}/routing"]
    command += [
        "run.steps=1",
        "run.trackers=[tensorboard]",
        f"run.dir={tmp_path}",
        "run.profile=[1,1]",
    ]
    with Launch(1, command, tmp_path / "out", secrets) as launch:
        assert launch.wait() == [0], launch.output(0)
    everything = written(tmp_path)
    for secret in (KEY, PASSWORD, SLASHED):
        assert secret.encode() not in everything
    assert "https://***@host/data***" in launch.output(0)
    # The configuration is there, without the secret.
    for kept in (
        "run/wandb",
        "run/checkpoints",
        "run/launches",
        "run/trace_1_1.json.gz",
        "routing",
    ):
        assert b"https://***@host/data***" in written(tmp_path / kept)


@pytest.mark.dist
@pytest.mark.parametrize("override", ["run.dir=/proc/{}/runs", "data.split='{}'"])
def test_an_error_tells_none(override: str, tmp_path: Path) -> None:
    """An error at the start of the run, and one of the command line."""
    command = [*SMALL, "data=synthetic", "run.steps=1", f"run.dir={tmp_path}"]
    with Launch(1, [*command, override.format(KEY)], tmp_path / "out", secrets) as launch:
        assert launch.wait() == [2], launch.output(0)
    assert "error: " in launch.output(0) and "***" in launch.output(0)
    assert KEY.encode() not in written(tmp_path)
