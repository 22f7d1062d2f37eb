"""Packs are published as one folder per split, with the weights come true, and change from one state to the next."""

import itertools
import json
import random
import re
from collections import Counter, defaultdict
from pathlib import Path

import fsspec
import pyarrow.parquet as pq
import pytest
from tokenmill.tasks.blend.models import Blend
from tokenmill.tasks.errors import InputError, RunError
from tokenmill.tasks.pack.kind import pack_counts
from tokenmill.tasks.pack.publication import PackedLayout
from tokenmill.tasks.pack.settings import SftSettings
from tokenmill.tasks.shards.kinds import preparation
from tokenmill.tasks.shards.publication import publish_preparation
from tokenmill.tasks.shards.settings import PreparationSettings
from tokenmill.tasks.shards.store import Store
from tokenmill.tasks.shards.verify import verify

from tests import preparing, preparing_sft
from tests.pack.small_packs import MULTIPLE, PACK_SIZE, PADDING, packs, shard
from tests.peers.conversations import assistant, talk, user

WEIGHTS = {("datasets", "math"): 3.0, ("datasets", "code"): 1.0, ("datasets", "chat"): 2.0}
COUNTS = {"math": [60, 50, 90], "code": [160], "chat": [40, 110, 80, 70]}


def layout(packs, weights=WEIGHTS, sampling="none", seed=42):
    return PackedLayout(packs, weights, sampling, seed, PACK_SIZE, MULTIPLE)


def publish(out, store, finished, **choices):
    header, volatile = {"type": "sft", "blend": {}, "missing": []}, {"store": store.place}
    shards = Store(store.place, "sft")
    return publish_preparation(
        str(out), shards, [], layout(finished, **choices), PreparationSettings(), header, volatile
    )


def build(place, counts=COUNTS, parts=("train",)):
    """A store with the shards of datasets of so many packs each."""
    store, seeds = Store(str(place), "packs"), itertools.count()
    return store, [
        shard(store, dataset, number, {part: packs(count, seed=next(seeds)) for part in parts})
        for dataset, counted in counts.items()
        for number, count in enumerate(counted)
    ]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    return build(tmp_path_factory.mktemp("store") / "shards")


def listed(out, split="train"):
    """The files of blend.json, with their weights."""
    entries = json.loads((Path(out) / "blend.json").read_bytes())[split] or []
    return dict(zip(entries[1::2], map(float, entries[0::2]), strict=True))


def folder(out, split="train"):
    """What a trainer finds: the files of the folder, in the order of their names."""
    return sorted(str(path) for path in (Path(out) / "splits" / split).glob("*.parquet"))


def dataset_of(path):
    return Path(path).name.split("__")[1]


def roles_of(row):
    """The role of every token of a row."""
    ends = [*row["role_start"][1:], len(row["input_ids"])]
    return [
        role for role, start, end in zip(row["role"], row["role_start"], ends, strict=True) for _ in range(start, end)
    ]


def tokens_in(path):
    return sum(role != PADDING for row in pq.read_table(path).to_pylist() for role in roles_of(row))


def tokens_by_dataset(out, split="train"):
    tokens = Counter()
    for path in folder(out, split):
        tokens[dataset_of(path)] += tokens_in(path)
    return tokens


def problems(out):
    return verify(str(out), lambda store, receipt: []).problems


def test_a_folder_holds_every_file_once_under_a_number_its_dataset_and_its_key(tmp_path, built):
    store, finished = built
    manifest = publish(tmp_path, store, finished)
    names = [Path(path).name for path in folder(tmp_path)]
    assert [int(name[:6]) for name in names] == list(range(len(finished)))
    assert {name[6:] for name in names} == {f"__{item.shard.dataset}__{item.key[:8]}.parquet" for item in finished}
    for entry, item in zip(manifest["derived"]["shards"], finished, strict=True):
        (name,) = entry["published"]["train"]
        assert (tmp_path / name).samefile(store.path(item.key, "train.parquet"))
        assert entry["facts"] == item.receipt.facts
    assert problems(tmp_path) == []


