"""Typed input from people: models that refuse what they don't know, and say which name was probably meant.

A misspelt key that is silently ignored is how a run trains on the wrong thing, so every model that a person writes
(blends, settings) derives from `Strict`: unknown keys are errors with the nearest known name, values are checked and
frozen. Keys that start with `_` are comments, at any level; the JSON schema allows them too, so that Prefect's server
accepts the same blend that the command line does.
"""

from collections.abc import Mapping
from typing import Annotated, Any, TypeVar, cast, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ByteSize,
    ConfigDict,
    TypeAdapter,
    ValidationError,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import ErrorDetails

from tasks.errors import InputError, nearest
from tasks.storage import require_place

Model = TypeVar("Model", bound="Strict")


class Strict(BaseModel, frozen=True):
    """A frozen model without unknown keys; keys that start with `_` are comments and are dropped."""

    model_config = ConfigDict(
        extra="forbid",
        allow_inf_nan=False,
        json_schema_extra={"patternProperties": {"^_": {}}},
    )

    @model_validator(mode="before")
    @classmethod
    def _drop_comments(cls, data: Any) -> Any:  # noqa: ANN401 - pydantic hands over whatever was written
        if not isinstance(data, Mapping):
            return data
        return {key: value for key, value in cast("Mapping[Any, Any]", data).items() if not str(key).startswith("_")}


def _bytes(value: object) -> int:
    size = int(TypeAdapter(ByteSize).validate_python(value))
    if size < 1:
        raise ValueError("a size must be at least 1 byte")
    return size


Size = Annotated[
    int, BeforeValidator(_bytes), WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "integer", "minimum": 1}]})
]
"""A number of bytes, written as 256MB (decimal), 1GiB (binary) or a plain integer."""


Place = Annotated[str, AfterValidator(require_place), WithJsonSchema({"type": "string", "pattern": r"\S"})]
"""A path or URI: never blank, and `~` only where it stands for a home folder."""


def parse(model: type[Model], data: object, where: str) -> Model:
    """`data` as a `model`.

    Raises InputError with one line per mistake: where it stands, what was given, and the remedy.
    """
    try:
        return model.model_validate(data)
    except ValidationError as error:
        lines = [_sentence(model, detail) for detail in error.errors()]
        raise InputError("\n".join(f"{where}: {line}" for line in dict.fromkeys(lines))) from error


def _sentence(model: type[Strict], detail: ErrorDetails) -> str:
    place = _dotted(detail["loc"])
    if detail["type"] == "extra_forbidden":
        owner = _owner(model, detail["loc"][:-1])
        return f"{place}: unknown key; {nearest(str(detail['loc'][-1]), owner.model_fields)}"
    if detail["type"] == "missing":
        return f"{place}: missing; give it a value"
    message = detail["msg"].removeprefix("Value error, ")
    if isinstance(detail["input"], Mapping):
        return f"{place}: {message}" if place else message
    return f"{place}: {message} (got {detail['input']!r})"


def _dotted(location: tuple[int | str, ...]) -> str:
    """`("datasets", 0, "weight")` as `datasets[0].weight`."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location).lstrip(".")


def _owner(model: type[Strict], location: tuple[int | str, ...]) -> type[Strict]:
    """The model that stands at `location` inside `model`."""
    for part in location:
        if isinstance(part, str) and part in model.model_fields:
            model = _inner_model(model.model_fields[part].annotation) or model
    return model


def _inner_model(annotation: object) -> type[Strict] | None:
    """The Strict class in an annotation such as `list[DataSource] | None`."""
    if isinstance(annotation, type) and issubclass(annotation, Strict):
        return annotation
    return next((found for argument in get_args(annotation) if (found := _inner_model(argument))), None)
