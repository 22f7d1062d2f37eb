"""A step, shown: against the tensors that the trainer reads, and the source rows encoded by the reference."""

import io
import json
import random
from pathlib import Path

import orjson
import pytest
from rich.console import Console
from tokenmill.flows.cli import run
from tokenmill.tasks.dataset.fates import Read
from tokenmill.tasks.errors import InputError
from tokenmill.tasks.report.step import Reading, data_in, with_steps
from tokenmill.tasks.report.why import print_why, why_row
from tokenmill.tasks.train.engine import joined
from tokenmill.tasks.train.job import JOB, Job, contents_of
from tokenmill.tasks.train.order import make_order
from tokenmill.tasks.train.prepared import prepared_data
from tokenmill.tasks.train.rows import PackedRows, document_rows, flat_packs, lay_out, layout_folder
from tokenmill.tasks.train.settings import OrderSettings, TrainSettings

from tests import preparing_dedup
from tests.preparing import blend_of, prepare
from tests.preparing_sft import chat_vocabulary
from tests.tokenize.small_vocabularies import reference
from tests.train.small_data import TEXTS, packs, texts
from tests.train.test_order import here

BATCH, STEPS = 10, 120
SETTINGS = TrainSettings(sequence_length=30, global_batch=BATCH, steps=STEPS, seed=7, max_epochs=None)
PACKED = SETTINGS.model_copy(update={"sequence_length": 64})


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory):
    return chat_vocabulary(tmp_path_factory.mktemp("vocabulary"))


@pytest.fixture(scope="module")
def tokenizer(vocabulary):
    return reference(vocabulary)


@pytest.fixture(scope="module")
def data(tmp_path_factory, vocabulary):
    found = prepared_data(texts(tmp_path_factory.mktemp("data"), vocabulary)[0])
    make_order(found, OrderSettings(sequence_length=30, global_batch=BATCH, steps=STEPS, seed=7), here)
    return found


@pytest.fixture(scope="module")
def packed_data(tmp_path_factory, vocabulary):
    return prepared_data(packs(tmp_path_factory.mktemp("packs"), vocabulary)[0])


def training(folder, data, settings):
    """The folder of a training with one step in its metrics, and the rows that the trainer reads."""
    Path(folder).mkdir(exist_ok=True)
    job = Job(settings=settings, data=data, output_dir=str(folder))
    Path(folder, JOB).write_bytes(orjson.dumps(job.model_dump()))
    step = {"event": "step", "step": 3, "loss": 2.5, "gradient_norm": 0.75, "learning_rate": 1, "tokens": 1}
    step |= {"loss_tokens": 1, "padding": 0, "seconds": 1, "waited": 0, "mfu": None, "memory": 1}
    Path(folder, "metrics.jsonl").write_text(json.dumps(step) + "\n")
    cache, length = f"{folder}/cache", settings.sequence_length
    if data.kind == "sft":
        place = layout_folder(data, "train", cache)
        lay_out([file for source in data.of("train") for file in source.files], place)
        return str(folder), PackedRows(
            flat_packs(place), length, 0, settings.seed, " ".join(contents_of(data, "train"))
        )
    with joined("cpu"):
        return str(folder), document_rows(data, length, (STEPS * BATCH, 0), settings.seed, cache)[0]


def shown(reading, count):
    """Random samples: the number of the row that the trainer reads, and what is shown."""
    steps, every = {}, [(step, sample) for step in range(1, STEPS + 1) for sample in range(BATCH)]
    for step, sample in sorted(random.Random(5).sample(every, count)):
        if step not in steps:
            steps[step] = reading.step(step, None).view.packs
        yield (step - 1) * BATCH + sample, steps[step][sample]


def line_of(sequence):
    return json.loads(Path(sequence.file).read_text().splitlines()[sequence.line - 1])


@pytest.fixture(params=[100, pytest.param(1000, marks=pytest.mark.slow)])
def count(request):
    return request.param


@pytest.mark.parametrize("of_training", [True, False], ids=["a training", "an order"])
def test_document_samples_match_the_trainer(data, tokenizer, tmp_path, count, of_training):
    place, rows = training(tmp_path / "model", data, SETTINGS)

    def encode(text):
        return [*tokenizer.encode(text, add_special_tokens=False).ids, data.eos]

    for number, sample in shown(Reading.of(place if of_training else data.path), count):
        read = rows.batch([number])
        ids = [*read.tokens[0].tolist(), int(read.labels[0, -1])]
        pieces = []
        for sequence in sample.sequences:
            whole = encode(line_of(sequence)["text"])
            piece = whole[sequence.offset : sequence.offset + sequence.tokens]
            assert sequence.passages[0].text == tokenizer.decode(piece, skip_special_tokens=False)
            pieces += piece
        assert pieces == ids


@pytest.mark.slow
def test_pack_samples_match_the_trainer(packed_data, tokenizer, tmp_path, count):
    place, rows = training(tmp_path / "model", packed_data, PACKED)

    def decode(ids):
        return tokenizer.decode(ids, skip_special_tokens=False)

    for number, sample in shown(Reading.of(place), count):
        read = rows.batch([number])
        assert sample.count == read.segments.max() + 1
        for sequence in sample.sequences:
            mine = read.segments[0] == sequence.number
            labels, mask = read.labels[0][mine], read.loss_mask[0][mine]
            ids = [int(read.tokens[0][mine][0]), *labels.tolist()]
            assert "".join(passage.text for passage in sequence.passages) == decode(ids)
            assert sequence.trained == mask.sum()
            learned = "".join(passage.text for passage in sequence.passages if passage.trained)
            assert learned == decode(labels[mask].tolist())
            for message in line_of(sequence)["messages"]:
                assert message["content"] in decode(ids)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["documents", "packs"])
