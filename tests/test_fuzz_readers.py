"""Bytes from outside: whatever a file or a body holds, a reader takes it or says what is wrong.

No crash, no other error than those that are documented, messages of one line, and memory that does
not follow what the bytes claim. `HYPOTHESIS_PROFILE=thorough` tries many more.
"""

import asyncio
import json
import os
import shutil
import struct
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from decoder_server import GEMMA, GPT_OSS
from fuzzing import as_text, changed, in_child, outcome, peak_mib, spoiled
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from saving import POOL, layers
from starlette.requests import Request
from storage_pages import FINGERPRINT, KEYS, page_of, same
from tiny_checkpoint import byte_tokenizer

import swa_jax as swa
from swa_jax import prefix_cache
from swa_jax.describe import as_json
from swa_jax.host_cache import FileStorage
from swa_jax.http.completion_request import CompletionRequest, Limits, completion_request
from swa_jax.http.errors import ApiError
from swa_jax.http.json_body import MOST_BYTES, MOST_LISTS, MOST_VALUES, read_object
from swa_jax.models import load_checkpoint, random_params, save_checkpoint
from swa_jax.models.decoder import DecoderConfig
from swa_jax.models.decoder.json_file import MAX_CONFIG_BYTES
from swa_jax.models.decoder.published_config import config_from_hf, config_to_hf
from swa_jax.replay.trace import Trace, TraceError, load_trace
from swa_jax.saved_state import directory, open_state, restore_state, save_state
from swa_jax.text import TokenizerOf, load_tokenizer

