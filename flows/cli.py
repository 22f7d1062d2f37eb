"""The `tokenmill` command: parses, calls, prints.

Progress and summaries go to stderr. When stdout is not a terminal it carries one line of JSON, the artifact record,
and a following command reads its folder from there. Exit codes: 0 done, 1 the run failed, 2 the call was wrong,
130 Ctrl-C was pressed.
Prefect and Dask are imported only by the commands that run a flow; `plan`, `verify` and `--help` start at once.
"""

import re
import sys
from collections.abc import Callable, Mapping
from functools import partial
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

from cyclopts import App, CycloptsError, Parameter
from cyclopts.validators import Number
from pydantic import ValidationError
from rich.console import Console
from tokenmill.tasks.arrow import set_up_arrow
from tokenmill.tasks.blend.models import Blend
from tokenmill.tasks.errors import InputError, PartlyFailedError, RunError
from tokenmill.tasks.shards.kinds import KINDS, preparation
from tokenmill.tasks.storage import join
from tokenmill.tasks.strict import Strict, parse

from .options import CommonOptions, choices_of, settings_of
from .process import end_when_interrupted, lost_output, open_streams
from .settings_help import settings_parameter
from .terminal import Format, OutputDir, TextFormat, be_quiet, piped, print_json, terminal
from .training_commands import batch, benchmark, evaluate, order, pipeline, train

if TYPE_CHECKING:
    from tokenmill.tasks.shards.preparation import Planned, Preparation
    from tokenmill.tasks.shards.settings import PreparationSettings

EMPTY = re.compile(r"(--[\w-]+=)?\s*")
"""An empty argument, or an option with an empty value."""

DONE, FAILED, WRONG_CALL = 0, 1, 2

app = App(
    name="tokenmill",
    help="Blends of raw text in, training-ready token shards out.",
    version=partial(version, "tokenmill"),
    help_on_error=False,
    suppress_keyboard_interrupt=False,
)
for command in (order, batch, train, evaluate, benchmark, pipeline):
    app.command(command)

BlendPath = Annotated[
    str, Parameter(help="Path or URI of a blend, or of a file of rows, which is taken as a blend of one data set.")
]
Prepared = Annotated[
    str | None, Parameter(help="Output folder; read from stdin when a command is piped into this one.")
]


@app.command
def plan(
    blend: BlendPath,
    *overrides: Annotated[str, Parameter(help="Settings as key=value; see the help of the command of the kind.")],
    kind: Annotated[str, Parameter(help=f"Kind of preparation to plan: {', '.join(KINDS)}.")] = "pretrain",
    output_dir: OutputDir | None = None,
    format: Format = "table",  # noqa: A002 - the name of the option
    options: CommonOptions | None = None,
) -> None:
    """Dry run: shards, bytes, estimated tokens and epochs, which shards are cached and why others are not."""
    chosen = preparation(kind)
    settings = settings_of(chosen.settings, options or CommonOptions(), overrides)
    from tokenmill.tasks.report.plan import plan_record, print_plan

    planned = _planned(chosen, chosen.read_blend(blend), settings, output_dir)
    outlook = chosen.outlook(planned)
    if format == "json":
        print_json(plan_record(planned, outlook))
    else:
        print_plan(planned, Console(), outlook, table=format == "table")


@app.command
def mix(
    blend: BlendPath,
    *overrides: Annotated[str, Parameter(help="Settings as key=value; see the help of the command of the kind.")],
    tokens: Annotated[
        int | None, Parameter(help="Tokens to train on, instead of the blend's own.", validator=Number(gte=1))
    ] = None,
    kind: Annotated[str, Parameter(help=f"Kind of preparation: {', '.join(KINDS)}.")] = "pretrain",
    output_dir: OutputDir | None = None,
    write: Annotated[
        str | None, Parameter(help="Folder for plain Megatron blends of a prepared blend, per phase.")
    ] = None,
    step_tokens: Annotated[
        int | None, Parameter(help="Tokens of a step, to say at which steps phases end.", validator=Number(gte=1))
    ] = None,
    format: Format = "table",  # noqa: A002 - the name of the option
    options: CommonOptions | None = None,
) -> None:
    """Solve the budget of a blend: tokens, share and epochs of each data set and phase, and the limits that bind."""
    from tokenmill.tasks.blend.mix import solve
    from tokenmill.tasks.report.mix import last_steps, megatron_flags, mix_record, print_mix, write_mix
    from tokenmill.tasks.report.plan import training_tokens

    chosen = preparation(kind)
    settings = settings_of(chosen.settings, options or CommonOptions(), overrides)
    asked = chosen.read_blend(blend)
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


