"""Runs whose data and checkpoints are in an object store: an S3-compatible server on loopback."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from phalanx.moe.data.token_files import BYTES, Sidecar
from phalanx.parallel.checkpoint import commit
from phalanx.parallel.checkpoint.saved_config import checkpoint_of
from phalanx.parallel.object_store import Remote, place
from phalanx.scripts import checkpoint
from tests.support import s3
from tests.support.launch import Launch
from tests.support.runs import TINY, before_step, exact, records, run, text, write_corpus


@contextmanager
def reached(at: str, rank: int) -> Iterator[None]:
    with s3.credentials(at):
        yield


def put(folder: Path, address: str) -> str:
    """A corpus as files, whose prefix is returned, and as objects."""
    prefix = write_corpus(folder / "text")
    size = Path(f"{prefix}.bin").stat().st_size // 2
    Sidecar(BYTES, "", 256, 0, "uint16", len(text()), size).write(Path(f"{prefix}.json"))
    with s3.credentials(s3.endpoint()):
        for ending in (".bin", ".idx", ".json"):
            Remote(address + ending).upload(Path(prefix + ending))
    return prefix


def trained(rows: list[dict[str, Any]]) -> list[tuple[int, str, str]]:
    return exact([row for row in rows if "loss" in row])


def validated(rows: list[dict[str, Any]]) -> list[float]:
    return [row["valid_loss"] for row in rows if "valid_loss" in row]


@pytest.mark.slow  # by default the parts: test_remote_checkpoint, and the runs below
@pytest.mark.dist
def test_a_run_goes_on_as_one_with_folders_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Losses to the last bit; from another run folder, as on another host; on another layout."""
    address, change = f"s3://{s3.BUCKET}/e2e/text", partial(reached, s3.endpoint())
    local, root = put(tmp_path, address), f"s3://{s3.BUCKET}/e2e/runs"
    command = [*TINY, "data=indexed", "run.save_interval=2", f"data.cache={tmp_path / 'cache'}"]
    command += ["run.eval_interval=4", "run.eval_batches=2", "data.split='90,10'"]
    plain = [f"data.blend=[{local}]", f"run.dir={tmp_path / 'plain'}", "run.steps=6"]
    assert run(2, [*command, *plain])[0].code == 0
    remote = [*command, f"data.blend=[{address}]", f"run.checkpoints={root}"]
    first = run(2, [*remote, f"run.dir={tmp_path / 'a'}", "run.steps=4"], change)[0]
    assert first.code == 0, first.err
    assert f"saved: checkpoint of step 4 in {root}/run" in first.out
    second = run(2, [*remote, f"run.dir={tmp_path / 'b'}", "run.steps=6"], change)[0]
    assert second.code == 0, second.err
    assert f"resumed from step 4: {root}/run/step_00000004." in second.out
    expected = records(tmp_path / "plain/run")
    actual = [*records(tmp_path / "a/run"), *records(tmp_path / "b/run")]
    assert trained(actual) == trained(expected) and len(trained(actual)) == 6
    assert validated(actual) == validated(expected) and len(validated(actual)) == 1
    third = run(1, [*remote, f"run.dir={tmp_path / 'c'}", "run.steps=7"], change)[0]
    assert third.code == 0 and "resumed from step 6" in third.out, third.err
    assert not [path for path in tmp_path.rglob("*.distcp") if "plain" not in path.parts]
    with s3.credentials(s3.endpoint()):
        ((_, newest), (_, older)) = commit.committed(place(f"{root}/run"))
        assert [path.name[:13] for path in (older, newest)] == ["step_00000006", "step_00000007"]
        assert checkpoint.main(["list", f"{root}/run"]) == 0
        assert checkpoint.main(["verify", str(newest)]) == 0
        assert checkpoint.main(["inspect", str(older)]) == 0
        out = capsys.readouterr().out
        assert out.splitlines()[0].startswith(newest.name) and ": sound" in out
        # The run folder knows the address.
        assert checkpoint_of(tmp_path / "a/run") == checkpoint_of(tmp_path / "c/run") == newest
        assert checkpoint.main(["list", str(tmp_path / "a/run")]) == 0
        listed = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
        assert listed == [newest.name, older.name]
        assert "step 6, written by 2 ranks" in out and f"data.blend={[address]}" in out
        (newest / "__0_0.distcp").write(b"")
        assert checkpoint.main(["verify", str(newest)]) == 1
        assert "__0_0.distcp has 0 bytes, not" in capsys.readouterr().err


@contextmanager
def seized(at: str, root: str, rank: int) -> Iterator[None]:
    """At step 4 another launch takes the prefix."""
    from phalanx.parallel.checkpoint.remote import Claim

    with s3.credentials(at), before_step(4, lambda: Claim(Remote(root))):
        yield


@pytest.mark.dist
def test_a_later_launch_ends_an_earlier_one(tmp_path: Path) -> None:
    """From other hosts, where the lock of the run folder does not help."""
    root = f"s3://{s3.BUCKET}/taken"
    command = [*TINY, "data=synthetic", "run.save_interval=2", f"run.checkpoints={root}"]
    command += [f"run.dir={tmp_path}", "run.steps=6"]
    (actual,) = run(1, command, partial(seized, s3.endpoint(), f"{root}/run"))
    assert actual.code == 2
    (line,) = [line for line in actual.err.splitlines() if line.startswith("error:")]
    assert f"this run has lost {root}/run" in line and "has taken it over" in line


@pytest.mark.dist
def test_no_credential_is_written(tmp_path: Path) -> None:
    """Not to the run folder, the cache, the console, tracking, or the store; nor by an error."""
    at, root = s3.endpoint(), f"s3://{s3.BUCKET}/secrets"
    put(tmp_path, f"{root}/text")
    command = [*TINY, "data=indexed", f"data.blend=[{root}/text]", "run.save_interval=1"]
    command += [f"data.cache={tmp_path / 'cache'}", f"run.dir={tmp_path}", "run.async_save=on"]
    command += ["run.wandb=offline", "run.trackers=[tensorboard]", "run.steps=2"]
    with Launch(
        1, [*command, f"run.checkpoints={root}"], tmp_path / "out", partial(reached, at)
    ) as launch:
        assert launch.wait() == [0], launch.output(0)
    assert list(tmp_path.glob("run/wandb/offline-run-*/*.wandb"))
    assert list(tmp_path.glob("run/tensorboard/ev*"))
    fails = [*command, "run.checkpoints=s3://no-such-bucket/x", "run.name=other"]
    (failed,) = run(1, fails, partial(reached, at))
    assert failed.code == 2, failed.err
    assert "cannot write to s3://no-such-bucket/x/other (run.checkpoints)" in failed.err
    with s3.credentials(at):
        stored = Remote(root).objects()
        assert len([name for name in stored if name.endswith("COMMIT.json")]) == 2
        kept = [(Remote(root) / name).read() for name in stored]
    kept += [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    kept += [failed.out.encode(), failed.err.encode()]
    for secret in (s3.ACCESS, s3.SECRET):
        assert not [data for data in kept if secret.encode() in data]