# Where Orbax fails to read one array, what it has begun with others still calls its closed loop.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
SMALL = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
FEW = settings(SMALL, max_examples=max(8, settings().max_examples // 3))

# ---- traces ------------------------------------------------------------------------------------

REQUEST = {"timestamp": 5, "input_length": 513, "output_length": 2, "hash_ids": [0, 1]}
AZURE = b"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n"


@SMALL
@given(lines=st.lists(changed(REQUEST), min_size=1, max_size=3), edits=st.data())
def test_a_trace_of_odd_values(tmp_path, lines, edits):
    content = b"\n".join(map(as_text, [REQUEST, *lines]))
    if edits.draw(st.booleans()):
        content = edits.draw(spoiled(content))
    is_a_trace_or_refused(tmp_path, content)


@SMALL
@given(content=spoiled(AZURE * 2))
def test_a_spoiled_table_of_lengths(tmp_path, content):
    is_a_trace_or_refused(tmp_path, content)


def is_a_trace_or_refused(tmp_path, content):
    (tmp_path / "some.trace").write_bytes(content)
    trace = outcome("trace", lambda: load_trace(tmp_path / "some.trace"), TraceError)
    if trace is not None:
        assert isinstance(trace, Trace)
        assert (trace.prompt_lens >= 1).all()
        assert (trace.output_lens >= 0).all()
        assert (trace.arrival_ms >= 0).all()


# ---- checkpoints -------------------------------------------------------------------------------

PUBLISHED = [config_to_hf(GEMMA), config_to_hf(GPT_OSS)]
KEYS_OF_CONFIGS = (
    *("architectures", "layer_types", "rope_scaling", "rope_parameters", "quantization_config"),
    *("sliding_window_pattern", "attn_logit_softcapping", "factor", "beta_fast", "truncate"),
    *("rope_type", "type", "rope_theta", "text_config", "full_attention", "attention_factor"),
)


@SMALL
@given(data=st.data(), base=st.sampled_from(PUBLISHED))
def test_a_config_of_odd_values(data, base):
    published = data.draw(changed(base, KEYS_OF_CONFIGS))
    config = outcome("config.json", lambda: config_from_hf(published), ValueError)
    if config is not None:
        assert isinstance(config, DecoderConfig)
        hash(config)
        assert len(config.layer_kinds) <= 4096


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    save_checkpoint(folder, GEMMA, random_params(GEMMA, jax.random.key(0)))
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


def header_of(content):
    (length,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def with_header(header, rest):
    text = as_text(header)
    return struct.pack("<Q", len(text)) + text + rest


@FEW
@given(data=st.data(), kind=st.sampled_from(["config.json", "model.safetensors", "header"]))
def test_a_spoiled_checkpoint(checkpoint, tmp_path, data, kind):
    """One that is accepted has the shapes and the kind of numbers that its configuration says."""
    for path in checkpoint.iterdir():
        shutil.copy(path, tmp_path)
    path = tmp_path / ("config.json" if kind == "config.json" else "model.safetensors")
    content = path.read_bytes()
    if kind == "header":
        header, rest = header_of(content)
        content = with_header(data.draw(changed(header, ("model.norm.weight", "dtype"))), rest)
    else:
        content = data.draw(spoiled(content if kind == "config.json" else content[:2500]))
    path.write_bytes(content)
    outcome("checkpoint", lambda: load_checkpoint(tmp_path), ValueError, FileNotFoundError)


@FEW
@given(data=st.data())
def test_a_spoiled_index_names_no_file_outside(checkpoint, tmp_path, data):
    for name in ("config.json", "model.safetensors"):
        to = "shard.safetensors" if name == "model.safetensors" else name
        shutil.copy(checkpoint / name, tmp_path / to)
    index = {"metadata": {}, "weight_map": {"model.norm.weight": "shard.safetensors"}}
    path = tmp_path / "model.safetensors.index.json"
    path.write_bytes(as_text(data.draw(changed(index, ("weight_map",)))))
    outcome("index", lambda: load_checkpoint(tmp_path), ValueError, FileNotFoundError)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", b"[" * 10**5, "nested too deep"),
        ("config.json", b" " * (MAX_CONFIG_BYTES + 1), "at most 1048576 bytes"),
        ("config.json", b'{"a": ' + b"9" * 5000 + b"}", "is not JSON: Exceeds the limit"),
        ("config.json", b"\xff", "is not JSON"),
        ("generation_config.json", b'{"eos_token_id": [-1]}', "from 0 to 2\\^31 - 1"),
        ("model.safetensors", b"", "is no safetensors file"),
        ("model.safetensors", struct.pack("<Q", 2**63) + b"{}", "is no safetensors file"),
        ("model.safetensors", struct.pack("<Q", 2) + b"{}", "missing model.embed_tokens.weight"),
    ],
)
def test_files_of_a_checkpoint_that_are_wrong(checkpoint, tmp_path, name, content, message):
    shutil.copytree(checkpoint, tmp_path, dirs_exist_ok=True)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize("shard", ["../model.safetensors", "/dev/zero", "", "..", 3, "a\nb"])
def test_an_index_that_leads_out_of_the_folder_is_refused(checkpoint, tmp_path, shard):
    shutil.copy(checkpoint / "config.json", tmp_path)
    (tmp_path / "model.safetensors.index.json").write_bytes(as_text({"weight_map": {"a": shard}}))
    with pytest.raises(ValueError, match="must name files in"):
        load_checkpoint(tmp_path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes in the file system here")
@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_pipe_in_a_checkpoint_is_not_waited_for(checkpoint, tmp_path, name):
    shutil.copytree(checkpoint, tmp_path, dirs_exist_ok=True)
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)
    with pytest.raises(ValueError, match="it is no regular file"):
        load_checkpoint(tmp_path)


def test_weights_of_another_kind_are_refused(checkpoint, tmp_path):
    shutil.copytree(checkpoint, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "model.safetensors"
    header, rest = header_of(path.read_bytes())
    header["model.norm.weight"]["dtype"] = "I32"  # as wide as it was
    path.write_bytes(with_header(header, rest))
    with pytest.raises(ValueError, match=r"model.norm.weight must be one of F64, .*got I32"):
        load_checkpoint(tmp_path)


@FEW
@given(data=st.data())
def test_a_spoiled_tokenizer(checkpoint, tmp_path, data):
    content = (checkpoint / "tokenizer.json").read_bytes()
    (tmp_path / "tokenizer.json").write_bytes(data.draw(spoiled(content)))
    outcome("tokenizer", lambda: load_tokenizer(tmp_path), ValueError)


# ---- bodies of requests ------------------------------------------------------------------------

VOCAB = byte_tokenizer().get_vocab_size()
LIMITS = Limits("tiny", VOCAB, 96, 8)
BODY = {
    "model": "tiny",
    "prompt": "then you and I",
    "max_tokens": 5,
    "n": 2,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 3,
    "seed": 7,
    "stop": ["x", "yz"],
    "stream": True,
    "stream_options": {"include_usage": True},
    "user": "me",
    "logit_bias": {},
    "best_of": 1,
}
PROMPTS = st.sampled_from([[1, 2], [[1], [2, 3]], ["a", "b"], [["a"]], [-1], [VOCAB], [True], [[]]])
TOKENIZER = TokenizerOf(byte_tokenizer())


class Body(Request):
    """As much of a request as `read_object` looks at."""

    def __init__(self, content, part=4096):
        super().__init__({"type": "http"})
        self.parts = [content[at : at + part] for at in range(0, len(content), part)]

    async def stream(self):
        for part in self.parts:
            yield part


def asked(content):
    body = asyncio.run(read_object(Body(content)))
    return completion_request(body, LIMITS, TOKENIZER)


class ReadableError(Exception):
    """An `ApiError` with its message as text."""


def answered(content):
    try:
        return asked(content)
    except ApiError as error:
        body, status = json.dumps(error.body(), allow_nan=False), error.status
        refusal = ReadableError(error.message)
    assert 400 <= status < 500
    assert len(body) < 1500
    raise refusal


@SMALL
@given(data=st.data())
def test_a_body_of_odd_values(data):
    body = data.draw(changed(BODY, ("prompt", "suffix", "logprobs", "zzz", "x" * 200)))
    if data.draw(st.booleans()):
        body["prompt"] = data.draw(PROMPTS)
    content = as_text(body)
    if data.draw(st.integers(0, 3)) == 0:
        content = data.draw(spoiled(content))
    found = outcome("HTTP body", lambda: answered(content), ReadableError)
    if found is not None:
        assert isinstance(found, CompletionRequest)
        tokens = [token for prompt in found.prompts for token in prompt.tokens]
        assert 0 <= min(tokens) <= max(tokens) < LIMITS.vocab_size
        assert len(found.prompts) * found.n <= LIMITS.places
        assert 0 <= found.seed < 2**31
        assert 0 < found.top_p <= 1
        assert 0 <= found.temperature <= 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[" * 60_000, "the body is not JSON: maximum recursion depth exceeded"),
        (b'{"a":' * 60_000, "the body is not JSON"),
        (b"\xff\xfe" * 9, "the body is not JSON"),
        (b"1" * 10**5, "the body is not JSON: Exceeds the limit"),
        (b"[" + b"{}," * 60_000 + b"{}]", r"must be a JSON object, got \[\{\}, "),
        (b'{"model": "tiny", "prompt": "' + b"x" * 10**6 + b'"}', "at most 24576 characters"),
        (as_text({"model": "tiny", "prompt": "a", "x" * 10**6: 1}), "'xxxx.*is no argument"),
        (b'{"prompt": ["\\"",' + b"[]," * MOST_LISTS + b"[]]}", "at most 65536 lists and objects"),
        (b'{"prompt": ["",' + b'"a",' * MOST_VALUES + b'""]}', "at most 2097152 values"),
        (as_text({"x": "," * (MOST_VALUES + 1)}), "model must be a string"),
        (as_text({"x": "\\" + '[{"' * MOST_LISTS}), "model must be a string"),
        ('{"model": "tiny"}'.encode("utf-16"), "is not JSON: 'utf-8' codec"),
    ],
)
def test_bodies_that_are_too_much(content, message):
    with pytest.raises(ReadableError, match=message):
        answered(content)


def test_a_body_is_read_no_further_than_its_limit():
    class Endless(Body):
        read = 0

        async def stream(self):
            while True:
                self.read += 2**20
                yield b" " * 2**20

    body = Endless(b"")
    with pytest.raises(ApiError) as error:
        asyncio.run(read_object(body))
    assert error.value.status == 413
    assert body.read <= MOST_BYTES + 2**20


# ---- pages in storage --------------------------------------------------------------------------

LAYOUT = {name: (array.dtype, array.shape) for name, array in page_of(0).items()}


@pytest.fixture(scope="module")
def page_bytes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    with FileStorage(folder, FINGERPRINT, 10**6) as store:
        store.put(KEYS[0], page_of(0))
    (path,) = folder.iterdir()
    return path.name, path.read_bytes()


def read_page(folder, name, content, layout):
    (folder / name).write_bytes(content)
    with FileStorage(folder, FINGERPRINT, 10**6, layout=layout) as store:
        found = store.get(KEYS[0])
        assert (found is None) == (store.corrupt + store.foreign == 1)
        assert store.has(KEYS[0]) == (found is not None) == (folder / name).exists()
        assert store.used_bytes == (0 if found is None else len(content))
    return found


@SMALL
@given(data=st.data(), layout=st.sampled_from([None, LAYOUT]), kind=st.integers(0, 2))
def test_a_spoiled_page_is_not_there(tmp_path, page_bytes, data, layout, kind):
    name, content = page_bytes
    header, rest = header_of(content)
    if kind == 0:
        spoilt = data.draw(spoiled(content))
    elif kind == 1:
        spoilt = with_header(data.draw(changed(header, ("full.9", "dtype", "page"))), rest)
    else:  # what the page says of itself, under a checksum that a stranger can make too
        about = data.draw(changed(json.loads(header["__metadata__"]["page"]), ("arrays", "full.0")))
        header["__metadata__"]["page"] = json.dumps(about)
        spoilt = with_header(header, rest)
    found = outcome("page file", lambda: read_page(tmp_path, name, spoilt, layout))
    assert found is None or same(found, page_of(0))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes in the file system here")
def test_a_page_that_became_something_else_is_not_waited_for(tmp_path, page_bytes):
    name, content = page_bytes
    (tmp_path / name).write_bytes(content)
    with FileStorage(tmp_path, FINGERPRINT, 10**6) as store:
        (tmp_path / name).unlink()
        os.mkfifo(tmp_path / name)
        assert store.get(KEYS[0]) is None
        assert store.corrupt == 1


@pytest.mark.parametrize("layout", [None, LAYOUT])
def test_a_page_that_has_grown_is_not_read(tmp_path, page_bytes, layout):
    name, content = page_bytes
    (tmp_path / name).write_bytes(content)
    with FileStorage(tmp_path, FINGERPRINT, 10**12, layout=layout) as store:
        with (tmp_path / name).open("r+b") as stream:
            stream.truncate(2**40)  # takes no room on the disk
        assert store.get(KEYS[0]) is None
        assert store.corrupt == 1
    (tmp_path / name).write_bytes(content)
    with (tmp_path / name).open("r+b") as stream:
        stream.truncate(2**36)  # and was so before the store began
    with FileStorage(tmp_path, FINGERPRINT, 10**12, layout=LAYOUT) as store:
        assert store.get(KEYS[0]) is None


# ---- saved states ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    state, grant = swa.alloc_extend(swa.init(POOL), [0], [20], [-1], capacity=20)
    assert grant.ok
    save_state(folder, state, prefix_cache.init(POOL), layers(0))
    return folder


def restore(folder):
    return restore_state(folder, swa.init(POOL), prefix_cache.init(POOL), layers(1))


CALLS = st.sampled_from([restore, open_state])  # with what it shall be, and without


DAMAGE = (ValueError, FileNotFoundError)


@FEW
@given(data=st.data(), call=CALLS)
def test_a_spoiled_save(saved, tmp_path, data, call):
    folder = tmp_path / "copy"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(saved, folder)
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    path = files[data.draw(st.integers(0, len(files) - 1))]
    path.write_bytes(data.draw(spoiled(path.read_bytes())))
    outcome("saved state", lambda: call(folder), *DAMAGE)


def forge(folder, change):
    """What the save says of itself, changed, and sealed again as anybody can."""
    (path,) = folder.rglob("about/metadata")
    about = json.loads(path.read_text())
    about["content"] = change(about["content"])
    about["seal"] = directory._seal(about["content"])
    path.write_text(as_json(about))


@FEW
@given(data=st.data(), call=CALLS)
def test_a_save_that_says_something_else_of_itself(saved, tmp_path, data, call):
    folder = tmp_path / "copy"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(saved, folder)
    names = ("pool", "cache", "state.faults", "shape", "dtype")
    forge(folder, lambda content: data.draw(changed(content, names)))
    outcome("forged state", lambda: call(folder), *DAMAGE)


def larger(content):
    content["arrays"]["state.full.ring"]["shape"] = [2**33]
    return content


def of_gigabytes(content):
    """A pool of 2^28 - 2 pages and a cache over it: 20 GB, were they made."""
    tokens = (2**28 - 2) * 8
    sizes = {"page_size": 8, "full_tokens": tokens, "swa_tokens": tokens}
    content["made"]["pool"] |= sizes
    return content


def test_pools_that_only_the_description_has_are_not_made(saved, tmp_path):
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    forge(tmp_path, of_gigabytes)
    before = peak_mib()
    with pytest.raises(ValueError, match=r"array state\S+ must be int32\[26843545\d\]"):
        open_state(tmp_path)
    assert peak_mib() < before + 512


def other_kv(content):
    content["arrays"]["kv.swa.0"]["shape"][0] -= 1
    return content


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (larger, "does not say what its arrays are"),
        (other_kv, "kv.swa.0 is not as saved"),
        (lambda content: [], "does not say what it holds"),
        (lambda content: {**content, "arrays": {}}, "array state.* must be .* is not there"),
    ],
)
def test_a_forged_save_is_refused(saved, tmp_path, change, message):
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    forge(tmp_path, change)
    with pytest.raises(ValueError, match=message):
        restore(tmp_path)


