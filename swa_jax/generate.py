"""Texts for prompts that are all known beforehand, in one run of the serving loop."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter

import jax
import jax.numpy as jnp

from swa_jax.loaded_model import LoadedModel
from swa_jax.serving import (
    FINISH_REASONS,
    Requests,
    ServingConfig,
    Stats,
    World,
    make_requests,
    new_world,
    outputs,
    run_steps,
    submit,
)
from swa_jax.serving.queue import RUNNING, WAITING, Queue
from swa_jax.text import CompletionText

_STEPS = 256  # between two looks whether anything is left to do


@dataclass(frozen=True)
class GenerateSettings:
    """How tokens are chosen."""

    max_new_tokens: int
    temperature: float
    top_k: int
    top_p: float
    seed: int  # of the first prompt; each further one has the next number


@dataclass(frozen=True)
class GeneratedText:
    """What came of one prompt."""

    prompt_tokens: int
    cached_tokens: int
    tokens: tuple[int, ...]
    text: str
    finish_reason: str


@dataclass(frozen=True)
class Generated:
    """What came of all."""

    texts: tuple[GeneratedText, ...]
    compile_seconds: float
    run_seconds: float
    stats: Stats  # on the host

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens, compilation aside."""
        return sum(len(text.tokens) for text in self.texts) / max(self.run_seconds, 1e-9)


def encode_prompts(model: LoadedModel, prompts: Sequence[str]) -> list[list[int]]:
    """Token ids of each prompt.

    Raises:
      ValueError: a prompt without tokens, or with one that the model does not know.
    """
    encoded = [model.tokenizer.encode(prompt) for prompt in prompts]
    for place, tokens in enumerate(encoded, 1):
        if not tokens:
            raise ValueError(f"prompt {place} has no tokens; at least one is needed")
        if max(tokens) >= model.config.vocab_size:
            raise ValueError(
                f"prompt {place} has the token {max(tokens)}, and the model knows 0 .. "
                f"{model.config.vocab_size - 1}: the tokenizer.json is of another model"
            )
    return encoded


def generate(
    model: LoadedModel,
    config: ServingConfig,
    prompts: Sequence[Sequence[int]],
    settings: GenerateSettings,
    on_progress: Callable[[str, int, int | None], None] | None = None,
) -> Generated:
    """Serves the prompts together.

    Args:
      model: checkpoint and tokenizer.
      config: of `config_for_requests`.
      prompts: token ids.
      settings: for all prompts.
      on_progress: called with what is being done, texts that have ended, and how many there are;
        None of a compilation.
    """
    told = on_progress or (lambda *_: None)
    told("compiling", 0, None)
    start = perf_counter()
    requests = make_requests(
        prompts,
        max_new_tokens=settings.max_new_tokens,
        temperature=settings.temperature,
        top_k=settings.top_k,
        top_p=settings.top_p,
        seed=[(settings.seed + place) % 2**31 for place in range(len(prompts))],
    )
    world = new_world(model.decoder, config, len(prompts))
    world, _ = jax.jit(submit, static_argnums=0, donate_argnums=1)(config, world, requests)
    world = jax.block_until_ready(run_steps(model.decoder, model.params, config, world, 0))
    compiled = perf_counter()
    while left := _left(world.queue):
        told("generating texts", len(prompts) - left, len(prompts))
        world = run_steps(model.decoder, model.params, config, world, _STEPS)
    jax.block_until_ready(world)
    ended = perf_counter()
    return Generated(
        _texts(model, config, world, requests),
        compile_seconds=compiled - start,
        run_seconds=ended - compiled,
        stats=jax.device_get(world.stats),
    )


def _left(queue: Queue) -> int:
    """Prompts that wait or run."""
    return int(jnp.sum((queue.status == WAITING) | (queue.status == RUNNING)))


def _texts(
    model: LoadedModel, config: ServingConfig, world: World, requests: Requests
) -> tuple[GeneratedText, ...]:
    places = jnp.arange(requests.prompt_lens.shape[0], dtype=jnp.int32)
    found = jax.device_get(outputs(config, world, places))
    rows = jax.device_get((requests.prompt_lens, world.queue.cached, world.queue.reason))
    texts = []
    for row, count, prompt, cached, reason in zip(*found, *rows, strict=True):
        tokens = tuple(row[:count].tolist())
        text = CompletionText(model.tokenizer).add(tokens, int(reason)).text
        reason = FINISH_REASONS[int(reason)]
        texts.append(GeneratedText(int(prompt), max(0, int(cached)), tokens, text, reason))
    return tuple(texts)
