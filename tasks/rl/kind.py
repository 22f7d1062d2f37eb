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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from glob import has_magic
from typing import Any

import orjson
from tokenmill.tasks.blend.models import SPLITS, Blend, DataSource
from tokenmill.tasks.chat.conversation import Rejected
from tokenmill.tasks.errors import InputError, RunError
from tokenmill.tasks.shards.kind import Kind, Planned, Release, Stage
from tokenmill.tasks.shards.plan import Finished, PlannedShard
from tokenmill.tasks.shards.planning import held_out, places, plan_shards, require_separate
from tokenmill.tasks.shards.publication import Listed, Named, Published, Weights, blend_json, blend_weights
from tokenmill.tasks.shards.publish import Output, join_files, link, place_files, publish_bytes
from tokenmill.tasks.shards.receipt import Receipt, recipe_of
from tokenmill.tasks.shards.records import Manifest
from tokenmill.tasks.shards.settings import OnBadRow
from tokenmill.tasks.shards.store import Store, read_bytes
from tokenmill.tasks.sources.discovery import discover
from tokenmill.tasks.sources.files import Slice
from tokenmill.tasks.sources.formats import count_rows, describe, read_records
from tokenmill.tasks.sources.parquet import require_any
from tokenmill.tasks.sources.row_filter import row_filter
from tokenmill.tasks.sources.selection import MissingSplitError
from tokenmill.tasks.sources.slices import ContentIndex
from tokenmill.tasks.storage import is_local, join
from tokenmill.tasks.tokenize.exact import encoder_of
from tokenmill.tasks.tokenize.gate import Gate, Verdict, gate_notes
from tokenmill.tasks.tokenize.load import commit_notes, commit_of, find_vocabulary, pinned, planned_vocabulary
from tokenmill.tasks.tokenize.settings import TokenizerSource
from tokenmill.tasks.tokenize.vocabulary import Vocabulary

from .batches import BatchPlan, RowFile, write_ordered
from .rows import RowTarget
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
        named = Named(output_dir, is_local(output_dir) and is_local(store.place))
        splits: dict[str, list[RowFile]] = {split: [] for split in SPLITS}
        for item in finished:
            for part, count in item.receipt.parts.items():
                split, stored = item.split_of(part), store.path(item.key, f"{part}.{ENDINGS[self.compression]}")
                # Numbered, so that a listing of the folder has the order of the plan.
                name = named.add(item, split, stored, split, "data_{:05d}_{}")
                splits[split].append(RowFile(item, count.documents, stored, name))
        place_files(named.pairs)
        listed: list[Listed] = []
        written: list[Output] = []
        whole: dict[str, Any] = dict.fromkeys(KEYS.values(), "")
        for split, files in splits.items():
            if not files:
                continue
            listed += [Listed(split, file.item.dataset, file.name, file.documents) for file in files]
            output, entries = self._join(output_dir, split, files)
            written.append(output)
            whole |= entries
            whole[KEYS[split]] = join(output_dir, output.path)
        header: dict[str, Any] = {**whole, "run_hash": _hash([file for files in splits.values() for file in files])}
        return Published(named.names, blend_json(listed, self.weights), written, header)

    def _join(self, output_dir: str, split: str, files: Sequence[RowFile]) -> tuple[Output, dict[str, Any]]:
        """Write the joined file of a split, whose path is relative to the output folder; its record, and entries of the manifest."""
        # Only training rows are put in batches; a trainer reads the others once, in any order.
        batches = self.batches if split == "train" else None
        order = batches.identity() if batches else None
        path = join(FOLDER, f"{split}_{_hash(files, order)}.{ENDINGS[self.compression]}")
        place = join(output_dir, path)
        if batches is not None:
            output, entries = write_ordered(files, batches, place)
            return replace(output, path=path), entries
        # A link of a split's only file costs nothing, and its receipt has the hash already.
        if len(files) == 1 and is_local(place) and is_local(files[0].stored):
            link(files[0].stored, place)
            name = files[0].stored.rpartition("/")[2]
            recorded = next(output for output in files[0].item.receipt.outputs if output.path == name)
            return replace(recorded, path=path), {}
        return replace(join_files([file.stored for file in files], place), path=path), {}


def _hash(files: Sequence[RowFile], order: Mapping[str, Any] | None = None) -> str:
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


def _texts(target: RowTarget, chain: TransformList, part: Slice) -> Iterator[str]:
    """The texts of a slice whose tokens will be counted."""
    work = Work(chain.functions(), target)
    for batch in read_records(part, EVERY_FIELD):
        for found in work.done(batch.records):
            if not isinstance(found, Rejected):
                yield from target.texts(found)


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
    # Tables travel with their places; the recipe has only their content, which doesn't change with these.
    chain = TransformList.from_record(chains[f"{shard.split}/{shard.dataset}"])
    target, lengths = TARGETS[recipe.target], None
    if recipe.max_tokens is not None and recipe.backend is not None:
        vocabulary = planned_vocabulary(TokenizerSource.model_validate(tokenizer), recipe.tokenizer)
        lengths = RowLengths(target.texts, encoder_of(vocabulary, recipe.backend, literal=True), recipe.max_tokens)
    return write_shard(shard, recipe, Work(chain.functions(), target, lengths), store, on_bad_row)


