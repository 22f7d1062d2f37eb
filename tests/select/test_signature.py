"""Behaviour: the trace says what was done, by names that the conversation gives to tools and never by its data."""

import pytest
from tokenmill.tasks.harmony.grammar import parse
from tokenmill.tasks.harmony.message import HarmonyMessage
from tokenmill.tasks.select.signature import behaviour_of


def says(body, channel="final"):
    return HarmonyMessage("assistant", body, channel=channel)


def thinks(body):
    return says(body, "analysis")


def asks(body="?"):
    return HarmonyMessage("user", body)


def calls(tool, body="{}", channel="commentary"):
    return HarmonyMessage(
        "assistant", body, recipient=tool, channel=channel, content_type="json", terminator="call"
    )  # fmt: skip


def returns(tool, body):
    return HarmonyMessage(tool, body, recipient="assistant", channel="commentary")


def lines(*messages):
    """The trace as a mapping of its lines."""
    return dict(line.split(": ", 1) for line in behaviour_of(messages).trace.split("\n"))


def test_the_trace_of_a_conversation_is_these_lines_in_this_order():
    text = (
        "<|start|>system<|message|>S<|end|><|start|>user<|message|>Where is A1?<|end|>"
        "<|start|>assistant<|channel|>analysis<|message|>Look it up\n first.<|end|>"
        '<|start|>assistant to=functions.get_order<|channel|>commentary <|constrain|>json<|message|>{"id":"A1"}<|call|>'
        '<|start|>functions.get_order to=assistant<|channel|>commentary<|message|>{"sum":3,"state":"sent"}<|end|>'
        "<|start|>assistant to=python<|channel|>analysis code<|message|>print(1)<|call|>"
        "<|start|>python to=assistant<|channel|>commentary<|message|>1<|end|>"
        "<|start|>assistant<|channel|>final<|message|>Based on the tool, it was sent.<|return|>"
    )
    assert behaviour_of(parse(text)).trace == (
        "TOOL_SEQ: get_order -> python\n"
        "CALLS: 2\n"
        "ARGS: get_order[id] | python[]\n"
        "RETURNS: ok | ok\n"
        "RET_KEYS: state,sum | nonjson\n"
        "RET_ROLES: functions.get_order | python\n"
        "USED_TOOL_OUTPUT: yes\n"
        "ANSWER_TYPE: text\n"
        "PLAN_EXCERPT: Look it up first."
    )


def test_signature_without_tools():
    assert lines(asks(), says("4")) == {
        "TOOL_SEQ": "none", "CALLS": "0", "ARGS": "none", "RETURNS": "none", "RET_KEYS": "none", "RET_ROLES": "none",
        "USED_TOOL_OUTPUT": "no", "ANSWER_TYPE": "numeric", "PLAN_EXCERPT": "4",
    }  # fmt: skip
    assert lines(asks())["PLAN_EXCERPT"] == "none"
    assert lines(asks())["ANSWER_TYPE"] == "empty"


@pytest.mark.parametrize(
    "arguments",
    [
        '{"name":"Bob Smith"}',
        '{"tool_name":"Bob Smith","name":"Bob Smith","tool":"Bob Smith","function_name":"Bob Smith"}',
        '{"function":{"name":"Bob Smith"}}',
        '{"arguments":{"Bob Smith":1},"name":"Bob Smith"}',
        '{"Bob Smith":1}',
        '["Bob Smith"]',
        '"Bob Smith"',
        "Bob Smith",
    ],
)
def test_no_value_of_a_payload_is_taken_for_a_name(arguments):
    messages = asks(), calls("functions.greet", arguments), returns("functions.greet", arguments), says("Done.")
    found = lines(*messages)
    assert found["TOOL_SEQ"] == "greet"
    assert found["RET_ROLES"] == "functions.greet"
    assert "Bob" not in behaviour_of(messages).trace


def test_a_call_with_its_recipient_after_the_channel_is_a_call_and_no_plan():
    text = (
        "<|start|>user<|message|>?<|end|>"
        '<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"secret":"x"}<|call|>'
        "<|start|>assistant<|channel|>final<|message|>Well.<|return|>"
    )
    found = lines(*parse(text))
    assert (found["TOOL_SEQ"], found["ARGS"], found["PLAN_EXCERPT"]) == ("f", "f[secret]", "Well.")


