"""Where chat templates run: programs from strangers, so with nothing to break and nothing to run away with.

Jinja's immutable sandbox keeps a template from touching Python. What it lacks is an end: a template that loops for an
hour or doubles a string forty times stops a cluster as surely as one that breaks out. So each rendering has a budget of
steps (every turn of a loop and every call), of seconds, and of characters in any one text; whoever spends it is stopped
with an error that names the limit. Only filters and methods of text that cannot outgrow the budget unseen are there.

Nothing in it changes with time or machine: there is no `strftime_now`, no `random`; a date is a template variable.
The environment otherwise is that of Hugging Face transformers (blocks trimmed, `break` and `continue`, `tojson` that
escapes nothing, `raise_exception`, the `generation` tag), so that a template means the same here and there.
"""

import json
import time
from collections.abc import Callable, Mapping, Sized
from functools import lru_cache
from typing import Any, NoReturn, cast

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment, safe_range
from jinja2.utils import Namespace, pass_context
from jinja2.visitor import NodeTransformer

from tasks.chat.conversation import Arguments
from tasks.chat.traced import Kind, Traced, joined, mark

MOST_STEPS = 1_000_000
MOST_SECONDS = 20.0
MOST_CHARACTERS = 64 << 20
"""Per rendering, and per text or list. A long agentic conversation takes some 50,000 steps, 0.1 s and 1 M characters."""

STEPS_PER_LOOK = 256
"""The clock is looked at this seldom."""

SAFE_FILTERS = frozenset({
    "abs", "bool", "capitalize", "count", "d", "default", "dictsort", "e", "escape", "first", "float", "int",
    "items", "last", "length", "list", "lower", "map", "max", "min", "reject", "rejectattr", "reverse", "round", "safe",
    "select", "selectattr", "sort", "string", "sum", "title", "trim", "unique", "upper",
})  # fmt: skip
"""Of Jinja's own filters, those whose result is no larger than what they are given."""

SAFE_TEXT_METHODS = frozenset({
    "capitalize", "casefold", "count", "endswith", "find", "index", "isalnum", "isalpha", "isascii", "isdecimal",
    "isdigit", "islower", "isnumeric", "isspace", "istitle", "isupper", "join", "lower", "lstrip", "partition",
    "removeprefix", "removesuffix", "replace", "rfind", "rindex", "rpartition", "rsplit", "rstrip", "split",
    "splitlines", "startswith", "strip", "swapcase", "title", "upper",
})  # fmt: skip


class TemplateLimitError(TemplateError):
    """A rendering spent its budget of steps, seconds or characters."""


class ToolCallRecord(dict[str, Any]):
    """A tool call as a template sees it; `message` is the number of the message that makes it."""

    __slots__ = ("message",)
    message: int


class MessageRecord(dict[str, Any]):
    """A message as a template sees it; `number` is its place in the conversation."""

    __slots__ = ("number",)
    number: int


FIELDS = frozenset({"role", "content", "reasoning_content", "tool_calls", "function", "name", "arguments"})
"""What nearly every template asks of these records; no method of dict has such a name."""

RECORDS = (MessageRecord, ToolCallRecord)

LOOP_FIELDS = frozenset({"index", "index0", "first", "last", "previtem", "nextitem", "length"})
"""Of a loop, what is a plain value."""


class Budget:
    """What is left to one rendering."""

    def __init__(self) -> None:
        self.steps = MOST_STEPS
        self.deadline = time.monotonic() + MOST_SECONDS

    def step(self) -> None:
        """Spend one step."""
        self.steps -= 1
        if self.steps < 0:
            raise TemplateLimitError(f"the template takes more than {MOST_STEPS:,} steps")
        if self.steps % STEPS_PER_LOOK == 0 and time.monotonic() > self.deadline:
            raise TemplateLimitError(f"the template takes more than {MOST_SECONDS:g} seconds")


def require_size(size: int) -> None:
    """Raises TemplateLimitError for a text or list of more than MOST_CHARACTERS."""
    if size > MOST_CHARACTERS:
        raise TemplateLimitError(f"the template makes a text or list of {size:,}; {MOST_CHARACTERS:,} are the most")


class SafeNamespace(Namespace):
    """Jinja's namespace, without names that begin with an underscore."""

    def __setitem__(self, name: str, value: object) -> None:
        if name.startswith("_"):
            raise SecurityError(f"{name!r}: names in a namespace do not begin with an underscore")
        super().__setitem__(name, value)


