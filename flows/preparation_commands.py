"""The commands that look at a blend (plan, mix, compare-tokenizers), prepare it, and choose rows by scores.

Prefect and Dask are imported only to run a flow.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter
from cyclopts.validators import Number
from rich.console import Console
from tokenmill.tasks.blend.models import Blend
from tokenmill.tasks.errors import InputError, RunError
from tokenmill.tasks.runtime import set_up_arrow
from tokenmill.tasks.shards.kinds import KINDS, WORDS, preparation, preparation_called
from tokenmill.tasks.strict import Strict, parse

from .options import (
    CommonOptions,
    Format,
    OutputDir,
    be_quiet,
    choices_of,
    print_json,
    settings_of,
    settings_parameter,
    sorted_overrides,
    terminal,
)

if TYPE_CHECKING:
    from tokenmill.tasks.shards.kind import Kind, Planned
    from tokenmill.tasks.shards.settings import PreparationSettings

BlendPath = Annotated[
    str, Parameter(help="Blend or data file (path or URI). A data file counts as a blend with one dataset.")
]


def plan(
    blend: BlendPath,
    *overrides: Annotated[str, Parameter(help="Settings as key=value; see `tokenmill KIND --help`.")],
    kind: Annotated[str, Parameter(help=f"Preparation kind to plan: {', '.join(WORDS)}.")] = "pretrain",
    output_dir: OutputDir | None = None,
    format: Format = "table",  # noqa: A002 - the name of the option
    options: CommonOptions | None = None,
) -> None:
    """Dry run: shards, bytes, estimated tokens and epochs, cached shards and why others aren't, and the result of a run for
    the first rows of each dataset.
    """
    chosen = preparation_called(kind)
    asked, settings = _read(chosen, blend, options, overrides)
    planned = _planned(chosen, asked, settings, output_dir)
    record = _shown(chosen, planned, None if format == "json" else Console(), tables=format == "table")
    if format == "json":
        print_json(record)


def mix(
    blend: BlendPath,
    *overrides: Annotated[str, Parameter(help="Settings as key=value; see `tokenmill KIND --help`.")],
    tokens: Annotated[
        int | None, Parameter(help="Tokens to train on, instead of the blend's own.", validator=Number(gte=1))
    ] = None,
    kind: Annotated[str, Parameter(help=f"Preparation kind: {', '.join(WORDS)}.")] = "pretrain",
    output_dir: OutputDir | None = None,
    write: Annotated[
        str | None, Parameter(help="Folder for plain Megatron blends of a prepared blend, per phase.")
    ] = None,
    step_tokens: Annotated[
        int | None,
        Parameter(help="Tokens per training step, to print the steps at which phases end.", validator=Number(gte=1)),
    ] = None,
    format: Format = "table",  # noqa: A002 - the name of the option
    options: CommonOptions | None = None,
) -> None:
    """Solve the budget of a blend: tokens, share and epochs of each dataset and phase, and the limits that bind."""
    from tokenmill.tasks.blend.mix import solve
    from tokenmill.tasks.report.mix import last_steps, megatron_flags, mix_record, print_mix, write_mix
    from tokenmill.tasks.report.plan import training_tokens

    chosen = preparation_called(kind)
    asked, settings = _read(chosen, blend, options, overrides)
    if tokens is not None:
        asked = parse(Blend, {**asked.model_dump(exclude_unset=True), "tokens": tokens}, f"{blend} with --tokens")
    planned = _planned(chosen, asked, settings, output_dir)
    held, estimated = training_tokens(planned)
    if estimated and chosen.tokens is None:
        raise InputError(
            f"--kind {kind}: counts rows, which are known once they are prepared: tokenmill {kind} first, then name its --output-dir"
        )
    found = solve(asked, held)
    steps = last_steps(found, step_tokens) if step_tokens else []
    if write is not None:
        write_mix(planned, chosen, write)
        terminal.print(f"written to {write}", markup=False)
    if format == "json":
        print_json(mix_record(found, estimated, steps))
        return
    print_mix(found, estimated, Console(), tables=format == "table")
    if steps:
        Console().print(f"Megatron-LM: {megatron_flags(steps)}", highlight=False, soft_wrap=True)


def compare_tokenizers(
    blend: BlendPath,
    *tokenizers: Annotated[str, Parameter(help="Hub ids, folders, tokenizer files, or tiktoken encodings.")],
    sample: Annotated[int, Parameter(help="Leading rows of each dataset.", validator=Number(gte=1))] = 1_000,
    html: Annotated[str | None, Parameter(help="Also write a page with bars to this path.")] = None,
    format: Format = "table",  # noqa: A002 - the name of the option
) -> None:
    """Compare tokenizers on a blend: tokens per byte, character and word, byte fallback, long tokens, speed."""
    from tokenmill.tasks.report.tokenizers import (
        autotokenizers,
        compared,
        comparison_record,
        print_comparison,
        publish_comparison,
    )

    found, checks = compared(preparation("pretrain").read_blend(blend), tokenizers, sample), autotokenizers(tokenizers)
    if html is not None:
        terminal.print(f"written to {publish_comparison(found, html).path}", markup=False)
    if format == "json":
        print_json(comparison_record(found, checks))
    else:
        print_comparison(found, Console(), tables=format == "table", checks=checks)


def preparation_command(name: str) -> Callable[..., dict[str, Any]]:
    """Return the command of a preparation kind."""

    def command(
        blend: BlendPath,
        *overrides: Annotated[str, settings_parameter(lambda: (preparation(name).settings, preparation(name).hidden))],
        output_dir: OutputDir,
        dry_run: Annotated[bool, Parameter(negative="", help="Print the plan and build nothing.")] = False,
        options: CommonOptions | None = None,
    ) -> dict[str, Any]:
        kind = preparation(name)
        asked, settings = _read(kind, blend, options, overrides)
        if dry_run:
            return _shown(kind, _planned(kind, asked, settings, output_dir), terminal)
        from tokenmill.tasks.report.summary import print_summary
        from tokenmill.tasks.shards.manifest import open_manifest

        from .direct import run_preparation

        set_up_arrow()
        be_quiet()
        record = run_preparation(kind, asked, output_dir, settings)
        (artifact,) = record.values()
        print_summary(open_manifest(artifact["path"]), artifact["path"], terminal)
        return record

    command.__doc__ = KINDS[name].summary
    return command


def _read(
    kind: "Kind[Any, Any]", blend: str, options: CommonOptions | None, overrides: Sequence[str]
) -> "tuple[Blend, PreparationSettings]":
    """The blend and the settings; some overrides are keys of the dataset that a file of rows is."""
    from tokenmill.tasks.sources.forms import with_keys

    overrides, keys = sorted_overrides(kind.settings, overrides)
    settings = settings_of(kind.settings, options or CommonOptions(), overrides)
    return with_keys(kind.read_blend(blend), blend, keys), settings


def _planned(
    kind: "Kind[Any, Any]", blend: "Blend", settings: "PreparationSettings", output_dir: str | None
) -> "Planned[Any, Any]":
    from tokenmill.tasks.shards.planning import check_inputs

    set_up_arrow()
    if output_dir is not None:
        check_inputs(blend, settings.store, output_dir)
    return kind.plan(blend, settings, output_dir)


def _shown(
    kind: "Kind[Any, Any]", planned: "Planned[Any, Any]", console: Console | None, *, tables: bool = True
) -> dict[str, Any]:
    """The record of a plan, shown on a console. Raises RunError, once it is shown, if a run would fail."""
    from tokenmill.tasks.report.plan import plan_record, print_plan
    from tokenmill.tasks.shards.first_rows import look

    outlook, (first_rows, problem) = kind.outlook(planned), look(kind, planned)
    if console is not None:
        print_plan(planned, console, outlook, first_rows, tables=tables)
    if problem is not None:
        raise RunError(f"a run of this plan would fail: {problem}") from problem
    return plan_record(planned, outlook, first_rows)


def _choice_settings() -> tuple[type[Strict], frozenset[str]]:
    from tokenmill.tasks.score.choice import ChoiceSettings

    return ChoiceSettings, frozenset()


def choose(
    embeddings: Annotated[str, Parameter(help="Output folder of `tokenmill score embed`.")],
    *overrides: Annotated[str, settings_parameter(_choice_settings)],
    output_dir: OutputDir,
) -> dict[str, Any]:
    """Choose diverse rows without near-duplicates, and explain the choice."""
    from tokenmill.tasks.kit.parts import counted
    from tokenmill.tasks.score.choice import ChoiceSettings, choice_record, choose_rows

    settings = choices_of(ChoiceSettings, overrides)
    manifest = choose_rows(embeddings, output_dir, settings)
    record = choice_record(manifest)
    totals = manifest["totals"]
    terminal.print(
        f"{totals['documents']:,} of {counted(totals['rows'], 'row')} chosen; why: {record['choice']['path']}/report.md"
    )
    for reason, count in totals["dropped"].items():
        terminal.print(f"  skipped {counted(count, 'row')}: {reason}")
    return record
