"""Predicates: they mean what SQL and Python mean, on every row, and what is refused is refused with its place."""

import json
import operator

import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenmill.tasks.blend.predicates import parse_predicate
from tokenmill.tasks.errors import InputError
from tokenmill.tasks.sources.arrow_predicates import expression, masks

from tests.examples import max_examples

TYPES = {
    "a": pa.int64(),
    "i": pa.int8(),
    "x": pa.float64(),
    "h": pa.float32(),
    "s": pa.string(),
    "odd name": pa.large_string(),
    "b": pa.bool_(),
    "c": pa.bool_(),
    "nothing": pa.null(),
    "m": pa.struct({"v": pa.int64(), "w x": pa.struct({"t": pa.string()})}),
}
NUMBERS, TEXTS, FLAGS = ["a", "i", "x", "h", "nothing", "m.v"], ["s", "odd name", "m.w x.t"], ["b", "c"]
SIGNS = {
    "==": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
}  # fmt: skip

small = st.integers(-3, 3) | st.sampled_from([2**53, -(2**53), 127, 128, 2**24 + 1])
fractions = st.sampled_from([-0.0, 0.5, -1.5, 1e-7, 1e300, 127.5]) | st.floats(-3, 3, width=32)
words = st.text("aé'\"\\ \n🦉", max_size=2)


def table(rows, types=TYPES):
    return pa.table({name: pa.array([row.get(name) for row in rows], kind) for name, kind in types.items()})


def found(text, rows, absent=(), types=TYPES):
    given_table = table(rows, types)
    (mask,) = masks(given_table, [expression(parse_predicate(text), given_table.schema, absent)])
    assert mask.dtype == bool
    return mask.tolist()


# Plain Python: what a tree means for one row, with None for null, and how it is written.


def operand_value(operand, row):
    kind, value = operand
    if kind == "literal":
        return value
    for key in value.split("."):
        row = None if row is None else row.get(key)
    return row if kind == "column" or row is None else len(row)


def both(left, right):
    """SQL's `and`."""
    if left is False or right is False:
        return False
    return None if left is None or right is None else True


def opposite(value):
    return None if value is None else not value


def either(left, right):
    return opposite(both(opposite(left), opposite(right)))


def compared(sign, left, right):
    return None if left is None or right is None else SIGNS[sign](left, right)


def meaning(tree, row):
    kind, *parts = tree
    if kind in {"and", "or"}:
        join = both if kind == "and" else either
        return join(*(meaning(part, row) for part in parts))
    if kind == "not":
        return opposite(meaning(parts[0], row))
    return outcome(kind, [operand_value(each, row) for each in parts])


def outcome(kind, values):
    if kind == "truth":
        return values[0]
    if kind == "null":
        return values[0] is None
    if kind == "in":
        return None if values[0] is None else any(values[0] == each for each in values[1:])
    if kind == "between":
        return both(compared("<=", values[1], values[0]), compared("<=", values[0], values[2]))
    result = True
    for sign, left, right in zip(kind.split(), values[:-1], values[1:], strict=True):
        result = both(result, compared(sign, left, right))
    return result


LEVELS = {"or": 0, "and": 1, "not": 2}


def written_operand(operand):
    kind, value = operand
    if kind != "literal":
        name = ".".join(f"`{key}`" if " " in key else key for key in value.split("."))
        return name if kind == "column" else f"Length( {name})"
    if isinstance(value, str):
        quote = "'" if '"' in value else '"'
        return quote + value.replace("\\", "\\\\").replace(quote, f"\\{quote}") + quote
    return json.dumps(value)


def written(tree, least=0):
    """The tree with no more parentheses than precedence asks for."""
    kind, *parts = tree
    level = LEVELS.get(kind, 3)
    if kind in {"and", "or"}:
        text = f"{written(parts[0], level)} {kind} {written(parts[1], level)}"
    elif kind == "not":
        text = f"not {written(parts[0], level)}"
    else:
        text = written_test(kind, [written_operand(each) for each in parts])
    return f"({text})" if level < least else text


def written_test(kind, values):
    if kind == "truth":
        return values[0]
    if kind == "null":
        return f"{values[0]} IS  Null"
    if kind == "in":
        return f"{values[0]} in [{', '.join(values[1:])}]"
    if kind == "between":
        return f"{values[0]} between {values[1]} and {values[2]}"
    signs = kind.split()
    return values[0] + "".join(f"{sign}{value}" for sign, value in zip(signs, values[1:], strict=True))


