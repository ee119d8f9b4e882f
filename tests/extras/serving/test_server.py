"""OpenAI's client, and plain HTTP, at a server of a tiny run."""

import json
import math
import shutil
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from phalanx.scripts import sample, serve
from tests.extras.serving.conftest import Server
from tests.support.tiny_runs import command, step_of

pytestmark = pytest.mark.dist


@pytest.fixture
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)


def complete(client: openai.OpenAI, prompt: Any = "def ", **more: Any) -> Any:
    return client.completions.create(
        model="one", prompt=prompt, **({"max_tokens": 8, "temperature": 0} | more)
    )


def test_greedy_text_is_that_of_the_command(server: Server, client: openai.OpenAI) -> None:
    said = command(sample.main, server.run, "--prompt", "def ", "--tokens", "8", "--step", "6")
    found = complete(client)
    assert said.out == f"def {found.choices[0].text}\n" and said.code == 0
    assert found.choices[0].finish_reason == "length" and found.model == "one"
    assert found.usage.prompt_tokens == 5 and found.usage.total_tokens == 13
    assert found.choices[0].logprobs is None


def test_the_model_is_described(server: Server, client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == "one" and client.models.retrieve("one") == model
    facts = httpx.get(f"{server.url}/v1/models").json()["data"][0]
    assert facts["context"] == 32 and facts["chat"] is True
    assert facts["path"].endswith(f"step_{facts['step']:08d}")


def test_a_stream_says_the_same(client: openai.OpenAI) -> None:
    how = dict(temperature=1, seed=5, max_tokens=12, logprobs=3, n=2)
    whole = complete(client, ["def ", "im"], **how)
    chunks = list(complete(client, ["def ", "im"], stream=True, **how, extra_body=USAGE))
    for number, choice in enumerate(whole.choices):
        own = [c.choices[0] for c in chunks[:-1] if c.choices[0].index == number]
        assert "".join(c.text for c in own) == choice.text
        assert [t for c in own for t in c.logprobs.tokens] == choice.logprobs.tokens
        assert [t for c in own for t in c.logprobs.text_offset] == choice.logprobs.text_offset
        assert [c.finish_reason for c in own if c.finish_reason] == [choice.finish_reason]
    assert len(whole.choices) == 4 and len({c.text for c in whole.choices}) == 4
    assert chunks[-1].usage == whole.usage and not chunks[-1].choices


USAGE = {"stream_options": {"include_usage": True}}


def test_a_seed_gives_one_text(client: openai.OpenAI) -> None:
    one, again, other = (
        complete(client, temperature=1, seed=seed, max_tokens=24).choices[0].text
        for seed in (1, 1, 2)
    )
    assert one == again != other
    drawn = {complete(client, temperature=1, max_tokens=24).choices[0].text for _ in range(2)}
    assert len(drawn) == 2, "without a seed each request has its own"


def test_probabilities_are_of_the_model(client: openai.OpenAI) -> None:
    found = complete(client, logprobs=20).choices[0].logprobs
    for token, logprob, top in zip(
        found.tokens, found.token_logprobs, found.top_logprobs, strict=True
    ):
        assert top[token] == logprob == max(top.values())
        assert 0.05 < sum(math.exp(value) for value in top.values()) <= 1 + 1e-6
    # Drawn tokens have the probabilities at temperature 1, whatever the temperature.
    warm = complete(client, logprobs=1, temperature=1e-3, seed=1).choices[0].logprobs
    assert warm.token_logprobs == pytest.approx(found.token_logprobs)


def test_a_text_ends_at_a_stop_string(client: openai.OpenAI) -> None:
    text = complete(client, max_tokens=20, temperature=1, seed=3).choices[0].text
    stop = text[4:6]
    short = complete(client, max_tokens=20, temperature=1, seed=3, stop=["unseen", stop])
    assert short.choices[0].text == text[: text.index(stop)]
    assert short.choices[0].finish_reason == "stop"
    assert short.usage.completion_tokens < 20


def test_ids_are_a_prompt_too(client: openai.OpenAI) -> None:
    text = complete(client, [0, *b"def "]).choices[0].text
    assert text == complete(client).choices[0].text
    both = complete(client, [[0, *b"def "], [0, *b"im"]])
    assert [c.text for c in both.choices] == [text, complete(client, "im").choices[0].text]
    assert both.usage.prompt_tokens == 8


def test_a_chat_goes_through_the_template(client: openai.OpenAI) -> None:
    said: list[Any] = [{"role": "user", "content": "hi"}]
    how: dict[str, Any] = dict(model="one", messages=said, temperature=0, max_tokens=5)
    found = client.chat.completions.create(**how, logprobs=True, top_logprobs=2)
    prompt = list(b"[user] hi\n[assistant] ")
    (choice,) = found.choices
    assert choice.message.content == complete(client, prompt, max_tokens=5).choices[0].text
    assert choice.message.role == "assistant" and found.usage.prompt_tokens == len(prompt)
    assert [len(entry.top_logprobs) for entry in choice.logprobs.content] == [2] * 5
    chunks = list(client.chat.completions.create(**how, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == choice.message.content and chunks[-1].choices[0].finish_reason == "length"
    long = client.chat.completions.create(model="one", messages=said, temperature=0)
    assert long.usage.total_tokens == 32, "without a number as many as the context has"


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("completions", "{", 400, "the body is no JSON"),
        ("completions", '{"prompt": ' + "[" * 10000, 400, "the body is no JSON"),
        ("completions", r'{"prompt": "\ud800"}', 400, "the body is no JSON of text"),
        ("chat/completions", r'{"messages": ["\ud800"]}', 400, "the body is no JSON of text"),
        ("completions", "[]", 400, "the body is no JSON object"),
        ("completions", {}, 400, "prompt is null; expected a text, a list"),
        ("completions", {"prompt": []}, 400, "prompt is []; expected"),
        ("completions", {"prompt": [999]}, 400, "prompt has token id 999, outside the vocab"),
        ("completions", {"prompt": "x" * 40}, 400, "the prompt has 41 tokens, the context 32"),
        ("completions", {"prompt": "x", "model": "gpt"}, 404, "the model 'gpt' does not exist"),
        ("completions", {"prompt": "x", "max_tokens": 0}, 400, "max_tokens is 0; expected a whole"),
        ("completions", {"prompt": "x", "temperature": "hot"}, 400, 'temperature is "hot"; expec'),
        ("completions", {"prompt": "x", "top_p": 1.5}, 400, "top_p is 1.5; expected a number"),
        ("completions", {"prompt": "x", "n": 17}, 400, "these are 17 texts at a time; --batch 16"),
        ("completions", {"prompt": "x", "n": 10**9}, 400, "these are 1000000000 texts at a time"),
        ("completions", {"prompt": "x", "stop": [""]}, 400, 'stop is [""]; expected a text'),
        ("completions", {"prompt": "x", "echo": True}, 400, "echo is not supported: leave it out"),
        ("completions", {"prompt": "x", "stream": "y"}, 400, 'stream is "y"; expected true or fa'),
        ("completions", {"prompt": "x", "logprobs": 99}, 400, "logprobs is 99; expected a whole"),
        ("chat/completions", {"messages": []}, 400, "messages is empty"),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": "x"}], "max_completion_tokens": 0},
            400,
            "max_completion_tokens is 0; expected a whole number",
        ),
        ("chat/completions", {"messages": [{}]}, 400, "messages[0] is no object with role"),
        (
            "chat/completions",
            {"messages": [{"role": "cat", "content": "x"}], "stream": True},
            400,
            "the chat template does not take the messages: nobody is cat",
        ),
    ],
)
def test_mistakes_are_json_of_one_line(
    server: Server, path: str, body: Any, status: int, message: str
) -> None:
    content = body if isinstance(body, str) else json.dumps(body)
    head = {"Content-Type": "application/json"}
    response = httpx.post(f"{server.url}/v1/{path}", content=content, headers=head, timeout=60)
    error = response.json()["error"]
    assert response.status_code == status and error["message"].startswith(message), error
    assert set(error) == {"message", "type", "param", "code"} and "\n" not in error["message"]
    assert error["type"] == "invalid_request_error"


