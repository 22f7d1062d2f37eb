"""Budgets as megatron-core reads them: counted from its own indices, by dataset and phase."""

import json
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest
from tokenmill.tasks.errors import InputError
from tokenmill.tasks.report.step import Reading
from tokenmill.tasks.shards.kinds import preparation
from tokenmill.tasks.shards.verify import verify
from tokenmill.tasks.train.engine import joined
from tokenmill.tasks.train.order import (
    INDICES,
    Order,
    checked_data,
    make_order,
    prepared_indices,
    publish_order,
    read_order,
    with_quotas,
)
from tokenmill.tasks.train.preflight import check, plan_training
from tokenmill.tasks.train.prepared import prepared_data
from tokenmill.tasks.train.rows import split_samples
from tokenmill.tasks.train.samples import parts_of, pieces_of, samples_with
from tokenmill.tasks.train.settings import OrderPlan, OrderSettings, TrainSettings

from tests.preparing import prepare, write_lines
from tests.preparing_sft import chat_vocabulary
from tests.train.test_order import here

LENGTH, BATCH = 16, 4
STEP = LENGTH * BATCH
DOCUMENTS = {"web": 900, "code": 400, "math": 120, "best": 60}

BLENDS = {
    "tokens": ({}, {}),
    "cap": ({"math": {"max_epochs": 2}}, {}),
    "floor": ({"best": {"min_epochs": 3}}, {}),
    "share": ({"code": {"share": 0.15}}, {}),
    "fixed": ({"best": {"tokens": 40 * STEP}}, {}),
    "temperature": ({}, {"temperature": 0.5}),
    "groups": ({"code": {"group": "hard/code", "share": 0.7}, "math": {"group": "hard/code"}, "best": {"group": "hard"}},
               {"groups": {"hard": 0.3, "hard/code": 0.8}}),
    "two phases": ({"math": {"max_epochs": 1}}, {"phases": [
        {"name": "main", "share": 0.8}, {"name": "annealing", "share": 0.2, "mix": {"math": 0.3, "best": 0.2}}]}),
    "three phases": ({"best": {"weight": 0}, "math": {"max_epochs": 4}}, {"phases": [
        {"name": "warmup", "share": 0.1, "mix": {"web": 1}}, {"name": "main"},
        {"name": "annealing", "share": 0.1, "mix": {"best": 0.6, "math": 0.4}}]}),
    "ramp": ({}, {"phases": [
        {"name": "main", "share": 0.5, "mix": {"web": 1}}, {"name": "change", "share": 0.3, "ramp": 2},
        {"name": "end", "share": 0.2, "mix": {"code": 1}}]}),
}  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("phases")
    for name, count in DOCUMENTS.items():
        words = [f"{name} {number} " + "more words of it " * (number % 7) for number in range(count)]
        write_lines(folder / f"{name}.jsonl", words)
    chat_vocabulary(folder)
    return folder


def prepared(place, name, keys, budget, **settings):
    sources = [{"name": each, "path": str(place / f"{each}.jsonl"), **keys.get(each, {})} for each in DOCUMENTS]
    chosen = {
        "tokenizer": {"model": str(chat_vocabulary(place))}, "holdout": {"valid": 0, "test": 0}, "shard_size": 6000,
        "prefix_size": 16_000, "store": str(place / "store"), **settings,
    }  # fmt: skip
    out = place / name.replace(" ", "-")
    return str(out), prepare({"datasets": sources, **budget}, out, **chosen)[1]


