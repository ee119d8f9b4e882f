"""A server on this machine for its own user: packages, the socket, the loop.

extras/watching uses it too.
"""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from starlette.applications import Starlette

_LEAVING = 3  # seconds for responses that are under way when the server ends


@contextmanager
def needing_packages() -> Iterator[None]:
    """Around imports: without Starlette or Uvicorn a ValueError says what installs them."""
    try:
        import uvicorn  # noqa: F401

        yield
    except ModuleNotFoundError as missing:
        if (missing.name or "").partition(".")[0] not in ("starlette", "uvicorn"):
            raise
        needed = f"this needs the package {missing.name}: pip install 'phalanx-moe[serve]'"
        raise ValueError(needed) from None


@contextmanager
def listening(host: str, port: int) -> Iterator[tuple[socket.socket, str]]:
    """A socket and its address, before work of minutes; ValueError names what is not to be had."""
    if not 0 <= port < 1 << 16:
        raise ValueError(f"--port {port}: must be a number from 0 to 65535")
    if not host:  # which would be all addresses, as of a variable that is not set
        raise ValueError("--host is empty: leave it out, or give 0.0.0.0 to open the network")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError as error:
            reason = error.strerror or error
            raise ValueError(f"cannot listen on {host}:{port}: {reason}; choose a --port") from None
        named = f"[{host}]" if ":" in host else host
        yield listener, f"http://{named}:{listener.getsockname()[1]}"


def run(app: "Starlette", listener: socket.socket) -> None:
    """Serve until SIGINT or SIGTERM."""
    import uvicorn

    config = uvicorn.Config(
        app, log_level="warning", access_log=False, timeout_graceful_shutdown=_LEAVING
    )
    uvicorn.Server(config).run(sockets=[listener])
