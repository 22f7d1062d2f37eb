"""The running books of one shard while it is built: rows in, drops by reason, bad rows set aside, files opened.

Every kind of shard counts alike: a row that cannot be used is a drop with a reason, and either goes to the shard's
quarantine file with its number and an excerpt, or stops the run, as the policy says. Files appear when the shard ends
well, and not before.
"""

from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Literal

import orjson
from tokenmill.tasks.errors import RunError
from tokenmill.tasks.sources.files import BadRow, Slice
from tokenmill.tasks.sources.formats import first_row

from .publish import Output, Publication, publish

QUARANTINE = "quarantine.jsonl"

OnBadRow = Literal["quarantine", "fail"]


class BadRowError(RunError):
    """A row cannot be used and the policy is to fail."""


@dataclass
class Books:
    """What happened to the rows of a slice. `folder` is the shard's, `stack` ends when the shard does."""

    part: Slice
    folder: str
    stack: ExitStack
    on_bad_row: OnBadRow
    drops: Counter[str] = field(default_factory=Counter[str])
    rows_in: int = 0
    quarantined: int = 0
    publications: dict[str, Publication] = field(default_factory=dict[str, Publication])

    def open(self, name: str) -> Publication:
        """The file of that name in the shard's folder, begun at the first call."""
        if name not in self.publications:
            self.publications[name] = self.stack.enter_context(publish(f"{self.folder}/{name}"))
        return self.publications[name]

    @property
    def outputs(self) -> list[Output]:
        """The files, once the stack has ended well."""
        return [publication.output for publication in self.publications.values()]

    def drop(self, reason: str, count: int = 1) -> None:
        """Count rows that are left out for a reason that is no damage; 0 counts nothing."""
        if count:
            self.drops[reason] += count

    def set_aside(self, rows: Sequence[BadRow]) -> None:
        """Count bad rows and put them in quarantine. Raises BadRowError at the first when the policy is `fail`."""
        if rows and self.on_bad_row == "fail":
            raise bad_row_error(rows[0], self.part)
        for row in rows:
            line = {"row": row.row, "reason": row.reason, "detail": row.detail, "excerpt": row.excerpt}
            self.open(QUARANTINE).write(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))
            self.drops[row.reason] += 1
            self.quarantined += 1


def bad_row_error(row: BadRow, part: Slice) -> BadRowError:
    """The error for a bad row, naming file and line."""
    line = first_row(part) + row.row + 1
    return BadRowError(
        f"{part.file.uri}:{line}: {row.reason}: {row.detail}; mend the row, or set on_bad_row=quarantine to set "
        f"such rows aside and count them. The row begins: {row.excerpt}"
    )
