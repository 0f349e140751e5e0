"""What a program writes, and when each piece of it came: its last words tell when it was done."""

from __future__ import annotations

from collections.abc import Iterable


class TimedText:
    """Pieces are added with a time on any clock, which never goes back."""

    def __init__(self) -> None:
        self.text = bytearray()
        """All but the lines that were taken out."""
        self._n_taken_out = 0
        self._arrivals: list[tuple[int, float]] = []
        """How many bytes had come with each piece, and when."""

    def add(self, piece: bytes, at_s: float) -> None:
        self.text += piece
        self._arrivals.append((self._n_taken_out + len(self.text), at_s))

    def take_line(self) -> bytes:
        """The first one, without its end."""
        line, end, self.text = self.text.partition(b"\n")
        self._n_taken_out += len(line) + len(end)
        return bytes(line)

    def arrived_s(self, words: str) -> float | None:
        """When these words were there for the last time; None: never, or taken out."""
        sought = words.encode()
        at = self.text.rfind(sought)
        if at < 0:
            return None
        end = self._n_taken_out + at + len(sought)
        return next(at_s for n_there, at_s in self._arrivals if n_there >= end)


def last_arrival_s(texts: Iterable[TimedText], words: str) -> float | None:
    """When any of these had the words for the last time; None: none of them has them."""
    return max((at_s for one in texts if (at_s := one.arrived_s(words)) is not None), default=None)
