"""What training sees of a preparation is what lies there, and nothing is trained on that no manifest vouches for."""

import json
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import fsspec
import numpy as np
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer
from tokenmill.tasks.chat.encoding import ROLE_NUMBERS
from tokenmill.tasks.errors import InputError
from tokenmill.tasks.seal import sealed, unsealed
from tokenmill.tasks.tokenize.load import find_vocabulary
from tokenmill.tasks.tokenize.settings import TokenizerSource
from tokenmill.tasks.train.prepared import ListedFile, content_digest, prepared_data

from tests.tokenize.small_vocabularies import EOS
from tests.train.small_data import packs, texts


@pytest.fixture(scope="module")
def of_texts(tmp_path_factory, vocabulary, store):
    return texts(tmp_path_factory.mktemp("texts"), vocabulary, store=store)


@pytest.fixture(scope="module")
def of_packs(tmp_path_factory, vocabulary, store):
    return packs(tmp_path_factory.mktemp("packs"), vocabulary, store=store)


@pytest.fixture
def own(tmp_path, vocabulary, store):
    """A preparation whose published files a test may replace; the shards are those of the others."""
    return Path(texts(tmp_path, vocabulary, store=store)[0])


def listed(out, split):
    """The names of blend.json and their weights."""
    entries = json.loads((Path(out) / "blend.json").read_bytes())[split] or []
    return list(zip(entries[1::2], map(float, entries[0::2]), strict=True))


def seen(data, split):
    return [pair for source in data.of(split) for pair in zip(source.files, source.weights, strict=True)]


