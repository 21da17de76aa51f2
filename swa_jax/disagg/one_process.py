"""Two workers in one process, on devices of their own: both take turns in one thread."""

from collections.abc import Callable
from typing import Any

from swa_jax.disagg.agree import check_agree, hello_of
from swa_jax.disagg.decode_peer import DecodePeer
from swa_jax.disagg.decode_worker import DecodeWorker
from swa_jax.disagg.jobs import Outcome
from swa_jax.disagg.links import DeviceLink, local_channels
from swa_jax.disagg.prefill_peer import PrefillPeer
from swa_jax.disagg.prefill_worker import PrefillWorker


def join_here(
    prefill: PrefillWorker,
    decode: DecodeWorker,
    sharding: Any,  # noqa: ANN401
    *,
    timeout: float = 60.0,
    on_stage: Callable[[int, str], bool] | None = None,
) -> tuple[PrefillPeer, DecodePeer]:
    """Both ends, for `run_jobs`, or for a loop that gives each its `turn`.

    Args:
      prefill: worker.
      decode: worker.
      sharding: where KV goes on the decode side: a device, a sharding or None, as
        `jax.device_put` takes it.
      timeout: as for `DecodePeer`.
      on_stage: as for `DecodePeer`.

    Raises:
      ValueError: the two workers do not fit each other, see `check_agree`.
    """
    if not isinstance(prefill, PrefillWorker) or not isinstance(decode, DecodeWorker):
        raise ValueError(
            "join_here takes a PrefillWorker and a DecodeWorker, in this order; got "
            f"{type(prefill).__name__} and {type(decode).__name__}"
        )
    check_agree(hello_of(prefill), decode)
    here, there = local_channels()
    link = DeviceLink(sharding)
    one = PrefillPeer(prefill, there, link)
    return one, DecodePeer(decode, here, link, timeout=timeout, on_stage=on_stage)


def run_jobs(prefill: PrefillPeer, decode: DecodePeer) -> dict[int, Outcome]:
    """Takes turns until every job has its outcome and nothing is open; outcomes by name."""
    outcomes: dict[int, Outcome] = {}
    while decode.open_jobs or prefill.worker.open_jobs:
        prefill.turn()
        outcomes |= {outcome.name: outcome for outcome in decode.turn()}
    outcomes |= {outcome.name: outcome for outcome in decode.turn()}
    return outcomes
