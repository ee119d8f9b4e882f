"""The model of a server: one thread, which requests wait for."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from phalanx.configs.knobs import pluralize
from phalanx.extras.serving.requests import BadRequest, Wanted
from phalanx.moe.data.host_cache import DataError
from phalanx.moe.data.tokenizer.codec import Codec
from phalanx.moe.inference.chat import Chat
from phalanx.moe.inference.command import NO_TEMPLATE
from phalanx.moe.inference.text import started
from phalanx.parallel.checkpoint.commit import Invalid
from phalanx.parallel.checkpoint.saved_config import CheckpointError
from phalanx.parallel.object_store import Place

if TYPE_CHECKING:
    from phalanx.moe.inference.predictor import Predictor


MISTAKES = (ValueError, OSError, CheckpointError, Invalid)
"""Errors that are told in one line."""


@dataclass(frozen=True)
class Model:
    """A loaded checkpoint."""

    predictor: "Predictor"
    codec: Codec
    chat: Chat | None
    context: int  # most tokens that the model sees


@dataclass(frozen=True)
class Facts:
    """Facts about the loaded model, for clients."""

    name: str  # of the run, or of the folder of a single checkpoint
    step: int
    path: str
    context: int
    chat: bool  # there is a chat template


@dataclass(frozen=True)
class Token:
    """A token of a text."""

    text: str  # of it alone
    logprob: float  # natural logarithm of its probability at temperature 1
    top: tuple[tuple[str, float], ...]  # the most likely tokens, with theirs


@dataclass(frozen=True)
class Part:
    """The part of a text that one step adds."""

    choice: int
    text: str  # empty where more tokens decide
    token: Token | None  # None for the end of a document, or if none are asked for
    finish: str | None


@dataclass
class Job:
    """A request that is computed."""

    wanted: Wanted
    put: Callable[[Part | Exception | None], object]
    """Called by the model's thread with each part, then with None; or with an error."""
    cancelled: threading.Event = field(default_factory=threading.Event)
    prompt_tokens: int = 0
    tokens: int = 0


