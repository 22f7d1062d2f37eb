"""Messages as openai-harmony's `to_dict` writes them give the text that openai-harmony renders, channel by channel."""

import json
import random

import pytest
from openai_harmony import (
    Author,
    Conversation,
    DeveloperContent,
    Message,
    ReasoningEffort,
    RenderConversationConfig,
    Role,
    SystemContent,
    ToolDescription,
)
from tokenmill.tasks.chat.loss import LossPolicy
from tokenmill.tasks.harmony.compose import compose
from tokenmill.tasks.harmony.converters import UNNAMED, Names, openai_messages
from tokenmill.tasks.harmony.message import Composed, Policy, Source
from tokenmill.tasks.harmony.render import render
from tokenmill.tasks.harmony.sequences import HarmonyRenderer
from tokenmill.tasks.harmony.training import HarmonyRows, HarmonyTemplate
from tokenmill.tasks.harmony.vocabulary import encoding
from tokenmill.tasks.sources.files import Rejected

SYSTEM = Message.from_role_and_content(
    Role.SYSTEM,
    SystemContent.new().with_reasoning_effort(ReasoningEffort.HIGH).with_conversation_start_date("2026-01-02"),
)
PYTHON = Message.from_role_and_content(Role.SYSTEM, SystemContent.new().with_python_tool())
WEATHER = ToolDescription.new("get_weather", "Weather.", {"type": "object", "properties": {"city": {"type": "string"}}})
DEVELOPER = Message.from_role_and_content(
    Role.DEVELOPER, DeveloperContent.new().with_instructions("Be brief.").with_function_tools([WEATHER])
)
WORDS = Message.from_role_and_content(Role.DEVELOPER, DeveloperContent.new().with_instructions("Be brief."))


def user(text="How is it?"):
    return Message.from_role_and_content(Role.USER, text)


def assistant(text, channel, recipient=None, content_type=None):
    message = Message.from_role_and_content(Role.ASSISTANT, text).with_channel(channel)
    message = message.with_recipient(recipient) if recipient else message
    return message.with_content_type(content_type) if content_type else message


def result(name, text, channel="commentary"):
    made = Message.from_author_and_content(Author.new(Role.TOOL, name), text)
    return made.with_channel(channel).with_recipient("assistant")


THOUGHT, FINAL = assistant("Let me see.", "analysis"), assistant("Fine.", "final")
CALL = assistant('{"city": "Paris"}', "commentary", "functions.get_weather", "<|constrain|>json")
PLAIN_CALL = assistant('{"city": "Paris"}', "commentary", "functions.get_weather", "json")
CODE = assistant("print(1)", "analysis", "python", "code")
OPEN = assistant('{"id": 1}', "analysis", "browser.open", "<|constrain|>json")
BARE = assistant("{}", "commentary", "functions.get_weather")
RESULT = result("functions.get_weather", '{"sky": "clear"}')
PYTHON_RESULT, PAGE = result("python", "1", "analysis"), result("browser.open", "A page.", "analysis")

CONVERSATIONS = {
    "an answer": [SYSTEM, user(), FINAL],
    "reasoning": [SYSTEM, user(), THOUGHT, FINAL],
    "instructions": [SYSTEM, WORDS, user(), THOUGHT, FINAL],
    "two turns": [SYSTEM, user(), FINAL, user("And now?"), THOUGHT, FINAL],
    "reasoning in both turns": [SYSTEM, user(), THOUGHT, FINAL, user("And now?"), THOUGHT, FINAL],
    "a call": [SYSTEM, DEVELOPER, user(), THOUGHT, CALL, RESULT, FINAL],
    "a call without constrain": [SYSTEM, DEVELOPER, user(), PLAIN_CALL, RESULT, FINAL],
    "text before a call": [SYSTEM, DEVELOPER, user(), assistant("I look.", "commentary"), CALL, RESULT, FINAL],
    "calls in a row": [SYSTEM, DEVELOPER, user(), CALL, RESULT, THOUGHT, CALL, RESULT, THOUGHT, FINAL],
    "python": [PYTHON, user(), THOUGHT, CODE, result("python", "1", "analysis"), THOUGHT, FINAL],
    "astral text": [SYSTEM, user("Καλημέρα 🎈\r\n\t"), assistant("é👍🏽", "final")],
}


