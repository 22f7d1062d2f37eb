"""The receipt: the one proof that a shard is done, written last.

It holds the shard's identity (whose hash is the key), every output with size and xxh3_128, and the books: rows in,
documents out, drops by reason. `rows_in == documents + sum(drops)` is checked whenever a receipt is made or read, so
a receipt that loses a row cannot exist. Numbers that only one kind of shard has stand under `facts`. Times, host names
and the seal that guards the file against damage stand apart under `volatile`: everything else is the same bytes on
every run.
"""

from dataclasses import asdict, dataclass, field
from typing import Any, Self

from tokenmill.tasks.seal import sealed, unsealed

from .identity import shard_key
from .publish import Output

RECEIPT = "receipt.json"


class InvalidReceiptError(ValueError):
    """A receipt that proves nothing: unreadable, of another key, or with books that do not balance."""


@dataclass(frozen=True, slots=True)
class PartCount:
    """What one part of a shard (`all`, or `train`, `valid`, `test`) holds."""

    documents: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Receipt:
    """Proof of one shard. `outputs` are paths relative to the shard's folder; `quarantined` counts bad rows,
    `truncated` documents that were cut; `facts` is plain JSON that the shard's own room understands.
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
        """Raises InvalidReceiptError unless the key fits the identity and every row is accounted for."""
        if self.key != shard_key(self.identity):
            raise InvalidReceiptError(f"shard {self.key}: the receipt belongs to another identity")
        accounted = self.documents + sum(self.drops.values())
        if self.rows_in != accounted:
            raise InvalidReceiptError(
                f"shard {self.key}: {self.rows_in} rows went in but {self.documents} documents and "
                f"{sum(self.drops.values())} drops came out"
            )

    @property
    def documents(self) -> int:
        """Documents written, over all parts."""
        return sum(part.documents for part in self.parts.values())

    @property
    def tokens(self) -> int:
        """Tokens written, over all parts."""
        return sum(part.tokens for part in self.parts.values())

    def dump(self) -> bytes:
        """The receipt as sealed JSON; without `facts` where there are none."""
        fields = asdict(self)
        if not self.facts:
            fields.pop("facts")
        return sealed(fields)

    @classmethod
    def load(cls, data: bytes) -> Self:
        """The receipt in `data`. Raises InvalidReceiptError for anything but a complete, undamaged, balanced one."""
        try:
            fields = unsealed(data)
            outputs = [Output(**output) for output in fields.pop("outputs")]
            parts = {name: PartCount(**part) for name, part in fields.pop("parts").items()}
            facts = {**fields.pop("facts", {})}
            return cls(outputs=outputs, parts=parts, facts=facts, **fields)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise InvalidReceiptError(f"not a valid receipt: {error}") from error