class Engine:
    """Text of a checkpoint, and of newer ones.

    All of torch happens in one thread, also when the server's own thread is at other requests.

    Args:
        newest: where the newest checkpoint is; errors are those of `report_errors`.
        opened: the model of a checkpoint, until it is closed.
        most: largest number of texts of a request.
    """

    def __init__(
        self,
        newest: Callable[[], Place],
        opened: Callable[[Place], AbstractContextManager[Model]],
        most: int,
    ) -> None:
        self._newest, self._opened, self._most = newest, opened, most
        self._thread = ThreadPoolExecutor(1, "model")
        self._stack = ExitStack()
        self._model: Model | None = None
        self._closing = threading.Event()
        self.facts: Facts = self._thread.submit(self._open, newest()).result()

    def submit(self, job: Job) -> Future[None]:
        """Compute a request when those before it are done."""
        return self._thread.submit(self._compute, job)

    def reload(self) -> Future[Facts]:
        """Load the newest checkpoint if it is another; the future has the model's facts.

        If it cannot be loaded, the model is that of before, and the future has the error.
        """
        return self._thread.submit(self._reload)

    def close(self) -> None:
        """End all requests, and free the model."""
        self._closing.set()
        self._thread.submit(self._stack.close).result()
        self._thread.shutdown()

    def _open(self, path: Place) -> Facts:
        model = self._stack.enter_context(self._opened(path))
        self._model, self._path = model, path
        run = path.parent.parent if path.parent.name == "checkpoints" else path
        self.facts = Facts(
            run.name, model.predictor.step, str(path), model.context, model.chat is not None
        )
        return self.facts

    def _reload(self) -> Facts:
        try:
            path, before = self._newest(), self._path
        except MISTAKES as error:
            raise BadRequest(str(error), status=500) from None
        if str(path) == str(before):
            return self.facts
        # Two models may not fit.
        self._model = None
        self._stack.close()
        try:
            return self._open(path)
        except Exception as error:
            self._stack.close()
            self._open(before)
            if isinstance(error, MISTAKES):
                raise BadRequest(str(error), status=500) from None
            raise

    def _compute(self, job: Job) -> None:
        try:
            for part in self._parts(job):
                job.put(part)
                if job.cancelled.is_set() or self._closing.is_set():
                    break
            job.put(None)
        except BadRequest as error:
            job.put(error)
        except DataError as error:
            job.put(BadRequest(str(error)))
        except MISTAKES as error:
            job.put(BadRequest(str(error), status=500))
        except Exception as error:  # whatever torch or a tokenizer raise: the server goes on
            job.put(error)

    def _parts(self, job: Job) -> Iterator[Part]:
        from phalanx.moe.inference.generation import Batch, texts
        from phalanx.moe.inference.sampling import Sampler

        if self._model is None:
            raise BadRequest("no model is loaded: restart the server", status=503)
        model, wanted = self._model, job.wanted
        if (asked := max(1, len(wanted.prompts)) * wanted.choices) > self._most:
            raise BadRequest(
                f"these are {asked} texts at a time; --batch {self._most} of the server is the most"
            )
        prompts = [ids for ids in self._prompts(model, wanted) for _ in range(wanted.choices)]
        job.prompt_tokens = sum(map(len, prompts)) // wanted.choices
        longest = max(map(len, prompts))
        if longest >= model.context:
            raise BadRequest(
                f"the prompt has {pluralize(longest, 'token')}, the context {model.context}, which "
                "leaves none to generate",
                "messages" if wanted.chat else "prompt",
                "context_length_exceeded",
            )
        room = model.context - longest
        samplers = [
            Sampler(wanted.temperature, wanted.top_p, (wanted.seed + n) % (1 << 63), wanted.top_k)
            for n in range(len(prompts))
        ]
        batch = Batch(
            model.predictor,
            prompts,
            samplers,
            min(wanted.count or room, room),
            context=model.context,
            ends=model.codec.ends,
        )
        for piece in texts(batch, model.codec, prompts, wanted.stops):
            new, token = piece.new, None
            job.tokens += not new.ends
            if wanted.logprobs is not None and not new.ends:
                token = _token(model.codec, new.token, new.logits_V, wanted.logprobs)
            yield Part(new.row, piece.text, token, piece.finish)

    def _prompts(self, model: Model, wanted: Wanted) -> list[list[int]]:
        codec, vocabulary = model.codec, model.predictor.cfg.model.vocab_size
        if wanted.chat:
            if model.chat is None:
                raise BadRequest(NO_TEMPLATE, "messages")
            return [codec.encode(model.chat.text(wanted.messages))]
        alone, found = model.predictor.cfg.data.document_mask, []
        for prompt in wanted.prompts:
            if isinstance(prompt, str):
                try:
                    found.append(started(codec, prompt, alone=alone))
                except DataError:
                    raise
                except ValueError:
                    nothing = "prompt is empty, and no token is known that begins a document"
                    raise BadRequest(nothing, "prompt") from None
                continue
            if outside := [i for i in prompt if not 0 <= i < vocabulary]:
                reason = f"prompt has token id {outside[0]}, outside the vocabulary of {vocabulary}"
                raise BadRequest(reason, "prompt")
            found.append(list(prompt))
        return found


def _token(codec: Codec, token: int, logits_V: Any, count: int) -> Token:
    logprob_V = logits_V.double().log_softmax(-1)
    best, ids = logprob_V.topk(min(count, len(logprob_V)))
    top = zip(ids.tolist(), best.tolist(), strict=True)
    return Token(
        _spelled(codec, token),
        float(logprob_V[token]),
        tuple((_spelled(codec, i), value) for i, value in top),
    )


def _spelled(codec: Codec, token: int) -> str:
    """The text of a token alone; of bytes that are no character, as OpenAI spells them."""
    text = codec.decode([token])
    if "\ufffd" not in text:
        return text
    if codec.tokenizer is None:
        return f"bytes:\\x{token:02x}"
    return codec.tokenizer.id_to_token(token) or text