def test_call_on_the_analysis_channel_is_not_a_plan():
    code = HarmonyMessage("assistant", "print('x')", recipient="python", channel="analysis", terminator="call")
    assert lines(code, says("Remark.", "commentary"), thinks("Now I think."))["PLAN_EXCERPT"] == "Now I think."
    assert lines(code, says("Remark.", "commentary"))["PLAN_EXCERPT"] == "Remark."
    assert lines(code)["PLAN_EXCERPT"] == "none"
    assert lines(HarmonyMessage("assistant", "x", terminator="call"))["TOOL_SEQ"] == "unnamed"


def test_calls_side_by_side_each_find_their_own_result():
    found = lines(
        asks(),
        calls("functions.a"), calls("functions.b"), calls("functions.a"),
        returns("functions.b", '{"of_b":1}'), returns("functions.a", '{"first":1}'), returns("functions.a", ""),
    )  # fmt: skip
    assert found["TOOL_SEQ"] == "a -> b -> a"
    assert found["RETURNS"] == "ok | ok | empty"
    assert found["RET_KEYS"] == "first | of_b | nonjson"


def test_a_call_without_a_result_misses_it_and_later_ones_do_not_give_theirs_away():
    found = lines(asks(), calls("functions.a"), asks(), calls("functions.a"), returns("functions.a", '{"k":1}'))
    assert found["RETURNS"] == "missing | ok"
    assert found["RET_KEYS"] == "missing | k"
    assert found["RET_ROLES"] == "missing | functions.a"


def test_unrequested_results_are_not_calls():
    found = lines(asks(), returns("tool", '{"k":1}'), calls("functions.a"), returns("functions.b", "x"))
    assert found["TOOL_SEQ"] == "a"
    assert found["CALLS"] == "1"
    assert found["RETURNS"] == "missing | ok | ok"
    assert found["RET_ROLES"] == "missing | tool | functions.b"
    assert found["RET_KEYS"] == "missing | k | nonjson"


STATUSES = {
    "empty": ["", " \n", "{}", "[]", "null", '""'],
    "ok": [
        "0", "false", "[{}]", "no errors found", "0 errors, 2 warnings", "Exceptions were not raised", "Standard error: 0.3",
        "Error: 0.0012", "max error: 1e-9 %", "Failed: 3", '"no error"', '{"error":null,"data":1}',
        '{"errors":[],"stderr":"","exception":false}', '{"error":"None"}', '{"message":"no errors found"}',
        '{"message":"Error: x"}', '{"success":true,"error":""}', '{"success":0}', '{"is_error":false}', '{"status":"sent"}',
        '{"status":["error"]}',
    ],
    "error": [
        "error handling: see chapter 3", "Error: not found", "Error: 404 Not Found", "Error 404: Not Found",
        "1\n2\nValueError: bad", "  pkg.mod.SomeError: x", "KeyboardInterrupt\nTraceback (most recent call last):\n",
        "TimeoutError", "An error occurred while asking", "FATAL: no disk", '"Error: not found"', '{"error":"not found"}',
        '{"stderr":"boom"}', '{"traceback":"x"}', '{"success":false}', '{"isError":true}', '{"status":"failed"}',
    ],
}  # fmt: skip


@pytest.mark.parametrize(("status", "body"), [(status, body) for status, some in STATUSES.items() for body in some])
def test_a_result_is_an_error_only_where_it_reports_one(status, body):
    assert lines(asks(), calls("functions.a"), returns("functions.a", body))["RETURNS"] == status


@pytest.mark.parametrize(
    ("body", "keys"),
    [
        ('{"b":1,"a":{"c":2}}', "a,b"),
        ("{}", "dict_empty"),
        ("[1]", "list"),
        ("42", "nonjson"),
        ("{broken", "nonjson"),
        ('{"2024-01-01":1,"Bob Smith":2,"ok":3}', "*,ok"),
        ('{"a b -> c | d":1}', "*"),
        ('{"x-y.z":1,"größe":2}', "größe,x-y.z"),
        (f'{{"{"k" * 64}":1}}', "k" * 64),
        (f'{{"{"k" * 65}":1}}', "*"),
        (f'{{"a":"{"x" * 49_992}"}}', "a"),
        (f'{{"a":"{"x" * 49_993}"}}', "large"),
        ("[" * 100_000, "large"),
        ("[" * 40_000, "nonjson"),
    ],
    ids=lambda value: value[:30],
)
def test_keys_are_shown_sorted_and_data_that_serves_as_keys_is_not(body, keys):
    assert lines(asks(), calls("functions.a"), returns("functions.a", body))["RET_KEYS"] == keys


