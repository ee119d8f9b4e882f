"""One run at a time in a run folder, on file systems that hosts share too.

The lock is a file with its owner: host, process, since when. It appears by link(2), which exists or
does not on NFS and Lustre as well. Its first line is a counter, which the owner's guard raises
every `BEAT` seconds. Whether an owner lives is known by its process on the same machine, otherwise
by that counter alone: clocks of other hosts are not compared, and contents are read through a new
open, which NFS does not answer from its cache.

A dead owner's lock is replaced by one rename, by the process that holds the right to: a lock of the
same kind with the dead owner's token in its name. So of many only one goes on.
"""

import errno
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

NAME = "lock"
BEAT = 2.0  # seconds between signs of life of an owner
DEAD = 20.0  # seconds without one after which an owner on another machine is taken to be dead
_COUNTER = 20  # digits in the first line


class InUse(ValueError):
    """Another run has the folder."""


class Taken(RuntimeError):
    """The lock was lost: this run must write nothing more."""


@dataclass(frozen=True)
class Owner:
    """A process that has or wants a lock."""

    host: str
    pid: int
    since: str
    token: str
    machine: str  # host, boot and process namespace: where `pid` means the same
    born: int  # start of the process in clock ticks since boot, which no other of its number has
    job: str = ""  # slurm job, with `restarts`: a requeued job has ended before
    restarts: int = 0

    def __str__(self) -> str:
        job = f", Slurm job {self.job}" if self.job else ""
        return f"host {self.host}, pid {self.pid}{job}, since {self.since}"

    def is_gone(self, me: "Owner") -> bool | None:
        """Return whether the process has ended; None if this host cannot know."""
        if self.machine == me.machine:
            ended = _born(self.pid) != self.born
            return ended or (self.pid, self.born) == (me.pid, me.born)  # a run before this one
        if self.job and self.job == me.job and self.restarts < me.restarts:
            return True
        return None


def here() -> Owner:
    """This process."""
    return Owner(
        host=socket.gethostname(),
        pid=os.getpid(),
        since=time.strftime("%Y-%m-%d %H:%M:%S %z"),
        token=secrets.token_hex(8),
        machine=" ".join(
            (socket.gethostname(), _text("/proc/sys/kernel/random/boot_id"), _space())
        ),
        born=_born(os.getpid()),
        job=os.environ.get("SLURM_JOB_ID", ""),
        restarts=int(os.environ.get("SLURM_RESTART_COUNT", "0")),
    )


class Claim:
    """An attempt to get a lock, in as many steps as it takes."""

    def __init__(self, path: Path, say: Callable[[str], None]) -> None:
        self._path, self._say, self.me = path, say, here()
        self._seen: bytes | None = None
        self._since = 0.0
        self._right: Claim | None = None

    def step(self) -> bool:
        """Try to take the lock and return whether that succeeded; if not, retry in a moment.

        Raises `InUse` if its owner lives, OSError if the folder cannot be written.
        """
        if _appears(self._path, self.me):
            return True
        seen = _read(self._path)
        if seen is None:  # given back a moment ago
            return False
        owner = _owner(seen)
        gone = owner.is_gone(self.me) if owner is not None else None
        if gone is None:
            gone = self._is_still(seen, owner)
        elif not gone:
            raise InUse(_refusal(self._path, owner))
        if gone:
            return self._replace(seen, owner)
        return False

    def _is_still(self, seen: bytes, owner: Owner | None) -> bool:
        now = time.monotonic()
        if self._seen is None or _owner(self._seen) != owner:
            self._since = now
            self._say(
                f"{self._path.parent} has the lock of another run ({owner or 'unreadable'}): "
                f"waiting up to {DEAD:.0f} s for a sign of its life"
            )
        elif seen != self._seen and owner is not None:
            raise InUse(_refusal(self._path, owner))
        elif seen != self._seen:  # being written
            self._since = now
        self._seen = seen
        return now - self._since >= DEAD

    def _replace(self, seen: bytes, owner: Owner | None) -> bool:
        """Take a dead owner's lock over, unless another process does."""
        token = owner.token if owner is not None else "unreadable"
        path = self._path.with_name(f"{self._path.name}.{token}")
        if self._right is None or self._right._path != path:
            self._right = Claim(path, self._say)
        try:
            if not self._right.step():
                return False
        except InUse:
            return False  # another one takes it over: next time it is the owner
        right, self._right = self._right, None
        try:
            if _read(self._path) != seen:
                return False
            temporary = _written(self._path, self.me)
            try:
                os.replace(temporary, self._path)
            finally:
                temporary.unlink(missing_ok=True)
            return True
        finally:
            right._path.unlink(missing_ok=True)