def test_other_sites_are_refused(server: Server) -> None:
    """A page of the web cannot use the server by way of the browser beside it."""
    url = f"{server.url}/v1/completions"
    plain = httpx.post(url, content='{"prompt": "x"}', headers={"Content-Type": "text/plain"})
    assert plain.status_code == 415 and "Content-Type" in plain.json()["error"]["message"]
    renamed = httpx.get(f"{server.url}/v1/models", headers={"Host": "evil.example:80"})
    assert renamed.status_code == 400 and "evil.example" in renamed.json()["error"]["message"]
    assert httpx.get(f"{server.url}/nothing").json()["error"]["message"] == (
        "GET /nothing: Not Found"
    )
    assert "access-control-allow-origin" not in httpx.get(server.url).headers


def test_requests_wait_for_each_other(client: openai.OpenAI) -> None:
    expected = [complete(client, word).choices[0].text for word in ("a", "b", "c", "d")]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda word: complete(client, word).choices[0].text, "abcd"))
    assert found == expected
    with complete(client, stream=True, max_tokens=20) as stream:
        next(iter(stream))  # and the client leaves
    assert complete(client, "a").choices[0].text == expected[0]


def test_the_newest_checkpoint_is_loaded_when_asked(server: Server, client: openai.OpenAI) -> None:
    def reload() -> httpx.Response:
        return httpx.post(f"{server.url}/reload", json={}, timeout=60)

    def step() -> int:
        return int(httpx.get(f"{server.url}/v1/models").json()["data"][0]["step"])

    before = complete(client, logprobs=1).choices[0].logprobs.token_logprobs
    assert reload().json()["step"] == 6 and step() == 6
    damaged = step_of(server.run, 9)
    shutil.copytree(server.later, damaged)
    shard = max(damaged.glob("*.distcp"), key=lambda path: path.stat().st_size)
    shard.write_bytes(bytes(shard.stat().st_size))
    refused = reload()
    assert refused.status_code == 500 and "contents changed" in refused.json()["error"]["message"]
    assert complete(client, logprobs=1).choices[0].logprobs.token_logprobs == before
    shutil.rmtree(damaged)
    shutil.copytree(server.later, step_of(server.run, 12))
    answer = reload().json()
    assert (answer["before"], answer["step"]) == (6, 12) and step() == 12
    assert complete(client, logprobs=1).choices[0].logprobs.token_logprobs != before
    shutil.rmtree(step_of(server.run, 12))
    assert reload().json()["step"] == 6
    assert complete(client, logprobs=1).choices[0].logprobs.token_logprobs == before


def test_mistakes_on_the_command_line_are_one_line(server: Server) -> None:
    port = server.url.rpartition(":")[2]
    for given, why in (
        (["--port", "99999"], "--port 99999: must be a number from 0 to 65535"),
        (["--port", port], f"cannot listen on 127.0.0.1:{port}: Address already in use"),
        (["--host", "203.0.113.1", "--port", "0"], "cannot listen on 203.0.113.1:0"),
        (["--port", "0", "--chat-template", "none"], "chat template none cannot be read: No such"),
        (["--port", "0", "--step", "7"], "one has no checkpoint of step 7, but of 6"),
    ):
        output = command(serve.main, server.run, *given)
        assert output.code == 2 and why in output.err and not output.out, output
        (line,) = output.err.splitlines()[-1:]
        assert line.startswith("serve: ") and "Traceback" not in output.err
