"""Transforms of rows: functions with names, applied in the order of the recipe.

A transform is written as its name or as an object with its argument: `"passthrough"`, `{"select": ["messages"]}`,
`{"sft": {"input": "question"}}`. It selects, renames or reshapes fields; the target checks the result. The input record is
never modified, and a transform without changes returns the same object, so the row's original bytes are written.
Cost: 0.5 to 3 µs per row.

Preferences become one of two forms (`preferences` lists their shapes). Ranks, `{context, completions: [{rank, completion}, …]}`, hold messages, the lower rank
preferred. Pairs, `{prompt, chosen, rejected}`, hold texts, and the prompt may be messages. Where `{chosen, rejected}` are
conversations that begin alike, the prompt ends where they first differ.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, cast

from pydantic import JsonValue
from tokenmill.tasks.blend.models import TransformSpec
from tokenmill.tasks.chat.conversation import RejectionError, rejecting, required
from tokenmill.tasks.chat.json_values import kind, listed
from tokenmill.tasks.errors import InputError, nearest
from tokenmill.tasks.sources.files import Rejected, field_path

from .placeholders import resolve_placeholders
from .preferences import one_form
from .rows import PARAMS, Record, Transform, ranked
from .tables import TableFiles, TableSource, load_table, table_sources

Maker = Callable[[JsonValue], Transform]
"""Makes a transform from its argument (None without one); raises InputError for a wrong argument."""

Paths = Mapping[str, Sequence[str]]
"""The path in the old record for each field of the new one."""

Messages = list[Any]
"""Messages that are not checked yet."""

RESOLVE = "resolve_placeholders"
SHOWN_SPEC = 120
"""Characters of a spec that an error shows."""

_MISSING: Final = object()


def tables_asked_for(specs: Sequence[TransformSpec]) -> dict[str, TableSource]:
    """Return the tables that transforms refer to, by name. Raises InputError as `parse` does."""
    sources: dict[str, TableSource] = {}

    def note(argument: JsonValue) -> Transform:
        sources.update(table_sources(argument))
        return _unchanged

    parse(specs, note)  # which makes the transforms as well, so mistakes are found in the same way
    return sources


@dataclass(frozen=True, slots=True)
class TransformList:
    """The transforms of a dataset, as the blend has them, and their tables by name."""

    specs: Sequence[TransformSpec]
    tables: Mapping[str, TableFiles]

    def functions(self) -> list[Transform]:
        """Return the transforms; a table is loaded when a row first needs it."""

        def resolver(argument: JsonValue) -> Transform:
            tables = {name: partial(load_table, self.tables[name]) for name in table_sources(argument)}
            return resolve_placeholders(tables)

        return parse(self.specs, resolver)

    def record(self) -> dict[str, Any]:
        """Plain JSON for workers, with the places of tables."""
        return {"specs": list(self.specs), "tables": {name: files.record() for name, files in self.tables.items()}}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> "TransformList":
        """Return the list that `record` wrote."""
        tables = {name: TableFiles.from_record(files) for name, files in record["tables"].items()}
        return cls(record["specs"], tables)

    def identity(self) -> list[Any]:
        """Everything that can change a byte: the transforms, with tables by content."""
        tables = {name: {"style": each.style, "contents": each.contents} for name, each in sorted(self.tables.items())}
        return [{RESOLVE: tables} if isinstance(each, dict) and RESOLVE in each else each for each in self.specs]


def parse(specs: Sequence[JsonValue], resolver: Callable[[JsonValue], Transform]) -> list[Transform]:
    """Return the transforms of `specs`, in order; `resolver` makes those that resolve placeholders.

    Raises InputError, which shows the spec, for an unknown name or a wrong argument.
    """
    found: list[Transform] = []
    for number, spec in enumerate(specs, 1):
        try:
            found.append(_parse_one(spec, {**TRANSFORMS, RESOLVE: resolver}))
        except InputError as error:
            shown = json.dumps(spec, ensure_ascii=False)
            cut = shown if len(shown) <= SHOWN_SPEC else shown[:SHOWN_SPEC] + "…"
            raise InputError(f"transform {number}, {cut}: {error}") from error
    return found


def _parse_one(spec: JsonValue, makers: Mapping[str, Maker]) -> Transform:
    if isinstance(spec, str):
        name, argument = spec, None
    elif not isinstance(spec, dict):
        raise InputError(
            f'it is {kind(spec)}; write a name, or an object of one name and its argument: {{"sft": {{}}}}'
        )
    elif len(spec) != 1:
        # The order of an object's keys isn't one to rely on.
        raise InputError(f"it has {len(spec)} keys; write one transform per object, and several as several items")
    else:
        name, argument = next(iter(spec.items()))
    if name not in makers:
        raise InputError(f"unknown transform {name!r}; {nearest(name, makers)}")
    return makers[name](argument)


def _without_argument(transform: Transform, argument: JsonValue) -> Transform:
    if argument is not None:
        raise InputError(f"it doesn't take an argument, but {kind(argument)} is given; write only the name")
    return transform


def sft(argument: JsonValue) -> Transform:
    """Question and answer, and the system prompt if its field is named: `{input, output[, system]}`."""
    return _taking(_paths(argument, {"input": "input", "output": "output", "system": None}), _take_values)


def sharegpt(argument: JsonValue) -> Transform:
    """ShareGPT's turns: `{conversations}`."""
    return _taking(_paths(argument, {"conversations": "conversations"}), _take_values)