def held_by(manifest):
    found = Counter()
    for entry in manifest["derived"]["shards"]:
        found[entry["dataset"]] += sum(entry["tokens"].values())
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", BLENDS)
def test_what_megatron_core_reads_is_the_budget(place, name):
    keys, budget = BLENDS[name]
    total = 400 * STEP
    out, manifest = prepared(place, name, keys, {"tokens": total, **budget})
    assert verify(out, preparation("pretrain").inspect).problems == []
    data = checked_data(out, OrderSettings(sequence_length=LENGTH, global_batch=BATCH, steps=1))
    steps = sum(phase.samples for phase in data.phases) // BATCH
    assert 400 - len(data.phases) <= steps <= 400  # what ends in a prefix fills no sample
    settings = OrderSettings(sequence_length=LENGTH, global_batch=BATCH, steps=steps, validation_batches=0)
    make_order(data, settings, here)
    with joined("cpu"):
        samples = split_samples(data, "train", LENGTH, steps * BATCH, settings.seed, f"{out}/{INDICES}", out)
    parts, sources = parts_of(samples), [source for source in data.of("train") for _ in source.files]
    assert [part.dataset_path for part in parts] == [
        file for source in data.of("train") for file in source.files
    ]  # fmt: skip
    origins = {
        str(Path(out, pair["path"])): (pair["of"], pair["first"])
        for phase in manifest["phases"] for pair in phase["pairs"]
    }  # fmt: skip
    read = defaultdict(Counter)
    documents = defaultdict(set)
    files = [file for source in data.of("train") for file in source.files]
    for number in range(len(samples)):
        pieces = pieces_of(samples, [number]).of(0)
        source = sources[pieces[0].source]
        read[source.phase][source.dataset] += LENGTH
        of, first = origins[files[pieces[0].source]]
        for place_, piece in enumerate(pieces):
            inputs = piece.length - (place_ == len(pieces) - 1)
            if inputs:
                documents[source.phase, source.dataset].add((of, first + piece.document))
    held = held_by(manifest)
    for number, phase in enumerate(manifest["phases"]):
        assert read[number].keys() <= phase["drawn"].keys()
        prefixes = Counter(sources[each].dataset for each in range(len(files)) if sources[each].phase == number)
        for dataset, tokens in phase["drawn"].items():
            rounding = LENGTH * (prefixes[dataset] + BATCH + 1) + 12  # of samples, of the phase to steps, of a document
            assert abs(read[number][dataset] - tokens) <= max(0.001 * total, rounding), (phase["name"], dataset)
    for source in manifest["blend"]["datasets"]:
        drawn = sum(phase[source["name"]] for phase in read.values())
        if "max_epochs" in source:
            assert drawn <= source["max_epochs"] * held[source["name"]]
        if drawn <= held[source["name"]] and len(data.phases) > 1:
            seen = [documents[number, source["name"]] for number in range(len(data.phases))]
            assert sum(map(len, seen)) == len(set().union(*seen)), f"{source['name']} comes twice"


def test_changed_budget_does_not_tokenize(place):
    prepared(place, "first", {}, {"tokens": 100 * STEP})
    keys, budget = BLENDS["two phases"]
    _, manifest = prepared(place, "second", keys, {"tokens": 200 * STEP, **budget})
    assert manifest["volatile"]["shards"]["built"] == 0
    _, plain = prepared(place, "third", {}, {})
    assert "phases" not in plain
    assert {shard["key"] for shard in plain["shards"]} == {shard["key"] for shard in manifest["shards"]}


def test_phases_of_old_budgets_are_removed(place):
    out, _ = prepared(place, "again", *[BLENDS["two phases"][0], {"tokens": 200 * STEP, **BLENDS["two phases"][1]}])
    assert Path(out, "phases/annealing.json").exists()
    _, manifest = prepared(place, "again", {}, {"tokens": 200 * STEP})
    assert [path.name for path in Path(out, "phases").iterdir()] == ["all.json"]
    assert [phase["name"] for phase in manifest["phases"]] == ["all"]


def test_a_remainder_below_half_a_document_is_rounded_to_whole_epochs(place):
    _, plain = prepared(place, "whole", {}, {})
    held = held_by(plain)["best"]
    main = 100 * STEP
    phases = [
        {"name": "main", "share": main / (main + held + 2), "mix": {"web": 1}},
        {"name": "end", "mix": {"best": 1}},
    ]
    keys = {"best": {"max_epochs": 2}}
    _, manifest = prepared(place, "rounded", keys, {"tokens": main + held + 2, "phases": phases})
    end = manifest["phases"][1]
    assert round(end["drawn"]["best"]) == held + 2
    assert sum(pair["drawn"] for pair in end["pairs"]) == held


