r"""Predicates on the fields of rows, such as `int_score >= 3 and language in ['en', 'de'] and length(text) > 200`: the grammar.

    tests      ==, !=, <, <=, >, >=, in [1, 2], not in [...], between 1 and 2, is null, is not null
    combined   and, or, not, parentheses; keywords in any case
    operands   a field (a word, or any name in backticks), a number, true, false, text in ' or " (\ escapes ' " \)
    nested     metadata.score is the field `score` of the object `metadata`; a dot in backticks is part of a name
    length     length(field): the number of characters of a text

`0 < a <= 1` chains as in Python, and `between` includes both ends. There is no other function, and no arithmetic.

Python's own parser builds the tree: every token becomes one cell of a line of Python, and only whitelisted nodes are
accepted. Names and values never reach it. An offset in the line identifies the token, and thus the position in the text.

Null works as in SQL, and a missing field is null: a comparison with null is null, `not` keeps it, and a row is selected only
where the result is true. NaN equals nothing, not even itself.

A tree of a predicate is one function over an `Interpretation`: values of tables (`sources.arrow_predicates`), or the statistics
of row groups (`sources.row_groups`). Parsing takes 10 microseconds per token.
"""

import ast
import math
import re
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import pairwise
from operator import and_, or_
from typing import Any, NoReturn, Protocol

from tokenmill.tasks.errors import InputError

NUMBER = r"-?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?"

FIELD = r"(?:[^\W\d]\w*|`[^`]+`)(?:\.(?:[^\W\d]\w*|`[^`]+`))*"

TOKEN = re.compile(
    rf"""
    (?P<blank>\s+)
  | (?P<number>{NUMBER})
  | (?P<text>'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")
  | (?P<length>(?i:length)\s*\(\s*{FIELD}\s*\))
  | (?P<word>{FIELD})
  | (?P<sign>[=!<>]=|<>|&&|\|\||[=!<>()\[\],])
    """,
    re.VERBOSE | re.DOTALL,
)

KEYWORDS = frozenset({"and", "or", "not", "in", "is", "null", "between", "true", "false"})

SIGNS: Mapping[type[ast.cmpop], str] = {
    ast.Eq: "==", ast.NotEq: "!=", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=",
}  # fmt: skip

REMEDIES = {
    "=": "write == to compare",
    "<>": "write != to compare",
    "!": "write not",
    "&&": "write and",
    "||": "write or",
    "(": "the only function is length(field)",
    "null": "nothing equals null; write `is null` or `is not null`",
}
"""Remedies by the misplaced token."""

LITERAL = "a number, text in quotes, true or false"
OPERAND = f"a field, {LITERAL}"

AFTER = {"[": LITERAL, ",": LITERAL, "(": OPERAND, "in": "[", "is": "null"}
"""What is expected after these tokens."""

IN_PYTHON = {"(": "{", ")": "}", "null": "None", "between": "in"}
"""Tokens that Python writes differently. A group becomes a set, which, unlike parentheses, stays in Python's tree."""

KEYS = re.compile(r"`([^`]+)`|(\w+)")
PLAIN = re.compile(r"[^\W\d]\w*")

ANY_OPERAND, BETWEEN_AND, INVALID = "x", "-", "?"
WIDTH = 8
"""Characters per cell, which holds the Python source of one token; an offset belongs to token `offset // WIDTH`."""

ENDINGS = (("", "and, or, or the end"), (" x", OPERAND), (" in [x]", "in or between"))
"""Ways to complete the beginning of a predicate, and what is expected next if one works."""

CLOSING = {"{": "}", "[": "]"}

MAX_CHARACTERS, MAX_DEPTH = 10_000, 50
"""Limits on length and nesting, because the tree of a predicate is walked recursively."""

INT64_END = 2**63
EXCERPT = 24


@dataclass(frozen=True, slots=True)
class Column:
    """A field, as the keys that lead to it, and its position in the predicate, from 0."""

    path: tuple[str, ...]
    position: int

    @property
    def name(self) -> str:
        """The keys with dots between them."""
        return ".".join(self.path)