@app.command
def compare_tokenizers(
    blend: BlendPath,
    *tokenizers: Annotated[
        str, Parameter(help="Hub ids, folders, tokenizer.json, SentencePiece .model, or names of tiktoken encodings.")
    ],
    sample: Annotated[int, Parameter(help="Leading rows of each data set.", validator=Number(gte=1))] = 1_000,
    html: Annotated[str | None, Parameter(help="Also write a page with bars to this path.")] = None,
    format: Format = "table",  # noqa: A002 - the name of the option
) -> None:
    """Compare tokenizers on a blend: tokens per byte, character and word, byte fallback, long tokens, speed."""
    from tokenmill.tasks.report.tokenizers import compared, comparison_record, print_comparison, publish_comparison

    found = compared(preparation("pretrain").read_blend(blend), tokenizers, sample)
    if html is not None:
        terminal.print(f"written to {publish_comparison(found, html).path}", markup=False)
    if format == "json":
        print_json(comparison_record(found))
    else:
        print_comparison(found, Console(), tables=format == "table")


def _preparation_command(name: str) -> Callable[..., dict[str, Any]]:
    """The command of a kind of preparation."""

    def command(
        blend: BlendPath,
        *overrides: Annotated[str, settings_parameter(partial(_settings_of_kind, name))],
        output_dir: OutputDir,
        dry_run: Annotated[bool, Parameter(negative="", help="Print the plan and build nothing.")] = False,
        options: CommonOptions | None = None,
    ) -> dict[str, Any]:
        kind = preparation(name)
        settings = settings_of(kind.settings, options or CommonOptions(), overrides)
        if not dry_run:
            return _prepared(kind, kind.read_blend(blend), settings, output_dir)
        return _shown(kind, _planned(kind, kind.read_blend(blend), settings, output_dir))

    command.__doc__ = KINDS[name].summary
    return command


def _planned(
    kind: "Preparation[Any, Any]", blend: "Blend", settings: "PreparationSettings", output_dir: str | None
) -> "Planned[Any, Any]":
    """Check what can be seen at once, and plan."""
    from tokenmill.tasks.shards.input_checks import check_inputs

    set_up_arrow()
    if output_dir is not None:
        check_inputs(blend, settings.store, output_dir)
    return kind.plan(blend, settings, output_dir)


def _shown(kind: "Preparation[Any, Any]", planned: "Planned[Any, Any]") -> dict[str, Any]:
    """The record of a plan, which is shown on stderr."""
    from tokenmill.tasks.report.plan import plan_record, print_plan

    outlook = kind.outlook(planned)
    print_plan(planned, terminal, outlook)
    return plan_record(planned, outlook)


def _settings_of_kind(name: str) -> "tuple[type[PreparationSettings], frozenset[str]]":
    """The settings of a kind, and those that it refuses."""
    kind = preparation(name)
    return kind.settings, kind.hidden


def _prepared(
    kind: "Preparation[Any, Any]", blend: "Blend", settings: "PreparationSettings", output_dir: str
) -> dict[str, Any]:
    """Make the immediate checks, run the flow, and print the result."""
    from tokenmill.tasks.report.summary import print_summary
    from tokenmill.tasks.shards.input_checks import check_inputs
    from tokenmill.tasks.shards.manifest import read_manifest

    from .direct import run_preparation

    set_up_arrow()
    check_inputs(blend, settings.store, output_dir)
    kind.check(blend, settings, output_dir)
    be_quiet()
    chosen = {name: getattr(settings, name) for name in settings.model_fields_set}
    record = run_preparation(kind.name, blend, output_dir, chosen)
    (artifact,) = record.values()
    print_summary(read_manifest(artifact["path"]) or {}, artifact["path"], terminal)
    return record


