"""A few cases of the tortures hold, and they find what they look for; `make torture` runs them in full, and kills too."""

from dataclasses import replace

import pytest
from pyarrow import compute
from tokenmill.tasks.sources import json_rows
from tokenmill.tasks.sources.json_rows import pick_texts
from tokenmill.tasks.sources.parquet import Parquet

from bench.torture import flips, parquet, rows
from bench.torture.__main__ import main

pytestmark = pytest.mark.weekly


@pytest.mark.parametrize("torture", [rows, parquet, flips])
def test_a_few_cases_hold(torture):
    torture.run(1, seed=1)


def trimmed(batch):
    return replace(batch, texts=compute.utf8_trim_whitespace(batch.texts))


def test_a_row_that_is_read_differently_is_found(monkeypatch, capsys):
    monkeypatch.setattr(json_rows, "pick_texts", lambda *given: trimmed(pick_texts(*given)))
    assert main(["rows", "--seed", "1", "--count", "1"]) == 1
    assert "rows: DOES NOT HOLD with seed 1" in capsys.readouterr().out


def test_a_row_of_parquet_that_is_read_differently_is_found(monkeypatch):
    texts = Parquet.texts
    monkeypatch.setattr(Parquet, "texts", lambda *given: map(trimmed, texts(*given)))
    with pytest.raises(AssertionError, match="the Parquet file of seed '1-"):
        parquet.run(1, seed=1)