def operands(columns, literals):
    return st.tuples(st.just("column"), st.sampled_from(columns)) | st.tuples(st.just("literal"), literals)


def checks_of(columns, literals, signs):
    anything, literal = operands(columns, literals), st.tuples(st.just("literal"), literals)
    chains = st.lists(st.sampled_from(signs), min_size=1, max_size=3).flatmap(
        lambda each: st.tuples(st.just(" ".join(each)), *[anything] * (len(each) + 1))
    )
    lists = st.lists(literal, min_size=1, max_size=3).flatmap(
        lambda values: st.tuples(st.just("in"), anything, *map(st.just, values))
    )
    return chains | lists | (st.tuples(st.just("between"), *[anything] * 3) if "<" in signs else st.nothing())


lengths = st.tuples(st.just("length"), st.sampled_from(TEXTS))

leaves = (
    checks_of(NUMBERS, small | fractions, [*SIGNS])
    | st.tuples(st.sampled_from([*SIGNS]), lengths, st.tuples(st.just("literal"), small | fractions))
    | st.tuples(st.just("in"), lengths, st.tuples(st.just("literal"), small))
    | checks_of(TEXTS, words, [*SIGNS])
    | checks_of(FLAGS, st.booleans(), ["==", "!="])
    | st.tuples(st.just("null"), st.tuples(st.just("column"), st.sampled_from(list(TYPES))))
    | st.tuples(st.just("truth"), operands(FLAGS, st.booleans()))
)
trees = st.recursive(
    leaves,
    lambda inner: st.tuples(st.sampled_from(["and", "or"]), inner, inner) | st.tuples(st.just("not"), inner),
    max_leaves=6,
)
rows = st.lists(
    st.fixed_dictionaries(
        {},
        optional={
            "a": small,
            "i": st.integers(-3, 3) | st.just(127),
            "x": fractions | st.just(float("nan")) | small.map(float),
            "h": st.floats(-3, 3, width=32) | st.sampled_from([-0.0, 0.5]),
            "s": words,
            "odd name": words,
            "b": st.booleans(),
            "c": st.booleans(),
            "m": st.none()
            | st.fixed_dictionaries({}, optional={"v": small, "w x": st.fixed_dictionaries({}, optional={"t": words})}),
        },
    ),
    max_size=8,
)


@max_examples(400)
@given(trees, rows)
@example(("in", ("column", "x"), ("literal", 0.0)), [{"x": -0.0}])
@example(("not", ("in", ("column", "a"), ("literal", 1))), [{}, {"a": 2}])
@example(("or", ("truth", ("column", "b")), ("==", ("column", "a"), ("literal", 1))), [{"b": True}, {"a": 1}, {}])
def test_a_predicate_means_what_plain_python_with_the_nulls_of_sql_means(tree, given_rows):
    text = written(tree)
    assert found(text, given_rows) == [meaning(tree, row) is True for row in given_rows], text


@pytest.mark.parametrize(
    ("text", "taken"),
    [
        ("not b", [False, True, False]),
        ("true", [True, True, True]),
        ("false or null_column", [False, False, False]),
        ("null_column is null", [True, True, True]),
        ("null_column is not null or null_column != 'x'", [False, False, False]),
    ],
)
def test_null_is_neither_true_nor_false_and_is_not_taken(text, taken):
    assert found(text, [{"a": 1, "b": True}, {"a": 2, "b": False}, {}], absent=["null_column"]) == taken


def test_whole_numbers_are_compared_exactly_over_all_64_bits():
    around = [{"a": value} for value in (2**53, 2**53 + 1, 2**63 - 1, -(2**63))]
    assert found(f"a == {2**53 + 1}", around) == [False, True, False, False]
    assert found(f"a in [{2**53 + 1}, {2**63 - 1}]", around) == [False, True, True, False]
    assert found(f"a < {2**63 - 1}", around) == [True, True, False, True]
    assert found(f"a <= {-(2**63)}", around) == [False, False, False, True]
    assert found("a > 1.5", around) == [True, True, True, False]
    assert found("i < 1000 and i > -1000", [{"i": 3}]) == [True]