@dataclass(frozen=True, slots=True)
class Literal:
    """A literal value and its position in the predicate, from 0. None is an unknown value, which only a path can give."""

    value: bool | int | float | str | None
    position: int


@dataclass(frozen=True, slots=True)
class Length:
    """The number of characters of a text field."""

    column: Column

    @property
    def position(self) -> int:
        """The position of the field."""
        return self.column.position


Operand = Column | Literal | Length


class Interpretation(Protocol):
    """What tests mean. Results combine by `&`, `|` and `~`."""

    def truth(self, operand: Column | Literal) -> Any:  # noqa: ANN401 - one type per interpretation
        """A boolean by itself."""
        ...

    def compared(self, sign: str, left: Operand, right: Operand) -> Any:  # noqa: ANN401 - same
        """A comparison; `sign` is one of `SIGNS`."""
        ...

    def is_null(self, column: Column) -> Any:  # noqa: ANN401 - same
        """Whether a field is null or missing."""
        ...


@dataclass(frozen=True, slots=True)
class WithKeys:
    """An interpretation in which the path of a file gives the values of some fields, by name; None is null.

    They are text, and numbers where they are compared with one.
    """

    inner: Interpretation
    keys: Mapping[str, str | None]

    def truth(self, operand: Column | Literal) -> Any:  # noqa: ANN401 - as of Interpretation
        """See Interpretation."""
        return self.inner.truth(self._value(operand))

    def compared(self, sign: str, left: Operand, right: Operand) -> Any:  # noqa: ANN401 - as of Interpretation
        """See Interpretation."""
        return self.inner.compared(sign, self._value(left, right), self._value(right, left))

    def is_null(self, column: Column) -> Any:  # noqa: ANN401 - as of Interpretation
        """See Interpretation."""
        if not self._has(column):
            return self.inner.is_null(column)
        return self.inner.truth(Literal(self.keys[column.name] is None, column.position))

    def _has(self, column: Column) -> bool:
        return len(column.path) == 1 and column.path[0] in self.keys

    def _value(self, operand: Operand, beside: Operand | None = None) -> Any:  # noqa: ANN401 - an Operand of the same kind
        """An operand, as a literal if the path gives it, of the kind of the operand `beside` it."""
        column = operand.column if isinstance(operand, Length) else operand
        if isinstance(column, Literal) or not self._has(column):
            return operand
        text = self.keys[column.path[0]]
        if isinstance(operand, Length):
            return Literal(None if text is None else len(text), operand.position)
        number = isinstance(beside, Length) or (isinstance(beside, Literal) and type(beside.value) in {int, float})
        return Literal(number_of(text) if text and number else text, operand.position)


def number_of(text: str) -> int | float | str:
    """The number that a text is, a double outside 64 bits; the text itself if it isn't one."""
    if not re.fullmatch(NUMBER, text):
        return text
    try:
        value = int(text)
    except ValueError:  # a fraction
        return float(text)
    return value if -INT64_END <= value < INT64_END else float(value)


Node = Callable[[Interpretation], Any]
"""A part of a parsed predicate; returns its meaning in an interpretation."""


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str
    text: str
    position: int

    @property
    def keyword(self) -> str | None:
        word = self.text.lower()
        return word if self.kind == "word" and word in KEYWORDS else None

    @property
    def is_column(self) -> bool:
        return self.kind == "length" or (self.kind == "word" and self.keyword is None)

    @property
    def path(self) -> tuple[str, ...]:
        """The keys of a field, or of the one that is measured."""
        field = self.text[self.text.index("(") :] if self.kind == "length" else self.text
        return tuple(quoted or word for quoted, word in KEYS.findall(field))

    @property
    def is_operand(self) -> bool:
        return self.is_column or self.kind in {"number", "text"} or self.keyword in {"true", "false"}


