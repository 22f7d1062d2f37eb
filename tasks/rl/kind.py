"""RL: rows become JSON Lines that NeMo-RL and NeMo-Gym read, after transforms and with questions filled in from tables.

Planning finds the tables that placeholders refer to and identifies them by content. If `max_tokens` is set, it also reads a
sample of the text in each dataset for the exactness gate.

    OUT/train|valid|test/data_00000_1a2b3c4d.jsonl   the shards' files (hard links on a local disk)
    OUT/splits/train_9f8e7d6c.jsonl                  all rows of the split, in the order of the plan, or of batches

RL trainers take one file per dataset and no globs, so the shards of a split are joined into one file, at disk speed; zstd frames are
concatenated without decompression. Names contain a hash of the content, so that a path never refers to different data later.
"""

import hashlib
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from glob import has_magic
from typing import Any

import orjson
from tokenmill.tasks.blend.models import SPLITS, Blend, DataSource, Split, TransformSpec
from tokenmill.tasks.chat.conversation import Rejected
from tokenmill.tasks.errors import InputError, RunError
from tokenmill.tasks.shards.kind import Kind, Planned, Release, Stage
from tokenmill.tasks.shards.plan import Finished, PlannedShard
from tokenmill.tasks.shards.planning import held_out, places, plan_shards, require_separate
from tokenmill.tasks.shards.publication import Listed, Published, Weights, blend_json, blend_weights
from tokenmill.tasks.shards.publish import Output, join_files, link, place_files, publish_bytes
from tokenmill.tasks.shards.receipt import Receipt, recipe_of
from tokenmill.tasks.shards.settings import OnBadRow
from tokenmill.tasks.shards.store import Store, read_bytes
from tokenmill.tasks.sources.discovery import discover
from tokenmill.tasks.sources.files import Slice
from tokenmill.tasks.sources.formats import count_rows, describe, read_records
from tokenmill.tasks.sources.parquet import require_any
from tokenmill.tasks.sources.row_filter import row_filter
from tokenmill.tasks.sources.selection import MissingSplitError
from tokenmill.tasks.sources.slices import ContentIndex
from tokenmill.tasks.storage import ChangeDetection, is_local, join
from tokenmill.tasks.tokenize.exact import encoder_of
from tokenmill.tasks.tokenize.gate import Gate, Verdict, gate_notes
from tokenmill.tasks.tokenize.load import commit_notes, commit_of, find_vocabulary, pinned, planned_vocabulary
from tokenmill.tasks.tokenize.settings import Backend, TokenizerSource
from tokenmill.tasks.tokenize.vocabulary import Vocabulary

from .batches import BatchPlan, RowFile, write_ordered
from .settings import Compression, RlRecipe, RlSettings
from .shard import ENDINGS, RowLengths, Work, inspect_rl_shard, write_shard
from .tables import TableFiles, TableSource, find_table, table_slices
from .targets import TARGETS
from .transforms import TransformList, tables_asked_for

FOLDER = "splits"
SHARD = re.compile(r"data_\d{5,}_[0-9a-f]{8}\.jsonl(\.zst)?")
WHOLE_FILE = re.compile(r"(train|valid|test)_[0-9a-f]{8}\.jsonl(\.zst)?")

KEYS = {"train": "train", "valid": "val", "test": "test"}
"""The manifest's names for the whole files, as configurations of NeMo-RL recipes expect them."""


@dataclass(frozen=True, slots=True)
class _RlFile:
    """A part of a shard: its shard, its file in the store, and its name in the output folder."""

    item: Finished
    documents: int
    stored: str
    name: str


