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

import orjson
from cyclopts import App, CycloptsError, Parameter
from cyclopts.validators import Number
from rich.console import Console
from tokenmill.tasks.blend.load import load_blend
from tokenmill.tasks.blend.models import Blend
from tokenmill.tasks.errors import InputError, PartlyFailedError, RunError
from tokenmill.tasks.shards.settings import PreparationSettings
from tokenmill.tasks.storage import join

from .options import CommonOptions, choices_of, settings_of
from .process import INTERRUPTED, end_when_interrupted, interrupted, lost_output, open_streams
from .terminal import OutputDir, Overrides, be_quiet, piped, terminal
from .training_commands import benchmark, evaluate, pipeline, train

if TYPE_CHECKING:
    from tokenmill.tasks.score.settings import EmbedSettings, NllSettings
    from tokenmill.tasks.score.sources import What

EMPTY = re.compile(r"(--[\w-]+=)?\s*")
"""An argument, or an option with one, that says nothing."""

DONE, FAILED, WRONG_CALL = 0, 1, 2

app = App(
    name="tokenmill",
    help="Blends of raw text in, training-ready token shards out.",
    version=partial(version, "tokenmill"),
    help_on_error=False,
    suppress_keyboard_interrupt=False,
)
for command in (train, evaluate, benchmark, pipeline):
    app.command(command)

BlendPath = Annotated[str, Parameter(help="Path or URI of a blend JSON file.")]
Prepared = Annotated[
    str | None, Parameter(help="Output folder; read from stdin when a command is piped into this one.")
]


@app.command
def plan(
    blend: BlendPath, *overrides: Overrides, output_dir: OutputDir | None = None, options: CommonOptions | None = None
) -> dict[str, Any]:
    """Dry run: shards, bytes, estimated tokens and epochs, what is cached and why not."""
    from tokenmill.tasks.report.plan import plan_record, print_plan
    from tokenmill.tasks.tokenize.planning import plan_pretrain
    from tokenmill.tasks.tokenize.settings import PretrainSettings

    settings = settings_of(PretrainSettings, options or CommonOptions(), overrides)
    planned = plan_pretrain(load_blend(blend), settings, output_dir)
    print_plan(planned, terminal)
    return plan_record(planned)


@app.command
def pretrain(
    blend: BlendPath,
    *overrides: Overrides,
    output_dir: OutputDir,
    dry_run: Annotated[bool, Parameter(negative="", help="Only plan.")] = False,
    options: CommonOptions | None = None,
) -> dict[str, Any]:
    """Prepare a blend for pretraining: Megatron .bin/.idx and blend.json."""
    if dry_run:
        return plan(blend, *overrides, output_dir=output_dir, options=options)
    from tokenmill.tasks.shards.usable import require_usable
    from tokenmill.tasks.tokenize.load import load_vocabulary
    from tokenmill.tasks.tokenize.settings import PretrainSettings

    settings = settings_of(PretrainSettings, options or CommonOptions(), overrides)
    loaded = load_blend(blend)
    require_usable(loaded, settings.store, output_dir)
    load_vocabulary(settings.tokenizer)
    be_quiet()
    from .pretrain import pretrain_data_prep

    return _run_preparation(pretrain_data_prep, loaded, output_dir, settings)


@app.command
def sft(
    blend: BlendPath,
    *overrides: Overrides,
    output_dir: OutputDir,
    dry_run: Annotated[bool, Parameter(negative="", help="Only plan.")] = False,
    options: CommonOptions | None = None,
) -> dict[str, Any]:
    """Prepare a blend of conversations for SFT: packed Parquet with exact loss masks, and blend.json."""
    from tokenmill.tasks.pack.planning import plan_sft
    from tokenmill.tasks.pack.settings import SftSettings
    from tokenmill.tasks.report.plan import plan_record, print_plan
    from tokenmill.tasks.shards.usable import require_usable

    settings = settings_of(SftSettings, options or CommonOptions(), overrides)
    loaded = load_blend(blend)
    require_usable(loaded, settings.store, output_dir)
    if dry_run:
        planned = plan_sft(loaded, settings, output_dir)
        print_plan(planned, terminal)
        return plan_record(planned)
    from tokenmill.tasks.pack.formats import find_template
    from tokenmill.tasks.tokenize.load import find_vocabulary

    find_template(settings, find_vocabulary(settings.tokenizer))
    be_quiet()
    from .sft import sft_data_prep

    return _run_preparation(sft_data_prep, loaded, output_dir, settings)