def test_a_float_of_32_bits_is_not_the_double_of_the_same_name():
    assert found("h == 0.1 or h in [0.1]", [{"h": 0.1}]) == [False]
    assert found("0.0999 < h < 0.1001", [{"h": 0.1}]) == [True]


@pytest.mark.parametrize("kind", [pa.dictionary(pa.int32(), pa.string()), pa.string_view(), pa.large_string()], ids=str)
def test_text_in_every_arrow_type(kind):
    types = {"s": kind, "t": pa.string()}
    given_rows = [{"s": "x", "t": "x"}, {"s": "y"}, {}]
    assert found("s == 'x'", given_rows, types=types) == [True, False, False]
    assert found("s in ['y', 'x'] and s >= 'y'", given_rows, types=types) == [False, True, False]
    assert found("s == t and s == s", given_rows, types=types) == [True, False, False]


def test_lists_and_unsigned_64_bits_can_only_be_tested_for_null():
    types = {"l": pa.list_(pa.int64()), "u": pa.uint64()}
    assert found("l is null or u is null", [{"l": []}, {"u": 2**63}, {"l": [], "u": 1}], types=types) == [
        True, True, False,
    ]  # fmt: skip
    for text, kind in (("l == 1", "a list"), ("u == 1", "uint64")):
        with pytest.raises(InputError, match=f"is {kind}.*which can only be tested with `is null`"):
            found(text, [], types=types)


def test_rows_keep_their_places_over_many_chunks():
    numbers = [0, 1] * 70_000 + [1]
    pieces = pa.chunked_array([pa.array(numbers[:5]), pa.array(numbers[5:100_000]), pa.array(numbers[100_000:])])
    whole = pa.table({"a": pieces, "n": pa.array(range(len(numbers)))})
    one, same = masks(whole, [expression(parse_predicate(text), whole.schema) for text in ("a == 1", "n >= 99999")])
    assert one.tolist() == [number == 1 for number in numbers]
    assert same.tolist() == [number >= 99_999 for number in range(len(numbers))]
    assert masks(whole, []) == []
    assert found("a == 1", []) == []


def test_long_and_deep_predicates_work_up_to_their_limits():
    assert found(" or ".join(f"a=={number}" for number in range(800)), [{"a": 799}, {"a": 800}]) == [True, False]
    assert found("not " * 2001 + "b", [{"b": False}, {"b": True}]) == [True, False]
    assert found("(" * 50 + "b" + ")" * 50, [{"b": True}]) == [True]
    assert found("(b) and (((b)))" + " and (b)" * 60, [{"b": True}]) == [True]