@dataclass(frozen=True, slots=True)
class JsonLinesLayout:
    """Row files and one joined file per split; `weights` are the blend's, `batches` the order of training rows, if any."""

    weights: Weights
    compression: Compression
    batches: BatchPlan | None = None

    @property
    def own(self) -> Mapping[str, re.Pattern[str]]:
        """The shards of each split, and the joined files."""
        return {**dict.fromkeys(SPLITS, SHARD), FOLDER: WHOLE_FILE}

    def lay_out(self, output_dir: str, store: Store, finished: Sequence[Finished]) -> Published:
        """Link every shard on a local disk (elsewhere its name is its place in the store), and join the files of each split."""
        splits = self._files(output_dir, store, finished)
        names: dict[str, dict[str, list[str]]] = {}
        listed: list[Listed] = []
        written: list[Output] = []
        whole: dict[str, Any] = dict.fromkeys(KEYS.values(), "")
        for split, files in splits.items():
            place_files([(file.stored, file.name) for file in files if file.name != file.stored])
            for file in files:
                names.setdefault(file.item.shard.place, {})[split] = [file.name]
                listed.append(Listed(split, file.item.dataset, file.name, file.documents))
            output, entries = self._join(output_dir, split, files)
            written.append(output)
            whole |= entries
            whole[KEYS[split]] = join(output_dir, output.path)
        header: dict[str, Any] = {**whole, "run_hash": _hash([file for files in splits.values() for file in files])}
        return Published(names, blend_json(listed, self.weights), written, header)

    def _files(self, output_dir: str, store: Store, finished: Sequence[Finished]) -> dict[str, list[_RlFile]]:
        """The files of each split that holds any rows, in the order of the plan."""
        linked = is_local(output_dir) and is_local(store.place)
        splits: defaultdict[str, list[_RlFile]] = defaultdict(list)
        for item in finished:
            for part, count in item.receipt.parts.items():
                split, ending = item.split_of(part), ENDINGS[self.compression]
                stored = store.path(item.key, f"{part}.{ending}")
                name = join(output_dir, split, f"data_{len(splits[split]):05d}_{item.key[:8]}.{ending}")
                splits[split].append(_RlFile(item, count.documents, stored, name if linked else stored))
        return {split: splits[split] for split in SPLITS if splits[split]}

    def _join(self, output_dir: str, split: str, files: Sequence[_RlFile]) -> tuple[Output, dict[str, Any]]:
        """Write the joined file of a split, whose path is relative to the output folder; its record, and entries of the manifest."""
        batches = self.batches if split == "train" else None
        order = batches.identity() if batches else None
        path = join(FOLDER, f"{split}_{_hash(files, order)}.{ENDINGS[self.compression]}")
        place = join(output_dir, path)
        if batches is not None:
            rows = [RowFile(file.item.shard.dataset, file.documents, file.stored) for file in files]
            output, entries = write_ordered(rows, batches, place)
            return replace(output, path=path), entries
        if len(files) == 1 and is_local(place) and is_local(files[0].stored):
            link(files[0].stored, place)
            name = files[0].stored.rpartition("/")[2]
            recorded = next(output for output in files[0].item.receipt.outputs if output.path == name)
            return replace(recorded, path=path), {}
        return replace(join_files([file.stored for file in files], place), path=path), {}


def _hash(files: Sequence[_RlFile], order: Mapping[str, Any] | None = None) -> str:
    """A hash of the contents in some files, and of the order of their rows if it is not theirs: eight hexadecimal digits."""
    content = [(file.item.key, file.stored.rpartition("/")[2]) for file in files]
    return hashlib.sha256(orjson.dumps([content, order] if order else content)).hexdigest()[:8]


FORMAT_VERSION = 8
"""Increase it when the same recipe and source give different bytes."""

EVERY_FIELD: Sequence[str] = ()


@dataclass(frozen=True)
class RlFound:
    """The vocabulary, if tokens are counted, and by `split/name` each dataset's transforms and the gate's verdict."""

    vocabulary: Vocabulary | None
    chains: Mapping[str, TransformList]
    verdicts: Mapping[str, Verdict]


RlPlan = Planned[RlSettings, RlFound]