def test_arrays_that_are_larger_than_they_are_said_to_be_are_not_read(saved, tmp_path):
    other = tmp_path / "other"
    save_state(other, swa.init(swa.PoolConfig(640, 480, 4, 6)), made=None)
    shutil.copytree(saved, tmp_path / "mixed")
    (ours,) = (tmp_path / "mixed").glob("*/arrays")
    (theirs,) = other.glob("*/arrays")
    shutil.rmtree(ours)
    shutil.copytree(theirs, ours)
    with pytest.raises(ValueError, match=r"is damaged: "):
        restore_state(tmp_path / "mixed", swa.init(POOL), prefix_cache.init(POOL), layers(1))


def test_a_saved_tree_that_goes_round_is_refused(tmp_path):
    """Nobody who walks up from one of its nodes would ever come to the root."""
    cache, pair = prefix_cache.init(POOL), jnp.asarray([1, 2])
    cache = replace(
        cache,
        in_tree=cache.in_tree.at[pair].set(True, mode="drop"),
        parent=cache.parent.at[pair].set(pair[::-1], mode="drop"),
    )
    save_state(tmp_path, swa.init(POOL), cache)
    with pytest.raises(ValueError, match=r"is damaged: its state breaks .*links"):
        restore_state(tmp_path, swa.init(POOL), prefix_cache.init(POOL))


