"""The server as its clients see it: right texts, clean refusals, nothing left of who hangs up."""

import asyncio
import contextlib
import dataclasses
import json
import os
import signal
import socket
import sys
import threading
import time

import jax
import openai
import pytest
from http_server import (
    NAME,
    Running,
    check_laws,
    dumped,
    running_server,
    wait_for,
)
from tiny_checkpoint import save_tiny

from swa_jax import PoolConfig, cli
from swa_jax.http import Served, figures, world_owner
from swa_jax.http.world_owner import WorldOwner
from swa_jax.loaded_model import load_model
from swa_jax.serving import FINISH_REASONS, make_requests, serve
from swa_jax.serving_pools import ServingOptions, config_for_server

PROMPTS = [
    "hello there",
    "a",
    "then you and I",
    "€ is an é 😀",
    "0123456789" * 4,
    "then you and me",
]
SAMPLED = {"temperature": 1.0, "top_p": 0.9, "extra_body": {"top_k": 20}}
LONG = {"max_tokens": 75, "extra_body": {"ignore_eos": True}}
COUNT = 24  # tokens asked for
# Pools in which eight requests that run at once do not all fit.
SIZES = ServingOptions(None, 256, 96, 4, 8, 16, True, None)
CONTEXT = 96
OPTIONS = ["--full-tokens", "256", "--swa-tokens", "96", "--page-size", "4", "--max-running", "8"]
OPTIONS += ["--chunk-tokens", "16", "--max-context", str(CONTEXT), "--max-waiting", "72"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("checkpoint") / NAME
    path.mkdir()
    save_tiny(path)
    return path


@pytest.fixture(scope="module")
def model(folder):
    return load_model(folder, "float32")


@pytest.fixture(scope="module")
def served(model):
    config = config_for_server(model.kv_config, SIZES, CONTEXT)
    return Served(model.decoder, model.params, config, max_waiting=72)


@pytest.fixture(scope="module")
def shared(served, model):
    with running_server(served, model.tokenizer) as running:
        yield running


@pytest.fixture(scope="module")
def compiled_later(shared):
    """Seconds of each compilation that the first requests took part in."""
    seconds = []

    def note(event, duration_secs, **_):
        if "backend_compile" in event:
            seconds.append(duration_secs)

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        with shared.client() as client:
            complete(client, [PROMPTS[0], "a" * 60], stop="e", n=2, **SAMPLED)
            complete(client, [[2] * size for size in (1, 15, 16, 17, 33, 64)])
            shared.wait_until_idle()
    finally:
        jax.monitoring.unregister_event_duration_listener(note)
    return seconds


@pytest.fixture
def server(shared, compiled_later):
    """The one server of nearly all tests; each leaves nothing behind in it."""
    yield shared
    shared.wait_until_idle()
    check_laws(shared.engine)


@pytest.fixture(scope="module")
def expected(served, model):
    """What `serve` gives for PROMPTS: greedy, and drawn with seeds 5, 6, ..."""
    tokens = [model.tokenizer.encode(prompt) for prompt in PROMPTS]
    count = len(tokens)
    requests = make_requests(
        tokens * 2,
        max_new_tokens=COUNT,
        temperature=[0.0] * count + [1.0] * count,
        top_k=20,
        top_p=0.9,
        seed=[0] * count + list(range(5, 5 + count)),
    )
    # Neither the cache nor the size of the pools makes a difference.
    pool = PoolConfig(2048, 512, 4, served.config.pool.sliding_window)
    config = dataclasses.replace(served.config, pool=pool, prefix_cache=False)
    done = jax.device_get(serve(served.model, served.params, requests, config))
    found = []
    for row, length, reason in zip(done.tokens, done.lengths, done.finish_reasons, strict=True):
        said = row[:length].tolist()
        reason = FINISH_REASONS[int(reason)]
        shown = said[:-1] if reason == "stop" else said
        found.append((model.tokenizer.decode(shown), reason, len(said)))
    return found[:count], found[count:]


def complete(client, prompt, **options):
    options = {"max_tokens": COUNT, "temperature": 0, **options}
    return client.completions.create(model=NAME, prompt=prompt, **options)


def streamed(chunks):
    """The texts and reasons of each choice, and the usage."""
    texts, reasons, usage = {}, {}, None
    for chunk in chunks:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            assert choice.index not in reasons, "nothing comes after the reason"
            texts[choice.index] = texts.get(choice.index, "") + choice.text
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    return texts, reasons, usage


def test_completions_are_those_of_serve(server, model, expected):
    with server.client() as client:
        for prompt, (text, reason, count) in zip(PROMPTS, expected[0], strict=True):
            answer = complete(client, prompt)
            assert (answer.choices[0].text, answer.choices[0].finish_reason) == (text, reason)
            assert answer.usage.completion_tokens == count
            assert answer.usage.prompt_tokens == len(model.tokenizer.encode(prompt))
            assert (answer.object, answer.model) == ("text_completion", NAME)
        again = complete(client, PROMPTS[4])
    assert again.choices[0].text == expected[0][4][0]
    assert again.usage.prompt_tokens_details.cached_tokens >= 32  # it was asked before


def test_prompts_in_every_form(server, model, expected):
    ids = [model.tokenizer.encode(prompt) for prompt in PROMPTS]
    with server.client() as client:
        for several in (PROMPTS, ids):
            answer = complete(client, several)
            found = [(choice.text, choice.finish_reason) for choice in answer.choices]
            assert found == [(text, reason) for text, reason, _ in expected[0]]
            assert [choice.index for choice in answer.choices] == list(range(len(PROMPTS)))
        assert complete(client, ids[0]).choices[0].text == expected[0][0][0]


def test_a_seed_gives_what_serve_gives(server, expected):
    with server.client() as client:
        for place, prompt in enumerate(PROMPTS):
            answer = complete(client, prompt, seed=5 + place, **SAMPLED)
            assert answer.choices[0].text == expected[1][place][0]
        answer = complete(client, PROMPTS[1], n=2, seed=5, **SAMPLED)
        assert answer.choices[1].text == expected[1][1][0]  # seed 6
        assert answer.choices[0].text != answer.choices[1].text
        free = complete(client, PROMPTS[:2], n=3, **SAMPLED)
        assert len({choice.text for choice in free.choices[:3]}) == 3


@pytest.mark.parametrize("options", [{}, {"n": 3, "seed": 11, **SAMPLED}, {"stop": ["e", "o"]}])
def test_streaming_gives_the_same(server, options):
    with server.client() as client:
        whole = complete(client, PROMPTS, **options)
        usage = {"include_usage": True}
        with complete(client, PROMPTS, stream=True, stream_options=usage, **options) as chunks:
            texts, reasons, usage = streamed(chunks)
    for choice in whole.choices:
        assert texts.get(choice.index, "") == choice.text
        assert reasons[choice.index] == choice.finish_reason
    assert usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens
    assert usage.total_tokens == whole.usage.total_tokens


def test_the_form_of_a_stream(server):
    body = {"model": NAME, "prompt": "a", "max_tokens": 3, "temperature": 0, "stream": True}
    status, headers, text = server.ask("POST", "/v1/completions", body)
    assert (status, headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
    events = text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][-1] == "length"
    assert not any("usage" in chunk for chunk in chunks)


def test_echo_repeats_the_prompt(server, model, expected):
    ids = model.tokenizer.encode(PROMPTS[2])
    with server.client() as client:
        for prompt in (PROMPTS[2], ids):
            answer = complete(client, prompt, echo=True)
            assert answer.choices[0].text == PROMPTS[2] + expected[0][2][0]
        with complete(client, PROMPTS[2], echo=True, stream=True) as chunks:
            assert streamed(chunks)[0] == {0: PROMPTS[2] + expected[0][2][0]}
        nothing = complete(client, "ab", echo=True, max_tokens=0)
    assert (nothing.choices[0].text, nothing.choices[0].finish_reason) == ("ab", "length")
    assert nothing.usage.completion_tokens == 0


def test_stop_strings_across_tokens(server, expected):
    before = server.metrics()
    text = expected[0][4][0]
    stop = text[3:6]  # three characters are at least two tokens
    with server.client() as client:
        answer = complete(client, PROMPTS[4], stop=[stop, "never seen"])
        assert answer.choices[0].text == text[: text.index(stop)]
        assert answer.choices[0].finish_reason == "stop"
        assert answer.usage.completion_tokens < COUNT
        with complete(client, PROMPTS[4], stop=stop, stream=True) as chunks:
            assert streamed(chunks)[:2] == ({0: text[: text.index(stop)]}, {0: "stop"})
    server.wait_until_idle()
    assert (
        server.metrics()['requests_total{reason="stop"}']
        == before['requests_total{reason="stop"}'] + 2
    )


def test_64_streams_at_once(server, expected):
    async def one(client, place):
        chunks = await complete(client, PROMPTS[place % len(PROMPTS)], stream=True)
        async with chunks:
            return "".join([chunk.choices[0].text async for chunk in chunks])

    async def all_of_them():
        async with server.async_client() as client:
            return await asyncio.gather(*(one(client, place) for place in range(64)))

    before, start = server.metrics(), time.perf_counter()
    texts = asyncio.run(all_of_them())
    seconds = time.perf_counter() - start
    print(f"64 streams of {COUNT} tokens: {64 / seconds:.1f} requests/s")
    assert texts == [expected[0][place % len(PROMPTS)][0] for place in range(64)]
    server.wait_until_idle()
    rise = server.metrics()["generated_tokens_total"] - before["generated_tokens_total"]
    assert rise == sum(expected[0][place % len(PROMPTS)][2] for place in range(64))


def test_half_of_the_clients_hang_up(server, expected):
    async def one(client, place):
        options = {"stream": True, **(LONG if place % 2 else {})}
        chunks = await complete(client, PROMPTS[place % 4], **options)
        text = ""
        async with chunks:
            async for chunk in chunks:
                text += chunk.choices[0].text
                if place % 2 and len(text) > place % 7:
                    break
        return text

    async def waits(client):
        """Hangs up before the whole answer is there."""
        with contextlib.suppress(openai.APITimeoutError):
            await complete(client, "waits", timeout=0.3, **LONG)

    async def all_of_them():
        async with server.async_client() as client:
            waiting = [waits(client) for _ in range(8)]
            found = await asyncio.gather(*(one(client, place) for place in range(64)), *waiting)
        return found[:64]

    cancelled = 'requests_total{reason="cancelled"}'
    before = server.metrics()[cancelled]
    texts = asyncio.run(all_of_them())
    server.wait_until_idle()
    assert texts[::2] == [expected[0][place % 4][0] for place in range(0, 64, 2)]
    assert server.metrics()[cancelled] - before >= 8  # the others were done before it was seen
    check_laws(server.engine)


BAD = [
    (b"", 400, "not JSON"),
    (b"{", 400, "not JSON"),
    (b"\xff", 400, "not JSON"),
    (b"[" * 60_000, 400, "not JSON"),
    (b'{"temperature": NaN}', 400, "NaN is no JSON number"),
    (b"[]", 400, "must be a JSON object"),
    ({}, 400, "model must be a string"),
    ({"model": 3}, 400, "model must be a string"),
    ({"model": "gpt-5"}, 404, "there is no model 'gpt-5' here; this server has 'tiny'"),
    ({"prompt": None}, 400, "prompt must be"),
    ({"prompt": ""}, 200, ""),  # <bos> alone
    ({"prompt": []}, 400, "prompt must be"),
    ({"prompt": [[]]}, 400, "prompt must be"),
    ({"prompt": ["a", 1]}, 400, "prompt must be"),
    ({"prompt": [True]}, 400, "prompt must be"),
    ({"prompt": {"a": 1}}, 400, "prompt must be"),
    ({"prompt": "\ud800"}, 400, "prompt must be"),
    ({"prompt": [-1]}, 400, "a token that the model does not know: they are 0 .. "),
    ({"prompt": [[1], [10**30]]}, 400, "a token that the model does not know"),
    ({"prompt": "a" * 95}, 400, "context is 96 tokens, but 96 of the prompt and max_tokens=2"),
    ({"max_tokens": 10**30}, 400, "context is 96 tokens"),
    ({"max_tokens": -1}, 400, "max_tokens must be an integer at least 0, got -1"),
    ({"max_tokens": 1.5}, 400, "max_tokens must be an integer"),
    ({"max_tokens": True}, 400, "max_tokens must be an integer"),
    ({"n": 0}, 400, "n must be an integer at least 1"),
    ({"n": 81}, 400, "at most 80"),
    ({"n": 41, "prompt": ["a", "b"]}, 400, "got 41 * 2"),
    ({"n": 10**5000}, 400, "for integer string conversion: value has 5001 digits"),
    ({"n": 10**4000}, 400, "at most 80"),
    ({"temperature": -0.1}, 400, "temperature must be a number from 0 to 2"),
    ({"temperature": "hot"}, 400, "temperature must be a number"),
    ({"temperature": 10**400}, 400, "temperature must be a number"),
    ({"top_p": 1.1}, 400, "top_p must be a number from 0 to 1"),
    ({"top_k": -1}, 400, "top_k must be an integer from 0"),
    ({"seed": "x"}, 400, "seed must be an integer"),
    ({"seed": -(2**63)}, 200, ""),
    ({"stop": ["a"] * 5}, 400, "stop must be a string or up to 4"),
    ({"stop": ""}, 400, "stop must be"),
    ({"stop": [1]}, 400, "stop must be"),
    ({"stop": "x" * 2000}, 400, "at most 1024 characters"),
    ({"stream": "yes"}, 400, "stream must be true or false"),
    ({"stream_options": {"include_usage": True}}, 400, "for stream=true only"),
    ({"stream": True, "stream_options": 1}, 400, "stream_options must be an object"),
    ({"stream": True, "stream_options": {"x": 1}}, 400, "stream_options knows no 'x'"),
    ({"logprobs": 0}, 400, "logprobs is not supported"),
    ({"suffix": "x"}, 400, "suffix is not supported"),
    ({"best_of": 2}, 400, "best_of is not supported"),
    ({"presence_penalty": 0.5}, 400, "presence_penalty is not supported"),
    ({"logit_bias": {"3": 1}}, 400, "logit_bias is not supported"),
    ({"logit_bias": {}, "presence_penalty": 0, "suffix": None, "user": "me"}, 200, ""),
    ({"max_token": 3}, 400, "'max_token' is no argument of this server"),
    ({"top_p": 0, "temperature": 1}, 200, ""),
]


def test_bad_requests(server):
    for given, status, said in BAD:
        body = given
        if isinstance(given, dict):
            usual = {"model": NAME, "prompt": "a", "max_tokens": 2} if given else {}
            body = {**usual, **given}
        with _any_number_of_digits():
            body = dumped(body) if isinstance(body, dict) else body
        found, headers, text = server.ask("POST", "/v1/completions", body)
        assert found == status, (str(given)[:80], text)
        assert headers["content-type"] == "application/json"
        if status != 200:
            error = json.loads(text)["error"]
            assert set(error) == {"message", "type", "param", "code"}
            assert error["type"] == "invalid_request_error"
            assert said in error["message"]
            assert len(error["message"]) < 400


@contextlib.contextmanager
def _any_number_of_digits():
    before = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    yield
    sys.set_int_max_str_digits(before)


def test_bad_requests_by_the_client(server):
    with server.client() as client:
        with pytest.raises(openai.NotFoundError, match="this server has 'tiny'") as unknown:
            client.completions.create(model="other", prompt="a")
        assert unknown.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError, match="shorten either") as too_long:
            complete(client, "a" * 200)
        assert too_long.value.code == "context_length_exceeded"
        with pytest.raises(openai.NotFoundError, match="this server has /v1/completions"):
            client.chat.completions.create(model=NAME, messages=[])
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve("other")