@dataclass(frozen=True, slots=True)
class Predicate:
    """A parsed predicate. `where` names its source in error messages; `named` are its fields in order.

    `normal` is the predicate with one spelling of blanks, quotes and keywords: part of the identity of what it selects.
    `optional` are the fields that it tests with `is null`.
    """

    text: str
    where: str
    tree: Node
    named: tuple[Column, ...]
    normal: str
    optional: frozenset[tuple[str, ...]]

    @property
    def columns(self) -> frozenset[str]:
        """The names of the columns that hold its fields."""
        return frozenset(column.path[0] for column in self.named)

    @property
    def paths(self) -> list[tuple[str, ...]]:
        """Its fields, each once, in order."""
        return list(dict.fromkeys(column.path for column in self.named))

    def refuse(self, position: int, problem: str) -> NoReturn:
        """Raises InputError that names the place in the predicate."""
        _refuse(self.text, self.where, position, problem)


def parse_predicate(text: str, where: str = "predicate") -> Predicate:
    """Parse a predicate. Raises InputError that names `where`, the character and the remedy."""
    if len(text) > MAX_CHARACTERS:
        raise InputError(f"{where}: the predicate has {len(text)} characters; at most {MAX_CHARACTERS} are allowed")
    parser = _Parser(text, where)
    columns = (Column(token.path, token.position) for token in parser.tokens if token.is_column)
    tree = parser.parse()
    return Predicate(text, where, tree, tuple(columns), parser.normal(), frozenset(parser.optional))


@lru_cache
def where_of(text: str) -> Predicate:
    """The parsed `where` of a dataset."""
    return parse_predicate(text, "where")


def _refuse(text: str, where: str, position: int, problem: str) -> NoReturn:
    rest = text[position:]
    shown = f"{rest[:EXCERPT]}…" if len(rest) > EXCERPT else rest
    place = f"character {position + 1}, before {shown!r}" if rest.strip() else "at its end"
    raise InputError(f"{where}: {place}: {problem}")


