"""A serving loop that is one compiled program: admission, prefill, decode, speculation, memory."""

from swa_jax.serving.admit import admit
from swa_jax.serving.config import ServingConfig
from swa_jax.serving.decode import decode_step
from swa_jax.serving.draft import Draft, DraftView
from swa_jax.serving.draft_head import DraftHead, random_head_params
from swa_jax.serving.draft_model import DraftModel
from swa_jax.serving.finish import finish, lift_fence, raise_fence
from swa_jax.serving.hosted import HostedRequest, resume_from_host, retract_to_host
from swa_jax.serving.model import Decoder, ServingModel
from swa_jax.serving.moved_slots import MovedSlots
from swa_jax.serving.ngram import NGramDraft
from swa_jax.serving.prefill import prefill_step
from swa_jax.serving.ready import end_sent, ready
from swa_jax.serving.requests import FINISH_REASONS, Requests, Sampling, make_requests
from swa_jax.serving.room import make_room
from swa_jax.serving.serve import (
    Served,
    cancel,
    finish_reasons,
    outputs,
    release,
    run_steps,
    serve,
    submit,
    unfinished,
)
from swa_jax.serving.step import leave, step
from swa_jax.serving.world import Stats, World, new_world
from swa_jax.serving.world_pools import with_world_pools, world_pools

__all__ = (
    "FINISH_REASONS",
    "Decoder",
    "Draft",
    "DraftHead",
    "DraftModel",
    "DraftView",
    "HostedRequest",
    "MovedSlots",
    "NGramDraft",
    "Requests",
    "Sampling",
    "Served",
    "ServingConfig",
    "ServingModel",
    "Stats",
    "World",
    "admit",
    "cancel",
    "decode_step",
    "end_sent",
    "finish",
    "finish_reasons",
    "leave",
    "lift_fence",
    "make_requests",
    "make_room",
    "new_world",
    "outputs",
    "prefill_step",
    "raise_fence",
    "random_head_params",
    "ready",
    "release",
    "resume_from_host",
    "retract_to_host",
    "run_steps",
    "serve",
    "step",
    "submit",
    "unfinished",
    "with_world_pools",
    "world_pools",
)
