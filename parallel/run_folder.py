"""A run folder for all ranks: one run at a time in it, and the same folder on every host.

Rank 0 has the lock, its guard keeps it.
"""

import os
import secrets
import socket
import time
from collections.abc import Callable
from pathlib import Path

from phalanx.parallel.fault.agreement import Failed, agree, on_main
from phalanx.parallel.fault.guard import Guard
from phalanx.parallel.folder_lock import NAME, Claim, FolderLock, InUse


def lock(folder: Path, guard: Guard, say: Callable[[str], None]) -> FolderLock:
    """Lock a run folder, which is created, until this process ends, however it does; collective.

    `say` tells the user a line, on rank 0. Raises ValueError if a run that lives has it, or it
    cannot be written.
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


def check_shared(folder: Path) -> None:
    """See on every host what rank 0 writes to a run folder, which is there; collective.

    Raises ValueError if the folder of this name is another one on a host.
    """

    def write() -> tuple[str, str]:
        path = folder / f"shared.{secrets.token_hex(8)}"  # a name that no host has looked up before
        path.touch()
        return path.name, socket.gethostname()

    try:
        name, main = on_main(write)
    except Failed as error:
        raise ValueError(f"cannot write to {folder} (run.dir): {error}") from None
    path, until, problem = folder / name, time.monotonic() + _SEEN, None
    if os.environ.get("LOCAL_RANK", "0") == "0":
        while not (seen := path.exists()) and time.monotonic() < until:
            time.sleep(0.1)
        if not seen:
            problem = (
                f"{folder.absolute()} on {socket.gethostname()} is not the folder that rank 0 has "
                f"on {main}: give a run.dir that all hosts share, or keep checkpoints in an object "
                "store with run.checkpoints"
            )
    try:
        agree(problem)
    except Failed as failed:
        raise ValueError(str(failed)) from None
    finally:
        on_main(lambda: path.unlink(missing_ok=True))


_SEEN = 5.0  # seconds in which a file system shows a new file to other hosts
