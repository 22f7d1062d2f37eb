"""The trainer looks for what it exports before its first step: other machines may lack what the one had that checked."""

import shutil
from pathlib import Path

import pytest
from tokenmill.tasks.errors import InputError
from tokenmill.tasks.train.job import Job
from tokenmill.tasks.train.preflight import exported_files
from tokenmill.tasks.train.prepared import prepared_data
from tokenmill.tasks.train.settings import TrainSettings
from tokenmill.tasks.train.training import run

from tests.preparing_sft import CHATML, chat_vocabulary
from tests.train.small_data import packs, texts

SMALL = {
    "device": "cpu", "steps": 1, "global_batch": 2, "micro_batch": 2, "sequence_length": 64,
    "model": {"layers": 1, "hidden": 32, "heads": 2, "key_value_heads": 1, "feed_forward": 64},
}  # fmt: skip


@pytest.fixture
def job(tmp_path):
    """Makes the job of a small training on a preparation whose tokenizer is `v`, and whose template `chat.jinja`."""
    vocabulary = chat_vocabulary(tmp_path / "v")
    template = tmp_path / "chat.jinja"
    template.write_text(CHATML)

    def made(make):
        chosen = {} if make is texts else {"chat_template": str(template)}
        data = prepared_data(make(tmp_path, vocabulary, **chosen)[0])
        return Job(settings=TrainSettings.model_validate(SMALL), data=data, output_dir=str(tmp_path / "trained"))

    return made


@pytest.mark.parametrize(
    ("make", "file", "words"), [(texts, "v", "a tokenizer"), (packs, "v", "a tokenizer"), (packs, "chat.jinja", "a chat template")]
)  # fmt: skip
def test_missing_export_files_fail_early(job, tmp_path, make, file, words):
    asked = job(make)
    shutil.move(tmp_path / file, tmp_path / "away")
    with pytest.raises(
        InputError, match=rf"was prepared with {words} that is not found here: .*absolute path that every"
    ):
        run(asked)
    assert not Path(asked.output_dir).exists()
    shutil.move(tmp_path / "away", tmp_path / file)
    assert "tokenizer.json" in exported_files(asked.data)
