"""Report on the diversity of behaviors, before a GPU embeds them.

If nearly all conversations do the same, their traces fall on a few points, and choosing among them by distance is useless. The
survey counts distinct traces, with and without the plan, tool sequences and key sets, and checks limits. By default at least 1
% of structures must be distinct; conversations without tools have only about a dozen structures and fail, as intended.

Distinct values are counted exactly, at about 300 bytes each. Their share falls as rows are added, so a survey covers a sample
of about 200,000 rows (`candidates.sampled`). A survey is recorded as a tree of counts, so surveys of several shards can be summed.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import chain
from typing import Any

from tokenmill.tasks.harmony.grammar import Fault
from tokenmill.tasks.harmony.inventory import Counts
from tokenmill.tasks.harmony.message import HarmonyMessage
from tokenmill.tasks.kit.parts import Table, table_lines
from xxhash import xxh3_64_intdigest

from .signature import Behaviour, behaviour_of

PERCENTILES = (50, 90, 99)
MOST_LISTED = 20


@dataclass(frozen=True, slots=True)
class Limits:
    """The minimum share of distinct structures, and of rows with tool calls, among all rows."""

    structures: float = 0.01
    calls: float = 0.0


@dataclass(slots=True)
class Survey:
    """Counts over conversations. `empty` counts invalid Harmony; `traces` and `structures` are keyed by 64-bit hashes,
    `calls` and `words` by numbers per row. `keysets` and `authors` count results, the others rows.
    """

    rows: int = 0
    empty: int = 0
    traces: Counter[int] = field(default_factory=Counter[int])
    structures: Counter[int] = field(default_factory=Counter[int])
    tools: Counter[str] = field(default_factory=Counter[str])
    answers: Counter[str] = field(default_factory=Counter[str])
    calls: Counter[int] = field(default_factory=Counter[int])
    words: Counter[int] = field(default_factory=Counter[int])
    keysets: Counter[str] = field(default_factory=Counter[str])
    authors: Counter[str] = field(default_factory=Counter[str])
    rows_with_keysets: int = 0

    def add(self, behaviour: Behaviour | None) -> None:
        """Count one conversation, None for invalid Harmony."""
        self.rows += 1
        if behaviour is None:  # its share is reported, so that a wrong format isn't taken for variety
            self.empty += 1
            return
        structure, trace = behaviour.structure, behaviour.trace  # counted by hashes: a trace takes a kilobyte
        keysets = [str(result.payload) for result in behaviour.results if result.payload.keys]
        self.traces[xxh3_64_intdigest(trace.encode())] += 1
        self.structures[xxh3_64_intdigest(structure.encode())] += 1
        self.answers[behaviour.answer] += 1
        self.calls[len(behaviour.calls)] += 1
        self.words[len(trace.split())] += 1
        if behaviour.calls:
            self.tools[behaviour.tools] += 1
        self.keysets.update(keysets)
        self.authors.update(result.author for result in behaviour.results if result.status != "missing")
        self.rows_with_keysets += bool(keysets)  # once a row, however many results it has

    def add_all(self, conversations: Iterable[Sequence[HarmonyMessage] | Fault]) -> None:
        """Count conversations, one per row."""
        for messages in conversations:
            self.add(None if isinstance(messages, Fault) else behaviour_of(messages))

    def record(self) -> dict[str, Any]:
        """Return the survey as a tree of counts, plain JSON."""
        values: dict[str, int | Counter[Any]] = {each.name: getattr(self, each.name) for each in fields(Survey)}
        return {
            name: value if isinstance(value, int) else {str(key): count for key, count in sorted(value.items())}
            for name, value in values.items()
        }


@dataclass(frozen=True, slots=True)
class Collapse:
    """The report on a survey: `facts`, plain JSON, and a sentence per violated limit."""

    facts: dict[str, Any]
    problems: tuple[str, ...]

    @property
    def markdown(self) -> str:
        """The report in Markdown."""
        verdict = [f"**Collapsed:** {problem}" for problem in self.problems] or ["No collapse: all limits are kept."]
        rows = [(name.replace("_", " "), value) for name, value in self.facts.items()]
        figures = [(name, f"{value:.4f}" if isinstance(value, float) else value) for name, value in rows]
        tables = [Table("", ("figure", "value"), [each for each in figures if not isinstance(each[1], dict)])]
        tables += [Table(name, (name, "count"), list(found.items())) for name, found in rows if isinstance(found, dict)]
        return "\n".join(
            ["# Behaviors", "", *(f"{each}\n" for each in verdict), *chain.from_iterable(map(table_lines, tables))]
        )


def collapse(found: Counts, limits: Limits) -> Collapse:
    """Report on the record of a survey, or of several. Shares are of all rows, between 0 and 1, and 0 without rows."""
    rows = found["rows"]
    facts: dict[str, Any] = {
        "rows": rows,
        "share_empty": _share(found["empty"], rows),
        "distinct_traces": len(found["traces"]),
        "distinct_structures": len(found["structures"]),
        "share_distinct_structures": _share(len(found["structures"]), rows),
        "share_with_calls": _share(sum(found["tools"].values()), rows),
        "distinct_tool_sequences": len(found["tools"]),
        "share_with_keysets": _share(found["rows_with_keysets"], rows),
        "distinct_keysets": len(found["keysets"]),
        "calls_per_row": _percentiles(found["calls"]),
        "words_per_trace": _percentiles(found["words"]),
        "answers": _most_common(found["answers"]),
        "tool_sequences": _most_common(found["tools"]),
        "keysets": _most_common(found["keysets"]),
        "authors": _most_common(found["authors"]),
    }
    if not rows:
        return Collapse(facts, ("the selection doesn't contain rows to survey; check it",))
    structures, calls, problems = facts["share_distinct_structures"], facts["share_with_calls"], list[str]()
    if structures < limits.structures:
        problems.append(
            f"{facts['distinct_structures']} distinct structures in {rows} rows are {structures:.3%}, "
            f"below the limit of {limits.structures:.3%}; embed a different view or select other rows"
        )
    if calls < limits.calls:
        problems.append(
            f"{calls:.3%} of rows call a tool, below the limit of {limits.calls:.3%}; select rows with tools"
        )
    return Collapse(facts, tuple(problems))


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def _percentiles(counts: Mapping[str, int]) -> dict[str, int]:
    """The smallest value at or above each percentile of the rows; empty without rows."""
    # Keys became text in JSON.
    ascending = sorted(Counter({int(value): count for value, count in counts.items()}).elements())
    return {f"p{each}": ascending[-(-len(ascending) * each // 100) - 1] for each in PERCENTILES if ascending}


def _most_common(counts: Mapping[str, int]) -> dict[str, int]:
    """The most frequent values, ties in alphabetical order."""
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:MOST_LISTED])
