"""The order of a training: which samples each step reads, planned before it starts.

    OUT/order.json       sealed: settings, a digest per range of steps, how often everything is read
    OUT/order/indices/   megatron-core's index caches, built by its own code

The trainer builds no indices when data, seed, sequence length and number of samples are those of the order. Megatron-LM and
Megatron-Bridge name their caches after their own tokenizer object, and find none here unless `recorder.use_order` names
them; they read the same samples. megatron-core needs its caches on a local disk, so those of data on an object store are
copied there before training. Nothing but `tokenmill order` writes into the folder of the data.
"""

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text
from tokenmill.tasks.errors import InputError
from tokenmill.tasks.seal import sealed, unsealed
from tokenmill.tasks.shards.publish import place_files, publish_bytes, publish_folder, sweep_folders
from tokenmill.tasks.shards.store import read_bytes
from tokenmill.tasks.storage import absolute, filesystem, is_local, join, temporary_folder
from tokenmill.tasks.strict import Strict, parse

from .job import READ_SPLITS, ReadSplit, TrainData
from .settings import Plan, TrainSettings

ORDER = "order.json"
INDICES = "order/indices"

TIMES = ("never", "once", "partly", "twice", "more")

COLUMNS = ("dataset", "epochs", "never", "once", "in part", "twice", "more", "unread tokens", "cut")

MOST_DIGESTS = 10_000


class DatasetReads(Strict, frozen=True):
    """How often the training reads a dataset.

    `documents` counts by times read: never, once, twice, more (the last, begun time counts); `partly` of those read once lack
    tokens. `unread` are tokens that are never an input, `cut` those at the end of prefixes that fill no sample, `drawn` the
    tokens of all samples.
    """

    dataset: str
    prefixes: int
    tokens: int
    drawn: int
    unread: int
    cut: int
    documents: dict[str, int]

    @property
    def epochs(self) -> float:
        """How often the dataset is read, on average."""
        return self.drawn / self.tokens if self.tokens else 0.0


class Order(Plan, frozen=True):
    """An order. `steps_per_digest` steps share one of the `digests`; `content` is that of the data."""

    content: str
    steps_per_digest: int
    digests: list[str]
    datasets: list[DatasetReads]

    def covers(self, data: TrainData, split: ReadSplit, sequence_length: int, samples: int, seed: int) -> bool:
        """Whether a training that reads so many samples of a split of `data` follows this order."""
        size = self.sizes[READ_SPLITS.index(split)]
        asked = (data.made_from, sequence_length, samples, seed)
        return asked == (self.content, self.sequence_length, size, self.seed)

    def differences(self, data: TrainData, settings: TrainSettings) -> list[str]:
        """Why a training does not follow this order; empty if it does."""
        asked = {name: getattr(settings, name) for name in ("seed", "sequence_length", "global_batch", "steps")}
        asked["content"] = data.made_from
        return [
            f"{name} is {value} in the training and {getattr(self, name)} in the order"
            for name, value in asked.items()
            if value != getattr(self, name)
        ]


