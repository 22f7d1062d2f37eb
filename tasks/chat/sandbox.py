"""The sandbox of chat templates, which are untrusted programs, and the marks by which a rendering records its messages.

Jinja's immutable sandbox isolates a template from Python but doesn't limit its work. So each rendering has a budget of steps
(every loop iteration, call, and element that a filter visits), seconds, and characters per text (`filters`); exceeding it is an
error that names the limit. Only the filters, methods and functions listed here and in `filters` are available.

Output doesn't depend on time, chance or machine: there is no `random`, and `strftime_now` uses the template variable `date`.
Otherwise the environment matches Hugging Face transformers (trimmed blocks, `break` and `continue`, `tojson` without
escapes, `raise_exception`, the `generation` tag).

Marks are inserted into the template's syntax tree. Every loop that writes text marks each iteration, with its message or tool
call, and its end; other loops only count steps. `~` becomes a filter that keeps origins. The `generation` tag, by which some
templates mark generated text, becomes two marks. Slices become a filter, because copying costs steps.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sized
from datetime import datetime
from functools import lru_cache, partial
from operator import eq, ge, gt, le, lt, ne
from typing import Any, NoReturn, cast

from jinja2 import TemplateError, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment, safe_range
from jinja2.utils import Namespace, pass_context
from jinja2.visitor import NodeTransformer
from markupsafe import Markup
from tokenmill.tasks.errors import InputError

from .conversation import Arguments
from .filters import (
    CHARACTERS_PER_STEP,
    ELEMENTS_PER_STEP,
    JOINED_PER_STEP,
    MAX_BITS,
    NESTING,
    PARTS_PER_STEP,
    Budget,
    TemplateLimitError,
    escape,
    filters,
    replaced_size,
    require_length,
    require_size,
    text_of,
    together,
    weight,
)
from .traced import MessageRecord, ToolCallRecord, mark


class Generation(Extension):
    """`{% generation %}…{% endgeneration %}`: marks generated text."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

    def parse(self, parser: Parser) -> nodes.Node:
        """Return the body between two marks, in its own scope."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        begin, end = (nodes.Const(kind) for kind in ("generated", "end_generated"))
        marked = [_output(begin, "__marked__", line=line), *body, _output(end, "__marked__", line=line)]
        return nodes.Scope(marked, lineno=line)


class OutputCode(CodeGenerator):
    """Jinja's code generator for an environment whose `finalize` returns text, so `str` is not called on it again, and that
    compares and hashes within limits.
    """

    def visit_Compare(self, node: nodes.Compare, frame: Frame) -> None:  # noqa: N802 - Jinja's name
        """A comparison, by `Sandbox.compared` where it may take long."""
        # `a < b < c` is two comparisons.
        pairs = list(zip([node.expr, *(each.expr for each in node.ops)], node.ops, strict=False))
        if all(_is_cheap(left, operand) for left, operand in pairs):
            super().visit_Compare(node, frame)
            return
        for number, (left, operand) in enumerate(pairs):
            self.write(" and " if number else "(")
            self.write(f"environment.compared({operand.op!r}, ")
            self.visit(left, frame)
            self.write(", ")
            self.visit(operand.expr, frame)
            self.write(")")
        self.write(")")

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:  # noqa: N802 - same
        """A dict, whose keys are checked before they are hashed."""
        self.write("{")
        for item in node.items:
            self.write("environment.key(")
            self.visit(item.key, frame)
            self.write("): ")
            self.visit(item.value, frame)
            self.write(", ")
        self.write("}")

    def _output_child_pre(self, node: nodes.Expr, frame: Frame, finalize: CodeGenerator._FinalizeInfo) -> None:
        super()._output_child_pre(node, frame, finalize) if _escapes(frame) else self.write("environment.finalize(")

    def _output_child_post(self, node: nodes.Expr, frame: Frame, finalize: CodeGenerator._FinalizeInfo) -> None:
        super()._output_child_post(node, frame, finalize) if _escapes(frame) else self.write(")")


def _is_cheap(left: nodes.Expr, operand: nodes.Operand) -> bool:
    """Whether a comparison takes negligible time: with a literal, or in a short list."""
    if operand.op in {"in", "notin"}:
        return isinstance(operand.expr, nodes.List | nodes.Tuple) and all(map(_is_literal, operand.expr.items))
    return _is_literal(left) or _is_literal(operand.expr)


def _is_literal(node: nodes.Expr) -> bool:
    return isinstance(node, nodes.Const)


def _escapes(frame: Frame) -> bool:
    """Whether the template escapes HTML here."""
    return bool(frame.eval_ctx.autoescape or frame.eval_ctx.volatile)


class _Instrumenter(NodeTransformer):
    def __init__(self) -> None:
        self._loops = 0

    def visit_For(self, node: nodes.For) -> list[nodes.Node]:  # noqa: N802 - Jinja's name
        writes = any(True for _ in node.find_all((nodes.Output, nodes.Call)))
        self.generic_visit(node)
        if not writes:
            node.body.insert(0, _output(nodes.Const(""), "__stepped__", line=node.lineno))
            return [node]
        # Loops are numbered so that the end of a loop within a message isn't taken for the end of the message.
        self._loops += 1
        loop, line = nodes.Const(self._loops), node.lineno
        target = _subject(node) or nodes.Const(None)
        node.body.insert(0, _output(target, "__opened__", loop, line=line))
        return [node, _output(loop, "__ended__", line=line)]

    def visit_Concat(self, node: nodes.Concat) -> nodes.Expr:  # noqa: N802 - same
        self.generic_visit(node)
        return nodes.Filter(nodes.List(node.nodes), "__written__", [], [], None, None)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Expr:  # noqa: N802 - same
        self.generic_visit(node)
        if not isinstance(node.arg, nodes.Slice):
            return node
        places = [each or nodes.Const(None) for each in (node.arg.start, node.arg.stop, node.arg.step)]
        return nodes.Filter(node.node, "__sliced__", places, [], None, None)


def _subject(node: nodes.For) -> nodes.Expr | None:
    """The subject of an iteration: its variable, or, in a loop over `range`, the item looked up at that index."""
    if not isinstance(node.target, nodes.Name):
        return None
    name, counts = node.target.name, isinstance(node.iter, nodes.Call) and isinstance(node.iter.node, nodes.Name)
    # `for i in range(…)` with `messages[i]`: the item is the subject.
    for each in node.find_all(nodes.Getitem) if counts else ():
        if isinstance(each.node, nodes.Name) and isinstance(each.arg, nodes.Name) and each.arg.name == name:
            return nodes.Getitem(nodes.Name(each.node.name, "load"), nodes.Name(name, "load"), "load")
    return nodes.Name(name, "load")


def instrumented(tree: nodes.Template) -> nodes.Template:
    """Return the template with its marks."""
    marked: nodes.Template = _Instrumenter().visit(tree)
    return cast("nodes.Template", marked.set_environment(tree.environment))  # pyright: ignore[reportArgumentType]


def _output(value: nodes.Expr, name: str, *arguments: nodes.Expr, line: int) -> nodes.Output:
    return nodes.Output([nodes.Filter(value, name, list(arguments), [], None, None)], lineno=line)


def marking(step: Callable[[int], None]) -> Mapping[str, Callable[..., str]]:
    """Return the filters inserted into templates; `step` spends the budget. They take the context so that Jinja does not
    evaluate them at compile time.
    """

    @pass_context
    def opened(_: Context, value: object, loop: int) -> str:
        step(1)
        if type(value) is MessageRecord:
            return mark((loop, "loop"), (value.number, "message"))
        if type(value) is ToolCallRecord:
            return mark((value.message, "call"))
        return ""

    @pass_context
    def stepped(_: Context, text: str) -> str:
        step(1)
        return text

    @pass_context
    def sliced(_: Context, value: Any, *places: int | None) -> Any:  # noqa: ANN401 - any value with slices
        found = value[slice(*places)]
        size = len(found) if isinstance(found, Sized) else 0
        step(size // (CHARACTERS_PER_STEP if isinstance(found, str) else ELEMENTS_PER_STEP))
        return found

    def written(values: list[Any]) -> str:
        text = together([text_of(value) for value in values])
        step(len(text) // JOINED_PER_STEP)
        return text

    return {
        "__opened__": opened,
        "__stepped__": stepped,
        "__ended__": pass_context(lambda _, loop: mark((loop, "end"))),
        "__marked__": pass_context(lambda _, kind: mark((0, kind))),
        "__written__": written,
        "__sliced__": sliced,
    }


TEXT_METHODS = frozenset({
    "capitalize", "casefold", "count", "endswith", "find", "index", "isalnum", "isalpha", "isascii", "isdecimal",
    "isdigit", "islower", "isnumeric", "isspace", "istitle", "isupper", "join", "lower", "lstrip", "partition",
    "removeprefix", "removesuffix", "replace", "rfind", "rindex", "rpartition", "rsplit", "rstrip", "split",
    "splitlines", "startswith", "strip", "swapcase", "title", "upper",
})  # fmt: skip
FIELDS = frozenset({"role", "content", "reasoning_content", "tool_calls", "function", "name", "arguments"})
"""The keys that most templates read from messages and calls; no method of dict has such a name."""
LOOP_FIELDS = frozenset({"index", "index0", "first", "last", "previtem", "nextitem", "length"})
"""Loop attributes that are plain values."""

GROWING = frozenset({"join", "replace"})  # methods of text whose result may be longer than the text

BACKWARD = frozenset({"rfind", "rindex", "rpartition", "rsplit"})
"""Methods that compare at every position, unlike a forward search."""

COMPARISONS_PER_STEP, COMPARED_PER_STEP = 1 << 17, 256

MAX_RANGE_BITS = 60

DIRECTIVE = re.compile(r"%-?[aAbBcdDeFgGhHIjklmMnpPrRStTuUVwWxXyYzZ%]")
"""Directives of `strftime` without a width, which could be of any size, and without `%s`, which depends on the machine's time
zone."""
LONGEST_DIRECTIVE = 32

LOCAL_VARIABLES = frozenset({"_loop_vars", "_block_vars"})
"""Arguments that Jinja adds to a call, for functions that take a context."""

CONTAINERS = (Mapping, *NESTING)
COMPARED: Mapping[str, Callable[[Any, Any], Any]] = {
    "eq": eq, "ne": ne, "gt": gt, "gteq": ge, "lt": lt, "lteq": le, "in": lambda left, right: left in right,
    "notin": lambda left, right: left not in right,
}  # fmt: skip
"""Comparisons by Jinja's operator names."""
TESTS_THAT_COMPARE = {
    "eq": "eq", "equalto": "eq", "==": "eq", "ne": "ne", "!=": "ne", "gt": "gt", "greaterthan": "gt", ">": "gt", "ge": "gteq",
    ">=": "gteq", "lt": "lt", "lessthan": "lt", "<": "lt", "le": "lteq", "<=": "lteq", "in": "in",
}  # fmt: skip