def openai_chat(argument: JsonValue) -> Transform:
    """Return the messages and the tools, if any: `{messages[, tools]}`."""
    paths = _paths(argument, {"messages": "messages"})

    def transform(record: Record) -> Record | Rejected:
        made = _take_values(record, paths)
        return made if isinstance(made, Rejected) else _with_tools(record, made, record.get("tools"), "tools")

    return transform


def select(argument: JsonValue) -> Transform:
    """These fields and no others, in this order."""
    if not isinstance(argument, list) or not argument:
        raise InputError(
            f'its argument is {_empty_or_kind(argument)}; list the fields to keep: {{"select": ["messages"]}}'
        )
    paths = {name: _path(name) for name in map(_text, argument)}
    if deep := [name for name, path in paths.items() if len(path) > 1]:
        raise InputError(f'{deep[0]!r} is a nested field; extract it with {{"rename": {{"NEW": "{deep[0]}"}}}}')
    if len(paths) < len(argument):
        raise InputError("it names a field twice; list each once")
    return _taking(paths, _take)


def rename(argument: JsonValue) -> Transform:
    """These fields and no others, under new names: `{"new": "old"}`; dots in `old` separate nested keys."""
    if not isinstance(argument, dict) or not argument:
        found = _empty_or_kind(argument)
        raise InputError(
            f'its argument is {found}; give each new name its field: {{"rename": {{"input": "question"}}}}'
        )
    # Only flat objects are made; `set` writes nested fields.
    if dotted := [name for name in argument if len(_path(name)) > 1]:
        raise InputError(
            f"the new name {dotted[0]!r} has a dot, which would mean a nested field; choose a name without dots"
        )
    return _taking({name: _path(_text(field)) for name, field in argument.items()}, _take)


def set_fields(argument: JsonValue) -> Transform:
    """All fields, and these with a constant value: `{"path.to.field": value}`. Objects on the way are made where absent."""
    if not isinstance(argument, dict) or not argument:
        found = _empty_or_kind(argument)
        raise InputError(f'its argument is {found}; give each field its value: {{"set": {{"source": "aime"}}}}')
    paths = [(_path(name), value) for name, value in argument.items()]

    def transform(record: Record) -> Record | Rejected:
        made: Record | Rejected = record
        for path, value in paths:
            # A row that has the value keeps its bytes. repr, because True == 1 == 1.0, and those are different JSON.
            if repr(_at(made, path)) != repr(value):
                made = _with_value(made, path, value)
            if isinstance(made, Rejected):
                return made
        return made

    return transform


