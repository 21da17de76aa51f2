"""Prefill on one worker, decode on another: reserving, packing, receiving and committing KV.

Pure functions over an allocator, a prefix cache and KV by slot, each side's own; the same for whole
worlds of `swa_jax.serving`; and workers on the host that use them, in one process or in two.
"""

from swa_jax.disagg.abort import abort, abort_all, abort_older
from swa_jax.disagg.agree import Hello, check_agree, hello_of
from swa_jax.disagg.ask import Ask, Ticket, pieces, prefill_window
from swa_jax.disagg.bundles import BundleSize, HostAsk
from swa_jax.disagg.check import check, invariants
from swa_jax.disagg.commit import Committed, commit, has_arrived
from swa_jax.disagg.decode_peer import DecodePeer, Traffic
from swa_jax.disagg.decode_side import Arrivals, deliver, give_up, new_arrivals, reserve, seat
from swa_jax.disagg.decode_worker import DecodeWorker
from swa_jax.disagg.inbox import Inbox, new_inbox, reserved_pages, tick
from swa_jax.disagg.jobs import Job, Outcome
from swa_jax.disagg.links import DeviceLink, LinkError, local_channels
from swa_jax.disagg.one_process import join_here, run_jobs
from swa_jax.disagg.pack import Piece, pack
from swa_jax.disagg.preallocate import Reserved, preallocate
from swa_jax.disagg.prefill_peer import PrefillPeer
from swa_jax.disagg.prefill_side import Parcel, pack_request
from swa_jax.disagg.prefill_worker import PrefillWorker
from swa_jax.disagg.processes import join_prefill, serve_prefill
from swa_jax.disagg.receive import receive
from swa_jax.disagg.sizes import everything_bytes, piece_bytes, token_bytes
from swa_jax.disagg.transfer import TransferReceiver, TransferSender

__all__ = [
    "Arrivals",
    "Ask",
    "BundleSize",
    "Committed",
    "DecodePeer",
    "DecodeWorker",
    "DeviceLink",
    "Hello",
    "HostAsk",
    "Inbox",
    "Job",
    "LinkError",
    "Outcome",
    "Parcel",
    "Piece",
    "PrefillPeer",
    "PrefillWorker",
    "Reserved",
    "Ticket",
    "Traffic",
    "TransferReceiver",
    "TransferSender",
    "abort",
    "abort_all",
    "abort_older",
    "check",
    "check_agree",
    "commit",
    "deliver",
    "everything_bytes",
    "give_up",
    "has_arrived",
    "hello_of",
    "invariants",
    "join_here",
    "join_prefill",
    "local_channels",
    "new_arrivals",
    "new_inbox",
    "pack",
    "pack_request",
    "piece_bytes",
    "pieces",
    "preallocate",
    "prefill_window",
    "receive",
    "reserve",
    "reserved_pages",
    "run_jobs",
    "seat",
    "serve_prefill",
    "tick",
    "token_bytes",
]
