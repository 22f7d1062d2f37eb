"""Launchers for Megatron-LM and Megatron-Bridge: scripts that give their trainers this job's model, data and schedule.

Megatron-LM's arguments are those with megatron-core 0.19 (megatron/training/arguments.py). They override every default that
differs from tokenmill's: Megatron would use a dropout of 0.1, and tie embeddings.

Bridge's names are from version 0.6 (`megatron.bridge.training.config`). Its command-line recipes are in its repository but not in
its package; this program works with both. Pretraining reads blend.json; packs are read as the files of a folder, each once per
epoch, and one pack is a micro-batch.
"""

import os
import shlex
from collections.abc import Iterable, Mapping
from itertools import accumulate
from typing import Any

import orjson
from tokenmill.tasks.errors import InputError
from tokenmill.tasks.storage import join
from tokenmill.tasks.train.job import CHECKPOINTS, MODEL, Job, TrainSource

from .launch import (
    SCRIPT,
    Launch,
    job_values,
    local_folder,
    model_name,
    peer_words,
    require_files,
    script,
    torchrun_words,
)

HUGGING_FACE, NULL = "HuggingFaceTokenizer", "NullTokenizer"

# Arguments of pretrain_gpt.py, each with the name of its value in `_arguments`; `=` begins a constant, and an argument
# without a name doesn't take a value. An argument whose value is True is given without one, and omitted for False and
# None.
ARGUMENTS: Mapping[str, Mapping[str, str]] = {
    "model": {
        "--num-layers": "layers",
        "--hidden-size": "hidden",
        "--ffn-hidden-size": "feed_forward",
        "--num-attention-heads": "heads",
        "--group-query-attention": "",
        "--num-query-groups": "key_value_heads",
        "--max-position-embeddings": "sequence_length",
        "--position-embedding-type": "=rope",
        "--rotary-base": "rope_base",
        "--normalization": "=RMSNorm",
        "--norm-epsilon": "norm_epsilon",
        "--swiglu": "",
        "--disable-bias-linear": "",
        "--untie-embeddings-and-output-weights": "untied_embeddings",
        "--attention-dropout": "=0.0",
        "--hidden-dropout": "=0.0",
        "--make-vocab-size-divisible-by": "vocabulary_multiple",
    },
    "data": {
        "--per-split-data-args-path": "blend",
        "--data-cache-path": "cache",
        "--seq-length": "sequence_length",
        "--tokenizer-type": "tokenizer_type",
        "--vocab-size": "vocabulary_size",
        "--tokenizer-model": "tokenizer_model",
    },
    "training": {
        "--train-iters": "iterations",
        "--lr-decay-iters": "iterations",
        "--lr-warmup-iters": "warmup_iterations",
        "--train-samples": "samples",
        "--lr-decay-samples": "samples",
        "--lr-warmup-samples": "warmup_samples",
        "--phase-transition-iterations": "transitions",
        "--micro-batch-size": "micro_batch",
        "--global-batch-size": "global_batch",
        "--bf16": "bf16",
        "--seed": "seed",
        "--eval-iters": "validation_batches",
        "--eval-interval": "validate_every",
        "--log-interval": "=1",
    },
    "optimizer": {
        "--lr": "learning_rate",
        "--min-lr": "minimum_learning_rate",
        "--lr-decay-style": "decay",
        "--weight-decay": "weight_decay",
        "--adam-beta1": "beta1",
        "--adam-beta2": "beta2",
        "--adam-eps": "epsilon",
        "--clip-grad": "clip",
        "--use-distributed-optimizer": "distributed",
    },
    "parallel": {
        "--tensor-model-parallel-size": "tensor",
        "--pipeline-model-parallel-size": "pipeline",
        "--context-parallel-size": "context",
        "--sequence-parallel": "sequence",
    },
    "checkpoints": {
        "--save": "checkpoints",
        "--load": "checkpoints",
        "--save-interval": "save_interval",
        "--ckpt-format": "=torch_dist",
    },
}


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
    folder, phases = _checked_folder(job), _phases(job)
    words = {
        "torchrun": torchrun_words(job, processes),
        "peer": peer_words(job),
        "expanded": " ".join(f'"${{{name}[@]}}"' for name in ARGUMENTS),
        "ends": " ".join(str(end) for _, end in phases),
        "blends": " ".join(shlex.quote(join(folder, f"blend-{name}.json")) for name, _ in phases),
        "tracker": shlex.quote(join(folder, CHECKPOINTS, "latest_checkpointed_iteration.txt")),
    }
    values, arrays = _arguments(job), list[str]()
    for array, table in ARGUMENTS.items():
        given = {flag: name[1:] if name.startswith("=") else values[name] for flag, name in table.items()}
        lines = [
            f"    {flag}\n" if value is True else f"    {flag} {shlex.quote(str(value))}\n"
            for flag, value in given.items()
            if value is not None and value is not False
        ]
        arrays.append(f"{array}=(\n{''.join(lines)})")
    text = script(
        "megatron_lm.sh",
        script=shlex.quote(join(folder, SCRIPT)),
        more="" if job.settings.nodes == 1 else " on every machine, with NODE_RANK and MASTER_ADDR",
        arrays="\n".join(arrays),
        run=script("megatron_lm_phases.sh" if phases else "megatron_lm_run.sh", **words).removesuffix("\n"),
    )
    held_out = {split: _listed(job.data.of(split)) for split in ("valid", "test")}
    blends = {  # of each phase: prefixes, with the samples to read of each as weights
        f"blend-{name}.json": orjson.dumps(
            {"train": _listed(job.data.in_phase(number).of("train")), **held_out}, option=orjson.OPT_INDENT_2
        ).decode()
        for number, (name, _) in enumerate(phases)
    }
    return Launch({SCRIPT: text, **blends}, ["bash", join(folder, SCRIPT)], False)