class _TableFinder:
    """Finds tables, each once per plan; the hashes of local tables are cached in the store."""

    def __init__(self, store: str, identity: ChangeDetection) -> None:
        self._place = join(store, "tables.json")
        self._identity: ChangeDetection = identity
        self._index = ContentIndex.load(read_bytes(self._place) or b"{}")
        self._found: dict[TableSource, TableFiles] = {}

    def of(self, specs: Sequence[TransformSpec]) -> dict[str, TableFiles]:
        """Return the tables that some transforms need. Raises InputError for an invalid transform or a missing table."""
        asked = tables_asked_for(specs)
        for name, source in asked.items():
            if source not in self._found:
                self._found[source] = find_table(source, name, self._index, self._identity)
        return {name: self._found[source] for name, source in asked.items()}

    def remember(self) -> None:
        """Save the cache of hashes."""
        if self._index.changed:
            publish_bytes(self._place, self._index.dump())


def _tables_of(blend: Blend, settings: RlSettings) -> list[tuple[str, str]]:
    """The name in messages and the path of each table that placeholders refer to."""
    specs = [settings.transforms, *(source.transforms for part in blend.parts().values() for source in part)]
    found = [table for each in specs for table in tables_asked_for(each).items()]
    return [(f"table {name!r}", table.path) for name, table in found]


def _judged(
    source: DataSource,
    slices: Sequence[Slice],
    settings: RlSettings,
    chain: TransformList,
    vocabulary: Vocabulary,
    store: str,
) -> Verdict:
    texts = partial(_texts, settings, chain)
    which = orjson.dumps([chain.identity(), row_filter(source).wanted, settings.target]).decode()
    return Gate(vocabulary, slices, texts, which, store, literal=True).verdict()


def _texts(settings: RlSettings, chain: TransformList, part: Slice) -> Iterator[str]:
    """The texts of a slice whose tokens will be counted."""
    target = TARGETS[settings.target]
    work = Work(chain.functions(), target)
    for batch in read_records(part, EVERY_FIELD):
        for found in work.done(batch.records):
            if not isinstance(found, Rejected):
                yield from target.texts(found)


def _recipe(
    source: DataSource, split: str, settings: RlSettings, chain: TransformList, vocabulary: Vocabulary | None,
    backend: Backend | None, valid_from: int | None,
) -> RlRecipe:  # fmt: skip
    by_hash = held_out(settings, split if settings.val_holdout is None else "train")
    return recipe_of(
        RlRecipe,
        settings,
        filters=row_filter(source).wanted,
        transforms=chain.identity(),
        tokenizer=vocabulary.fingerprint if vocabulary else None,
        backend=backend,
        valid_from=valid_from,
        **by_hash,
    )


def worker_arguments(planned: RlPlan) -> dict[str, Any]:
    """Return the arguments that workers get besides the shard, such as the transforms of every dataset."""
    vocabulary = planned.found.vocabulary
    return {
        "chains": {name: chain.record() for name, chain in planned.found.chains.items()},
        "tokenizer": pinned(planned.settings.tokenizer, vocabulary.commit if vocabulary else None).model_dump(),
        "on_bad_row": planned.settings.on_bad_row,
    }


def build_rl_shard(
    shard: PlannedShard,
    store: Store,
    chains: Mapping[str, Mapping[str, Any]],
    tokenizer: Mapping[str, Any],
    on_bad_row: OnBadRow,
) -> Receipt:
    """Build one planned shard in this process; `chains` has a record of the TransformList of each `split/name`.

    Raises RunError if the tables or the tokenizer found here differ from the plan's.
    """
    recipe = RlRecipe(**shard.identity["recipe"])
    chain = TransformList.from_record(chains[f"{shard.split}/{shard.dataset}"])
    work = Work(chain.functions(), TARGETS[recipe.target], _lengths(recipe, tokenizer))
    return write_shard(shard, recipe, work, store, on_bad_row)


