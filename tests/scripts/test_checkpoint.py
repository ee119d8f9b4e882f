"""scripts/checkpoint.py: lists, verifies and inspects; one line on what is wrong, and no code."""

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from phalanx.scripts import checkpoint
from tests.parallel.checkpoint.checkpoints import largest, reseal
from tests.parallel.conftest import run, template  # noqa: F401  (fixtures)

SCRIPT = Path(checkpoint.__file__)


def call(
    capsys: pytest.CaptureFixture[str], command: str, folder: Path
) -> tuple[int, list[str], str]:
    """(exit code, lines, errors without the progress bar)."""
    code = checkpoint.main([command, str(folder)])
    out, err = capsys.readouterr()
    errors = [line for line in err.splitlines() if line.startswith("checkpoint:")]
    assert "Traceback" not in err
    return code, out.splitlines(), "\n".join(errors)


@pytest.mark.dist
def test_list(run: Path, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: F811
    os.truncate(largest(run / "step_00000001"), 100)
    (run / "step_00000000.bad").mkdir()
    code, lines, errors = call(capsys, "list", run)
    assert (code, errors, len(lines)) == (0, "", 3)
    assert lines[0].startswith("step_00000002") and lines[0].endswith("complete")
    assert " KiB " in lines[0] and "ago" in lines[0]
    assert lines[1].startswith("step_00000001") and "has 100 bytes, not" in lines[1]
    assert lines[2].startswith("step_00000000.bad") and lines[2].endswith("failed verification")
    assert call(capsys, "list", run.parent)[1][1:] == lines[1:]  # the run folder does as well


@pytest.mark.dist
def test_a_reader_that_has_enough_is_no_error(run: Path) -> None:  # noqa: F811
    read, write = os.pipe()
    os.close(read)
    output = subprocess.run(
        [sys.executable, str(SCRIPT), "inspect", str(run / "step_00000002")],
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
    )
    os.close(write)
    assert (output.returncode, output.stderr) == (0, "")


@pytest.mark.dist
def test_verify(run: Path, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: F811
    code, lines, errors = call(capsys, "verify", run / "step_00000002")
    assert (code, errors, len(lines)) == (0, "", 1) and lines[0].endswith("sound")
    shard = largest(run / "step_00000002")
    data = bytearray(shard.read_bytes())
    data[1000] ^= 1
    shard.write_bytes(data)
    code, lines, errors = call(capsys, "verify", run / "step_00000002")
    assert (
        (code, lines) == (1, []) and f"{shard.name} has" in errors and "contents changed" in errors
    )
    assert call(capsys, "list", run)[1][0].endswith("complete")  # sizes do not tell


@pytest.mark.dist
def test_verify_and_inspect_take_a_run(
    run: Path,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    """All checkpoints are read, sound ones are told even where another is not."""
    for folder in (run, run.parent):
        code, lines, errors = call(capsys, "verify", folder)
        assert (code, errors) == (0, "")
        assert [line.split(":")[0] for line in lines] == [
            str(run / f"step_0000000{step}") for step in (2, 1)
        ]
        assert call(capsys, "inspect", folder)[1][0] == "step 2, written by 1 rank"
    os.truncate(largest(run / "step_00000002"), 100)
    code, lines, errors = call(capsys, "verify", run)
    assert code == 1 and len(lines) == 1 and "step_00000001: step 1" in lines[0]
    assert "step_00000002: " in errors and "has 100 bytes, not" in errors


def test_a_run_whose_checkpoints_are_all_set_aside_has_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "checkpoints" / "step_00000002.bad").mkdir(parents=True)
    for command in ("verify", "inspect"):
        code, _, errors = call(capsys, command, tmp_path)
        assert code == 1 and errors.endswith(
            "no complete checkpoint here: `list` shows what is set aside"
        )


@pytest.mark.dist
def test_inspect(run: Path, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: F811
    code, lines, errors = call(capsys, "inspect", run / "step_00000002")
    assert (code, errors) == (0, "")
    assert lines[0] == "step 2, written by 1 rank" and "  model.layers=2" in lines
    actual = {line.split()[0]: line.split(maxsplit=2)[1:] for line in lines if "[" in line}
    assert actual["embedding.word_embeddings.weight"] == ["bfloat16", "[64, 32]"]
    assert actual["optimizer.state.exp_avg.embedding.word_embeddings.weight"][0] == "float32"


@pytest.mark.dist
@pytest.mark.parametrize("command", ["verify", "inspect"])
def test_a_pickle_is_refused_and_not_run(
    run: Path,  # noqa: F811
    tmp_path: Path,
    command: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Harm:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.mkdir, (str(tmp_path / "harmed"),)

    (run / "step_00000002/.metadata").write_bytes(pickle.dumps(Harm()))
    reseal(run / "step_00000002")
    code, lines, errors = call(capsys, command, run / "step_00000002")
    assert (code, lines) == (1, []) and "asks for posix.mkdir: refused" in errors
    assert not (tmp_path / "harmed").exists()


@pytest.mark.dist
@pytest.mark.parametrize("command", ["list", "verify", "inspect"])
def test_mistakes_are_told_in_one_line(
    run: Path,  # noqa: F811
    tmp_path: Path,
    command: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "empty").mkdir()
    for folder in (tmp_path / "none", tmp_path / "empty"):
        code, lines, errors = call(capsys, command, folder)
        assert (code, lines, len(errors.splitlines())) == (1, [], 1) and str(folder) in errors


@pytest.mark.dist
def test_as_a_person_calls_it(run: Path) -> None:  # noqa: F811
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    command = [sys.executable, str(SCRIPT), "verify", str(run / "step_00000002")]
    finished = subprocess.run(command, cwd="/", env=environment, capture_output=True, text=True)
    assert finished.returncode == 0 and finished.stdout.endswith("sound\n"), finished.stderr
    with pytest.raises(SystemExit) as left:
        checkpoint.main(["verify"])
    assert left.value.code == 2