def test_nothing_is_compiled_after_the_start(server, compiled_later):
    assert compiled_later == []


def test_other_pages(server):
    with server.client() as client:
        assert [model.id for model in client.models.list()] == [NAME]
        assert client.models.retrieve(NAME).owned_by == "swa-jax"
    assert server.ask("GET", "/health")[::2] == (200, '{"status":"ok"}')
    status, headers, text = server.ask("GET", "/v1/completions")
    assert (status, headers["allow"]) == (405, "POST")
    assert "does not take GET" in json.loads(text)["error"]["message"]


def test_a_body_without_end(server, monkeypatch):
    monkeypatch.setattr("swa_jax.http.json_body.MOST_BYTES", 1000)
    status, _, text = server.ask("POST", "/v1/completions", b" " * 2000)
    assert status == 413
    assert "at most 1000 bytes" in json.loads(text)["error"]["message"]


def test_a_client_that_hangs_up_before_it_has_asked(server):
    with socket.create_connection(("127.0.0.1", server.port)) as line:
        line.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
    assert server.ask("GET", "/health")[0] == 200


def test_a_full_queue_says_when_to_come_again(server):
    refused = 'refused_requests_total{reason="queue_full"}'
    before = server.metrics()[refused]
    many = {"model": NAME, "prompt": "x", "n": 70, "max_tokens": 75}
    with server.client() as client, complete(client, "x", n=70, stream=True, **LONG) as chunks:
        next(iter(chunks))
        assert server.metrics()["requests_waiting"] > 0
        status, headers, text = server.ask("POST", "/v1/completions", many)
        assert (status, headers["retry-after"]) == (429, "1")
        error = json.loads(text)["error"]
        assert (error["type"], error["code"]) == ("rate_limit_error", "queue_full")
        assert "70 of 80 sequences are running or waiting and 70 more" in error["message"]
        with pytest.raises(openai.RateLimitError):
            complete(client, "x", n=11)
        assert len(complete(client, "y", n=2, max_tokens=1).choices) == 2
    after = server.metrics()
    assert after[refused] == before + 70 + 11
    assert after["retractions_total"] > 0, "the pools are too large to be of interest"
    with server.client(max_retries=20) as client:
        assert len(complete(client, "z", n=70, max_tokens=1).choices) == 70


