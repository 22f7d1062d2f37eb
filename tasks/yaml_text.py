"""YAML that a person wrote: settings, pools, cluster profiles.

A key that is written twice is rejected: one of two values would be ignored, and without its dash a pool would overwrite the one
before. A time such as `walltime: 12:30:00` is text, not the 45,000 that YAML 1.1 makes of it.
"""

from typing import Any, cast

import yaml
from tokenmill.tasks.errors import InputError
from yaml.composer import ComposerError

REFUSALS = (yaml.YAMLError, ValueError, KeyError, AttributeError, RecursionError)
"""What PyYAML raises; the last four for values such as 2024-02-31, 0x_, `!!bool x` and `!!timestamp x`, and for deep nesting."""

TEXT, NUMBERS = "tag:yaml.org,2002:str", {"tag:yaml.org,2002:int", "tag:yaml.org,2002:float"}


class _Loader(yaml.SafeLoader):
    def resolve(self, kind: type[yaml.Node], value: Any, implicit: Any) -> Any:  # noqa: ANN401 - those of yaml
        tag = super().resolve(kind, value, implicit)
        return TEXT if tag in NUMBERS and ":" in value else tag

    def compose_mapping_node(self, anchor: dict[Any, yaml.Node]) -> yaml.MappingNode:
        """See yaml. Raises ComposerError with the line of the second key."""
        node = super().compose_mapping_node(anchor)
        seen: set[tuple[str, str]] = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if (key.tag, key.value) in seen:
                raise ComposerError(problem=f"the key {key.value!r} is duplicated", problem_mark=key.start_mark)
            seen.add((key.tag, key.value))
        return node


def read_yaml(content: str | bytes, refusal: str) -> Any:  # noqa: ANN401 - anything YAML holds
    """Return the one document in a text. Raises InputError that begins with `refusal`."""
    try:
        return yaml.load(content, _Loader)  # noqa: S506 - the loader is a safe one
    except REFUSALS as error:
        raise InputError(f"{refusal}: {' '.join(str(error).split())}") from error


def read_mapping(content: str | bytes, where: str, of: str = "settings") -> dict[str, Any]:
    """Return a mapping, written at `where`. Raises InputError."""
    return require_mapping(read_yaml(content, f"{where}: not valid YAML"), where, of)


def require_mapping(found: object, where: str, of: str = "settings") -> dict[str, Any]:
    """`found`, as read at `where`. Raises InputError unless it is a mapping."""
    if not isinstance(found, dict):
        raise InputError(f"{where}: must hold a mapping of {of}")
    return cast("dict[str, Any]", found)