def test_a_row_leads_to_the_steps_that_read_it(data, packed_data, tmp_path, kind):
    chosen, settings = (data, SETTINGS) if kind == "documents" else (packed_data, PACKED)
    reading = Reading.of(training(tmp_path / "model", chosen, settings)[0])
    readers = {}
    for step in range(1, STEPS + 1):
        for number, sample in enumerate(reading.step(step, None).view.packs):
            for sequence in sample.sequences:
                readers.setdefault((sequence.file, sequence.line), set()).add((step, number))
    assert len(readers) > 20
    for (file, line), steps in readers.items():
        found = reading.find(f"{file}:{line}")
        assert {(read.step, read.sample) for each in found for read in each.steps} == steps
        assert {(each.file, each.line) for each in found} == {(file, line)}


def test_a_text_leads_to_its_rows(data, packed_data, tmp_path):
    for chosen, settings, text in ((data, SETTINGS, "document 42 says"), (packed_data, PACKED, "Question 33?")):
        reading = Reading.of(training(tmp_path / chosen.kind, chosen, settings)[0])
        try:
            found = reading.find(text)
        except InputError:  # held out
            line = "a.jsonl:43" if settings is SETTINGS else "a.jsonl:34"
            assert all(fate.split != "train" for ((fate),) in why_row(chosen.path, line))
            continue
        assert all(text in json.dumps(line_of(each)) for each in found)
        assert [each.steps for each in found] == [reading.find(f"{each.file}:{each.line}")[0].steps for each in found]
    with pytest.raises(InputError, match="no document of the train split"):
        reading.find("no such text")


def test_a_step_and_the_steps_of_a_row_are_printed_in_the_format_that_is_asked_for(data, tmp_path, capsys):
    place, _ = training(tmp_path / "model", data, SETTINGS)

    def printed(*arguments):
        assert run(["step", place, *arguments]) == 0
        return capsys.readouterr().out

    step = orjson.loads(printed("--step", "3", "--limit", "2", "--format", "json"))["step"]
    sequence = step["packs"][0]["sequences"][0]
    assert (step["step"], step["samples"], len(step["packs"]), step["metrics"]["loss"]) == (3, 10, 2, 2.5)
    text = printed("--step", "3", "--limit", "2")
    assert text.startswith("step 3: 2 of 10 samples, loss 2.5000, gradient norm 0.7500")
    assert "sample 1, " in text
    assert sequence["document"] in text
    assert orjson.loads(printed("--step", "4", "--limit", "1", "--format", "json"))["step"]["metrics"] is None
    printed("--step", "3", "--limit", "2", "--html", str(tmp_path / "step.html"))
    assert "document1" in (tmp_path / "step.html").read_text()
    row = f"{sequence['file']}:{sequence['line']}"
    (document, *_) = orjson.loads(printed("--find", row, "--format", "json"))["step"]["documents"]
    assert 3 in {each["step"] for each in document["steps"]}
    assert "read by step" in " ".join(printed("--find", row).split())
    listed = printed("--step", "3", "--format", "json", "--skip-list", str(tmp_path / "skip.jsonl"))
    assert orjson.loads(listed)["step"]["step"] == orjson.loads((tmp_path / "skip.jsonl").read_bytes())["step"] == 3


def test_missing_steps_and_rows(data, packed_data, tmp_path):
    reading = Reading.of(data.path)
    for step in (0, STEPS + 1):
        with pytest.raises(InputError, match=f"--step: {step} isn't a step of"):
            reading.step(step, None)
    with pytest.raises(InputError, match=r"no order here.*point at the folder of a training run"):
        Reading.of(packed_data.path)
    with pytest.raises(InputError, match=r"--find: .*a\.jsonl has only"):
        reading.find("a.jsonl:9999")


def test_a_story_ends_with_the_steps_that_train_on_the_row(data, tmp_path):
    model, _ = training(tmp_path / "model", data, SETTINGS)
    for sequence in Reading.of(model).step(5, None).view.packs[2].sequences:
        row = f"{sequence.file}:{sequence.line}"
        assert why_row(data.path, row)[0][-1].places[0].steps is None
        for place in (model, data.path):  # the training follows the order
            (story,) = with_steps(place, why_row(data_in(place), row))
            assert Read(5, 2) in story[-1].places[0].steps
            printed = io.StringIO()
            print_why(data.path, [story], Console(file=printed, width=2000))
            assert "5 (sample 3)" in printed.getvalue()


def test_documents_of_a_deduplicated_blend_lead_to_the_original_rows(tmp_path, vocabulary):
    lines = [json.dumps({"text": text}) for text in [*TEXTS[:20], TEXTS[3], "", *TEXTS[20:60]]]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    preparing_dedup.prepare(blend_of(tmp_path / "a.jsonl"), tmp_path / "dedup", near=False, shard_size=2_000)
    blend = json.loads((tmp_path / "dedup/blend.json").read_bytes())
    prepare(blend, tmp_path / "out", tokenizer={"model": str(vocabulary)}, holdout={"valid": 0, "test": 0})
    place, _ = training(tmp_path / "model", prepared_data(str(tmp_path / "out")), SETTINGS)
    for sample in Reading.of(place).step(1, None).view.packs:
        for sequence in sample.sequences:
            file, _, line = sequence.origin.rpartition(":")
            assert file == str(tmp_path / "a.jsonl")
            assert json.loads(lines[int(line) - 1]) == line_of(sequence)