def _lengths(recipe: RlRecipe, tokenizer: Mapping[str, Any]) -> RowLengths | None:
    if recipe.max_tokens is None or recipe.backend is None:
        return None
    vocabulary = planned_vocabulary(TokenizerSource.model_validate(tokenizer), recipe.tokenizer)
    encoder = encoder_of(vocabulary, recipe.backend, literal=True)
    return RowLengths(TARGETS[recipe.target].texts, encoder, recipe.max_tokens)


def _require_one_form(finished: Sequence[Finished]) -> None:
    """Raises RunError if the file of a split would mix two forms of rows: its reader accepts either, not both."""
    forms: dict[str, dict[str, str]] = {}
    for item in finished:
        for part, names in item.receipt.facts["forms"].items():
            forms.setdefault(item.split_of(part), {}).update(dict.fromkeys(names, item.shard.dataset))
    for split, found in forms.items():
        if len(found) > 1:
            where = ", ".join(f"{name} (dataset {dataset!r})" for name, dataset in sorted(found.items()))
            raise RunError(
                f"rows of {split} have different forms, which one file must not mix: {where}; convert them to "
                "one form with transforms, or prepare the datasets separately"
            )


def _mode(planned: RlPlan) -> str:
    """How rows were prepared, in the terms that trainers' tools expect in a manifest: `resolve`, else `local_split` if the last
    rows are held out, else `transform` or `passthrough`.
    """
    found = planned.found
    if any(chain.tables for chain in found.chains.values()):
        return "resolve"
    if planned.settings.val_holdout is not None:
        return "local_split"
    return "transform" if any(chain.specs for chain in found.chains.values()) else "passthrough"


def by_source_splits(blend: Blend) -> Blend:
    """Return the blend with every split of its datasets; a file, and a dataset with `split`, are training data.

    Raises InputError for a blend that lists splits already, and for a dataset without training data.
    """
    if blend.datasets is None:
        raise InputError("splits=source: this blend lists its splits itself; remove the setting")
    found = {split: [part for source in blend.datasets for part in _of_split(source, split)] for split in SPLITS}
    return blend.model_copy(update={"datasets": None, **{split: sources or None for split, sources in found.items()}})


def _of_split(source: DataSource, split: Split) -> Iterator[DataSource]:
    if source.split is not None or (describe(source.path) and not has_magic(source.path)):
        yield from [source] if split == "train" else []
        return
    part = source.model_copy(update={"split": "validation" if split == "valid" else split})
    try:
        discover(part)
    except MissingSplitError:
        if split == "train":
            raise
        return
    yield part


def held_out_from(slices: Sequence[Slice], count: int) -> list[int | None]:
    """For each slice, the number of its first row among the last `count` rows of the dataset, or None.

    Blank and bad rows count. Only the last slices are read. A dataset of at most `count` rows keeps all for training.
    """
    found: list[int | None] = [None] * len(slices)
    left = count
    for number in reversed(range(len(slices))):
        if not left:
            return found
        rows = count_rows(slices[number], sys.maxsize)
        if rows > left:
            found[number] = rows - left
            return found
        found[number] = 0
        left -= rows
    return [None] * len(slices)


