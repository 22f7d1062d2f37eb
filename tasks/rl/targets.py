"""What a trainer reads: for each of them, the rows it takes as they are.

The readers themselves check little. A row that breaks a rule ends the run hours later, where its loader or a chat
template meets it; or it ends nothing, and the model learns from the wrong field. So every row is checked here, before
the first GPU is asked for. The rules are facts of NeMo-RL's data sets and processors (`ResponseDataset`,
`openai_format`, `PreferenceDataset`, `BinaryPreferenceDataset`, `math_hf_data_processor`, `NemoGymDataset`) and of the
request that NeMo-Gym accepts.

A check looks at one row and so cannot know what else is in the file: that every row has the same form, and a field the
same type throughout, is for the recipe to see to. A check costs 0.5 to 2 µs a row and 0.4 µs a message.
"""

import json
from collections.abc import Callable
from typing import Any, Literal, cast, get_args

from tokenmill.tasks.chat.conversation import Rejected, Role
from tokenmill.tasks.chat.json_values import kind, listed, quoted

from .placeholders import has_placeholder
from .preferences import ranked
from .record import Check, Record
from .requests import PARAMS, request_fault

Target = Literal["none", "nemo_rl_sft", "nemo_rl_chat", "nemo_rl_grpo_math", "nemo_rl_dpo", "nemo_gym"]

ROLES = get_args(Role)

GYM_ROLES = ("user", "assistant", "system", "developer")
"""Who may say a message of the Responses API; what a tool gave back is an item of its own there."""

SET_BY_TRAINER = ("temperature", "top_p")
"""What NeMo-RL overwrites in the request of every row, from the settings of its generation."""

READ = ("reasoning_content", "content", "tool_calls", "name", "arguments", "output")
"""The keys of a message, a call or a result whose values are read."""


def check_of(target: Target) -> Check:
    """What says why a row cannot be used for `target`, or None."""
    return _CHECKS[target]


def texts_of(target: Target) -> Callable[[Record], list[str]]:
    """What lists the texts that a model reads of a row which `check_of(target)` let pass, each once.

    Tools, calls and parts that are not text count as their JSON. For `none` nobody says what is read: no texts.
    """
    return _TEXTS[target]


def form_of(target: Target) -> Callable[[Record], str] | None:
    """What names the form of a row, for targets whose readers know two: a file must not mix them, because it is read as
    one table. None for the others.
    """
    return _FORMS.get(target)


def _nothing_wrong(_: Record) -> None:
    return None


def _sft(record: Record) -> Rejected | None:
    return _task_name(record) or _two_forms(record) or _question_and_answer(record)


def _chat(record: Record) -> Rejected | None:
    return (
        _task_name(record)
        or _conversation(record.get("messages"), "messages")
        or _ends_with_assistant(record["messages"], "messages")
        or _tools(record.get("tools"), "tools")
    )


def _grpo_math(record: Record) -> Rejected | None:
    if "messages" not in record:
        return _task_name(record) or _question_and_answer(record)
    return _task_name(record) or _two_forms(record) or _two_messages(record["messages"])


def _dpo(record: Record) -> Rejected | None:
    if record.get("completions") is None and (record.get("context") is None or record.get("chosen") is not None):
        return _task_name(record) or _pair(record)
    return _task_name(record) or _conversation(record.get("context"), "context") or _completions(record)


def _gym(record: Record) -> Rejected | None:
    if has_placeholder(record):
        remedy = "resolve it with the transform resolve_placeholders"
        return Rejected("unresolved_placeholder", f"_hf_placeholder stands where the question should be; {remedy}")
    if record.get("_rowidx") is not None:
        return Rejected(
            "reserved_field", "_rowidx is overwritten by NeMo-RL, which numbers rows by it; rename or remove it"
        )
    params = record.get(PARAMS)
    if not isinstance(params, dict):
        return _wrong(PARAMS, params, "an object with input")
    return _request(params) or _agent(record.get("agent_ref"))


_CHECKS: dict[Target, Check] = {
    "none": _nothing_wrong,
    "nemo_rl_sft": _sft,
    "nemo_rl_chat": _chat,
    "nemo_rl_grpo_math": _grpo_math,
    "nemo_rl_dpo": _dpo,
    "nemo_gym": _gym,
}


def _task_name(record: Record) -> Rejected | None:
    if "task_name" not in record:
        return None
    why = "task_name is a column that NeMo-RL adds, and it cannot load a file that has one"
    return Rejected("reserved_field", f"{why}; remove it, with select for example")


def _two_forms(record: Record) -> Rejected | None:
    """A file is read by its messages as soon as one row has that field, be it null."""
    beside = [field for field in ("input", "output") if field in record]
    if "messages" not in record or not beside:
        return None
    why = f"the row has messages and {' and '.join(beside)}, and only the messages are read"
    return Rejected("two_forms", f"{why}; keep one of the two with select")


def _question_and_answer(record: Record) -> Rejected | None:
    return _filled(record.get("input"), "input") or _filled(record.get("output"), "output")


