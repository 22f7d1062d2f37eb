"""Packs: the second round of an SFT preparation, which lays out the sequences of many shards.

A dataset in a split is packed in groups of consecutive shards, in plan order, of at most `GROUP_TOKENS` tokens or
`GROUP_PACKS` packs, or more if that is more. So memory does not grow with the dataset, workers pack groups side by side, and a
group becomes one Parquet file of about 130 MB. A larger shard is a separate group. Fill of packs of 4096 and of 294,912
tokens (lognormal lengths, medians 512 and 2000), laid out over all 400,000 sequences, in groups, and for parts of 600,000 tokens,
such as those that a shard of 256 MB holds out, each separately and in groups:

                all        groups     separate parts   parts in groups
    4096        99.997 %   99.993 %   99.6 %        99.99 %
    294,912     99.99 %    99.8 %     75 %          99.5 %

Packs are shards in `STORE/packs/<key>/`, and their key is the hash of their members and of the packing
settings. A different pack size reads and packs the stored sequences again, without rendering or encoding: about 30 M tokens per second
and core, most of it for Parquet. A dataset that grows packs only its last group again. The sequences are kept.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from tokenmill.tasks.errors import RunError
from tokenmill.tasks.shards.build import building
from tokenmill.tasks.shards.plan import Finished, Plan, PlannedShard, consecutive
from tokenmill.tasks.shards.publication import parts_with_tokens
from tokenmill.tasks.shards.receipt import RECEIPT, PartCount, Receipt
from tokenmill.tasks.shards.store import Store, read_bytes, size_of
from tokenmill.tasks.sources.files import Slice, SourceFile
from tokenmill.tasks.sources.formats import place_of
from tokenmill.tasks.storage import open_binary
from tokenmill.tasks.tokenize.exact import forget_encoders

from .algorithms import pack
from .parquet import FORMAT, PackWriter, padded
from .parquet import SCHEMA as PACKED
from .sequences import SCHEMA, StoredSequences, index_file, loss_of, read_index, stored_sequences, tokens_file
from .settings import Oversize, PackRecipe

FORMAT_VERSION = 2

SHARDS, PACKS = "sft", "packs"
"""The stages: shards of sequences, and the packs made from them."""

UNPACKED_REASONS: dict[Oversize, str] = {"drop": "oversize", "truncate": "nothing_trained_in_pack", "error": "oversize"}
"""Why a sequence isn't packed: it is too long, or everything before its cut is masked. `EXCLUDED` in `kind` has the sentences."""

GROUP_TOKENS = 1 << 26
GROUP_PACKS = 256


def plan_packs(finished: Sequence[Finished], shards: Store, recipe: PackRecipe, *, rebuild: bool = False) -> Plan:
    """Return the groups of finished shards, in the order of the plan, and the receipts of packed ones, unless `rebuild`."""
    datasets: dict[tuple[str, str, str, str], list[Receipt]] = {}
    for item, part, published in parts_with_tokens(finished):
        datasets.setdefault((*item.dataset, part, published), []).append(item.receipt)
    most = max(GROUP_TOKENS, GROUP_PACKS * recipe.pack_size)
    planned: list[PlannedShard] = []
    for (split, dataset, part, _), receipts in datasets.items():
        groups = consecutive(receipts, lambda receipt: receipt.parts[part].tokens, most)  # noqa: B023 - called at once
        for number, group in enumerate(groups):
            counts = [receipt.parts[part] for receipt in group]
            size = 4 * sum(count.tokens for count in counts)  # as stored, which is what packing reads
            file = SourceFile(f"{part}-{number:05d}", size, PACKS)
            identity = {
                "kind": PACKS,
                "format_version": FORMAT_VERSION,
                "recipe": asdict(recipe),
                "source": {"sequences": [f"{receipt.key}/{part}" for receipt in group]},
            }
            rows = Slice(file, 0, sum(count.documents for count in counts), size=size)
            planned.append(PlannedShard(dataset, split, rows, identity, tuple(group)))
    return Plan.of(Store(shards.place, PACKS), planned, rebuild=rebuild)