def test_blend_json_lists_the_folder_in_order_with_each_datasets_weight_shared_by_tokens(tmp_path, built):
    store, finished = built
    publish(tmp_path, store, finished)
    entries, tokens = listed(tmp_path), tokens_by_dataset(tmp_path)
    assert list(entries) == folder(tmp_path)
    for path, weight in entries.items():
        name = dataset_of(path)
        assert weight == pytest.approx(WEIGHTS["datasets", name] * tokens_in(path) / tokens[name])


def test_the_order_mixes_datasets_and_every_seed_has_its_own(tmp_path, built):
    store, finished = built
    orders = []
    for seed in range(40):
        publish(tmp_path, store, finished, seed=seed)
        orders.append([Path(path).name[6:] for path in folder(tmp_path)])
    assert all(sorted(order) == sorted(orders[0]) for order in orders)
    assert len(set(map(tuple, orders))) == len(orders)
    first = {order[0].split("__")[1] for order in orders}
    assert first == set(COUNTS)


@pytest.mark.parametrize("sampling", ["down", "up"])
@pytest.mark.parametrize("weights", [(3, 1, 2), (1, 1, 1), (1, 10, 3)])
def test_the_tokens_of_the_folder_are_in_proportion_to_the_weights(tmp_path, built, sampling, weights):
    store, finished = built
    weights = dict(zip(WEIGHTS, map(float, weights), strict=True))
    manifest = publish(tmp_path, store, finished, weights=weights, sampling=sampling)
    tokens, held = tokens_by_dataset(tmp_path), Counter()
    for item in finished:
        held[item.shard.dataset] += item.receipt.facts["train"]["tokens"]
    for (_, name), weight in weights.items():
        share = tokens[name] / tokens.total()
        assert share == pytest.approx(weight / sum(weights.values()), rel=0.02)
        books = manifest["sampling"]["splits"]["train"][name]
        assert books["tokens"] == tokens[name]
        assert books["realised"] == pytest.approx(share)
        assert books["wanted"] == pytest.approx(weight / sum(weights.values()))
        assert books["copies"] == pytest.approx(tokens[name] / held[name])
        assert books["copies"] >= 1 if sampling == "up" else books["copies"] <= 1
    assert any(tokens[name] == held[name] for name in held)
    assert manifest["sampling"]["method"] == sampling
    assert manifest["sampling"]["warnings"] == []
    assert list(listed(tmp_path)) == folder(tmp_path)
    by_dataset = Counter()
    for path, weight in listed(tmp_path).items():
        by_dataset[dataset_of(path)] += weight
    assert by_dataset == pytest.approx({name: weight for (_, name), weight in weights.items()})
    assert problems(tmp_path) == []


def test_copies_and_cut_files_have_separate_names(tmp_path, built):
    store, finished = built
    manifest = publish(tmp_path, store, finished, sampling="up", weights={**WEIGHTS, ("datasets", "code"): 9.0})
    code = [path for path in folder(tmp_path) if dataset_of(path) == "code"]
    key = next(item.key for item in finished if item.shard.dataset == "code")
    copies = sorted(re.sub(r"^\d{6}__code__", "", Path(path).name) for path in code if "leading" not in path)
    assert copies == [f"{key[:8]}.parquet", *(f"{key[:8]}__{copy}.parquet" for copy in range(1, len(copies)))]
    assert len(copies) > 2
    assert len({Path(path).stat().st_ino for path in code if "leading" not in path}) == 1
    (cut,) = [path for path in code if "leading" in path]
    assert re.search(rf"__{len(copies)}_leading_{pq.read_metadata(cut).num_rows}\.parquet$", cut)
    assert Path(cut).stat().st_nlink == 1
    (entry,) = [entry for entry in manifest["derived"]["shards"] if entry["dataset"] == "code"]
    assert len(entry["published"]["train"]) == len(copies)
    assert str(Path(cut).relative_to(tmp_path)) in {file["path"] for file in manifest["files"]}


