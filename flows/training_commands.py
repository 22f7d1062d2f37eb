"""The commands train, evaluate, benchmark and pipeline.

They read their input folder from a pipe: `tokenmill pretrain … | tokenmill train … | tokenmill evaluate …`.
"""

import shlex
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter
from cyclopts.validators import Number
from rich.console import Console
from tokenmill.tasks.errors import InputError, RunError
from tokenmill.tasks.storage import absolute, join
from tokenmill.tasks.strict import Strict
from tokenmill.tasks.train.settings import EvaluateSettings, OrderSettings, TrainSettings

from .options import TextFormat, be_quiet, choices_of, config_settings, piped, print_json, settings_parameter, terminal

if TYPE_CHECKING:
    from tokenmill.tasks.report.step import ShownStep

Config = Annotated[str | None, Parameter(help="Settings that replace defaults: tiny, small, or a YAML file.")]
Data = Annotated[str | None, Parameter(help="Output folder of a preparation; default: the one piped in.")]
OutputDir = Annotated[str, Parameter(name=["--output-dir", "-o"], help="Folder to train in; not a URI.")]
Overrides = Annotated[str, settings_parameter(lambda: (TrainSettings, ()))]
DryRun = Annotated[bool, Parameter(negative="", help="Write job, manifest and scripts for review; train nothing.")]


def train(
    data: Data = None,
    *overrides: Overrides,
    output_dir: OutputDir,
    config: Config = None,
    dry_run: DryRun = False,
) -> dict[str, Any]:
    """Train a model on prepared data, or hand it to Slurm, Kubernetes, Megatron-LM, Megatron-Bridge or NeMo-RL."""
    from tokenmill.tasks.train.progress import print_training

    place, chosen = _place("train", (data, *overrides), {"pretrain", "sft", "rl"})
    settings = _settings(config, chosen)
    if dry_run:
        return _checked(place, settings, output_dir)
    record = _trained(place, settings, output_dir)
    print_training(record["train"], terminal)
    return record


def order(
    folder: Annotated[
        str | None, Parameter(help="Folder that tokenmill pretrain wrote; default: the one piped in.")
    ] = None,
    *overrides: Annotated[str, settings_parameter(lambda: (OrderSettings, ()))],
) -> dict[str, Any]:
    """Plan which samples each training step reads: build megatron-core's indices ahead, and count reads."""
    from tokenmill.tasks.train.order import print_order, required_order

    from .direct import run_order

    place, chosen = _place("order", (folder, *overrides), {"pretrain"})
    settings = choices_of(OrderSettings, chosen)
    be_quiet()
    record = run_order(place, settings)
    print_order(required_order(place), terminal)
    return record


def step(
    folder: Annotated[
        str | None, Parameter(help="Folder of a training run, or of data with an order; default: the one piped in.")
    ] = None,
    *,
    number: Annotated[int | None, Parameter(name="--step", help="The step to show, counted from 1.")] = None,
    find: Annotated[
        str | None, Parameter(help="A text, or a row as FILE:LINE, to find the steps that read it.")
    ] = None,
    limit: Annotated[
        int | None, Parameter(help="Number of samples to show; default: all.", validator=Number(gte=1))
    ] = None,
    skip_list: Annotated[
        str | None, Parameter(help="File to add the step or the found documents to, for train skip_list=FILE.")
    ] = None,
    html: Annotated[str | None, Parameter(help="Write a static page to this path instead.")] = None,
    format: TextFormat = "text",  # noqa: A002 - the name of the option
) -> None:
    """Show the reads of a training step, with source rows, loss and gradient norm; or find the steps that read a row."""
    from tokenmill.tasks.report.step import Reading, find_record, print_found
    from tokenmill.tasks.train.job import SkippedStep, extend_skip_list

    if (number is None) == (find is None):
        raise InputError(
            "step: name a step, --step N, or what to look for, --find TEXT or --find FILE:LINE, but not both"
        )
    place, _ = _place("step", (folder,), {"pretrain", "sft", "model", "order"})
    reading = Reading.of(place)
    if find is not None:
        found = reading.find(find)
        entries = [each.skip for each in found]
        if format == "json":
            print_json(find_record(place, found))
        else:
            print_found(found, Console())
    else:
        shown = reading.step(number or 0, limit)
        entries = [SkippedStep(step=shown.step)]
        _show_step(shown, html, format)
    if skip_list is not None:
        terminal.print(f"{skip_list}: {extend_skip_list(skip_list, entries):,} entries", markup=False, soft_wrap=True)


def _show_step(shown: "ShownStep", html: str | None, format: TextFormat) -> None:  # noqa: A002 - of the option
    from tokenmill.tasks.report.rendered_view import publish_html
    from tokenmill.tasks.report.step import describe_step, print_step, step_record

    if html is not None:
        written = publish_html(shown.view, html, f"; {describe_step(shown)}")
        terminal.print(f"written to {written.path}", markup=False, soft_wrap=True)
    elif format == "json":
        print_json(step_record(shown))
    else:
        print_step(shown, Console())


def evaluate(
    training: Annotated[
        str | None, Parameter(help="Output folder of a training run; default: the one piped in.")
    ] = None,
    *overrides: Annotated[str, settings_parameter(lambda: (EvaluateSettings, ()))],
    output_dir: Annotated[
        str | None,
        Parameter(
            name=["--output-dir", "-o"], help="Folder for results; default: results/ in the training run's folder."
        ),
    ] = None,
) -> dict[str, Any]:
    """Evaluate a trained model on its held-out documents: perplexity by source, and continuations."""
    from tokenmill.tasks.train.results import markdown, read_results

    place, chosen = _place("evaluate", (training, *overrides), {"model"})
    settings = choices_of(EvaluateSettings, chosen)
    be_quiet()
    from .train import evaluate_model

    record = evaluate_model(place, output_dir or join(place, "results"), settings)
    terminal.print(markdown(read_results(record["evaluate"]["path"])), markup=False, highlight=False)
    return record


