"""Target of a save: a folder that all ranks share, or an object store by way of a local one."""

import shutil
from pathlib import Path

import torch.distributed as dist

from phalanx.parallel.checkpoint import commit, remote
from phalanx.parallel.checkpoint.commit import Commit, Sums
from phalanx.parallel.object_store import Remote


class Folder:
    """Ranks write to `step_N.tmp`, which a rename makes `step_N`."""

    knob = "run.dir"
    way_out = "free space, or set run.dir"

    def __init__(self, root: Path) -> None:
        self._root = root

    def probe(self) -> None:
        commit.probe(self._root)

    def check(self) -> None: ...

    def open(self, final: Path) -> str | None:
        """Make the folder that ranks write to; why that failed on this rank."""
        return _made(self.unfinished(final)) if dist.get_rank() == 0 else None

    def unfinished(self, final: Path) -> Path:
        return commit.unfinished(final)

    def uploads_to(self, final: Path) -> None:
        return None

    def commit(self, final: Path, sums: Sums, step: int, world: int) -> None:
        """Give the checkpoint its name, on rank 0. Raises OSError."""
        folder = self.unfinished(final)
        names = sorted(path.name for path in folder.iterdir())
        if lost := sorted(set(sums) - set(names)):
            raise OSError(f"rank 0 does not see {lost[0]}: all hosts have to share run.dir")
        files = {name: sums.get(name) or commit.checksum(folder / name) for name in names}
        commit.commit(folder, final, Commit(step, world, files))

    def drop(self, final: Path) -> None:
        if dist.get_rank() == 0:
            commit.remove([self.unfinished(final)])

    def clear(self) -> None: ...


class Store:
    """Ranks write to a folder each, and upload. `staging` need not be shared by hosts."""

    knob = "run.checkpoints"
    way_out = "see to the store or free space in run.dir, or set run.checkpoints"

    def __init__(self, root: Remote, staging: Path | None) -> None:
        assert staging is not None
        self._root, self._mine = root, staging / f"rank_{dist.get_rank():05d}"
        self._claim: remote.Claim | None = None  # on rank 0

    def probe(self) -> None:
        remote.probe(self._root)

    def check(self) -> None:
        """Take the prefix for this launch, or raise Taken if another one has it; on rank 0.

        The first call is behind all checks: a launch that is refused takes it from nobody.
        """
        if self._claim is None:
            self._claim = remote.Claim(self._root)
        else:
            self._claim.check()

    def open(self, final: Remote) -> str | None:
        self.clear()
        return _made(self.unfinished(final))

    def unfinished(self, final: Remote) -> Path:
        return self._mine / final.name

    def uploads_to(self, final: Remote) -> Remote:
        return final

    def commit(self, final: Remote, sums: Sums, step: int, world: int) -> None:
        """Upload what is no shard and put COMMIT.json, on rank 0. Raises OSError."""
        folder = self.unfinished(final)
        rest = {p.name: commit.checksum(p) for p in folder.iterdir() if p.name not in sums}
        remote.complete(folder, final, Commit(step, world, sums | rest))

    def drop(self, final: Remote) -> None:
        if dist.get_rank() == 0:
            commit.remove([final])
        self.clear()

    def clear(self) -> None:
        """Delete this rank's local files, which are of no use once they are uploaded."""
        shutil.rmtree(self._mine, ignore_errors=True)


def _made(folder: Path) -> str | None:
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        return str(error)
    return None