# ---- memory ------------------------------------------------------------------------------------

READ_BOMBS = """
import asyncio, json, sys
from pathlib import Path
from swa_jax.host_cache import page_file
from swa_jax.models.decoder.json_file import MAX_CONFIG_BYTES, MAX_INDEX_BYTES, read_object
from swa_jax.replay.trace import load_trace
folder = Path(sys.argv[1])
limit()
many = b'{"a": [' + b"[]," * (2**20 // 3) + b"[]]}"
(folder / "trace").write_bytes(many + b"\\n")
(folder / "config.json").write_bytes(many[:MAX_CONFIG_BYTES])
(folder / "long.json").write_bytes(b" " * 2**27)
for call, error in (
    (lambda: load_trace(folder / "trace"), "missing timestamp"),
    (lambda: read_object(folder / "config.json", MAX_CONFIG_BYTES), "is not JSON"),
    (lambda: read_object(folder / "long.json", MAX_CONFIG_BYTES), "at most 1048576 bytes"),
):
    try:
        call()
        sys.exit("it was accepted")
    except ValueError as found:
        if error not in str(found):
            sys.exit(str(found)[:200])
"""


def test_what_is_read_takes_no_more_memory_than_its_limits_allow(tmp_path):
    run = in_child(READ_BOMBS, str(tmp_path), more_mib=256)
    assert run.returncode == 0, run.stderr[-2000:]