def look(path: Path) -> str:
    """See whether a run has a lock, without taking it; a line if that cannot be known for sure.

    Raises `InUse` if its owner lives, OSError if it cannot be read.
    """
    seen = _read(path)
    owner = _owner(seen) if seen is not None else None
    if owner is None or owner.is_gone(here()):
        return ""
    if owner.is_gone(here()) is False:
        raise InUse(_refusal(path, owner))
    until = time.monotonic() + 2.5 * BEAT
    while time.monotonic() < until:
        time.sleep(BEAT / 10)
        now = _read(path)
        if now is None:
            return ""
        if now != seen and (living := _owner(now)) is not None:  # it, or one that has followed it
            raise InUse(_refusal(path, living))
    return (
        f"{path.parent} has the lock of another run ({owner}), without a sign of its life for "
        f"{2.5 * BEAT:.0f} s: a launch takes it over after {DEAD:.0f} s"
    )


class FolderLock:
    """A lock that this run has had since `Claim.step`, seen from the run."""

    def __init__(self, path: Path, token: str) -> None:
        self.path, self.token = path, token
        self._looked = _clock()

    def check(self) -> None:
        """Raise `Taken` if the lock is another one's now; to be called before anything is written.

        Costs a look at the file every `BEAT` seconds.
        """
        if _clock() - self._looked < BEAT:
            return
        try:
            seen = _read(self.path)
        except OSError:
            return  # tells nothing; whoever writes will hear of it
        owner = _owner(seen) if seen is not None else None
        if owner is None or owner.token != self.token:
            other = f"the run on {owner} has taken it over" if owner else f"{self.path} is gone"
            raise Taken(
                f"this run has lost {self.path.parent}, where it writes nothing more: {other}"
            )
        self._looked = _clock()


class Keeper:
    """Renews a lock in a thread, for as long as it is the owner's with this `token`."""

    def __init__(self, path: Path, token: str) -> None:
        self._path, self._token, self._over = path, token, threading.Event()
        self._thread = threading.Thread(target=self._renew, name="run-folder-lock", daemon=True)
        self._thread.start()

    def _renew(self) -> None:
        with suppress(OSError):
            handle = os.open(self._path, os.O_RDWR)  # this file, whatever has its name later
            try:
                owner = _owner(os.read(handle, 1 << 16))
                beats = 0
                while owner is not None and owner.token == self._token:
                    if self._over.wait(BEAT):
                        return
                    beats += 1
                    os.pwrite(handle, b"%0*d" % (_COUNTER, beats), 0)
                    os.fsync(handle)
            finally:
                os.close(handle)

    def release(self) -> None:
        self._over.set()
        release(self._path, self._token)
        with suppress(OSError):
            self._path.parent.rmdir()  # a run that was refused leaves no empty folder


def release(path: Path, token: str) -> None:
    """Remove a lock if it is still the owner's with this token."""
    with suppress(OSError, InUse):
        right = Claim(path.with_name(f"{path.name}.{token}"), lambda _: None)
        if not right.step():
            return  # somebody takes it over
        try:
            owner = _owner(_read(path) or b"")
            if owner is not None and owner.token == token:
                path.unlink()
        finally:
            right._path.unlink(missing_ok=True)


def _appears(path: Path, me: Owner) -> bool:
    """Make the file, whole and at once, if it is not there."""
    temporary = _written(path, me)
    try:
        os.link(temporary, path)
        return True
    except FileExistsError:
        # NFS may have made the link and lost the answer.
        return temporary.stat().st_nlink == 2
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.EMLINK, errno.ENOSYS):
            raise
        return _created(path, temporary.read_bytes())  # a file system without links
    finally:
        temporary.unlink(missing_ok=True)


def _created(path: Path, contents: bytes) -> bool:
    """Make the file, at once but not whole at once, if it is not there."""
    try:
        with path.open("xb") as file:
            file.write(contents)
            return True
    except FileExistsError:
        return False


def _written(path: Path, me: Owner) -> Path:
    temporary = path.with_name(f"{path.name}.{me.token}.tmp")
    try:
        with temporary.open("wb") as file:
            data = json.dumps(asdict(me), indent=1).encode()
            file.write(b"%0*d\n" % (_COUNTER, 0) + data + b"\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError:  # of a full disk, which has room for the name
        temporary.unlink(missing_ok=True)
        raise
    return temporary


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()[: 1 << 16]
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ESTALE):  # the latter is NFS's: it was replaced
            return None
        raise


def _owner(contents: bytes) -> Owner | None:
    try:
        return Owner(**json.loads(contents[_COUNTER:]))
    except (ValueError, TypeError):
        return None


def _born(pid: int) -> int:
    status = _text(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return int(status[19]) if status and status[0] not in "ZX" else -1


def _space() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _refusal(path: Path, owner: Owner | None) -> str:
    return (
        f"{path.parent} is in use by a run that lives ({owner}): set another run.name, "
        "or end that run first; the lock of one that died is taken over by itself"
    )


def _text(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _clock() -> float:
    """Seconds, also of those in which the machine slept."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
