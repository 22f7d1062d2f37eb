"""System and developer messages are the reference's to the byte, after schemas are mended that would lose their names."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai_harmony import DeveloperContent, Message, Role, SystemContent, ToolDescription
from tokenmill.tasks.chat.conversation import RejectionError
from tokenmill.tasks.errors import InputError
from tokenmill.tasks.harmony.grammar import parse
from tokenmill.tasks.harmony.message import HarmonyMessage
from tokenmill.tasks.harmony.preamble import declared, developer_body, schemas, system_body
from tokenmill.tasks.harmony.render import render
from tokenmill.tasks.harmony.vocabulary import encoding

from tests.examples import max_examples
from tests.peers.harmony_tokens import encode

IDENTITY = "You are ChatGPT, a large language model trained by OpenAI.\nKnowledge cutoff: 2024-06"
CHANNELS = "# Valid channels: analysis, commentary, final. Channel must be included for every message."
TO_COMMENTARY = "\nCalls to these tools must go to the commentary channel: 'functions'."


def tool(name="f", description="Does it.", **fields):
    return {"type": "function", "function": {"name": name, "description": description, **fields}}


def declaration(parameters):
    """How the one tool with these parameters is written."""
    lines = developer_body(None, [tool(description="", parameters=parameters)]).split("\n")
    return "\n".join(lines[lines.index("namespace functions {") + 2 : -2])


@pytest.mark.parametrize("effort", ["low", "medium", "high"])
@pytest.mark.parametrize("functions", [False, True])
def test_a_system_message_names_identity_effort_and_channels(effort, functions):
    expected = f"{IDENTITY}\n\nReasoning: {effort}\n\n{CHANNELS}{TO_COMMENTARY * functions}"
    assert system_body(effort, functions=functions) == expected


def test_the_python_tool_is_described_between_effort_and_channels():
    before, tools, after = system_body("high", python=True, functions=True).partition("# Tools\n\n## python\n\n")
    assert before == f"{IDENTITY}\n\nReasoning: high\n\n"
    assert tools
    assert after.endswith(f"\n\n{CHANNELS}{TO_COMMENTARY}")
    assert "stateful Jupyter" in after


@pytest.mark.parametrize("effort", ["", "Medium", "none", "xhigh"])
def test_unknown_effort_is_rejected(effort):
    with pytest.raises(InputError, match=r"is unknown; use low, medium, high"):
        system_body(effort)


def test_a_system_message_is_the_references():
    content = SystemContent.new().with_python_tool()
    tokens = encoding().render(Message.from_role_and_content(Role.SYSTEM, content))
    assert encode([HarmonyMessage("system", system_body("medium", python=True))]).ids.tolist() == tokens


GOLDEN = """# Instructions

Answer briefly.

# Tools

## functions

namespace functions {

// Order state.
// By number.
type get_order = (_: {
// Its number, such as A1
id: string,
kind?: "sale" | "return", // default: sale
lines?: number[],
note?: string | null, // default: "none"
buyer?: {
    name: string,
    },
}) => any;

type ping = () => any;

} // namespace functions"""


def test_tools_are_declared():
    properties = {
        "id": {"type": "string", "description": "Its number, such as A1"},
        "kind": {"type": "string", "enum": ["sale", "return"], "default": "sale"},
        "lines": {"type": "array", "items": {"type": "integer"}},
        "note": {"type": ["string", "null"], "default": "none"},
        "buyer": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
    }
    order = tool(
        "get_order",
        "Order state.\nBy number.",
        parameters={"type": "object", "properties": properties, "required": ["id"]},
    )
    tools = [order, {"type": "function", "function": {"name": "ping", "description": ""}}]
    assert developer_body("Answer briefly.", tools) == GOLDEN


@pytest.mark.parametrize(
    ("parameters", "written"),
    [
        (None, "type f = () => any;"),
        ({}, "type f = (_: any) => any;"),
        ({"type": "object"}, "type f = (_: {\n}) => any;"),
        ({"type": "object", "properties": {}}, "type f = (_: {\n}) => any;"),
        ({"type": "object", "properties": {"a": {"anyOf": [{"type": "string"}]}}}, "type f = (_: {\na?: any,\n}) => any;"),
        ({"type": "object", "properties": {"a": {"type": "integer", "enum": [1]}}}, "type f = (_: {\na?: number,\n}) => any;"),
        ({"type": "object", "properties": {"a": {"type": "string", "nullable": True}}}, "type f = (_: {\na?: string | null,\n}) => any;"),
        ({"type": "object", "properties": {"a": {"type": "array"}}}, "type f = (_: {\na?: Array<any>,\n}) => any;"),
    ],
)  # fmt: skip
def test_schemas_are_written_by_the_references_rules(parameters, written):
    assert declaration(parameters).strip("\n") == written


