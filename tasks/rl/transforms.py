"""From the rows of a source to the rows of a trainer: small functions with names, chained in the order of the recipe.

A transform takes fields, renames them or brings them into the one form that a reader knows; it judges no more than it
needs to do so, because the checks of the target come after it (`tasks.rl.targets`). It is asked for by name or, with an
argument, as an object with one key: `"passthrough"`, `{"select": ["messages"]}`, `{"sft": {"input": "question"}}`.

The record that comes in is never changed. A transform that has nothing to do gives that very object back, and a row
that passes all of them so is written as the bytes it was read as, whatever JSON would make of its numbers. The price of
knowing is one comparison per field: 0.5 to 1.5 µs a row, all in all.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from pydantic import JsonValue
from tokenmill.tasks.chat.conversation import Rejected
from tokenmill.tasks.chat.json_values import kind, listed
from tokenmill.tasks.errors import InputError, nearest
from tokenmill.tasks.sources.json_rows import field_path

from .preferences import to_completions, to_pairs
from .record import Record, Transform
from .targets import PARAMS

Maker = Callable[[JsonValue], Transform]
"""Makes a transform of its argument, None where it is asked for by name alone; InputError for a wrong argument."""

Paths = Mapping[str, Sequence[str]]
"""What a field of the new record is called, and the keys that lead to its value in the old one."""

RESOLVE = "resolve_placeholders"

SHOWN_SPEC = 120
"""How much of a spec an error repeats, in characters."""

_MISSING: Final = object()


def parse(specs: Sequence[JsonValue], resolver: Callable[[JsonValue], Transform]) -> list[Transform]:
    """The transforms that `specs` ask for, in their order; `resolver` makes those that resolve placeholders.

    Raises InputError, which shows the spec, for anything that is not a known name with an argument it takes.
    """
    makers = {**TRANSFORMS, RESOLVE: resolver}
    return [_parse_one(spec, number, makers) for number, spec in enumerate(specs, 1)]


def _parse_one(spec: JsonValue, number: int, makers: Mapping[str, Maker]) -> Transform:
    try:
        name, argument = _name_and_argument(spec)
        return _maker(name, makers)(argument)
    except InputError as error:
        shown = json.dumps(spec, ensure_ascii=False)
        cut = shown if len(shown) <= SHOWN_SPEC else shown[:SHOWN_SPEC] + "…"
        raise InputError(f"transform {number}, {cut}: {error}") from error


def _name_and_argument(spec: JsonValue) -> tuple[str, JsonValue]:
    if isinstance(spec, str):
        return spec, None
    if not isinstance(spec, dict):
        raise InputError(
            f'it is {kind(spec)}; write a name, or an object of one name and its argument: {{"sft": {{}}}}'
        )
    if len(spec) != 1:
        raise InputError(f"it has {len(spec)} keys; write one transform per object, and several as several items")
    return next(iter(spec.items()))


def _maker(name: str, makers: Mapping[str, Maker]) -> Maker:
    if name not in makers:
        raise InputError(f"there is no transform {name!r}; {nearest(name, makers)}")
    return makers[name]


def passthrough(argument: JsonValue) -> Transform:
    """Rows as they are."""
    if argument is not None:
        raise InputError(f"it takes no argument, and {kind(argument)} is given; write the name alone")
    return _unchanged


def sft(argument: JsonValue) -> Transform:
    """Question and answer, and the system prompt where its field is named: `{input, output[, system]}`."""
    return _taking_values(_paths(argument, {"input": "input", "output": "output", "system": None}))


def sharegpt(argument: JsonValue) -> Transform:
    """ShareGPT's turns: `{conversations}`."""
    return _taking_values(_paths(argument, {"conversations": "conversations"}))


def openai_chat(argument: JsonValue) -> Transform:
    """The messages, and the tools of a row that has any: `{messages[, tools]}`."""
    paths = _paths(argument, {"messages": "messages"})

    def transform(record: Record) -> Record | Rejected:
        made = _take_values(record, paths)
        return made if isinstance(made, Rejected) else _with_tools(record, made, record.get("tools"), "tools")

    return transform


def nemotron_rl(argument: JsonValue) -> Transform:
    """The prompt of a row for NeMo-Gym as a conversation: `{messages[, tools]}`."""
    if argument is not None:
        raise InputError(f"it takes no argument, and {kind(argument)} is given; write the name alone")
    return _messages_of_params


def select(argument: JsonValue) -> Transform:
    """These fields and no others, in this order."""
    if not isinstance(argument, list) or not argument:
        raise InputError(
            f'its argument is {_empty_or_kind(argument)}; list the fields to keep: {{"select": ["messages"]}}'
        )
    paths = {name: _path(name) for name in map(_text, argument)}
    if deep := [name for name, path in paths.items() if len(path) > 1]:
        raise InputError(
            f'{deep[0]!r} lies within another field; take it out with {{"rename": {{"NEW": "{deep[0]}"}}}}'
        )
    if len(paths) < len(argument):
        raise InputError("it names a field twice; list each once")
    return _taking(paths)