def rows(messages):
    """The row that the library writes, as it may be stored."""
    given = [message.to_dict() for message in messages]
    yield {"messages": given}
    yield {"messages": json.dumps(given)}
    yield json.loads(Conversation.from_messages(messages).to_json())


def rendered(messages):
    keep = RenderConversationConfig(auto_drop_analysis=False)
    return encoding().decode(encoding().render_conversation_for_training(Conversation.from_messages(messages), keep))


@pytest.mark.parametrize("messages", CONVERSATIONS.values(), ids=CONVERSATIONS)
def test_messages_of_the_library_are_rendered_as_by_the_library(messages):
    wanted = rendered(messages)
    for row in rows(messages):
        found = openai_messages(row)
        assert isinstance(found, Source), found
        composed = compose(found, Policy(thoughts="keep_all"))
        assert isinstance(composed, Composed), composed
        assert render(composed.messages) == wanted


def trained_rows(names=UNNAMED):
    renderer = HarmonyRenderer(LossPolicy(), splits_turns=True)
    return HarmonyRows(HarmonyTemplate.of({}), renderer, "literal", names.messages, names.tools, names.given)


@pytest.mark.parametrize(("question", "counted"), [("Hi", 0), (" ", 1), ("-", 1)])
def test_rows_without_a_question_are_counted_and_trained(question, counted):
    row = {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": "Hello"}]}
    found = trained_rows().read(row)
    assert not isinstance(trained_rows().sequences(found), Rejected)
    assert [name.split(",")[0] for name in trained_rows().unread(found)] == ["questions"] * counted


def some_conversation(draw):
    """Messages of the library: any preamble, and turns of thoughts, remarks, calls with their results, and answers."""
    system = SystemContent.new().with_reasoning_effort(draw.choice([*ReasoningEffort]))
    if draw.random() < 0.3:
        system = system.with_conversation_start_date("2026-01-02").with_model_identity("You are Ada.")
    system = draw.choice([system, system.with_python_tool(), system.with_browser_tool()])
    developer = draw.choice(
        [DEVELOPER, WORDS, Message.from_role_and_content(Role.DEVELOPER, "# Instructions\n\nPlain.")]
    )
    messages = draw.choice([[], [Message.from_role_and_content(Role.SYSTEM, system)]])
    messages += draw.choice([[], [developer]])
    for _turn in range(draw.randint(1, 3)):
        messages.append(user(draw.choice(["Why?", "Καλημέρα 🎈\n", "{}"])))
        for _ in range(draw.randint(0, 3)):
            messages += draw.sample([THOUGHT, assistant("I look.", "commentary")], draw.randint(0, 2))
            call, answer = draw.choice(
                [(CALL, RESULT), (PLAIN_CALL, RESULT), (CODE, PYTHON_RESULT), (OPEN, PAGE), (BARE, RESULT)]
            )
            messages += draw.choice([[call, answer], [call, call, answer, answer]])
        messages += draw.choice([[FINAL], [THOUGHT, FINAL]])
    return [
        *messages,
        user("Once more"),
        *draw.choice([[FINAL], [THOUGHT, FINAL], [CALL], [THOUGHT, OPEN], [CALL, CALL]]),
    ]


def read_officially(text):
    found = encoding().parse_messages_from_completion_tokens(
        encoding().encode(text, allowed_special="all"), strict=True
    )
    return [message.to_dict() for message in found]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(110))
def test_rows_are_read_channel_by_channel_in_both_ways(seed):
    """As the library's own parser reads the library's own rendering; a system message is added where there is none."""
    messages = some_conversation(random.Random(seed))
    wanted = read_officially(rendered(messages))
    wanted = wanted if messages[0].author.role == Role.SYSTEM else [None, *wanted]
    for row in rows(messages):
        normalized, trained = compose(openai_messages(row), Policy(thoughts="keep_all")), trained_rows().read(row)
        assert not isinstance(normalized, Rejected), normalized
        assert not isinstance(trained_rows().sequences(trained), Rejected)
        for found in (normalized.messages, trained.messages):
            read = read_officially(render(found))
            assert read[0]["role"] == "system"
            assert read[wanted[0] is None :] == wanted[wanted[0] is None :]