@pytest.mark.parametrize("split", ["train", "valid", "test"])
def test_texts_are_the_pairs_of_blend_json_with_their_weights_and_tokens(of_texts, split):
    out, _ = of_texts
    data = prepared_data(out)
    assert seen(data, split) == listed(out, split)
    for source in data.of(split):
        assert source.tokens == sum(Path(f"{file}.bin").stat().st_size // 2 for file in source.files)
        assert source.rows is None
    names = [source.dataset for source in data.of(split)]
    assert names == ([] if split == "test" else ["a", "b"])


def test_several_prefixes_of_a_dataset_are_one_source(tmp_path, vocabulary, store):
    train = prepared_data(texts(tmp_path, vocabulary, store=store, prefix_size=1)[0]).of("train")
    assert len(train[0].files) > 1
    assert [sum(source.weights) for source in train] == pytest.approx([3, 1])


@pytest.mark.parametrize("kind", [texts, packs])
def test_the_tokenizer_is_the_one_that_was_prepared_with(request, vocabulary, kind):
    out, _ = request.getfixturevalue("of_texts" if kind is texts else "of_packs")
    known = Tokenizer.from_file(str(vocabulary / "tokenizer.json"))
    data = prepared_data(out)
    assert data.eos == known.token_to_id(EOS)
    assert data.vocabulary_size == max(known.get_vocab().values()) + 1
    assert data.fingerprint == find_vocabulary(TokenizerSource(model=str(vocabulary))).fingerprint
    assert data.tokenizer == {"model": str(vocabulary), "revision": None, "trust_remote_code": False}


def test_without_eos_in_documents_the_tokenizer_names_it(tmp_path, vocabulary):
    out, _ = texts(tmp_path, vocabulary, tokenizer={"model": str(vocabulary), "add_eos": False})
    ids = np.concatenate([np.fromfile(f"{file}.bin", np.uint16) for file, _ in listed(out, "train")])
    data = prepared_data(out)
    assert data.eos == Tokenizer.from_file(str(vocabulary / "tokenizer.json")).token_to_id(EOS)
    assert data.eos not in ids


def tokens_in(file):
    """The tokens of a file of packs that are not padding."""
    counted = 0
    for row in pq.read_table(file).to_pylist():
        ends = [*row["role_start"][1:], len(row["input_ids"])]
        counted += sum(
            end - start
            for role, start, end in zip(row["role"], row["role_start"], ends, strict=True)
            if role != ROLE_NUMBERS["padding"]
        )
    return counted


@pytest.mark.parametrize("sampling", ["none", "down", "up"])
def test_packs_are_listed_whole_repeated_or_cut(tmp_path, vocabulary, sampling):
    out, _ = packs(tmp_path, vocabulary, sampling=sampling, pad_seq_to_mult=4)
    data = prepared_data(out)
    assert (data.kind, data.pack_size, data.pad_seq_to_mult) == ("sft", 64, 4)
    for split in ("train", "valid"):
        assert sorted(seen(data, split)) == sorted(listed(out, split))
        for source in data.of(split):
            assert source.rows == sum(pq.read_metadata(file).num_rows for file in source.files)
            assert source.tokens == sum(tokens_in(file) for file in source.files)
    names = Counter("_leading_" in file for file, _ in seen(data, "train"))
    assert bool(names[True]) == (sampling != "none")
    other = "down" if sampling == "none" else "none"
    again, _ = packs(tmp_path / other, vocabulary, sampling=other, pad_seq_to_mult=4)
    assert prepared_data(again).made_from != data.made_from


def test_sources_keep_the_order_of_blend_json(of_packs):
    out, _ = of_packs
    order = list(dict.fromkeys(Path(file).name.split("__")[1] for file, _ in listed(out, "train")))
    assert [source.dataset for source in prepared_data(out).of("train")] == order


def test_same_content_is_equal_at_any_place_and_time(tmp_path, vocabulary, of_texts, of_packs):
    for kind, (out, manifest) in ((texts, of_texts), (packs, of_packs)):
        again, other = kind(tmp_path / kind.__name__, vocabulary, out="elsewhere")
        assert other["volatile"] != manifest["volatile"]
        assert prepared_data(again).made_from == prepared_data(out).made_from


@pytest.mark.parametrize(
    "change",
    [{"weights": {"a": 2.0}}, {"holdout": {"valid": 0.2, "test": 0, "seed": 7}}, {"min_doc_chars": 20}],
    ids=str,
)
def test_other_content_is_known_for_it(tmp_path, vocabulary, of_texts, change):
    out, _ = texts(tmp_path, vocabulary, **change)
    assert prepared_data(out).made_from != prepared_data(of_texts[0]).made_from


LISTED = ListedFile("train", "/out/a", 1.5, "a", "0" * 32, "train", packs=3)


@pytest.mark.parametrize(
    "change",
    [
        {"split": "valid"},
        {"weight": 1.25},
        {"dataset": "b"},
        {"key": "1" * 32},
        {"part": "train, leading"},
        {"packs": 2},
    ],
    ids=str,
)
def test_digest_covers_all_that_is_read_except_places(change):
    both = [LISTED, replace(LISTED, key="2" * 32)]
    assert content_digest([replace(LISTED, **change), both[1]]) != content_digest(both)
    assert content_digest(both[::-1]) != content_digest(both)
    assert content_digest([replace(each, path="s3://elsewhere/a") for each in both]) == content_digest(both)


def test_eos_texts_train_without_a_tokenizer(tmp_path, vocabulary):
    mine = Path(shutil.copytree(vocabulary, tmp_path / "mine"))
    ended, packed = texts(tmp_path / "t", mine)[0], packs(tmp_path / "p", mine)[0]
    known = prepared_data(packed).eos
    shutil.rmtree(mine)
    assert prepared_data(ended).eos == known
    assert f"{packed}: was prepared with a tokenizer that is not found here" in refusal(packed)


def test_a_tokenizer_at_a_relative_path_is_named_by_its_absolute_one(tmp_path, vocabulary, monkeypatch):
    shutil.copytree(vocabulary, tmp_path / "mine")
    monkeypatch.chdir(tmp_path)
    out, manifest = packs(tmp_path, "mine")
    assert manifest["settings"]["tokenizer"]["model"] == "mine"
    data = prepared_data(out)
    assert data.tokenizer["model"] == str(tmp_path / "mine")
    monkeypatch.chdir(tmp_path.parent)
    with pytest.raises(InputError, match=r"relative path.*train in that folder"):
        prepared_data(out)


@pytest.mark.parametrize("kind", [texts, packs])
def test_a_preparation_in_an_object_store_is_seen_as_one_here(tmp_path, vocabulary, kind):
    here, _ = kind(tmp_path / "here", vocabulary)
    there, _ = kind(tmp_path / "there", vocabulary, out=f"memory://{tmp_path.name}/out")
    local, remote = prepared_data(here), prepared_data(there + "/")
    assert remote.path == there
    assert remote.made_from == local.made_from
    assert [source.tokens for source in remote.sources] == [source.tokens for source in local.sources]
    ending = ".bin" if kind is texts else ""
    assert all(
        fsspec.filesystem("memory").exists(f"{file}{ending}") for source in remote.sources for file in source.files
    )


def test_a_relative_folder_is_seen_by_its_absolute_path(of_texts, monkeypatch):
    out = Path(of_texts[0])
    monkeypatch.chdir(out.parent)
    assert prepared_data(out.name) == prepared_data(str(out))


def refusal(path):
    with pytest.raises(InputError) as caught:
        prepared_data(str(path))
    return str(caught.value)


def edit(out, **changes):
    """Write the manifest anew with other fields."""
    place = Path(out) / "manifest.json"
    place.write_bytes(sealed({**unsealed(place.read_bytes()), **changes}))


def rewrite(name, old, new):
    """An edit of a file of an output."""

    def change(out):
        before = (out / name).read_bytes()
        assert old in before
        (out / name).write_bytes(before.replace(old, new))

    return change


REFUSED = {
    "an empty folder": (shutil.rmtree, "no manifest.json here; train on the --output-dir of tokenmill pretrain"),
    "a blend made by hand": (lambda out: (out / "manifest.json").unlink(), "blend.json has no manifest.json next to it; train on the --output-dir"),
    "an edited blend": (rewrite("blend.json", b'"3.0', b'"9.0'), "blend.json: changed since it was published; change weights and datasets in the input blend"),
    "no blend": (lambda out: (out / "blend.json").unlink(), "blend.json: missing; change weights"),
    "a run that failed": (lambda out: edit(out, status="failed", error="out of disk"), "the run failed and didn't publish: out of disk; fix this, and prepare the data again"),
    "a damaged manifest": (rewrite("manifest.json", b'"vocabulary_size": 500', b'"vocabulary_size": 501'), "does not match its seal"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_untrainable_data_is_rejected(own, case):
    change, words = REFUSED[case]
    change(own)
    assert words in refusal(own)


@pytest.mark.parametrize(
    ("kind", "remedy"),
    [
        ("harmony", "pack it first: tokenmill sft {}/blend.json --output-dir PACKS chat_template=harmony"),
        ("rl", "hand it to NeMo-RL with launcher=nemo-rl"),
        ("dedup", "prepare its output: tokenmill pretrain or tokenmill sft with {}/blend.json"),
        ("nll", "train on the --output-dir of tokenmill pretrain or tokenmill sft"),
    ],
)
def test_other_kinds_are_rejected_with_advice(own, kind, remedy):
    edit(own, type=kind)
    assert refusal(own) == f"{own}: holds {kind} data, which cannot be trained on directly; {remedy.format(own)}"


def test_copied_folder_is_rejected(own, tmp_path):
    copied = shutil.copytree(own, tmp_path / "copied")
    assert refusal(copied).endswith("run the same preparation again with this --output-dir")
    assert "was moved or copied" in refusal(copied)
    prepared_data(str(own))


def test_changed_tokenizer_with_the_same_name_is_rejected(tmp_path, vocabulary):
    mine = Path(shutil.copytree(vocabulary, tmp_path / "mine"))
    out, _ = packs(tmp_path, mine)
    prepared_data(out)
    (mine / "tokenizer.json").write_bytes((mine / "tokenizer.json").read_bytes() + b"\n")
    assert refusal(out).endswith("restore its files, or prepare the data again")
