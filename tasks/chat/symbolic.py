"""Chat templates run on unknown contents, which gives their output for every conversation with the same shape.

Contents become `Symbol`s: texts with holes, whose content is unknown except that it is not blank. A `Symbol` supports only
operations whose result is known for every content: joining, stripping blanks, JSON, and searches for a string, which is then
assumed to be absent and noted as a *tag*. Any other operation raises `UnprovableError`. So if a template finishes, it takes the
same path and writes the same literal text around the same holes for all contents without these tags.

`Symbol` isn't a `str`: an operation of Python or Jinja that isn't listed here fails, and is never executed on a placeholder.

One run takes as long as rendering the conversation twice.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, NoReturn, cast

from jinja2 import nodes
from jinja2.runtime import Context
from jinja2.utils import pass_environment
from jinja2.visitor import NodeTransformer

from .controls import Controls
from .conversation import Arguments, Message
from .filters import MAX_STEPS, text_of, tojson
from .sandbox import LOCAL_VARIABLES, RECORDS, Sandbox
from .template import ChatTemplate
from .traced import Origin, Traced, caller, joined, records

FIRST, LAST = "\ue000", "\ue001"
"""The ends of placeholders, from a private use area of Unicode. A template that contains them is not run on symbols."""

STAND_IN = re.compile(f"{FIRST}(\\d+){LAST}")
JSON_LEAF = re.compile(f'"{FIRST}(\\d+){LAST}"')

Operation = tuple[Literal["strip", "lstrip", "rstrip", "json"], str | None]


class UnprovableError(Exception):
    """The result of a template depends on a content in a way that is not followed."""


class Hole(NamedTuple):
    """Unknown text: value number `slot` of the conversation after some operations."""

    slot: int
    operations: tuple[Operation, ...] = ()
    origin: Origin | None = None

    @property
    def is_json(self) -> bool:
        """Whether this is a JSON string with its quotes."""
        return ("json", None) in self.operations

    def filled(self, value: str) -> str:
        for name, argument in self.operations:
            value = json_string(value) if name == "json" else getattr(value, name)(argument)
        return value


def json_string(value: str) -> str:
    """Return a string as JSON, as templates write it."""
    return json.dumps(value, ensure_ascii=False)


Part = str | Hole


class Symbol:
    """Text of literal parts and holes, at least one. `tags` collects the strings assumed to be absent from holes."""

    __slots__ = ("parts", "tags")
    __hash__ = None  # pyright: ignore[reportAssignmentType] - in a set or as a key, it would need an equality

    def __init__(self, parts: tuple[Part, ...], tags: set[str]) -> None:
        self.parts = parts
        self.tags = tags

    def __bool__(self) -> bool:
        return True  # holes are not blank

    def __eq__(self, other: object) -> bool:
        """Whether it is a known text: never, unless a hole contains that text, which becomes a tag."""
        if isinstance(other, Symbol):
            return self.parts == other.parts or _unprovable("two contents are compared")
        # Holes aren't blank, so the text isn't either.
        if not isinstance(other, str) or not other.strip():
            return False
        if len(self.parts) > 1:
            _unprovable("a text with a content in it is compared")
        return self._absent(other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __contains__(self, tag: object) -> bool:
        """Whether a literal part contains a string."""
        if not isinstance(tag, str) or not tag:
            _unprovable("something other than a string is looked for in a content")
        return any(isinstance(part, str) and tag in part for part in self.parts) or self._absent(tag)

    def __getitem__(self, _: object) -> NoReturn:
        _unprovable("a part of a content is read")

    def __repr__(self) -> str:
        """Python's own conversions would lose the holes."""
        _unprovable("a content is converted")

    __str__ = __repr__

    def __format__(self, _: str) -> str:
        _unprovable("a content is formatted")

    def _absent(self, tag: str) -> Literal[False]:
        """Note a string that must not occur in any hole or across the edge of one."""
        self.tags |= forbidden(self.parts, tag)
        return False

    def startswith(self, prefix: str, /) -> bool:
        return self._at_end(prefix, 0, str.startswith, lambda text, size: text[size:])

    def endswith(self, suffix: str, /) -> bool:
        return self._at_end(suffix, -1, str.endswith, lambda text, size: text[: len(text) - size])

    def _at_end(
        self, wanted: str, end: int, found: Callable[[str, str], bool], rest: Callable[[str, int], str]
    ) -> bool:
        if type(wanted) is not str or not wanted:
            _unprovable("an end of a content is compared with something other than a string")
        part = self.parts[end]
        if isinstance(part, Hole):
            return self._absent(wanted)
        # Longer than the literal part: the hole has to have the rest.
        if found(part, wanted) or not found(wanted, part):
            return found(part, wanted)
        return self._absent(rest(wanted, len(part)))

    def lstrip(self, chars: str | None = None, /) -> "Symbol":
        _require_blank(chars)
        parts = list(self.parts)
        while isinstance(parts[0], str):
            parts[0] = parts[0].lstrip(chars)
            if parts[0]:
                return Symbol(tuple(parts), self.tags)
            del parts[0]
        return Symbol((_stripped(parts[0], "lstrip", chars), *parts[1:]), self.tags)

    def rstrip(self, chars: str | None = None, /) -> "Symbol":
        _require_blank(chars)
        parts = list(self.parts)
        while isinstance(last := parts[-1], str):
            parts[-1] = last.rstrip(chars)
            if parts[-1]:
                return Symbol(tuple(parts), self.tags)
            del parts[-1]
        return Symbol((*parts[:-1], _stripped(last, "rstrip", chars)), self.tags)

    def strip(self, chars: str | None = None, /) -> "Symbol":
        return self.lstrip(chars).rstrip(chars)

    def split(self, separator: str | None = None, maxsplit: int = -1) -> "list[str | Symbol]":
        if not isinstance(separator, str) or not separator:
            _unprovable("a content is split at blanks")
        self._absent(separator)
        pieces: list[list[Part]] = [[]]
        for part in self.parts:
            texts = part.split(separator) if isinstance(part, str) else [part]
            pieces[-1].append(texts[0])
            pieces += [[text] for text in texts[1:]]
        if 0 <= maxsplit < len(pieces) - 1:
            behind = [part for piece in pieces[maxsplit + 1 :] for part in (separator, *piece)]
            pieces = [*pieces[:maxsplit], [*pieces[maxsplit], *behind]]
        return [symbol_of(piece, self.tags) for piece in pieces]

    def partition(self, separator: str, /) -> "tuple[str | Symbol, ...]":
        found = self.split(separator, 1)
        return (found[0], separator, found[1]) if len(found) > 1 else (found[0], "", "")

    def replace(self, old: str, new: "str | Symbol", count: int = -1, /) -> "str | Symbol":
        return together(self.split(old, count), new)


