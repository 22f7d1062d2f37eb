r"""Predicates on the fields of rows, such as `int_score >= 3 and language in ['en', 'de'] and length(text) > 200`: the grammar.

    tests      ==, !=, <, <=, >, >=, in [1, 2], not in [...], between 1 and 2, is null, is not null
    combined   and, or, not, parentheses; keywords in any case
    operands   a field (a word, or any name in backticks), a number, true, false, text in ' or " (\ escapes ' " \)
    nested     metadata.score is the field `score` of the object `metadata`; a dot in backticks is part of a name
    length     length(field): the number of characters in a text

`0 < a <= 1` chains as in Python, and `between` includes both ends. Other functions and arithmetic don't exist.

Null works as in SQL, and a missing field is null: a comparison with null is null, `not` keeps it, and a row is selected only
where the result is true. NaN isn't equal to any value, not even itself.

A tree of a predicate is one function over an `Interpretation`: values of tables, or the statistics of
row groups (`sources.arrow_predicates`). Parsing takes 5 microseconds per token.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
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
  | (?P<field>{FIELD})
  | (?P<sign>[=!<>]=|<>|&&|\|\||[=!<>()\[\],])
    """,
    re.VERBOSE | re.DOTALL,
)

KEYWORDS = frozenset({"and", "or", "not", "in", "is", "null", "between", "true", "false"})

SIGNS = ("==", "!=", "<", "<=", ">", ">=")

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
END = "and, or, or the end"

KEYS = re.compile(r"`([^`]+)`|(\w+)")
PLAIN = re.compile(r"[^\W\d]\w*")
ESCAPE = re.compile(r"\\(.)", re.DOTALL)

MAX_CHARACTERS, MAX_DEPTH = 10_000, 50
"""Limits on length and nesting, because the parser is recursive."""

INT64_END = 2**63
EXCERPT = 24


@dataclass(frozen=True, slots=True)
class Column:
    """A field, as the keys that lead to it, and its position in the predicate, from 0."""

    path: tuple[str, ...]
    position: int

    @property
    def name(self) -> str:
        return ".".join(self.path)


@dataclass(frozen=True, slots=True)
class Literal:
    """A literal value and its position in the predicate, from 0. None is an unknown value, which only a path can give."""

    value: bool | int | float | str | None
    position: int


@dataclass(frozen=True, slots=True)
class Length:
    """The number of characters in a text field."""

    column: Column

    @property
    def position(self) -> int:
        return self.column.position


Operand = Column | Literal | Length


class Interpretation(Protocol):
    """What tests mean. Results combine by `&`, `|` and `~`."""

    def truth(self, operand: Column | Literal) -> Any:  # noqa: ANN401 - one type per interpretation
        """Return a boolean without a comparison."""

    def compared(self, sign: str, left: Operand, right: Operand) -> Any:  # noqa: ANN401 - same
        """Return a comparison; `sign` is one of `SIGNS`."""

    def is_null(self, column: Column) -> Any:  # noqa: ANN401 - same
        """Return whether a field is null or missing."""


@dataclass(frozen=True, slots=True)
class WithKeys:
    """An interpretation in which the path of a file gives the values of some fields, by name; None is null.

    They are text, and numbers where they are compared with one.
    """

    inner: Interpretation
    keys: Mapping[str, str | None]

    def truth(self, operand: Column | Literal) -> Any:  # noqa: ANN401 - as of Interpretation
        return self.inner.truth(self._value(operand))

    def compared(self, sign: str, left: Operand, right: Operand) -> Any:  # noqa: ANN401 - as of Interpretation
        return self.inner.compared(sign, self._value(left, right), self._value(right, left))

    def is_null(self, column: Column) -> Any:  # noqa: ANN401 - as of Interpretation
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
    """Return the number that a text is, a double outside 64 bits; the text itself if it isn't one."""
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
    """A token: `kind` is a group of TOKEN, `keyword` or `end`; `word` is its text, of a keyword in lower case."""

    kind: str
    word: str
    position: int

    @property
    def is_column(self) -> bool:
        return self.kind in {"field", "length"}

    @property
    def path(self) -> tuple[str, ...]:
        """The keys of a field, or of the one that is measured."""
        field = self.word[self.word.index("(") :] if self.kind == "length" else self.word
        return tuple(quoted or word for quoted, word in KEYS.findall(field))


