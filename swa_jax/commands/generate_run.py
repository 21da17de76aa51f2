"""What `swa-jax generate` does with what it was asked for."""

from dataclasses import dataclass
from typing import Any

from swa_jax.commands.generated_report import as_dict, as_text, summary
from swa_jax.commands.progress import show_progress
from swa_jax.generate import Generated, GenerateSettings, encode_prompts, generate
from swa_jax.loaded_model import load_model
from swa_jax.replay.interruptible import interruptible
from swa_jax.serving_pools import ServingOptions, config_for_requests, memory_for

__all__ = ("Asked", "GenerateSettings", "as_text", "run", "summary")


@dataclass(frozen=True)
class Asked:
    """Which prompts are continued with what."""

    checkpoint: str
    dtype: str
    prompts: list[str]
    sizes: ServingOptions
    settings: GenerateSettings


def run(asked: Asked, *, progress: bool) -> tuple[Generated, dict[str, Any]]:
    """Loads the model and continues the prompts.

    Args:
      asked: model, prompts, settings.
      progress: show how far it is.

    Returns:
      The texts, and all about them as plain data.

    Raises:
      ValueError: what was asked for cannot be done.
    """
    with show_progress(wanted=progress) as shown:
        shown("loading the checkpoint")
        model = interruptible(lambda: load_model(asked.checkpoint, asked.dtype))
        encoded = encode_prompts(model, asked.prompts)
        lengths = [len(prompt) + asked.settings.max_new_tokens for prompt in encoded]
        config = config_for_requests(model.kv_config, asked.sizes, lengths)
        with memory_for(config.pool):
            done = interruptible(lambda: generate(model, config, encoded, asked.settings, shown))
    return done, as_dict(model.name, asked.prompts, done)
