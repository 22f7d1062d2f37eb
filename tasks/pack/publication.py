"""Publication of packs: a folder with Parquet files per split, which trainers read directly.

OUT/splits/train|valid|test/000000__<dataset>__1a2b3c4d.parquet the pack files (hard links on a local disk)
OUT/splits/packing_train|valid|test.json maximum length and number of sequences

Trainers read the files of a folder in the order of their names, so the numbers put them in a seeded order that mixes the data
sets. Further copies of a file end in `__1`, `__2`, …; if only its leading packs are wanted, they become a separate file,
`__0_leading_120`. A split without packs doesn't get a folder. On an object store, which lacks links, the store copies the files.

A link costs 0.2 to 4 ms, most of it for syncing the folder; a copy within S3 costs a request. Only files that are cut are read.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import orjson
from tokenmill.tasks.blend.models import SPLITS
from tokenmill.tasks.shards.plan import Finished
from tokenmill.tasks.shards.publication import Listed, Published, Weights, blend_json, parts_with_tokens
from tokenmill.tasks.shards.publish import Output, place_files, publish_bytes
from tokenmill.tasks.shards.store import Store
from tokenmill.tasks.storage import join

from .packs import PACKS
from .parquet import PackFacts, leading_packs, write_leading
from .sampling import DataSet, PackedFile, Sampling, account, draw, order, warnings

FOLDER = "splits"
FILES = re.compile(r"\d{6,}__.+__[0-9a-f]{8}(__\d+(_leading_\d+)?)?\.parquet")
PACKING = re.compile(r"packing_(train|valid|test)\.json")


@dataclass(frozen=True, slots=True)
class _File:
    """A file to publish in a split's folder: copy number `copy` of a group of packs, whole or only its leading packs."""

    item: Finished
    part: str
    facts: PackFacts
    copy: int = 0
    leading: bool = False

    @property
    def output(self) -> str:
        return f"{self.part}.parquet"

    def name(self, position: int) -> str:
        suffix = f"__{self.copy}_leading_{self.facts.packs}" if self.leading else f"__{self.copy}" if self.copy else ""
        return f"{position:06d}__{self.item.shard.dataset}__{self.item.key[:8]}{suffix}.parquet"


_Held = dict[DataSet, list[_File]]
"""The files of each dataset in a split, each once."""

_Folder = dict[str, _File]
"""The files that a split's folder will hold, in order, by path in the output folder."""