@dataclass(frozen=True, slots=True)
class Predicate:
    """A parsed predicate. `where` names its source in error messages; `named` are its fields in order.

    `normal` is the predicate with one spelling of spaces, quotes and keywords: part of the identity of the selected rows.
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
    """Return the parsed `where` of a dataset."""
    return parse_predicate(text, "where")


def _refuse(text: str, where: str, position: int, problem: str) -> NoReturn:
    rest = text[position:]
    shown = f"{rest[:EXCERPT]}…" if len(rest) > EXCERPT else rest
    place = f"character {position + 1}, before {shown!r}" if rest.strip() else "at its end"
    raise InputError(f"{where}: {place}: {problem}")


class _Parser:
    """Parses one predicate by recursive descent, and stops at the first token that can't follow the ones before it."""

    def __init__(self, text: str, where: str) -> None:
        self.text, self.where = text, where
        self.tokens: list[_Token] = []
        self.optional: set[tuple[str, ...]] = set()
        self._at = self._depth = place = 0
        while place < len(text):
            match = TOKEN.match(text, place)
            if match is None:
                character = text[place]
                self._refuse(
                    place,
                    f"the closing {character} is missing"
                    if character in "'\"`"
                    else f"{character!r} isn't allowed here; write field names with characters other than letters, digits and "
                    "_ in backticks",
                )
            kind, word = str(match.lastgroup), match.group()
            if kind == "field" and word.lower() in KEYWORDS:
                kind, word = "keyword", word.lower()
            if kind != "blank":
                self.tokens.append(_Token(kind, word, place))
            place = match.end()
        self.tokens.append(_Token("end", "", len(text)))

    def parse(self) -> Node:
        tree = self._disjunction()
        self._require("", END)
        return tree

    def _disjunction(self) -> Node:
        parts = [self._conjunction()]
        while self._take("or"):
            parts.append(self._conjunction())
        return _joined(parts, or_)

    def _conjunction(self) -> Node:
        parts = [self._negatable()]
        while self._take("and"):
            parts.append(self._negatable())
        return _joined(parts, and_)

    def _negatable(self) -> Node:
        negated = False
        while self._take("not"):
            negated = not negated
        if not self._take("("):
            found = self._test()
        else:
            self._depth += 1
            if self._depth > MAX_DEPTH:
                problem = f"parentheses are nested {self._depth} deep; at most {MAX_DEPTH} are allowed"
                self._refuse(self._token.position, problem)
            found = self._disjunction()
            self._require(")")
            self._depth -= 1
        return (lambda meaning: ~found(meaning)) if negated else found

    def _test(self) -> Node:
        operand = self._operand()
        if self._take("is"):
            negated = self._take("not")
            self._require("null")
            found = self._null_test(operand)
        else:
            negated = self._take("not")
            if self._take("in"):
                self._require("[")
                parts = [_comparison("==", operand, self._operand(LITERAL))]
                while self._take(","):
                    parts.append(_comparison("==", operand, self._operand(LITERAL)))
                self._require("]")
                found = _joined(parts, or_)
            elif self._take("between"):
                low = self._operand()
                self._require("and")
                found = _joined([_comparison(">=", operand, low), _comparison("<=", operand, self._operand())], and_)
            elif negated:
                self._unexpected("in or between")
            else:
                found = self._comparisons(operand)
        return (lambda meaning: ~found(meaning)) if negated else found

    def _null_test(self, operand: Operand) -> Node:
        if isinstance(operand, Literal):
            self._refuse(operand.position, "a literal is never null; name a field")
        column = operand.column if isinstance(operand, Length) else operand
        self.optional.add(column.path)
        return lambda meaning: meaning.is_null(column)

    def _comparisons(self, operand: Operand) -> Node:
        """The rest of a chain of comparisons, or a boolean without one."""
        terms, signs = [operand], list[str]()
        while self._token.word in SIGNS:
            signs.append(self._token.word)
            self._at += 1
            terms.append(self._operand())
        if signs:
            return _joined([_comparison(sign, *pair) for sign, pair in zip(signs, pairwise(terms), strict=True)], and_)
        if isinstance(operand, Length):
            self._unexpected("a comparison")
        return lambda meaning: meaning.truth(operand)

    def _operand(self, expected: str = OPERAND) -> Operand:
        token = self._token
        is_literal = token.kind in {"number", "text"} or token.word in {"true", "false"}
        if not (is_literal or (token.is_column and expected == OPERAND)):
            self._unexpected(expected)
        self._at += 1
        if token.is_column:
            column = Column(token.path, token.position)
            return Length(column) if token.kind == "length" else column
        if token.kind == "number":
            try:
                value = int(token.word)
            except ValueError:  # a fraction, or too many digits for int
                value = float(token.word)
            if isinstance(value, float) and math.isinf(value):
                self._refuse(token.position, "too large for a number of 64 bits")
            if isinstance(value, int) and not -INT64_END <= value < INT64_END:
                self._refuse(token.position, "too large for a whole number of 64 bits")
            return Literal(value, token.position)
        return Literal(self._unescaped(token) if token.kind == "text" else token.word == "true", token.position)

    def _unescaped(self, token: _Token) -> str:
        inner = token.word[1:-1]
        for match in ESCAPE.finditer(inner):
            if match[1] not in "\\'\"":
                position = token.position + 1 + match.start()
                self._refuse(position, "\\ may only precede a quote or a second \\; write \\\\ for one")
        return ESCAPE.sub(r"\1", inner)

    def normal(self) -> str:
        """Return the predicate with one spelling of blanks, quotes and keywords."""
        text = before = ""
        for token in self.tokens[:-1]:
            word = token.word.lower()  # a keyword, or an exponent
            if token.is_column:
                alone = len(token.path) == 1
                plain = [PLAIN.fullmatch(key) and not (alone and key.lower() in KEYWORDS) for key in token.path]
                name = ".".join(key if bare else f"`{key}`" for key, bare in zip(token.path, plain, strict=True))
                word = f"length({name})" if token.kind == "length" else name
            elif token.kind == "text":
                escaped = self._unescaped(token).replace("\\", "\\\\").replace("'", "\\'")
                word = f"'{escaped}'"
            apart = not text or before in {"(", "["} or word in {")", "]", ","}
            text, before = f"{text}{'' if apart else ' '}{word}", word if token.kind != "text" else ""
        return text

    @property
    def _token(self) -> _Token:
        return self.tokens[self._at]

    def _take(self, word: str) -> bool:
        """Whether the next token is `word`, which is then taken."""
        found = self._token.word == word
        self._at += found
        return found

    def _require(self, word: str, expected: str = "") -> None:
        if not self._take(word):
            self._unexpected(expected or word)

    def _unexpected(self, expected: str) -> NoReturn:
        remedy = REMEDIES.get(self._token.word)
        self._refuse(self._token.position, f"expected {expected}" + (f"; {remedy}" if remedy else ""))

    def _refuse(self, position: int, problem: str) -> NoReturn:
        _refuse(self.text, self.where, position, problem)


def _comparison(sign: str, left: Operand, right: Operand) -> Node:
    return lambda meaning: meaning.compared(sign, left, right)


def _joined(parts: Sequence[Node], join: Callable[[Any, Any], Any]) -> Node:
    """Combine parts in a balanced tree: Arrow recurses into it, and 20,000 levels would overflow the stack."""
    if len(parts) == 1:
        return parts[0]
    middle = len(parts) // 2
    left, right = _joined(parts[:middle], join), _joined(parts[middle:], join)
    return lambda meaning: join(left(meaning), right(meaning))