score = App(name="score", help="Score rows with models: completions by their NLL, texts by embeddings.")
app.command(score)
for name, kind in KINDS.items():
    group, _, word = kind.command.rpartition(" ")
    (score if group else app).command(_preparation_command(name), name=word)


@app.command
def verify(output_dir: Prepared = None) -> dict[str, Any]:
    """Check hashes, formats and counts of everything published, or that a model was trained on exactly the planned tokens.

    The next run of a preparation rebuilds damaged shards.
    """
    from tokenmill.tasks.nightly.versions import remedy_for
    from tokenmill.tasks.report.verification import inspector_of, print_verification, verification_record, with_report
    from tokenmill.tasks.shards.verify import verify as verify_output
    from tokenmill.tasks.train.proof import is_training, print_proof, proof_record, prove

    place = output_dir or piped("verify").path
    if is_training(place):
        proof = prove(place)
        print_proof(proof, place, terminal)
        return proof_record(proof, place)
    verification = with_report(verify_output(place, inspector_of(place)), place)
    print_verification(verification, place, terminal)
    if verification.problems:
        raise RunError(f"{place}: {len(verification.problems)} problems; {remedy_for(place)}")
    return verification_record(verification, place)


@app.command
def view(
    output_dir: Prepared = None,
    *,
    doc: Annotated[str | None, Parameter(help="Show one document, by the id that this command prints.")] = None,
    dataset: Annotated[str | None, Parameter(help="Only this data set.")] = None,
    rows: Annotated[int, Parameter(help="Number of packs or documents.")] = 1,
    random: Annotated[bool, Parameter(negative="", help="Choose at random instead of taking the first.")] = False,
    seed: Annotated[int, Parameter(help="Seed of the random choice.")] = 42,
    html: Annotated[str | None, Parameter(help="Write a static page to this path instead.")] = None,
    format: Format = "text",  # noqa: A002 - the name of the option
) -> None:
    """Show published packs, coloured by loss mask, or documents, decoded from the files themselves."""
    from tokenmill.tasks.report.view import view_output, view_record
    from tokenmill.tasks.report.view_html import publish_html
    from tokenmill.tasks.report.view_terminal import print_table, print_view

    place = output_dir or piped("view").path
    found = view_output(place, doc=doc, dataset=dataset, seed=seed if random else None, rows=rows)
    if html is not None:
        terminal.print(f"written to {publish_html(found, html).path}", markup=False)
    elif format == "json":
        print_json(view_record(found))
    else:
        (print_view if format == "text" else print_table)(found, Console())


@app.command
def why(
    output_dir: Annotated[
        str | None,
        Parameter(help="Output folder, or folder of a training; read from stdin when a command is piped in."),
    ] = None,
    *,
    row: Annotated[str | None, Parameter(help="The row, as FILE:LINE; lines count from 1.")] = None,
    doc: Annotated[str | None, Parameter(help="A document made of the row, by the id that `view` prints.")] = None,
    format: TextFormat = "text",  # noqa: A002 - the name of the option
) -> None:
    """Tell the story of a source row: why it was dropped, or where its tokens are and which steps train on them."""
    from tokenmill.tasks.report.batch import data_in, with_steps
    from tokenmill.tasks.report.why import print_why, why_document, why_record, why_row

    if (row is None) == (doc is None):
        raise InputError("why: name a row, --row FILE:LINE, or a document, --doc ID, but not both")
    place = output_dir or piped("why").path
    data = data_in(place)
    stories = with_steps(place, why_row(data, row) if row is not None else why_document(data, doc or ""))
    if format == "json":
        print_json(why_record(data, stories))
    else:
        print_why(data, stories, Console())


def _choice_settings() -> tuple[type[Strict], frozenset[str]]:
    from tokenmill.tasks.score.choice import ChoiceSettings

    return ChoiceSettings, frozenset()