def steps_per_digest(steps: int) -> int:
    """The steps that share a digest: as few as MOST_DIGESTS allow."""
    return -(-steps // MOST_DIGESTS)


def publish_order(path: str, order: Order) -> None:
    """Write order.json into the folder of the data."""
    publish_bytes(join(path, ORDER), sealed({"type": "order", **order.model_dump(), "volatile": {}}))


def read_order(path: str) -> Order | None:
    """The order in the folder of data, None without one. Raises InputError when it is damaged."""
    place = join(path, ORDER)
    content = read_bytes(place)
    if content is None:
        return None
    try:
        document = unsealed(content)
    except ValueError as error:
        raise InputError(f"{place}: {error}; run tokenmill order again") from error
    return parse(Order, {name: document[name] for name in document if name not in ("type", "volatile")}, place)


def required_order(path: str) -> Order:
    """The order in the folder of data. Raises InputError without one."""
    order = read_order(path)
    if order is None:
        raise InputError(f"{join(path, ORDER)}: no order here; plan one with: tokenmill order {path}")
    return order


def prepared_indices(data: TrainData, split: ReadSplit, sequence_length: int, samples: int, seed: int) -> str | None:
    """The folder or URI with indices built for such a training, None if there are none. Raises InputError."""
    order = read_order(data.path)
    found = order is not None and order.covers(data, split, sequence_length, samples, seed)
    return join(data.path, INDICES) if found else None


def followed_order(data: TrainData, settings: TrainSettings) -> Order | None:
    """The order of the data if a training run with these settings follows it; any other run reads in its own order."""
    order = read_order(data.path) if data.kind == "pretrain" else None
    rows = settings.steps * settings.global_batch
    follows = order is not None and order.covers(data, "train", settings.sequence_length, rows, settings.seed)
    return order if follows else None


def keep_order(order: Order | None, output_dir: str) -> None:
    """Copy an order into the folder of a training run, once: a later order may replace that of the data."""
    if order is not None and read_bytes(join(output_dir, ORDER)) is None:
        publish_order(output_dir, order)


def sentence_on_order(data: TrainData, settings: TrainSettings) -> list[str]:
    """A line on the order of the data, if there is one."""
    order = read_order(data.path) if data.kind == "pretrain" else None
    if order is None:
        return []
    differences = order.differences(data, settings)
    place = join(data.path, ORDER)
    if not differences:
        return [f"{place}: read in this order; its indices are used"]
    return [f"{place}: for another training ({'; '.join(differences)}); this one reads in its own order"]


@contextmanager
def indices_folder(path: str) -> Generator[str]:
    """A local folder for new indices of the data in `path`; they replace the former ones when the `with` block ends well."""
    place = join(path, INDICES)
    if is_local(path):
        sweep_folders(str(Path(absolute(place)).parent))
        with publish_folder(place) as folder:
            yield folder
        return
    with TemporaryDirectory(dir=temporary_folder()) as folder:
        yield folder
        place_files([(str(file), join(place, file.name)) for file in sorted(Path(folder).glob("*.*"))])


def fetch_indices(place: str, folder: str) -> None:
    """Bring indices into a local folder, unless they are there: hard links where it is on the same disk, copies elsewhere."""
    system, path = filesystem(place)
    names = [str(each).rsplit("/", 1)[-1] for each in system.ls(path, detail=False)]
    place_files([(join(place, name), join(folder, name)) for name in names if not Path(folder, name).exists()])


def require_packages(what: str, names: Sequence[str], otherwise: str = "") -> None:
    """Raises InputError for packages of the extra `train` that are not installed here."""
    if missing := [name for name in names if find_spec(name) is None]:
        raise InputError(
            f"{what}: {' and '.join(missing)} must be installed: pip install 'tokenmill[train]'{otherwise}"
        )


def require_documents(data: TrainData) -> None:
    """Raises InputError unless the data are documents with something to train on."""
    if data.kind != "pretrain":
        raise InputError(
            f"{data.path}: holds packs, which megatron-core keeps no indices of; train reads them in an order of its own, and "
            "records it. tokenmill order takes the output of tokenmill pretrain"
        )
    if not data.of("train"):
        raise InputError(f"{data.path}: the train split is empty; prepare datasets under 'datasets' or 'train'")


def artifact_record(order: Order, path: str) -> dict[str, Any]:
    """The artifact record of an order, for the next program."""
    record = order.model_dump(exclude={"digests", "content"})
    digest = {"path": path, "type": "order", "file": join(path, ORDER), "indices": join(path, INDICES)}
    return {"order": {**digest, **record}}


COUNTED = ("prefixes", "tokens", "drawn", "unread", "cut")


def merged(parts: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[DatasetReads]:
    """The figures of datasets, in the order of `names`, from those of their prefixes."""
    found: dict[str, Any] = {
        name: {"dataset": name, **dict.fromkeys(COUNTED, 0), "documents": dict.fromkeys(TIMES, 0)} for name in names
    }
    for part in parts:
        known = found[part["dataset"]]
        for name in COUNTED:
            known[name] += part[name]
        for times, count in part["documents"].items():
            known["documents"][times] += count
    return [DatasetReads(**figures) for figures in found.values()]


def print_order(order: Order, console: Console) -> None:
    """Show people what the training will read: how many documents of each dataset how often, and what is left out."""
    table = Table(
        *(Column(name, justify="right" if number else "left", overflow="fold") for number, name in enumerate(COLUMNS)),
        title="documents of each dataset, by how often they are read", title_justify="left", box=SIMPLE_HEAD, pad_edge=False,
    )  # fmt: skip
    for each in order.datasets:
        counts = [*(each.documents[times] for times in TIMES), each.unread, each.cut]
        table.add_row(Text(each.dataset), f"{each.epochs:.2f}", *(f"{count:,}" for count in counts))
    console.print(table)
    console.print(
        f"{order.steps:,} steps of {order.global_batch:,} rows of {order.sequence_length:,} tokens, seed {order.seed}: a training "
        "with these settings reads in this order and builds no index",
        highlight=False, soft_wrap=True,
    )  # fmt: skip