METHODS = frozenset({"startswith", "endswith", "lstrip", "rstrip", "strip", "split", "partition", "replace"})


def _unprovable(why: str) -> NoReturn:
    raise UnprovableError(why)


def _require_blank(chars: object) -> None:
    if chars is not None and not (isinstance(chars, str) and chars.isspace()):
        _unprovable("characters other than blanks are stripped from a content")


def _stripped(hole: Part, name: Literal["lstrip", "rstrip"], chars: str | None) -> Hole:
    hole = cast("Hole", hole)
    # JSON of a text begins and ends with quotes, which aren't blanks.
    return hole if hole.is_json else hole._replace(operations=(*hole.operations, (name, chars)))


def symbol_of(parts: Iterable[Part], tags: set[str]) -> str | Symbol:
    """Return the text of some parts; plain without holes."""
    merged: list[Part] = []
    for part in parts:
        # Literals side by side become one, so that a search doesn't miss a tag across their edge.
        if isinstance(part, str) and merged and isinstance(merged[-1], str):
            merged[-1] = joined([merged[-1], part])
        else:
            merged.append(part)
    if not any(isinstance(part, Hole) for part in merged):
        return cast("str", merged[0]) if merged else ""
    return Symbol(tuple(part for part in merged if isinstance(part, Hole) or part or isinstance(part, Traced)), tags)


def together(texts: Iterable[Any], between: "str | Symbol" = "") -> str | Symbol:
    """Return the joined texts."""
    parts: list[Part] = []
    symbols: list[Symbol] = []
    for number, text in enumerate(texts):
        for each in (between, text) if number else (text,):
            if isinstance(each, Symbol):
                symbols.append(each)
            elif not isinstance(each, str):
                raise TypeError(f"{type(each).__name__} is not text")
            parts += each.parts if isinstance(each, Symbol) else (each,)
    return symbol_of(parts, symbols[0].tags) if symbols else joined(cast("list[str]", parts))


