"""The two public traces, shrunk to pools that fit into a test.

A block of 512 tokens of a prompt becomes `block` tokens, equal where the trace says that they are;
arrival times are left out: the queue is kept full. The Azure file holds the first 1,000 requests of
AzureLLMInferenceTrace_code.csv (Azure/AzurePublicDataset, CC-BY-4.0), byte for byte.
"""

from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from swa_jax.replay.content import content_of
from swa_jax.replay.trace import load_trace

AZURE = Path(__file__).parent / "azure_code_2023.csv"
_TOKENS_OF_OUTPUT = 64  # of a trace, for one here
_TOKENS_OF_AZURE = 256  # of a prompt, likewise


class Traces(NamedTuple):
    """Requests of both. M of Mooncake with B blocks at most, A of Azure. int32."""

    blocks: jax.Array  # [M, B] equal ids: equal prompts up to and with that block
    mooncake_prompts: jax.Array  # [M] blocks of each prompt
    mooncake_outputs: jax.Array  # [M] tokens
    azure_prompts: jax.Array  # [A] tokens
    azure_outputs: jax.Array  # [A] tokens


def load_traces() -> Traces:
    """Both, small enough for tiny pools. On the host."""
    mooncake, azure = load_trace("mooncake-conversation"), load_trace(AZURE)
    content = content_of(mooncake)
    assert content is not None

    def shrunk(tokens: np.ndarray, by: int) -> jax.Array:
        return jnp.asarray(-(-tokens // by), jnp.int32)

    return Traces(
        blocks=content.blocks,
        mooncake_prompts=shrunk(mooncake.prompt_lens, content.block_tokens),
        mooncake_outputs=shrunk(mooncake.output_lens, _TOKENS_OF_OUTPUT),
        azure_prompts=shrunk(azure.prompt_lens, _TOKENS_OF_AZURE),
        azure_outputs=shrunk(azure.output_lens, _TOKENS_OF_OUTPUT),
    )
