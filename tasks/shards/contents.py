"""Find content that a blend reads more than once, whatever its paths and datasets are called.

A copy of a file, or one file in two datasets, is trained on as often as all of them together ask for. Megatron-LM also shuffles files
of the same size alike, so that the copies follow each other at the same distance.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator

from tokenmill.tasks.blend.models import DataSource
from tokenmill.tasks.sources.files import InputWarning, Slice

ELSEWHERE = {
    *("name", "path", "subset", "split", "revision", "license", "languages", "domain"),
    *("weight", "share", "tokens", "min_epochs", "max_epochs", "group"),
}
"""The keys of a dataset that don't change which documents are read from a file, unlike its filter or text field."""


def read_twice(read: Iterable[tuple[str, DataSource, Iterable[Slice]]]) -> Iterator[InputWarning]:
    """Warnings for the slices of datasets (`split/name`) that are read more than once, in groups of equally read ones."""
    places: defaultdict[tuple[str, str, int | None], list[tuple[str, Slice]]] = defaultdict(list)
    for name, source, slices in read:
        way = source.model_dump_json(exclude=ELSEWHERE)
        for part in slices:
            places[way, part.content, part.rows].append((name, part))
    groups: defaultdict[tuple[tuple[str, int], ...], list[Slice]] = defaultdict(list)
    for found in places.values():
        if len(found) > 1:
            names = [name for name, _ in found]
            groups[tuple((name, names.count(name)) for name in dict.fromkeys(names))] += [part for _, part in found]
    for reads, parts in groups.items():
        files = list(dict.fromkeys(part.file.uri for part in parts))
        size = sum(part.size for part in parts) // sum(count for _, count in reads)
        yield InputWarning("read_twice", " and ".join(files[:2]), len(files), size, dict(reads))
