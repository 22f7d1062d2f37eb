"""Preparations from Python: `from tokenmill import pretrain`."""

import ast
import inspect
import json
import re
import subprocess
import sys
import tomllib
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from types import MappingProxyType

import datasets
import duckdb
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tokenmill
from tokenmill.flows.from_python import blend_of_rows, parameters
from tokenmill.tasks.errors import InputError
from tokenmill.tasks.shards.kinds import KINDS

from tests.flows.preparation_runs import called
from tests.preparing import blend_of, prepare, write_lines
from tests.tokenize.small_vocabularies import EOS, byte_level_bpe, reference

REPOSITORY = Path(__file__).parents[2]


def test_every_kind_is_a_function():
    for name, kind in KINDS.items():
        function = getattr(tokenmill, name)
        assert (function.__name__, function.__doc__) == (name, kind.summary)
    with pytest.raises(ImportError):
        from tokenmill import pretrian  # noqa: F401, PLC0415


def test_signatures_equal_the_models():
    stub = ast.parse(Path(tokenmill.__file__).with_suffix(".pyi").read_text())
    written = {each.name: each.args for each in stub.body if isinstance(each, ast.FunctionDef)}
    for name in KINDS:
        shown = inspect.signature(getattr(tokenmill, name)).parameters
        named = [argument.arg for argument in (*written[name].args, *written[name].kwonlyargs)]
        assert list(shown) == named == ["data", "output_dir", *parameters(name)]
    assert sorted([*KINDS, *tokenmill.ELSEWHERE]) == tokenmill.__all__ == dir(tokenmill)
    assert {*tokenmill.__all__} - written.keys() == {"InputError", "RunError"}


def test_the_version_is_the_projects():
    declared = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["version"]
    assert called("--version").stdout.strip() == declared


def test_importing_is_light():
    heavy = "{'numpy', 'pandas', 'prefect', 'pyarrow', 'pydantic'}"
    subprocess.run([sys.executable, "-c", f"import tokenmill, sys; assert not {heavy} & {{*sys.modules}}"], check=True)


TYPED = """
import tokenmill as tm

tm.pretrain("blend.json", "out", shard_size="64MB", holdout={"valid": 0.1}, tokenizer={"model": "gpt2"})
tm.sft([{"messages": []}], "out", pack_size=1024, messages_field="turns")
tm.rl("blend.json", "out", target="nemo_gym")
for part in tm.open("out").parts(split="train"):
    print(part.dataset, [len(pack.ids) for pack in tm.open("out").packs(part)])
"""
WRONG = [
    'tm.pretrain("blend.json", "out", shardsize=1)', 'tm.sft("blend.json", "out", pack_size="many")',
    'tm.rl("blend.json", "out", target="nemo")', 'tm.pretrain("blend.json", "out", holdout={"vaild": 0.1})',
    'tm.open("out").documents("train")',
]  # fmt: skip


@pytest.mark.slow
def test_pyright_sees_the_signatures(tmp_path):
    (tmp_path / "tokenmill").symlink_to(REPOSITORY)  # pyright doesn't see how an editable installation is found
    programs = {"typed.py": TYPED, "wrong.py": "import tokenmill as tm\n" + "\n".join(WRONG)}
    for name, text in programs.items():
        (tmp_path / name).write_text(text)
    found = subprocess.run(
        [Path(sys.executable).with_name("pyright"), "--outputjson", "--pythonpath", sys.executable, *programs],
        capture_output=True, cwd=tmp_path, check=False,
    )  # fmt: skip
    errors = json.loads(found.stdout)["generalDiagnostics"]
    places = [(Path(each["file"]).name, each["range"]["start"]["line"]) for each in errors]
    assert sorted(places) == [("wrong.py", line) for line in range(1, len(WRONG) + 1)], errors


