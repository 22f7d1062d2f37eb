"""NeMo-RL's datasets and processors: `ResponseDataset`, `openai_format`, `PreferenceDataset`, `BinaryPreferenceDataset`
and `math_hf_data_processor`.
"""

from tokenmill.tasks.rl.rows import (
    Record,
    RowTarget,
    conversation,
    filled_text,
    ranked,
    texts_in,
    texts_of_messages,
    tools,
    wrong_type,
)
from tokenmill.tasks.sources.files import Rejected


def _chat(record: Record) -> Rejected | None:
    return (
        _task_name(record)
        or conversation(record.get("messages"), "messages")
        or _ends_with_assistant(record["messages"], "messages")
        or tools(record.get("tools"), "tools")
    )


def _grpo_math(record: Record) -> Rejected | None:
    """The first message is the problem, the second the true answer; nothing else is read."""
    if "messages" not in record:
        return _task_name(record) or _question_and_answer(record)
    found: list[Record] = record["messages"]
    if wrong := _task_name(record) or _two_forms(record) or conversation(found, "messages"):
        return wrong
    roles = [message["role"] for message in found]
    if "system" in roles:
        remedy = "remove it here, and name a file with its text as system_prompt_file in the configuration of NeMo-RL"
        return Rejected("system_turn", f"messages have a system turn, which would be taken for the problem; {remedy}")
    if roles != ["user", "assistant"]:
        remedy = "make them one by user, one by assistant"
        return Rejected("not_a_pair", f"messages are by {', '.join(roles)}, and only the first two are read; {remedy}")
    problem, answer = (message["content"] for message in found)
    # The texts may still be empty, or null beside tool calls.
    return filled_text(problem, "the content of message 1") or filled_text(answer, "the content of message 2, the answer,")  # fmt: skip


def _dpo(record: Record) -> Rejected | None:
    # A row is a pair unless it has completions, or a context without the answers of a pair.
    if record.get("completions") is None and (record.get("context") is None or record.get("chosen") is not None):
        return _task_name(record) or _pair(record)
    return _task_name(record) or conversation(record.get("context"), "context") or _completions(record)


def _task_name(record: Record) -> Rejected | None:
    if "task_name" not in record:
        return None
    why = "task_name is a column that NeMo-RL adds, and it cannot load a file that has one"
    return Rejected("reserved_field", f"{why}; remove it, with select for example")


def _two_forms(record: Record) -> Rejected | None:
    """A file is read by its messages as soon as one row has that field, even null."""
    others = [field for field in ("input", "output") if field in record]
    if "messages" not in record or not others:
        return None
    why = f"the row has messages and {' and '.join(others)}, and only the messages are read"
    return Rejected("two_forms", f"{why}; keep one of the two with select")


def _question_and_answer(record: Record) -> Rejected | None:
    return filled_text(record.get("input"), "input") or filled_text(record.get("output"), "output")


def _ends_with_assistant(messages: list[Record], field: str) -> Rejected | None:
    role = messages[-1]["role"]
    if role == "assistant":
        return None
    remedy = "end it with an answer, or filter out such rows"
    return Rejected("last_not_assistant", f"the last message in {field} is by {role!r}, not by the assistant; {remedy}")


def _pair(record: Record) -> Rejected | None:
    prompt = record.get("prompt")
    wrong = conversation(prompt, "prompt") if isinstance(prompt, list) else filled_text(prompt, "prompt")
    return (
        wrong
        or _answer(record.get("chosen"), "chosen")
        or _answer(record.get("rejected"), "rejected")
        or _same(record["chosen"], record["rejected"])
    )


def _answer(answer: object, field: str) -> Rejected | None:
    if not isinstance(answer, list):
        return filled_text(answer, field)
    why = f"{field} is an array, and would be read as the content of one message"
    return Rejected("not_text", f"{why}; make completions of it with the transform preference")


def _same(chosen: object, rejected: object) -> Rejected | None:
    if chosen != rejected:
        return None
    return Rejected("same_answers", "the chosen and the rejected answer are equal; filter out such rows")


def _completions(record: Record) -> Rejected | None:
    completions = record.get("completions")
    if completions is None:
        return wrong_type("completions", None, "two completions with ranks")
    both = ranked(completions)  # NeMo-RL sorts by rank, so any two different ones will do
    if isinstance(both, Rejected):
        return both
    for number, each in enumerate(completions, 1):
        field, messages = f"completion {number} of 2", each.get("completion")
        if wrong := conversation(messages, field) or _ends_with_assistant(messages, field):
            return wrong
    return _same(*(each["completion"] for each in both))


def _texts_of_preference(record: Record) -> list[str]:
    if record.get("completions") is not None:
        completions = [each["completion"] for each in record["completions"]]
        return [text for messages in (record["context"], *completions) for text in texts_of_messages(messages)]
    prompt = record["prompt"]
    asked = texts_of_messages(prompt) if isinstance(prompt, list) else [prompt]
    return [*asked, record["chosen"], record["rejected"]]


TARGETS = [
    RowTarget(
        "nemo_rl_sft",
        lambda record: _task_name(record) or _two_forms(record) or _question_and_answer(record),
        texts=lambda record: [record["input"], record["output"]],
    ),
    RowTarget(
        "nemo_rl_chat",
        _chat,
        texts=lambda record: [*texts_of_messages(record["messages"]), *texts_in(record.get("tools"))],
    ),
    RowTarget(
        "nemo_rl_grpo_math",
        _grpo_math,
        # Only the problem, because the answer is for the verifier
        texts=lambda record: [record["messages"][0]["content"] if "messages" in record else record["input"]],
        form=lambda record: "messages" if "messages" in record else "input and output",
    ),
    RowTarget(
        "nemo_rl_dpo",
        _dpo,
        _texts_of_preference,
        unread=lambda record: ["tools"] if record.get("tools") else [],
        form=lambda record: "completions" if record.get("completions") is not None else "chosen and rejected",
    ),
]
