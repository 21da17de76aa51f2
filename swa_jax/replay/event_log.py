"""The block events of a replay as JSON lines, written while it runs."""

import contextlib
import dataclasses
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

import jax

from swa_jax.prefix_cache.events import (
    BlockStored,
    Event,
    TreeRecord,
    empty_record,
    tree_events,
)
from swa_jax.replay.outfile import OutFile
from swa_jax.replay.shared_world import SharedWorld


class EventLog(OutFile):
    """A file of event batches: a line for each look at the tree that found something.

    `{"seq": 0, "ts": 12.0, "step": 12, "events": [{"type": "BlockStored", ...}, ...]}`: the fields
    of vLLM's `KVEventBatch` and what it holds, with the number that is sent beside it. A replay has
    no clock, so `ts` is the step.

    Use it as `with log.writing(): ... log.look(shared)`. The lines go to a temporary file that
    takes the name at the end, if all went well; to a pipe they go at once.
    """

    def __init__(self, option: str, name: str) -> None:
        """As `OutFile`."""
        super().__init__(option, name)
        self.batches = 0
        self._record: TreeRecord | None = None
        self._stream: IO[bytes] | None = None

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Opens the file, and closes it; ValueError where that fails."""
        if not self.replaced:
            with self._explained():
                stream = self.path.open("wb")
            with self._closing(stream):
                yield
            return
        with self._explained():
            handle, name = tempfile.mkstemp(dir=self.path.parent, prefix=".swa-jax-")
        try:
            with self._closing(os.fdopen(handle, "wb")):
                yield
            with self._explained():
                Path(name).chmod(self._mode())
                Path(name).replace(self.path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise

    @contextlib.contextmanager
    def _closing(self, stream: IO[bytes]) -> Iterator[None]:
        self._stream = stream
        try:
            yield
        except BaseException:
            with contextlib.suppress(OSError):  # that of a full disk would come a second time
                stream.close()
            raise
        with self._explained():
            stream.flush()
            if self.replaced:
                os.fsync(stream.fileno())
            stream.close()

    def look(self, shared: SharedWorld) -> None:
        """Writes what happened to the tree since the last look."""
        before = self._record or empty_record(shared.cache.config)
        self._record, events = tree_events(before, shared.cache)
        if events:
            self._write(int(jax.device_get(shared.world.tally.steps)), events)

    def _write(self, step: int, events: Sequence[Event]) -> None:
        if self._stream is None:
            raise RuntimeError("look at the tree inside `with log.writing()`")
        fields = [event_fields(event) for event in events]
        line = {"seq": self.batches, "ts": float(step), "step": step, "events": fields}
        with self._explained():
            self._stream.write(json.dumps(line, separators=(",", ":")).encode() + b"\n")
            if not self.replaced:  # somebody may be reading along
                self._stream.flush()
        self.batches += 1


def event_fields(event: Event) -> dict[str, object]:
    """The fields that vLLM's event of this type has; those that say nothing here are null."""
    fields: dict[str, object] = {"type": type(event).__name__}
    fields.update(dataclasses.asdict(event))
    if isinstance(event, BlockStored):
        fields["lora_name"] = None
    if "block_hashes" in fields:
        fields["medium"] = None  # the device's own memory
    return fields