def rename(argument: JsonValue) -> Transform:
    """These fields and no others, under new names: `{"new": "old"}`, where `old` may lead inward with dots."""
    if not isinstance(argument, dict) or not argument:
        found = _empty_or_kind(argument)
        raise InputError(
            f'its argument is {found}; give each new name its field: {{"rename": {{"input": "question"}}}}'
        )
    if dotted := [name for name in argument if len(_path(name)) > 1]:
        raise InputError(f"the new name {dotted[0]!r} has a dot, which would lead inward; give it a name without")
    return _taking({name: _path(_text(field)) for name, field in argument.items()})


def preference(argument: JsonValue) -> Transform:
    """A better and a worse answer, as `"completions"` with ranks (the default) or as `"pairs"` of texts."""
    forms: dict[str, Transform] = {"completions": to_completions, "pairs": to_pairs}
    form = "completions" if argument is None else argument
    if not isinstance(form, str):
        raise InputError(f'its argument is {kind(form)}; write "completions" or "pairs"')
    if form not in forms:
        raise InputError(f"it has no form {form!r}; {nearest(form, forms)}")
    return forms[form]


TRANSFORMS: dict[str, Maker] = {
    "passthrough": passthrough,
    "sft": sft,
    "openai_chat": openai_chat,
    "sharegpt": sharegpt,
    "nemotron_rl": nemotron_rl,
    "select": select,
    "rename": rename,
    "preference": preference,
}
"""Every transform that needs nothing beside the row. `parse` adds the one that resolves placeholders."""


def _paths(argument: JsonValue, defaults: Mapping[str, str | None]) -> Paths:
    """The fields to take: those that `argument` names, else the defaults; a default of None is a field not taken."""
    example = json.dumps({name: name.upper() for name in defaults})
    if argument is not None and not isinstance(argument, dict):
        raise InputError(f"its argument is {kind(argument)}; name fields: {example}")
    given = argument or {}
    if unknown := [name for name in given if name not in defaults]:
        raise InputError(f"it takes no argument {unknown[0]!r}; {nearest(unknown[0], defaults)}")
    fields = {**defaults, **given}
    return {name: _path(_text(field)) for name, field in fields.items() if field is not None or defaults[name]}


def _text(field: JsonValue) -> str:
    if not isinstance(field, str):
        raise InputError(f"a field's name is {kind(field)}; write it as text")
    return field


def _path(field: str) -> list[str]:
    path = field_path(field)
    if not all(path):
        raise InputError(f"{field!r} names no field; write its name, or the names on the way to it with dots between")
    return path


def _empty_or_kind(argument: JsonValue) -> str:
    return "empty" if argument in ([], {}) else kind(argument)


def _unchanged(record: Record) -> Record:
    return record


def _taking(paths: Paths) -> Transform:
    def transform(record: Record) -> Record | Rejected:
        made = _take(record, paths)
        return made if isinstance(made, Rejected) else _unless_same(record, made)

    return transform


def _taking_values(paths: Paths) -> Transform:
    def transform(record: Record) -> Record | Rejected:
        made = _take_values(record, paths)
        return made if isinstance(made, Rejected) else _unless_same(record, made)

    return transform


def _take(record: Record, paths: Paths) -> Record | Rejected:
    """A new record of the values at `paths`, which may be null."""
    made: Record = {}
    for name, path in paths.items():
        value = _at(record, path)
        if value is _MISSING:
            return Rejected("missing_field", f"there is no field {'.'.join(path)}; {_remedy(record)}")
        made[name] = value
    return made


def _take_values(record: Record, paths: Paths) -> Record | Rejected:
    """A new record of the values at `paths`, none of them null."""
    made = _take(record, paths)
    if isinstance(made, Rejected):
        return made
    for name, value in made.items():
        if value is None:
            return Rejected("missing_field", f"the field {'.'.join(paths[name])} is null; {_remedy(record)}")
    return made


def _at(record: Record, path: Sequence[str]) -> Any:  # noqa: ANN401 - a row holds anything
    """What stands at `path`, or _MISSING."""
    value: Any = record
    for key in path:
        if not isinstance(value, dict) or key not in value:
            return _MISSING
        value = value[key]
    return value


def _remedy(record: Record) -> str:
    return f"name one of those with a value ({listed(key for key in record if record[key] is not None)}) or filter out such rows"


def _unless_same(record: Record, made: Record) -> Record:
    """`made`, or the record itself where it has the same fields in the same order with the same values."""
    same = list(made) == list(record) and all(made[name] is record[name] for name in made)
    return record if same else made


def _with_tools(record: Record, made: Record, tools: object, field: str) -> Record | Rejected:
    """`made` with its tools, if there are any: templates announce even an empty list."""
    if tools is not None and not isinstance(tools, list):
        return Rejected("bad_tools", f"{field} is {kind(tools)}; make it an array of tools")
    return _unless_same(record, {**made, "tools": tools} if tools else made)


def _messages_of_params(record: Record) -> Record | Rejected:
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
