"""The transforms of one data set, in order, with the tables that its placeholders point into.

It travels to workers as plain JSON, where files lie and all; what can change a byte of a shard goes into its identity,
and there tables are named by what they contain.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from tokenmill.tasks.blend.models import TransformSpec

from .placeholders import resolve_placeholders
from .record import Transform
from .tables import TableFiles, TableSource, load_table, table_sources
from .transforms import RESOLVE, parse, passthrough


def tables_asked_for(specs: Sequence[TransformSpec]) -> dict[str, TableSource]:
    """The tables that some transforms look rows up in, by the names in the rows.

    Raises InputError for what is no transform.
    """
    sources: dict[str, TableSource] = {}

    def note(argument: Any) -> Transform:  # noqa: ANN401 - JSON
        sources.update(table_sources(argument))
        return passthrough(None)

    parse(specs, note)
    return sources


@dataclass(frozen=True, slots=True)
class Chain:
    """The transforms of a data set as the blend has them, and the tables that they need, by the names in the rows."""

    specs: Sequence[TransformSpec]
    tables: Mapping[str, TableFiles]

    def functions(self) -> list[Transform]:
        """The functions; tables are loaded when a row first asks for one."""
        return parse(self.specs, self._resolver)

    def _resolver(self, argument: Any) -> Transform:  # noqa: ANN401 - JSON
        return resolve_placeholders({name: partial(load_table, self.tables[name]) for name in table_sources(argument)})

    def record(self) -> dict[str, Any]:
        """All of it as plain JSON, for workers."""
        return {"specs": list(self.specs), "tables": {name: files.record() for name, files in self.tables.items()}}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> "Chain":
        """What `record` made."""
        tables = {name: TableFiles.from_record(files) for name, files in record["tables"].items()}
        return cls(record["specs"], tables)

    def identity(self) -> list[Any]:
        """What can change a byte: the transforms, with tables by content instead of by place."""
        return [{RESOLVE: self._tables_by_content()} if _resolves(spec) else spec for spec in self.specs]

    def _tables_by_content(self) -> dict[str, Any]:
        return {name: {"style": files.style, "contents": files.contents} for name, files in sorted(self.tables.items())}


def _resolves(spec: TransformSpec) -> bool:
    return isinstance(spec, dict) and RESOLVE in spec