@app.command
def choose(
    embeddings: Annotated[str, Parameter(help="Output folder of `tokenmill score embed`.")],
    *overrides: Annotated[str, settings_parameter(_choice_settings)],
    output_dir: OutputDir,
    plot: Annotated[bool, Parameter(help="Also plot the choice; needs matplotlib.")] = True,
) -> dict[str, Any]:
    """Choose diverse rows without near-duplicates, and explain the choice."""
    from tokenmill.tasks.score.choice import ChoiceSettings, choice_record, choose_rows

    settings = choices_of(ChoiceSettings, overrides)
    draw = None
    if plot:
        from tokenmill.tasks.report.plots import choice_map as draw
    manifest = choose_rows(embeddings, output_dir, settings, draw)
    record = choice_record(manifest)
    totals = manifest["totals"]
    terminal.print(
        f"{totals['documents']:,} of {totals['rows']:,} rows chosen; why: {record['choice']['path']}/report.md"
    )
    for reason, count in totals["dropped"].items():
        terminal.print(f"  left out {count:,} rows: {reason}")
    return record


@app.command
def report(
    output_dir: Prepared = None,
    *,
    scores: Annotated[
        list[str] | None,
        Parameter(help="Plot these folders of scores, with the folder's rows, on a page of their own."),
    ] = None,
    html: Annotated[
        str | None, Parameter(help="Path of the page; by default report.html in the folder, scores.html with --scores.")
    ] = None,
) -> dict[str, Any]:
    """Write the page and the cards of a preparation again: counts, weights, lengths, masks, samples. Or plot scores."""
    place = output_dir or piped("report").path
    record = _plotted(place, scores, html) if scores else _reported(place, html)
    terminal.print(f"written to {record['page']}", markup=False)
    return {"report": {"path": place, "type": "report", **record}}


def _reported(output_dir: str, html: str | None) -> dict[str, Any]:
    from tokenmill.tasks.report.cards import publish_cards
    from tokenmill.tasks.report.page import publish_page

    return {"page": publish_page(output_dir, html).path, "cards": publish_cards(output_dir)}


def _plotted(output_dir: str, scores: list[str], html: str | None) -> dict[str, Any]:
    from tokenmill.tasks.report.score_page import PAGE, publish_page, report_page

    places = list(dict.fromkeys([output_dir, *scores]))
    plots = report_page(places)
    page = publish_page(places, plots, html or join(output_dir, PAGE))
    return {"page": page.path, "plots": [plot.title for plot in plots]}


@app.command
def push(
    output_dir: Annotated[str, Parameter(help="Output folder of a preparation.")],
    repository: Annotated[str, Parameter(help="Data set repository on the hub, as ORG/NAME; created if missing.")],
    *,
    public: Annotated[
        bool, Parameter(negative="", help="Create or update a public repository; without this, it must be private.")
    ] = False,
    dry_run: Annotated[bool, Parameter(negative="", help="List the files and push nothing.")] = False,
) -> dict[str, Any]:
    """Push a preparation to the Hugging Face hub, private by default; HF_TOKEN must allow it."""
    from tokenmill.tasks.report.parcel import parcel_of
    from tokenmill.tasks.report.push import fitted, print_plan, print_pushed, push_record, stale_names, target_of
    from tokenmill.tasks.report.push import push as push_parcel

    whole = parcel_of(output_dir)
    target = target_of(repository, public=public)
    parcel = fitted(whole, target)
    if dry_run:
        print_plan(parcel, target, stale_names(parcel, target), terminal)
        return push_record(parcel, target, None)
    commit = push_parcel(parcel, target)
    print_pushed(parcel, target, commit, terminal)
    return push_record(parcel, target, commit)


@app.command
def nightly(
    blends: Annotated[str, Parameter(help="Folder or URI with blends in folders named after their kind.")],
    *,
    output_dir: OutputDir,
    keep: Annotated[int, Parameter(help="Versions to keep of each blend.", validator=Number(gte=1))] = 7,
    also_keep: Annotated[
        list[str] | None,
        Parameter(help="Also keep this version, name (art://NAME), or other output of this store."),
    ] = None,
    workers: Annotated[int | None, Parameter(help="Worker processes.")] = None,
) -> dict[str, Any]:
    """Prepare a new version of every blend that changed, say why, and remove outdated versions."""
    from tokenmill.tasks.nightly.blends import find_blends
    from tokenmill.tasks.sources.discovery import require_no_overlap

    require_no_overlap("blends", blends, {"the output folder": output_dir})
    find_blends(blends)
    be_quiet()
    from .nightly import reprep_changed_blends

    return reprep_changed_blends(blends, output_dir, keep=keep, also_keep=also_keep, workers=workers)


