"""What is remembered is believed whole or not at all: no bit of it changes what is found."""

import random

import pytest
from tokenmill.tasks.seal import sealed, unsealed
from tokenmill.tasks.shards.store import remembered
from tokenmill.tasks.tokenize import load
from tokenmill.tasks.tokenize.exact import exact_encoder
from tokenmill.tasks.tokenize.gate import Comparison
from tokenmill.tasks.tokenize.load import Controls, load_vocabulary
from tokenmill.tasks.tokenize.settings import TokenizerSettings
from tokenmill.tasks.tokenize.vocabulary import Facts

ANSWERS = {
    "an encoding": (Controls, ({"<|endoftext|>": 199999, "<|start|>": 200006}, 201088)),
    "a tokenizer.json": (Facts, Facts("BPE", 0.0, 201088, None, 199999)),
    "characters": (list[int], [0x100, 0x1F600, 0x1F64F]),
    "a gate": (Comparison, Comparison(312, None)),
    "another gate": (Comparison, Comparison(312, "encodes 'a' as [1], the reference as [2]")),
    "a self-check": (dict[str, str], {"tools": "no_tools: the template knows none"}),
    "a model": (str, "99aa06d3014798d86001c324468d497f"),
}


def flips(content, count=None):
    """`content` with one bit changed: every bit, or so many by chance."""
    numbers = range(8 * len(content))
    for number in numbers if count is None else random.Random(count).sample(numbers, count):
        damaged = bytearray(content)
        damaged[number // 8] ^= 1 << number % 8
        yield bytes(damaged)


def never():
    raise AssertionError("found again")


@pytest.mark.parametrize("name", ANSWERS)
def test_no_bit_of_an_answer_changes_it_and_a_damaged_one_is_replaced(tmp_path, name):
    shape, answer = ANSWERS[name]
    place = tmp_path / "answer.json"
    assert remembered(str(place), shape, lambda: answer) == answer
    whole = place.read_bytes()
    assert remembered(str(place), shape, never) == answer
    for damaged in flips(whole):
        with pytest.raises(ValueError):  # noqa: PT011 - of whatever is wrong first
            unsealed(damaged)
    for damaged in [*flips(whole, 10), b"", b"{}", b"null", whole[:-1], whole + b"\n"]:
        place.write_bytes(damaged)
        assert remembered(str(place), shape, lambda: answer) == answer
        assert place.read_bytes() == whole


@pytest.mark.parametrize("fields", [{"texts": "many"}, {"texts": None}, {"difference": 5}, {"more": 1}])
def test_cached_comparison_in_an_old_form_is_redone(tmp_path, fields):
    place, comparison = tmp_path / "gate.json", Comparison(5, "a difference")
    answer = {"texts": 5, "difference": None}
    place.write_bytes(sealed({"answer": answer, "volatile": {}}))
    assert remembered(str(place), Comparison, never) == Comparison(5, None)
    if "more" in fields:
        answer = {"texts": 5}
    place.write_bytes(sealed({"answer": answer | fields, "volatile": {}}))
    assert remembered(str(place), Comparison, lambda: comparison) == comparison


def test_unusable_cache_only_costs_time(tmp_path):
    (tmp_path / "answer.json").mkdir()
    (tmp_path / "file").write_text("")
    for place in ("answer.json", "file/answer.json"):
        assert remembered(str(tmp_path / place), str, lambda: "found") == "found"


@pytest.fixture
def caches(tmp_path, monkeypatch):
    """An empty cache of the user's, and how to forget what this process knows of it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", "")

    def forget():
        load.load_named.cache_clear()
        exact_encoder.cache_clear()

    forget()
    yield tmp_path / "cache/tokenmill", forget
    forget()


def test_shipped_ranks_that_were_damaged_in_the_cache_are_unpacked_again(caches):
    cache, forget = caches
    expected = load_vocabulary(TokenizerSettings()).fingerprint
    (place,) = (cache / "tiktoken").iterdir()
    whole = place.read_bytes()
    for damaged in [*flips(whole, 3), b"", whole[:1000]]:
        place.write_bytes(damaged)
        forget()
        assert load_vocabulary(TokenizerSettings()).fingerprint == expected
        assert place.read_bytes() == whole
