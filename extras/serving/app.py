"""The HTTP side: OpenAI's endpoints over `Engine`, and one page."""

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from phalanx.extras.serving.engine import Engine, Facts, Job, Part
from phalanx.extras.serving.own_host import guards
from phalanx.extras.serving.replies import Reply
from phalanx.extras.serving.requests import BadRequest, Wanted, error_body, parsed

_MOST_BYTES = 16 << 20  # of a request
_PAGE = Path(__file__).with_name("page.html")
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; connect-src 'self'; script-src 'unsafe-inline';"
    " style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
}


def app(engine: Engine, host: str) -> Starlette:
    """The server of an engine, which it closes at its end; `guards` refuses some clients."""
    api = _Api(engine)
    routes = [
        Route("/", api.page),
        Route("/v1/models", api.models),
        Route("/v1/models/{name}", api.model),
        Route("/v1/completions", api.completions, methods=["POST"]),
        Route("/v1/chat/completions", api.chat, methods=["POST"]),
        Route("/reload", api.reload, methods=["POST"]),
    ]

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(engine.close)

    return Starlette(
        routes=routes,
        middleware=guards(host),
        exception_handlers={BadRequest: _refused, HTTPException: _missing, Exception: _failed},
        lifespan=lifespan,
    )


async def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, BadRequest)
    return JSONResponse(_body(error), error.status)


async def _missing(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    return JSONResponse(error_body(message), error.status_code, error.headers)


async def _failed(_: Request, error: Exception) -> Response:
    return JSONResponse(_body(error), 500)


def _body(error: Exception) -> dict[str, Any]:
    if isinstance(error, BadRequest):
        return error_body(str(error), error.param, error.code, error.status)
    return error_body(str(error) or type(error).__name__, status=500)


class _Api:
    def __init__(self, engine: Engine) -> None:
        self._engine, self._started = engine, int(time.time())

    async def page(self, _: Request) -> Response:
        return HTMLResponse(_PAGE.read_text(), headers=_HEADERS)

    async def models(self, _: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._described(self._engine.facts)]})

    async def model(self, request: Request) -> Response:
        name, facts = request.path_params["name"], self._engine.facts
        if name != facts.name:
            missing = f"the model {name!r} does not exist; this server has {facts.name!r}"
            raise BadRequest(missing, "model", "model_not_found", 404)
        return JSONResponse(self._described(facts))

    def _described(self, facts: Facts) -> dict[str, Any]:
        own = {"id": facts.name, "object": "model", "created": self._started, "owned_by": "phalanx"}
        return own | asdict(facts)

    async def reload(self, request: Request) -> Response:
        _demand_json(request)
        before = self._engine.facts.step
        facts = await asyncio.wrap_future(self._engine.reload())
        return JSONResponse(self._described(facts) | {"before": before})

    async def completions(self, request: Request) -> Response:
        return await self._generated(request, chat=False)

    async def chat(self, request: Request) -> Response:
        return await self._generated(request, chat=True)

    async def _generated(self, request: Request, *, chat: bool) -> Response:
        _demand_json(request)
        wanted = parsed(await _read(request), chat=chat, model=self._engine.facts.name)
        reply = Reply(
            f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}",
            self._engine.facts.name,
            int(time.time()),
            wanted,
        )
        job, parts = self._submitted(wanted)
        if wanted.stream:
            first = await anext(parts)  # a mistake is a response of its own
            events = _events(reply, job, first, parts)
            return StreamingResponse(events, media_type="text/event-stream", headers=_HEADERS)
        reading = asyncio.create_task(_collect(parts))
        watching = asyncio.create_task(_gone(request))
        try:
            await asyncio.wait({reading, watching}, return_when=asyncio.FIRST_COMPLETED)
            if not reading.done():
                raise ClientDisconnect
            return JSONResponse(reply.whole(reading.result(), job.prompt_tokens, job.tokens))
        finally:
            job.cancelled.set()
            reading.cancel()
            watching.cancel()

    def _submitted(self, wanted: Wanted) -> tuple[Job, AsyncIterator[Part]]:
        """A job, and its parts as the model's thread makes them."""
        loop, queue = asyncio.get_running_loop(), asyncio.Queue[Part | Exception | None]()

        def put(part: Part | Exception | None) -> None:
            with suppress(RuntimeError):  # the server has ended
                loop.call_soon_threadsafe(queue.put_nowait, part)

        job = Job(wanted, put)
        self._engine.submit(job)

        async def parts() -> AsyncIterator[Part]:
            try:
                while (part := await queue.get()) is not None:
                    if isinstance(part, Exception):
                        raise part
                    yield part
            finally:
                job.cancelled.set()

        return job, parts()


async def _collect(parts: AsyncIterator[Part]) -> list[Part]:
    return [part async for part in parts]


async def _gone(request: Request) -> None:
    """Return when the client has left."""
    while not await request.is_disconnected():
        await asyncio.sleep(0.5)


async def _events(
    reply: Reply, job: Job, first: Part, parts: AsyncIterator[Part]
) -> AsyncIterator[str]:
    """Server-sent events of a stream."""
    try:
        for opening in reply.opening():
            yield _event(opening)
        if (chunk := reply.chunk(first)) is not None:
            yield _event(chunk)
        async for part in parts:
            if (chunk := reply.chunk(part)) is not None:
                yield _event(chunk)
        if reply.wanted.usage:
            yield _event(reply.usage_chunk(job.prompt_tokens, job.tokens))
    except Exception as error:  # the status is sent already
        yield _event(_body(error))
    finally:
        job.cancelled.set()
    yield "data: [DONE]\n\n"


def _event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n"


def _demand_json(request: Request) -> None:
    """Refuse other types, which web pages of other sites may send without being asked."""
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        raise BadRequest("the body needs Content-Type: application/json", status=415)


async def _read(request: Request) -> bytes:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > _MOST_BYTES:
            raise BadRequest(f"the body has more than {_MOST_BYTES >> 20} MiB", status=413)
    return bytes(body)