def test_reasoning_before_the_last_question_is_dropped_as_from_any_chat():
    found = openai_messages({"messages": [each.to_dict() for each in CONVERSATIONS["reasoning in both turns"]]})
    composed = compose(found, Policy(thoughts="last_turn"))
    assert [each.channel for each in composed.messages if each.author == "assistant"] == ["final", "analysis", "final"]
    assert composed.facts["meta_dropped_thoughts"] == 1


BAD = {
    "a name": ([{"role": "user", "name": "Ann", "content": "q"}, FINAL.to_dict()], "named_speaker", "message 1 of 2"),
    "a strange role": ([{"role": "narrator", "content": "q"}, FINAL.to_dict()], "bad_message", "message 1 of 2"),
    "a part that isn't text": ([{"role": "user", "content": [{"type": "image"}]}, FINAL.to_dict()], "bad_message", "message 1"),
    "no content": ([{"role": "user"}, FINAL.to_dict()], "bad_message", "message 1 of 2"),
    "text for a message": (["q", FINAL.to_dict()], "bad_message", "message 1 of 2: it is a string"),
    "a channel that is a number": ([user().to_dict(), {**FINAL.to_dict(), "channel": 5}, FINAL.to_dict()], "bad_message", "its channel is a number"),
    "a recipient that is a list": ([user().to_dict(), {**FINAL.to_dict(), "recipient": ["x"]}], "bad_message", "its recipient is an array"),
    "a type that is a number": ([user().to_dict(), {**FINAL.to_dict(), "content_type": 5}], "bad_message", "its content_type is a number"),
    "a type of two words": ([user().to_dict(), {**FINAL.to_dict(), "content_type": "a b"}], "bad_message", "message 2 of 2"),
    "a tool without a name": ([user().to_dict(), {"role": "tool", "content": "x"}, FINAL.to_dict()], "bad_message", "message 2 of 3"),
    "text beside generated content": ([{"role": "system", "content": [{"type": "system_content"}, {"type": "text", "text": "x"}]}, user().to_dict(), FINAL.to_dict()], "bad_message", "message 1 of 3: it has texts"),
    "null content": ([{"role": "user", "content": None}, FINAL.to_dict()], "bad_message", "message 1 of 2"),
    "an unknown mask": ([user().to_dict(), {**FINAL.to_dict(), "loss": 3}], "bad_loss_flag", "message 2 of 2"),
}  # fmt: skip


@pytest.mark.parametrize(("messages", "reason", "words"), BAD.values(), ids=BAD)
def test_unreadable_for_the_library_is_rejected(messages, reason, words):
    found = openai_messages({"messages": messages})
    assert isinstance(found, Rejected), found
    assert found.reason == reason
    assert words in found.detail


def test_a_message_that_is_not_trained_on():
    row = {"messages": [user().to_dict(), {**FINAL.to_dict(), "train": False}]}
    assert compose(openai_messages(row), Policy()).facts["untrained_messages"] == [2]


def test_fields_of_the_blend_are_read():
    """A decoy is not read in place of the named fields; definitions may be in JSON text."""
    tool = {"name": "f", "parameters": {"type": "object", "properties": {}}}
    row = {
        "messages": [{"role": "user", "content": "decoy"}, {"role": "assistant", "content": "decoy"}],
        "chat": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}],
        "metadata": json.dumps({"tools": [tool]}),
    }
    names = Names("chat", "metadata.tools")
    source = openai_messages(row, names)
    assert ([each["content"] for each in source.messages], source.tools, source.unread) == (
        ["q", "a"],
        [tool],
        ("messages",),
    )
    found = trained_rows(names).read(row)
    assert [each.body for each in found.messages[2:]] == ["q", "a"]
    assert "namespace functions" in found.messages[1].body
