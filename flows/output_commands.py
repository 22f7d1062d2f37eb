"""The commands that read, check, explain, publish and prune outputs.

Most of them read their folder from a pipe: `tokenmill pretrain … | tokenmill verify`.
"""

from typing import Annotated, Any

from cyclopts import Parameter
from cyclopts.validators import Number
from rich.console import Console
from rich.filesize import decimal
from tokenmill.tasks.errors import InputError, RunError
from tokenmill.tasks.storage import join
from tokenmill.tasks.strict import parse

from .options import GIVEN, Format, TextFormat, piped, print_json, terminal

Prepared = Annotated[
    str | None, Parameter(help="Folder that a command wrote; read from stdin when one is piped into this one.")
]


def verify(
    folder: Prepared = None,
    *,
    workers: Annotated[
        int | None, Parameter(help="Worker processes; by default one per core for more than 20 GB.")
    ] = None,
    cluster: Annotated[
        str, Parameter(help="local, a Dask scheduler's address, or a YAML file with a profile.")
    ] = "local",
) -> dict[str, Any]:
    """Check hashes, formats and counts of everything published, or that a model was trained on exactly the planned tokens.

    The next run of a preparation rebuilds damaged shards.
    """
    from tokenmill.tasks.kit.parts import counted
    from tokenmill.tasks.nightly.versions import remedy_for
    from tokenmill.tasks.report.verification import print_verification, verification_record, verified
    from tokenmill.tasks.shards.settings import ClusterSettings
    from tokenmill.tasks.train.job import is_training

    place = folder or piped("verify").path
    settings = parse(ClusterSettings, {"workers": workers, "cluster": cluster}, GIVEN)
    if is_training(place):
        from tokenmill.tasks.train.proof import print_proof, proof_record, prove

        if settings != ClusterSettings():
            raise InputError(f"{place}: a training run is verified in one process; remove --workers and --cluster")
        proof = prove(place)
        print_proof(proof, place, terminal)
        return proof_record(proof, place)
    verification = verified(place, settings)
    print_verification(verification, place, terminal)
    if verification.problems:
        raise RunError(f"{place}: {counted(len(verification.problems), 'problem')}; {remedy_for(place)}")
    return verification_record(verification, place)


def view(
    folder: Prepared = None,
    *,
    doc: Annotated[str | None, Parameter(help="Show one document, by the id that this command prints.")] = None,
    dataset: Annotated[str | None, Parameter(help="Only this dataset.")] = None,
    limit: Annotated[int, Parameter(help="Number of packs or documents.")] = 1,
    random: Annotated[bool, Parameter(negative="", help="Choose at random instead of taking the first.")] = False,
    seed: Annotated[int, Parameter(help="Seed of the random choice.")] = 42,
    html: Annotated[str | None, Parameter(help="Write a static page to this path instead.")] = None,
    format: Format = "text",  # noqa: A002 - the name of the option
) -> None:
    """Show published packs, colored by loss mask, or documents, decoded from the files themselves."""
    from tokenmill.tasks.report.rendered_view import print_documents, print_view
    from tokenmill.tasks.report.view import view_output, view_record

    place = folder or piped("view").path
    found = view_output(place, doc=doc, dataset=dataset, seed=seed if random else None, rows=limit)
    if html is not None:
        from tokenmill.tasks.report.rendered_view import publish_html

        terminal.print(f"written to {publish_html(found, html).path}", markup=False)
    elif format == "json":
        print_json(view_record(found))
    else:
        (print_view if format == "text" else print_documents)(found, Console())


def why(
    folder: Annotated[
        str | None,
        Parameter(help="Folder of a preparation or of a training run; read from stdin when a command is piped in."),
    ] = None,
    *,
    row: Annotated[str | None, Parameter(help="The row, as FILE:LINE; lines count from 1.")] = None,
    doc: Annotated[str | None, Parameter(help="A document made of the row, by the id that `view` prints.")] = None,
    format: TextFormat = "text",  # noqa: A002 - the name of the option
) -> None:
    """Trace a source row: why it was dropped, or where its tokens are and which steps train on them."""
    from tokenmill.tasks.report.step import data_in, with_steps
    from tokenmill.tasks.report.why import print_why, why_document, why_record, why_row

    if (row is None) == (doc is None):
        raise InputError("why: name a row, --row FILE:LINE, or a document, --doc ID, but not both")
    place = folder or piped("why").path
    data = data_in(place)
    stories = with_steps(place, why_row(data, row) if row is not None else why_document(data, doc or ""))
    if format == "json":
        print_json(why_record(data, stories))
    else:
        print_why(data, stories, Console())