ESCAPES = frozenset('\\"/bfnrtu0123456789abcdef')  # the characters of escapes in JSON


def forbidden(parts: Sequence[Part], tag: str) -> set[str]:
    """Return the strings that must not occur in any content so that `tag` occurs neither in a hole nor across the edge of one.

    Raises UnprovableError if no such strings are known.
    """
    # Empty literals are marks; nothing can be across them.
    texts = [part for part in parts if isinstance(part, Hole) or part]
    found = {tag}
    for number, part in enumerate(texts):
        if not isinstance(part, Hole):
            continue
        before, after = texts[number - 1 : number] or [""], texts[number + 1 : number + 2] or [""]
        if part.is_json:
            # Escapes of JSON change characters: such a tag may appear from others.
            if tag[0] in ESCAPES or "\\" in tag or '"' in tag:
                _unprovable(f"{tag!r} may be in the JSON of a content")
            continue
        begun = _behind(before[0], tag, first=number == 1)
        # The text behind a hole is the same question, read backward.
        backward = after[0] if isinstance(after[0], Hole) else after[0][::-1]
        ended = {each[::-1] for each in _behind(backward, tag[::-1], first=number == len(texts) - 2)}
        if begun and ended:
            _unprovable(f"{tag!r} may be around a content")
        found |= begun | ended
    return found


def _behind(before: Part, tag: str, *, first: bool) -> set[str]:
    """The ends of `tag` with which a hole must not begin, because of the text before it; `first`: nothing is before that."""
    if isinstance(before, Hole):
        return _unprovable(f"{tag!r} may be in two contents") if len(tag) > 1 else set()
    if not first and any(tag[:size].endswith(before) for size in range(len(before) + 1, len(tag))) and before:
        _unprovable(f"{tag!r} may be in two contents")
    return {tag[size:] for size in range(1, len(tag)) if before.endswith(tag[:size])}


def _known_if(bound: int, known: bool) -> Any:  # noqa: ANN401 - a comparison of any name
    """A comparison of a length above 0 with `bound`, whose result is `known`; with any other number it isn't."""

    def compared(_: object, other: object) -> bool:
        return known if type(other) is int and other == bound else _unprovable("the length of a content")

    return compared


class Size:
    """The length of a text with a hole: more than 0."""

    __hash__ = None  # pyright: ignore[reportAssignmentType] - see Symbol
    __eq__, __ne__ = _known_if(0, False), _known_if(0, True)
    __gt__, __le__ = _known_if(0, True), _known_if(0, False)
    __ge__, __lt__ = _known_if(1, True), _known_if(1, False)


# The environment of a symbolic run.

IS: Mapping[str, bool] = {
    "string": True, "sequence": True, "iterable": True, "defined": True, "undefined": False, "none": False,
    "mapping": False, "number": False, "integer": False, "float": False, "boolean": False, "true": False,
    "false": False, "callable": False,
}  # fmt: skip
"""The results of type tests for any text."""

COMPARING = frozenset({"eq", "equalto", "==", "ne", "!=", "in"})


def _test(name: str, test: Callable[..., bool]) -> Callable[..., bool]:
    def tested(value: Any, *args: Any) -> bool:  # noqa: ANN401 - a template's values
        if isinstance(value, Symbol) and name in IS:
            return IS[name]
        if name not in COMPARING and any(isinstance(each, Symbol) for each in (value, *args)):
            _unprovable(f"the test {name}")
        return test(value, *args)

    # Jinja keeps flags on functions, such as whether they take the context.
    tested.__dict__.update(getattr(test, "__dict__", {}))
    return tested


