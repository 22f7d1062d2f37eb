r"""The grammar of predicates: text to a tree, by a tokenizer of one pattern and a recursive descent of one token.

    predicate  = conjunction { "or" conjunction }
    conjunction = negation { "and" negation }
    negation   = { "not" } ( "(" predicate ")" | test )
    test       = operand { ("==" | "!=" | "<" | "<=" | ">" | ">=") operand }
               | column "is" [ "not" ] "null"
               | operand [ "not" ] "in" "[" literal { "," literal } "]"
               | operand [ "not" ] "between" operand "and" operand
    operand    = column | literal
    column     = a word, or anything between backticks
    literal    = number | "true" | "false" | text between ' or ", where \ stands before a quote or another \

So `0 < a <= 1` asks both, `a in [1, 2]` is `a == 1 or a == 2`, and `between` includes both ends. Keywords may be
written in any case. There are no functions and no arithmetic, so a predicate can ask only for what a column holds, and
costs no more than its comparisons. Whatever else is written is refused with the character at which it stands.

Parsing takes 6 microseconds per token, once per predicate.
"""

import math
import re
from dataclasses import dataclass
from typing import NoReturn

from tokenmill.tasks.errors import InputError

TOKEN = re.compile(
    r"""
    (?P<blank>\s+)
  | (?P<number>-?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)
  | (?P<text>'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")
  | (?P<word>[^\W\d]\w*)
  | (?P<quoted>`[^`]+`)
  | (?P<sign>[=!<>]=|<>|&&|\|\||[=!<>()\[\],])
    """,
    re.VERBOSE | re.DOTALL,
)

COMPARISONS = frozenset({"==", "!=", "<", "<=", ">", ">="})
KEYWORDS = frozenset({"and", "or", "not", "in", "is", "null", "between", "true", "false"})

REMEDIES = {
    "=": "write == to compare",
    "<>": "write != to compare",
    "!": "write not",
    "&&": "write and",
    "||": "write or",
    "(": "there are no functions",
    "null": "nothing equals null; write `is null` or `is not null`",
}
"""What helps where one of these stands in the wrong place."""

MOST_CHARACTERS, DEEPEST = 10_000, 50
"""How long a predicate may be and how deep its parentheses: the tree is walked by functions that call themselves."""

LARGEST = 2**63
"""Whole numbers are of 64 bits with a sign, as in columns."""

EXCERPT = 24


@dataclass(frozen=True, slots=True)
class Column:
    """A column's name, and the place in the text where it stands, from 0."""

    name: str
    position: int


@dataclass(frozen=True, slots=True)
class Literal:
    """A value that is written out."""

    value: bool | int | float | str
    position: int


Operand = Column | Literal


@dataclass(frozen=True, slots=True)
class Truth:
    """The operand is true."""

    operand: Operand


@dataclass(frozen=True, slots=True)
class Comparison:
    """`left` stands to `right` as `sign` says."""

    sign: str
    left: Operand
    right: Operand


@dataclass(frozen=True, slots=True)
class IsNull:
    """The column has no value."""

    column: Column


@dataclass(frozen=True, slots=True)
class Not:
    """The opposite of `inner`."""

    inner: "Node"


@dataclass(frozen=True, slots=True)
class Every:
    """All of `parts`, of which there is at least one."""

    parts: "tuple[Node, ...]"


@dataclass(frozen=True, slots=True)
class Some:
    """At least one of `parts`, of which there is at least one."""

    parts: "tuple[Node, ...]"


Node = Truth | Comparison | IsNull | Not | Every | Some


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str
    text: str
    position: int

    @property
    def keyword(self) -> str | None:
        """The keyword that the token is, if any."""
        word = self.text.lower()
        return word if self.kind == "word" and word in KEYWORDS else None


def refuse(text: str, where: str, position: int, problem: str) -> NoReturn:
    """Raises InputError about what stands at `position` of the predicate `text`, which was written at `where`."""
    rest = text[position:]
    shown = f"{rest[:EXCERPT]}…" if len(rest) > EXCERPT else rest
    place = f"character {position + 1}, before {shown!r}" if rest.strip() else "at its end"
    raise InputError(f"{where}: {place}: {problem}")


def parse(text: str, where: str) -> tuple[Node, list[Column]]:
    """The tree of a predicate, and its columns as they stand in the text. Raises InputError."""
    if len(text) > MOST_CHARACTERS:
        raise InputError(f"{where}: a predicate of {len(text)} characters; {MOST_CHARACTERS} are the most")
    parser = _Parser(text, where)
    node = parser.predicate()
    parser.end()
    return node, parser.columns