def drop_fields(argument: JsonValue) -> Transform:
    """All fields but these, which may be nested: `["responses_create_params.temperature"]`. A row may lack them."""
    if not isinstance(argument, list) or not argument:
        raise InputError(f'its argument is {_empty_or_kind(argument)}; list the fields to drop: {{"drop": ["score"]}}')
    paths = [_path(_text(field)) for field in argument]

    def transform(record: Record) -> Record:
        for path in paths:
            if _at(record, path) is not _MISSING:
                record = _without(record, path)
        return record

    return transform


def _with_value(record: Record, path: Sequence[str], value: JsonValue) -> Record | Rejected:
    """A copy of `record` with `value` at `path`; objects off the path are shared."""
    if len(path) == 1:
        return {**record, path[0]: value}
    inner = record.get(path[0])
    if inner is not None and not isinstance(inner, dict):
        return Rejected("bad_field", f"{path[0]} is {kind(inner)}, so {path[1]} cannot be set in it; make it an object")
    made = _with_value(inner or {}, path[1:], value)
    return made if isinstance(made, Rejected) else {**record, path[0]: made}


def _without(record: Record, path: Sequence[str]) -> Record:
    """A copy of `record` without the field at `path`, which it has."""
    if len(path) == 1:
        return {key: value for key, value in record.items() if key != path[0]}
    return {**record, path[0]: _without(record[path[0]], path[1:])}


def preference(argument: JsonValue) -> Transform:
    """Return a preferred and a rejected answer, as `"completions"` with ranks (the default) or as `"pairs"` of texts, and the tools."""
    forms: dict[str, Transform] = {"completions": to_completions, "pairs": to_pairs}
    form = "completions" if argument is None else argument
    if not isinstance(form, str):
        raise InputError(f'its argument is {kind(form)}; write "completions" or "pairs"')
    if form not in forms:
        raise InputError(f"it doesn't have the form {form!r}; {nearest(form, forms)}")

    def transform(record: Record) -> Record | Rejected:
        made = forms[form](record)
        if made is record or isinstance(made, Rejected):
            return made
        # Both answers to a prompt may call tools, so they are kept beside either form.
        return _with_tools(record, made, record.get("tools") or None, "tools")

    return transform


def _messages_of_params(record: Record) -> Record | Rejected:
    """The prompt of a row for NeMo-Gym as a conversation: `{messages[, tools]}`."""
    params = record.get(PARAMS)
    if params is None:
        return Rejected("missing_field", f"there is no {PARAMS}; its fields are {listed(record)}; filter out such rows")
    if not isinstance(params, dict):
        return Rejected("bad_field", f"{PARAMS} is {kind(params)}; make it an object")
    messages = params.get("input")
    if messages is None:
        return Rejected("missing_field", f"there is no {PARAMS}.input; its keys are {listed(params)}")
    if not isinstance(messages, list):
        return Rejected("bad_field", f"{PARAMS}.input is {kind(messages)}; make it an array of messages")
    return _with_tools(record, {"messages": messages}, params.get("tools"), f"{PARAMS}.tools")


def _unchanged(record: Record) -> Record:
    return record


TRANSFORMS: dict[str, Maker] = {
    "passthrough": partial(_without_argument, _unchanged),
    "sft": sft,
    "openai_chat": openai_chat,
    "sharegpt": sharegpt,
    "nemotron_rl": partial(_without_argument, _messages_of_params),
    "select": select,
    "rename": rename,
    "set": set_fields,
    "drop": drop_fields,
    "preference": preference,
}
"""Every transform but the one that resolves placeholders, which `parse` adds."""


