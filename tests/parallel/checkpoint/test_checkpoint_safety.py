"""Checkpoints from elsewhere: their checksums are right, and no code from them is ever run."""

import io
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from tests.parallel.checkpoint.checkpoints import build, checkpointer, find_newest, load, reseal
from tests.support.distributed import run_distributed


class Harm:
    """Unpickled, it leaves a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = str(mark)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.mark,)


@pytest.fixture
def harm(tmp_path: Path) -> Harm:
    mark = tmp_path / "harmed"
    pickle.loads(pickle.dumps(Harm(mark)))
    assert mark.exists()  # so this is what loading it without restraint would do
    mark.rmdir()
    return Harm(mark)


def redescribe(folder: Path, change: Callable[[Metadata], object]) -> None:
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))


def replace(folder: Path, key: str, value: Any, method: int = zipfile.ZIP_STORED) -> str:
    """Let a pickle take the place of a plain object or tensor; the file that it is in."""
    shard = folder / "__0_0.distcp"
    data, written = io.BytesIO(), io.BytesIO()
    torch.save(value, written)
    with zipfile.ZipFile(written) as archive, zipfile.ZipFile(data, "w", method) as copy:
        for name in archive.namelist():
            copy.writestr(name, archive.read(name))

    def point(metadata: Metadata) -> None:
        place = metadata.storage_data[next(i for i in metadata.storage_data if i.fqn == key)]
        place.offset, place.length = shard.stat().st_size, len(data.getvalue())

    redescribe(folder, point)
    with shard.open("ab") as file:
        file.write(data.getvalue())
    reseal(folder)
    return shard.name


def described_by_code(folder: Path, harm: Harm) -> str:
    (folder / ".metadata").write_bytes(pickle.dumps(harm))
    return ".metadata asks for posix.mkdir"


def code_among_descriptions(folder: Path, harm: Harm) -> str:
    redescribe(folder, lambda metadata: setattr(metadata, "planner_data", [harm]))
    return ".metadata asks for posix.mkdir"


def eval_of_text(folder: Path, harm: Harm) -> str:
    (folder / ".metadata").write_bytes(f"cbuiltins\neval\n(Vopen({harm.mark!r}, 'w')\ntR.".encode())
    return ".metadata asks for builtins.eval"


def path_through_a_module(folder: Path, harm: Harm) -> str:
    (folder / ".metadata").write_bytes(b"\x80\x04\x8c\x05torch\x8c\x0eSize.__class__\x93(tR.")
    return ".metadata asks for torch.Size.__class__"


def no_description(folder: Path, harm: Harm) -> str:
    (folder / ".metadata").write_bytes(pickle.dumps({"state_dict_metadata": {}}))
    return ".metadata describes no checkpoint"


def garbage(folder: Path, harm: Harm) -> str:
    (folder / ".metadata").write_bytes(b"\x80\x04garbage")
    return ".metadata is not readable"


def tensors_in_another_folder(folder: Path, harm: Harm) -> str:
    def escape(metadata: Metadata) -> None:
        next(iter(metadata.storage_data.values())).relative_path = "../step_00000001/__0_0.distcp"

    redescribe(folder, escape)
    return "'../step_00000001/__0_0.distcp', which is no file of this checkpoint"


def older_common_file(folder: Path, harm: Harm) -> str:
    torch.save(harm, folder / "common.pt")
    record_without = {p.name for p in folder.iterdir()} - {"common.pt", "COMMIT.json"}
    from phalanx.parallel.checkpoint import commit

    files = {name: commit.checksum(folder / name) for name in record_without}
    reseal(folder, files=files)
    return "common.pt is no file of a checkpoint"


def listed_common_file(folder: Path, harm: Harm) -> str:
    torch.save(harm, folder / "common.pt")
    reseal(folder)
    return "COMMIT.json names 'common.pt'"


def configuration_as_code(folder: Path, harm: Harm) -> str:
    return (
        f"{replace(folder, 'common_state/shard_0_1', [harm])}: common_state/shard_0_1 is not plain"
    )


def far_place(folder: Path, harm: Harm) -> str:
    """Python would make a table of 64 GiB."""
    (folder / ".metadata").write_bytes(b"\x80\x02Nr\xff\xff\xff\xff.")
    return ".metadata is not readable (ValueError)"


def compressed_configuration(folder: Path, harm: Harm) -> str:
    key, value = "common_state/shard_0_1", [{"common": {"x": torch.zeros(16 << 20)}}]
    shard = replace(folder, key, value, zipfile.ZIP_DEFLATED)
    assert (folder / shard).stat().st_size < 1 << 20
    return f"{shard}: {key} is not plain data (ValueError: "


def shard_is_a_link(folder: Path, harm: Harm) -> str:
    shard = folder / "__0_0.distcp"
    shard.rename(folder.parent / "elsewhere")
    shard.symlink_to("../elsewhere")
    return "__0_0.distcp is a link"


SEALED = [described_by_code, code_among_descriptions, eval_of_text, path_through_a_module]
SEALED += [no_description, garbage, tensors_in_another_folder, far_place]


@pytest.mark.dist
@pytest.mark.parametrize(
    "attack",
    [
        *SEALED,
        older_common_file,
        listed_common_file,
        configuration_as_code,
        compressed_configuration,
        shard_is_a_link,
    ],
)
def test_refused_by_name_and_not_run(run: Path, harm: Harm, attack: Any) -> None:
    told = attack(run / "step_00000002", harm)
    if attack in SEALED:
        reseal(run / "step_00000002")
    ((name, lines),) = run_distributed(find_newest, 1, run)
    assert not Path(harm.mark).exists()
    assert name == "step_00000001" and len(lines) == 1 and told in lines[0]


def _refusal(path: Path, folder: Path) -> str:
    from phalanx.parallel.checkpoint.checkpointer import NoUsableCheckpoint

    engine, groups = build()
    with pytest.raises(NoUsableCheckpoint) as caught:
        load(checkpointer(folder, groups), path, engine)
    return str(caught.value)


@pytest.mark.dist
@pytest.mark.parametrize(
    "key", ["rng/shard_0_1", "embedding.word_embeddings.weight", "common_state/shard_0_1"]
)
def test_what_takes_the_place_of_data_is_not_run(
    run: Path, tmp_path: Path, harm: Harm, key: str
) -> None:
    """Random states and tensors are only read when they are needed."""
    path = run / "step_00000002"
    replace(path, key, [harm])
    (told,) = run_distributed(_refusal, 1, path, tmp_path / "other")
    assert not Path(harm.mark).exists()
    assert str(path) in told and "posix.mkdir" in told and "\n" not in told


def test_the_reader_of_descriptions_knows_every_data_type(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import TensorProperties, TensorStorageMetadata

    from phalanx.parallel.checkpoint.safe_pickle import read_metadata

    dtypes = {str(v): v for v in vars(torch).values() if isinstance(v, torch.dtype)}
    held = {
        name: TensorStorageMetadata(TensorProperties(dtype), torch.Size([2]), [])
        for name, dtype in dtypes.items()
    }
    places = {MetadataIndex(name, [0], 0): _StorageInfo("__0_0.distcp", 0, 2) for name in held}
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Metadata(held, storage_data=places)))
    found = read_metadata(tmp_path, {"__0_0.distcp"})
    assert found.state_dict_metadata == held and len(held) > 20
