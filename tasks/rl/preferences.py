"""Two answers to one prompt, of which one is preferred: the forms that this is published in, and how they relate.

* ranks: `{context, completions: [{rank, completion}, …]}`, messages everywhere, the lower rank preferred. It can say
  everything: several turns, tool calls.
* pairs: `{prompt, chosen, rejected}` of texts, which can say one assistant message; the prompt may be messages.
* conversations: `{chosen, rejected}` as two whole conversations that begin alike, with or without the prompt once more.
  Nothing says where the prompt ends but that they begin to differ there.

The first two are what trainers read; the third is what most public data sets have. Nothing is left out on the way: a
prompt that is not the one which the conversations begin with, or an answer that is more than text, rejects the row.
Some 3 µs a row.
"""

from typing import Any, cast

from tokenmill.tasks.chat.conversation import Rejected
from tokenmill.tasks.chat.json_values import kind, listed

from .record import Record

Messages = list[Any]
"""Messages that nobody has looked at yet: the checks of the target do."""


def to_completions(record: Record) -> Record | Rejected:
    """The record as `{context, completions}`, rank 0 the chosen one; the same object where it is that already."""
    if record.get("context") is not None and record.get("completions") is not None:
        return record
    chosen, rejected = _answer(record, "chosen"), _answer(record, "rejected")
    if isinstance(chosen, Rejected):
        return chosen
    if isinstance(rejected, Rejected):
        return rejected
    shared = _shared(chosen, rejected)
    better, worse = chosen[shared:], rejected[shared:]
    if question := _asks("chosen", better) or _asks("rejected", worse):
        return question
    context = _context(record, chosen[:shared])
    if isinstance(context, Rejected):
        return context
    return {"context": context, "completions": [{"rank": 0, "completion": better}, {"rank": 1, "completion": worse}]}


def to_pairs(record: Record) -> Record | Rejected:
    """The record as `{prompt, chosen, rejected}`, both answers texts; the same object where it is that already."""
    if record.get("prompt") is not None and all(isinstance(record.get(name), str) for name in ("chosen", "rejected")):
        return record
    ranks = to_completions(record)
    if isinstance(ranks, Rejected):
        return ranks
    if not isinstance(ranks["context"], list) or not ranks["context"]:
        return Rejected("bad_field", f"context is {_emptiness(ranks['context'])}; make it the messages of the prompt")
    answers = ranked(ranks["completions"])
    if isinstance(answers, Rejected):
        return answers
    texts = [_text_alone(answer.get("completion")) for answer in answers]
    if None in texts:
        why = "a completion is not a single assistant message with nothing but text, and pairs can say no more"
        return Rejected("not_text", f"completions: {why}; keep the form with completions")
    prompt = _plain_text(ranks["context"], "user")
    return {"prompt": ranks["context"] if prompt is None else prompt, "chosen": texts[0], "rejected": texts[1]}


def ranked(completions: object) -> tuple[Record, Record] | Rejected:
    """The preferred one of two completions, and the other."""
    if not isinstance(completions, list):
        return Rejected("bad_field", f"completions is {kind(completions)}; make it an array of two, each with a rank")
    if len(completions) != 2:  # noqa: PLR2004 - a pair
        count = f"completions has {len(completions)}, and preferences are trained on exactly two"
        return Rejected("not_two_completions", f"{count}; make a row of every pair")
    for number, each in enumerate(completions, 1):
        if not isinstance(each, dict):
            return Rejected("bad_field", f"completion {number} of 2 is {kind(each)}; make it {{rank, completion}}")
        if type(each.get("rank")) is not int:  # booleans count as int, and are no rank
            found = kind(each.get("rank"))
            return Rejected(
                "bad_rank", f"the rank of completion {number} is {found}; make it a whole number, 0 for the better"
            )
    first, second = cast("tuple[Record, Record]", completions)
    if first["rank"] == second["rank"]:
        return Rejected(
            "tied_ranks", f"both completions have rank {first['rank']}; filter out ties, nothing can be learned of them"
        )
    return (first, second) if first["rank"] < second["rank"] else (second, first)


def _answer(record: Record, field: str) -> Messages | Rejected:
    """The messages of an answer, which may begin with those of the prompt."""
    found = record.get(field)
    if found is None:
        names = listed(key for key in record if record[key] is not None)
        return Rejected("missing_field", f"there is no {field}; name it with rename, the row has {names}")
    if isinstance(found, str):
        return [{"role": "assistant", "content": found}]
    if not isinstance(found, list) or not found:
        return Rejected("bad_field", f"{field} is {_emptiness(found)}; make it text or an array of messages")
    return found


def _shared(chosen: Messages, rejected: Messages) -> int:
    """How many messages both begin with, at least one being left of each."""
    most = min(len(chosen), len(rejected)) - 1
    return next((number for number in range(most) if chosen[number] != rejected[number]), most)


def _context(record: Record, shared: Messages) -> Messages | Rejected:
    """The messages before both answers, of the prompt and of what the answers begin with."""
    prompt = record.get("prompt")
    if prompt is not None and not isinstance(prompt, str | list):
        return Rejected("bad_field", f"prompt is {kind(prompt)}; make it text or an array of messages")
    asked: Messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt or []
    if not asked and not shared:
        nothing = "there is no prompt, and chosen and rejected do not begin with the same messages"
        return Rejected("missing_field", f"{nothing}; name the prompt with rename")
    if _holds(shared, asked):
        return shared
    if _holds(asked[-len(shared) :], shared):
        return asked
    if _role(shared[0]) == "assistant":
        return [*asked, *shared]
    both = "prompt is not among the messages that chosen and rejected begin with, so what was asked is not known"
    return Rejected("two_prompts", f"{both}; leave prompt out with select")


def _asks(field: str, answer: Messages) -> Rejected | None:
    """Why an answer is none, if it begins with a question."""
    if _role(answer[0]) not in ("user", "system", "developer"):
        return None
    why = f"{field} goes on with a message by {_role(answer[0])!r} where it stops being the same as the other one"
    return Rejected("two_prompts", f"{why}, so they answer different prompts; filter out such rows")


def _holds(messages: Messages, part: Messages) -> bool:
    """Whether `part` stands in `messages`, in a row."""
    return any(messages[start : start + len(part)] == part for start in range(len(messages) - len(part) + 1))


def _text_alone(completion: object) -> str | None:
    return _plain_text(completion, "assistant") if isinstance(completion, list) else None


def _plain_text(messages: Messages, role: str) -> str | None:
    """The text of the only message, if it is by `role` and says nothing else."""
    if len(messages) != 1 or _role(messages[0]) != role:
        return None
    said = {key for key, value in messages[0].items() if value is not None}
    content = messages[0].get("content")
    return content if said == {"role", "content"} and isinstance(content, str) else None


def _role(message: object) -> object:
    return cast("Record", message).get("role") if isinstance(message, dict) else None


def _emptiness(value: object) -> str:
    return "empty" if value == [] else kind(value)
