"""What `swa-jax generate` prints."""

from collections.abc import Sequence
from typing import Any

from swa_jax.generate import Generated


def as_text(outcome: Generated) -> str:
    """The texts alone; where there are several, each under a line of its own."""
    if len(outcome.texts) == 1:
        return outcome.texts[0].text + "\n"
    parts = [
        f"--- {place} ({len(text.tokens)} tokens, {text.finish_reason})\n{text.text}\n"
        for place, text in enumerate(outcome.texts, 1)
    ]
    return "".join(parts)


def figures(outcome: Generated) -> dict[str, float]:
    """What it took."""
    stats = outcome.stats
    return {
        "prompt_tokens": sum(text.prompt_tokens for text in outcome.texts),
        "cached_tokens": sum(text.cached_tokens for text in outcome.texts),
        "generated_tokens": sum(len(text.tokens) for text in outcome.texts),
        "tokens_per_second": round(outcome.tokens_per_second, 3),
        "compile_seconds": round(outcome.compile_seconds, 3),
        "run_seconds": round(outcome.run_seconds, 3),
        "steps": int(stats.steps),
        "retractions": int(stats.retracted),
        "draft_tokens": int(stats.drafted),
        "accepted_draft_tokens": int(stats.accepted),
    }


def summary(outcome: Generated) -> str:
    """One line for people."""
    of = figures(outcome)
    drafts = ""
    if of["draft_tokens"]:
        drafts = f", {of['accepted_draft_tokens']} of {of['draft_tokens']} drafts right"
    return (
        f"swa-jax: {of['generated_tokens']} tokens at {of['tokens_per_second']:.1f} a second after "
        f"{of['compile_seconds']:.1f} s of compilation; {of['cached_tokens']} of "
        f"{of['prompt_tokens']} prompt tokens from the cache, {of['retractions']} retractions"
        f"{drafts}\n"
    )


def as_dict(model_name: str, prompts: Sequence[str], outcome: Generated) -> dict[str, Any]:
    """Everything, ready for JSON."""
    texts = [
        {
            "prompt": prompt,
            "text": text.text,
            "tokens": list(text.tokens),
            "finish_reason": text.finish_reason,
            "prompt_tokens": text.prompt_tokens,
            "cached_tokens": text.cached_tokens,
        }
        for prompt, text in zip(prompts, outcome.texts, strict=True)
    ]
    return {"ok": True, "model": model_name, "texts": texts} | figures(outcome)