@app.command
def doctor(
    output_dir: Annotated[str, Parameter(help="Folder that outputs would be written to.")] = ".",
    *,
    format: Format = "table",  # noqa: A002 - the name of the option
) -> None:
    """Check what this environment has for tokenmill, and say what is missing, what needs it, and what to do."""
    from tokenmill.tasks.report.doctor import doctor_record, examine, print_checks

    from .direct import server_address

    checks = examine(output_dir, server_address())
    if format == "json":
        print_json(doctor_record(checks))
    else:
        print_checks(checks, Console())


@app.command
def diff(
    before: Annotated[str, Parameter(help="Output folder, or version of a nightly blend.")],
    after: Annotated[str, Parameter(help="The folder to compare with it.")],
    *,
    html: Annotated[str | None, Parameter(help="Also write a static page to this path.")] = None,
    format: Format = "table",  # noqa: A002 - the name of the option
) -> None:
    """Compare two outputs: settings, sources and every document - kept, changed, moved, gone or new, and why."""
    from tokenmill.tasks.nightly.diff import diff as compare
    from tokenmill.tasks.nightly.diff import difference_record
    from tokenmill.tasks.nightly.diff_page import print_difference, publish_difference

    found = compare(before, after)
    if html is not None:
        terminal.print(f"written to {publish_difference(found, html).path}", markup=False)
    if format == "json":
        print_json(difference_record(found))
    else:
        print_difference(found, Console(), table=format == "table")


@app.command
def deploy(
    *,
    write: Annotated[bool, Parameter(negative="", help="Write missing files for review, and deploy nothing.")] = False,
) -> dict[str, Any]:
    """Deploy all flows to a Prefect server with this folder's prefect.yaml, which is written if missing."""
    from .deploying import deploy as apply
    from .deploying import print_deployments, require_server, write_project

    if not write:
        require_server()
    folder = Path.cwd()
    written = write_project(folder)
    if written:
        terminal.print(f"{len(written)} files written to {folder}: prefect.yaml and the files it names", markup=False)
    deployments = {} if write else apply(folder)
    if deployments:
        print_deployments(deployments, terminal)
    return {"deploy": {"path": str(folder), "type": "deployments", "written": written, "deployed": [*deployments]}}


@app.command
def prune(
    store: Annotated[str, Parameter(help="Store that preparations share.")],
    *,
    keep: Annotated[list[str], Parameter(help="Output folder whose shards to keep; name all of them.")],
    grace_days: Annotated[float, Parameter(help="Keep younger shards: a run may be writing them.")] = 2.0,
    dry_run: Annotated[bool, Parameter(negative="", help="Count the shards and remove nothing.")] = False,
) -> dict[str, Any]:
    """Remove shards that no kept output uses."""
    from tokenmill.tasks.nightly.prune import leftovers, prune_record
    from tokenmill.tasks.nightly.prune import prune as prune_store

    found = (leftovers if dry_run else prune_store)(store, keep, grace_days * 86_400)
    terminal.print(
        f"{len(found.removable):,} shards of {found.size / 1e9:,.3f} GB {'would be removed' if dry_run else 'removed'}; "
        f"{found.young:,} are too young, {found.referenced:,} are referenced"
    )
    return prune_record(found, store, keep)


@app.command
def register(
    name: Annotated[str, Parameter(help="Name, for art://NAME.")],
    folder: Annotated[
        str | None, Parameter(help="Output folder of a command; read from stdin when one is piped in.")
    ] = None,
) -> dict[str, Any]:
    """Register an output under a name and a version for other commands: art://NAME, art://NAME:v2."""
    from tokenmill.tasks.report.registry import artifact_in
    from tokenmill.tasks.report.registry import register as register_artifact

    found = register_artifact(name, artifact_in(folder or piped("register").path))
    terminal.print(f"{found.reference} is {found.artifact.path}", markup=False)
    return {"registered": {"reference": found.reference, **found.artifact.model_dump()}}


@app.command
def lineage(
    folder: Annotated[
        str | None, Parameter(help="Output folder or art:// name; read from stdin when a command is piped in.")
    ] = None,
) -> dict[str, Any]:
    """Show what an output was made from, down to its data sets."""
    from tokenmill.tasks.report.registry import lineage as trace
    from tokenmill.tasks.report.registry import print_lineage

    found = trace(folder or piped("lineage").path)
    print_lineage(found, terminal)
    return {"lineage": found}


