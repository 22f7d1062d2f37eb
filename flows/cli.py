"""The `tokenmill` command: parses, calls, prints.

Progress and summaries go to stderr. When stdout is not a terminal it carries one line of JSON, the artifact record,
and a following command reads its folder from there. Exit codes: 0 done, 1 the run failed, 2 the call was wrong,
130 Ctrl-C was pressed.
Prefect and Dask are imported only by the commands that run a flow; `plan`, `verify` and `--help` start at once.
"""

import re
import sys
from collections.abc import Mapping
from functools import partial
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, cast

from cyclopts import App, CycloptsError, Group, MissingArgumentError, Parameter, UnknownOptionError
from cyclopts.validators import Number
from pydantic import ValidationError
from rich.console import Console
from tokenmill.tasks.errors import InputError, PartlyFailedError, RunError
from tokenmill.tasks.kit.parts import visible_line
from tokenmill.tasks.renamed import COMMANDS, LEAVES, OPTIONS
from tokenmill.tasks.shards.kinds import KINDS, preparation
from tokenmill.tasks.storage import absolute

from .options import Format, OutputDir, be_quiet, print_json, terminal
from .output_commands import diff, lineage, prune, push, register, report, verify, view, why
from .preparation_commands import choose, compare_tokenizers, mix, plan, preparation_command
from .process import end_when_interrupted, lost_output, open_streams
from .training_commands import benchmark, evaluate, order, pipeline, step, train

EMPTY = re.compile(r"(--[\w-]+=)?\s*")
"""An empty argument, or an option with an empty value."""

DONE, FAILED, WRONG_CALL = 0, 1, 2

app = App(
    name="tokenmill",
    help="Blends of raw text in, training-ready token shards out.",
    version=partial(version, "tokenmill"),
    help_on_error=False,
    # Lists don't have an --empty-… option beside them.
    default_parameter=Parameter(negative_iterable=()),
    # `process` ends the command after Ctrl-C.
    suppress_keyboard_interrupt=False,
)
app.register_install_completion_command(help="Complete commands and options with the tab key of this shell.")
PREPARE, EXPLORE, INSPECT, SCORE, TRAIN, OPERATE = (
    Group(name, sort_key=number)
    for number, name in enumerate(["Prepare", "Explore", "Inspect", "Score and choose", "Train", "Operate"])
)
"""The panels of `tokenmill --help`, in the order in which a user meets them."""

for panel, commands in {
    EXPLORE: (plan, mix, compare_tokenizers),
    INSPECT: (verify, view, why, diff, report, lineage),
    SCORE: (choose,),
    TRAIN: (order, train, evaluate, benchmark, step, pipeline),
    OPERATE: (prune, register, push),
}.items():
    for command in commands:
        app.command(command, group=panel)
score = App(name="score", help="Score rows with models: completions by their NLL, texts by embeddings.", group=SCORE)
app.command(score)
for name, kind in KINDS.items():
    parent, _, word = kind.command.rpartition(" ")
    if parent:
        score.command(preparation_command(name), name=word)
    else:
        app.command(preparation_command(name), name=word, group=PREPARE)


@app.command(group=OPERATE)
def nightly(
    blends: Annotated[str, Parameter(help="Folder or URI with blends in folders named after their kind.")],
    *,
    output_dir: OutputDir,
    keep_versions: Annotated[int, Parameter(help="Versions to keep of each blend.", validator=Number(gte=1))] = 7,
    also_keep: Annotated[
        list[str] | None,
        Parameter(help="Also keep this version, name (art://NAME), or other output of this store."),
    ] = None,
    workers: Annotated[int | None, Parameter(help="Worker processes.")] = None,
) -> dict[str, Any]:
    """Prepare a new version of every blend that changed, explain why, and remove outdated versions."""
    from tokenmill.tasks.nightly.blends import find_blends
    from tokenmill.tasks.sources.discovery import require_no_overlap

    require_no_overlap("blends", blends, {"the output folder": output_dir})
    # A wrong folder is an error before Prefect is imported, which takes seconds.
    find_blends(blends)
    be_quiet()
    from .nightly import reprep_changed_blends

    return reprep_changed_blends(blends, output_dir, keep_versions=keep_versions, also_keep=also_keep, workers=workers)


@app.command(group=EXPLORE)
def doctor(
    output_dir: Annotated[str, Parameter(help="Folder that outputs would be written to.")] = ".",
    *,
    tokenizer: Annotated[
        str | None, Parameter(help="A tokenizer: compare its ids with transformers' AutoTokenizer.")
    ] = None,
    format: Format = "table",  # noqa: A002 - the name of the option
) -> None:
    """Check your environment and suggest fixes."""
    from tokenmill.tasks.report.doctor import doctor_record, examine, print_checks

    from .direct import server_address

    checks = examine(output_dir, server_address(), tokenizer)
    if format == "json":
        print_json(doctor_record(checks))
    else:
        print_checks(checks, Console())


@app.command(group=OPERATE)
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


