"""Which rows are plain: those that `parse` reads to the same conversation, with a text wherever a shape says so."""

import orjson
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenmill.tasks.chat.conversation import Conversation
from tokenmill.tasks.chat.parse import conversation
from tokenmill.tasks.chat.plain import beginning_with, plain_rows, spelling
from tokenmill.tasks.chat.programs import shape
from tokenmill.tasks.sources.exact_json import loads

VALUES = st.sampled_from(
    ["a", "b c", "", " ", " a", "a\n", "\u3000a", "<think>x</think>y", "日本語", None, 0, 1.5, True, ["a"], {"a": "b"}]
)
ROLES = st.sampled_from(
    ["user", "assistant", "assistant", "system", "developer", "tool", "function", "human", "", None, ["user"]]
)
MESSAGES = st.one_of(
    st.fixed_dictionaries({"role": ROLES, "content": VALUES}),
    st.fixed_dictionaries({"role": ROLES, "content": VALUES, "reasoning_content": VALUES}),
    st.fixed_dictionaries({"role": ROLES, "content": VALUES}, optional={"weight": VALUES, "name": VALUES, "tool_calls": VALUES}),
    st.just({"from": "human", "value": "a"}),
    VALUES,
)  # fmt: skip
RECORDS = st.fixed_dictionaries(
    {}, optional={"messages": st.one_of(VALUES, st.lists(MESSAGES, max_size=4)), "tools": VALUES, "system": VALUES, "id": VALUES}
)  # fmt: skip

TALK = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So.", "reasoning_content": "Hm."}]


@given(st.lists(RECORDS, max_size=6))
def test_a_plain_row_is_the_conversation_that_parse_reads(records):
    found = plain_rows(records, None, "tools")
    place = 0
    for row in found.rows:
        read = conversation(records[row.number], None, "tools")
        if isinstance(read, Conversation) and "<think>x</think>y" not in found.texts[row.start : row.stop]:
            assert row.conversation == read
            assert shape(read) == (row.shape, found.texts[row.start : row.stop])
        else:
            assert "<think>" in "".join(found.texts[row.start : row.stop]) or "assistant" not in str(row.shape)
        assert row.start == place < row.stop
        place = row.stop
    assert place == len(found.texts)


def test_plain_conversations_are_taken():
    assert [row.number for row in plain_rows([{"id": 1}, {"messages": TALK}, {"messages": TALK, "tools": None}], None, "tools").rows] == [1, 2]  # fmt: skip


@pytest.mark.parametrize(("messages_field", "tools_field", "taken"), [("chat", "tools", 1), ("a.b", "tools", 0), (None, "tools", 0), ("chat", "more.tools", 0), ("chat", "none.tools", 1)])  # fmt: skip
def test_the_fields_are_those_of_parse(messages_field, tools_field, taken):
    record = {"chat": TALK, "a.b": TALK, "a": {"b": TALK[:1]}, "more": {"tools": [{"name": "look"}]}}
    assert len(plain_rows([record], messages_field, tools_field).rows) == taken


def test_a_repeated_key_is_for_parse():
    row = b'{"messages": [{"role": "user", "content": "a", "content": "b"}, {"role": "assistant", "content": "c"}]}'
    assert not plain_rows([loads(row)], None, "tools").rows
    assert plain_rows([orjson.loads(row)], None, "tools").rows


@given(
    st.lists(st.text("<>/abé日", min_size=1), min_size=1),
    st.sets(st.sampled_from(["<", "<a>", "</abé", "ab", "日b"]), min_size=1),
)
def test_every_text_with_a_tag_is_found_and_none_where_no_tag_begins(texts, tags):
    found = spelling(pa.array(texts, pa.large_string()), tags).tolist()
    assert all(seen for text, seen in zip(texts, found, strict=True) if any(tag in text for tag in tags))
    together = "".join(texts).encode()
    assert any(found) == any(tag.encode()[:4] in together for tag in tags)
    assert beginning_with(pa.array(texts, pa.large_string()), "<").tolist() == [text[0] == "<" for text in texts]
