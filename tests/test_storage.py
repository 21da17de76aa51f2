"""Storage below the host tier: names of pages, files that prove themselves, crashes, threads."""

import dataclasses
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from served_models import tiny
from storage_pages import FINGERPRINT, KEYS, PAGE, page_of, same

from swa_jax import describe
from swa_jax.host_cache import file_storage, page_file
from swa_jax.host_cache.file_storage import FileStorage
from swa_jax.host_cache.storage import MemoryStorage, kv_fingerprint, page_keys
from swa_jax.host_cache.storage_worker import StorageWorker
from swa_jax.models.decoder import KVPool
from swa_jax.serving import Decoder

TESTS = Path(__file__).parent


def opened(folder, most=10**9, **options):
    return FileStorage(folder, FINGERPRINT, most, **options)


def files(folder):
    return sorted(path for path in folder.iterdir() if path.suffix == ".safetensors")


SIZE = len(page_file.encode(KEYS[0], page_of(0)))  # of a file; a digit more or less by its tokens


# Keys.


def test_a_page_is_named_by_all_that_stands_before_it():
    text = list(range(20))
    whole = page_keys(FINGERPRINT, text, PAGE)
    assert [key.tokens for key in whole] == [tuple(text[at : at + 4]) for at in range(0, 20, 4)]
    assert page_keys(FINGERPRINT, text[:11], PAGE) == whole[:2]
    other = page_keys(FINGERPRINT, [99, *text[1:]], PAGE)
    assert not {key.name for key in other} & {key.name for key in whole}
    assert other[1].tokens == whole[1].tokens


def test_namespace_model_page_size_and_pairs_give_other_names():
    text = list(range(13))
    variants = [
        page_keys(FINGERPRINT, text, 4),
        page_keys(FINGERPRINT, text, 4, namespace=1),
        page_keys(b"model b", text, 4),
        page_keys(FINGERPRINT, text, 4, is_bigram=True),
        page_keys(FINGERPRINT, text, 2),
        [key.of_part("swa") for key in page_keys(FINGERPRINT, text, 4)],
    ]
    names = [key.name for keys in variants for key in keys]
    assert len(set(names)) == len(names)


def test_with_pairs_a_page_waits_for_the_token_after_it():
    assert page_keys(FINGERPRINT, range(8), 4, is_bigram=True)[0].tokens == (0, 1, 2, 3, 4)
    assert len(page_keys(FINGERPRINT, range(8), 4, is_bigram=True)) == 1
    assert len(page_keys(FINGERPRINT, range(9), 4, is_bigram=True)) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("text", [1], 4), "fingerprint must be bytes"),
        ((b"m", [1.5], 4), "row of integers"),
        ((b"m", [[1]], 4), "row of integers"),
        ((b"m", [2**31], 4), "fit int32"),
        ((b"m", [1], 0), "page_size must be an integer from 1"),
    ],
)
def test_bad_keys_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        page_keys(*arguments)


@pytest.mark.parametrize("part", ["", "Full", "a-b", "../x", "é"])
def test_a_part_is_a_plain_name(part):
    with pytest.raises(ValueError, match="part must be a name"):
        KEYS[0].of_part(part)


LAYERS = KVPool(full=(jnp.zeros((5, PAGE, 2, 8), jnp.bfloat16),), swa=())


def test_a_fingerprint_changes_with_all_that_kv_depends_on_and_with_nothing_else():
    model = tiny(8)

    def of(model: object = model, layers=LAYERS, size=4, weights="w"):
        return kv_fingerprint(model, layers, size, weights=weights)

    larger = KVPool((jnp.zeros((9, PAGE, 2, 8), jnp.bfloat16),), ())
    assert of() == of(layers=larger) == of(model=tiny(8))
    other = KVPool((jnp.zeros((5, PAGE, 2, 8), jnp.float8_e5m2),), ())
    seen = [
        of(),
        of(model=tiny(9)),
        of(layers=other),
        of(layers=KVPool((), LAYERS.full)),
        of(size=8),
        of(weights="v"),
    ]
    assert len(set(seen)) == len(seen)
    with pytest.raises(ValueError, match="weights must name"):
        of(weights="")
    with pytest.raises(ValueError, match="nothing tells one"):
        of(model=object())