RECORDS = (MessageRecord, ToolCallRecord)
ATTRIBUTES: tuple[tuple[type, frozenset[str]], ...] = (
    (str, TEXT_METHODS),
    (dict, frozenset({"get", "items", "keys", "values"})),
    (list, frozenset({"count", "index"})),
    (tuple, frozenset({"count", "index"})),
    (LoopContext, LOOP_FIELDS | {"changed", "cycle", "depth", "depth0", "revindex", "revindex0"}),
    (Macro, frozenset({"name", "caller"})),
)
"""The attributes that templates may read, by the type of the value."""


class SafeNamespace(Namespace):
    """Jinja's namespace without names that begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - `self` may be one of the names
        found = dict(*args[1:], **kwargs)
        for name in found:
            _require_public(name)
        Namespace.__init__(args[0], found)

    def __setitem__(self, name: str, value: object) -> None:
        _require_public(name)
        super().__setitem__(name, value)


def _require_public(name: object) -> None:
    if not isinstance(name, str) or name.startswith("_"):
        raise SecurityError(f"{name!r}: names in a namespace do not begin with an underscore")


class Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's immutable sandbox with a budget, and with text that keeps its origin."""

    intercepted_binops = frozenset({"+", "*", "**", "%", "//"})
    concat = staticmethod(lambda parts: together(list(parts)))
    code_generator_class = OutputCode

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols], finalize=text_of)
        self.budget = Budget()
        self.filters = {**filters(self._step), **marking(self._step)}
        self.tests = {**self.tests, **{name: partial(self.compared, each) for name, each in TESTS_THAT_COMPARE.items()}}
        self.globals: dict[str, Any] = {
            "range": _range,
            "dict": _new_dict,
            "namespace": SafeNamespace,
            "raise_exception": _refuse,
        }

    def _step(self, count: int = 1) -> None:
        self.budget.step(count)  # looked up per step, because every rendering has another budget

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:  # noqa: ANN401 - a template's values
        """Add, multiply, raise or format within the limits; arguments of tool calls are their JSON beside text."""
        if operator == "+" and (isinstance(left, str) or isinstance(right, str)):
            if isinstance(left, Markup) or isinstance(right, Markup):
                return Markup(together([_escaped(left), _escaped(right)]))  # noqa: S704 - as Jinja does
            text = together([_text(left), _text(right)])
            self.budget.step(len(text) // JOINED_PER_STEP)
            return text
        if operator == "%" and isinstance(left, str):
            raise SecurityError("text is not formatted with %; write texts side by side")
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * abs(right) if operator == "**" else left.bit_length() + right.bit_length()
            if operator in {"*", "**", "//", "%"} and bits > MAX_BITS:
                raise TemplateLimitError(f"the template computes with a number of more than {MAX_BITS:,} bits")
        elif operator in {"+", "*"}:
            # of the list or text that is made; 0 for numbers
            sizes = [len(each) for each in (left, right) if isinstance(each, Sized)]
            counts = [each for each in (left, right) if isinstance(each, int)]
            size = sum(sizes) if operator == "+" else max(sizes, default=0) * max(counts, default=0)
            text = isinstance(left, str) or isinstance(right, str)
            (require_size if text else require_length)(size)
            self.budget.step(size // (CHARACTERS_PER_STEP if text else ELEMENTS_PER_STEP))
        return super().call_binop(context, operator, left, right)

    def compared(self, operator: str, left: Any, right: Any) -> Any:  # noqa: ANN401 - same
        """Compare for the steps that it may take: lists that contain the same list twice, forty levels deep, are compared
        in one call of C with 2^40 steps.
        """
        if isinstance(right, str):
            self.budget.step(len(right) // COMPARISONS_PER_STEP)
        elif operator in {"in", "notin"}:
            # A search would use the iterator up.
            right = list(right) if isinstance(right, Iterator) else right
            self.budget.step(weight(left) * (len(right) if isinstance(right, NESTING) else 1) // COMPARED_PER_STEP)
        elif isinstance(left, CONTAINERS) and isinstance(right, CONTAINERS):
            self.budget.step(weight(min(left, right, key=len)) // PARTS_PER_STEP)
        return COMPARED[operator](left, right)

    def key(self, value: Any) -> Any:  # noqa: ANN401 - same
        """Return a value to hash; only tuples can be large."""
        self.budget.step(weight(value) // PARTS_PER_STEP)
        return value

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - same
        """Call a macro, a method or a global for one step."""
        self.budget.step()
        owner = getattr(function, "__self__", None)
        if isinstance(owner, (dict, list, tuple, LoopContext)) or function is _new_dict:
            # `count` and `index` of a list compare with every element.
            places = len(owner) if isinstance(owner, (list, tuple)) else 1
            self.budget.step(sum(map(weight, args)) * places // COMPARED_PER_STEP)
        if not isinstance(owner, str) and function is not SafeNamespace:
            return super().call(context, function, *args, **kwargs)
        # Methods of text don't take them.
        for name in LOCAL_VARIABLES & kwargs.keys():
            del kwargs[name]
        if not isinstance(owner, str):
            return function(*args, **kwargs)  # the constructor of a namespace
        if function.__name__ in GROWING:
            if function.__name__ == "join":
                return together([_text(part) for part in args[0]], owner)
            require_size(replaced_size(owner, *args[:2]))
        # A method of text takes as many steps as it visits characters and creates parts.
        self.budget.step(len(owner) // CHARACTERS_PER_STEP)
        if function.__name__ in BACKWARD and args and isinstance(args[0], str):
            self.budget.step(len(owner) * len(args[0]) // COMPARISONS_PER_STEP)
        found = function(*args, **kwargs)
        if isinstance(found, list):
            self.budget.step(len(cast("list[str]", found)) // PARTS_PER_STEP)
        return found

    def getattr(self, obj: Any, attribute: str) -> Any:  # noqa: ANN401 - same
        """Fast paths for the most common look-ups: fields of messages and loop state."""
        kind = type(obj)
        # Jinja's own look-up tries an attribute first, raises, and then asks for the item.
        if kind in RECORDS and attribute in FIELDS:
            return obj[attribute] if attribute in obj else _absent(attribute)
        if (kind is LoopContext and attribute in LOOP_FIELDS) or (kind is SafeNamespace and attribute[0] != "_"):
            return getattr(obj, attribute, _absent(attribute))
        if isinstance(obj, str) and attribute in TEXT_METHODS:
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)

    def wrap_str_format(self, value: Any) -> None:  # noqa: ANN401 - same
        """Disable formatting, because a width can produce a text of any size."""

    def getitem(self, obj: Any, argument: Any) -> Any:  # noqa: ANN401 - same
        return super().getitem(obj, self.key(argument) if isinstance(argument, tuple) else argument)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:  # noqa: ANN401 - same
        """Return whether the attribute is listed for this type, and safe in Jinja's immutable sandbox."""
        if isinstance(obj, SafeNamespace):
            return not attr.startswith("_")
        # A list of allowed names, so that new attributes of Python don't get in.
        allowed = next((names for kind, names in ATTRIBUTES if isinstance(obj, kind)), frozenset[str]())
        return attr in allowed and super().is_safe_attribute(obj, attr, value)


@lru_cache(maxsize=64)
def _absent(name: str) -> Undefined:
    """The value of an absent field; cached, because half of the fields are absent."""
    return Undefined(f"there is no {name!r} here", name=name)


def _text(value: object) -> str:
    """A text to concatenate; arguments of a tool call are their JSON."""
    if isinstance(value, (str, Arguments)):
        return value if isinstance(value, str) else value.text
    raise TypeError(f"text and {type(value).__name__} cannot be added; write the value with a filter such as tojson")


def _escaped(value: object) -> str:
    """A text beside one marked safe."""
    return str(value) if isinstance(value, Markup) else escape(_text(value))


def clock(date: object) -> Callable[[str], str]:
    """`strftime_now` at a date, an ISO text such as `2026-03-01` or `2026-03-01T12:00`. Raises InputError for anything
    else.
    """
    try:
        moment = datetime.fromisoformat(str(date))
    except ValueError as error:
        example = "write it as 2026-03-01"
        raise InputError(f"template_variables.date: {date!r} is not a date ({error}); {example}") from error

    def strftime_now(form: str) -> str:
        # A sign that remains belongs to a directive that isn't listed.
        if DIRECTIVE.sub("", form).count("%"):
            raise SecurityError(f"{form[:40]!r}: a date is written with plain directives, such as %d %B %Y")
        require_size(len(form) * LONGEST_DIRECTIVE)
        return moment.strftime(form)

    return strftime_now


def _range(*places: Any) -> range:  # noqa: ANN401 - a template may pass anything
    """Jinja's `range`, of numbers below 2^61: multiples of 2^61 - 1 have one hash, so that sets of them take n^2 steps."""
    if any(isinstance(place, int) and place.bit_length() > MAX_RANGE_BITS for place in places):
        raise TemplateLimitError(f"the template counts with a number of more than {MAX_RANGE_BITS} bits")
    return safe_range(*places)


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _new_dict(*args: Any, **kwargs: Any) -> dict[str, Any]:  # noqa: ANN401 - same
    return dict(*args, **kwargs)
