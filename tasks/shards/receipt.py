"""The receipt: the proof that a shard is complete, written last.

It holds the shard's identity (whose hash is the key), every output with size and xxh3_128, and row counts: rows in, documents
out, drops by reason. `rows_in == documents + sum(drops)` is checked whenever a receipt is made or read, so a receipt that loses
a row cannot exist. `facts` has counts specific to a shard kind. Times, host names and the seal are under `volatile`;
everything else is the same on every run.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from tokenmill.tasks.seal import sealed, unsealed

from .identity import shard_key
from .publish import Output, output_of

RECEIPT = "receipt.json"

ROWS_BY_FILE = "rows_by_file"
"""The fact that lists the rows of each file of a bundle, in order; other shards do not have it."""


NOT_READ = "not_read"
"""The fact that counts rows by what of them isn't read or written; shards whose rows are read in full don't have it."""

IN_NO_ROW = "in no row"
"""How names in `NOT_READ` end that count rows without a field which the blend names: rows may lack it, but not all of them."""


def unread(counts: Mapping[str, int], documents: int) -> dict[str, int]:
    """What of `documents` isn't read: `counts` without fields that some document has."""
    return {name: count for name, count in counts.items() if count >= documents or not name.endswith(IN_NO_ROW)}


class InvalidReceiptError(ValueError):
    """A receipt that is unreadable, has the wrong key, or does not account for every row."""


@dataclass(frozen=True, slots=True)
class PartCount:
    """Contents of one part of a shard: `all`, or `train`, `valid` and `test`."""

    documents: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Receipt:
    """Proof of one shard. `outputs` have paths relative to the shard's folder; `quarantined` counts bad rows, `truncated`
    documents that were cut; `facts` is plain JSON of the shard's kind.
    """

    key: str
    identity: dict[str, Any]
    outputs: list[Output]
    rows_in: int
    parts: dict[str, PartCount]
    drops: dict[str, int]
    quarantined: int
    truncated: int
    facts: dict[str, Any] = field(default_factory=dict)
    volatile: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raises InvalidReceiptError unless the key matches the identity and every row is accounted for."""
        if self.key != shard_key(self.identity):
            raise InvalidReceiptError(f"shard {self.key}: the receipt belongs to a different identity")
        accounted = self.documents + sum(self.drops.values())
        if self.rows_in != accounted:
            raise InvalidReceiptError(
                f"shard {self.key}: {self.rows_in} rows went in but {self.documents} documents and "
                f"{sum(self.drops.values())} drops were recorded"
            )
        if sum(self.rows_by_file) != self.rows_in:
            raise InvalidReceiptError(
                f"shard {self.key}: {self.rows_in} rows went in but its files have {sum(self.rows_by_file)} rows"
            )

    @property
    def rows_by_file(self) -> list[int]:
        """The rows of each source file; one number unless the shard is a bundle."""
        return self.facts.get(ROWS_BY_FILE, [self.rows_in])

    @property
    def not_read(self) -> dict[str, int]:
        """Rows by the field, or other content, that isn't read or written."""
        return self.facts.get(NOT_READ, {})

    @property
    def documents(self) -> int:
        """Documents written, over all parts."""
        return sum(part.documents for part in self.parts.values())

    @property
    def tokens(self) -> int:
        """Tokens written, over all parts."""
        return sum(part.tokens for part in self.parts.values())

    def dump(self) -> bytes:
        """The receipt as sealed JSON; `facts` is omitted if empty."""
        fields = asdict(self)
        if not self.facts:
            fields.pop("facts")
        return sealed(fields)

    @classmethod
    def load(cls, data: bytes) -> Self:
        """The receipt in `data`. Raises InvalidReceiptError unless it is complete and undamaged."""
        try:
            return cls.of_record(unsealed(data))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise InvalidReceiptError(f"not a valid receipt: {error}") from error

    @classmethod
    def of_record(cls, fields: Mapping[str, Any]) -> Self:
        """The receipt of a record, as JSON or `asdict` give it. Raises the errors of a record with other fields."""
        made: dict[str, Any] = {
            **fields,
            "outputs": [output_of(output) for output in fields["outputs"]],
            "parts": {name: PartCount(**part) for name, part in fields["parts"].items()},
            "facts": {**fields.get("facts", {})},
        }
        return cls(**made)