def report(
    folder: Prepared = None,
    *,
    scores: Annotated[
        list[str] | None,
        Parameter(help="Plot these score folders with the folder's rows on a separate page."),
    ] = None,
    html: Annotated[
        str | None, Parameter(help="Path of the page; by default report.html in the folder, scores.html with --scores.")
    ] = None,
    training_summary: Annotated[
        bool, Parameter(negative="", help="Also write training-summary.md, the EU's form for providers of models.")
    ] = False,
) -> dict[str, Any]:
    """Write the page and the cards of a preparation again: counts, weights, lengths, masks, samples. Or plot scores."""
    from tokenmill.tasks.report import cards, page, score_page
    from tokenmill.tasks.report.measured import measured

    place = folder or piped("report").path
    record: dict[str, Any]
    if scores:
        places = list(dict.fromkeys([place, *scores]))
        sections = score_page.report_page(places)
        written = score_page.publish_page(places, sections, html or join(place, score_page.PAGE))
        record = {"page": written.path, "plots": list(sections)}
    else:
        run = measured(place)
        published = page.publish_page(run, html).path
        record = {"page": published, "cards": cards.publish_cards(run, summary=training_summary)}
    terminal.print(f"written to {record['page']}", markup=False)
    return {"report": {"path": place, "type": "report", **record}}


def diff(
    before: Annotated[str, Parameter(help="Folder that a preparation wrote, or version of a nightly blend.")],
    after: Annotated[str, Parameter(help="The folder to compare with it.")],
    *,
    html: Annotated[str | None, Parameter(help="Also write a static page to this path.")] = None,
    format: Format = "table",  # noqa: A002 - the name of the option
) -> None:
    """Compare two outputs: settings, sources and every document - kept, changed, moved, gone or new, and why."""
    from tokenmill.tasks.nightly.diff import diff as compare
    from tokenmill.tasks.nightly.diff import difference_record, print_difference, publish_difference

    found = compare(before, after)
    if html is not None:
        terminal.print(f"written to {publish_difference(found, html).path}", markup=False)
    if format == "json":
        print_json(difference_record(found))
    else:
        print_difference(found, Console(), table=format == "table")


def push(
    folder: Annotated[str, Parameter(help="Folder that a preparation wrote.")],
    repository: Annotated[str, Parameter(help="Dataset repository on the Hub, as ORG/NAME; created if missing.")],
    *,
    public: Annotated[
        bool, Parameter(negative="", help="Create or update a public repository; without this, it must be private.")
    ] = False,
    dry_run: Annotated[bool, Parameter(negative="", help="List the files and push nothing.")] = False,
) -> dict[str, Any]:
    """Push a preparation to the Hugging Face hub, private by default; HF_TOKEN must allow it."""
    from tokenmill.tasks.report.push import (
        fitted,
        parcel_of,
        print_plan,
        print_pushed,
        push_record,
        stale_names,
        target_of,
    )
    from tokenmill.tasks.report.push import push as push_parcel

    whole = parcel_of(folder)
    target = target_of(repository, public=public)
    parcel = fitted(whole, target)
    if dry_run:
        print_plan(parcel, target, stale_names(parcel, target), terminal)
        return push_record(parcel, target, None)
    commit = push_parcel(parcel, target)
    print_pushed(parcel, target, commit, terminal)
    return push_record(parcel, target, commit)


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


def lineage(
    folder: Annotated[
        str | None, Parameter(help="Output folder or art:// name; read from stdin when a command is piped in.")
    ] = None,
) -> dict[str, Any]:
    """Show the sources of an output, down to its datasets."""
    from tokenmill.tasks.report.registry import lineage as trace
    from tokenmill.tasks.report.registry import print_lineage

    found = trace(folder or piped("lineage").path)
    print_lineage(found, terminal)
    return {"lineage": found}


def prune(
    store: Annotated[str, Parameter(help="Store that preparations share.")],
    *,
    keep: Annotated[list[str], Parameter(help="Output folder whose shards to keep; name all of them.")],
    grace_days: Annotated[
        float, Parameter(help="Keep younger shards: a run may be writing them.", validator=Number(gte=0))
    ] = 2.0,
    dry_run: Annotated[bool, Parameter(negative="", help="Count the shards and remove nothing.")] = False,
) -> dict[str, Any]:
    """Remove shards that no kept output uses."""
    from tokenmill.tasks.kit.parts import counted
    from tokenmill.tasks.nightly.prune import leftovers, prune_record
    from tokenmill.tasks.nightly.prune import prune as prune_store

    found = (leftovers if dry_run else prune_store)(store, keep, grace_days * 86_400)
    terminal.print(
        f"{counted(len(found.removable), 'shard')} of {decimal(found.size)} {'would be removed' if dry_run else 'removed'}; "
        f"{found.young:,} are too young, {found.referenced:,} are referenced"
    )
    return prune_record(found, store, keep)