def _paths(argument: JsonValue, defaults: Mapping[str, str | None]) -> Paths:
    """The fields to take: those in `argument`, else the defaults; a field with default None is optional."""
    example = json.dumps({name: name.upper() for name in defaults})
    if argument is not None and not isinstance(argument, dict):
        raise InputError(f"its argument is {kind(argument)}; name fields: {example}")
    given = argument or {}
    if unknown := [name for name in given if name not in defaults]:
        raise InputError(f"it doesn't take an argument {unknown[0]!r}; {nearest(unknown[0], defaults)}")
    # null switches an optional field off.
    fields = {**defaults, **given}
    return {name: _path(_text(field)) for name, field in fields.items() if field is not None or defaults[name]}


def _text(field: JsonValue) -> str:
    if not isinstance(field, str):
        raise InputError(f"a field's name is {kind(field)}; write it as text")
    return field


def _path(field: str) -> list[str]:
    path = field_path(field)
    if not all(path):
        raise InputError(f"{field!r} is not a field; write its name, or the path to it with dots between names")
    return path


def _empty_or_kind(argument: JsonValue) -> str:
    return "empty" if argument in ([], {}) else kind(argument)


def _taking(paths: Paths, take: Callable[[Record, Paths], Record | Rejected]) -> Transform:
    def transform(record: Record) -> Record | Rejected:
        made = take(record, paths)
        return made if isinstance(made, Rejected) else _unless_same(record, made)

    return transform


def _take(record: Record, paths: Paths) -> Record | Rejected:
    """A new record of the values at `paths`; null is allowed."""
    made: Record = {}
    for name, path in paths.items():
        value = _at(record, path)
        if value is _MISSING:
            return Rejected("missing_field", f"missing field {'.'.join(path)}; {_remedy(record)}")
        made[name] = value
    return made


def _take_values(record: Record, paths: Paths) -> Record | Rejected:
    """A new record of the values at `paths`; null is rejected."""
    made = _take(record, paths)
    if isinstance(made, Rejected):
        return made
    for name, value in made.items():
        if value is None:
            return Rejected("missing_field", f"the field {'.'.join(paths[name])} is null; {_remedy(record)}")
    return made


def _at(record: Record, path: Sequence[str]) -> Any:  # noqa: ANN401 - a row holds anything
    """The value at `path`, or _MISSING."""
    value: Any = record
    for key in path:
        if not isinstance(value, dict) or key not in value:
            return _MISSING
        value = value[key]
    return value


def _remedy(record: Record) -> str:
    return f"name one of those with a value ({listed(key for key in record if record[key] is not None)}) or filter out such rows"


def _unless_same(record: Record, made: Record) -> Record:
    """`made`, or the record itself if it has the same fields with the same values in the same order."""
    # By identity: 1, 1.0 and true are equal in Python, and different JSON.
    same = list(made) == list(record) and all(made[name] is record[name] for name in made)
    return record if same else made


def _with_tools(record: Record, made: Record, tools: object, field: str) -> Record | Rejected:
    """`made` with its tools, if any: templates announce even an empty list."""
    if tools is not None and not isinstance(tools, list):
        return Rejected("bad_tools", f"{field} is {kind(tools)}; make it an array of tools")
    return _unless_same(record, {**made, "tools": tools} if tools else made)


@rejecting
def to_completions(record: Record) -> Record:
    """Return the record as `{context, completions}`, the chosen one with rank 0; the same object if it has that form."""
    if record.get("context") is not None and record.get("completions") is not None:
        return record
    record = one_form(record)
    chosen, rejected = _answer(record, "chosen"), _answer(record, "rejected")
    # The number of messages at the start that both share; at least one of each remains, the answer.
    most = min(len(chosen), len(rejected)) - 1
    shared = next((number for number in range(most) if chosen[number] != rejected[number]), most)
    better, worse = chosen[shared:], rejected[shared:]
    for field, answer in (("chosen", better), ("rejected", worse)):
        # An answer that begins with a question is one to a different prompt.
        if (role := _role(answer[0])) in ("user", "system", "developer"):
            why = f"{field} continues with a message by {role!r} where it stops being the same as the other one"
            raise RejectionError("two_prompts", f"{why}, so they answer different prompts; filter out such rows")
    context = _context(record, chosen[:shared])
    return {"context": context, "completions": [{"rank": 0, "completion": better}, {"rank": 1, "completion": worse}]}


