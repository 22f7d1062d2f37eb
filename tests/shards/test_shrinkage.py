"""A preparation of nothing, or of far less than last time, publishes nothing and says so."""

import json
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
from tokenmill.tasks.errors import InputError, RunError

from tests import preparing, preparing_rl
from tests.building import plan_here, publish_here
from tests.preparing import blend_of
from tests.preparing_rl import write_rows
from tests.tokenize.small_vocabularies import word_piece


def row(name, number):
    text = f"{name} document {number}: " + " ".join(f"{name}{number}word{place}" for place in range(12))
    messages = [{"role": "user", "content": text}, {"role": "assistant", "content": f"answer {number}"}]
    return {"row_id": f"{name}{number}", "text": text, "messages": messages}


def write(path, count):
    return write_rows(path, [row(Path(path).stem, number) for number in range(count)])


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return {"model": str(word_piece(tmp_path_factory.mktemp("vocabulary")))}


@pytest.fixture
def prepare(tokenizer):
    return partial(preparing.prepare, tokenizer=tokenizer)


def blend(folder):
    return blend_of(folder / "web.jsonl", folder / "code.jsonl")


def documents(out, name="datasets/web"):
    return json.loads((out / "manifest.json").read_bytes())["totals"]["datasets"][name]["documents"]


@pytest.mark.parametrize(
    ("ceiling", "left", "refused"),
    [
        (0.5, 10, False),
        (0.5, 9, True),
        (0.0, 20, False),
        (0.0, 19, True),
        (0.9, 2, False),
        (0.9, 1, True),
        (1, 0, False),
    ],
)
def test_the_ceiling_is_the_share_that_may_be_lost(ceiling, left, refused, prepare, tmp_path):
    write(tmp_path / "code.jsonl", 5), write(tmp_path / "web.jsonl", 20)
    prepare(blend(tmp_path), tmp_path / "out", max_shrink_fraction=ceiling)
    write(tmp_path / "web.jsonl", left) if left else (tmp_path / "web.jsonl").write_text("\n")
    with pytest.raises(RunError, match=f"more than {ceiling:.0%}") if refused else nullcontext():
        prepare(blend(tmp_path), tmp_path / "out", max_shrink_fraction=ceiling)
    assert documents(tmp_path / "out") == (20 if refused else left)


def test_folder_with_lost_files_is_rejected(prepare, tmp_path):
    for name in ("a", "b", "c"):
        write(tmp_path / f"web/{name}.jsonl", 10)
    prepare(blend_of(tmp_path / "web"), tmp_path / "out")
    (tmp_path / "web/a.jsonl").unlink()
    prepare(blend_of(tmp_path / "web"), tmp_path / "out")
    (tmp_path / "web/b.jsonl").unlink()
    prepare(blend_of(tmp_path / "web"), tmp_path / "out")
    write(tmp_path / "web/c.jsonl", 4)
    with pytest.raises(RunError, match="4 documents, 60% fewer than the 10"):
        prepare(blend_of(tmp_path / "web"), tmp_path / "out")
    (tmp_path / "web/c.jsonl").unlink()
    with pytest.raises(InputError, match="files not found"):
        prepare(blend_of(tmp_path / "web"), tmp_path / "out")
    assert documents(tmp_path / "out") == 10


def test_a_sample_is_not_compared_with_the_whole_nor_the_whole_with_a_sample(prepare, tmp_path):
    write(tmp_path / "web.jsonl", 100), write(tmp_path / "code.jsonl", 100)
    for settings in ({}, {"sample": 10}, {"scale": "small"}, {}, {"sample": 5}, {"sample": 4}):
        prepare(blend(tmp_path), tmp_path / "out", **settings)
    assert documents(tmp_path / "out") == 4
    write(tmp_path / "web.jsonl", 1)
    with pytest.raises(RunError, match="1 document, 75% fewer than the 4"):
        prepare(blend(tmp_path), tmp_path / "out", sample=4)


def test_removed_dataset_and_empty_split_are_not_losses(prepare, tmp_path):
    write(tmp_path / "web.jsonl", 20), write(tmp_path / "code.jsonl", 20)
    prepare(blend(tmp_path), tmp_path / "out", holdout={"valid": 0.4, "test": 0})
    prepare(blend_of(tmp_path / "code.jsonl"), tmp_path / "out", holdout={"valid": 0, "test": 0})
    splits = json.loads((tmp_path / "out/blend.json").read_bytes())
    assert splits["train"]
    assert splits["valid"] is None


def test_one_of_several_datasets_may_be_empty_from_the_beginning(prepare, tmp_path):
    write(tmp_path / "code.jsonl", 5)
    (tmp_path / "web.jsonl").write_text("\n")
    prepare(blend(tmp_path), tmp_path / "out")
    assert documents(tmp_path / "out") == 0


def test_shards_that_are_missing_from_a_partial_output_are_a_loss(prepare, tmp_path):
    write(tmp_path / "web.jsonl", 20), write(tmp_path / "code.jsonl", 20)
    planned, _ = prepare(blend(tmp_path), tmp_path / "out")
    planned.plan.store.withdraw(planned.plan.keys[0])
    settings = {**planned.settings.model_dump(), "allow_partial": True}
    again = plan_here("pretrain", planned.blend, tmp_path / "out", **settings)
    with pytest.raises(RunError, match="dataset 'web': 0 documents, 100% fewer than the 20"):
        publish_here("pretrain", again, 0.0)


def test_different_kind_or_damaged_manifest_is_not_compared(prepare, tmp_path):
    write(tmp_path / "web.jsonl", 50), write(tmp_path / "code.jsonl", 50)
    preparing_rl.prepare(blend(tmp_path), tmp_path / "out")
    write(tmp_path / "web.jsonl", 10)
    prepare(blend(tmp_path), tmp_path / "out")
    manifest = tmp_path / "out/manifest.json"
    manifest.write_bytes(manifest.read_bytes().replace(b'"documents": 10', b'"documents": 90'))
    prepare(blend(tmp_path), tmp_path / "out")
    assert documents(tmp_path / "out") == 10


def test_previous_version_may_be_elsewhere(prepare, tmp_path):
    write(tmp_path / "web.jsonl", 20), write(tmp_path / "code.jsonl", 20)
    prepare(blend(tmp_path), tmp_path / "monday")
    write(tmp_path / "web.jsonl", 5)
    with pytest.raises(RunError, match=f"the last version is {tmp_path}/monday"):
        prepare(blend(tmp_path), tmp_path / "tuesday", previous=str(tmp_path / "monday"))
    assert not (tmp_path / "tuesday/blend.json").exists()
    with pytest.raises(InputError, match="previous: published output not found"):
        prepare(blend(tmp_path), tmp_path / "tuesday", previous=str(tmp_path / "sunday"))
    prepare(blend(tmp_path), tmp_path / "tuesday")
