"""Marks inserted into a template's syntax tree, so that a rendering records which message wrote which characters.

Every loop that writes text marks each iteration, with its message or tool call, and its end; other loops only count steps. `~`
becomes a filter that keeps origins. The `generation` tag, by which some templates mark what the model generates, becomes two
marks. Slices become a filter, because copying costs steps.
"""

from collections.abc import Callable, Mapping, Sized
from typing import Any, cast

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.utils import pass_context
from jinja2.visitor import NodeTransformer

from .filters import CHARACTERS_PER_STEP, ELEMENTS_PER_STEP, JOINED_PER_STEP, text_of, together
from .traced import Kind, MessageRecord, ToolCallRecord, mark


class Generation(Extension):
    """`{% generation %}…{% endgeneration %}`: marks what the model generates."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

    def parse(self, parser: Parser) -> nodes.Node:
        """The body between two marks, in its own scope."""
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
    """Whether a comparison takes no time: with a literal, or in a list of some."""
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
    for each in node.find_all(nodes.Getitem) if counts else ():
        if isinstance(each.node, nodes.Name) and isinstance(each.arg, nodes.Name) and each.arg.name == name:
            return nodes.Getitem(nodes.Name(each.node.name, "load"), nodes.Name(name, "load"), "load")
    return nodes.Name(name, "load")


def instrumented(tree: nodes.Template) -> nodes.Template:
    """The template with its marks."""
    marked: nodes.Template = _Instrumenter().visit(tree)
    return cast("nodes.Template", marked.set_environment(tree.environment))  # pyright: ignore[reportArgumentType]


def _output(value: nodes.Expr, name: str, *arguments: nodes.Expr, line: int) -> nodes.Output:
    return nodes.Output([nodes.Filter(value, name, list(arguments), [], None, None)], lineno=line)


def marking(step: Callable[[int], None]) -> Mapping[str, Callable[..., str]]:
    """The filters inserted into templates; `step` spends the budget. They take the context so that Jinja does not
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
        "__ended__": _ended,
        "__marked__": _marked,
        "__written__": written,
        "__sliced__": sliced,
    }


@pass_context
def _ended(_: Context, loop: int) -> str:
    return mark((loop, "end"))


@pass_context
def _marked(_: Context, kind: Kind) -> str:
    return mark((0, kind))