@app.command(group=EXPLORE)
def demo(*, output_dir: OutputDir = "demo") -> dict[str, Any]:
    """Run every step offline on text this machine already has: plan, prepare, verify, view."""
    from tokenmill.tasks.report.demo import (
        CHAT_BLEND,
        HARMONY_BLEND,
        QUESTIONS_BLEND,
        print_next_steps,
        write_demo_blend,
    )
    from tokenmill.tasks.shards.planning import require_writable

    require_writable(absolute(output_dir))
    blend = write_demo_blend(output_dir)
    terminal.print(f"[bold]1. a blend of Python's own source and documentation:[/] {blend}")
    terminal.print(f"[bold]2. tokenmill pretrain {blend} --output-dir {output_dir}/prepared[/]")
    record = _demonstrated("pretrain", blend, f"{output_dir}/prepared", "shard_size=4MB")
    terminal.print(f"[bold]3. tokenmill verify {output_dir}/prepared[/]")
    verify(f"{output_dir}/prepared")
    terminal.print(f"[bold]4. tokenmill sft {CHAT_BLEND} --output-dir {output_dir}/conversations pack_size=1024[/]")
    _demonstrated("sft", CHAT_BLEND, f"{output_dir}/conversations", "pack_size=1024")
    terminal.print(f"[bold]5. tokenmill view {output_dir}/conversations --html {output_dir}/conversations.html[/]")
    view(f"{output_dir}/conversations", limit=3, html=f"{output_dir}/conversations.html")
    terminal.print(f"[bold]6. tokenmill rl {QUESTIONS_BLEND} --output-dir {output_dir}/questions target=nemo_gym[/]")
    _demonstrated("rl", QUESTIONS_BLEND, f"{output_dir}/questions", "target=nemo_gym")
    terminal.print(f"[bold]7. tokenmill harmony {HARMONY_BLEND} --output-dir {output_dir}/harmony[/]")
    _demonstrated("harmony", HARMONY_BLEND, f"{output_dir}/harmony")
    print_next_steps(f"{output_dir}/prepared", blend, terminal)
    return record


def _demonstrated(name: str, blend: str, output_dir: str, *overrides: str) -> dict[str, Any]:
    return preparation_command(name)(blend, *overrides, output_dir=output_dir)


def run(arguments: list[str]) -> int:
    """Run one command and return the exit code."""
    try:
        _require_words(arguments)
        # Errors are printed below, a line each, with exit codes of our own.
        result = app(arguments, exit_on_error=False, print_error=False, result_action="return_value")
    except (CycloptsError, InputError) as error:
        return _complain(_plain(error), WRONG_CALL)
    except PartlyFailedError as error:
        # A night with failed blends has prepared others.
        _print_record(error.record)
        return _complain(error, FAILED)
    except (RunError, OSError) as error:
        return _complain(error, FAILED)
    if isinstance(result, dict):
        _print_record(cast("dict[str, Any]", result))
    return DONE


def _require_words(arguments: list[str]) -> None:
    for before, argument in pairwise(["tokenmill", *arguments]):
        if EMPTY.fullmatch(argument):  # such as an unset variable of a script
            raise InputError(f"the argument after {before!r} is empty; give it a value or omit the option")
    if arguments and arguments[0] in COMMANDS:
        raise InputError(f"{arguments[0]!r} has a new name: tokenmill {COMMANDS[arguments[0]]}")


def _print_record(record: Mapping[str, Any]) -> None:
    if not sys.stdout.isatty():
        print_json(record)


def _plain(error: Exception) -> object:
    """A wrong call as text, with a remedy where the library that parses calls knows none."""
    called = " ".join(error.command_chain or ()) if isinstance(error, CycloptsError) else ""
    if isinstance(error, MissingArgumentError) and error.argument and not error.keyword and not error.argument.tokens:
        name, field = error.argument.name, error.argument.field_info
        is_option = field.kind is field.KEYWORD_ONLY
        needed = f"{name} DIR" if name == "--output-dir" else name if is_option else name.lstrip("-").upper()
        return f"{called}: missing {needed}; see tokenmill {called} --help"
    if isinstance(error, UnknownOptionError):
        option = (error.token.keyword or error.token.value).partition("=")[0]
        if option in {"--output-dir", "-o"}:
            return f"{called}: {option} isn't an option of this command; write the folder without it: tokenmill {called} FOLDER"
        if option in OPTIONS:
            return f"{option} has a new name, {OPTIONS[option]}"
        from tokenmill.tasks.train.settings import OrderSettings, TrainSettings  # rarely needed, and slow to import

        models = [TrainSettings, OrderSettings, *(preparation(name).settings for name in KINDS)]
        name = option.removeprefix("--").replace("-", "_")
        name = LEAVES.get(name, name)
        known = any(name in model.model_fields for model in models)
        return f"{error} It is a setting: write {name}=VALUE." if known else error
    if isinstance(error, CycloptsError) and isinstance(error.__cause__, ValidationError):
        rejected = [
            (str(each["loc"][0]).replace("_", "-"), each["msg"], each["input"]) for each in error.__cause__.errors()
        ]
        return "\n".join(f"--{name}: {message} (got {value!r})" for name, message, value in rejected)
    return error


def _complain(error: object, code: int) -> int:
    for line in str(error).splitlines():
        sys.stderr.write(f"tokenmill: {visible_line(line)}\n")
    return code


def main() -> None:
    """Run the command line and exit with its code."""
    open_streams()
    end_when_interrupted()
    code = run(sys.argv[1:])
    if lost := lost_output():
        code = code or _complain(f"stdout: {lost.strerror}; the command finished, but its output is lost", FAILED)
    sys.exit(code)