@app.command
def rl(
    blend: BlendPath,
    *overrides: Overrides,
    output_dir: OutputDir,
    dry_run: Annotated[bool, Parameter(negative="", help="Only plan.")] = False,
    options: CommonOptions | None = None,
) -> dict[str, Any]:
    """Prepare a blend of rows for reinforcement learning: JSON Lines that NeMo-RL and NeMo-Gym read as they are."""
    from tokenmill.tasks.report.plan import plan_record, print_plan
    from tokenmill.tasks.rl.planning import plan_rl, require_choices
    from tokenmill.tasks.rl.settings import RlSettings
    from tokenmill.tasks.shards.usable import require_usable

    settings = settings_of(RlSettings, options or CommonOptions(), overrides)
    loaded = load_blend(blend)
    require_usable(loaded, settings.store, output_dir)
    if dry_run:
        planned = plan_rl(loaded, settings, output_dir)
        print_plan(planned, terminal)
        return plan_record(planned)
    require_choices(loaded, settings)
    be_quiet()
    from .rl import rl_data_prep

    return _run_preparation(rl_data_prep, loaded, output_dir, settings)


@app.command
def harmony(
    blend: BlendPath,
    *overrides: Overrides,
    output_dir: OutputDir,
    dry_run: Annotated[bool, Parameter(negative="", help="Only plan.")] = False,
    options: CommonOptions | None = None,
) -> dict[str, Any]:
    """Bring chat data into one strict format: Parquet of Harmony text, without duplicates, in pools, ready to be scored."""
    from tokenmill.tasks.harmony.planning import plan_harmony, require_choices
    from tokenmill.tasks.report.plan import plan_record, print_plan
    from tokenmill.tasks.select.planning import require_fitting
    from tokenmill.tasks.select.settings import NormalizationSettings
    from tokenmill.tasks.shards.usable import require_usable

    settings = settings_of(NormalizationSettings, options or CommonOptions(), overrides)
    loaded = load_blend(blend)
    require_usable(loaded, settings.store, output_dir)
    require_fitting(settings, output_dir)
    if dry_run:
        planned = plan_harmony(loaded, settings, output_dir)
        print_plan(planned, terminal)
        return plan_record(planned)
    require_choices(loaded, settings)
    be_quiet()
    from .harmony import harmony_normalize

    return _run_preparation(harmony_normalize, loaded, output_dir, settings)


@app.command
def dedup(
    blend: BlendPath,
    *overrides: Overrides,
    output_dir: OutputDir,
    dry_run: Annotated[bool, Parameter(negative="", help="Only plan.")] = False,
    options: CommonOptions | None = None,
) -> dict[str, Any]:
    """Take out of a blend of text what it says twice, and what evaluations ask; rows stay as they stand."""
    from tokenmill.tasks.dedup.evaluations import find_evaluations
    from tokenmill.tasks.dedup.planning import plan_dedup
    from tokenmill.tasks.dedup.settings import DedupSettings
    from tokenmill.tasks.report.plan import plan_record, print_plan
    from tokenmill.tasks.shards.usable import require_usable

    settings = settings_of(DedupSettings, options or CommonOptions(), overrides)
    loaded = load_blend(blend)
    require_usable(loaded, settings.store, output_dir)
    if dry_run:
        planned = plan_dedup(loaded, settings, output_dir)
        print_plan(planned, terminal)
        return plan_record(planned)
    find_evaluations(settings.evaluations)
    be_quiet()
    from .dedup import deduplicate_blend

    return _run_preparation(deduplicate_blend, loaded, output_dir, settings)


score = App(name="score", help="Score rows with models: completions by their NLL, texts by embeddings.")
app.command(score)

Scored = Annotated[str, Parameter(help="Folder of a normalization, a blend, or a file, folder or glob of rows.")]


