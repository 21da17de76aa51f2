"""Ctrl-C that is heard while native code runs."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

Result = TypeVar("Result")


def interruptible(work: Callable[[], Result]) -> Result:
    """Returns or raises what `work` does, which runs in a thread of its own.

    Python looks at signals in the main thread only, between two instructions: an XLA compilation
    there holds Ctrl-C off for many seconds, and the exception may come up in one of its callbacks,
    where it is lost. On an interrupt the thread is left behind; the process should end.
    """
    outcome: Future[Result] = Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=run, daemon=True, name="replay").start()
    return outcome.result()
