"""Megatron-LM: a script that gives pretrain_gpt.py this job's model, data and schedule.

The arguments are those of Megatron-LM with megatron-core 0.19 (megatron/training/arguments.py). They override every default
that differs from tokenmill's: Megatron would use a dropout of 0.1, and tie embeddings.
"""

import shlex
from collections.abc import Iterable, Mapping
from itertools import accumulate

import orjson
from tokenmill.tasks.errors import InputError
from tokenmill.tasks.storage import join
from tokenmill.tasks.train.job import CHECKPOINTS, Job, Source

from .launch import (
    HUGGING_FACE,
    NULL,
    SCRIPT,
    Launch,
    hugging_face_name,
    integral_rope_base,
    local_folder,
    peer_words,
    places_of,
    require_files,
    torchrun_words,
)

Arguments = Mapping[str, str | int | float | bool]
"""Values by argument; True is an argument without a value, False leaves it out."""

TEXT = """\
#!/usr/bin/env bash
# Trains with Megatron-LM: MEGATRON_LM=<its folder> bash {script}{more}
# More arguments may follow and override these. The environment must have tokenmill, too: its module `peer` makes the
# unchanged program use the indices of `tokenmill order` and record what it reads, for `tokenmill verify`.
set -euo pipefail
program="${{MEGATRON_LM:?set it to the folder of Megatron-LM, which contains pretrain_gpt.py}}/pretrain_gpt.py"
export CUDA_DEVICE_MAX_CONNECTIONS="${{CUDA_DEVICE_MAX_CONNECTIONS:-1}}" # required to overlap communication

{arrays}
{run}
"""

RUN = """\
exec python {torchrun} {peer} "$program" \\
    {expanded} "$@"\
"""

RUN_PHASES = """\
# Megatron-LM ends at each transition; the next run goes on from its checkpoint with the blend of the next phase.
ends=({ends})
blends=({blends})
for phase in "${{!ends[@]}}"; do
    finished="$(cat {tracker} 2>/dev/null || echo 0)"
    if [[ "$finished" =~ ^[0-9]+$ && "$finished" -ge "${{ends[$phase]}}" ]]; then continue; fi
    python {torchrun} {peer} "$program" --per-split-data-args-path "${{blends[$phase]}}" \\
        {expanded} "$@"
done\
"""


def megatron_lm_launch(job: Job, processes: int) -> Launch:
    """Raises InputError for packs, data in an object store, and initial weights, none of which Megatron-LM reads."""
    if job.data.kind != "pretrain":
        raise InputError(
            f"launcher=megatron-lm: {job.data.path} holds packed conversations, which pretrain_gpt.py does not read; set "
            "launcher=megatron-bridge"
        )
    if job.settings.start_from is not None:
        raise InputError(
            f"start_from={job.settings.start_from}: Megatron-LM starts from its own checkpoints only; set "
            "launcher=megatron-bridge, which converts them"
        )
    require_files(job.settings.launcher, places_of(job))
    folder, groups = local_folder(job.output_dir, job.settings.launcher), argument_groups(job)
    text = TEXT.format(
        script=shlex.quote(join(folder, SCRIPT)),
        more="" if job.settings.nodes == 1 else " on every machine, with NODE_RANK and MASTER_ADDR",
        arrays="\n".join(_array(name, arguments) for name, arguments in groups.items()),
        run=_run(job, processes, groups),
    )
    return Launch({SCRIPT: text, **_phase_blends(job)}, ["bash", join(folder, SCRIPT)], False)


def _run(job: Job, processes: int, groups: Iterable[str]) -> str:
    """The command that trains, or one for each phase."""
    words = {
        "torchrun": torchrun_words(job, processes),
        "peer": peer_words(job),
        "expanded": " ".join(f'"${{{name}[@]}}"' for name in groups),
    }
    if not job.data.phases:
        return RUN.format(**words)
    folder = local_folder(job.output_dir, job.settings.launcher)
    phases = _phases(job)
    return RUN_PHASES.format(
        **words,
        ends=" ".join(str(end) for _, end in phases),
        blends=" ".join(shlex.quote(join(folder, _blend_name(name))) for name, _ in phases),
        tracker=shlex.quote(join(folder, CHECKPOINTS, "latest_checkpointed_iteration.txt")),
    )