def _checked_folder(job: Job) -> str:
    """The output folder. Raises InputError unless it and the data, which may be in a store elsewhere, are in file systems."""
    files = [file for source in job.data.sources for file in source.files]
    require_files(job.settings.launcher, [job.data.path, *files])
    return local_folder(job.output_dir, job.settings.launcher)


def _phases(job: Job) -> list[tuple[str, int]]:
    """The phases that the training run reaches, each with its last step."""
    steps, batch = job.settings.steps, job.settings.global_batch
    ends = [end // batch for end in accumulate(phase.samples for phase in job.data.phases)]
    begins = [0, *ends][:-1]
    return [
        (phase.name, min(end, steps))
        for phase, begin, end in zip(job.data.phases, begins, ends, strict=True)
        if begin < steps
    ]


def _listed(sources: Iterable[TrainSource]) -> list[str] | None:
    pairs = [pair for source in sources for pair in zip(source.weights, source.files, strict=True)]
    return [word for weight, file in pairs for word in (repr(weight), file)] or None


def _arguments(job: Job) -> dict[str, Any]:
    """The values of ARGUMENTS.

    The length of the run, its decay and its warmup are in steps, but in samples if there are phases: Megatron-LM finds the
    samples of a phase between `--phase-transition-iterations` and `--train-samples`, and fails without the latter
    (get_train_valid_test_num_samples in megatron/training/training.py). Then the other two have to be in samples as well.
    """
    settings, values, phases = job.settings, job_values(job), _phases(job)
    name, batch, warmup = _hugging_face_name(job), settings.global_batch, settings.optimizer.warmup_steps
    lengths: dict[str, int | str | None] = (
        {"samples": settings.steps * batch, "warmup_samples": warmup * batch, "blend": None}
        if phases
        else {"iterations": settings.steps, "warmup_iterations": warmup}
    )
    return {
        **values, "": True, "untied_embeddings": not settings.model.tied_embeddings,
        "tokenizer_type": NULL if name is None else HUGGING_FACE, "tokenizer_model": name,
        "vocabulary_size": job.data.vocabulary_size if name is None else None,
        "bf16": settings.precision != "float32", "transitions": ",".join(str(end) for _, end in phases[:-1]) or None,
        **dict.fromkeys(("samples", "warmup_samples", "iterations", "warmup_iterations")), **lengths,
    }  # fmt: skip


def megatron_bridge_launch(job: Job, processes: int) -> Launch:
    """Raises InputError when Bridge can't read the data where it is, or its tokenizer."""
    if len(job.data.phases) > 1:
        raise InputError(
            f"launcher=megatron-bridge: {job.data.path} has {len(job.data.phases)} phases, and Megatron-Bridge reads one blend from "
            "first step to last; set launcher=local, slurm, kubernetes or megatron-lm"
        )
    folder, settings, packed = _checked_folder(job), job.settings, job.data.kind == "sft"
    values: dict[str, Any] = {
        **job_values(job),
        "start_from": model_name(settings.start_from) if settings.start_from else None,
        "per_token_loss": packed,
        "mixed_precision": None if settings.precision == "float32" else "bf16_mixed",
    }
    if packed:
        values |= {
            "root": job.data.path, "pack_size": job.data.pack_size, "sequence_length": job.data.pack_size,
            "micro_batch": 1, "pad_seq_to_mult": job.data.pad_seq_to_mult or 1, "validates": job.validates,
            "train": _folder(job, "train"), "valid": _folder(job, "valid") if job.validates else None,
        }  # fmt: skip
    literals = {name: repr(value) for name, value in values.items()}
    data = script(f"megatron_bridge_{'packs' if packed else 'documents'}.txt", **literals).removesuffix("\n")
    name = _hugging_face_name(job)
    # The tokenizer of the initial weights equals the data's, and Bridge finds it with the weights.
    if settings.start_from is not None or name is not None:
        model = repr(name) if settings.start_from is None else "START_FROM"
        tokenizer = f"tokenizer_type={HUGGING_FACE!r}, tokenizer_model={model}"
    elif packed:
        raise InputError(
            f"launcher=megatron-bridge: it pads packs with the EOS of a Hugging Face tokenizer, and {job.data.tokenizer['model']!r} is "
            "not one; set start_from to a model with this tokenizer, or launcher=local"
        )
    else:
        tokenizer = f"tokenizer_type={NULL!r}, vocab_size={job.data.vocabulary_size!r}"
    more = {"data": data, "model_folder": MODEL, "tokenizer": tokenizer}
    shell = script(
        "megatron_bridge.sh",
        more="" if settings.nodes == 1 else ": on every machine, with NODE_RANK and MASTER_ADDR",
        torchrun=torchrun_words(job, processes),
        peer="" if packed else f"{peer_words(job)} ",  # Bridge reads packs by datasets of its own
        program="train.py",
    )
    files = {"train.py": script("megatron_bridge.txt", **{**literals, **more}), SCRIPT: shell}
    return Launch(files, ["bash", join(folder, SCRIPT)], False)


def _folder(job: Job, split: str) -> str:
    folders = {os.path.dirname(file) for source in job.data.of(split) for file in source.files}  # noqa: PTH120 - may be a URL
    if len(folders) == 1:
        return folders.pop()
    raise InputError(
        f"launcher=megatron-bridge: the packs of {split} are in {len(folders)} folders ({', '.join(sorted(folders))}), and "
        "Megatron-Bridge reads one; prepare them into one output folder"
    )


def _hugging_face_name(job: Job) -> str | None:
    """The folder or hub id of the data's tokenizer; None for encodings, single files and pinned revisions."""
    name, revision = str(job.data.tokenizer["model"]), job.data.tokenizer.get("revision")
    single_file = name.endswith((".json", ".model", ".tiktoken"))
    return name if "/" in name and not single_file and revision is None else None