def test_functions_do_not_count_and_differences_say_where():
    def attend():
        """Another way to compute the same."""

    model = Decoder(tiny(8))
    assert describe.describe(model) == describe.describe(dataclasses.replace(model, attend=attend))
    changed = Decoder(tiny(9), kv_dtype="bfloat16")
    told = describe.differences(describe.describe(model), describe.describe(changed))
    assert told == [
        "config.sliding_window was 8 and is 9",
        "kv_dtype was 'float32' and is 'bfloat16'",
    ]


# Files.

DTYPES = ["bfloat16", "float8_e4m3fn", "float8_e5m2", "int4", "float16", "int32", "bool", "float32"]
DTYPES += ["complex64", "complex128"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_comes_back_bit_for_bit(tmp_path, dtype):
    values = np.random.default_rng(0).normal(size=(2, 3, 4)) * 3
    arrays = {"a": values.astype(jnp.dtype(dtype)), "none": np.zeros((0, 3), jnp.dtype(dtype))}
    arrays["scalar"], arrays["turned"] = arrays["a"][0, 0, 0].reshape(()), arrays["a"].T
    with opened(tmp_path) as storage:
        storage.put(KEYS[0], arrays)
        assert storage.has(KEYS[0])
    with opened(tmp_path) as storage:  # another process
        got = storage.get(KEYS[0])
        assert got is not None
        assert same(got, arrays)
        got["a"][...] = 0  # the caller's own
        assert storage.get(KEYS[1]) is None
        assert not storage.has(KEYS[1])


@pytest.mark.parametrize(
    "array",
    [
        np.zeros(2, ">i4"),
        np.zeros(2, "U2"),
        np.zeros(2, "M8[D]"),
        np.zeros(2, [("x", "i4")]),
        np.zeros(2, object),
        np.zeros(2, np.longdouble),
        [1, None],
    ],
    ids=lambda array: str(np.asarray(array).dtype),
)
def test_what_could_not_be_read_again_is_not_written(tmp_path, array):
    with opened(tmp_path) as storage:
        storage.put(KEYS[0], page_of(0))
        with pytest.raises(ValueError, match="'a' of a page must hold plain numbers"):
            storage.put(KEYS[0], {"a": array})
        for name in ("__metadata__", 3):
            with pytest.raises(ValueError, match="must have a name other than __metadata__"):
                storage.put(KEYS[0], {name: np.zeros(2)})  # type: ignore[dict-item]
        assert same(storage.get(KEYS[0]), page_of(0))
        assert storage.used_bytes == files(tmp_path)[0].stat().st_size


def test_directories_called_as_its_files_are_let_alone(tmp_path):
    for name in (".swa-jax-page-1", ".swa-jax-page-x", f"{KEYS[1].name}.safetensors"):
        (tmp_path / name).mkdir()
    with opened(tmp_path) as storage:
        storage.put(KEYS[0], page_of(0))
        assert same(storage.get(KEYS[0]), page_of(0))
        storage.delete(KEYS[1])
        with pytest.raises(OSError, match="directory"):
            storage.put(KEYS[1], page_of(1))
        assert storage.get(KEYS[1]) is None
    assert len(list(tmp_path.iterdir())) == 4


def test_a_page_is_put_again_and_deleted(tmp_path):
    with opened(tmp_path) as storage:
        storage.put(KEYS[0], page_of(0, with_swa=False))
        storage.put(KEYS[0], page_of(0))
        storage.put(KEYS[0].of_part("swa"), page_of(7))
        assert same(storage.get(KEYS[0]), page_of(0))
        assert same(storage.get(KEYS[0].of_part("swa")), page_of(7))
        assert len(storage) == 2
        assert storage.used_bytes == sum(path.stat().st_size for path in files(tmp_path))
        storage.delete(KEYS[0])
        storage.delete(KEYS[5])
        assert list(storage.keys()) == [KEYS[0].of_part("swa").name]
        assert storage.get(KEYS[0]) is None


@settings(max_examples=25, deadline=None, derandomize=True)
@given(data=st.data())
def test_no_flipped_or_missing_byte_goes_unseen(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("flip")
    with opened(folder) as storage:
        storage.put(KEYS[1], page_of(1))
        path = files(folder)[0]
        content = bytearray(path.read_bytes())
        at = data.draw(st.integers(0, len(content) - 1))
        if data.draw(st.booleans()):
            content[at] ^= 1 << data.draw(st.integers(0, 7))
        else:
            del content[at:]
        path.write_bytes(content)
        assert storage.get(KEYS[1]) is None
        assert storage.corrupt + storage.foreign == 1
        assert not storage.has(KEYS[1])
        assert storage.used_bytes == 0
        storage.put(KEYS[1], page_of(1))
        assert same(storage.get(KEYS[1]), page_of(1))


def test_every_bit_of_a_file_counts():
    content = page_file.encode(KEYS[1], {"a": np.arange(4, dtype=np.int8)})
    for place in range(len(content) * 8):
        flipped = bytearray(content)
        flipped[place // 8] ^= 1 << place % 8
        with pytest.raises((page_file.CorruptPageError, page_file.ForeignPageError)):
            page_file.decode(KEYS[1], bytes(flipped))


def renamed(key, **changes):
    return dataclasses.replace(key, **changes)


@pytest.mark.parametrize(
    "stranger",
    [
        renamed(KEYS[1], fingerprint=b"model b"),
        renamed(KEYS[1], namespace=4),
        renamed(KEYS[1], tokens=(4, 5, 6, 8)),  # two texts of one hash
        KEYS[2],
        KEYS[1].of_part("swa"),
    ],
)
def test_a_whole_file_of_something_else_is_foreign(tmp_path, stranger):
    with opened(tmp_path) as storage:
        storage.put(KEYS[1], page_of(1))
        files(tmp_path)[0].write_bytes(page_file.encode(stranger, page_of(1)))
        assert storage.get(KEYS[1]) is None
        assert (storage.foreign, storage.corrupt) == (1, 0)


LAYOUT = {name: (array.dtype, array.shape) for name, array in page_of(0).items()}


def test_another_layout_is_foreign_and_not_written(tmp_path):
    with opened(tmp_path) as storage:
        storage.put(KEYS[0], {"full.0": np.zeros((PAGE, 2, 8), np.float32)})
        storage.put(KEYS[1], page_of(1, with_swa=False))
    with opened(tmp_path, layout=LAYOUT) as storage:
        assert storage.get(KEYS[0]) is None
        assert storage.foreign == 1
        assert same(storage.get(KEYS[1]), page_of(1, with_swa=False))
        for wrong in ({"full.9": np.zeros(3)}, {"full.0": np.zeros((1, 2, 8), jnp.bfloat16)}):
            with pytest.raises(ValueError, match="of a page must be"):
                storage.put(KEYS[0], wrong)


def test_the_least_recently_used_leave_also_after_a_restart(tmp_path):
    with opened(tmp_path, 3 * SIZE + 20) as storage:
        for number in range(3):
            storage.put(KEYS[number], page_of(number))
        storage.get(KEYS[0])
        storage.put(KEYS[3], page_of(3))
        assert list(storage.keys()) == [KEYS[number].name for number in (2, 0, 3)]
        storage.get(KEYS[2])
    with opened(tmp_path, 2 * SIZE + 20) as storage:
        assert list(storage.keys()) == [KEYS[number].name for number in (3, 2)]
        assert len(files(tmp_path)) == 2


def test_a_page_beyond_all_bytes_is_refused_and_nothing_leaves_for_it(tmp_path):
    with opened(tmp_path, SIZE + 20) as storage:
        storage.put(KEYS[0], page_of(0))
        with pytest.raises(ValueError, match=r"max_bytes must hold at least one page of \d+ bytes"):
            storage.put(KEYS[1], {"a": np.zeros(SIZE + 20, np.uint8)})
        assert storage.has(KEYS[0])


def test_other_files_of_the_directory_are_let_alone(tmp_path):
    model = tmp_path / "model.safetensors"
    model.write_bytes(b"x" * 10_000)
    (tmp_path / f"{'a' * 64}.safetensors").mkdir()
    with opened(tmp_path, SIZE + 20) as storage:
        assert len(storage) == 0
        storage.put(KEYS[0], page_of(0))
    assert model.read_bytes() == b"x" * 10_000


def test_what_a_killed_writer_left_is_cleaned_up(tmp_path):
    (tmp_path / ".swa-jax-page-7").write_bytes(b"half")
    (tmp_path / ".other").write_bytes(b"")
    opened(tmp_path).close()
    assert [path.name for path in tmp_path.iterdir()] == [".other"]


def test_a_directory_has_one_store_at_a_time(tmp_path):
    storage = opened(tmp_path)
    with pytest.raises(ValueError, match="another page store has"):
        opened(tmp_path)
    storage.close()
    with pytest.raises(ValueError, match="is closed"):
        storage.get(KEYS[0])
    opened(tmp_path).close()
    dropped = opened(tmp_path)
    del dropped  # one that nobody has any more is closed
    opened(tmp_path).close()


def test_bad_arguments_are_refused(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ValueError, match="cannot be used as a page store"):
        opened(tmp_path / "file")
    with pytest.raises(ValueError, match="max_bytes must be an integer from 1"):
        opened(tmp_path, 0)
    with pytest.raises(ValueError, match="fingerprint must be bytes"):
        FileStorage(tmp_path, "model", 100)  # type: ignore[arg-type]
    stranger = page_keys(b"model b", range(4), PAGE)[0]
    with opened(tmp_path / "new" / "one") as storage:
        for call in (storage.get, storage.has, storage.delete):
            with pytest.raises(ValueError, match="this store keeps pages of the model"):
                call(stranger)
        with pytest.raises(ValueError, match="this store keeps pages of the model"):
            storage.put(stranger, page_of(0))


def test_a_write_that_fails_leaves_nothing_behind(tmp_path, monkeypatch):
    with opened(tmp_path, 2 * SIZE + 20) as storage:
        storage.put(KEYS[0], page_of(0))

        def no_space(handle):
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(file_storage.os, "fsync", no_space)
            for _ in range(5):
                with pytest.raises(OSError, match="No space"):
                    storage.put(KEYS[1], page_of(1))
        assert len(list(tmp_path.iterdir())) == 1
        storage.put(KEYS[1], page_of(1))  # no bytes stay reserved
        assert same(storage.get(KEYS[0]), page_of(0))


def refused(*_args, **_kwargs):
    raise OSError(30, "Read-only file system")


def test_a_file_that_cannot_be_removed_is_not_forgotten(tmp_path, monkeypatch):
    def on_disk():
        return sum(path.stat().st_size for path in files(tmp_path))

    with opened(tmp_path, 2 * SIZE + 20) as storage:
        for number in range(2):
            storage.put(KEYS[number], page_of(number))
        with monkeypatch.context() as patch:
            patch.setattr(file_storage.Path, "unlink", refused)
            with pytest.raises(OSError, match="Read-only"):
                storage.delete(KEYS[0])
            assert storage.has(KEYS[0])
            assert same(storage.get(KEYS[0]), page_of(0))
            with pytest.raises(OSError, match="Read-only"):
                storage.put(KEYS[2], page_of(2))
            # The next time it is another one's turn to leave.
            assert list(storage.keys()) == [KEYS[0].name, KEYS[1].name]
            files(tmp_path)[0].write_bytes(b"")
            keys = {key.name: key for key in KEYS}
            damaged = keys[files(tmp_path)[0].stem]
            assert [storage.get(damaged), storage.get(damaged)] == [None, None]
            assert storage.corrupt == 2
        storage.put(KEYS[2], page_of(2))
        storage.put(KEYS[3], page_of(3))
        assert storage.used_bytes == on_disk() <= storage.max_bytes
        at = tmp_path / f"{KEYS[3].name}.safetensors"
        at.unlink()
        at.mkdir()  # somebody else's from now on
        assert storage.get(KEYS[3]) is None
        assert not storage.has(KEYS[3])
        assert storage.used_bytes == on_disk() - at.stat().st_size


def test_a_page_whose_name_could_not_be_synced_is_there(tmp_path, monkeypatch):
    with opened(tmp_path) as storage:
        sync = os.fsync

        def not_the_directory(handle):
            if handle == storage._handle:
                raise OSError(5, "Input/output error")
            sync(handle)

        with monkeypatch.context() as patch:
            patch.setattr(file_storage.os, "fsync", not_the_directory)
            with pytest.raises(OSError, match="Input/output error"):
                storage.put(KEYS[0], page_of(0))
        assert same(storage.get(KEYS[0]), page_of(0))
        assert storage.used_bytes == files(tmp_path)[0].stat().st_size


def test_a_file_larger_than_all_pages_drives_none_out(tmp_path):
    most = 2 * SIZE + 20
    with opened(tmp_path, most) as storage:
        for number in range(2):
            storage.put(KEYS[number], page_of(number))
        used = storage.used_bytes
    large = tmp_path / f"{KEYS[2].name}.safetensors"
    for size in (most + 1, 10**12):
        with large.open("wb") as stream:
            stream.truncate(size)
        with opened(tmp_path, most) as storage:
            assert list(storage.keys()) == [KEYS[0].name, KEYS[1].name]
            assert storage.used_bytes == used
            assert storage.get(KEYS[2]) is None
            storage.delete(KEYS[2])
        assert large.stat().st_size == size
    with opened(tmp_path, most) as storage:
        storage.put(KEYS[2], page_of(2))  # takes its place, as a page that is put again
        assert same(storage.get(KEYS[2]), page_of(2))
        assert storage.used_bytes == sum(path.stat().st_size for path in files(tmp_path)) <= most


def test_writers_that_are_killed_leave_whole_pages(tmp_path):
    """Each of 30 writers is killed by SIGKILL; whatever the next one can read is right."""
    command = [sys.executable, str(TESTS / "storage_crash.py"), str(tmp_path), "30", "0"]
    run = subprocess.run(command, env=with_path(), capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) > 100
    with opened(tmp_path) as storage:
        assert 0 < storage.used_bytes <= 60_000
        assert all(path.suffix == ".safetensors" for path in tmp_path.iterdir())


def with_path():
    paths = os.pathsep.join([str(TESTS.parent), str(TESTS)])
    return {**os.environ, "PYTHONPATH": paths, "JAX_PLATFORMS": "cpu"}


def test_threads_never_see_a_page_that_is_not_right(tmp_path):
    wrong, most = [], 4 * SIZE + 20

    def work(seed):
        rng = np.random.default_rng(seed)
        for _ in range(40):
            number = int(rng.integers(10))
            choice = int(rng.integers(4))
            if choice < 2:
                storage.put(KEYS[number], page_of(number))
            elif choice == 2:
                got = storage.get(KEYS[number])
                wrong.extend([number] * (got is not None and not same(got, page_of(number))))
            else:
                storage.delete(KEYS[number])
            wrong.extend(["bytes"] * (storage.used_bytes > most))

    with opened(tmp_path, most) as storage:
        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong
        assert (storage.corrupt, storage.foreign) == (0, 0)
        on_disk = [path.stat().st_size for path in files(tmp_path)]
        assert (storage.used_bytes, len(storage)) == (sum(on_disk), len(on_disk))
        assert {path.suffix for path in tmp_path.iterdir()} <= {".safetensors"}


def test_memory_storage_keeps_copies_and_forgets_the_oldest():
    storage, arrays = MemoryStorage(2), page_of(0)
    storage.put(KEYS[0], arrays)
    arrays["full.1"][...] = 0
    assert same(storage.get(KEYS[0]), page_of(0))
    storage.put(KEYS[1], page_of(1))
    storage.get(KEYS[0])
    storage.put(KEYS[2], page_of(2))
    assert list(storage.keys()) == [KEYS[0].name, KEYS[2].name]
    assert storage.get(renamed(KEYS[2], tokens=(1,))) is None
    storage.delete(KEYS[0])
    assert len(storage) == 1
    assert not storage.has(KEYS[0])


# Off the caller's thread.


class Slow(MemoryStorage):
    """Waits to be let on before each write."""

    def __init__(self):
        super().__init__()
        self.go, self.reads = threading.Event(), 0

    def put(self, key, arrays):
        assert self.go.wait(20)
        if key == KEYS[9]:
            raise OSError(28, "No space left on device")
        super().put(key, arrays)

    def get(self, key):
        self.reads += 1
        return super().get(key)


def test_writes_go_on_behind_and_can_be_read_at_once():
    slow = Slow()
    with StorageWorker(slow, max_writes=2) as worker:
        first = worker.put(KEYS[0], page_of(0))
        assert worker.put(KEYS[0], page_of(0)) is first
        broken = worker.put(KEYS[9], page_of(9))
        assert worker.put(KEYS[2], page_of(2)).result() is False  # the queue is full
        assert (worker.skipped, len(slow)) == (1, 0)
        assert worker.has(KEYS[0])
        assert same(worker.prefetch(KEYS[0]).result(), page_of(0))
        slow.go.set()
        worker.wait()
        assert first.result() is True
        assert isinstance(broken.exception(), OSError)
        assert worker.failed == 1
        assert worker.put(KEYS[2], page_of(2)).result() is True
        assert same(worker.prefetch(KEYS[2]).result(), page_of(2))
        assert worker.prefetch(KEYS[3]).result() is None
        assert not worker.has(KEYS[3])
    assert slow.reads == 2


def test_a_worker_over_files_ends_with_all_of_them_written(tmp_path):
    with opened(tmp_path) as storage, StorageWorker(storage, threads=3) as worker:
        for number in range(20):
            worker.put(KEYS[number], page_of(number))
        reads = [worker.prefetch(KEYS[number]) for number in range(20)]
        assert all(same(read.result(), page_of(number)) for number, read in enumerate(reads))
    assert len(files(tmp_path)) == 20


def test_without_a_checksum_a_flip_would_be_read(monkeypatch):
    monkeypatch.setattr(page_file, "_checksum", lambda text, stored: "same")
    plain = page_file.encode(KEYS[0], page_of(0))
    assert same(page_file.decode(KEYS[0], plain), page_of(0))
    flipped = bytearray(plain)
    flipped[-1] ^= 1
    assert not same(page_file.decode(KEYS[0], bytes(flipped)), page_of(0))


def test_the_metadata_can_be_read_by_other_tools(tmp_path):
    with opened(tmp_path) as storage:
        storage.put(KEYS[0], page_of(0))
    content = files(tmp_path)[0].read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    about = json.loads(header["__metadata__"]["page"])
    assert about["tokens"] == [0, 1, 2, 3]
    assert about["arrays"]["full.0"] == ["bfloat16", [4, 2, 8]]
