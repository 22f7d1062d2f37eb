"""Artifacts as they pass from command to command: one line of JSON that names what was made, and from what.

    {"pretrain": {"path": "/data/prepared", "type": "pretrain", "made_from": [{"type": "data", "path": "…"}], …}}

A command whose input is piped reads the record of the one before it, checks that it is one and of a kind that it can use,
and goes on with the folder that it names. What else a record says is for people and programs to read.
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
    """Something that an artifact was made from; `digest` says which version of it."""

    model_config = ConfigDict(extra="allow")

    type: str = Field(min_length=1)
    path: str = Field(min_length=1)
    digest: str | None = None


class Artifact(BaseModel, frozen=True):
    """What a command made: a folder or file, of a type, from others; `digest` is of what is in it."""

    model_config = ConfigDict(extra="allow")

    path: str = Field(min_length=1)
    type: str = Field(min_length=1)
    digest: str | None = None
    made_from: list[MadeFrom] = []


def read_artifact(data: bytes, kinds: Collection[str], reader: str) -> Artifact:
    """The artifact in a line of JSON; `reader` is the command that wants one of `kinds`, of any kind if there are none.

    Raises InputError for anything else.
    """
    try:
        records: Any = orjson.loads(data)
        (record,) = records.values()
        artifact = Artifact.model_validate(record)
    except (orjson.JSONDecodeError, AttributeError, ValueError, TypeError, ValidationError) as error:
        raise InputError(
            f"{reader}: stdin holds no artifact record; name the folder, or pipe a command into this one"
        ) from error
    if kinds and artifact.type not in kinds:
        raise InputError(
            f"{reader}: stdin holds an artifact of type {artifact.type!r}, and this needs {' or '.join(sorted(kinds))}"
        )
    return artifact


def artifact_key(kind: str, output_dir: str) -> str:
    """The key of an artifact in Prefect: kind, name of the output folder and the one above, and a hash of the whole place.

    Prefect keeps the versions of a key together, so outputs must not share one. A key has lowercase letters, digits and dashes.
    """
    place = absolute(output_dir)
    name = re.sub("[^a-z0-9]+", "-", "/".join(place.split("/")[-2:]).lower())[-40:].strip("-")
    return "-".join(filter(None, [kind, name, xxh3_64_hexdigest(place.encode())[:8]]))