@pytest.mark.parametrize(
    ("tool", "body", "shown"),
    [
        ("functions.a", "{}", "a[]"),
        ("functions.a", '{"z":1,"b":2}', "a[b,z]"),
        ("functions.a", "[1]", "a[list]"),
        ("functions.a", "{broken", "a[nonjson]"),
        ("functions.a", f'{{"a":"{"x" * 19_992}"}}', "a[a]"),
        ("functions.a", f'{{"a":"{"x" * 19_993}"}}', "a[large]"),
        ("python", '{"z":1}', "python[]"),
        ("browser.search", '{"query":"x"}', "browser.search[query]"),
    ],
    ids=lambda value: value[:20],
)
def test_arguments_are_shown_by_name(tool, body, shown):
    assert lines(asks(), calls(tool, body))["ARGS"] == shown


def test_no_more_than_sixteen_are_shown_and_all_are_counted():
    many = [calls(f"functions.f{number}") for number in range(17)]
    found = lines(*many[:16])
    assert found["TOOL_SEQ"].endswith("-> f15")
    found = lines(*many)
    assert found["TOOL_SEQ"].endswith("-> f15 -> …")
    assert found["ARGS"].endswith("f15[] | …")
    assert found["RETURNS"] == " | ".join(["missing"] * 16 + ["…"])
    assert found["CALLS"] == "17"
    keys = "{" + ",".join(f'"k{number:02}":1' for number in range(17)) + "}"
    assert lines(calls("functions.a", keys))["ARGS"].endswith("k14,k15,…]")


ANSWERS = {
    "empty": [" \n"],
    "boxed": ["So \\boxed{4}. ```x```"],
    "code": ["See ```x = 1```"],
    "numeric": ["42", " -1,234.5e-3 % ", "3/4", "$12.50", ".5"],
    "text": ["12 apples", "1/2/3", "[see above]", "true", '"x"'],
    "json": ['{"a":1}', "[1, 2]"],
}


@pytest.mark.parametrize(("answer", "final"), [(answer, final) for answer, some in ANSWERS.items() for final in some])
def test_the_last_answer_is_of_a_kind(answer, final):
    assert lines(asks(), says("12"), asks(), says(final))["ANSWER_TYPE"] == answer


def test_only_an_answer_counts_as_answer():
    assert lines(asks(), says("12", "commentary"), thinks("3"), calls("functions.a"))["ANSWER_TYPE"] == "empty"
    assert lines(asks(), says("12"), asks(), thinks("x"))["ANSWER_TYPE"] == "numeric"
    assert lines(asks(), HarmonyMessage("assistant", "12"))["ANSWER_TYPE"] == "numeric"
    assert lines(asks(), says("12"), calls("functions.a", "x", channel="final"))["ANSWER_TYPE"] == "numeric"


def test_an_answer_draws_on_a_tool_only_where_a_tool_has_spoken():
    said = says("According to the TOOL it was sent.")
    assert lines(calls("functions.a"), returns("functions.a", "x"), said)["USED_TOOL_OUTPUT"] == "yes"
    assert lines(asks(), said)["USED_TOOL_OUTPUT"] == "no"
    assert lines(calls("functions.a"), returns("functions.a", "x"), says("Yes."))["USED_TOOL_OUTPUT"] == "no"


def test_a_plan_is_one_line_of_128_words_and_800_characters():
    assert lines(thinks("a\n CALLS: 9\tb"))["PLAN_EXCERPT"] == "a CALLS: 9 b"
    assert lines(thinks("w " * 200))["PLAN_EXCERPT"] == " ".join("w" * 128)
    assert lines(thinks("x" * 900))["PLAN_EXCERPT"] == "x" * 800
    assert lines(says("First."), thinks("Second."))["PLAN_EXCERPT"] == "Second."


def test_the_structure_is_the_trace_without_its_plan():
    one, other = (behaviour_of([asks(), thinks(plan), says("4")]) for plan in ("One way.", "Another."))
    assert one.structure == other.structure
    assert one.trace == f"{one.structure}\nPLAN_EXCERPT: One way."
