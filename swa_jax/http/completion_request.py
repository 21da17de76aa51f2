"""What a client asks of /v1/completions."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from swa_jax.http.errors import ApiError, bad_value
from swa_jax.http.json_body import Fields, is_integer, is_text
from swa_jax.replay.trace_lines import show
from swa_jax.text import TextTokenizer

_MOST_TOKENS = 16  # where the client says nothing, as OpenAI has it
_MOST_STOPS = 4
_MOST_STOP_CHARACTERS = 1024
_MOST_TOKEN_CHARACTERS = 256  # more than any token of a published tokenizer has
_MOST_NAME_CHARACTERS = 80  # of an argument that is sent back
_LEAST_TOP_P = 1e-6  # stands for 0: the likeliest token alone
_SEEDS = 2**31

# What would change the answer, the values that would not, and what to say about others.
_NOT_SERVED = {
    "logprobs": ((), "is not supported: leave it out"),
    "suffix": (("",), "is not supported: leave it out"),
    "best_of": ((1,), "is not supported: ask for n and choose among them"),
    "logit_bias": (({},), "is not supported: leave it out"),
    "presence_penalty": ((0,), "is not supported: leave it at 0"),
    "frequency_penalty": ((0,), "is not supported: leave it at 0"),
}
_NOTED = ("user", "metadata")  # says nothing about the answer


@dataclass(frozen=True)
class Prompt:
    """A prompt, in the form it came in and as the model reads it."""

    tokens: tuple[int, ...]
    text: str


@dataclass(frozen=True)
class CompletionRequest:
    """A request that can be served."""

    prompts: tuple[Prompt, ...]
    n: int  # sequences for each prompt
    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    seed: int
    stops: tuple[str, ...]
    ignore_eos: bool
    echo: bool
    stream: bool
    include_usage: bool

    def seed_of(self, choice: int) -> int:
        """Of the choice-th sequence for a prompt: `seed` for the first, int32."""
        return (self.seed + choice) % _SEEDS


@dataclass(frozen=True)
class Limits:
    """What a server can do."""

    model_name: str
    vocab_size: int
    max_context: int  # tokens, prompt and output
    places: int  # sequences at once


def completion_request(
    body: dict[str, Any], limits: Limits, tokenizer: TextTokenizer
) -> CompletionRequest:
    """Reads the JSON of a request.

    Args:
      body: the object that the client sent.
      limits: of the server.
      tokenizer: of the model.

    Raises:
      ApiError: something in it cannot be served; says what, and what could.
    """
    fields = Fields(body)
    _check_model(fields.take("model"), limits)
    _refuse(fields)
    stream = fields.boolean("stream")
    max_tokens = fields.integer("max_tokens", _MOST_TOKENS, 0)
    n = fields.integer("n", 1, 1)
    asked = CompletionRequest(
        prompts=_prompts(fields.take("prompt"), n, limits, tokenizer),
        n=n,
        max_tokens=max_tokens,
        temperature=fields.number("temperature", 1.0, 2.0),
        top_k=fields.integer("top_k", 0, 0, limits.vocab_size),
        top_p=max(fields.number("top_p", 1.0, 1.0), _LEAST_TOP_P),
        seed=_seed(fields.take("seed")),
        stops=_stops(fields.take("stop")),
        ignore_eos=fields.boolean("ignore_eos"),
        echo=fields.boolean("echo"),
        stream=stream,
        include_usage=_include_usage(fields.take("stream_options"), stream=stream),
    )
    if fields.left():
        name = fields.left()[0]
        param = name if len(name) <= _MOST_NAME_CHARACTERS else None
        raise ApiError(400, f"{show(name)} is no argument of this server", param=param)
    _check_lengths(asked, limits)
    return asked


def _check_model(name: object, limits: Limits) -> None:
    if not isinstance(name, str):
        raise bad_value("model", f"must be a string, such as {limits.model_name!r}")
    if name != limits.model_name:
        raise unknown_model(name, limits)


def unknown_model(name: str, limits: Limits) -> ApiError:
    """404 for a model that is not served here."""
    return ApiError(
        404,
        f"there is no model {show(name)} here; this server has {limits.model_name!r}",
        param="model",
        code="model_not_found",
    )


def _refuse(fields: Fields) -> None:
    for name, (harmless, message) in _NOT_SERVED.items():
        value = fields.take(name)
        if value is not None and (isinstance(value, bool) or value not in harmless):
            raise bad_value(name, message)
    for name in _NOTED:
        fields.take(name)


def _prompts(given: object, n: int, limits: Limits, tokenizer: TextTokenizer) -> tuple[Prompt, ...]:
    """A string, several, token ids, or several lists of token ids."""
    if is_text(given) or _is_tokens(given):
        several: Sequence[object] = [given]
    elif isinstance(given, list) and given and _all_alike(given):
        several = given
    else:
        raise bad_value(
            "prompt",
            "must be a string of Unicode characters, a list of strings, a list of token ids or a "
            f"list of such lists, none of them empty, got {show(given)}",
        )
    if len(several) * n > limits.places:
        raise bad_value(
            "n",
            f"times the number of prompts must be at most {limits.places}, the sequences that "
            f"this server takes at once, got {show(n)} * {len(several)}",
        )
    return tuple(_prompt(one, limits, tokenizer) for one in several)


def _all_alike(values: list[object]) -> bool:
    return all(map(is_text, values)) or all(map(_is_tokens, values))


def _is_tokens(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(map(is_integer, value))


def _prompt(given: Any, limits: Limits, tokenizer: TextTokenizer) -> Prompt:  # noqa: ANN401
    most = limits.max_context * _MOST_TOKEN_CHARACTERS
    if isinstance(given, str) and len(given) > most:  # only to find that it is too long takes long
        raise bad_value(
            "prompt",
            f"must have at most {most} characters, since the context is {limits.max_context} "
            f"tokens, got {len(given)}",
        )
    tokens = tuple(tokenizer.encode(given) if isinstance(given, str) else given)
    if not tokens:
        raise bad_value("prompt", "has no tokens; give at least one")
    wrong = [token for token in tokens if not 0 <= token < limits.vocab_size]
    if wrong:
        raise bad_value(
            "prompt",
            f"has a token that the model does not know: they are 0 .. {limits.vocab_size - 1}, "
            f"got {show(wrong[0])}",
        )
    return Prompt(tokens, given if isinstance(given, str) else tokenizer.decode(tokens))


def _seed(given: object) -> int:
    """Any integer, as an int32; without one another each time."""
    if given is None:
        return secrets.randbelow(_SEEDS)
    if not is_integer(given):
        raise bad_value("seed", f"must be an integer, got {show(given)}")
    assert isinstance(given, int)
    return given % _SEEDS


def _stops(given: Any) -> tuple[str, ...]:  # noqa: ANN401
    stops = given if isinstance(given, list) else [] if given is None else [given]
    if len(stops) > _MOST_STOPS or not all(is_text(stop) and stop for stop in stops):
        raise bad_value(
            "stop", f"must be a string or up to {_MOST_STOPS}, none empty, got {show(given)}"
        )
    if any(len(stop) > _MOST_STOP_CHARACTERS for stop in stops):
        raise bad_value("stop", f"must have at most {_MOST_STOP_CHARACTERS} characters")
    return tuple(stops)


def _include_usage(given: object, *, stream: bool) -> bool:
    if given is None:
        return False
    if not stream:
        raise bad_value("stream_options", "is for stream=true only; leave it out")
    if not isinstance(given, dict):
        raise bad_value("stream_options", f"must be an object, got {show(given)}")
    options = Fields(given)
    wanted = options.boolean("include_usage")
    options.take("include_obfuscation")
    if options.left():
        raise bad_value("stream_options", f"knows no {show(options.left()[0])}")
    return wanted


def _check_lengths(asked: CompletionRequest, limits: Limits) -> None:
    longest = max(len(prompt.tokens) for prompt in asked.prompts)
    if longest + asked.max_tokens > limits.max_context:
        raise ApiError(
            400,
            f"this server's context is {limits.max_context} tokens, but {show(longest)} of the "
            f"prompt and max_tokens={show(asked.max_tokens)} are more; shorten either",
            param="prompt",
            code="context_length_exceeded",
        )
