"""Settings, commands and options that have a new name: the old one is an error that names the new one, and outputs with old names remain readable.

A rename never changes a shard's key, so recipes keep the old name for hashed settings.
"""

from collections.abc import Collection
from typing import Any, cast

RENAMED = {
    "bad_row_ceiling": "max_bad_row_fraction",
    "shrink_ceiling": "max_shrink_fraction",
    "source_identity": "change_detection",
    "oversize": "on_oversize",
    "thoughts": "keep_reasoning",
    "rules_off": "disabled_rules",
    "selection.least_structures": "selection.min_distinct_behaviors",
    "selection.least_calls": "selection.min_tool_call_fraction",
    "curriculum.above": "curriculum.drop_unsolved_at",
    "curriculum.below": "curriculum.drop_solved_at",
    "curriculum.span": "curriculum.pass_rate_range",
    "fim.no_prefix": "fim.skip_prefix",
    "what": "mode",
    "keep": "keep_versions",
}
"""The old name of a setting or a flow parameter, and its new one."""

COMMANDS = {"batch": "step"}
"""The old name of a command, and its new one."""

OPTIONS = {"--scheduler": "--cluster", "--rows": "--limit", "--keep": "--keep-versions"}
"""The old name of an option, and its new one."""

NEW_VALUES = {"change_detection": {"content": "hash", "stat": "mtime"}}
"""New value names, by setting."""

LEAVES = {old.rpartition(".")[2]: new.rpartition(".")[2] for old, new in RENAMED.items()}


def renamed(name: str, known: Collection[str]) -> str | None:
    """Return a sentence with the new name of a setting, if it has one that is known."""
    new = LEAVES.get(name)
    if new is None or new not in known:
        return None
    values = ", ".join(f"{value} is now {now}" for value, now in NEW_VALUES.get(new, {}).items())
    return f"{name!r} has a new name, {new!r}{values and f' ({values})'}"


def with_new_names(written: object, group: str = "") -> Any:  # noqa: ANN401 - JSON of any shape
    """Return settings or a blend from an earlier version with the new names. `group` is the name of the group around it."""
    if isinstance(written, list):
        return [with_new_names(each, group) for each in cast("list[object]", written)]
    if not isinstance(written, dict):
        return written
    found: dict[str, Any] = {}
    for name, value in cast("dict[str, Any]", written).items():
        new = RENAMED.get(f"{group}{name}", f"{group}{name}").removeprefix(group)
        known = NEW_VALUES.get(new, {})
        found[new] = known.get(value, value) if known else with_new_names(value, f"{name}.")
    return found