@app.command
def demo(*, output_dir: OutputDir = "demo") -> dict[str, Any]:
    """Run every step offline on text this machine already has: plan, prepare, verify, view."""
    from tokenmill.tasks.report.demo import (
        CHAT_BLEND,
        HARMONY_BLEND,
        QUESTIONS_BLEND,
        print_next_steps,
        write_demo_blend,
    )

    blend = write_demo_blend(output_dir)
    terminal.print(f"[bold]1. a blend of Python's own source and documentation:[/] {blend}")
    terminal.print(f"[bold]2. tokenmill pretrain {blend} --output-dir {output_dir}/prepared[/]")
    record = _demonstrated("pretrain", blend, f"{output_dir}/prepared", "shard_size=4MB")
    terminal.print(f"[bold]3. tokenmill verify {output_dir}/prepared[/]")
    verify(f"{output_dir}/prepared")
    terminal.print(f"[bold]4. tokenmill sft {CHAT_BLEND} --output-dir {output_dir}/conversations pack_size=1024[/]")
    _demonstrated("sft", CHAT_BLEND, f"{output_dir}/conversations", "pack_size=1024")
    terminal.print(f"[bold]5. tokenmill view {output_dir}/conversations --html {output_dir}/conversations.html[/]")
    view(f"{output_dir}/conversations", rows=3, html=f"{output_dir}/conversations.html")
    terminal.print(f"[bold]6. tokenmill rl {QUESTIONS_BLEND} --output-dir {output_dir}/questions target=nemo_gym[/]")
    _demonstrated("rl", QUESTIONS_BLEND, f"{output_dir}/questions", "target=nemo_gym")
    terminal.print(f"[bold]7. tokenmill harmony {HARMONY_BLEND} --output-dir {output_dir}/harmony[/]")
    _demonstrated("harmony", HARMONY_BLEND, f"{output_dir}/harmony")
    print_next_steps(f"{output_dir}/prepared", blend, terminal)
    return record


def _demonstrated(name: str, blend: str, output_dir: str, *overrides: str) -> dict[str, Any]:
    return _preparation_command(name)(blend, *overrides, output_dir=output_dir)


def run(arguments: list[str]) -> int:
    """Run one command and return the exit code."""
    try:
        _require_values(arguments)
        result = app(arguments, exit_on_error=False, print_error=False, result_action="return_value")
    except (CycloptsError, InputError) as error:
        return _complain(_plain(error), WRONG_CALL)
    except PartlyFailedError as error:
        _print_record(error.record)
        return _complain(error, FAILED)
    except (RunError, OSError) as error:
        return _complain(error, FAILED)
    if isinstance(result, dict):
        _print_record(cast("dict[str, Any]", result))
    return DONE


def _require_values(arguments: list[str]) -> None:
    """Raises InputError for an empty argument, such as an unset variable of a script."""
    for before, argument in pairwise(["tokenmill", *arguments]):
        if EMPTY.fullmatch(argument):
            raise InputError(f"the argument after {before!r} is empty; give it a value or omit the option")


def _print_record(record: Mapping[str, Any]) -> None:
    """Print the artifact record as one line for the next program."""
    if not sys.stdout.isatty():
        print_json(record)


def _plain(error: Exception) -> object:
    """An error as text; options that a settings model refuses, one per line."""
    refused = error.__cause__ if isinstance(error, CycloptsError) else None
    if not isinstance(refused, ValidationError):
        return error
    lines = [(str(detail["loc"][0]).replace("_", "-"), detail["msg"], detail["input"]) for detail in refused.errors()]
    return "\n".join(f"--{name}: {message} (got {value!r})" for name, message, value in lines)


def _complain(error: object, code: int) -> int:
    for line in str(error).splitlines():
        sys.stderr.write(f"tokenmill: {line}\n")
    return code


def main() -> None:
    """Run the command line and exit with its code."""
    open_streams()
    end_when_interrupted()
    code = run(sys.argv[1:])
    if lost := lost_output():
        code = code or _complain(f"stdout: {lost.strerror}; the command finished, but its output is lost", FAILED)
    sys.exit(code)
