"""Two workers in two processes: messages by the standard library, KV by JAX's transfer server.

The process that decodes listens: `peer = join_prefill(worker, listener.accept())`, and gives the
peer its turns. The process that prefills says `serve_prefill(worker, listener_address, authkey)`.
"""

from collections.abc import Callable
from multiprocessing.connection import Client

from jax.sharding import Sharding

from swa_jax.disagg.agree import Hello, check_agree, hello_of
from swa_jax.disagg.decode_peer import DecodePeer
from swa_jax.disagg.decode_worker import DecodeWorker
from swa_jax.disagg.links import Channel
from swa_jax.disagg.prefill_peer import PrefillPeer
from swa_jax.disagg.prefill_worker import PrefillWorker
from swa_jax.disagg.transfer import TransferReceiver, TransferSender


def serve_prefill(
    worker: PrefillWorker, address: tuple[str, int], authkey: bytes, *, host: str = "127.0.0.1"
) -> PrefillWorker:
    """Connects to a decode side, and serves it until it leaves or is gone.

    Args:
      worker: that computes.
      address: where the decode side listens, as `multiprocessing.connection.Client` takes it.
      authkey: that both know.
      host: address of this machine as the decode side sees it.

    Returns:
      The worker: no page is held but by its cache.
    """
    sender = TransferSender(host)
    with Client(address, authkey=authkey) as channel:
        channel.send(hello_of(worker, sender.address))
        PrefillPeer(worker, channel, sender).run()
    return worker


def join_prefill(
    worker: DecodeWorker,
    channel: Channel,
    *,
    timeout: float = 60.0,
    on_stage: Callable[[int, str], bool] | None = None,
    sharding: Sharding | None = None,
    host: str = "127.0.0.1",
) -> DecodePeer:
    """The decode side's end of `serve_prefill`.

    Args:
      worker: that decodes.
      channel: of a prefill side that has just connected.
      timeout: as for `DecodePeer`.
      on_stage: as for `DecodePeer`.
      sharding: as for `TransferReceiver`.
      host: address of this machine as the prefill side sees it.

    Raises:
      ValueError: the two workers do not fit each other, see `check_agree`.
    """
    hello = channel.recv()
    if not isinstance(hello, Hello):
        raise ValueError(f"expected a prefill worker's Hello, got {type(hello).__name__}")
    check_agree(hello, worker)
    receiver = TransferReceiver(hello.address, sharding=sharding, host=host)
    return DecodePeer(worker, channel, receiver, timeout=timeout, on_stage=on_stage)