def by_source_splits(blend: Blend) -> Blend:
    """Return the blend with every split of its datasets; a file, and a dataset with `split`, are training data.

    Raises InputError for a blend that lists splits already, and for a dataset without training data.
    """
    if blend.datasets is None:
        raise InputError("splits=source: this blend lists its splits itself; remove the setting")
    found: dict[str, list[DataSource]] = {split: [] for split in SPLITS}
    for source in blend.datasets:
        # A file has no splits to choose from, and rows to train on must never be validated with.
        if source.split is not None or (describe(source.path) and not has_magic(source.path)):
            found["train"].append(source)
            continue
        for split in SPLITS:
            part = source.model_copy(update={"split": "validation" if split == "valid" else split})
            try:
                discover(part)
            except MissingSplitError:
                # Many datasets lack validation or test data, but without training data there is nothing to prepare.
                if split == "train":
                    raise
            else:
                found[split].append(part)
    return blend.model_copy(update={"datasets": None, **{split: sources or None for split, sources in found.items()}})


def held_out_from(slices: Sequence[Slice], count: int) -> list[int | None]:
    """For each slice, the number of its first row among the last `count` rows of the dataset, or None.

    Blank and bad rows count. Only the last slices are read. A dataset of at most `count` rows keeps all for training.
    """
    found: list[int | None] = [None] * len(slices)
    left = count
    # From the end, so that only the slices that hold the last rows are read.
    for number in reversed(range(len(slices))):
        if not left:
            return found
        rows = count_rows(slices[number], sys.maxsize)
        if rows > left:
            found[number] = rows - left
            return found
        found[number] = 0
        left -= rows
    # All rows would be held out.
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
        specs = [settings.transforms, *(source.transforms for part in blend.parts().values() for source in part)]
        asked = [table for each in specs for table in tables_asked_for(each).items()]
        require_separate([(f"table {name!r}", table.path) for name, table in asked], store.place, output_dir)
        blend = by_source_splits(blend) if settings.splits == "source" else blend
        vocabulary = find_vocabulary(settings.tokenizer) if settings.max_tokens is not None else None
        # Tables are large, and hashed once: their hashes stay in the store, and datasets share them.
        index_place = join(store.place, "tables.json")
        index = ContentIndex.load(read_bytes(index_place) or b"{}")
        known: dict[TableSource, TableFiles] = {}
        chains: dict[str, TransformList] = {}
        verdicts: dict[str, Verdict] = {}

        def recipes(source: DataSource, split: str, slices: Sequence[Slice]) -> list[RlRecipe]:
            name, specs = f"{split}/{source.name}", source.transforms or settings.transforms
            asked = tables_asked_for(specs)
            for each, table in asked.items():
                if table not in known:
                    known[table] = find_table(table, each, index, settings.change_detection)
            chain = chains[name] = TransformList(specs, {each: known[table] for each, table in asked.items()})
            wanted = row_filter(source).wanted
            if vocabulary is not None:
                texts = partial(_texts, TARGETS[settings.target], chain)
                which = orjson.dumps([chain.identity(), wanted, settings.target]).decode()
                verdicts[name] = Gate(vocabulary, slices, texts, which, store.place, literal=True).verdict()
            valid_from: list[int | None] = [None] * len(slices)
            if settings.val_holdout is not None and split not in SPLITS:
                valid_from = held_out_from(slices, settings.val_holdout)
            common: dict[str, Any] = {
                "filters": wanted,
                "transforms": chain.identity(),
                "tokenizer": vocabulary.fingerprint if vocabulary else None,
                "backend": verdicts[name].backend if vocabulary else None,
                # Either the last rows are held out, or shares by hash.
                **held_out(settings, split if settings.val_holdout is None else "train"),
            }
            return [recipe_of(RlRecipe, settings, valid_from=row, **common) for row in valid_from]

        plan = plan_shards(blend, settings, store, FORMAT_VERSION, lambda _: EVERY_FIELD, require_any, recipes)
        if index.changed:
            publish_bytes(index_place, index.dump())
        found = RlFound(vocabulary, chains, verdicts)
        notes = (commit_notes(settings.tokenizer, vocabulary) if vocabulary else {}) | gate_notes(verdicts)
        return Planned(blend, settings, output_dir, plan, found, notes)

    def check(self, blend: Blend, settings: RlSettings, output_dir: str) -> None:
        sources = [source for part in blend.parts().values() for source in part]
        for specs in [settings.transforms, *(source.transforms for source in sources)]:
            for name, table in tables_asked_for(specs).items():
                if is_local(table.path):  # others would need a network to check
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
        # The reader of a split's file accepts either form of rows, not both.
        forms: dict[str, dict[str, str]] = {}
        for item in finished:
            for part, names in item.receipt.facts["forms"].items():
                forms.setdefault(item.split_of(part), {}).update(dict.fromkeys(names, item.shard.dataset))
        for split, mixed in forms.items():
            if len(mixed) > 1:
                where = ", ".join(f"{name} (dataset {dataset!r})" for name, dataset in sorted(mixed.items()))
                raise RunError(
                    f"rows of {split} have different forms, which one file must not mix: {where}; convert them to "
                    "one form with transforms, or prepare the datasets separately"
                )
        found = planned.found
        # The first that applies, in the terms that trainers' tools expect in a manifest.
        modes = {
            "resolve": any(chain.tables for chain in found.chains.values()),
            "local_split": planned.settings.val_holdout is not None,
            "transform": any(chain.specs for chain in found.chains.values()),
            "passthrough": True,
        }
        mode = next(name for name, applies in modes.items() if applies)
        splits = {source.split for sources in planned.blend.parts().values() for source in sources if source.split}
        header: dict[str, Any] = {"mode": mode, "source_splits": sorted(splits)}
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

    def summary(self, manifest: Manifest) -> list[str]:
        if "batches" not in manifest:
            return []
        batches = manifest["batches"]
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