def require_fitting(finished: Sequence[Finished], shards: Store, recipe: PackRecipe) -> None:
    """Raises RunError, naming the row, if a sequence is longer than a pack and `oversize` is `error`."""
    if recipe.oversize != "error":
        return
    for item, part, _ in parts_with_tokens(finished):
        # Receipts know the longest sequence; only a shard that has too long a one is looked into.
        if item.receipt.facts[part]["longest"] > recipe.capacity:
            index = read_index(shards, item.receipt, part, ["length", "row"])
            long = int(np.argmax(index["length"].to_numpy() > recipe.capacity))
            raise RunError(
                f"{place_of(item.shard.part, index['row'][long].as_py())}: a sequence of {index['length'][long].as_py():,} "
                f"tokens, but pack_size is {recipe.pack_size:,}; raise pack_size, or set on_oversize=drop or on_oversize=truncate"
            )


def build_packs(shard: PlannedShard, store: Store) -> Receipt:
    """Pack one planned group in this process: one Parquet file, and the receipt of its conversations.

    A conversation without a sequence that fits is dropped. Raises RunError for a member that is missing or damaged.
    """
    recipe = PackRecipe(**shard.identity["recipe"])
    shards = Store(store.place, SHARDS)
    receipts = {receipt.key: receipt for receipt in shard.inputs}
    names = [name.split("/") for name in shard.identity["source"]["sequences"]]
    members = [(receipts[key], part) for key, part in names]
    part, made = names[0][1], members[0][0].identity["recipe"]  # all members have the recipe of their dataset
    metadata = {
        "format": FORMAT, "version": 1, "key": shard.key, "part": part, "pack_size": recipe.pack_size,
        "pad_seq_to_mult": recipe.pad_seq_to_mult, "packing": recipe.packing, "loss_on": made["loss_on"],
        "tokenizer": made["tokenizer"], "template": made["template"],
    }  # fmt: skip
    forget_encoders()  # of the first round, which take more memory than packs do
    with building(shard, store) as builder, stored_sequences(shards, members) as sequences:
        fitted = cut_to(sequences, recipe.capacity) if recipe.oversize == "truncate" else sequences
        # A cut may leave nothing that is trained on.
        chosen = np.flatnonzero((fitted.lengths <= recipe.capacity) & (fitted.trained > 0))
        builder.rows_in = sum(receipt.parts[part].documents for receipt, _ in members)
        # A conversation may be several sequences, and is dropped only if none of them is packed.
        kept = _distinct(fitted.rows[chosen])
        builder.drop(UNPACKED_REASONS[recipe.oversize], builder.rows_in - kept)
        builder.facts[f"{UNPACKED_REASONS[recipe.oversize]}_sequences"] = len(fitted.lengths) - len(chosen)
        builder.truncated = _distinct(fitted.rows[chosen[fitted.lengths[chosen] < sequences.lengths[chosen]]])
        if kept:
            stored = padded(fitted.lengths[chosen], recipe.pad_seq_to_mult)
            packs = pack(stored, fitted.content[chosen], recipe.pack_size, recipe.packing, recipe.seed)
            writer = PackWriter(fitted, replace(packs, sequences=chosen[packs.sequences]), recipe)
            facts = writer.write(builder.open(f"{part}.parquet"), metadata)
            builder.facts[part] = facts
            builder.keep(part, kept, facts["tokens"])
    return builder.receipt


def _distinct(rows: np.ndarray) -> int:
    """The number of different rows; equal ones are neighbors."""
    return int(np.count_nonzero(np.diff(rows))) + bool(rows.size)


def cut_to(sequences: StoredSequences, most: int) -> StoredSequences:
    """Return the sequences, each cut after `most` tokens, of which the last is masked."""
    trained = sequences.trained.copy()
    # Few sequences are cut, and only those are read. Nothing follows the last token, so it isn't trained on.
    for number in np.flatnonzero(sequences.lengths > most).tolist():
        trained[number] = np.count_nonzero(loss_of(sequences.first_tokens(number, most - 1)))
    return replace(sequences, lengths=np.minimum(sequences.lengths, most), trained=trained)


