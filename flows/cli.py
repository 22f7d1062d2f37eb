"""The `tokenmill` command: parses, calls, prints.

Progress and summaries go to stderr. When stdout is not a terminal it carries one line of JSON, the artifact record,
and a following command reads its folder from there. Exit codes: 0 done, 1 the run failed, 2 the call was wrong.
Prefect and Dask are imported only by the commands that run a flow; `plan`, `verify` and `--help` start at once.
"""

import os
import sys
from typing import Annotated, Any, cast

import orjson
from cyclopts import App, CycloptsError, Parameter
from rich.console import Console

from flows.options import CommonOptions, pretrain_settings
from tasks.blend.load import load_blend
from tasks.errors import InputError, RunError

DONE, FAILED, WRONG_CALL, INTERRUPTED = 0, 1, 2, 130

QUIET = {
    "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",
    "PREFECT_RESULTS_DEFAULT_SERIALIZER": "json",
    "DO_NOT_TRACK": "1",
    "DASK_LOGGING__DISTRIBUTED": "error",
}
"""For a person at a terminal: the progress line instead of two log streams, and no call home."""

app = App(name="tokenmill", help="Blends of raw text in, training-ready token shards out.", help_on_error=False)
terminal = Console(stderr=True)

BlendPath = Annotated[str, Parameter(help="Path or URI of a blend JSON file.")]
OutputDir = Annotated[str, Parameter(help="Folder or URI to publish in.")]
Overrides = Annotated[str, Parameter(help="Settings as key.sub=value, for example tokenizer.model=o200k_base.")]
Prepared = Annotated[
    str | None, Parameter(help="Output folder; read from stdin when a command is piped into this one.")
]


@app.command
def plan(
    blend: BlendPath, *overrides: Overrides, output_dir: OutputDir | None = None, options: CommonOptions | None = None
) -> dict[str, Any]:
    """Dry run: shards, bytes, estimated tokens and epochs, what is cached and why not."""
    from tasks.report.plan import plan_record, print_plan
    from tasks.tokenize.planning import plan_pretrain

    planned = plan_pretrain(load_blend(blend), pretrain_settings(options or CommonOptions(), overrides), output_dir)
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
    from tasks.tokenize.usable import require_usable

    settings = pretrain_settings(options or CommonOptions(), overrides)
    loaded = load_blend(blend)
    require_usable(loaded, settings, output_dir)
    os.environ.update({name: value for name, value in QUIET.items() if name not in os.environ})
    from flows.pretrain import pretrain_data_prep
    from tasks.report.summary import print_summary
    from tasks.shards.manifest import read_manifest
    from tasks.shards.stage import require_server

    require_server()
    record = cast("dict[str, Any]", pretrain_data_prep(loaded, output_dir, **dict(settings)))
    path = record["pretrain"]["path"]
    print_summary(read_manifest(path) or {}, path, terminal)
    return record


@app.command
def verify(output_dir: Prepared = None) -> dict[str, Any]:
    """Hash, open and count everything a preparation published; damaged shards are built again by the next run."""
    from tasks.report.verification import print_verification, verification_record
    from tasks.shards.verify import verify as verify_output
    from tasks.tokenize.inspect import inspect_pretrain_shard

    place = output_dir or _piped_path()
    verification = verify_output(place, inspect_pretrain_shard)
    print_verification(verification, place, terminal)
    if verification.problems:
        raise RunError(f"{place}: {len(verification.problems)} problems; run the preparation again to mend them")
    return verification_record(verification, place)


@app.command
def demo(*, output_dir: OutputDir = "demo") -> dict[str, Any]:
    """The whole journey on text this machine already has, offline: plan, prepare, verify, and where to look."""
    from tasks.report.demo import print_next_steps, write_demo_blend

    blend = write_demo_blend(output_dir)
    terminal.print(f"[bold]1. a blend of Python's own source and documentation:[/] {blend}")
    terminal.print(f"[bold]2. tokenmill pretrain {blend} --output-dir {output_dir}/prepared[/]")
    record = pretrain(blend, "shard_size=4MB", output_dir=f"{output_dir}/prepared")
    terminal.print(f"[bold]3. tokenmill verify {output_dir}/prepared[/]")
    verify(f"{output_dir}/prepared")
    print_next_steps(f"{output_dir}/prepared", blend, terminal)
    return record


def _piped_path() -> str:
    """The folder in the artifact record that the command before this one printed."""
    if sys.stdin.isatty():
        raise InputError("verify: name the output folder of a preparation, or pipe a preparation into this command")
    try:
        (record,) = orjson.loads(sys.stdin.buffer.read()).values()
        return record["path"]
    except (orjson.JSONDecodeError, AttributeError, ValueError, KeyError, TypeError) as error:
        raise InputError("verify: stdin holds no artifact record; name the output folder of a preparation") from error


def run(arguments: list[str]) -> int:
    """Run one command and return the exit code."""
    try:
        result = app(arguments, exit_on_error=False, print_error=False, result_action="return_value")
    except (CycloptsError, InputError) as error:
        return _complain(error, WRONG_CALL)
    except (RunError, OSError) as error:
        return _complain(error, FAILED)
    except KeyboardInterrupt:
        return _complain("interrupted; run the same command again to go on from here", INTERRUPTED)
    if isinstance(result, dict) and not sys.stdout.isatty():
        sys.stdout.write(orjson.dumps(result).decode() + "\n")
    return DONE


def _complain(error: object, code: int) -> int:
    for line in str(error).splitlines():
        sys.stderr.write(f"tokenmill: {line}\n")
    return code


def main() -> None:
    """Run the command line and exit with its code."""
    sys.exit(run(sys.argv[1:]))