def test_copies_of_a_file_lie_apart(tmp_path, built):
    store, finished = built
    publish(tmp_path, store, finished, sampling="up", weights={**WEIGHTS, ("datasets", "chat"): 9.0})
    places = defaultdict(list)
    for place, path in enumerate(folder(tmp_path)):
        places[re.search(r"__([0-9a-f]{8})[_.]", path)[1]].append(place)
    repeated = [each for each in places.values() if len(each) > 2]
    assert len(repeated) >= len(COUNTS["chat"])
    assert not any(each[-1] - each[0] == len(each) - 1 for each in repeated)


def test_a_file_that_is_wanted_but_for_less_than_half_a_pack_is_taken_whole(tmp_path):
    store, finished = build(tmp_path / "shards", {"math": [40], "code": [30]})
    math, code = (float(item.receipt.facts["train"]["tokens"]) for item in finished)
    manifest = publish(
        tmp_path, store, finished, sampling="down", weights={("datasets", "math"): math, ("datasets", "code"): code - 5}
    )
    assert all(Path(path).stat().st_nlink == 2 for path in folder(tmp_path))
    assert [book["copies"] for book in manifest["sampling"]["splits"]["train"].values()] == [1, 1]


def bridge_packing(paths):
    """What Megatron-Bridge's own packer would write down of these files: a sequence counts without its last token."""
    rows = [row for path in paths for row in pq.read_table(path).to_pylist()]
    lengths = [
        [end - start - 1 for start, end in itertools.pairwise([*row["seq_start_id"], len(row["input_ids"])])]
        for row in rows
    ]
    sums = [sum(each) for each in lengths]
    return {
        "dataset_max_seqlen": max(map(max, lengths)),
        "max_samples_per_bin": max(map(len, lengths)),
        "packing_factor": round(sum(map(len, lengths)) / len(rows), 2),
        "packing_efficiency": round(sum(sums) / len(sums) / PACK_SIZE * 100, 2),
        "pack_size": PACK_SIZE,
        "min_packed_seqlen": min(sums),
        "pad_seq_to_mult": MULTIPLE,
    }


@pytest.mark.parametrize("sampling", ["none", "down", "up"])
def test_pack_facts_hold_for_every_row(tmp_path, built, sampling):
    store, finished = built
    manifest = publish(tmp_path, store, finished, sampling=sampling)
    (said,) = json.loads((tmp_path / "splits" / "packing_train.json").read_bytes())
    rows = [row for path in folder(tmp_path) for row in pq.read_table(path).to_pylist()]
    shown = pack_counts({**manifest, "settings": {"sampling": sampling}})
    counts = {
        "packs": len(rows),
        "loss_tokens": sum(sum(row["loss_mask"]) for row in rows),
        "tokens": sum(tokens_by_dataset(tmp_path).values()),
    }
    assert shown["packs"]["train"].items() >= counts.items()
    assert shown["packs_before_sampling"] == ({} if sampling == "none" else {"train": sum(map(sum, COUNTS.values()))})
    found = bridge_packing(folder(tmp_path))
    assert 0 <= said.pop("min_packed_seqlen") <= found.pop("min_packed_seqlen")
    assert said == found


def test_splits_are_held_out_of_every_dataset(tmp_path):
    store, finished = build(tmp_path / "shards", {"math": [30, 30], "code": [40]}, parts=("train", "valid"))
    weights = {("datasets", "math"): 1.0, ("datasets", "code"): 1.0}
    publish(tmp_path, store, finished, weights=weights, sampling="down")
    blend = json.loads((tmp_path / "blend.json").read_bytes())
    assert blend["test"] is None
    for split in ("train", "valid"):
        assert blend[split][1::2] == folder(tmp_path, split)
        tokens = tokens_by_dataset(tmp_path, split)
        assert tokens["math"] == pytest.approx(tokens["code"], rel=0.03)
    names = {"train", "valid", "packing_train.json", "packing_valid.json"}
    assert {path.name for path in (tmp_path / "splits").iterdir()} == names
    only_train = [shard(store, "math", 9, {"all": packs(20)})]
    publish(tmp_path, store, only_train, weights=weights)
    assert json.loads((tmp_path / "blend.json").read_bytes())["valid"] is None
    assert {path.name for path in (tmp_path / "splits").iterdir()} == {"train", "packing_train.json"}
    assert len(folder(tmp_path)) == 1