def test_metrics_tell_what_happened(server):
    before = server.metrics()
    with server.client() as client:
        answer = complete(client, PROMPTS, extra_body={"ignore_eos": True})
    server.wait_until_idle()
    after = server.metrics()
    rise = {name: after[name] - before[name] for name in after}
    assert rise['requests_total{reason="length"}'] == len(PROMPTS)
    assert rise["generated_tokens_total"] == answer.usage.completion_tokens == COUNT * len(PROMPTS)
    assert rise["prompt_tokens_total"] == answer.usage.prompt_tokens
    assert rise["time_to_first_token_seconds_count"] == len(PROMPTS)
    assert rise["request_seconds_sum"] > rise["time_to_first_token_seconds_sum"] > 0
    assert after["prefix_cache_hit_tokens_total"] > 0
    assert (after["requests_running"], after["requests_waiting"]) == (0, 0)
    assert after["request_places"] == 80
    for pool, pages in (("full", 64), ("swa", 24)):
        held, free = (after[f'pages_{kind}{{pool="{pool}"}}'] for kind in ("held", "free"))
        assert held + free == pages
    assert after["allocator_faults"] == after["refused_grants_total"] == 0


def test_figures_outlive_the_loops_counters(server, monkeypatch):
    monkeypatch.setattr(figures, "MOST_COUNTED", 3)  # in place of 2^30
    before = server.metrics()["generated_tokens_total"]
    with server.client() as client:
        for _ in range(3):
            complete(client, PROMPTS[0], max_tokens=10, extra_body={"ignore_eos": True})
    server.wait_until_idle()
    assert server.metrics()["generated_tokens_total"] == before + 30
    assert server.engine.call(lambda world: int(world.stats.generated)).result(60) <= 10