class ReinforcementLearning(Kind[RlSettings, RlFound]):
    """Rows for reinforcement learning."""

    name = "rl"
    settings = RlSettings
    libraries = ("tokenmill", "orjson", "zstandard", "pyarrow", "gigatoken", "fastokens", "tokenizers")
    stages = (Stage("transform-shards", build_rl_shard, arguments=worker_arguments),)
    formats = {"rl": range(4, FORMAT_VERSION + 1)}
    training_advice = "hand it to NeMo-RL with launcher=nemo-rl"

    def plan(self, blend: Blend, settings: RlSettings, output_dir: str | None) -> RlPlan:
        output_dir, store = places(blend, settings, output_dir, "rl")
        self.check(blend, settings, output_dir)
        require_separate(_tables_of(blend, settings), store.place, output_dir)
        blend = by_source_splits(blend) if settings.splits == "source" else blend
        vocabulary = find_vocabulary(settings.tokenizer) if settings.max_tokens is not None else None
        tables = _TableFinder(store.place, settings.change_detection)
        chains: dict[str, TransformList] = {}
        verdicts: dict[str, Verdict] = {}

        def recipes(source: DataSource, split: str, slices: Sequence[Slice]) -> list[RlRecipe]:
            name, specs = f"{split}/{source.name}", source.transforms or settings.transforms
            chains[name] = TransformList(specs, tables.of(specs))
            if vocabulary is not None:
                verdicts[name] = _judged(source, slices, settings, chains[name], vocabulary, store.place)
            backend = verdicts[name].backend if vocabulary is not None else None
            held_out = [None] * len(slices)
            if settings.val_holdout is not None and split not in SPLITS:
                held_out = held_out_from(slices, settings.val_holdout)
            return [_recipe(source, split, settings, chains[name], vocabulary, backend, row) for row in held_out]

        plan = plan_shards(blend, settings, store, FORMAT_VERSION, lambda _: EVERY_FIELD, require_any, recipes)
        tables.remember()
        found = RlFound(vocabulary, chains, verdicts)
        notes = (commit_notes(settings.tokenizer, vocabulary) if vocabulary else {}) | gate_notes(verdicts)
        return Planned(blend, settings, output_dir, plan, found, notes)

    def check(self, blend: Blend, settings: RlSettings, output_dir: str) -> None:
        sources = [source for part in blend.parts().values() for source in part]
        for specs in [settings.transforms, *(source.transforms for source in sources)]:
            for name, table in tables_asked_for(specs).items():
                if is_local(table.path):
                    table_slices(table, name)
        if settings.max_tokens is not None:
            find_vocabulary(settings.tokenizer)
        if settings.transforms and all(source.transforms for source in sources):
            raise InputError(
                "transforms: every dataset of this blend lists its own, so these would be ignored; remove them, "
                "or change the blend"
            )
        if blend.budgeted and (settings.batch_size is None or settings.sampling == "none"):
            raise InputError(
                "the blend has a budget, which batches follow; set batch_size, and sampling=down or sampling=up"
            )

    def release(self, planned: RlPlan, finished: Sequence[Finished]) -> Release:
        _require_one_form(finished)
        found = planned.found
        splits = {source.split for sources in planned.blend.parts().values() for source in sources if source.split}
        header: dict[str, Any] = {"mode": _mode(planned), "source_splits": sorted(splits)}
        if found.vocabulary is not None:
            gate = {name: asdict(verdict) for name, verdict in found.verdicts.items()}
            header["tokenizer"] = {
                "fingerprint": found.vocabulary.fingerprint,
                **commit_of(found.vocabulary),
                "gate": gate,
            }
        batches = BatchPlan.of(planned.blend, planned.settings)
        return Release(JsonLinesLayout(blend_weights(planned.blend), planned.settings.compression, batches), header)

    def inspect(self, store: Store, receipt: Receipt) -> list[str]:
        return inspect_rl_shard(store, receipt)

    def summary(self, manifest: Mapping[str, Any]) -> list[str]:
        batches = manifest.get("batches")
        if batches is None:
            return []
        shares = ", ".join(
            f"{name} {each['most']}" if each["fewest"] == each["most"] else f"{name} {each['fewest']} to {each['most']}"
            for name, each in batches["datasets"].items()
        )
        lines = [f"{batches['count']:,} batches of {batches['size']} rows: {shares}"]
        if found := batches.get("curriculum"):
            lines.append(
                f"mean pass rate of a batch: {found['first']:.2f} in the first, {found['last']:.2f} in the last"
            )
        unread = {name: each["unread"] + sum(each["left_out"].values()) for name, each in batches["datasets"].items()}
        if any(unread.values()):
            lines.append(
                "training rows not read: " + ", ".join(f"{name} {rows:,}" for name, rows in unread.items() if rows)
            )
        return lines


RL = ReinforcementLearning()