class Generation(Extension):
    """`{% generation %}…{% endgeneration %}`: what the model generates, in templates that say so themselves."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The body, between two marks."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        begin, end = (nodes.Const(kind) for kind in ("generated", "end_generated"))
        return [_output(begin, "__marked__", line=line), *body, _output(end, "__marked__", line=line)]


class Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's immutable sandbox with a budget, and with text whose origin stays known."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})
    concat = staticmethod(joined)

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
        self.budget = Budget()
        self.filters = {name: function for name, function in self.filters.items() if name in SAFE_FILTERS}
        self.filters |= {"tojson": tojson, "join": join, "replace": replace, "indent": indent, **MARKING}
        self.globals = {"range": safe_range, "dict": _new_dict, "namespace": SafeNamespace, "raise_exception": _refuse}

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:  # noqa: ANN401 - a template's values
        """Add, multiply, raise or format within the limits; arguments of tool calls are their JSON beside text."""
        if operator == "+" and (isinstance(left, str) or isinstance(right, str)):
            return _concatenated(_text(left), _text(right))
        if operator == "%" and isinstance(left, str):
            raise SecurityError("text is not formatted with %; write texts side by side")
        if operator == "**" and abs(right) > MOST_BITS:
            raise TemplateLimitError(f"{left} ** {right} is too large")
        if operator in {"+", "*"}:
            require_size(_size(operator, left, right))
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - same
        """Call a macro, a method or a global for one step."""
        self.budget.step()
        owner = getattr(function, "__self__", None)
        if not isinstance(owner, str):
            return super().call(context, function, *args, **kwargs)
        if function.__name__ == "replace":
            require_size(_replaced_size(owner, *args[:2]))
        elif function.__name__ == "join":
            return join(args[0], owner)
        for name in ("_loop_vars", "_block_vars"):  # what Jinja hands on for functions that take a context
            kwargs.pop(name, None)
        return function(*args, **kwargs)

    def getattr(self, obj: Any, attribute: str) -> Any:  # noqa: ANN401 - same
        """What templates ask for most, without the sandbox's detours: fields of messages, and where a loop is."""
        kind = type(obj)
        if kind in RECORDS and attribute in FIELDS:
            return obj[attribute] if attribute in obj else _absent(attribute)
        if (kind is LoopContext and attribute in LOOP_FIELDS) or (kind is SafeNamespace and attribute[0] != "_"):
            return getattr(obj, attribute, _absent(attribute))
        if isinstance(obj, str) and attribute in SAFE_TEXT_METHODS:
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)

    def wrap_str_format(self, value: Any) -> None:  # noqa: ANN401 - same
        """Nothing is formatted: a width in a format string is a text of any size."""

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:  # noqa: ANN401 - same
        """Methods of text by list, everything else as the immutable sandbox has it."""
        if isinstance(obj, str) and attr not in SAFE_TEXT_METHODS:
            return False
        return super().is_safe_attribute(obj, attr, value)


MOST_BITS = 64


@lru_cache(maxsize=64)
def _absent(name: str) -> Undefined:
    """What a template gets for a field that is not there; made once, because half of the fields are not."""
    return Undefined(f"there is no {name!r} here", name=name)


def _text(value: object) -> str:
    """A text beside which another one is put; arguments of a tool call are their JSON."""
    if isinstance(value, (str, Arguments)):
        return value if isinstance(value, str) else value.text
    raise TypeError(f"text and {type(value).__name__} cannot be added; write the value with a filter such as tojson")


def _concatenated(left: str, right: str) -> str:
    require_size(len(left) + len(right))
    if type(left) is Traced or type(right) is Traced:
        return joined((left, right))
    return left + right


def _size(operator: str, left: object, right: object) -> int:
    """How large a text or list becomes by adding or multiplying; 0 for numbers."""
    sizes = [len(each) for each in (left, right) if isinstance(each, Sized)]
    counts = [each for each in (left, right) if isinstance(each, int)]
    return sum(sizes) if operator == "+" else max(sizes, default=0) * max(counts, default=0)


def _replaced_size(text: str, old: str, new: str) -> int:
    return len(text) + str.count(text, old) * len(new)