class _Parser:
    """Reads a predicate from left to right; every method takes what it is named after."""

    def __init__(self, text: str, where: str) -> None:
        self.text, self.where = text, where
        self.columns: list[Column] = []
        self._tokens = self._split()
        self._place = 0
        self._depth = 0

    def predicate(self) -> Node:
        parts = [self._conjunction()]
        while self._taken("or"):
            parts.append(self._conjunction())
        return parts[0] if len(parts) == 1 else Some(tuple(parts))

    def end(self) -> None:
        if self._next.kind != "end":
            self._unexpected("and, or, or the end")

    def _conjunction(self) -> Node:
        parts = [self._negation()]
        while self._taken("and"):
            parts.append(self._negation())
        return parts[0] if len(parts) == 1 else Every(tuple(parts))

    def _negation(self) -> Node:
        negated = False
        while self._taken("not"):
            negated = not negated
        node = self._group() if self._taken("(") else self._test()
        return Not(node) if negated else node

    def _group(self) -> Node:
        self._depth += 1
        if self._depth > DEEPEST:
            self._refuse(f"parentheses within parentheses, {self._depth} deep; {DEEPEST} are the most")
        node = self.predicate()
        self._require(")")
        self._depth -= 1
        return node

    def _test(self) -> Node:
        operand = self._operand()
        if self._taken("is"):
            return self._null_test(operand)
        if self._taken("not"):
            if self._next.keyword not in {"in", "between"}:
                self._unexpected("in or between")
            return Not(self._range_or_list(operand))
        if self._next.keyword in {"in", "between"}:
            return self._range_or_list(operand)
        return self._comparisons(operand)

    def _comparisons(self, operand: Operand) -> Node:
        """One comparison, a chain of them, or the operand alone."""
        parts: list[Node] = []
        while self._next.kind == "sign" and self._next.text in COMPARISONS:
            sign = self._advance().text
            following = self._operand()
            parts.append(Comparison(sign, operand, following))
            operand = following
        if not parts:
            return Truth(operand)
        return parts[0] if len(parts) == 1 else Every(tuple(parts))

    def _null_test(self, operand: Operand) -> Node:
        negated = self._taken("not")
        self._require("null")
        if isinstance(operand, Literal):
            refuse(self.text, self.where, operand.position, "a literal is never null; name a column")
        return Not(IsNull(operand)) if negated else IsNull(operand)

    def _range_or_list(self, operand: Operand) -> Node:
        if self._taken("between"):
            low = self._operand()
            self._require("and")
            return Every((Comparison(">=", operand, low), Comparison("<=", operand, self._operand())))
        self._require("in")
        self._require("[")
        values = [self._literal()]
        while self._taken(","):
            values.append(self._literal())
        self._require("]")
        return Some(tuple(Comparison("==", operand, value) for value in values))

    def _operand(self) -> Operand:
        token = self._next
        if (token.kind == "word" and not token.keyword) or token.kind == "quoted":
            self._advance()
            self.columns.append(Column(token.text.strip("`"), token.position))
            return self.columns[-1]
        return self._literal("a column, a number, text in quotes, true or false")

    def _literal(self, wanted: str = "a number, text in quotes, true or false") -> Literal:
        token = self._next
        if token.kind == "number":
            value = self._number(token)
        elif token.kind == "text":
            value = self._unescaped(token)
        elif token.keyword in {"true", "false"}:
            value = token.keyword == "true"
        else:
            self._unexpected(wanted)
        self._advance()
        return Literal(value, token.position)

    def _number(self, token: _Token) -> int | float:
        try:
            value = int(token.text)
        except ValueError:
            value = float(token.text)
            if math.isinf(value):
                self._refuse("too large for a number of 64 bits")
        if isinstance(value, int) and not -LARGEST <= value < LARGEST:
            self._refuse("too large for a whole number of 64 bits")
        return value

    def _unescaped(self, token: _Token) -> str:
        inner = token.text[1:-1]
        for match in re.finditer(r"\\(.)", inner, re.DOTALL):
            if match[1] not in "\\'\"":
                place = token.position + 1 + match.start()
                refuse(
                    self.text, self.where, place, "\\ stands only before a quote or another \\; write \\\\ for itself"
                )
        return re.sub(r"\\(.)", r"\1", inner)

    @property
    def _next(self) -> _Token:
        return self._tokens[self._place]

    def _advance(self) -> _Token:
        self._place += 1
        return self._tokens[self._place - 1]

    def _taken(self, wanted: str) -> bool:
        """Whether the next token is this keyword or sign, which is then taken."""
        found = self._next.keyword == wanted or (self._next.kind == "sign" and self._next.text == wanted)
        self._place += found
        return found

    def _require(self, wanted: str) -> None:
        if not self._taken(wanted):
            self._unexpected(wanted)

    def _refuse(self, problem: str) -> NoReturn:
        refuse(self.text, self.where, self._next.position, problem)

    def _unexpected(self, wanted: str) -> NoReturn:
        remedy = REMEDIES.get(self._next.text.lower())
        self._refuse(f"expected {wanted}; {remedy}" if remedy else f"expected {wanted}")

    def _split(self) -> list[_Token]:
        tokens: list[_Token] = []
        place = 0
        while place < len(self.text):
            match = TOKEN.match(self.text, place)
            if match is None:
                refuse(self.text, self.where, place, _why_no_token(self.text[place]))
            if match.lastgroup != "blank":
                tokens.append(_Token(str(match.lastgroup), match.group(), place))
            place = match.end()
        return [*tokens, _Token("end", "", len(self.text))]


def _why_no_token(character: str) -> str:
    if character in "'\"`":
        return f"the closing {character} is missing"
    remedy = "put a column's name between backticks if it has other characters than letters, digits and _"
    return f"{character!r} has no meaning here; {remedy}"
