"""Conversations in which every text holds a word of its own: `asst7` is the assistant's, `user3` a user's.

So what a rendering was made of can be read from it, and no program has to be trusted for it. Words of content,
reasoning and calls of the assistant begin with `asst`, `reas` and `call`; all others belong to somebody else.
"""

import itertools
import re
from typing import Any

Record = dict[str, Any]

LEARNED = re.compile(r"(?:asst|reas|call)\d+x")
FOREIGN = re.compile(r"(?:user|syst|tool|defn)\d+x")
_numbers = itertools.count(1)


def _word(kind: str) -> str:
    return f"{kind}{next(_numbers)}x"


def _user(text: str = "What about {}?") -> Record:
    return {"role": "user", "content": text.format(_word("user"))}


def _system(role: str = "system") -> Record:
    return {"role": role, "content": f"Mind {_word('syst')}."}


def _says(text: str = "It is {}.") -> Record:
    return {"role": "assistant", "content": text.format(_word("asst"))}


def _thinks(message: Record, text: str = "First {}.\nThen {}.") -> Record:
    return message | {"reasoning_content": text.format(_word("reas"), _word("reas"))}


def _calls(message: Record, count: int = 1, **arguments: Any) -> Record:
    calls = [
        {
            "id": f"c{next(_numbers):08d}",
            "type": "function",
            "function": {"name": _word("call"), "arguments": {"place": f"in {_word('call')}", **arguments}},
        }
        for _ in range(count)
    ]
    return message | {"tool_calls": calls}


def _silent() -> Record:
    return {"role": "assistant", "content": ""}


def _results(message: Record) -> list[Record]:
    return [
        {
            "role": "tool",
            "content": f"It gave {_word('tool')}.",
            "tool_call_id": call["id"],
            "name": call["function"]["name"].replace("call", "tool"),
        }
        for call in message["tool_calls"]
    ]


def _tools() -> list[Record]:
    parameters = {"type": "object", "properties": {"place": {"type": "string", "description": _word("defn")}}}
    function = {"name": _word("defn"), "description": f"Looks up {_word('defn')}.", "parameters": parameters}
    return [{"type": "function", "function": function}]


def _asks(call: Record, *rest: Record, before: tuple[Record, ...] = ()) -> Record:
    return {"messages": [*before, _user(), call, *_results(call), *rest], "tools": _tools()}


def talks() -> dict[str, Record]:
    """All of them by name, with `messages` and perhaps `tools`."""
    both = _calls(_silent(), 2)
    first, second = _calls(_says("Look: {}.")), _calls(_silent())
    again, thought, nested = (
        _calls(_silent()),
        _calls(_thinks(_silent())),
        {"days": 2, "deep": {"list": [1, None, True]}},
    )
    plain: dict[str, list[Record]] = {
        "one turn": [_user(), _says()],
        "two turns": [_user(), _says(), _user(), _says()],
        "four turns": [message for _ in range(4) for message in (_user(), _says())],
        "a system": [_system(), _user(), _says()],
        "a system and two turns": [_system(), _user(), _says(), _user(), _says()],
        "a developer": [_system("developer"), _user(), _says()],
        "a later system": [_user(), _says(), _system(), _user(), _says()],
        "the assistant first": [_says(), _user(), _says()],
        "the assistant alone": [_says()],
        "the assistant behind a system": [_system(), _says(), _user(), _says()],
        "a question last": [_user(), _says(), _user()],
        "two answers": [_user(), _says(), _says()],
        "two questions": [_user(), _user(), _says()],
        "an empty answer": [_user(), _silent()],
        "an empty answer amid": [_user(), _silent(), _user(), _says()],
        "two empty answers": [_user(), _silent(), _user(), _silent()],
        "thoughts": [_user(), _thinks(_says())],
        "thoughts in two turns": [_user(), _thinks(_says()), _user(), _thinks(_says())],
        "thoughts in the first turn": [_user(), _thinks(_says()), _user(), _says()],
        "thoughts in the last turn": [_user(), _says(), _user(), _thinks(_says())],
        "thoughts and an empty answer": [_user(), _thinks(_silent())],
        "thoughts behind a system": [_system(), _user(), _thinks(_says()), _user(), _thinks(_says())],
        "thoughts of the assistant first": [_thinks(_says()), _user(), _thinks(_says())],
        "other scripts": [_user("Привет {} 你好?"), _says("Ünïcödé {} 🙂 日本語.")],
        "blanks around": [_user("  {}\n"), _says("\n  {} \n\n")],
        "many lines": [_user("{}\n\nand\nso"), _says("- a\n- {}\n\n```\nx = {{}}\n```")],
        "one word": [_user("{}"), _says("{}")],
        "markup in a question": [_user("<b>{}</b> <think> & [INST]?"), _says("{} <i>is</i> it")],
        "a role's word in an answer": [_user("assistant {}"), _says("user {} assistant")],
    }
    calling = {
        "tools and no call": {"messages": [_user(), _says()], "tools": _tools()},
        "tools behind a system": {"messages": [_system(), _user(), _says()], "tools": _tools()},
        "a call": _asks(_calls(_silent()), _says()),
        "a call last": {"messages": [_user(), _calls(_silent())], "tools": _tools()},
        "words and a call": _asks(_calls(_says("Look: {}.")), _says()),
        "parallel calls": _asks(both, _says()),
        "two calls in one turn": _asks(first, second, *_results(second), _says()),
        "a call in each turn": _asks(_calls(_silent()), _says(), _user(), again, *_results(again), _says()),
        "thoughts and a call": _asks(_calls(_thinks(_silent())), _thinks(_says())),
        "thoughts, words and a call": _asks(_calls(_thinks(_says())), _thinks(_says()), before=(_system(),)),
        "thoughts and calls in two turns": _asks(
            _calls(_thinks(_silent())), _thinks(_says()), _user(), thought, *_results(thought), _thinks(_says())
        ),
        "nested arguments": _asks(_calls(_silent(), 1, **nested), _says()),
    }
    return {**{name: {"messages": messages} for name, messages in plain.items()}, **calling}