class _Parser:
    """Parses one predicate by Python's `ast`."""

    def __init__(self, text: str, where: str) -> None:
        self.text, self.where = text, where
        self.optional: set[tuple[str, ...]] = set()
        self.tokens = self._split()
        self._words = [ANY_OPERAND if each.is_operand else each.keyword or each.text for each in self.tokens]
        self._cells = [self._cell(number) for number in range(len(self.tokens) - 1)]

    def parse(self) -> Node:
        self._require_shallow()
        try:
            tree = _python("".join(f"{cell:{WIDTH}}" for cell in self._cells))
        except SyntaxError:
            self._refuse_syntax()
        return self._node(tree)

    def _split(self) -> list[_Token]:
        tokens: list[_Token] = []
        place = 0
        while place < len(self.text):
            match = TOKEN.match(self.text, place)
            if match is None:
                _refuse(self.text, self.where, place, _why_no_token(self.text[place]))
            if match.lastgroup != "blank":
                tokens.append(_Token(str(match.lastgroup), match.group(), place))
            place = match.end()
        return [*tokens, _Token("end", "", len(self.text))]

    def normal(self) -> str:
        """The predicate with one spelling of blanks, quotes and keywords."""
        text = before = ""
        for token in self.tokens[:-1]:
            word = self._spelling(token)
            apart = not text or before in {"(", "["} or word in {")", "]", ","}
            text, before = f"{text}{'' if apart else ' '}{word}", word if token.kind != "text" else ""
        return text

    def _spelling(self, token: _Token) -> str:
        if token.is_column:
            alone = len(token.path) == 1
            plain = [PLAIN.fullmatch(key) and not (alone and key.lower() in KEYWORDS) for key in token.path]
            name = ".".join(key if bare else f"`{key}`" for key, bare in zip(token.path, plain, strict=True))
            return f"length({name})" if token.kind == "length" else name
        if token.kind == "text":
            inner = self._unescaped(token).replace("\\", "\\\\").replace("'", "\\'")
            return f"'{inner}'"
        return token.keyword or token.text.lower()

    def _cell(self, number: int) -> str:
        """The Python source of a token; INVALID for syntax that Python allows and predicates do not."""
        word, (earlier, before) = self._words[number], ["", "", *self._words][number : number + 2]
        if earlier == "between" and before == ANY_OPERAND:
            return BETWEEN_AND if word == "and" else INVALID
        in_list = earlier in {"[", ","} and before == ANY_OPERAND
        asks_null = before == "is" or (earlier, before) == ("is", "not")
        wrong = (
            (before == "in") != (word == "[")
            or in_list != (word in {",", "]"})
            or (asks_null != (word == "null") and (before, word) != ("is", "not"))
            or (before, word) == ("(", ")")
        )
        return INVALID if wrong else IN_PYTHON.get(word, word)

    def _require_shallow(self) -> None:
        depth = 0
        for token, word in zip(self.tokens, self._words, strict=True):
            if depth > MAX_DEPTH:
                problem = f"parentheses are nested {depth} deep; at most {MAX_DEPTH} are allowed"
                _refuse(self.text, self.where, token.position, problem)
            depth += (word == "(") - (word == ")")

    def _refuse_syntax(self) -> NoReturn:
        """Reject the first token that cannot follow the tokens before it."""
        counts = range(1, len(self._cells) + 1)
        wrong = bisect_left(counts, 1, key=lambda count: self._expected(count) is None)
        self._unexpected(wrong, self._expected(wrong) or OPERAND)

    def _expected(self, count: int) -> str | None:
        """What can follow the first `count` tokens; None if no predicate begins with them."""
        cells = self._cells[:count]
        closing = _closing(cells)
        for ending, expected in ENDINGS:
            try:
                _python(" ".join([*cells, ending, *closing]))
            except SyntaxError:
                continue
            if count and self._words[count - 1] in AFTER:
                return AFTER[self._words[count - 1]]
            if count > 1 and self._words[count - 2] == "between":
                return "and"
            if count > 1 and self._words[count - 2 : count] == ["is", "not"]:
                return "null"
            return closing[0].replace("}", ")") if not ending and closing else expected
        return None

    def _node(self, node: ast.expr) -> Node:
        negated = False
        while isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            negated, node = not negated, node.operand
        found = self._positive(node)
        return _negation(found) if negated else found

    def _positive(self, node: ast.expr) -> Node:
        if isinstance(node, ast.Compare):
            return self._test(node)
        if isinstance(node, ast.BoolOp):
            join = and_ if isinstance(node.op, ast.And) else or_
            return _combination([self._node(each) for each in node.values], join)
        if isinstance(node, ast.Set):
            return self._node(node.elts[0])
        operand = self._operand(node)
        if isinstance(operand, Length):
            self._unexpected(self._index_after(node), "a comparison")
        return lambda binding: binding.truth(operand)

    def _test(self, node: ast.Compare) -> Node:
        terms, signs = [node.left, *node.comparators], [SIGNS.get(type(each)) for each in node.ops]
        complete = [isinstance(node.left, ast.Set), *(None in pair for pair in pairwise(signs))]
        if True in complete:
            self._unexpected(self._index_after(terms[complete.index(True)]), "and, or, or the end")
        if isinstance(node.ops[0], ast.Is | ast.IsNot):
            found = self._null_test(self._operand(node.left))
        elif isinstance(node.ops[0], ast.In | ast.NotIn):
            found = self._membership(self._operand(node.left), node.comparators[0])
        else:
            pairs = pairwise([self._operand(term) for term in terms])
            return _combination([_comparison(str(sign), *pair) for sign, pair in zip(signs, pairs, strict=True)], and_)
        return _negation(found) if isinstance(node.ops[0], ast.IsNot | ast.NotIn) else found

    def _null_test(self, operand: Operand) -> Node:
        if isinstance(operand, Literal):
            _refuse(self.text, self.where, operand.position, "a literal is never null; name a field")
        column = operand.column if isinstance(operand, Length) else operand
        self.optional.add(column.path)
        return lambda binding: binding.is_null(column)

    def _membership(self, operand: Operand, values: ast.expr) -> Node:
        if isinstance(values, ast.List):
            return _combination([_comparison("==", operand, self._operand(each, LITERAL)) for each in values.elts], or_)
        if not isinstance(values, ast.BinOp):
            number = self._index_after(values) if isinstance(values, ast.Name) else values.col_offset // WIDTH
            self._unexpected(number, "and")
        low, high = self._operand(values.left), self._operand(values.right)
        return _combination([_comparison(">=", operand, low), _comparison("<=", operand, high)], and_)

    def _operand(self, node: ast.expr, wanted: str = OPERAND) -> Operand:
        token = self.tokens[node.col_offset // WIDTH]
        if not isinstance(node, ast.Name) or (token.is_column and wanted == LITERAL):
            self._unexpected(node.col_offset // WIDTH, wanted)
        if token.is_column:
            column = Column(token.path, token.position)
            return Length(column) if token.kind == "length" else column
        if token.kind == "number":
            return Literal(self._number(token), token.position)
        return Literal(self._unescaped(token) if token.kind == "text" else token.keyword == "true", token.position)

    def _number(self, token: _Token) -> int | float:
        try:
            value = int(token.text)
        except ValueError:  # a fraction, or too many digits for int
            value = float(token.text)
        if isinstance(value, float) and math.isinf(value):
            _refuse(self.text, self.where, token.position, "too large for a number of 64 bits")
        if isinstance(value, int) and not -INT64_END <= value < INT64_END:
            _refuse(self.text, self.where, token.position, "too large for a whole number of 64 bits")
        return value

    def _unescaped(self, token: _Token) -> str:
        inner = token.text[1:-1]
        for match in re.finditer(r"\\(.)", inner, re.DOTALL):
            if match[1] not in "\\'\"":
                position = token.position + 1 + match.start()
                _refuse(
                    self.text, self.where, position, "\\ may only precede a quote or another \\; write \\\\ for one"
                )
        return re.sub(r"\\(.)", r"\1", inner, flags=re.DOTALL)

    def _index_after(self, node: ast.expr) -> int:
        """The number of the token after a node."""
        return ((node.end_col_offset or 1) - 1) // WIDTH + 1

    def _unexpected(self, number: int, expected: str) -> NoReturn:
        token = self.tokens[number]
        remedy = REMEDIES.get(token.text.lower())
        _refuse(self.text, self.where, token.position, f"expected {expected}" + (f"; {remedy}" if remedy else ""))


def _negation(inner: Node) -> Node:
    return lambda binding: ~inner(binding)


def _combination(parts: Sequence[Node], join: Callable[[Any, Any], Any]) -> Node:
    return lambda binding: _combined([part(binding) for part in parts], join)


def _comparison(sign: str, left: Operand, right: Operand) -> Node:
    return lambda binding: binding.compared(sign, left, right)


def _python(line: str) -> ast.expr:
    """Parse a line of Python. Raises SyntaxError, also for a line that exhausts the parser's stack."""
    try:
        return ast.parse(line, mode="eval").body
    except (RecursionError, MemoryError) as error:
        raise SyntaxError from error


def _closing(cells: Sequence[str]) -> list[str]:
    """The closing brackets that are missing, the innermost first."""
    closing: list[str] = []
    for cell in cells:
        if cell in CLOSING:
            closing.insert(0, CLOSING[cell])
        elif closing and cell == closing[0]:
            del closing[0]
    return closing


def _why_no_token(character: str) -> str:
    if character in "'\"`":
        return f"the closing {character} is missing"
    remedy = "write field names with characters other than letters, digits and _ in backticks"
    return f"{character!r} has no meaning here; {remedy}"


def _combined(parts: Sequence[Any], join: Callable[[Any, Any], Any]) -> Any:  # noqa: ANN401 - of any interpretation
    """Combine parts in a balanced tree: Arrow recurses into it, and 20,000 levels would overflow the stack."""
    if len(parts) == 1:
        return parts[0]
    middle = len(parts) // 2
    half = partial(_combined, join=join)
    return join(half(parts[:middle]), half(parts[middle:]))
