"""One run at a time in a run folder, for all ranks: rank 0 has the lock, its guard keeps it."""

import time
from collections.abc import Callable
from pathlib import Path

from phalanx.parallel.fault.agreement import Failed, on_main
from phalanx.parallel.fault.guard import Guard
from phalanx.parallel.folder_lock import NAME, Claim, FolderLock, InUse


def lock(folder: Path, guard: Guard, say: Callable[[str], None]) -> FolderLock:
    """Lock a run folder until this process ends, however it does; collective.

    Args:
        folder: created.
        guard: of this process.
        say: tells the user a line, on rank 0.

    Raises:
        ValueError: a run that lives has it, or it cannot be written.
    """
    path = folder.absolute() / NAME
    claims: list[Claim] = []  # on rank 0

    def step() -> tuple[bool, str]:
        """(had, why it cannot be had); short, as the other ranks wait in a collective."""
        if not claims:
            folder.mkdir(parents=True, exist_ok=True)
            claims.append(Claim(path, say))
        until = time.monotonic() + 0.5
        try:
            while not (had := claims[0].step()) and time.monotonic() < until:
                time.sleep(0.1)
        except InUse as error:
            return False, str(error)
        return had, ""

    had, why = False, ""
    while not had and not why:
        try:
            had, why = on_main(step)
        except Failed as error:
            raise ValueError(f"cannot write to {folder} (run.dir): {error}") from None
    if why:
        raise ValueError(why)
    token = claims[0].me.token if claims else ""
    if claims:
        guard.send({"do": "keep", "path": str(path), "token": token})
    return FolderLock(path, token)