def tojson(
    value: Any,  # noqa: ANN401 - whatever a template has
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as transformers writes it for templates; of tool calls, with their origin."""
    if isinstance(indent, int):
        require_size(indent << 10)
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    calls = value if isinstance(value, list) else [value]
    if calls and isinstance(calls[0], ToolCallRecord):
        return Traced(text, ((0, len(text), (calls[0].message, "call")),))
    return text


def join(values: Any, between: str = "", attribute: str | None = None) -> str:  # noqa: ANN401 - same
    """Texts in one."""
    parts = [
        part if isinstance(part, str) else str(part)
        for part in (values if attribute is None else _each(values, attribute))
    ]
    require_size(sum(map(len, parts)) + len(between) * len(parts))
    return joined(parts, between)


def _each(values: Any, attribute: str) -> list[Any]:  # noqa: ANN401 - same
    return [value[attribute] for value in values]


def replace(text: Any, old: str, new: str, count: int = -1) -> str:  # noqa: ANN401 - same
    """`text` with `new` for `old`."""
    text = text if isinstance(text, str) else str(text)
    require_size(_replaced_size(text, old, new))
    return text.replace(old, new, count)


def indent(text: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    """Every line but the first moved to the right."""
    by = " " * min(width, MOST_CHARACTERS) if isinstance(width, int) else width
    lines = text.splitlines()
    require_size(len(text) + len(by) * len(lines))
    moved = [by + line if (number or first) and (line or blank) else line for number, line in enumerate(lines)]
    return "\n".join(moved)


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _new_dict(*args: Any, **kwargs: Any) -> dict[str, Any]:  # noqa: ANN401 - same
    return dict(*args, **kwargs)


@pass_context
def _opened(context: Context, value: object, loop: int) -> str:
    """At the top of every loop: a step, and a mark when what is looped over is a message or a tool call."""
    cast("Sandbox", context.environment).budget.step()
    if type(value) is MessageRecord:
        return mark((loop, "loop"), (value.number, "message"))
    if type(value) is ToolCallRecord:
        return mark((value.message, "call"))
    return ""


@pass_context
def _stepped(context: Context, text: str) -> str:
    """At the top of a loop that writes nothing: a step."""
    cast("Sandbox", context.environment).budget.step()
    return text


@pass_context
def _ended(_: Context, loop: int) -> str:
    return mark((loop, "end"))


@pass_context
def _marked(_: Context, kind: Kind) -> str:
    return mark((0, kind))


def _written(values: list[Any]) -> str:
    """What `~` makes of its operands."""
    return join([value.text if type(value) is Arguments else value for value in values])


MARKING: Mapping[str, Callable[..., str]] = {
    "__opened__": _opened, "__stepped__": _stepped, "__ended__": _ended, "__marked__": _marked, "__written__": _written,
}  # fmt: skip
"""Filters that `instrumented` writes into templates. They take the context so that Jinja does not evaluate them early."""


def _output(value: nodes.Expr, name: str, *arguments: nodes.Expr, line: int) -> nodes.Output:
    return nodes.Output([nodes.Filter(value, name, list(arguments), [], None, None)], lineno=line)


class _Instrumenter(NodeTransformer):
    """Every loop that writes marks its turns and its end, and `~` keeps origins."""

    def __init__(self) -> None:
        self._loops = 0

    def visit_For(self, node: nodes.For) -> list[nodes.Node]:  # noqa: N802 - Jinja's name
        writes = any(True for _ in node.find_all((nodes.Output, nodes.Call)))
        self.generic_visit(node)
        if not writes:
            node.body.insert(0, _output(nodes.Const(""), "__stepped__", line=node.lineno))
            return [node]
        self._loops += 1
        loop, line = nodes.Const(self._loops), node.lineno
        target = nodes.Name(node.target.name, "load") if isinstance(node.target, nodes.Name) else nodes.Const(None)
        node.body.insert(0, _output(target, "__opened__", loop, line=line))
        return [node, _output(loop, "__ended__", line=line)]

    def visit_Concat(self, node: nodes.Concat) -> nodes.Expr:  # noqa: N802 - same
        self.generic_visit(node)
        return nodes.Filter(nodes.List(node.nodes), "__written__", [], [], None, None)


def instrumented(tree: nodes.Template, environment: Sandbox) -> nodes.Template:
    """The template with its marks written in."""
    marked: nodes.Template = _Instrumenter().visit(tree)
    return cast("nodes.Template", marked.set_environment(environment))