def _filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter of which only some uses with symbols are known."""
    known = ON_TEXT.get(name)

    def filtered(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - same
        if not any(isinstance(each, Symbol) for each in (*args, *kwargs.values())):
            return function(*args, **kwargs)
        if known is not None and isinstance(args[0], Symbol):
            return known(*args, **kwargs)
        return function(*args, **kwargs) if name in {"default", "d"} else _unprovable(f"the filter {name}")

    filtered.__dict__.update(getattr(function, "__dict__", {}))
    return filtered


def _same(text: Symbol, *_: object, **__: object) -> Symbol:
    return text


ON_TEXT: Mapping[str, Callable[..., Any]] = {
    "trim": Symbol.strip, "replace": Symbol.replace, "length": lambda _: Size(), "count": lambda _: Size(),
    "string": _same, "default": _same, "d": _same,
}  # fmt: skip
"""Filters of a symbol."""


def _text(value: Any) -> str | Symbol:  # noqa: ANN401 - same
    """See `text_of`."""
    if isinstance(value, Symbol):
        return value
    return value.text if type(value) is Arguments else text_of(value)


def _added(value: Any) -> str | Symbol:  # noqa: ANN401 - same
    """A text to add."""
    return value.text if isinstance(value, Arguments) else value


@pass_environment
def _join(environment: Any, values: Any, d: str = "", attribute: str | None = None) -> str | Symbol:  # noqa: ANN401 - same
    """See `filters.join`."""
    if isinstance(values, Symbol):
        _unprovable("characters of a content are joined")
    parts = list(values)
    for name in (attribute or "").split(".") if attribute else ():
        parts = [environment.getitem(part, name) for part in parts]
    return together([_text(part) for part in parts], d)


def _plain(value: Any, symbols: list[Symbol]) -> Any:  # noqa: ANN401 - any JSON
    """Return JSON with placeholders for its symbols, which are appended to `symbols`."""
    if isinstance(value, Symbol):
        symbols.append(value)
        return f"{FIRST}{len(symbols) - 1}{LAST}"
    if isinstance(value, dict):
        return {key: _plain(inner, symbols) for key, inner in cast("dict[Any, Any]", value).items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner, symbols) for inner in cast("list[Any]", value)]
    return value


class SymbolicSandbox(Sandbox):
    """The sandbox of templates for values that may be symbols."""

    def __init__(self) -> None:
        super().__init__()

        def symbolic_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str | Symbol:  # noqa: ANN401 - same
            symbols: list[Symbol] = []
            plain = _plain(value, symbols)
            if not symbols:
                return tojson(value, ensure_ascii, **options)
            if ensure_ascii:
                _unprovable("JSON in ASCII")
            return _json(tojson(plain, **options), symbols, caller(value))

        own = {"tojson": symbolic_json, "join": _join, "__written__": lambda values: together(map(_text, values))}
        kept = {name for name in self.filters if name.startswith("__")} | own.keys()
        wrapped = {name: each if name in kept else _filter(name, each) for name, each in self.filters.items()}
        self.filters = {**wrapped, **own}
        self.tests = {name: _test(name, test) for name, test in self.tests.items()}
        self.finalize = _text
        self.concat = together  # pyright: ignore[reportIncompatibleMethodOverride, reportAttributeAccessIssue]

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:  # noqa: ANN401 - a template's values
        left, right = (_added(each) if operator == "+" else each for each in (left, right))
        if not isinstance(left, Symbol) and not isinstance(right, Symbol):
            return super().call_binop(context, operator, left, right)
        return together([left, right]) if operator == "+" else _unprovable(f"{operator} with a content")

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - same
        """Call a method of a symbol, or join symbols."""
        owner = getattr(function, "__self__", None)
        if isinstance(owner, Symbol):
            self.budget.step()
            return function(*args, **{name: each for name, each in kwargs.items() if name not in LOCAL_VARIABLES})
        if isinstance(owner, str) and function.__name__ == "join" and not isinstance(args[0], str):
            return together([_added(part) for part in args[0]], owner)
        return super().call(context, function, *args, **kwargs)

    def getattr(self, obj: Any, attribute: str) -> Any:  # noqa: ANN401 - same
        if not isinstance(obj, Symbol):
            return super().getattr(obj, attribute)
        if attribute not in METHODS:
            _unprovable(f"the attribute {attribute} of a content")
        return getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:  # noqa: ANN401 - same
        """Jinja would take an error for an absent item."""
        if isinstance(obj, Symbol) or isinstance(argument, Symbol):
            _unprovable("an item of a content, or one that a content names")
        return super().getitem(obj, argument)


def _json(text: str, symbols: Sequence[Symbol], origin: Origin | None) -> str | Symbol:
    """Return JSON text with a hole for every placeholder."""
    parts: list[Part] = []
    for number, found in enumerate(JSON_LEAF.split(text)):
        if number % 2 == 0:
            parts.append(found if origin is None else Traced(found, ((0, len(found), origin),)))
            continue
        # Only a whole content has JSON that can be made later; a text around it would be escaped with it.
        (hole,) = symbols[int(found)].parts if len(symbols[int(found)].parts) == 1 else (None,)
        if not isinstance(hole, Hole) or hole.is_json:
            _unprovable("JSON of a text with a content in it")
        parts.append(Hole(hole.slot, (*hole.operations, ("json", None)), origin or hole.origin))
    return symbol_of(parts, symbols[0].tags)


class _Reordered(NodeTransformer):
    """`'<' in text and ('<a>' in text or '<b>' in text)` asks the exact questions first, so that `<` isn't a tag.

    Only searches of one variable for constants change places; they don't have side effects and never raise.
    """

    def visit_And(self, node: nodes.And) -> nodes.Node:  # noqa: N802 - Jinja's name
        self.generic_visit(node)
        searched = {_searched(node.left), _searched(node.right)}
        if len(searched) == 1 and None not in searched and isinstance(node.left, nodes.Compare):
            return nodes.And(node.right, node.left, lineno=node.lineno)
        return node


def _searched(node: nodes.Node) -> str | None:
    """The variable that an expression of searches for constants looks into, if it is one."""
    if isinstance(node, (nodes.And, nodes.Or)):
        left, right = _searched(node.left), _searched(node.right)
        return left if left == right else None
    if not isinstance(node, nodes.Compare) or len(node.ops) != 1 or node.ops[0].op not in {"in", "notin"}:
        return None
    text = node.ops[0].expr
    return text.name if isinstance(node.expr, nodes.Const) and isinstance(text, nodes.Name) else None


class SymbolicTemplate(ChatTemplate):
    """A template for conversations whose texts are placeholders.

    `holes` are the holes of all renderings: a rendering has the placeholder of a number for the hole of that number. `tags` are the
    strings that are assumed to be absent.
    """

    sandbox = SymbolicSandbox

    def __init__(self, source: str, variables: Mapping[str, Any], controls: Controls) -> None:
        super().__init__(source, variables)
        self._controls = controls
        self.holes: list[Hole] = []
        self.tags: set[str] = set()

    def begin(self) -> None:
        self.holes, self.tags = [], set()

    def _parsed(self, source: str) -> nodes.Template:
        return cast("nodes.Template", _Reordered().visit(super()._parsed(source)))

    def _records(self, messages: Sequence[Message]) -> Any:  # noqa: ANN401 - messages for a template
        return [self._symbolic(record) for record in records(messages)]

    def _symbolic(self, value: Any) -> Any:  # noqa: ANN401 - any part of a message
        """Return a value with symbols for placeholders."""
        if isinstance(value, str):
            found = STAND_IN.fullmatch(value)
            origin = value.spans[0][2] if found and isinstance(value, Traced) else None
            return Symbol((Hole(int(found[1]), (), origin),), self.tags) if found else value
        if isinstance(value, Arguments):
            made = Arguments({key: self._symbolic(inner) for key, inner in value.items()}, "", value.message)
            made.text = self._symbolic(value.text)
            return made
        if isinstance(value, dict):
            made = {key: self._symbolic(inner) for key, inner in cast("dict[str, Any]", value).items()}
            if not isinstance(value, RECORDS):
                return made
            value.update(made)
            return value
        return [self._symbolic(inner) for inner in cast("list[Any]", value)] if isinstance(value, list) else value

    def _written(self, given: Mapping[str, Any]) -> str:
        """Return the text with placeholders for holes, and its spans."""
        pieces = list(self._template.root_render_func(self._template.new_context(dict(given))))
        written = together(pieces)
        # A real content may take more steps than its symbol, and mustn't exceed the limit then.
        if self._sandbox.budget.steps < MAX_STEPS // 2:
            _unprovable("it takes many steps")
        if not isinstance(written, Symbol):
            return written
        for token in self._controls.ids:
            self.tags |= forbidden(written.parts, token)
        texts: list[str] = []
        for part in written.parts:
            if isinstance(part, str):
                texts.append(part)
                continue
            if part not in self.holes:
                self.holes.append(part)
            text = f"{FIRST}{self.holes.index(part)}{LAST}"
            texts.append(Traced(text, ((0, len(text), part.origin),) if part.origin else ()))
        return joined(texts)
