"""A comparison of tokenizers: which rows are read, what is added up, and how it is shown."""

import io
import json
import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console
from tokenizers import Tokenizer
from tokenmill.flows.cli import run
from tokenmill.tasks.blend.load import load_blend
from tokenmill.tasks.errors import InputError
from tokenmill.tasks.report.tokenizers import (
    by_language,
    compared,
    comparison_page,
    comparison_record,
    print_comparison,
)

from tests.preparing import write_lines
from tests.tokenize.small_vocabularies import TRAINING_TEXT, byte_level_bpe

ENGLISH = ["The mill grinds the grain.", "No two mills\nare alike <|endoftext|>", "  "]
GERMAN = ["Die Mühle mahlt das Korn.", "Keine zwei Mühlen sind gleich."]
CODE = [*TRAINING_TEXT[0].splitlines()[:30]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("comparison")


@pytest.fixture(scope="module")
def models(folder):
    return {name: byte_level_bpe(folder / name, size) for name, size in (("small", 400), ("large", 900))}


@pytest.fixture(scope="module")
def blend(folder):
    write_lines(folder / "english.jsonl", [*ENGLISH, b"{broken", b""])
    pq.write_table(pa.table({"body": GERMAN}), folder / "german.parquet")
    write_lines(folder / "more.jsonl", ENGLISH[:1])
    write_lines(folder / "code.jsonl", CODE)
    sources = [
        {"name": "english", "path": str(folder / "english.jsonl"), "languages": ["en"]},
        {"name": "german", "path": str(folder / "german.parquet"), "languages": ["de"], "text_field": "body"},
        {"name": "more", "path": str(folder / "more.jsonl"), "languages": ["en"]},
        {"name": "code", "path": str(folder / "code.jsonl")},
    ]
    (folder / "blend.json").write_text(json.dumps({"datasets": sources}))
    return folder / "blend.json"


@pytest.fixture(scope="module")
def samples(blend, models):
    return compared(load_blend(str(blend)), list(map(str, models.values())), 10)


def tokens(folder, texts):
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.encode_special_tokens = True
    return sum(len(each.ids) for each in tokenizer.encode_batch(texts, add_special_tokens=False))


def test_the_first_rows_of_each_dataset_are_encoded_with_each_tokenizer(samples, models):
    expected = {"english": ENGLISH, "german": GERMAN, "more": ENGLISH[:1], "code": CODE[:10]}
    assert [sample.name for sample in samples] == list(expected)
    for sample, texts in zip(samples, expected.values(), strict=True):
        assert sample.texts.documents == len(texts)
        found = {name: counts.tokens for name, counts in sample.tokens.items()}
        assert found == {name: tokens(folder, texts) for name, folder in models.items()}
    assert {sample.name: sample.unread for sample in samples} == {"english": 2, "german": 0, "more": 0, "code": 0}
    assert {counts.controls for counts in samples[0].tokens.values()} == {1}


def test_datasets_that_state_the_same_languages_are_added_up(samples):
    found = {sample.name: sample for sample in by_language(samples)}
    assert list(found) == ["en", "de", "not stated"]
    english = [sample for sample in samples if sample.languages == "en"]
    assert found["en"].texts == english[0].texts + english[1].texts
    assert found["en"].unread == 2
    for name, counts in found["en"].tokens.items():
        assert counts == english[0].tokens[name] + english[1].tokens[name]
    assert by_language(samples[3:]) == []


def test_the_record_has_counts_and_what_follows_from_them(samples):
    record = comparison_record(samples, {})["compare-tokenizers"]
    german = record["datasets"]["german"]
    text = "".join(GERMAN)
    assert (german["size"], german["characters"], german["words"]) == (len(text.encode()), len(text), 10)
    for found in german["tokenizers"].values():
        assert found["tokens_per_byte"] == found["tokens"] / len(text.encode())
        assert found["tokens_per_character"] == found["tokens"] / len(text)
        assert found["tokens_per_word"] == found["tokens"] / 10
        assert found["fallback_share"] == found["fallback"] / found["tokens"]
    assert record["languages"]["de"]["tokenizers"] == german["tokenizers"]


def test_page_has_all_bars_and_no_requests(samples):
    page = comparison_page(samples)
    titles = re.findall(r"<figcaption>([^<]*)<", page)
    assert len(titles) == 6 + 3
    pictures = re.findall(r"<figure>.*?</figure>", page, re.DOTALL)
    assert [picture.count('height="12"') for picture in pictures] == [4 * 2] * 6 + [3 * 2] * 3
    assert page.count("<table>") == 2
    assert not re.search(r"<script|https?://(?!www.w3.org)|url\(", page)


@pytest.mark.parametrize("form", ["table", "text", "json"])
def test_the_command_prints_each_form_and_writes_the_page(blend, models, folder, capsys, monkeypatch, form):
    monkeypatch.setenv("COLUMNS", "120")
    page = folder / f"{form}.html"
    arguments = ["compare-tokenizers", str(blend), *map(str, models.values()), "--sample", "10"]
    assert run([*arguments, "--format", form, "--html", str(page)]) == 0
    printed = capsys.readouterr().out
    assert page.read_text("utf-8").startswith("<!DOCTYPE html>")
    if form == "json":
        found = json.loads(printed)["compare-tokenizers"]
        assert set(found["datasets"]["code"]["tokenizers"]) == {"small", "large"}
        return
    assert "16 documents" in printed
    assert "2 rows are blank or cannot be read" in printed
    assert ("dataset english, tokenizer small, tokens" in printed) == (form == "text")


def test_a_table_too_wide_for_the_terminal_is_lines(samples):
    shown = {width: io.StringIO() for width in (80, 120)}
    for width, out in shown.items():
        print_comparison(samples, Console(file=out, width=width), tables=True, checks={})
    assert "dataset english, tokenizer small, tokens" in shown[80].getvalue()
    assert re.search(r"^ english +small .* \d+ $", shown[120].getvalue(), re.MULTILINE)


def test_tokenizers_with_equal_names_show_their_paths(folder, blend, models):
    other = byte_level_bpe(folder / "other" / "small", 400)
    found = compared(load_blend(str(blend)), [str(models["small"]), str(other)], 1)
    assert list(found[0].tokens) == [str(models["small"]), str(other)]


@pytest.mark.parametrize(
    ("change", "chosen", "said"),
    [
        ({}, [], "name one or more tokenizers"),
        ({}, ["small", "small"], "each once"),
        ({}, ["o200k_harmoni"], "did you mean"),
        ({"transforms": ["passthrough"]}, ["small"], "'transforms' doesn't affect a comparison of tokenizers"),
        ({"path": "/no/such/file.jsonl"}, ["small"], "/no/such/file.jsonl"),
        ({"path": "chat.jsonl"}, ["small"], "holds conversations"),
    ],
)
def test_incomparable_inputs_name_a_remedy(folder, blend, models, monkeypatch, change, chosen, said):
    chat = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]}
    write_lines(folder / "chat.jsonl", [json.dumps(chat).encode()])
    monkeypatch.chdir(folder)
    source = json.loads(blend.read_text())["datasets"][0] | change
    named = [str(models.get(name, name)) for name in chosen]
    with pytest.raises(InputError, match=re.escape(said)):
        compared(load_blend({"datasets": [source]}), named, 10)


@pytest.mark.parametrize("asked", [{"where": "level > 1 and length(text) < 20"}, {"filters": {"level": [2, 3]}}])
def test_only_rows_that_the_blend_takes_are_encoded(folder, models, asked):
    rows = [{"text": "taken", "level": level} for level in range(4)]
    pq.write_table(pa.Table.from_pylist(rows), folder / "levels.parquet")
    blend = load_blend({"datasets": [{"name": "levels", "path": str(folder / "levels.parquet"), **asked}]})
    (sample,) = compared(blend, [str(models["small"])], 10)
    assert (sample.texts.documents, sample.filtered, sample.unread) == (2, 2, 0)
    assert sample.tokens["small"].tokens == tokens(models["small"], ["taken"] * 2)
