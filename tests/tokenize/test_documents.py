"""Assembling documents, held against plain loops over lists; and what control strings in text may do."""

import json
import math
from itertools import chain, pairwise

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tokenmill.tasks.errors import InputError, RunError
from tokenmill.tasks.shards.plan import PARTS
from tokenmill.tasks.tokenize.documents import assemble, assign_parts, runs
from tokenmill.tasks.tokenize.encoders import Tokens
from tokenmill.tasks.tokenize.settings import PretrainRecipe

from tests.preparing import blend_of, ids_of_documents, prepare, quarantined, write_lines
from tests.tokenize.small_vocabularies import byte_level_bpe, ids_of, reference

NOTHING_HELD_OUT = {"valid": 0, "test": 0}


def recipe(**changed):
    plain = {
        "text_field": "text", "tokenizer": "sha256:0", "vocabulary_size": 60_000, "backend": "gigatoken", "bos": None,
        "eos": None, "special_tokens_in_text": "literal", "min_doc_chars": None, "max_doc_tokens": None,
        "holdout_valid": 0.0, "holdout_test": 0.0, "holdout_seed": None,
    }  # fmt: skip
    return PretrainRecipe(**{**plain, **changed})


def tokens_of(documents):
    """Documents as lists of ids, the way an encoder hands them over."""
    offsets = np.cumsum([0, *map(len, documents)], dtype=np.int64)
    return Tokens(np.array(list(chain(*documents)), np.uint32), offsets)


def by_the_loop(documents, bos, eos, most):
    """What assemble must give, one list at a time: documents, the places of those that are left, and how many were cut."""
    made, kept, cut = [], [], 0
    for place, ids in enumerate(documents):
        if not ids:
            continue
        before, after = [bos] * (bos is not None), [eos] * (eos is not None)
        room = math.inf if most is None else most - len(before) - len(after)
        if len(ids) > room:
            cut += 1
            ids = ids[:room]  # noqa: PLW2901 - the shorter document
        made.append(before + ids + after)
        kept.append(place)
    return made, kept, cut


ENDS = st.none() | st.integers(0, 9)


@given(
    documents=st.lists(st.lists(st.integers(10, 59_999), max_size=12), max_size=20),
    size=st.sampled_from([60_000, 65_499, 65_500, 200_000]),
    bos=ENDS,
    eos=ENDS,
    most=st.none() | st.integers(1, 15),
)
def test_documents_are_assembled_as_a_plain_loop_would(documents, size, bos, eos, most):
    assume(most is None or most > (bos is not None) + (eos is not None))
    found = assemble(tokens_of(documents), recipe(vocabulary_size=size, bos=bos, eos=eos, max_doc_tokens=most))
    made, kept, cut = by_the_loop(documents, bos, eos, most)
    assert found.tokens.tolist() == list(chain(*made))
    assert found.tokens.dtype == (np.uint16 if size < 65_500 else np.int32)
    assert found.lengths.tolist() == [len(document) for document in made]
    assert found.kept.tolist() == kept
    assert found.truncated == cut


@given(
    documents=st.lists(st.lists(st.integers(0, 59_999), max_size=5), max_size=8),
    place=st.integers(0),
    stray=st.integers(60_000, 2**32 - 1),
)
def test_an_id_outside_the_vocabulary_is_named(documents, place, stray):
    ends = [(number, position) for number, ids in enumerate([*documents, []]) for position in range(len(ids) + 1)]
    text, position = ends[place % len(ends)]
    documents = [*documents, []]
    documents[text] = [*documents[text][:position], stray, *documents[text][position:]]
    with pytest.raises(RunError, match=rf"^id {stray} in text {text} of the batch is outside .* 60000 ids"):
        assemble(tokens_of(documents), recipe())


@given(texts=st.lists(st.text(max_size=8), max_size=30), skip=st.integers(0, 5), seed=st.integers(0, 2**64 - 1))
def test_the_part_of_a_text_does_not_depend_on_its_neighbors(texts, skip, seed):
    chosen = recipe(holdout_valid=0.3, holdout_test=0.3, holdout_seed=seed)
    column = pa.array(texts, pa.large_string())
    together = assign_parts(column, chosen).tolist()
    alone = [assign_parts(pa.array([text], pa.large_string()), chosen).tolist() for text in texts]
    assert together == list(chain(*alone))
    assert assign_parts(column[skip:], chosen).tolist() == together[skip:]
    assert set(together) <= set(range(len(PARTS)))


@given(st.lists(st.integers(0, 2), max_size=30))
def test_runs_spell_the_parts(parts):
    found = runs(np.array(parts, np.uint8))
    assert list(chain(*([part] * (last - first) for part, first, last in found))) == parts
    assert all(left[2] == right[1] and left[0] != right[0] for left, right in pairwise(found))