def test_each_split_of_a_per_split_blend_has_its_own_weights(tmp_path):
    store = Store(str(tmp_path / "shards"), "packs")
    finished = [
        shard(store, name, count, {"all": packs(count, seed=count)}, split=split)
        for split, name, count in (("train", "a", 50), ("train", "b", 51), ("valid", "a", 40), ("valid", "c", 60))
    ]
    weights = {("train", "a"): 1.0, ("train", "b"): 0.5, ("valid", "a"): 0.0, ("valid", "c"): 2.0}
    manifest = publish(tmp_path, store, finished, weights=weights, sampling="down")
    tokens = tokens_by_dataset(tmp_path)
    assert tokens["a"] == pytest.approx(2 * tokens["b"], rel=0.03)
    assert set(tokens_by_dataset(tmp_path, "valid")) == {"c"}
    assert set(manifest["sampling"]["splits"]["valid"]) == {"c"}
    assert manifest["sampling"]["warnings"] == []


def test_missed_share_is_reported(tmp_path):
    store, finished = build(tmp_path / "shards", {"math": [3], "code": [40]})
    weights = {("datasets", "math"): 1.0, ("datasets", "code"): 1.3, ("datasets", "gone"): 1.0}
    manifest = publish(tmp_path, store, finished, weights=weights, sampling="down")
    warned = "\n".join(manifest["sampling"]["warnings"])
    for name, book in manifest["sampling"]["splits"]["train"].items():
        assert (abs(book["realised"] / book["wanted"] - 1) > 0.02) == (
            f"dataset {name!r} has {book['realised']:.2%}" in warned
        )
    assert "train: dataset 'gone' doesn't have packs" in warned
    assert len(manifest["sampling"]["warnings"]) > 1
    assert publish(tmp_path, store, finished, weights=weights)["sampling"]["warnings"] == []


def test_equal_files_are_each_published(tmp_path):
    store, made = Store(str(tmp_path / "shards"), "packs"), packs(30)
    finished = [
        shard(store, name, number, {"all": made}, content="same") for name, number in (("a", 0), ("a", 1), ("b", 0))
    ]
    weights = {("datasets", "a"): 1.0, ("datasets", "b"): 1.0}
    for sampling, counts in (("none", {"a": 2, "b": 1}), ("down", {"a": 1, "b": 1}), ("up", {"a": 2, "b": 2})):
        manifest = publish(tmp_path, store, finished, weights=weights, sampling=sampling)
        assert Counter(map(dataset_of, folder(tmp_path))) == counts
        assert sorted(
            name for entry in manifest["derived"]["shards"] for of in entry["published"].values() for name in of
        ) == [str(Path(path).relative_to(tmp_path)) for path in folder(tmp_path)]
        assert problems(tmp_path) == []


def test_a_name_never_means_other_packs_than_before(tmp_path, built):
    store, finished = built
    numbers, meant = random.Random(1), {}
    for _ in range(25):
        weights = {dataset: numbers.choice([0.5, 1.0, 2.0, 3.0]) for dataset in WEIGHTS}
        some = [item for item in finished if numbers.random() < 0.8] or finished
        sampling = numbers.choice(["none", "down", "up"])
        publish(tmp_path, store, some, weights=weights, sampling=sampling, seed=numbers.randint(0, 2))
        for path in folder(tmp_path):
            content = Path(path).read_bytes()
            assert meant.setdefault(path, content) == content


def test_foreign_files_are_kept(tmp_path, built):
    store, finished = built
    publish(tmp_path, store, finished, sampling="up")
    strangers = [
        tmp_path / "splits" / name for name in ("notes.txt", "packing.json", "train/extra.parquet", "train/000001")
    ]
    for path in strangers:
        path.write_text("not ours")
    publish(tmp_path, store, finished[:1])
    assert all(path.read_text() == "not ours" for path in strangers)
    assert len(folder(tmp_path)) == 2
    publish(tmp_path, store, [])
    assert json.loads((tmp_path / "blend.json").read_bytes()) == {"train": None, "valid": None, "test": None}
    assert folder(tmp_path) == [str(strangers[2])]