def test_a_graceful_stop(served, model, expected):
    with running_server(served, model.tokenizer) as server, server.client() as client:
        with complete(client, PROMPTS[0], stream=True) as chunks:
            first = next(iter(chunks))
            server.engine.drain()
            body = {"model": NAME, "prompt": "a"}
            status, headers, text = server.ask("POST", "/v1/completions", body)
            assert (status, headers["retry-after"]) == (503, "1")
            assert json.loads(text)["error"]["code"] == "stopping"
            assert server.ask("GET", "/health")[0] == 503
            server.server.stop()
            rest = "".join(chunk.choices[0].text for chunk in chunks)
        assert first.choices[0].text + rest == expected[0][0][0]
        wait_for(lambda: not _answers(server.port))
        check_laws(server.engine)


def _answers(port):
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


def test_a_stop_cuts_what_takes_too_long(served, model, monkeypatch):
    run = WorldOwner.run
    monkeypatch.setattr(WorldOwner, "run", lambda owner: (time.sleep(0.1), run(owner)))
    with running_server(served, model.tokenizer, grace=0.3) as server, server.client() as client:
        outcome = []

        def whole():
            with pytest.raises(openai.InternalServerError, match="cut off") as error:
                complete(client, "b", **LONG)
            outcome.append(error.value.status_code)

        waiting = threading.Thread(target=whole)
        waiting.start()
        with complete(client, "a", stream=True, **LONG) as chunks:
            next(iter(chunks))
            wait_for(lambda: server.engine.open_jobs == 2)
            server.server.stop()
            with pytest.raises(openai.APIError, match="cut off"):
                list(chunks)
        waiting.join(60)
        assert outcome == [503]
        server.wait_until_idle()
        check_laws(server.engine)