@score.command
def nll(
    source: Scored,
    *overrides: Overrides,
    output_dir: OutputDir,
    dry_run: Annotated[bool, Parameter(negative="", help="Only plan.")] = False,
    options: CommonOptions | None = None,
) -> dict[str, Any]:
    """How surprised a causal language model is by what the assistant says: NLL and perplexity, row by row."""
    from tokenmill.tasks.score.settings import NllSettings
    from tokenmill.tasks.score.sources import scored_blend

    settings = settings_of(NllSettings, options or CommonOptions(), overrides)
    return _score("nll", scored_blend(source, "nll"), settings, output_dir, dry_run=dry_run)


@score.command
def embed(
    source: Scored,
    *overrides: Overrides,
    output_dir: OutputDir,
    dry_run: Annotated[bool, Parameter(negative="", help="Only plan.")] = False,
    options: CommonOptions | None = None,
) -> dict[str, Any]:
    """A vector for every candidate, by which texts that are alike are found."""
    from tokenmill.tasks.score.settings import EmbedSettings
    from tokenmill.tasks.score.sources import scored_blend

    settings = settings_of(EmbedSettings, options or CommonOptions(), overrides)
    return _score("embed", scored_blend(source, "embed"), settings, output_dir, dry_run=dry_run)


def _score(
    what: "What", blend: Blend, settings: "NllSettings | EmbedSettings", output_dir: str, *, dry_run: bool
) -> dict[str, Any]:
    """Plan, or run the flow, of either score."""
    from tokenmill.tasks.report.plan import plan_record, print_plan
    from tokenmill.tasks.score.planning import plan_scores, require_model
    from tokenmill.tasks.shards.usable import require_usable

    require_usable(blend, settings.store, output_dir)
    if dry_run:
        planned = plan_scores(blend, settings, output_dir)
        print_plan(planned, terminal)
        return plan_record(planned)
    require_model(settings)
    be_quiet()
    from .score import score_candidates

    return _run_preparation(partial(score_candidates, what=what), blend, output_dir, settings)


def _run_preparation(
    preparation: Callable[..., object], blend: Blend, output_dir: str, settings: PreparationSettings
) -> dict[str, Any]:
    """Run a flow and print what it prepared."""
    from tokenmill.tasks.report.summary import print_summary
    from tokenmill.tasks.shards.manifest import read_manifest

    chosen = {name: getattr(settings, name) for name in settings.model_fields_set}
    record = cast("dict[str, Any]", preparation(blend, output_dir, **chosen))
    (artifact,) = record.values()
    print_summary(read_manifest(artifact["path"]) or {}, artifact["path"], terminal)
    return record


@app.command
def verify(output_dir: Prepared = None) -> dict[str, Any]:
    """Hash, open and count everything a preparation published; damaged shards are built again by the next run."""
    from tokenmill.tasks.nightly.versions import remedy_for
    from tokenmill.tasks.report.verification import inspector_of, print_verification, verification_record
    from tokenmill.tasks.shards.verify import verify as verify_output

    place = output_dir or piped("verify").path
    verification = verify_output(place, inspector_of(place))
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
    rows: Annotated[int, Parameter(help="How many packs or documents.")] = 1,
    random: Annotated[bool, Parameter(negative="", help="Choose them by chance instead of taking the first.")] = False,
    seed: Annotated[int, Parameter(help="Seed of the choice.")] = 42,
    html: Annotated[str | None, Parameter(help="Write a static page to this path instead.")] = None,
) -> dict[str, Any]:
    """Show what was published, decoded from the files themselves: packs coloured by loss mask, or documents."""
    from tokenmill.tasks.report.view import view_output, view_record
    from tokenmill.tasks.report.view_html import publish_html
    from tokenmill.tasks.report.view_terminal import print_view

    place = output_dir or piped("view").path
    found = view_output(place, doc=doc, dataset=dataset, seed=seed if random else None, rows=rows)
    if html is not None:
        terminal.print(f"written to {publish_html(found, html).path}", markup=False)
    elif sys.stdout.isatty():
        print_view(found, Console())
    return view_record(found)