@pytest.mark.slow
def test_the_page_about_python(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    page, names = (REPOSITORY / "docs/python.md").read_text(), {"__name__": "__main__"}
    for block in re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL):
        exec(block, names)
    shown = capsys.readouterr().out
    assert "100 documents" in shown
    assert "pretrain ['train', 'valid']" in shown
    assert set(re.findall(r"`data\.(\w+)", page)) <= {*dir(names["data"])}


MOMENT = datetime(2026, 1, 1, tzinfo=UTC)
WRITTEN = [
    ({"text": "row", "score": np.float32(0.5)}, {"text": "row", "score": 0.5}),
    (MappingProxyType({"text": "a sack of flour"}), {"text": "a sack of flour"}),
    (
        {"text": "null", "score": None, "when": MOMENT, "scores": np.array([0.5]), "best": np.int8(1)},
        {"text": "null", "score": None, "when": "2026-01-01T00:00:00+00:00", "scores": [0.5], "best": 1},
    ),
]


def test_rows_are_written_beside_the_output_folder(tmp_path):
    blend = blend_of_rows((row for row, _ in WRITTEN), str(tmp_path / "out"))
    place = tmp_path / "out.rows.jsonl"
    assert blend == {"datasets": [{"name": "rows", "path": str(place)}]}
    assert [json.loads(line) for line in place.read_text().splitlines()] == [expected for _, expected in WRITTEN]


def test_paths_may_be_objects(tmp_path):
    source = write_lines(tmp_path / "rows.jsonl", ["a sack of flour"])
    (tmp_path / "blend.json").write_text(json.dumps({"datasets": [{"name": "rows", "path": str(source)}]}))
    for number, data in enumerate((tmp_path / "blend.json", [{"text": "a sack of flour"}])):
        places = {"output_dir": tmp_path / f"out{number}", "store": tmp_path / "store"}
        record = tokenmill.pretrain(data, **places, holdout={"valid": 0, "test": 0})
        assert record["pretrain"]["path"] == str(tmp_path / f"out{number}")
        assert record["pretrain"]["documents"] == 1


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("some text", "row 2: str, not a dict"),
        ({"text": {1, 2}}, "row 2: .*set.*; rows must hold JSON values"),
        ({"text": "a", "score": float("nan")}, "row 2: .*not JSON compliant.*; rows must hold JSON values"),
        ({"text": "a", "score": np.array([1, np.inf])}, "row 2: .*not JSON compliant"),
    ],
)
def test_non_object_rows_from_python_are_rejected(tmp_path, row, message):
    with pytest.raises(InputError, match=message):
        blend_of_rows([{"text": "good"}, row], str(tmp_path / "out"))
    assert not list(tmp_path.iterdir())


TABLE = {"text": ["a sack of flour", None, "two"], "id": [1, 2, 3]}


def of_datasets(table, form=None):
    return datasets.Dataset.from_dict(table).select([2, 0, 1]).select([1, 2, 0]).with_format(form)


MAKE = [
    *(pd.DataFrame, pl.DataFrame, pa.table, pa.RecordBatch.from_pydict, "duckdb", "chunks", of_datasets),
    lambda table: pl.DataFrame(table).with_columns(pl.col("text").cast(pl.Categorical)),
    *(partial(of_datasets, form="pandas"), lambda table: of_datasets(table).to_iterable_dataset()),
]


@pytest.mark.parametrize("make", MAKE)
def test_tables_from_other_libraries(tmp_path, make):
    table = pa.table(TABLE)
    if make == "duckdb":
        data = duckdb.from_arrow(table)
    elif make == "chunks":
        data = pa.Table.from_batches(table.to_batches(max_chunksize=1)).to_reader()
    else:
        data = make(TABLE)
    blend = blend_of_rows(data, str(tmp_path / "out"))
    assert blend == {"datasets": [{"name": "rows", "path": str(tmp_path / "out.rows.parquet")}]}
    assert pq.read_table(tmp_path / "out.rows.parquet").select(["text", "id"]).to_pydict() == TABLE


