"""Notes below a table, numbered from 1; each is said once."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(kw_only=True)
class Noted:
    """A table with notes."""

    notes: list[str] = field(default_factory=list)

    def note(self, text: str | None) -> int | None:
        """The number of a note with this text; None where there is nothing to say."""
        if not text:
            return None
        if text not in self.notes:
            self.notes.append(text)
        return self.notes.index(text) + 1