def test_more_steps_than_the_budget_are_rejected(place):
    keys, budget = BLENDS["two phases"]
    out, _ = prepared(place, "steps", keys, {"tokens": 100 * STEP, **budget})
    settings = TrainSettings(
        sequence_length=LENGTH, global_batch=BATCH, micro_batch=BATCH, steps=101, launcher="megatron-lm", processes=1
    )
    with pytest.raises(InputError, match=r"steps=101: the budget of 6,400 tokens has .* set steps="):
        check(plan_training(out, settings, f"{out}/model"))
    with pytest.raises(InputError, match="fill no step of 400 samples"):
        plan_training(out, settings.model_copy(update={"global_batch": 400}), f"{out}/model")


def test_an_order_for_steps_of_a_different_size(place):
    """It is used where its phases have the same samples: phases are rounded to steps."""
    keys, budget = BLENDS["two phases"]
    out, _ = prepared(place, "sizes", keys, {"tokens": 101 * STEP, **budget})
    small, large = (with_quotas(prepared_data(out), LENGTH, batch) for batch in (BATCH, 2 * BATCH))
    assert [phase.samples for phase in small.phases] != [phase.samples for phase in large.phases]
    plan = OrderPlan(sequence_length=LENGTH, global_batch=BATCH, steps=100)
    publish_order(out, Order(**plan.model_dump(), content=small.made_from, steps_per_digest=1, digests=[], datasets=[]))
    found = [prepared_indices(each, "train", LENGTH, 100 * BATCH, plan.seed) for each in (small, large)]
    assert found == [f"{out}/{INDICES}", None]


def test_samples_with_a_document_are_those_that_read_it(place):
    keys, budget = BLENDS["two phases"]
    out, _ = prepared(place, "found", keys, {"tokens": 100 * STEP, **budget})
    data = checked_data(out, OrderSettings(sequence_length=LENGTH, global_batch=BATCH, steps=1))
    with joined("cpu"):
        samples = split_samples(data, "train", LENGTH, 1, 7, f"{out}/cache", out)
    read = pieces_of(samples, np.arange(len(samples)))
    numbers = np.repeat(np.arange(len(samples)), np.diff(read.bounds))
    last = len(parts_of(samples)) - 1
    for source in (0, last):
        document = int(read.document[read.source == source][0])
        expected = np.unique(numbers[(read.source == source) & (read.document == document)])
        assert samples_with(samples, source, document).tolist() == expected.tolist()
    assert read_order(out) is None


def test_a_step_is_shown_with_its_source_rows_and_a_row_with_its_steps(place):
    """Through ranges of prefixes: the text of every sample of the first and last step is in the rows that it names."""
    keys, budget = BLENDS["two phases"]
    out, _ = prepared(place, "shown", keys, {"tokens": 100 * STEP, **budget})
    data = checked_data(out, OrderSettings(sequence_length=LENGTH, global_batch=BATCH, steps=90))
    make_order(data, OrderSettings(sequence_length=LENGTH, global_batch=BATCH, steps=90, validation_batches=0), here)
    reading = Reading.of(out)
    for step in (1, 90):
        for pack in reading.step(step, None).view.packs:
            for sequence in pack.sequences:
                row = json.loads(Path(sequence.file).read_text().splitlines()[sequence.line - 1])["text"]
                text = "".join(passage.text for passage in sequence.passages).replace("<|endoftext|>", "")
                assert text.strip("\ufffd") in row
                if len(text) > 20:
                    found = reading.find(f"{sequence.file}:{sequence.line}")
                    assert step in {read.step for each in found for read in each.steps}