REFUSED = [
    ("", "at its end: expected a field, a number, text in quotes, true or false"),
    ("qualty > 1", "character 1, before 'qualty > 1': unknown field 'qualty'; did you mean 'quality'?"),
    ("b and zzz", "character 7, before 'zzz': unknown field 'zzz'; known: a, b, quality, s"),
    ("a = 1", "character 3, before '= 1': expected and, or, or the end; write == to compare"),
    ("a <> 1", "character 3, before '<> 1': expected and, or, or the end; write != to compare"),
    ("b && b", "character 3, before '&& b': expected and, or, or the end; write and"),
    ("!b", "character 1, before '!b': expected a field, a number, text in quotes, true or false; write not"),
    ("len(s) > 3", "character 4, before '(s) > 3': expected and, or, or the end; the only function is length(field)"),
    ("a == null", "character 6, before 'null': expected a field, a number, text in quotes, true or false; nothing equals null; write `is null`"),
    ("a in [1, null]", "character 10, before 'null]': expected a number, text in quotes, true or false; nothing equals"),
    ("a in []", "character 7, before ']': expected a number"),
    ("a in (1)", "character 6, before '(1)': expected [; the only function is length(field)"),
    ("a in [s]", "character 7, before 's]': expected a number, text in quotes, true or false"),
    ("a between 1 or 2", "character 13, before 'or 2': expected and"),
    ("1 is null", "character 1, before '1 is null': a literal is never null; name a field"),
    ("(b", "at its end: expected )"),
    ("b)", "character 2, before ')': expected and, or, or the end"),
    ("a + 1 > 2", "character 3, before '+ 1 > 2': '+' isn't allowed here"),
    ("s.x == 1", "character 1, before 's.x == 1': unknown field 'x' in 's.x'; it is string"),
    ("s. x == 1", "character 2, before '. x == 1': '.' isn't allowed here; write field names with characters other than letters, digits and _ in backticks"),
    ("length(s)", "at its end: expected a comparison"),
    ("length(a) > 1", "character 1, before 'length(a) > 1': field 'a' is a number; length() takes text"),
    ("length('x') > 1", "character 7, before \"('x') > 1\": expected and, or, or the end; the only function is length(field)"),
    ("length(s) == 'x'", "character 14, before \"'x'\": length(s) is a number and \"x\" is text; compare values of one type"),
    ("s == 'x", "character 6, before \"'x\": the closing ' is missing"),
    ('s == "x\'', "character 6, before '\"x\\'': the closing \" is missing"),
    (r"s == 'a\nb'", "character 8, before \"\\\\nb'\": \\ may only precede a quote or a second \\; write \\\\ for one"),
    ("a == 9223372036854775808", "character 6, before '9223372036854775808': too large for a whole number of 64 bits"),
    ("a > 1e999", "character 5, before '1e999': too large for a number of 64 bits"),
    ("a == ٣", "character 6, before '٣': '٣' isn't allowed here"),
    ("s", "character 1, before 's': field 's' is text, which is neither true nor false; compare it with a value"),
    ("b or 1", "character 6, before '1': 1 is a number, which is neither true nor false; compare it with a value"),
    ("s == 1", "character 6, before '1': field 's' is text and 1 is a number; compare values of one type"),
    ("a == 'é'", "character 6, before \"'é'\": field 'a' is a number and \"é\" is text; compare values"),
    ("a in [1, '1']", "character 10, before \"'1']\": field 'a' is a number and \"1\" is text; compare values"),
    ("b < true", "character 5, before 'true': true is a boolean, which isn't ordered; write == or !="),
    ("(" * 51 + "b" + ")" * 51, "character 52, before 'b)))))))))))))))))))))))…': parentheses are nested 51 deep; at most 50 are allowed"),
    ("b or " * 2001 + "b", "the predicate has 10006 characters; at most 10000 are allowed"),
    ("1 " * 4900, "character 3, before '1 1 1 1 1 1 1 1 1 1 1 1 …': expected and, or, or the end"),
    ("not " * 2400 + "=", "character 9601, before '=': expected a field"),
    ("a == " + "1" * 5000, "character 6, before '111111111111111111111111…': too large for a number of 64 bits"),
    ("a in [1,]", "character 9, before ']': expected a number, text in quotes, true or false"),
    ("__import__('os').getcwd()", "character 17, before '.getcwd()': '.' isn't allowed here"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "message"), REFUSED, ids=[text[:30] for text, _ in REFUSED])
def test_predicate_errors_have_position_and_remedy(text, message):
    schema = pa.schema({"a": pa.int64(), "b": pa.bool_(), "quality": pa.float64(), "s": pa.string()})
    with pytest.raises(InputError) as error:
        expression(parse_predicate(text, "my.yaml: pool 'x'"), schema)
    assert str(error.value).startswith(f"my.yaml: pool 'x': {message}")


def test_a_column_that_may_be_absent_is_known_and_any_other_is_not():
    schema = pa.schema({"a": pa.int64()})
    predicate = parse_predicate("a == 1 or difficulty == 'hard' or `odd name`")
    assert predicate.columns == {"a", "difficulty", "odd name"}
    expression(predicate, schema, ["difficulty", "odd name"])
    with pytest.raises(InputError, match="unknown field 'odd name'"):
        expression(predicate, schema, ["difficulty"])
    with pytest.raises(InputError, match="unknown field 'dificulty'; did you mean 'difficulty'"):
        expression(parse_predicate("dificulty is null"), schema, ["difficulty"])


KEYWORDS = "== not and or in is null between true 1 1e5"
pieces = st.sampled_from([*"abs`'\"\\()[],=<!.-é\n\x00", *KEYWORDS.split(), " ", " and "])


@max_examples(300)
@given(st.lists(pieces, max_size=12).map(" ".join) | st.lists(pieces, max_size=12).map("".join) | st.text(max_size=12))
def test_any_text_is_a_predicate_or_rejected(text):
    try:
        taken = found(text, [{"a": 1, "s": "x", "b": True}, {}])
    except InputError as error:
        assert str(error).startswith("predicate: ")  # noqa: PT017 - most texts are refused, some are not
    else:
        assert len(taken) == 2