@rejecting
def to_pairs(record: Record) -> Record:
    """Return the record as `{prompt, chosen, rejected}`, with texts as answers; the same object if it has that form."""
    given = one_form(record)
    if given.get("prompt") is not None and all(isinstance(given.get(name), str) for name in ("chosen", "rejected")):
        return given
    ranks = required(to_completions(record))
    if not isinstance(ranks["context"], list) or not ranks["context"]:
        found = _empty_or_kind(ranks["context"])
        raise RejectionError("bad_field", f"context is {found}; make it the messages of the prompt")
    texts = [_plain_text(answer.get("completion"), "assistant") for answer in required(ranked(ranks["completions"]))]
    if None in texts:
        why = "a completion isn't a single assistant message with only text, and pairs can't express more"
        raise RejectionError("not_text", f"completions: {why}; keep the form with completions")
    prompt = _plain_text(ranks["context"], "user")
    return {"prompt": ranks["context"] if prompt is None else prompt, "chosen": texts[0], "rejected": texts[1]}


def _answer(record: Record, field: str) -> Messages:
    """Return the messages of an answer, perhaps after the prompt's."""
    found = record.get(field)
    # Parquet has a null for every field that the row lacks.
    if found is None:
        names = listed(key for key in record if record[key] is not None)
        raise RejectionError("missing_field", f"there is no {field}; name it with rename, the row has {names}")
    if isinstance(found, str):
        return [{"role": "assistant", "content": found}]
    if not isinstance(found, list) or not found:
        raise RejectionError("bad_field", f"{field} is {_empty_or_kind(found)}; make it text or an array of messages")
    return found


def _context(record: Record, shared: Messages) -> Messages:
    """The messages before both answers, from the prompt and from the beginning of the answers."""
    prompt = record.get("prompt")
    if prompt is not None and not isinstance(prompt, str | list):
        raise RejectionError("bad_field", f"prompt is {kind(prompt)}; make it text or an array of messages")
    asked: Messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt or []
    if not asked and not shared:
        nothing = "prompt is missing, and chosen and rejected don't begin with the same messages"
        raise RejectionError("missing_field", f"{nothing}; name the prompt with rename")
    # The answers repeat the prompt, or its end; else they may begin with the same answer to it.
    if _holds(shared, asked):
        return shared
    if _holds(asked[-len(shared) :], shared):
        return asked
    if _role(shared[0]) == "assistant":
        return [*asked, *shared]
    both = "prompt is not among the messages that chosen and rejected begin with, so the question is unknown"
    raise RejectionError("two_prompts", f"{both}; remove prompt with select")


def _holds(messages: Messages, part: Messages) -> bool:
    """Whether `messages` contains `part` as consecutive messages."""
    return any(messages[start : start + len(part)] == part for start in range(len(messages) - len(part) + 1))


def _plain_text(messages: object, role: str) -> str | None:
    """The text of the only message, if it is by `role` and contains only text."""
    if not isinstance(messages, list) or len(messages) != 1 or _role(messages[0]) != role:
        return None
    # A name or a weight would be lost in a text.
    said = {key for key, value in messages[0].items() if value is not None}
    content = messages[0].get("content")
    return content if said == {"role", "content"} and isinstance(content, str) else None


def _role(message: object) -> object:
    return cast("Record", message).get("role") if isinstance(message, dict) else None
