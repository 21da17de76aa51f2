"""How many pages of each kind the host keeps out of a byte budget."""

from swa_jax.host_cache.config import HostConfig
from swa_jax.inputs import whole_number
from swa_jax.models.model_config import ModelConfig
from swa_jax.models.units import format_bytes

# Tokens of a prefix that ends somewhere, on average: the prompts of the Mooncake conversation trace
# have some 12,000, of which much is shared.
TYPICAL_PREFIX = 8192


def plan_host(
    model: ModelConfig, num_bytes: int, page_size: int, *, prefix_tokens: int = TYPICAL_PREFIX
) -> HostConfig:
    """Splits host memory between full and SWA rows.

    A prefix can be continued where it has full KV on the whole way and SWA for one window at its
    end. So SWA gets that, and a page, for every `prefix_tokens` of full KV, not a row for each
    page.

    Args:
      model: with `kv_bytes_per_element` as the pools store it.
      num_bytes: for both kinds of row.
      page_size: tokens in a page, as on the device.
      prefix_tokens: tokens of a typical prefix, from one end of a branch to the next.

    Raises:
      ValueError: a model without full layers, or bytes that hold no window and no page.
    """
    if model.pure_swa:
        raise ValueError(
            f"{model.name} has no full layers: it keeps no prefix longer than a window, and a host "
            "tier has nothing to keep for it"
        )
    budget = whole_number("num_bytes", num_bytes, 1, 2**62)
    page = whole_number("page_size", page_size, 1)
    prefix_pages = -(-whole_number("prefix_tokens", prefix_tokens, 1) // page)
    window = -(-model.past_window // page)
    full_bytes, swa_bytes = model.full_bytes_per_token * page, model.swa_bytes_per_token * page
    of_window = min(window + 1, prefix_pages)  # `HostConfig.kept_pages`
    full_pages = budget * prefix_pages // (prefix_pages * full_bytes + of_window * swa_bytes)
    full_pages = min(full_pages, (budget - window * swa_bytes) // full_bytes)
    if full_pages < window:
        need = window * (full_bytes + swa_bytes)
        raise ValueError(
            f"{num_bytes} bytes ({format_bytes(budget)}) cannot hold one window of "
            f"{model.sliding_window} tokens for {model.name}; need at least {need} bytes "
            f"({format_bytes(need)})"
        )
    swa_pages = min(full_pages, (budget - full_pages * full_bytes) // swa_bytes)
    return HostConfig(
        full_pages * page, swa_pages * page, page, model.past_window, chunked=model.chunked
    )
