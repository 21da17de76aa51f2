"""How many tokens each pool gets out of a byte budget."""

import dataclasses
import operator

from swa_jax.config import MAX_SLOTS
from swa_jax.models.model_config import ModelConfig
from swa_jax.models.units import format_bytes

# On 1,000 requests of the Mooncake trace (gpt-oss-20b, 40 GiB, page 64) no share gave 530,688 hit
# tokens, 1/16 561,408, 1/10 560,896, with windows kept at the ends of branches alone: most of what
# there was at little of its cost.
CACHED_SHARE = 16


@dataclasses.dataclass(frozen=True)
class PoolSizes:
    """Usable tokens of each pool and the bytes of KV, with the padding page of each pool.

    For a pure-SWA model there is one pool: `full_tokens` and `swa_tokens` are both its size, and
    its bytes count once (`PoolConfig.pure_swa(sizes.swa_tokens, ...)`).
    """

    full_tokens: int
    swa_tokens: int
    kv_bytes: int


def plan_pools(
    model: ModelConfig,
    hbm_bytes: int,
    page_size: int,
    *,
    max_running: int,
    chunk_tokens: int,
    prefix_cache: bool = False,
) -> PoolSizes:
    """Splits a KV budget into the two pools, in whole pages.

    The SWA pool gets what `max_running` requests can hold at once when pages are freed as they
    leave the window (`swa_pages_needed`), the full pool the rest. An SWA page without a full page
    beside it is of no use, so in a budget too small for all these windows both pools get the same
    number of pages. A prefix can be continued only where its window is live, so with a prefix
    cache one byte in `CACHED_SHARE` of that rest goes to the windows of cached prefixes instead.
    Neither pool grows past the 2^31 - 1 slots that an int32 can name.

    Args:
      model: the model, with `kv_bytes_per_element` as the cache stores it.
      hbm_bytes: bytes for KV in all, over all devices that share the model.
      page_size: tokens in a page.
      max_running: requests decoded at once.
      chunk_tokens: prompt tokens prefilled in one step, over all requests.
      prefix_cache: finished requests stay in a prefix cache.

    Raises:
      ValueError: an argument that is no positive integer, or a budget that cannot hold one window
        and one page in each pool beside the padding page.

    Example:
      >>> from swa_jax.models import get_model, plan_pools
      >>> plan_pools(get_model("gpt-oss-20b"), 2**30, 16, max_running=64, chunk_tokens=2048)
      PoolSizes(full_tokens=31488, swa_tokens=12160, kv_bytes=1073479680)
    """
    budget = _positive("hbm_bytes", hbm_bytes)
    page = _positive("page_size", page_size)
    running, chunk = _positive("max_running", max_running), _positive("chunk_tokens", chunk_tokens)
    full_bytes = model.full_bytes_per_token * page
    swa_bytes = model.swa_bytes_per_token * page
    most_pages = (MAX_SLOTS - page) // page
    # One page in each pool is padding and holds nothing.
    both = min(budget // (full_bytes + swa_bytes) - 1, most_pages)
    least = window_pages(model, page)
    if both < least:
        need = (least + 1) * (full_bytes + swa_bytes)
        raise ValueError(
            f"{hbm_bytes} bytes ({format_bytes(budget)}) of KV cannot hold one window of "
            f"{model.sliding_window} tokens and one page of {page} for {model.name}; need at "
            f"least {need} bytes ({format_bytes(need)})"
            + (f". Did you mean {budget} GiB?" if need <= budget << 30 and budget < 2**20 else "")
        )
    if model.pure_swa:
        return PoolSizes(both * page, both * page, (both + 1) * swa_bytes)
    swa_pages = min(both, swa_pages_needed(model, page, running, chunk))
    if prefix_cache:
        rest = budget - (swa_pages + 1) * swa_bytes
        swa_pages = min(both, swa_pages + rest // CACHED_SHARE // swa_bytes)
    full_pages = min((budget - (swa_pages + 1) * swa_bytes) // full_bytes - 1, most_pages)
    used = (full_pages + 1) * full_bytes + (swa_pages + 1) * swa_bytes
    return PoolSizes(full_pages * page, swa_pages * page, used)


def window_pages(model: ModelConfig, page_size: int) -> int:
    """SWA pages that one request holds while it decodes: its window and the page being filled.

    W tokens kept and one new one, wherever they lie in their pages. Only a chunk that is whole
    pages needs no spare page: it is dropped before the next one begins.
    """
    whole_chunks = model.chunked and model.sliding_window % page_size == 0
    return -(-model.sliding_window // page_size) + (0 if whole_chunks else 1)


def swa_pages_needed(
    model: ModelConfig, page_size: int, max_running: int, chunk_tokens: int
) -> int:
    """Most SWA pages that a batch holds: every request its window, and one prefill step.

    The step's tokens may be dealt to the requests in any way. A request's first page beyond its
    `window_pages` takes `first` tokens, each further one a page of tokens, so a step spread over
    many requests rounds up more often than one that a single request takes.
    """
    first = -model.sliding_window % page_size + 2
    if first > page_size:  # nothing is gained by spreading
        extra = (chunk_tokens - 1) // page_size
    else:
        rows = min(max_running, chunk_tokens // first)
        extra = rows + (chunk_tokens - rows * first) // page_size
    return max_running * window_pages(model, page_size) + extra


def _positive(name: str, value: object) -> int:
    try:
        number = 0 if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = 0
    if number < 1:
        raise ValueError(f"{name} must be a positive integer, got {value!r}")
    return number
