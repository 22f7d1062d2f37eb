"""What a training leaves out is not trained on, and nothing else moves."""

from pathlib import Path

import numpy as np
import pytest
from tokenmill.tasks.errors import InputError
from tokenmill.tasks.report.step import Reading
from tokenmill.tasks.train.events import TrainStep
from tokenmill.tasks.train.job import Job, SkippedDocument, SkippedStep, extend_skip_list, read_skip_list
from tokenmill.tasks.train.preflight import check, plan_training
from tokenmill.tasks.train.prepared import prepared_data
from tokenmill.tasks.train.proof import prove
from tokenmill.tasks.train.rows import TrainedRows
from tokenmill.tasks.train.settings import TrainSettings

from tests.report.test_step import BATCH, PACKED, SETTINGS, training
from tests.train.small_data import packs, texts
from tests.train.training_runs import train


@pytest.fixture(scope="module")
def both(tmp_path_factory, vocabulary):
    """Documents and packs, each with what a training on them reads: its folder, and its rows."""
    folder = tmp_path_factory.mktemp("data")
    documents = prepared_data(texts(folder / "texts", vocabulary)[0])
    packed = prepared_data(packs(folder / "packs", vocabulary)[0])
    return {
        "documents": training(folder / "on-documents", documents, SETTINGS),
        "packs": training(folder / "on-packs", packed, PACKED),
    }


@pytest.mark.parametrize("kind", ["documents", "packs"])
def test_only_the_labels_of_a_document_go(both, kind):
    place, rows = both[kind]
    reading = Reading.of(place)
    sequence = reading.step(1, 1).view.packs[0].sequences[-1]
    (found, *_) = reading.find(f"{sequence.file}:{sequence.line}")
    without = TrainedRows.of(rows, [found.skip, SkippedStep(step=2)])
    masked = 0
    for step in range(1, 41):
        numbers = range((step - 1) * BATCH, step * BATCH)
        whole, rest = rows.batch(numbers), without.batch(numbers)
        for name in ("tokens", "labels", "reads"):
            assert (getattr(whole, name) == getattr(rest, name)).all()
        for row, sample in enumerate(reading.step(step, None).view.packs):
            owners = np.concatenate([[each.document] * each.tokens for each in sample.sequences])
            if kind == "packs":  # the first token of a sequence is no label
                owners = np.concatenate([[each.document] * (each.tokens - 1) for each in sample.sequences])
            else:
                owners = owners[1:]
            expected = whole.loss_mask[row].copy()
            expected[: len(owners)] &= owners != found.document
            assert (rest.loss_mask[row] == expected).all()
            masked += int((whole.loss_mask[row] & ~expected).sum())
    assert masked


def test_a_list_is_extended_and_read(both, tmp_path):
    place = str(tmp_path / "skip.jsonl")
    document = SkippedDocument(data="xxh3_128:1", source=0, document=7, row="a.jsonl:3")
    assert extend_skip_list(place, [SkippedStep(step=3)]) == 1
    assert extend_skip_list(place, [document, SkippedStep(step=3), document]) == 2
    assert read_skip_list(place) == [SkippedStep(step=3), document]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", r""":2: .*write one JSON object per line, such as \{"step": 120\}"""),
        ('{"step": 0}', ":2: step"),
        ('{"document": 1}', ":2: data: missing"),
    ],
)
def test_a_wrong_line_is_named(tmp_path, line, said):
    place = tmp_path / "skip.jsonl"
    place.write_text(f'{{"step": 1}}\n{line}\n')
    with pytest.raises(InputError, match=f"skip.jsonl{said}"):
        read_skip_list(str(place))


@pytest.mark.parametrize("kind", ["documents", "packs"])
@pytest.mark.parametrize("wrong", [{"source": 99}, {"document": 99_999}, {"sequence": True}])
def test_entry_without_document_is_rejected(both, kind, wrong):
    _, rows = both[kind]
    right = {"source": 0, "document": 0, "sequence": 0 if kind == "packs" else None}
    TrainedRows.of(rows, [SkippedDocument(data="", **right)])
    if "sequence" in wrong:
        wrong = {"sequence": None if kind == "packs" else 0}
    with pytest.raises(InputError, match="doesn't name a document of the training data"):
        TrainedRows.of(rows, [SkippedDocument(data="", **right | wrong)])


def test_unskippable_entries_are_rejected(both, tmp_path):
    place, _ = both["documents"]
    data = Reading.of(place).data
    chosen = SETTINGS.model_copy(update={"skip_list": str(tmp_path / "skip.jsonl"), "micro_batch": 5})
    with pytest.raises(InputError, match=r"skip.jsonl does not exist; .*tokenmill step"):
        plan_training(data.path, chosen, str(tmp_path / "out"))
    extend_skip_list(chosen.skip_list, [SkippedDocument(data="xxh3_128:1", source=0, document=0, row="b.jsonl:9")])
    with pytest.raises(InputError, match=r"b\.jsonl:9 was listed for data of content xxh3_128:1"):
        check(plan_training(data.path, chosen, str(tmp_path / "out")))
    Path(chosen.skip_list).write_text('{"step": 3000}\n')
    with pytest.raises(
        InputError, match=r"skip_list: step 3,000 is listed, but this training run has \d+; remove the line"
    ):
        check(plan_training(data.path, chosen, str(tmp_path / "out")))
    Path(chosen.skip_list).write_text('{"step": 3}\n')
    elsewhere = chosen.model_copy(update={"launcher": "megatron-lm", "processes": 1})
    with pytest.raises(InputError, match="skip_list: launcher=megatron-lm starts a different trainer"):
        check(plan_training(data.path, elsewhere, str(tmp_path / "out")))


MODEL = {"layers": 1, "hidden": 32, "heads": 4, "key_value_heads": 2, "feed_forward": 64}


@pytest.mark.slow
def test_training_skips_a_step_and_reads_as_planned(both, tmp_path):
    data = Reading.of(both["documents"][0]).data
    settings = {"model": MODEL, "micro_batch": 5, "device": "cpu", "validate_every": None}
    settings = TrainSettings.model_validate({**SETTINGS.model_dump(), **settings, "steps": 5})

    def trained(name, skipped):
        folder = tmp_path / name
        ended = train(Job(settings=settings, data=data, output_dir=str(folder), skipped=skipped))
        assert ended.code == 0
        steps = ended.of(TrainStep)
        (folder / "metrics.jsonl").write_text("".join(f"{step.model_dump_json()}\n" for step in steps))
        assert prove(str(folder)).problem is None
        return {step.step: step for step in steps}

    whole = trained("whole", [])
    reading = Reading.of(str(tmp_path / "whole"))
    sequence = reading.step(4, 1).view.packs[0].sequences[0]
    found = reading.find(f"{sequence.file}:{sequence.line}")[0]
    rest = trained("rest", [SkippedStep(step=2), found.skip])
    assert [step.read for step in whole.values()] == [step.read for step in rest.values()]
    assert [step.learning_rate for step in whole.values()] == [step.learning_rate for step in rest.values()]
    fewer = {step for step in whole if rest[step].loss_tokens < whole[step].loss_tokens}
    assert fewer == {2} | {read.step for read in found.steps}
    assert (rest[2].loss, rest[2].loss_tokens, rest[2].gradient_norm) == (0, 0, 0)
    assert rest[3].loss != whole[3].loss  # step 2 has not updated the weights