def test_a_restarted_server_has_its_cache(served, model, tmp_path):
    kept = dataclasses.replace(served, cache_dir=tmp_path / "kept", weights="these")
    fresh = []
    for _ in range(2):
        with running_server(kept, model.tokenizer) as server, server.client() as client:
            usage = complete(client, PROMPTS[4]).usage
            fresh.append(usage.prompt_tokens - usage.prompt_tokens_details.cached_tokens)
    assert fresh[0] == len(model.tokenizer.encode(PROMPTS[4]))
    assert 0 < fresh[1] <= kept.config.pool.page_size
    other = dataclasses.replace(kept, weights="others")
    with pytest.raises(ValueError, match="weights"):
        WorldOwner(other)


def test_an_engine_that_fails_ends_the_server(served, model, monkeypatch):
    with running_server(served, model.tokenizer) as server, server.client() as client:

        def fail(owner):
            raise RuntimeError("a bug")

        monkeypatch.setattr(WorldOwner, "run", fail)
        with pytest.raises(openai.InternalServerError, match="the server has failed"):
            complete(client, "a")
        wait_for(lambda: server.server.should_exit)
        assert str(server.engine.error) == "a bug"


def test_the_command(folder, served, expected, capsys):
    """It says where it is, serves, and ends well at SIGTERM."""
    lines = []

    def ask(port):
        running = Running(None, None, port)
        wait_for(lambda: _answers(port))
        with running.client(max_retries=5) as client:
            lines.append(complete(client, PROMPTS[0]).choices[0].text)
        os.kill(os.getpid(), signal.SIGTERM)

    with contextlib.closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    asking = threading.Thread(target=ask, args=(port,))
    asking.start()
    before = signal.getsignal(signal.SIGTERM)
    command = ["serve-http", "--checkpoint", str(folder), "--port", str(port), *OPTIONS]
    assert cli.main(command) == 0
    asking.join(60)
    assert lines == [expected[0][0][0]]
    assert signal.getsignal(signal.SIGTERM) == before
    said = capsys.readouterr().err
    assert f"swa-jax: {NAME} on http://127.0.0.1:{port}/v1, up to {CONTEXT} tokens" in said


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--port", "70000"], "'--port': must be an integer from 0 to 65535"),
        (["--host", "no.such.host.invalid"], "cannot listen there: "),
        (["--max-context", "1000"], "--max-context must be at most 256: the model takes 512"),
        (["--hbm", "1GiB"], "give either --hbm or the tokens"),
        (["--checkpoint", "nowhere"], "nowhere: there is no such directory"),
        (["--dtype", "int8"], "'--dtype': must be one of float32, bfloat16"),
        (["--grace", "-1"], "'--grace': must be from 0 to 86400"),
    ],
)
def test_a_command_that_cannot_be(options, said, folder, capsys):
    command = ["serve-http", "--checkpoint", str(folder), *OPTIONS, *options]
    assert cli.main(command) == 2
    captured = capsys.readouterr()
    assert said in captured.err
    assert captured.err.startswith("swa-jax: ")
    assert captured.err.count("\n") == 1


def test_too_little_memory(folder, monkeypatch, capsys):
    def new_world(*_):
        raise MemoryError

    monkeypatch.setattr(world_owner, "new_world", new_world)
    command = ["serve-http", "--checkpoint", str(folder), "--port", "0", *OPTIONS]
    assert cli.main(command) == 2
    assert (
        "beside 256 full and 96 SWA tokens of KV: give a smaller --hbm" in capsys.readouterr().err
    )


def test_pools_are_no_larger_than_is_of_use(model):
    none = dataclasses.replace(SIZES, full_tokens=None, swa_tokens=None)
    config = config_for_server(model.kv_config, none, None)
    assert config.max_context == 512  # the model's
    assert config.pool.full_tokens == 8 * config.max_running * 512
    config = config_for_server(model.kv_config, dataclasses.replace(none, hbm="30KiB"), None)
    assert config.max_context == config.pool.full_tokens < 512
    only_swa = dataclasses.replace(model.kv_config, num_full_layers=0, num_layers=1)
    with pytest.raises(ValueError, match="serving needs both kinds"):
        config_for_server(only_swa, none, None)