@app.command
def choose(
    embeddings: Annotated[str, Parameter(help="Output folder of `tokenmill score embed`.")],
    *overrides: Annotated[str, Parameter(help="Settings as key=value, for example rows=10000.")],
    output_dir: OutputDir,
    plot: Annotated[bool, Parameter(help="Draw the choice as well, which needs matplotlib.")] = True,
) -> dict[str, Any]:
    """Choose rows that are spread over what there is, no two of them nearly the same, and say why these."""
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
    output_dir: Annotated[str, Parameter(help="Output folder of scores, or of a Harmony normalization.")],
    *,
    scores: Annotated[list[str] | None, Parameter(help="Another such folder, drawn together with it.")] = None,
    html: Annotated[str | None, Parameter(help="Where the page goes; report.html in the folder by default.")] = None,
) -> dict[str, Any]:
    """Draw scores on a static page: NLL, NLL against correctness, and a map of embeddings by pool."""
    from tokenmill.tasks.report.score_page import PAGE, publish_page, report_page

    places = [output_dir, *(scores or [])]
    plots = report_page(places)
    written = publish_page(places, plots, html or join(output_dir, PAGE))
    terminal.print(f"written to {written.path}", markup=False)
    return {
        "report": {"path": output_dir, "type": "report", "page": written.path, "plots": [plot.title for plot in plots]}
    }


@app.command
def push(
    output_dir: Annotated[str, Parameter(help="Output folder of a preparation.")],
    repository: Annotated[str, Parameter(help="Data set repository of the hub, as ORG/NAME; made when it is missing.")],
    *,
    public: Annotated[
        bool, Parameter(negative="", help="Everyone may read it; without, a public one is refused.")
    ] = False,
    dry_run: Annotated[bool, Parameter(negative="", help="Only list what would be pushed.")] = False,
) -> dict[str, Any]:
    """Push a preparation to the Hugging Face hub, private unless asked otherwise; HF_TOKEN has to allow it."""
    from tokenmill.tasks.report.parcel import parcel_of
    from tokenmill.tasks.report.push import print_plan, print_pushed, push_record, stale_names, target_of
    from tokenmill.tasks.report.push import push as push_parcel

    parcel = parcel_of(output_dir)
    target = target_of(repository, public=public)
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
    keep: Annotated[int, Parameter(help="Versions of each blend that stay.", validator=Number(gte=1))] = 7,
    also_keep: Annotated[
        list[str] | None,
        Parameter(help="A version, a name of one (art://NAME), or another output of this store that stays, too."),
    ] = None,
    workers: Annotated[int | None, Parameter(help="Worker processes.")] = None,
) -> dict[str, Any]:
    """Prepare the next version of every blend that changed, say why, and remove what is out of date."""
    from tokenmill.tasks.nightly.blends import find_blends
    from tokenmill.tasks.sources.discovery import require_no_overlap

    require_no_overlap("blends", blends, {"the output folder": output_dir})
    find_blends(blends)
    be_quiet()
    from .nightly import reprep_changed_blends

    return reprep_changed_blends(blends, output_dir, keep=keep, also_keep=also_keep, workers=workers)


@app.command
def deploy(
    *,
    write: Annotated[bool, Parameter(negative="", help="Only write the files that are missing, for review.")] = False,
) -> dict[str, Any]:
    """Deploy all flows to a Prefect server as this folder's prefect.yaml says, which is written where there is none."""
    from .deploying import deploy as apply
    from .deploying import print_deployments, require_server, write_project

    if not write:
        require_server()
    folder = Path.cwd()
    written = write_project(folder)
    if written:
        terminal.print(f"{len(written)} files written to {folder}: prefect.yaml and what it names", markup=False)
    deployments = {} if write else apply(folder)
    if deployments:
        print_deployments(deployments, terminal)
    return {"deploy": {"path": str(folder), "type": "deployments", "written": written, "deployed": [*deployments]}}


