"""Planning a pretraining preparation refuses what cannot be read, in whatever file of a dataset it stands."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenmill.tasks.blend.load import load_blend
from tokenmill.tasks.errors import InputError
from tokenmill.tasks.strict import parse
from tokenmill.tasks.tokenize.kind import PRETRAIN
from tokenmill.tasks.tokenize.settings import PretrainSettings

from tests.preparing import blend_of
from tests.tokenize.small_vocabularies import byte_level_bpe


@pytest.mark.parametrize(
    ("column", "words"),
    [({"text": [1, 2]}, "'text' is of type int64, not text"), ({"txt": ["a", "b"]}, "did you mean 'txt'?")],
)
def test_every_parquet_file_must_have_its_text(tmp_path, column, words):
    """The gate's sample reads the first, middle and last slice: it would not see this one."""
    data = tmp_path / "data"
    data.mkdir()
    for number in range(5):
        pq.write_table(pa.table(column if number == 1 else {"text": ["a", "b"]}), data / f"{number}.parquet")
    vocabulary = byte_level_bpe(tmp_path / "vocabulary", size=300)
    settings = parse(PretrainSettings, {"tokenizer": {"model": str(vocabulary)}}, "settings")
    with pytest.raises(InputError) as refused:
        PRETRAIN.plan(load_blend(blend_of(data)), settings, str(tmp_path / "out"))
    assert f"{data / '1.parquet'}: " in str(refused.value)
    assert words in str(refused.value)