def test_a_damaged_file_that_is_to_be_cut_stops_publication(tmp_path):
    store, finished = build(tmp_path / "shards", {"math": [40], "code": [80]})
    path = Path(store.path(finished[1].key, "train.parquet"))
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(RunError, match=f"{path}: cannot be read"):
        publish(tmp_path / "out", store, finished, weights=dict.fromkeys(WEIGHTS, 1.0), sampling="down")
    assert not (tmp_path / "out" / "blend.json").exists()


@pytest.mark.parametrize(
    ("out", "place"),
    [("memory://bucket/out", "memory://bucket/store"), ("memory://bucket/out", None), (None, "memory://bucket/store")],
)
def test_on_an_object_store_folders_hold_copies_and_no_stale_ones(tmp_path, memory, out, place):
    out, place = out or str(tmp_path / "out"), place or str(tmp_path / "store")
    store, finished = build(place)
    publish(out, store, finished, sampling="up")
    publish(out, store, finished, sampling="down")
    system, path = fsspec.url_to_fs(out)
    publish(tmp_path / "alone", *build(tmp_path / "shards"), sampling="down")
    expected = {Path(name).name: Path(name).read_bytes() for name in folder(tmp_path / "alone")}
    found = {name.rpartition("/")[2]: system.cat_file(name) for name in system.ls(f"{path}/splits/train", detail=False)}
    assert found == expected
    blend = json.loads(system.cat_file(f"{path}/blend.json"))
    assert blend["train"][1::2] == [f"{out}/splits/train/{name}" for name in sorted(expected)]
    assert problems(out) == []


def test_budget_sets_published_tokens(tmp_path):
    rows = {
        name: [
            talk(user(f"{name} {number}?"), assistant(f"{name} {number}. " * (number % 5 + 1))) for number in range(200)
        ]
        for name in ("a", "b")
    }
    paths = [preparing_sft.write_rows(tmp_path / f"{name}.jsonl", each) for name, each in rows.items()]
    blend = preparing.blend_of(*paths)
    blend["datasets"][0]["share"] = 0.25
    chosen = {"pack_size": 64, "holdout": {"valid": 0.2, "test": 0}, "store": str(tmp_path / "store")}
    _, plain = preparing_sft.prepare(blend, tmp_path / "plain", sampling="down", **chosen)
    _, manifest = preparing_sft.prepare({**blend, "tokens": 4000}, tmp_path / "out", sampling="down", **chosen)
    taken = {name: each["tokens"] for name, each in manifest["sampling"]["splits"]["train"].items()}
    assert taken["a"] == pytest.approx(1000, abs=64)
    assert taken["b"] == pytest.approx(3000, abs=64)
    assert manifest["volatile"]["shards"]["built"] == 0
    assert [phase["drawn"] for phase in manifest["phases"]] == [{"a": pytest.approx(1000), "b": pytest.approx(3000)}]
    shares = {name: each["wanted"] for name, each in plain["sampling"]["splits"]["train"].items()}
    assert shares == {"a": pytest.approx(0.25), "b": pytest.approx(0.75)}
    held_out = [
        {name: each["tokens"] for name, each in made["sampling"]["splits"]["valid"].items()}
        for made in (plain, manifest)
    ]
    assert held_out[0] == held_out[1], "a budget is of what is trained on"


@pytest.mark.parametrize(
    ("budget", "settings", "words"),
    [
        ({"tokens": 100, "phases": [{"name": "p"}]}, {"sampling": "up"}, "phases: trainers read a folder with packs"),
        ({"tokens": 100}, {"sampling": "none"}, "sampling=none publishes all packs once"),
    ],
)
def test_impossible_budget_for_packs_is_rejected(budget, settings, words):
    blend = Blend.model_validate({"datasets": [{"name": "a", "path": "/a"}], **budget})
    with pytest.raises(InputError, match=words):
        preparation("sft").check(blend, SftSettings.model_validate(settings), "/out")
