"""The configuration of a checkpoint, read without torch and without running what is in it."""

import io
import json
import os
import pickle
import subprocess
import sys
import tracemalloc
import zipfile
from pathlib import Path

import pytest

from phalanx.parallel.checkpoint import commit, safe_pickle, saved_config
from phalanx.parallel.checkpoint.commit import Commit, Invalid
from phalanx.parallel.checkpoint.saved_config import NoUsableCheckpoint
from tests.support.runs import TINY, run

ROOT = Path(__file__).resolve().parents[3]
COMMAND = [*TINY, "data=synthetic"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    ranks = run(2, [*COMMAND, "run.steps=1", f"run.dir={folder}"])
    assert [rank.code for rank in ranks] == [0, 0]
    return folder / "run/checkpoints/step_00000001"


@pytest.mark.dist
def test_it_is_what_loading_finds(checkpoint: Path) -> None:
    files = commit.read_commit(checkpoint).files
    common = safe_pickle.read_common(checkpoint, safe_pickle.read_metadata(checkpoint, files))
    assert saved_config.configuration(checkpoint).config == common["common"]["config"]
    assert saved_config.configuration(checkpoint).config["model"]["moe"]["ffn"] == 16
    assert (
        saved_config.newest(checkpoint.parent) == checkpoint
        and saved_config.lacking(checkpoint) == ""
    )


@pytest.mark.dist
@pytest.mark.extras
def test_a_check_compares_it_without_torch(checkpoint: Path) -> None:
    where = f"run.dir={checkpoint.parents[2]}"
    program = (
        "import sys, train\n"
        "for more in ('run.steps=2', 'model.moe.ffn=24', 'precision=fp32', 'data.seed=5',\n"
        "             'optim.kind=muon'):\n"
        f"    print(train.main([*{[*COMMAND, where]!r}, more, '--check']))\n"
        "print('torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.split() == ["0", "2", "2", "2", "2", "False"], done.stderr
    for fix in ("model.moe.ffn=16", "precision.recipe=bf16", "data.seed=1234", "optim.kind=adamw"):
        assert f"go on with {fix},\n" in done.stderr


@pytest.mark.dist
def test_the_newest_that_is_whole_counts(checkpoint: Path, tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    assert saved_config.newest(root) is None
    (root / "step_00000003").mkdir(parents=True)
    with pytest.raises(
        NoUsableCheckpoint, match=r"\(step_00000003\): run.start_over=.* run.resume=never sets"
    ):
        saved_config.newest(root)
    (root / "step_00000001").symlink_to(checkpoint)
    assert saved_config.newest(root) == root / "step_00000001"
    shard = next(checkpoint.glob("*.distcp"))
    os.truncate(shard, shard.stat().st_size - 1)
    assert f"{shard.name} has " in saved_config.lacking(checkpoint)


class _Runs:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("touch RAN",)


def crafted(folder: Path, *, describe: object, plain: object) -> Path:
    """A checkpoint folder with pickles of another kind, correctly committed."""
    folder.mkdir(parents=True)
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(plain))
    (folder / "__0_0.distcp").write_bytes(data.getvalue())
    (folder / ".metadata").write_bytes(pickle.dumps(describe))
    (folder / "metadata.json").write_text(json.dumps({}))
    names = ("__0_0.distcp", ".metadata", "metadata.json")
    files = {name: commit.checksum(folder / name) for name in names}
    final = folder.with_name("step_00000001")
    commit.commit(folder, final, Commit(1, 1, files))
    return final


class _Described:
    """Has the attributes that a description of a checkpoint has."""

    def __init__(self, **attributes: object) -> None:
        vars(self).update(attributes)


def described(path: str = "__0_0.distcp", length: object = 1 << 40) -> _Described:
    index = _Described(fqn="common_state/shard_0_1")
    place = _Described(relative_path=path, offset=0, length=length)
    return _Described(storage_data={index: place}, state_dict_metadata={})


@pytest.mark.parametrize(
    ("describe", "plain", "problem"),
    [
        (_Runs(), [], "metadata is not readable"),
        (described(), _Runs(), "not readable"),
        (described(), [{"common": _Runs()}], "not readable"),
        (described(), [], "no configuration"),
        (described(), [{"common": {"config": 3}}], "no configuration"),
        (described("../../etc/passwd"), [], "not of this checkpoint"),
        (described(length="x"), [], "not of this checkpoint"),
        ({"storage_data": 1}, [], "metadata is not readable"),
    ],
)
def test_nothing_in_it_is_run(
    describe: object, plain: object, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = crafted(tmp_path / "new", describe=describe, plain=plain)
    with pytest.raises(Invalid, match=problem):
        saved_config.configuration(folder)
    assert not (tmp_path / "RAN").exists()


def test_none_takes_more_memory_than_it_has_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plain data that is compressed, a table of 2**32 places, and more plain data than any."""
    compressed = crafted(tmp_path / "a/new", describe=described(), plain=[])
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(bytes(64 << 20)))
    (compressed / "__0_0.distcp").write_bytes(data.getvalue())
    sealed(compressed)
    tracemalloc.start()
    with pytest.raises(Invalid, match=r"its plain data is not readable \(ValueError\)"):
        saved_config.configuration(compressed)
    assert tracemalloc.get_traced_memory()[1] < 8 << 20
    tracemalloc.stop()

    places = crafted(tmp_path / "b/new", describe=described(), plain=[])
    (places / ".metadata").write_bytes(b"\x80\x02Nr\xff\xff\xff\xff.")
    sealed(places)
    with pytest.raises(Invalid, match="metadata is not readable"):
        saved_config.configuration(places)

    sparse = crafted(tmp_path / "c/new", describe=described(), plain=[])
    os.truncate(sparse / "__0_0.distcp", commit.LARGEST + 1)  # no block on the disk
    sealed(sparse)
    with pytest.raises(Invalid, match="its plain data is larger than any"):
        saved_config.configuration(sparse)
    monkeypatch.setitem(commit._LARGEST_OF, ".metadata", 10)
    with pytest.raises(Invalid, match="metadata is larger than any description"):
        saved_config.configuration(sparse)


def sealed(folder: Path) -> None:
    """Commit what is in a checkpoint folder."""
    names = ("__0_0.distcp", ".metadata", "metadata.json")
    files = {name: commit.checksum(folder / name) for name in names}
    (folder / "COMMIT.json").write_bytes(commit.with_checksum(Commit(1, 1, files)))


def test_a_crafted_one_of_plain_data_is_read(tmp_path: Path) -> None:
    plain = [{"common": {"config": {"model": {"layers": 2}}}}]
    folder = crafted(tmp_path / "new", describe=described(), plain=plain)
    assert saved_config.configuration(folder) == ({"model": {"layers": 2}}, 0, 0, {})


def test_a_hugging_face_folder_is_told_how_to_become_a_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from phalanx.configs.load import load
    from phalanx.moe.run.preflight import preflight
    from phalanx.scripts import checkpoint, convert_hf

    folder = tmp_path / "Qwen 3"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"")
    way = f"first python scripts/convert_hf.py import '{folder}' 'imported/Qwen 3'"
    cfg = load([*COMMAND, f"run.dir={tmp_path}/runs", f"run.resume='{folder}'"])
    (error,) = preflight(cfg).errors
    assert str(error) == f"run.resume={folder} is a Hugging Face folder: {way}"
    with pytest.raises(NoUsableCheckpoint, match="is a Hugging Face folder: first python"):
        saved_config.checkpoint_of(folder)
    assert convert_hf.main(["export", str(folder), str(tmp_path / "out")]) == 1
    assert capsys.readouterr().err.endswith(f"is a Hugging Face folder: {way}\n")
    assert checkpoint.main(["verify", str(folder)]) != 0
    assert way in capsys.readouterr().err
    (folder / "model.safetensors").unlink()
    assert "Hugging Face" not in str(preflight(cfg).errors[0])
