"""Typed input: models that reject unknown keys and suggest the nearest known name.

A misspelt key that is ignored makes a run train on the wrong data, so all input models (blends, settings) derive from
`Strict`: unknown keys are errors, values are checked and frozen. Keys that start with `_`, and `$schema`, are comments, at any
level; the JSON schema allows them too, so that Prefect's server accepts the same blends as the command line.
"""

import inspect
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from reprlib import Repr
from typing import Annotated, Any, TypeVar, Union, cast, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ByteSize,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    WithJsonSchema,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails
from tokenmill.tasks.errors import InputError, nearest
from tokenmill.tasks.renamed import renamed
from tokenmill.tasks.storage import require_place

Model = TypeVar("Model", bound="Strict")
Function = TypeVar("Function", bound=Callable[..., Any])


COMMENT = r"^(_|\$schema$)"
"""Keys that are dropped: comments, and the schema that an editor checks the file with."""


class Strict(BaseModel, frozen=True):
    """A frozen model that rejects unknown keys; comments are dropped."""

    model_config = ConfigDict(
        extra="forbid",
        allow_inf_nan=False,
        json_schema_extra={"patternProperties": {COMMENT: {}}},
    )

    @field_validator("*")
    @classmethod
    def _fits_into_64_bits(cls, value: Any) -> Any:  # noqa: ANN401 - any field
        if isinstance(value, int) and not -(2**63) <= value < 2**64:
            raise ValueError("more than 64 bits, the most that a manifest can hold; choose a smaller number")
        return value

    @model_validator(mode="before")
    @classmethod
    def _drop_comments(cls, data: Any) -> Any:  # noqa: ANN401 - unchecked input
        if not isinstance(data, Mapping):
            return data
        given = {
            key: value for key, value in cast("Mapping[Any, Any]", data).items() if not re.match(COMMENT, str(key))
        }
        for sentence in (renamed(str(key), cls.model_fields) for key in given.keys() - cls.model_fields.keys()):
            if sentence is not None:
                raise ValueError(sentence)
        return given


SIZE = r"^[0-9]*\.?[0-9]+ ?((k|K|m|M|g|G|t|T|p|P|e|E)((i|I)?(b|B))?|b|B)?$"
"""A size, as a regular expression that Python, JSON Schema and browsers understand.

Without brackets around letters: Prefect's commands print it, and rich would interpret those as markup.
"""


def _bytes(value: object) -> int:
    if isinstance(value, str) and not re.fullmatch(SIZE, value):
        raise ValueError("not a size; write 256MB, 1GiB or a number of bytes")
    size = int(TypeAdapter(ByteSize).validate_python(value))
    if size < 1:
        raise ValueError("a size must be at least 1 byte")
    return size


Size = Annotated[
    int,
    BeforeValidator(_bytes),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "pattern": SIZE, "not": {"pattern": r"^[0.]+\D*$"}},
                {"type": "integer", "minimum": 1},
            ]
        }
    ),
]
"""A number of bytes, written as 256MB (decimal), 1GiB (binary) or a plain integer."""

Seed = Annotated[int, Field(ge=0, le=2**64 - 1)]
"""A seed of 64 bits, the most that JSON encoders accept."""


SHOWN = Repr()
"""Values in messages, shortened."""
SHOWN.maxlevel, SHOWN.maxlist, SHOWN.maxdict, SHOWN.maxstring, SHOWN.maxother = 3, 4, 4, 100, 100

MOST_CHARACTERS = 200
MOST_LINES = 20

Place = Annotated[str, AfterValidator(require_place), WithJsonSchema({"type": "string", "pattern": r"\S"})]
"""A path or URI: not blank, and with `~` only for an existing home folder."""


def parse(model: type[Model], data: object, where: str) -> Model:
    """`data` as a `model`.

    Raises InputError with one line per mistake: its place, the value, and the remedy.
    """
    try:
        return model.model_validate(data)
    except ValidationError as error:
        # A union reports the same mistake once for each of its models.
        lines = [*dict.fromkeys(_sentence(model, detail) for detail in error.errors())]
        more = [f"and {len(lines) - MOST_LINES:,} more mistakes"] if len(lines) > MOST_LINES else []
        raise InputError("\n".join(f"{where}: {line}" for line in [*lines[:MOST_LINES], *more])) from error


def with_parameters_of(*kinds: type[Strict], without: Collection[str] = ()) -> Callable[[Function], Function]:
    """Let a function that takes `**chosen` declare one parameter per setting of `kinds`, for Prefect to read.

    Each has the type, bounds, default and description of the setting. A setting that only some kinds have, or that has
    different defaults, may be omitted: its default is None.
    """

    def declare(function: Function) -> Function:
        signature = inspect.signature(function)
        own = [each for each in signature.parameters.values() if each.kind is not each.VAR_KEYWORD]
        settings = [each for each in _parameters(kinds) if each[0].name not in without]
        function.__signature__ = signature.replace(parameters=[*own, *(parameter for parameter, _ in settings)])
        described = [f"    {parameter.name}: {description}" for parameter, description in settings if description]
        function.__doc__ = "\n".join([inspect.cleandoc(function.__doc__ or ""), *described])
        return function

    return declare


def _parameters(kinds: Sequence[type[Strict]]) -> Iterator[tuple[inspect.Parameter, str]]:
    """Return a parameter per setting, with its description; a kind's own settings precede inherited ones."""
    owners = [each for kind in kinds for each in kind.__mro__]
    for name in dict.fromkeys(name for owner in owners for name in inspect.get_annotations(owner)):
        fields = [kind.model_fields[name] for kind in kinds if name in kind.model_fields]
        if not fields:
            continue
        defaults = [field.get_default(call_default_factory=True) for field in fields]
        annotations = [field.rebuild_annotation() for field in fields]
        shared = len(fields) == len(kinds) and all(default == defaults[0] for default in defaults)
        default = defaults[0] if shared else None
        annotation = Union[*annotations] if shared else Union[*annotations, None]
        description = " ".join(dict.fromkeys(field.description for field in fields if field.description))
        yield (
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation),
            description,
        )


def _sentence(model: type[Strict], detail: ErrorDetails) -> str:
    # `("datasets", 0, "weight")` is datasets[0].weight.
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in detail["loc"])
    place = "".join(parts).lstrip(".")
    if detail["type"] == "extra_forbidden":
        owner = model
        for part in detail["loc"][:-1]:
            if isinstance(part, str) and part in owner.model_fields:
                owner = _inner_model(owner.model_fields[part].annotation) or owner
        return f"{place}: unknown key; {nearest(str(detail['loc'][-1]), owner.model_fields)}"
    if detail["type"] == "missing":
        return f"{place}: missing; give it a value"
    message = "make it an object" if detail["type"] == "model_type" else detail["msg"].removeprefix("Value error, ")
    given = "" if isinstance(detail["input"], Mapping) else f" (got {SHOWN.repr(detail['input'])[:MOST_CHARACTERS]})"
    return f"{place}: {message}{given}" if place else f"{message}{given}"


def _inner_model(annotation: object) -> type[Strict] | None:
    """The Strict class in an annotation such as `list[DataSource] | None`."""
    if isinstance(annotation, type) and issubclass(annotation, Strict):
        return annotation
    return next((found for argument in get_args(annotation) if (found := _inner_model(argument))), None)