@dataclass(frozen=True)
class PackedLayout:
    """Pack folders, with the blend's weights applied according to `sampling`.

    `total` are the tokens to publish for training, None if `sampling` decides. `packs` are groups of `pack_size` and `pad_seq_to_mult`, both in tokens.
    """

    packs: Sequence[Finished]
    weights: Weights
    sampling: Sampling
    seed: int
    pack_size: int
    pad_seq_to_mult: int
    total: int | None = None

    @property
    def own(self) -> Mapping[str, re.Pattern[str]]:
        return {**{join(FOLDER, split): FILES for split in SPLITS}, FOLDER: PACKING}

    def lay_out(self, output_dir: str, store: Store, finished: Sequence[Finished]) -> Published:  # noqa: ARG002 - all are packed
        """Choose the files of each split and put them into its folder. Raises RunError if a file to cut is damaged."""
        store = Store(store.place, PACKS)
        held: dict[str, _Held] = {}
        for item, part, split in parts_with_tokens(self.packs):
            file = _File(item, part, PackFacts.of(item.receipt.facts[part]))
            held.setdefault(split, {}).setdefault(item.dataset, []).append(file)
        folders = {split: folder for split in held if (folder := self._choose(store, split, held[split]))}
        written: list[Output] = []
        for folder in folders.values():
            sources = {place: store.path(file.item.key, file.output) for place, file in folder.items()}
            whole = [place for place, file in folder.items() if not file.leading]
            place_files([(sources[place], join(output_dir, place)) for place in whole])
            for place, file in folder.items():
                if file.leading:  # only these are written; the others are links
                    output = write_leading(sources[place], join(output_dir, place), file.facts.packs)
                    written.append(replace(output, path=place))
        written += [self._describe(output_dir, split, folder) for split, folder in folders.items()]
        listed: list[Listed] = []
        names: dict[str, dict[str, list[str]]] = {}
        for split, place, file in [(split, *each) for split, folder in folders.items() for each in folder.items()]:
            listed.append(Listed(split, file.item.dataset, join(output_dir, place), file.facts.tokens))
            if not file.leading:  # names of whole files carry the keys of their groups
                names.setdefault(file.item.shard.place, {}).setdefault(split, []).append(join(output_dir, place))
        facts = {split: PackFacts.total([file.facts for file in folder.values()]) for split, folder in folders.items()}
        places = {f"{split}_folder": join(FOLDER, split) for split in folders}
        sampling = {**self._account(held, folders), "published": {split: asdict(facts[split]) for split in facts}}
        blend = blend_json(listed, self.weights)
        return Published({}, blend, written, {"sampling": sampling, **places}, self.packs, names)

    def _choose(self, store: Store, split: str, held: _Held) -> _Folder:
        chosen: list[_File] = []
        total = self.total if split == "train" else None  # a budget is of what is trained on
        for dataset, drawn in draw(_numbers(held), self.weights, self.sampling, self.seed, total).items():
            for file, copies in zip(held[dataset], drawn.copies, strict=True):
                chosen += [file] * copies
            if drawn.rest:  # the leading packs of one more file: none, some or all
                file = held[dataset][drawn.cut]
                facts = leading_packs(store.path(file.item.key, file.output), drawn.rest)
                if facts is not None:
                    chosen.append(file if facts.packs == file.facts.packs else replace(file, facts=facts, leading=True))
        # Copies of a file have different hashes, so they are apart in the order.
        seen: Counter[str] = Counter()
        numbered: list[_File] = []
        for file in chosen:
            numbered.append(replace(file, copy=seen[file.item.key]))
            seen[file.item.key] += 1
        numbered.sort(key=lambda file: order(file.item.key, file.copy, self.seed))
        return {join(FOLDER, split, file.name(position)): file for position, file in enumerate(numbered)}

    def _describe(self, output_dir: str, split: str, folder: _Folder) -> Output:
        """Write the maxima that Megatron-Bridge needs to give every batch the same shape (`pad_cu_seqlens`).

        Lengths are counted as in the trainer, which predicts n - 1 tokens from the n stored tokens of a sequence. The shortest
        pack is a lower bound: too short is safe, too long would let attention run past the end.
        """
        facts = PackFacts.total([file.facts for file in folder.values()])
        inputs = facts.tokens + facts.padding - facts.sequences  # the last token of a sequence is only a label
        packing = {
            "dataset_max_seqlen": facts.longest - 1,
            "max_samples_per_bin": facts.most_sequences,
            "packing_factor": round(facts.sequences / facts.packs, 2),
            "packing_efficiency": round(100 * inputs / (facts.packs * self.pack_size), 2),
            "pack_size": self.pack_size,
            "min_packed_seqlen": max(0, facts.shortest_pack - facts.most_sequences),
            "pad_seq_to_mult": self.pad_seq_to_mult,
        }
        place = join(FOLDER, f"packing_{split}.json")
        output = publish_bytes(join(output_dir, place), orjson.dumps([packing], option=orjson.OPT_INDENT_2))
        return replace(output, path=place)

    def _account(self, held: Mapping[str, _Held], folders: Mapping[str, _Folder]) -> dict[str, Any]:
        """The manifest's report of target and realized weights."""
        splits: dict[str, dict[str, dict[str, float]]] = {}
        warned: list[str] = []
        for split, folder in folders.items():
            taken: Counter[DataSet] = Counter()
            for file in folder.values():
                taken[file.item.dataset] += file.facts.tokens
            # Datasets with a weight but without packs are not among the shares, so they are asked for by name.
            splits[split] = account(_numbers(held[split]), self.weights, taken)
            asked = [
                name for (of, name), weight in self.weights.items() if weight and (of == split or of not in SPLITS)
            ]
            warned += warnings(split, splits[split], asked)
        return {"method": self.sampling, "splits": splits, "warnings": [] if self.sampling == "none" else warned}


def _numbers(held: _Held) -> dict[DataSet, list[PackedFile]]:
    return {
        dataset: [PackedFile(file.item.key, file.facts.tokens) for file in files] for dataset, files in held.items()
    }