def _phases(job: Job) -> list[tuple[str, int]]:
    """The phases that the training reaches, each with its last step."""
    steps, batch = job.settings.steps, job.settings.global_batch
    ends = [end // batch for end in accumulate(phase.samples for phase in job.data.phases)]
    begins = [0, *ends][:-1]
    return [
        (phase.name, min(end, steps))
        for phase, begin, end in zip(job.data.phases, begins, ends, strict=True)
        if begin < steps
    ]


def _blend_name(phase: str) -> str:
    return f"blend-{phase}.json"


def _phase_blends(job: Job) -> dict[str, str]:
    """The blend of each phase by file name: prefixes, with the samples to read of each as weights."""
    held_out = {split: _listed(job.data.of(split)) for split in ("valid", "test")}
    return {
        _blend_name(name): orjson.dumps(
            {"train": _listed(job.data.in_phase(number).of("train")), **held_out}, option=orjson.OPT_INDENT_2
        ).decode()
        for number, (name, _) in enumerate(_phases(job) if job.data.phases else [])
    }


def _listed(sources: Iterable[Source]) -> list[str] | None:
    return [
        word for source in sources
        for weight, file in zip(source.weights, source.files, strict=True) for word in (repr(weight), file)
    ] or None  # fmt: skip


def argument_groups(job: Job) -> dict[str, Arguments]:
    """The arguments of pretrain_gpt.py, grouped."""
    return {
        "model": _model(job),
        "data": _data(job),
        "training": {**_schedule(job), **_training(job)},
        "optimizer": _optimizer(job),
        "parallel": _parallel(job),
        "checkpoints": _checkpoints(job),
    }


def _array(name: str, arguments: Arguments) -> str:
    """Arguments as a bash array, quoted, one per line."""
    return "\n".join([f"{name}=(", *(f"    {line}" for line in _words(arguments)), ")"])


def _words(arguments: Arguments) -> Iterable[str]:
    for name, value in arguments.items():
        if value is True:
            yield name
        elif value is not False:
            yield f"{name} {shlex.quote(str(value))}"


def _model(job: Job) -> Arguments:
    model = job.settings.model
    return {
        "--num-layers": model.layers,
        "--hidden-size": model.hidden,
        "--ffn-hidden-size": model.feed_forward,
        "--num-attention-heads": model.heads,
        "--group-query-attention": True,
        "--num-query-groups": model.key_value_heads,
        "--max-position-embeddings": job.settings.sequence_length,
        "--position-embedding-type": "rope",
        "--rotary-base": integral_rope_base(job),
        "--normalization": "RMSNorm",
        "--norm-epsilon": model.norm_epsilon,
        "--swiglu": True,
        "--disable-bias-linear": True,
        "--untie-embeddings-and-output-weights": not model.tied_embeddings,
        "--attention-dropout": 0.0,
        "--hidden-dropout": 0.0,
        "--make-vocab-size-divisible-by": model.vocabulary_multiple,
    }


def _data(job: Job) -> Arguments:
    name = hugging_face_name(job)
    tokenizer: Arguments = (
        {"--tokenizer-type": NULL, "--vocab-size": job.data.vocabulary_size}
        if name is None
        else {"--tokenizer-type": HUGGING_FACE, "--tokenizer-model": name}
    )
    return {
        "--per-split-data-args-path": not job.data.phases and join(job.data.path, "blend.json"),
        "--data-cache-path": join(job.output_dir, "cache"),
        "--seq-length": job.settings.sequence_length,
        **tokenizer,
    }


def _schedule(job: Job) -> Arguments:
    """The length of the training run, its decay and its warmup: in steps, but in samples if there are phases.

    Megatron-LM finds the samples of a phase between `--phase-transition-iterations` and `--train-samples`, and fails
    without the latter (get_train_valid_test_num_samples in megatron/training/training.py). Once the length is in samples,
    the rest has to be as well.
    """
    settings = job.settings
    lengths = {"train": settings.steps, "lr-decay": settings.steps, "lr-warmup": settings.optimizer.warmup_steps}
    if not job.data.phases:
        return {f"--{name}-iters": steps for name, steps in lengths.items()}
    return {
        **{f"--{name}-samples": steps * settings.global_batch for name, steps in lengths.items()},
        "--phase-transition-iterations": ",".join(str(end) for _, end in _phases(job)[:-1]) or False,
    }


def _training(job: Job) -> Arguments:
    settings = job.settings
    return {
        "--micro-batch-size": settings.micro_batch,
        "--global-batch-size": settings.global_batch,
        "--bf16": settings.precision != "float32",
        "--seed": settings.seed,
        "--eval-iters": settings.validation_batches if job.validates else 0,
        "--eval-interval": settings.validate_every or settings.steps,
        "--log-interval": 1,
    }


def _optimizer(job: Job) -> Arguments:
    optimizer = job.settings.optimizer
    return {
        "--lr": optimizer.learning_rate,
        "--min-lr": optimizer.minimum_learning_rate,
        "--lr-decay-style": optimizer.decay,
        "--weight-decay": optimizer.weight_decay,
        "--adam-beta1": optimizer.beta1,
        "--adam-beta2": optimizer.beta2,
        "--adam-eps": optimizer.epsilon,
        "--clip-grad": optimizer.clip,
        "--use-distributed-optimizer": optimizer.distributed,
    }


def _parallel(job: Job) -> Arguments:
    parallel = job.settings.parallel
    return {
        "--tensor-model-parallel-size": parallel.tensor,
        "--pipeline-model-parallel-size": parallel.pipeline,
        "--context-parallel-size": parallel.context,
        "--sequence-parallel": parallel.sequence,
    }


def _checkpoints(job: Job) -> Arguments:
    place = join(job.output_dir, CHECKPOINTS)
    return {
        "--save": place,
        "--load": place,
        "--save-interval": job.settings.checkpoint_every or job.settings.steps,
        "--ckpt-format": "torch_dist",
    }