def test_a_dataframe_is_prepared_with_the_name_of_its_text(tmp_path):
    frame = pd.DataFrame({"content": ["a sack of flour", "two"]})
    record = tokenmill.pretrain(frame, tmp_path / "out", text_field="content", holdout={"valid": 0, "test": 0})
    assert record["pretrain"]["documents"] == 2
    with pytest.raises(InputError, match=r"text_field: is a key of a dataset.* in the blend"):
        tokenmill.pretrain({"datasets": [{"name": "a", "path": "b.jsonl"}]}, tmp_path / "out", text_field="content")


@pytest.mark.slow
def test_results_as_dataframes(tmp_path):
    texts = [f"{number} sacks of flour" for number in range(5)]
    source = write_lines(tmp_path / "rows.jsonl", [*texts[:3], b"no JSON", *texts[3:]])
    model = byte_level_bpe(tmp_path / "vocabulary")
    settings = {"tokenizer": {"model": str(model)}, "holdout": {"valid": 0, "test": 0}}
    prepare(blend_of(source), tmp_path / "out", **settings)
    frame = tokenmill.dataframe(tmp_path / "out", "documents")
    end = reference(model).token_to_id(EOS)
    assert [ids.tolist() for ids in frame["input_ids"]] == [[*reference(model).encode(text).ids, end] for text in texts]
    assert frame["text"].str.removesuffix(EOS).tolist() == texts
    assert frame[["file", "line", "split"]].to_numpy().tolist() == [
        [str(source), line, "train"] for line in (1, 2, 3, 5, 6)
    ]
    shards = tokenmill.dataframe(tmp_path / "out", "shards")
    assert shards[["dataset", "rows", "documents", "drops"]].to_numpy().tolist() == [["rows", 6, 5, 1]]
    assert shards["tokens"].sum() == frame["input_ids"].map(len).sum()
    for rows, folder, message in [
        ("packs", "out", "aren't packed"),
        ("pack", "out", "did you mean 'packs'"),
        ("packs", ".", "no manifest"),
    ]:
        with pytest.raises(InputError, match=message):
            tokenmill.dataframe(tmp_path / folder, rows)


NO_TABLES = [
    *(pd.Series(["a"]), pl.Series(["a"]), pa.chunked_array([["a"]]), 7, pl.LazyFrame({"text": ["a"]})),
    datasets.DatasetDict({"train": datasets.Dataset.from_dict({"text": ["a"]})}),
]


@pytest.mark.parametrize("data", NO_TABLES, ids=type)
def test_non_tables_are_rejected(tmp_path, data):
    with pytest.raises(InputError, match=r"data: .*(table|doesn't contain rows|splits train;)"):
        blend_of_rows(data, str(tmp_path / "out"))
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_rows_and_a_dict_are_prepared_as_the_command_prepares_a_file(tmp_path):
    texts = [f"{number} sacks of flour" for number in range(200)]
    source = write_lines(tmp_path / "rows.jsonl", texts)
    (tmp_path / "blend.json").write_text(json.dumps({"datasets": [{"name": "rows", "path": str(source)}]}))
    assert called("pretrain", tmp_path / "blend.json", "--output-dir", tmp_path / "command").returncode == 0
    program = f"""
if __name__ == "__main__":
    from tokenmill import pretrain
    rows = ({{"text": text}} for text in {texts!r})
    record = pretrain(rows, {str(tmp_path / "rows")!r}, workers=1)
    assert record["pretrain"]["documents"] == 200, record
    pretrain({{"datasets": [{{"name": "rows", "path": {str(source)!r}}}]}}, {str(tmp_path / "dict")!r})
"""
    (tmp_path / "program.py").write_text(program)
    done = subprocess.run([sys.executable, tmp_path / "program.py"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "INFO" not in done.stderr
    pairs = {place: sorted((tmp_path / place).glob("train/*")) for place in ("command", "rows", "dict")}
    contents = [[path.read_bytes() for path in found] for found in pairs.values()]
    assert contents[0] == contents[1] == contents[2] != []
