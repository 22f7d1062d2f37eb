"""Artifact records, which pass from command to command: one line of JSON that names an output and its inputs.

    {"pretrain": {"path": "/data/prepared", "type": "pretrain", "made_from": [{"type": "data", "path": "…"}], …}}

A command whose stdin is piped reads the record of the previous command, checks its type, and takes the folder from it. Further
fields are for users and other programs.
"""

import re
from collections.abc import Collection
from typing import Any

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from tokenmill.tasks.errors import InputError
from tokenmill.tasks.storage import absolute
from xxhash import xxh3_64_hexdigest


class MadeFrom(BaseModel, frozen=True):
    """An input of an artifact; `digest` identifies its version."""

    model_config = ConfigDict(extra="allow")

    type: str = Field(min_length=1)
    path: str = Field(min_length=1)
    digest: str | None = None


class Artifact(BaseModel, frozen=True):
    """The output of a command: a folder or file, its type, its inputs, and a `digest` of its content."""

    model_config = ConfigDict(extra="allow")

    path: str = Field(min_length=1)
    type: str = Field(min_length=1)
    digest: str | None = None
    made_from: list[MadeFrom] = []


def read_artifact(data: bytes, kinds: Collection[str], reader: str) -> Artifact:
    """Return the artifact in a line of JSON for the command `reader`. Raises InputError unless it is one of `kinds` (any if empty)."""
    try:
        records: Any = orjson.loads(data)
        (record,) = records.values()
        artifact = Artifact.model_validate(record)
    except (orjson.JSONDecodeError, AttributeError, ValueError, TypeError, ValidationError) as error:
        raise InputError(
            f"{reader}: missing folder, and stdin doesn't contain an artifact record; name the folder, or pipe a command's output into this one"
        ) from error
    if kinds and artifact.type not in kinds:
        raise InputError(
            f"{reader}: needs an artifact of type {' or '.join(sorted(kinds))}, but stdin holds {artifact.type!r}"
        )
    return artifact


def artifact_key(kind: str, output_dir: str) -> str:
    """Return the key of a Prefect artifact: kind, names of the output folder and its parent, and a hash of the whole path.

    Unique per output folder, because Prefect groups the versions of a key. Lowercase letters, digits and dashes.
    """
    place = absolute(output_dir)
    name = re.sub("[^a-z0-9]+", "-", "/".join(place.split("/")[-2:]).lower())[-40:].strip("-")
    return "-".join(filter(None, [kind, name, xxh3_64_hexdigest(place.encode())[:8]]))
