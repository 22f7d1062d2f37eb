"""Show a solved budget: the available and read tokens of each dataset, how often it is read, and which limit binds."""

from collections.abc import Collection, Sequence
from itertools import accumulate
from typing import Any

from rich.console import Console
from tokenmill.tasks.blend.mix import Mix
from tokenmill.tasks.errors import InputError
from tokenmill.tasks.kit.parts import Table
from tokenmill.tasks.kit.terminal import print_table
from tokenmill.tasks.shards.kind import Kind, Planned
from tokenmill.tasks.shards.manifest import BLEND
from tokenmill.tasks.shards.publish import publish_bytes
from tokenmill.tasks.storage import absolute, join

COLUMNS = ("dataset", "available", "read", "share", "epochs", "unread", "limit")
PHASE_COLUMNS = ("phase", "dataset", "read", "share of the phase", "epochs")


def mix_record(mix: Mix, estimated: Collection[str], steps: Sequence[int]) -> dict[str, Any]:
    """Return the mix as a JSON line; `steps` are the last steps of its phases, empty if unknown."""
    datasets = {
        name: {
            "tokens": held, "estimated": name in estimated, "drawn": round(mix.drawn(name)),
            "epochs": mix.drawn(name) / held if held else 0.0, "unread": max(0, held - round(mix.drawn(name))),
            "limits": list(mix.binding.get(name, [])),
        }
        for name, held in mix.held.items()
    }  # fmt: skip
    phases = [
        {
            "name": phase.name, "tokens": round(phase.tokens),
            "drawn": {name: round(each) for name, each in phase.drawn.items()},
        }
        for phase in mix.phases
    ]  # fmt: skip
    whole = {"type": "mix", "tokens": round(mix.tokens), "datasets": datasets, "phases": phases, "steps": list(steps)}
    return {"mix": whole}


def last_steps(mix: Mix, step_tokens: int) -> list[int]:
    """Return the last step of each phase, for steps of so many tokens."""
    return [round(end / step_tokens) for end in accumulate(phase.tokens for phase in mix.phases)]


def megatron_flags(steps: Sequence[int]) -> str:
    """Megatron-LM's flags for phases that end at these steps.

    The size of a global batch, which a mix doesn't know, is for the user to fill in.
    """
    if len(steps) == 1:
        return f"--train-iters {steps[0]}"
    # With transitions, Megatron-LM takes its length in samples instead of steps
    transitions = ",".join(map(str, steps[:-1]))
    return f"--train-samples $(({steps[-1]} * GLOBAL_BATCH)) --phase-transition-iterations {transitions}"


def write_mix(planned: Planned[Any, Any], kind: Kind[Any, Any], folder: str) -> None:
    """Write the prefixes and Megatron's blends of a built preparation into a folder.

    Raises InputError for kinds other than pretraining, and for unbuilt shards.
    """
    if kind.name != "pretrain" or planned.plan.pending:
        raise InputError(
            "--write: needs a blend that `tokenmill pretrain` has prepared; name its folder with --output-dir"
        )
    place = absolute(folder)
    # Every shard is there, so nothing has to run
    built = kind.build(planned, lambda *_, **__: ())
    finished = built.plan.finished
    published = kind.release(built, finished).layout.lay_out(place, built.plan.store, finished)
    publish_bytes(join(place, BLEND), published.blend)


def print_mix(mix: Mix, estimated: Collection[str], console: Console, *, tables: bool) -> None:
    """Print the mix as tables, or a line per dataset and phase with the name of each figure."""
    rows: list[tuple[str, ...]] = []
    for name, held in mix.held.items():
        drawn = mix.drawn(name)
        rows.append((
            name, f"{'~' if name in estimated else ''}{held:,}", f"{drawn:,.0f}", f"{drawn / mix.tokens:.2%}",
            f"{drawn / held:.2f}" if held else "-", f"{max(0, held - round(drawn)):,}",
            ", ".join(mix.binding.get(name, [])),
        ))  # fmt: skip
    print_table(console, Table("mix", COLUMNS, rows), tables=tables)
    if len(mix.phases) > 1:
        phases = [
            (phase.name, name, f"{drawn:,.0f}", f"{drawn / phase.tokens:.2%}", f"{drawn / mix.held[name]:.2f}")
            for phase in mix.phases
            for name, drawn in phase.drawn.items()
        ]
        print_table(console, Table("phases", PHASE_COLUMNS, phases), tables=tables)
    if estimated:
        console.print("~: estimated from bytes; exact once the preparation in --output-dir is built", highlight=False)
