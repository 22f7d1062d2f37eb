"""Bodies of the system and developer messages, as openai-harmony writes them.

Tools become TypeScript-like declarations, the form that models were trained on. Three defects that would silently drop
arguments are repaired first: `properties` without `"type": "object"`, a `required` list beside the parameters instead of in
them, a null description. No date is written, so the same input gives the same bytes. The twelve forms of system bodies are
built once each. Declaring a list of tools takes 0.4 ms or more, so declarations are cached.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, lru_cache
from itertools import count
from typing import Any, cast

from openai_harmony import (
    DeveloperContent,
    Message,
    ReasoningEffort,
    RenderOptions,
    Role,
    SystemContent,
    ToolDescription,
)
from tokenmill.tasks.chat.conversation import RejectionError
from tokenmill.tasks.errors import InputError
from tokenmill.tasks.sources.exact_json import compact, loads

from .grammar import MESSAGE, START
from .message import FUNCTIONS, HarmonyMessage
from .vocabulary import encoding

EFFORTS = {"low": ReasoningEffort.LOW, "medium": ReasoningEffort.MEDIUM, "high": ReasoningEffort.HIGH}

PYTHON = "python"

NAMESPACE = re.compile(r"^namespace (\S+) \{\n(.*?)^\} // namespace \1$", re.MULTILINE | re.DOTALL)
DECLARATION = re.compile(r"^type (\S+) = \(", re.MULTILINE)
PYTHON_SECTION = re.compile(rf"^## {PYTHON}$", re.MULTILINE)


@cache
def system_body(effort: str = "medium", *, python: bool = False, functions: bool = False) -> str:
    """Return the system message: identity, knowledge cutoff, effort (low, medium or high), python tool, channels, and where
    functions are called, if any are declared. Raises InputError for other efforts.
    """
    if effort not in EFFORTS:
        raise InputError(f"reasoning effort {effort!r} is unknown; use {', '.join(EFFORTS)}")
    content = SystemContent.new().with_reasoning_effort(EFFORTS[effort])
    return body_of(Role.SYSTEM, content.with_python_tool() if python else content, functions=functions)


def developer_body(instructions: str | None, tools: Sequence[Mapping[str, Any]]) -> str:
    """Return the developer message: unchanged instructions, and tools; empty without either.

    A tool is OpenAI's, with or without the `function` around it. Raises RejectionError, bad_tools, for a tool without a name or
    one that cannot be written.
    """
    sections = [f"# Instructions\n\n{instructions}"] if instructions else []
    if tools:
        sections.append(_declarations(_known(tools)))
    return "\n\n".join(sections)


def schemas(tools: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any] | None]:
    """Return the repaired schema of each tool's arguments, or None, by the recipient of its calls.

    Raises RejectionError as `developer_body` does.
    """
    return {FUNCTIONS + function["name"]: function["parameters"] for function in _functions(_known(tools))}


def declared(messages: Iterable[HarmonyMessage]) -> tuple[str, ...]:
    """Return the recipients declared by the system and developer messages, in order."""
    found: list[str] = []
    for message in messages:
        # The built-in tool is described in a section of the system message, functions in namespaces.
        if message.author == "system" and PYTHON_SECTION.search(message.body):
            found.append(PYTHON)
        if message.author in {"system", "developer"}:
            spaces = NAMESPACE.findall(message.body)
            found += [f"{space}.{tool}" for space, tools in spaces for tool in DECLARATION.findall(tools)]
    return tuple(found)


def body_of(role: Role, content: SystemContent | DeveloperContent, *, functions: bool) -> str:
    """Return the text of a system or developer message as the library writes it; `functions` if the conversation has any."""
    # The library writes a whole message; the tags around its body are cut off.
    options = RenderOptions(conversation_has_function_tools=functions)
    text = encoding().decode_utf8(encoding().render(Message.from_role_and_content(role, content), options))
    return text.removeprefix(f"{START}{role.value}{MESSAGE}").removesuffix("<|end|>")


def _known(tools: Sequence[Mapping[str, Any]]) -> bytes:
    """The tools as JSON, the key of the caches."""
    try:
        return compact(tools)
    except TypeError as error:
        raise RejectionError("bad_tools", f"the tools cannot be written as JSON: {error}") from error


@lru_cache(maxsize=1024)
def _declarations(tools: bytes) -> str:
    # The library reads integers of 64 bits, so marks stand for longer ones: ten digits that are nowhere else, and an index.
    begin, given = next(number for number in count(10**10) if str(number) not in tools.decode()), list[int]()
    described = [ToolDescription.new(**_marked(function, begin * 10**7, given)) for function in _functions(tools)]
    content = DeveloperContent.new().with_function_tools(described)
    try:
        text = body_of(Role.DEVELOPER, content, functions=True)
    except ValueError as error:  # raised for schemas that are nested too deep
        raise RejectionError("bad_tools", f"the tools cannot be declared: {error}") from error
    return re.sub(rf"(?<!\w){begin}(\d{{7}})(?!\w)", lambda mark: str(given[int(mark[1])]), text)


def _marked(value: Any, first: int, given: list[int]) -> Any:  # noqa: ANN401 - any JSON
    """A copy of `value` with `first` and the numbers after it for integers beyond 64 bits, which are appended to `given`."""
    if isinstance(value, dict):
        return {key: _marked(each, first, given) for key, each in cast("dict[str, Any]", value).items()}
    if isinstance(value, list):
        return [_marked(each, first, given) for each in cast("list[Any]", value)]
    if type(value) is int and not -(2**63) <= value < 2**64:
        given.append(value)
        return first + len(given) - 1
    return value


@lru_cache(maxsize=1024)
def _functions(tools: bytes) -> list[dict[str, Any]]:
    """Name, description and repaired parameters of each tool."""
    made: list[dict[str, Any]] = []
    for tool in loads(tools):
        found = tool.get("function", tool)
        function = cast("Mapping[str, Any]", found) if isinstance(found, Mapping) else {}
        name, description, given = (function.get(key) for key in ("name", "description", "parameters"))
        if not isinstance(name, str) or not name:
            raise RejectionError("bad_tools", "a tool doesn't have a name")
        if not isinstance(description, str | None):
            raise RejectionError("bad_tools", f"the description of tool {name} isn't text")
        if not isinstance(given, Mapping | None):
            raise RejectionError("bad_tools", f"the parameters of tool {name} aren't an object")
        parameters = None if given is None else _repaired(cast("Mapping[str, Any]", given))
        required = function.get("required")  # the library reads it within the parameters only
        if parameters is not None and isinstance(required, list) and not parameters.get("required"):
            parameters["required"] = required
        made.append({"name": name, "description": description or "", "parameters": parameters})
    return made


def _repaired(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A schema in which all objects have the type object."""
    repaired = dict(schema)
    if isinstance(schema.get("properties"), Mapping):
        repaired["properties"] = {name: _if_schema(each) for name, each in schema["properties"].items()}
        # Without a type the library writes `any` and drops the properties.
        repaired["type"] = "object" if schema.get("type") is None else schema["type"]
    if "items" in schema:
        repaired["items"] = _if_schema(schema["items"])
    if isinstance(schema.get("oneOf"), list):
        repaired["oneOf"] = [_if_schema(each) for each in schema["oneOf"]]
    return repaired


def _if_schema(value: object) -> object:
    return _repaired(cast("Mapping[str, Any]", value)) if isinstance(value, Mapping) else value