def _filled(value: object, field: str) -> Rejected | None:
    if isinstance(value, str) and value:
        return None
    if isinstance(value, str):
        return Rejected("empty_text", f"{field} is empty; filter out such rows")
    return _wrong(field, value, "text")


def _wrong(field: str, value: object, wanted: str) -> Rejected:
    """What is said of a field that is missing or of another type."""
    if value is None:
        return Rejected("missing_field", f"there is no {field}; make it {wanted}, or filter out such rows")
    return Rejected("bad_field", f"{field} is {kind(value)}; make it {wanted}")


def _conversation(messages: object, field: str) -> Rejected | None:
    if not isinstance(messages, list):
        return _wrong(field, messages, "an array of messages")
    if not messages:
        return Rejected("no_messages", f"{field} is empty; filter out such rows")
    for number, message in enumerate(messages, 1):
        if wrong := _message(message, f"message {number} of {len(messages)} in {field}"):
            return wrong
    return None


def _message(message: object, where: str) -> Rejected | None:
    if not isinstance(message, dict):
        return Rejected("bad_message", f"{where} is {kind(message)}; make it an object with role and content")
    fields: dict[str, Any] = message
    if wrong := _role(fields, ROLES, where) or _tool_calls(fields.get("tool_calls"), where):
        return wrong
    if isinstance(fields.get("content"), str):
        return None
    if fields.get("content") is not None:
        return Rejected("not_text", f"the content of {where} is {kind(fields['content'])}; make it one text")
    if "content" in fields and fields.get("tool_calls"):
        return None
    remedy = "write text, or null beside tool_calls"
    return Rejected("no_content", f"{where} has no content, its keys are {listed(fields)}; {remedy}")


def _role(message: dict[str, Any], known: tuple[str, ...], where: str) -> Rejected | None:
    role = message.get("role")
    if role in known:
        return None
    return Rejected("unknown_role", f"the role of {where} is {quoted(role)}; known: {', '.join(known)}")


def _tool_calls(calls: object, where: str) -> Rejected | None:
    if not calls or (isinstance(calls, list) and all(isinstance(call, dict) for call in calls)):
        return None
    return Rejected("bad_tool_calls", f"tool_calls of {where} is {_contents(calls)}; make it an array of objects")


def _tools(tools: object, field: str) -> Rejected | None:
    if (
        tools is None
        or tools in ("", {})
        or (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools))
    ):
        return None
    return Rejected("bad_tools", f"{field} is {_contents(tools)}; make it an array of objects")


def _contents(value: object) -> str:
    if not isinstance(value, list):
        return kind(value)
    return f"an array with {next(kind(item) for item in value if not isinstance(item, dict))} in it"


def _ends_with_assistant(messages: list[dict[str, Any]], field: str) -> Rejected | None:
    role = messages[-1]["role"]
    if role == "assistant":
        return None
    remedy = "end it with an answer, or filter out such rows"
    return Rejected("last_not_assistant", f"the last message in {field} is by {role!r}, not by the assistant; {remedy}")


def _two_messages(messages: object) -> Rejected | None:
    """The first message is the problem, the second the true answer; nothing else is read."""
    if wrong := _conversation(messages, "messages"):
        return wrong
    said = cast("list[dict[str, Any]]", messages)
    roles = [message["role"] for message in said]
    if "system" in roles:
        remedy = "remove it here, and name a file with its text as system_prompt_file in the configuration of NeMo-RL"
        return Rejected("system_turn", f"messages have a system turn, which would be taken for the problem; {remedy}")
    if roles != ["user", "assistant"]:
        found = f"messages are by {', '.join(roles)}"
        return Rejected(
            "not_a_pair", f"{found}, and only the first two are read; make them one by user, one by assistant"
        )
    problem, answer = (message["content"] for message in said)
    return _filled(problem, "the content of message 1") or _filled(answer, "the content of message 2, the answer,")


def _pair(record: Record) -> Rejected | None:
    prompt = record.get("prompt")
    asked = _conversation(prompt, "prompt") if isinstance(prompt, list) else _filled(prompt, "prompt")
    return asked or _answer(record.get("chosen"), "chosen") or _answer(record.get("rejected"), "rejected")


def _answer(answer: object, field: str) -> Rejected | None:
    if not isinstance(answer, list):
        return _filled(answer, field)
    why = f"{field} is an array, and would be read as the content of one message"
    return Rejected("not_text", f"{why}; make completions of it with the transform preference")


def _completions(record: Record) -> Rejected | None:
    completions = record.get("completions")
    if completions is None:
        return _wrong("completions", None, "two completions with ranks")
    both = ranked(completions)
    if isinstance(both, Rejected):
        return both
    for number, each in enumerate(completions, 1):
        field, messages = f"completion {number} of 2", each.get("completion")
        if wrong := _conversation(messages, field) or _ends_with_assistant(messages, field):
            return wrong
    return None


