"""A shard's key, and its receipt: the proof that the shard is complete, written last.

The key is a hash of the shard's identity: everything that can change a byte of it, and nothing else. An identity is a small JSON
object of `recipe` (every choice that changes bytes) and `source` (the content of the slice); if other shards decide about its
rows, `decided` names the decision. When a key changes, identities are compared field by field.

A receipt holds the shard's identity (whose hash is the key), every output with size and xxh3_128, and row counts: rows in, documents
out, drops by reason. `rows_in == documents + sum(drops)` is checked each time a receipt is made or read, so a receipt that loses
a row cannot exist. `facts` has counts specific to a shard kind. Times, host names and the seal are under `volatile`;
everything else is the same on every run.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import Field, asdict, dataclass, field, fields
from typing import Any, ClassVar, Protocol, Self, TypeVar

import orjson
from tokenmill.tasks.seal import sealed, unsealed
from tokenmill.tasks.sources.files import Slice

from .publish import Output, output_of

KEY_CHARACTERS = 32
"""128 bits of SHA-256, in hexadecimal: keys are file names, and sources may be hostile."""

Identity = Mapping[str, Any]


ADDED = {"added": True}
"""Metadata of a recipe's field that shards in use do not have. At its default it is omitted, so their keys remain."""


class Recipe(Protocol):
    """A frozen dataclass of plain values: every choice that can change a byte of a shard."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]


@dataclass(frozen=True, slots=True)
class TextRecipe:
    """The recipe of shards that depend on texts only."""

    text_field: str


Made = TypeVar("Made", bound=Recipe)


def recipe_of(kind: type[Made], settings: object, **computed: Any) -> Made:  # noqa: ANN401 - plain values of any type
    """Return the recipe whose other fields are the settings of the same names: those that decide bytes."""
    names = kind.__dataclass_fields__.keys() - computed.keys()
    return kind(**computed, **{name: getattr(settings, name) for name in names})


def shard_identity(kind: str, format_version: int, recipe: Recipe, part: Slice) -> dict[str, Any]:
    """Return the identity of the shard that `recipe` makes from a slice."""
    return shard_identities(kind, format_version, [recipe], [part])[0]


def shard_identities(
    kind: str, format_version: int, recipes: Sequence[Recipe], parts: Sequence[Slice]
) -> list[dict[str, Any]]:
    """Return the identity of the shard that each recipe makes from its slice.

    Slices with the same recipe share one dict of it: a million copies would take a minute and 1 GB.
    """
    plain: dict[int, dict[str, Any]] = {}
    for number, recipe in {id(recipe): recipe for recipe in recipes}.items():
        added = {each.name: each.default for each in fields(recipe) if ADDED.items() <= each.metadata.items()}
        values = asdict(recipe).items()
        plain[number] = {name: value for name, value in values if name not in added or value != added[name]}
    common = {"kind": kind, "format_version": format_version}
    pairs = [(plain[id(recipe)], part) for recipe, part in zip(recipes, parts, strict=True)]
    return [{**common, "recipe": recipe, "source": source_of(part, recipe)} for recipe, part in pairs]


def source_of(part: Slice, recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of an identity that names the rows of a slice. Some recipes name `filters` themselves."""
    source: dict[str, Any] = {"content": part.content, "format": part.file.format, "compression": part.file.compression}
    # A field appears only where it applies, so that adding one keeps the keys of other shards.
    if part.rows is not None:
        source["rows"] = part.rows
    if part.members:
        source["files"] = len(part.members)
    if part.filters and "filters" not in recipe:
        source["filters"] = part.filters
    if part.where:
        source["where"] = part.where
    if any(each.keys for each in part.members or [part]):
        source["keys"] = [each.keys for each in part.members] or part.keys
    return source


def shard_key(identity: Identity) -> str:
    """Return the key of an identity: a hash of its canonical JSON."""
    canonical = orjson.dumps(identity, option=orjson.OPT_SORT_KEYS)
    return hashlib.sha256(canonical).hexdigest()[:KEY_CHARACTERS]


def difference(before: Identity, after: Identity) -> dict[str, tuple[Any, Any]]:
    """Return the fields whose values differ, by dotted name: `{"recipe.bos": (None, 1)}`."""
    old, new = dict(flat(before)), dict(flat(after))
    return {name: (old.get(name), new.get(name)) for name in sorted(old | new) if old.get(name) != new.get(name)}


def flat(value: Identity, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested objects by dotted name."""
    for name, inner in value.items():
        if isinstance(inner, Mapping):
            yield from flat(inner, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", inner


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
        return self.facts.get(NOT_READ, {})

    @property
    def documents(self) -> int:
        return sum(part.documents for part in self.parts.values())

    @property
    def tokens(self) -> int:
        return sum(part.tokens for part in self.parts.values())

    def dump(self) -> bytes:
        """Return the receipt as sealed JSON; `facts` is omitted if empty."""
        fields = asdict(self)
        if not self.facts:
            fields.pop("facts")
        return sealed(fields)

    @classmethod
    def load(cls, data: bytes) -> Self:
        """Return the receipt in `data`. Raises InvalidReceiptError unless it is complete and undamaged."""
        try:
            fields = unsealed(data)
            fields["outputs"] = [output_of(output) for output in fields["outputs"]]
            fields["parts"] = {name: PartCount(**part) for name, part in fields["parts"].items()}
            return cls(**fields)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise InvalidReceiptError(f"not a valid receipt: {error}") from error


def outputs_of(part: str, outputs: Iterable[Output]) -> list[Output]:
    """Return the outputs of a part in a shard: `train.bin` and `train.idx` of `train`."""
    return [output for output in outputs if output.path.partition(".")[0] == part]