@app.command
def prune(
    store: Annotated[str, Parameter(help="A store that preparations share.")],
    *,
    keep: Annotated[list[str], Parameter(help="An output folder whose shards stay; name all there are.")],
    grace_days: Annotated[float, Parameter(help="Younger shards stay: they may be of a run under way.")] = 2.0,
    dry_run: Annotated[bool, Parameter(negative="", help="Only count.")] = False,
) -> dict[str, Any]:
    """Remove shards that no kept output refers to."""
    from tokenmill.tasks.nightly.prune import leftovers, prune_record
    from tokenmill.tasks.nightly.prune import prune as prune_store

    found = (leftovers if dry_run else prune_store)(store, keep, grace_days * 86_400)
    terminal.print(
        f"{len(found.removable):,} shards of {found.size / 1e9:,.3f} GB {'would go' if dry_run else 'removed'}; "
        f"{found.young:,} are too young, {found.referenced:,} are referenced"
    )
    return prune_record(found, store, keep)


@app.command
def register(
    name: Annotated[str, Parameter(help="What it is called from now on: art://NAME.")],
    folder: Annotated[
        str | None, Parameter(help="Output folder of a command; read from stdin when one is piped in.")
    ] = None,
) -> dict[str, Any]:
    """Give what a command made a name and a version, by which other commands find it: art://NAME, art://NAME:v2."""
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
    """What something was made from, and that from what, down to data sets."""
    from tokenmill.tasks.report.registry import lineage as trace
    from tokenmill.tasks.report.registry import print_lineage

    found = trace(folder or piped("lineage").path)
    print_lineage(found, terminal)
    return {"lineage": found}


@app.command
def demo(*, output_dir: OutputDir = "demo") -> dict[str, Any]:
    """The whole journey on text this machine already has, offline: plan, prepare, verify, and where to look."""
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
    record = pretrain(blend, "shard_size=4MB", output_dir=f"{output_dir}/prepared")
    terminal.print(f"[bold]3. tokenmill verify {output_dir}/prepared[/]")
    verify(f"{output_dir}/prepared")
    terminal.print(f"[bold]4. tokenmill sft {CHAT_BLEND} --output-dir {output_dir}/conversations pack_size=1024[/]")
    sft(CHAT_BLEND, "pack_size=1024", output_dir=f"{output_dir}/conversations")
    terminal.print(f"[bold]5. tokenmill view {output_dir}/conversations --html {output_dir}/conversations.html[/]")
    view(f"{output_dir}/conversations", rows=3, html=f"{output_dir}/conversations.html")
    terminal.print(f"[bold]6. tokenmill rl {QUESTIONS_BLEND} --output-dir {output_dir}/questions target=nemo_gym[/]")
    rl(QUESTIONS_BLEND, "target=nemo_gym", output_dir=f"{output_dir}/questions")
    terminal.print(f"[bold]7. tokenmill harmony {HARMONY_BLEND} --output-dir {output_dir}/harmony[/]")
    harmony(HARMONY_BLEND, output_dir=f"{output_dir}/harmony")
    print_next_steps(f"{output_dir}/prepared", blend, terminal)
    return record


def run(arguments: list[str]) -> int:
    """Run one command and return the exit code."""
    try:
        _require_values(arguments)
        result = app(arguments, exit_on_error=False, print_error=False, result_action="return_value")
    except (CycloptsError, InputError) as error:
        return _complain(error, WRONG_CALL)
    except PartlyFailedError as error:
        _print_record(error.record)
        return _complain(error, FAILED)
    except (RunError, OSError) as error:
        return _complain(error, FAILED)
    except KeyboardInterrupt:
        return _complain("interrupted; run the same command again to go on from here", INTERRUPTED)
    if isinstance(result, dict):
        _print_record(cast("dict[str, Any]", result))
    return DONE


def _require_values(arguments: list[str]) -> None:
    """Raises InputError for an empty argument, such as a script's variable that is not set."""
    for before, argument in pairwise(["tokenmill", *arguments]):
        if EMPTY.fullmatch(argument):
            raise InputError(f"the argument after {before!r} is empty; give it a value, or leave the option out")


def _print_record(record: Mapping[str, Any]) -> None:
    """Print the artifact record as one line where another program may read it."""
    if not sys.stdout.isatty():
        sys.stdout.write(orjson.dumps(record).decode() + "\n")


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
        code = code or _complain(f"stdout: {lost.strerror}; the command is done, but its output is lost", FAILED)
    sys.exit(INTERRUPTED if interrupted() else code)
