"""Stop strings in a text that comes in pieces."""

from collections.abc import Sequence


class StopFinder:
    """Passes a text on until a stop string begins in it.

    What may be the beginning of a stop string waits until the next piece decides.

    Args:
      stops: strings that are not empty.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """At the beginning of the text."""
        self._stops = tuple(stops)
        self._held = ""
        self.found = False

    def add(self, piece: str) -> str:
        """The text that is safe to show; after a stop string was found, nothing more."""
        if self.found:
            return ""
        text = self._held + piece
        places = [text.find(stop) for stop in self._stops]
        ends = [place for place in places if place >= 0]
        if ends:
            self.found, self._held = True, ""
            return text[: min(ends)]
        keep = max((_begun(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def rest(self) -> str:
        """What was still waiting; the text ends here."""
        text, self._held = self._held, ""
        return text


def _begun(text: str, stop: str) -> int:
    """Characters at the end of a text that begin a stop string."""
    most = min(len(stop) - 1, len(text))
    return next((size for size in range(most, 0, -1) if text.endswith(stop[:size])), 0)