def benchmark(
    data: Data = None,
    *overrides: Overrides,
    output_dir: OutputDir,
    config: Config = None,
    record: Annotated[bool, Parameter(negative="", help="Keep the figures as the baseline.")] = False,
    compare: Annotated[bool, Parameter(negative="", help="Fail if a figure is worse than the baseline's.")] = False,
    threshold: Annotated[float, Parameter(help="Relative change that counts as worse.")] = 0.05,
    baselines: Annotated[str, Parameter(help="Baseline folder.")] = "baselines",
) -> dict[str, Any]:
    """Measure training speed over some steps: tokens per second, MFU, padding, time spent waiting for data, memory."""
    from tokenmill.tasks.train import benchmark as measure
    from tokenmill.tasks.train.history import recorded_run

    place, chosen = _place("benchmark", (data, *overrides), {"pretrain", "sft"})
    settings = _settings(config, chosen)
    if Path(output_dir, "job.json").exists():
        raise InputError(f"--output-dir {output_dir}: contains a training run; a benchmark needs its own folder")
    # A retried run would be measured with its starts.
    _trained(place, settings.model_copy(update={"retries": 0}), output_dir)
    found = measure.summarise(*recorded_run(output_dir))
    measure.print_record(found, terminal)
    if compare:  # before recording, or it would be compared with itself
        comparison = measure.compare(found, measure.baseline_of(found, baselines), threshold)
        measure.print_comparison(comparison, terminal)
        if comparison.regressed:
            raise RunError(f"worse than the baseline by {threshold:.0%} or more: {', '.join(comparison.regressed)}")
    written = measure.record(found, baselines if record else join(output_dir, "benchmark"))
    return {"benchmark": {"path": written, "type": "benchmark", **found.model_dump()}}


def _pipeline_settings() -> tuple[type[Strict], tuple[str, ...]]:
    from tokenmill.tasks.train.pipeline_settings import PipelineSettings

    return PipelineSettings, ()


def pipeline(
    *overrides: Annotated[str, settings_parameter(_pipeline_settings)],
    output_dir: OutputDir,
    scale: Annotated[str, Parameter(help="tiny: minutes on a laptop; small: hours on a GPU.")] = "tiny",
    config: Annotated[str | None, Parameter(help="YAML file with the settings of all stages.")] = None,
) -> dict[str, Any]:
    """From blends to an evaluated model: pretrain, fine-tune, and prepare rows for reinforcement learning."""
    from tokenmill.tasks.train.pipeline_settings import PipelineSettings, config_place

    chosen = config_place(config or f"pipeline-{scale}")
    settings = choices_of(PipelineSettings, overrides, config_settings(chosen), str(chosen))
    be_quiet()
    from tokenmill.tasks.train.progress import print_training

    from .pipeline import pipeline as run_pipeline

    found = run_pipeline(output_dir, settings)
    for stage in found["pipeline"]["stages"]:
        ((name, artifact),) = stage.items()
        terminal.print(f"[bold]{name}[/] {artifact['path']}")
        if name == "train":
            print_training(artifact, terminal)
    return found


def _settings(config: str | None, overrides: Sequence[str]) -> TrainSettings:
    from tokenmill.tasks.train.pipeline_settings import config_place

    if config is None:
        return choices_of(TrainSettings, overrides)
    chosen = config_place(config)
    return choices_of(TrainSettings, overrides, config_settings(chosen), str(chosen))


def _place(command: str, words: Sequence[str | None], kinds: Collection[str]) -> tuple[str, list[str]]:
    """The folder named first or piped in, and the settings after it."""
    first, *overrides = [word for word in words if word is not None] or ["="]
    if "=" not in first:
        return first, overrides
    return piped(command, kinds).path, [word for word in (first, *overrides) if word != "="]


def _checked(data: str, settings: TrainSettings, output_dir: str) -> dict[str, Any]:
    """Check a training run and write its files for review, without starting it."""
    from tokenmill.tasks.train.launchers import launch_of
    from tokenmill.tasks.train.launchers.launch import process_count, write_files
    from tokenmill.tasks.train.launchers.nemo_rl import rl_launch
    from tokenmill.tasks.train.preflight import check, plan_training

    if settings.launcher == "nemo-rl":
        launch = rl_launch(data, settings, output_dir)
    else:
        job = plan_training(data, settings, output_dir)
        for line in check(job):
            terminal.print(line, markup=False)
        launch = launch_of(job, process_count(settings))
    place, command = absolute(output_dir), shlex.join(launch.command)
    write_files(launch, place)
    terminal.print(f"written for review to {place}: {', '.join(launch.files)}", markup=False)
    terminal.print(f"would {'run' if launch.runs else 'print'}: {command}", markup=False)
    return {"train": {"path": place, "type": "plan", "command": command, "files": list(launch.files)}}


def _trained(data: str, settings: TrainSettings, output_dir: str) -> dict[str, Any]:
    from tokenmill.tasks.train.launchers.launch import require_program

    require_program(settings.launcher)
    be_quiet()
    from .train import train_model

    return train_model(data, output_dir, settings)
