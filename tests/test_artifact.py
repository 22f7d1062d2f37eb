"""Keys of artifacts in Prefect."""

import re

import pytest
from tokenmill.tasks.artifact import artifact_key


@pytest.mark.parametrize("place", ["/data/Out_1.b", "s3://bucket/Ünï", "/", "/data/" + "long " * 100])
def test_a_key_is_one_that_prefect_takes(place):
    assert re.fullmatch("training[a-z0-9-]+", artifact_key("training", place))


def test_outputs_have_unique_keys(tmp_path, monkeypatch):
    places = [str(tmp_path / name) for name in ("a/model", "b/model", "b/model 2", "b/a/model")]
    assert len({artifact_key(kind, place) for kind in ("training", "results") for place in places}) == 8
    monkeypatch.chdir(tmp_path)
    assert artifact_key("training", "a/model/") == artifact_key("training", places[0])
    assert artifact_key("training", places[0]).startswith("training-a-model-")