@pytest.mark.parametrize(
    ("lost", "meant"),
    [
        ({"properties": {"a": {"type": "string"}}}, {"type": "object", "properties": {"a": {"type": "string"}}}),
        ({"type": None, "properties": {"a": {"type": "string"}}}, {"type": "object", "properties": {"a": {"type": "string"}}}),
        (
            {"properties": {"a": {"properties": {"b": {"type": "integer"}}}}},
            {"type": "object", "properties": {"a": {"type": "object", "properties": {"b": {"type": "integer"}}}}},
        ),
        (
            {"properties": {"a": {"type": "array", "items": {"properties": {"b": {"type": "integer"}}}}}},
            {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "object", "properties": {"b": {"type": "integer"}}}}}},
        ),
        (
            {"properties": {"a": {"oneOf": [{"properties": {"b": {"type": "integer"}}}]}}},
            {"type": "object", "properties": {"a": {"oneOf": [{"type": "object", "properties": {"b": {"type": "integer"}}}]}}},
        ),
        (
            {"properties": {"properties": {"type": "string"}, "type": {"properties": {}}}},
            {"type": "object", "properties": {"properties": {"type": "string"}, "type": {"type": "object", "properties": {}}}},
        ),
    ],
)  # fmt: skip
def test_implicit_objects_keep_their_names(lost, meant):
    given = json.dumps(lost)
    assert declaration(lost) == declaration(meant)
    assert json.dumps(lost) == given
    assert "any)" not in declaration(lost)


def test_required_names_beside_the_parameters_count():
    parameters = {"properties": {"a": {"type": "string"}, "b": {"type": "string"}}}
    beside = [tool(parameters=parameters, required=["a"], strict=True)]
    within = [tool(parameters={**parameters, "type": "object", "required": ["a"]})]
    assert developer_body(None, beside) == developer_body(None, within)
    assert "\na: string,\nb?: string,\n" in developer_body(None, beside)
    both = [tool(parameters={**parameters, "required": ["b"]}, required=["a"])]
    assert "\na?: string,\nb: string,\n" in developer_body(None, both)


@pytest.mark.parametrize("given", [{"name": "f", "description": None}, {"name": "f"}, {"name": "f", "description": ""}])
def test_tool_without_description(given):
    assert developer_body(None, [given]) == developer_body(None, [{"type": "function", "function": given}])
    assert "{\n\ntype f = () => any;\n\n}" in developer_body(None, [given])


def test_empty_preamble_is_empty():
    assert developer_body(None, []) == developer_body("", []) == ""
    assert developer_body("Be kind.", []) == "# Instructions\n\nBe kind."


@given(
    st.text(st.characters(exclude_categories=["Cs"]), min_size=1),
    st.lists(st.sampled_from(["f", "g", "h_1"]), unique=True),
)
@max_examples(100)
def test_a_developer_message_is_the_references(instructions, names):
    content = DeveloperContent.new().with_instructions(instructions)
    tools = [tool(name, "d", parameters={"type": "object", "properties": {name: {"type": "string"}}}) for name in names]
    if tools:
        content = content.with_function_tools([ToolDescription.new(**each["function"]) for each in tools])
    tokens = encoding().render(Message.from_role_and_content(Role.DEVELOPER, content))
    expected = encoding().decode_utf8(tokens)
    assert f"<|start|>developer<|message|>{developer_body(instructions, tools)}<|end|>" == expected


def deep(levels):
    schema = {"type": "string"}
    for _ in range(levels):
        schema = {"properties": {"a": schema}}
    return schema


@pytest.mark.parametrize(
    "tools",
    [
        [{}],
        [{"function": None}],
        [{"function": "f"}],
        [{"name": ""}],
        [{"name": 3}],
        [{"name": "f", "description": ["x"]}],
        [{"name": "f", "parameters": "none"}],
        [{"name": "f", "parameters": deep(100)}],
        [{"name": "f", "parameters": deep(400)}],
        [{"name": "f", "description": "\ud83d"}],
        [{"name": "f", "parameters": {1: 2}}],
    ],
)
def test_tools_that_cannot_be_declared_are_rejected(tools):
    with pytest.raises(RejectionError) as caught:
        developer_body(None, tools)
    assert caught.value.reason == "bad_tools"


ODD = st.recursive(
    st.none() | st.booleans() | st.integers(0, 3) | st.sampled_from(["object", "string", "array", "x"]),
    lambda inner: st.lists(inner, max_size=2)
    | st.dictionaries(st.sampled_from(["type", "properties", "items", "oneOf", "enum", "required", "description", "default", "a"]), inner, max_size=4),
    max_leaves=12,
)  # fmt: skip


@given(
    st.dictionaries(
        st.sampled_from(["type", "properties", "items", "oneOf", "required", "title", "examples"]), ODD, max_size=5
    )
)
@max_examples(150)
def test_odd_schemas_are_declared_all_the_same(parameters):
    assert declaration(parameters).startswith("type f = (")


TOOLS = [tool("f", parameters={"properties": {"a": {"type": "string"}}}, required=["a"]), tool("g")]


def test_names_and_schemas_match_the_recipients():
    mended = {"properties": {"a": {"type": "string"}}, "type": "object", "required": ["a"]}
    assert schemas(TOOLS) == {"functions.f": mended, "functions.g": None}


def test_declared_tools_are_in_the_text():
    system = HarmonyMessage("system", system_body("low", python=True, functions=True))
    developer = HarmonyMessage("developer", developer_body("type x = (\n## python", TOOLS))
    told = HarmonyMessage("user", developer_body(None, [tool("h")]))
    assert declared(parse(render([system, developer, told]))) == ("python", "functions.f", "functions.g")
    assert declared([HarmonyMessage("system", system_body("low")), HarmonyMessage("user", "x")]) == ()


def test_namespaces_of_a_system_message_count():
    content = SystemContent.new().with_browser_tool()
    text = encoding().decode_utf8(encoding().render(Message.from_role_and_content(Role.SYSTEM, content)))
    assert declared(parse(text)) == ("browser.search", "browser.open", "browser.find")
