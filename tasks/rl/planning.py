"""Planning an RL preparation: blend and settings in, every shard with its identity out. No Prefect, no Dask.

Beyond what any plan reads, the tables that placeholders point into are found, which names them by content, and where
rows are counted in tokens the exactness gate takes a sample of the text of each data set.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import orjson
from tokenmill.tasks.blend.models import SPLITS, Blend, DataSource, TransformSpec
from tokenmill.tasks.chat.conversation import Rejected
from tokenmill.tasks.errors import InputError
from tokenmill.tasks.shards.plan import Plan
from tokenmill.tasks.shards.planning import holdout_of, places, plan_shards
from tokenmill.tasks.shards.publish import publish_bytes
from tokenmill.tasks.shards.store import read_bytes
from tokenmill.tasks.shards.usable import require_separate
from tokenmill.tasks.sources.files import Slice
from tokenmill.tasks.sources.formats import read_records
from tokenmill.tasks.sources.parquet import require_any
from tokenmill.tasks.sources.selection import row_filter
from tokenmill.tasks.sources.slices import ContentIndex
from tokenmill.tasks.storage import SourceIdentity, is_local, join
from tokenmill.tasks.tokenize.gate import Verdict, judge
from tokenmill.tasks.tokenize.load import find_vocabulary
from tokenmill.tasks.tokenize.settings import Backend
from tokenmill.tasks.tokenize.vocabulary import Vocabulary

from .chain import Chain, tables_asked_for
from .settings import RlRecipe, RlSettings
from .shard import Work
from .splits import by_source_splits, held_out_from
from .tables import TableFiles, TableSource, find_table, table_slices
from .targets import check_of, texts_of

KIND = "rl"
FORMAT_VERSION = 4
"""Raised whenever the same recipe and source would give other bytes than before."""

EVERY_FIELD: Sequence[str] = ()


@dataclass(frozen=True)
class RlPlan:
    """The plan, the settings it was made with, and by `split/name` of each data set its transforms, and what the gate
    said of it (nothing where no tokens are counted).
    """

    blend: Blend
    settings: RlSettings
    output_dir: str
    plan: Plan
    chains: Mapping[str, Chain]
    verdicts: Mapping[str, Verdict]
    vocabulary: Vocabulary | None = field(repr=False)


class _Tables:
    """Finds tables, each once for a plan; what local ones contain is remembered in the store."""

    def __init__(self, store: str, identity: SourceIdentity) -> None:
        self._place = join(store, "tables.json")
        self._identity: SourceIdentity = identity
        self._index = ContentIndex.load(read_bytes(self._place) or b"{}")
        self._found: dict[TableSource, TableFiles] = {}

    def of(self, specs: Sequence[TransformSpec]) -> dict[str, TableFiles]:
        """The tables that some transforms need. Raises InputError for what is no transform and for a table that is not there."""
        return {name: self._find(source, name) for name, source in tables_asked_for(specs).items()}

    def _find(self, source: TableSource, name: str) -> TableFiles:
        if source not in self._found:
            self._found[source] = find_table(source, name, self._index, self._identity)
        return self._found[source]

    def remember(self) -> None:
        """Write down what was hashed."""
        if self._index.changed:
            publish_bytes(self._place, self._index.dump())


def require_choices(blend: Blend, settings: RlSettings) -> None:
    """Raises InputError for what a look at the choices alone shows: what is no transform, in the blend or the settings,
    local tables and a tokenizer that are not there, and transforms that no data set takes up.
    """
    sources = [source for part in blend.parts().values() for source in part]
    for specs in [settings.transforms, *(source.transforms for source in sources)]:
        for name, table in tables_asked_for(specs).items():
            if is_local(table.path):
                table_slices(table, name)
    if settings.max_tokens is not None:
        find_vocabulary(settings.tokenizer)
    if settings.transforms and all(source.transforms for source in sources):
        raise InputError(
            "transforms: every data set of this blend names its own, so these would be passed over; leave them out, or "
            "change the blend"
        )


def _tables_of(blend: Blend, settings: RlSettings) -> list[tuple[str, str]]:
    """What messages call each table that placeholders point into, and its path."""
    specs = [settings.transforms, *(source.transforms for part in blend.parts().values() for source in part)]
    found = [table for each in specs for table in tables_asked_for(each).items()]
    return [(f"table {name!r}", table.path) for name, table in found]


def plan_rl(blend: Blend, settings: RlSettings, output_dir: str | None) -> RlPlan:
    """Plan `blend` for `output_dir`; without one, nothing counts as built and hashes are remembered per user.

    Raises InputError for anything that a person must mend first.
    """
    output_dir, store = places(blend, settings, output_dir, KIND)
    require_choices(blend, settings)
    require_separate(_tables_of(blend, settings), store.place, output_dir)
    blend = by_source_splits(blend) if settings.splits == "source" else blend
    vocabulary = find_vocabulary(settings.tokenizer) if settings.max_tokens is not None else None
    tables = _Tables(store.place, settings.source_identity)
    chains: dict[str, Chain] = {}
    verdicts: dict[str, Verdict] = {}

    def recipes(source: DataSource, split: str, slices: Sequence[Slice]) -> list[RlRecipe]:
        name, specs = f"{split}/{source.name}", source.transforms or settings.transforms
        chains[name] = Chain(specs, tables.of(specs))
        if vocabulary is not None:
            verdicts[name] = _judged(source, slices, settings, chains[name], vocabulary, store.place)
        backend = verdicts[name].backend if vocabulary is not None else None
        held_out = [None] * len(slices)
        if settings.val_holdout is not None and split not in SPLITS:
            held_out = held_out_from(slices, settings.val_holdout)
        return [_recipe(source, split, settings, chains[name], vocabulary, backend, row) for row in held_out]

    plan = plan_shards(blend, settings, store, FORMAT_VERSION, lambda _: EVERY_FIELD, require_any, recipes)
    tables.remember()
    return RlPlan(blend, settings, output_dir, plan, chains, verdicts, vocabulary)


def _judged(
    source: DataSource, slices: Sequence[Slice], settings: RlSettings, chain: Chain, vocabulary: Vocabulary, store: str
) -> Verdict:
    texts = partial(_texts, source, settings, chain)
    which = orjson.dumps([chain.identity(), row_filter(source).wanted, settings.target]).decode()
    return judge(vocabulary, slices, texts, which, store, literal=True)


def _texts(source: DataSource, settings: RlSettings, chain: Chain, part: Slice) -> Iterator[str]:
    """The texts of a slice that will be counted."""
    work, chosen = Work(chain.functions(), check_of(settings.target), None), row_filter(source)
    for batch in read_records(part, EVERY_FIELD):
        for record in batch.records:
            found = work.done(record) if chosen.keeps(record) else None
            if found is not None and not isinstance(found, Rejected):
                yield from texts_of(settings.target)(found)


def _recipe(
    source: DataSource, split: str, settings: RlSettings, chain: Chain, vocabulary: Vocabulary | None,
    backend: Backend | None, valid_from: int | None,
) -> RlRecipe:  # fmt: skip
    by_hash = holdout_of(settings, split) if settings.val_holdout is None else None
    return RlRecipe(
        filters=row_filter(source).wanted,
        transforms=chain.identity(),
        target=settings.target,
        max_tokens=settings.max_tokens,
        tokenizer=vocabulary.fingerprint if vocabulary else None,
        backend=backend,
        compression=settings.compression,
        holdout_valid=by_hash.valid if by_hash else 0.0,
        holdout_test=by_hash.test if by_hash else 0.0,
        holdout_seed=by_hash.seed if by_hash else None,
        valid_from=valid_from,
    )
