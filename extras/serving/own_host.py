"""Refusal of requests that name this machine by another name than its own."""

from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from phalanx.extras.serving.requests import error_body

LOOPBACK = ("127.0.0.1", "localhost", "::1")


def guards(host: str) -> list[Middleware]:
    """Middleware of a server that listens on `host`: other names are refused on a loopback.

    A web page of somebody's own name for this address could otherwise read what is served.
    """
    return [Middleware(_OwnHost)] if host in LOOPBACK else []


class _OwnHost:
    """Refuses requests to other names than this machine has for itself."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = self._app
        if scope["type"] == "http" and (name := Request(scope).url.hostname) not in LOOPBACK:
            why = f"the host {name!r} is none of {', '.join(LOOPBACK)}; --host 0.0.0.0 allows all"
            answer = JSONResponse(error_body(why), 400)
        await answer(scope, receive, send)