TEXTS = [
    "one",
    "",
    "two words",
    "def three():\n    return 3\n",
    "",
    "漢字",
    " ",
    "a longer document, of some more words",
]


@pytest.mark.parametrize("add_bos", [False, True])
@pytest.mark.parametrize("add_eos", [False, True])
@pytest.mark.parametrize("most", [None, 4])
def test_ends_and_cuts_reach_the_files(small, tmp_path, add_bos, add_eos, most):
    source = write_lines(tmp_path / "some.jsonl", TEXTS)
    _, manifest = prepare(
        blend_of(source), tmp_path / "out", holdout=NOTHING_HELD_OUT, max_doc_tokens=most,
        tokenizer={"model": str(small), "add_bos": add_bos, "add_eos": add_eos},
    )  # fmt: skip
    tokenizer = reference(small)
    bos = tokenizer.token_to_id("<s>") if add_bos else None
    eos = tokenizer.token_to_id("<|endoftext|>") if add_eos else None
    made, _, cut = by_the_loop(ids_of(tokenizer, TEXTS), bos, eos, most)
    assert ids_of_documents(tmp_path / "out") == made
    assert manifest["totals"]["truncated"] == cut
    assert (cut > 0) == (most is not None)
    assert manifest["totals"]["dropped"] == {"empty_document": 2}


@pytest.mark.parametrize("least", [1, 2, 4, 10])
def test_short_documents_are_dropped_and_counted(small, tmp_path, least):
    source = write_lines(tmp_path / "some.jsonl", TEXTS)
    _, manifest = prepare(
        blend_of(source), tmp_path / "out", tokenizer={"model": str(small)}, holdout=NOTHING_HELD_OUT,
        min_doc_chars=least,
    )  # fmt: skip
    long_enough = [text for text in TEXTS if len(text) >= least]
    decode = reference(small).decode
    assert [decode(ids[:-1]) for ids in ids_of_documents(tmp_path / "out")] == long_enough
    assert manifest["totals"]["dropped"] == {"too_short": len(TEXTS) - len(long_enough)}
    assert manifest["totals"]["rows"] == len(TEXTS)


@pytest.mark.parametrize("share", [0, 0.4])
def test_a_source_of_empty_documents_may_be_allowed(small, tmp_path, share):
    source = write_lines(tmp_path / "some.jsonl", ["", "", ""])
    chosen = {"holdout": {"valid": share, "test": share}, "allow_shrink": ["some"]}
    _, manifest = prepare(blend_of(source), tmp_path / "out", tokenizer={"model": str(small)}, **chosen)
    assert manifest["totals"]["dropped"] == {"empty_document": 3}
    assert json.loads((tmp_path / "out/blend.json").read_bytes()) == {"train": None, "valid": None, "test": None}


def test_limit_without_space_for_text_is_rejected(small, tmp_path):
    source = write_lines(tmp_path / "some.jsonl", TEXTS)
    with pytest.raises(InputError, match="max_doc_tokens=2 doesn't leave space for text"):
        prepare(blend_of(source), tmp_path / "out", tokenizer={"model": str(small), "add_bos": True}, max_doc_tokens=2)


@pytest.mark.parametrize("strings", ["<s> E", "E", "<a//b> E", "/x y/ E", "<a//b>", "./x/.. x/. E", "<|a|> <|a.b|> <|(*|> E", ""])  # fmt: skip
def test_any_control_strings_can_be_rejected(tmp_path, strings):
    special = tuple(strings.replace("E", "<|endoftext|>").split())
    model = byte_level_bpe(tmp_path / "own", size=400, special=special)
    texts = ["plain", *(f"some {token} there" for token in special), "a b", "<|a_b|> end"]
    source = write_lines(tmp_path / "some.jsonl", texts)
    _, manifest = prepare(
        blend_of(source), tmp_path / "out", tokenizer={"model": str(model), "add_eos": False},
        holdout=NOTHING_HELD_OUT, special_tokens_in_text="reject",
    )  # fmt: skip
    assert manifest["totals"]["dropped"] == ({"special_token_in_text": len(special)} if special else {})
    decode = reference(model).decode
    assert [decode(ids) for ids in ids_of_documents(tmp_path / "out")] == ["plain", *texts[-2:]]
    if special:
        rejected = quarantined(tmp_path / "out")
        assert {(row["file"], row["reason"]) for row in rejected} == {(str(source), "special_token_in_text")}
        assert [row["line"] for row in rejected] == list(range(2, 2 + len(special)))