def _request(params: dict[str, Any]) -> Rejected | None:
    if reserved := [name for name in SET_BY_TRAINER if params.get(name) is not None]:
        why = f"{PARAMS}.{reserved[0]} is set by NeMo-RL from its own configuration"
        return Rejected("reserved_field", f"{why}; remove it here")
    most = params.get("max_output_tokens")
    if isinstance(most, str):
        return _wrong(f"{PARAMS}.max_output_tokens", most, "a number, which NeMo-RL compares with its own limit")
    items = params.get("input")
    if not isinstance(items, list) or not items:
        return _items(items)
    fault = request_fault(params)
    return fault and (_items(items) or _tools_of_request(params) or fault)


def _items(items: object) -> Rejected | None:
    field = f"{PARAMS}.input"
    if not isinstance(items, list):
        return _wrong(field, items, 'an array of messages: [{"role": "user", "content": "…"}]')
    if not items:
        return Rejected("no_messages", f"{field} is empty; filter out such rows")
    for number, item in enumerate(items, 1):
        if wrong := _item(item, f"item {number} of {len(items)} in {field}"):
            return wrong
    return None


def _item(item: object, where: str) -> Rejected | None:
    """What can be said of messages in better words than a schema has."""
    if not isinstance(item, dict):
        return Rejected("bad_message", f"{where} is {kind(item)}; make it an object with role and content")
    fields: dict[str, Any] = item
    given = fields.get("type", "message")
    if not isinstance(given, str) or not given:
        found = "empty" if given == "" else kind(given)
        return Rejected("bad_message", f"the type of {where} is {found}; leave it out, or name the type of the item")
    return _said(fields, where) if given == "message" else None


def _said(message: dict[str, Any], where: str) -> Rejected | None:
    if wrong := _role(message, GYM_ROLES, where):
        return wrong
    content = message.get("content")
    if isinstance(content, str) or (isinstance(content, list) and all(isinstance(part, dict) for part in content)):
        return None
    if content is None:
        return Rejected("no_content", f"{where} has no content, its keys are {listed(message)}; write text")
    return Rejected("not_text", f"the content of {where} is {_contents(content)}; make it text or an array of parts")


def _tools_of_request(params: dict[str, Any]) -> Rejected | None:
    """NeMo-Gym takes an absent field for no tools, but not a null."""
    if params.get("tools", []) is None:
        return Rejected("bad_tools", f"{PARAMS}.tools is null, which NeMo-Gym refuses; leave it out, or make it []")
    return _tools(params.get("tools"), f"{PARAMS}.tools")


def _agent(agent: object) -> Rejected | None:
    """Which agent of NeMo-Gym plays the row."""
    if not isinstance(agent, dict):
        return _wrong("agent_ref", agent, 'an object: {"type": "responses_api_agents", "name": "…"}')
    return _filled(agent.get("name"), "agent_ref.name")


def _no_texts(_: Record) -> list[str]:
    return []


def _texts_of_pair(record: Record) -> list[str]:
    return [record["input"], record["output"]]


def _texts_of_chat(record: Record) -> list[str]:
    return [*_texts_of_messages(record["messages"]), *_texts_in(record.get("tools"))]


def _texts_of_grpo_math(record: Record) -> list[str]:
    """The problem alone: the answer is what the verifier compares with."""
    return [record["messages"][0]["content"] if "messages" in record else record["input"]]


def _texts_of_preference(record: Record) -> list[str]:
    if record.get("completions") is not None:
        completions = [each["completion"] for each in record["completions"]]
        return [text for messages in (record["context"], *completions) for text in _texts_of_messages(messages)]
    prompt = record["prompt"]
    asked = _texts_of_messages(prompt) if isinstance(prompt, list) else [prompt]
    return [*asked, record["chosen"], record["rejected"]]


def _texts_of_request(record: Record) -> list[str]:
    params = record[PARAMS]
    instructions = [params["instructions"]] if isinstance(params.get("instructions"), str) else []
    return [*instructions, *_texts_of_messages(params["input"]), *_texts_in(params.get("tools"))]


_FORMS: dict[Target, Callable[[Record], str]] = {
    "nemo_rl_grpo_math": lambda record: "messages" if "messages" in record else "input and output",
    "nemo_rl_dpo": lambda record: "completions" if record.get("completions") is not None else "chosen and rejected",
}

_TEXTS: dict[Target, Callable[[Record], list[str]]] = {
    "none": _no_texts,
    "nemo_rl_sft": _texts_of_pair,
    "nemo_rl_chat": _texts_of_chat,
    "nemo_rl_grpo_math": _texts_of_grpo_math,
    "nemo_rl_dpo": _texts_of_preference,
    "nemo_gym": _texts_of_request,
}


def _texts_of_messages(messages: list[dict[str, Any]]) -> list[str]:
    """The texts of messages, and of items of the Responses API, which keep theirs under other keys."""
    return [text for message in messages for key in READ if key in message for text in _texts_in(message[key])]


def _texts_in(value: object) -> list[str]:
    """A text, or the items of an array, or anything else as its JSON. Null says nothing."""
    if value is None:
        return []
    return [_text_of(item) for item in value] if isinstance(value, list) else [_text_of(value)]


def _text_of(value: object) -> str:
    text = cast("Record", value).get("text") if isinstance(value, dict) else value
    return text if isinstance(text, str) else json.dumps(value, ensure_ascii=False, default=str)
