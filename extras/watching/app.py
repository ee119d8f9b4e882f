"""The HTTP side: a page, and what is new in runs."""

import asyncio
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from phalanx.extras.serving.own_host import guards
from phalanx.extras.serving.requests import error_body
from phalanx.extras.watching.runs import Runs

_HERE = Path(__file__).parent
_FILES = {
    "/": ("page.html", "text/html"),
    "/style.css": ("style.css", "text/css"),
    **{f"/{path.name}": (path.name, "text/javascript") for path in _HERE.glob("*.js")},
}
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; img-src data:; connect-src 'self';"
    " script-src 'self'; style-src 'self'; base-uri 'none'; form-action 'none';"
    " frame-ancestors 'none'",
}


def app(runs: Runs, host: str) -> Starlette:
    """The server of runs; `guards` refuses some clients.

    `/runs` lists them, and `/data?run=NAME` has the reply of `Run.look`. Its `have` is that of the
    last reply, joined by commas; `from` and `to` are steps.
    """

    async def listed(_: Request) -> Response:
        return _json({"runs": await asyncio.to_thread(runs.listed)})

    async def data(request: Request) -> Response:
        asked = request.query_params
        try:
            have, window = _have(asked.get("have")), (_step(asked, "from"), _step(asked, "to"))
        except ValueError as error:
            raise HTTPException(400, f"have, from or to: {error}") from None
        try:
            run = await asyncio.to_thread(runs.get, asked.get("run", ""))
        except KeyError as error:
            raise HTTPException(404, f"there is no run {error}") from None
        return _json(await asyncio.to_thread(run.look, have, window))

    return Starlette(
        routes=[
            *(Route(path, _file(*of)) for path, of in _FILES.items()),
            Route("/runs", listed),
            Route("/data", data),
        ],
        middleware=[*guards(host), Middleware(GZipMiddleware, compresslevel=4)],
        exception_handlers={HTTPException: _refused},
    )


def _file(name: str, kind: str) -> Any:
    async def answer(_: Request) -> Response:
        return Response((_HERE / name).read_bytes(), media_type=kind, headers=_HEADERS)

    return answer


def _json(content: dict[str, Any]) -> Response:
    return JSONResponse(content, headers=_HEADERS)


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JSONResponse(error_body(f"{request.url.path}: {error.detail}"), error.status_code)


def _have(text: str | None) -> tuple[str, int, int, int, int] | None:
    if not text:
        return None
    generation, *numbers = text.split(",")
    size, version, row, known = map(int, numbers)
    return generation, size, version, row, max(0, known)


def _step(asked: Any, name: str) -> int | None:
    return int(asked[name]) if asked.get(name) else None
