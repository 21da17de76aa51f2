"""A tier is a cache: what finds no memory is left out and counted, and whoever asked goes on."""

from types import TracebackType

from swa_jax.out_of_memory import is_out_of_memory


class Spared:
    """Use it as `with spared: ...`: an error for want of memory ends the block, and no more.

    Attributes:
      count: how often that was.
    """

    def __init__(self) -> None:
        """Nothing was lacking yet."""
        self.count = 0

    def __enter__(self) -> "Spared":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        if error is None or not is_out_of_memory(error):
            return False
        self.count += 1
        return True