def inspect_sft_shard(store: Store, receipt: Receipt) -> list[str]:
    """Problems of stored sequences, or of packs: format, borders of sequences, masks, and counts against the receipt."""
    if receipt.identity["kind"] != PACKS:
        return [problem for part in receipt.parts for problem in _sequences(store, receipt, part)]
    problems: list[str] = []
    for part in receipt.parts:
        place = store.path(receipt.key, f"{part}.parquet")
        try:
            found = _file(place, receipt.identity["recipe"]["pack_size"], receipt.facts[part])
        except (pa.ArrowException, OSError, KeyError) as error:
            found = [f"cannot be read as packed Parquet: {error}"]
        problems += [f"{place}: {problem}" for problem in found]
    shards, documents = Store(store.place, SHARDS), 0
    for name in receipt.identity["source"]["sequences"]:
        key, _, part = name.partition("/")
        # Without the receipt of every shard there is nothing to compare with.
        if (member := shards.read_receipt(key)) is None:
            return problems
        documents += member.parts[part].documents
    if documents == receipt.rows_in:
        return problems
    place = store.path(receipt.key, RECEIPT)
    return [*problems, f"{place}: {receipt.rows_in:,} conversations, but the shards have {documents:,}"]


def _sequences(store: Store, receipt: Receipt, part: str) -> list[str]:
    place, tokens = store.path(receipt.key, index_file(part)), store.path(receipt.key, tokens_file(part))
    data = read_bytes(place)
    try:
        index = pq.read_table(pa.BufferReader(data or b""), use_threads=False)
    except (pa.ArrowException, OSError) as error:
        return [f"{place}: cannot be read as an index of sequences: {error}"]
    if not index.schema.equals(SCHEMA):
        return [f"{place}: its columns are {index.schema.names}, not the columns of sequences"]
    lengths = index["length"].to_numpy()
    found = PartCount(len(np.unique(index["row"].to_numpy())), int(lengths.sum(dtype=np.int64)))
    if found != receipt.parts[part]:
        return [f"{place}: holds {found}, but its receipt records {receipt.parts[part]}"]
    if size_of(tokens) != 4 * found.tokens:
        return [f"{tokens}: does not hold the {found.tokens:,} tokens of its index"]
    return []


def _file(place: str, pack_size: int, facts: dict[str, int]) -> list[str]:
    with open_binary(place) as stream:
        file = pq.ParquetFile(stream)
        if not file.schema_arrow.equals(PACKED):
            return [f"its columns are {file.schema_arrow.names}, not the columns of packs"]
        found = {"packs": 0, "sequences": 0, "stored": 0, "loss_tokens": 0}
        for batch in file.iter_batches(64, use_threads=False):  # packs, which may be of a million tokens each
            problem = next(_broken_rules(batch, pack_size, found), None)
            if problem:
                return [problem]
    recorded = {name: facts.get(name) for name in found} | {"stored": facts["tokens"] + facts["padding"]}
    return [] if found == recorded else [f"holds {found}, but its receipt records {recorded}"]


def _broken_rules(batch: pa.RecordBatch, pack_size: int, found: dict[str, int]) -> Iterator[str]:
    """The rules that a batch of packs breaks, each only sound if those before hold; its counts are added to `found`."""
    ids, mask, starts = (batch.column(name) for name in ("input_ids", "loss_mask", "seq_start_id"))
    rows, counts = (np.diff(column.offsets.to_numpy()) for column in (ids, starts))
    loss, places = mask.flatten().to_numpy(), starts.flatten().to_numpy()
    if not np.array_equal(rows, np.diff(mask.offsets.to_numpy())):
        yield "loss_mask and input_ids of a pack differ in length"
    if rows.size and int(rows.max()) > pack_size:
        yield f"a pack holds {int(rows.max())} tokens, more than pack_size {pack_size}"
    # Places are within a pack; over all packs of the batch they have to ascend.
    row_starts = np.cumsum(rows) - rows
    firsts = np.cumsum(counts) - counts
    if counts.size and (int(counts.min()) < 1 or places[firsts].any()):
        yield "seq_start_id of a pack does not begin with 0"
    begin = places + np.repeat(row_starts, counts)
    if np.any(np.diff(begin) < 1) or np.any(places >= np.repeat(rows, counts)):
        yield "seq_start_id of a pack does not increase, or exceeds its tokens"
    ends = np.append(begin[1:], rows.sum()) - 1
    if loss[ends].any():
        yield "loss_mask is 1 at the last token of a sequence"
    if np.any((loss != 0) & (loss != 1)) or np.any(ids.flatten().to_numpy() < 0):
        yield "a value of loss_mask is not 0 or 1, or an id is negative"
    found["packs"] += len(rows)
    found["sequences"] += len(places)
    found["stored"] += int(rows.sum())
    found["loss_tokens"] += int(np.count_nonzero(loss))
