"""Megatron-Bridge: a Python script that builds its configuration for this job and trains.

The names are those of Megatron-Bridge 0.6 (`megatron.bridge.training.config`). Its command-line recipes are in its repository
but not in its package; this script works with both. Pretraining reads blend.json; packs are read as the files of a folder, each
once per epoch, and one pack is a micro-batch.
"""

import os
from string import Template
from typing import Any

from tokenmill.tasks.errors import InputError
from tokenmill.tasks.storage import join
from tokenmill.tasks.train.initial_weights import model_name
from tokenmill.tasks.train.job import CHECKPOINTS, MODEL, Job

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

PROGRAM = "train.py"

SHELL = """\
#!/usr/bin/env bash
# Trains with Megatron-Bridge, in an environment that has it and tokenmill, such as its container{more}.
set -euo pipefail
exec python {torchrun} {peer}"$(dirname "$0")/{program}"
"""

TEXT = Template('''\
"""Trains with Megatron-Bridge. Start it with train.sh beside this file, on every machine."""

import os

import torch.nn.functional as functional
from huggingface_hub import snapshot_download
from megatron.bridge import AutoBridge
from megatron.bridge.data.builders import GPTSFTDatasetConfig
from megatron.bridge.data.packing.config import PackedSequenceSpecs
from megatron.bridge.models.gpt_provider import GPTModelProvider
from megatron.bridge.recipes.utils.dataset_utils import get_blend_fields_from_data_paths
from megatron.bridge.training.config import (
    CheckpointConfig,
    ConfigContainer,
    DistributedDataParallelConfig,
    DistributedInitConfig,
    GPTDatasetConfig,
    LoggerConfig,
    OptimizerConfig,
    RNGConfig,
    SchedulerConfig,
    TokenizerConfig,
    TrainingConfig,
    ValidationConfig,
)
from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.training.pretrain import pretrain

# Initial weights: a Hugging Face folder, the output folder of a training, which contains one, or a hub id.
START_FROM = $start_from
if START_FROM is not None and os.path.isdir(os.path.join(START_FROM, "$model_folder")):
    START_FROM = os.path.join(START_FROM, "$model_folder")
elif START_FROM is not None and not os.path.isdir(START_FROM):
    START_FROM = snapshot_download(START_FROM)


def model() -> GPTModelProvider:
    if START_FROM is not None:
        provider = AutoBridge.from_hf_pretrained(START_FROM).to_megatron_provider(load_weights=False)
    else:
        provider = GPTModelProvider(
            num_layers=$layers,
            hidden_size=$hidden,
            ffn_hidden_size=$feed_forward,
            num_attention_heads=$heads,
            num_query_groups=$key_value_heads,
            normalization="RMSNorm",
            layernorm_epsilon=$norm_epsilon,
            activation_func=functional.silu,
            gated_linear_unit=True,
            add_bias_linear=False,
            position_embedding_type="rope",
            rotary_base=$rope_base,
            share_embeddings_and_output_weights=$tied_embeddings,
            attention_dropout=0.0,
            hidden_dropout=0.0,
            vocab_size=$vocabulary_size,
            should_pad_vocab=True,
            make_vocab_size_divisible_by=$vocabulary_multiple,
        )
    provider.seq_length = $sequence_length
    provider.tensor_model_parallel_size = $tensor
    provider.pipeline_model_parallel_size = $pipeline
    provider.context_parallel_size = $context
    provider.sequence_parallel = $sequence
    provider.calculate_per_token_loss = $per_token_loss
    return provider


$data


config = ConfigContainer(
    model=model(),
    dataset=dataset(),
    tokenizer=TokenizerConfig($tokenizer),
    train=TrainingConfig(train_iters=$steps, global_batch_size=$global_batch, micro_batch_size=$micro_batch),
    validation=ValidationConfig(eval_interval=$validate_every, eval_iters=$validation_batches),
    optimizer=OptimizerConfig(
        optimizer="adam",
        lr=$learning_rate,
        min_lr=$minimum_learning_rate,
        weight_decay=$weight_decay,
        adam_beta1=$beta1,
        adam_beta2=$beta2,
        adam_eps=$epsilon,
        clip_grad=$clip,
        use_distributed_optimizer=$distributed,
    ),
    scheduler=SchedulerConfig(
        lr_decay_style=$decay,
        lr_decay_iters=$steps,
        lr_warmup_iters=$warmup_steps,
        start_weight_decay=$weight_decay,
        end_weight_decay=$weight_decay,
        weight_decay_incr_style="constant",
    ),
    ddp=DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=$distributed),
    dist=DistributedInitConfig(),
    rng=RNGConfig(seed=$seed),
    logger=LoggerConfig(log_interval=1),
    checkpoint=CheckpointConfig(
        save=$checkpoints,
        load=$checkpoints,
        save_interval=$save_interval,
        pretrained_checkpoint=START_FROM,
        ckpt_format="torch_dist",
    ),
    mixed_precision=$mixed_precision,
)

if __name__ == "__main__":
    pretrain(config, forward_step)
''')

DOCUMENTS = Template("""\
def dataset() -> GPTDatasetConfig:
    blend, blend_per_split, split = get_blend_fields_from_data_paths(per_split_data_args_path=$blend)
    return GPTDatasetConfig(
        seq_length=$sequence_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=split,
        random_seed=$seed,
        path_to_cache=$cache,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        dataloader_type="single",
    )""")

PACKS = Template("""\
def dataset() -> GPTSFTDatasetConfig:
    # The folders are read whole: the weights of the blend were applied when the packs were published.
    return GPTSFTDatasetConfig(
        dataset_root=$root,
        seq_length=$pack_size,
        seed=$seed,
        enable_offline_packing=True,
        offline_packing_specs=PackedSequenceSpecs(
            packed_sequence_size=$pack_size,
            packed_train_data_path=$train,
            packed_val_data_path=$valid,
            pad_seq_to_mult=$pad_seq_to_mult,
        ),
        do_validation=$validates,
        do_test=False,
    )""")


def megatron_bridge_launch(job: Job, processes: int) -> Launch:
    """Raises InputError when Bridge cannot read the data where it is, or its tokenizer."""
    if len(job.data.phases) > 1:
        raise InputError(
            f"launcher=megatron-bridge: {job.data.path} has {len(job.data.phases)} phases, and Megatron-Bridge reads one blend from "
            "first step to last; set launcher=local, slurm, kubernetes or megatron-lm"
        )
    require_files(job.settings.launcher, places_of(job))
    folder = local_folder(job.output_dir, job.settings.launcher)
    data = (PACKS if job.data.kind == "sft" else DOCUMENTS).substitute(_data_values(job))
    tokenizer = ", ".join(f"{name}={value}" for name, value in _tokenizer(job).items())
    program = TEXT.substitute(_values(job), data=data, tokenizer=tokenizer)
    peer = "" if job.data.kind == "sft" else f"{peer_words(job)} "  # Bridge reads packs by datasets of its own
    more = "" if job.settings.nodes == 1 else ": on every machine, with NODE_RANK and MASTER_ADDR"
    shell = SHELL.format(more=more, torchrun=torchrun_words(job, processes), peer=peer, program=PROGRAM)
    return Launch({PROGRAM: program, SCRIPT: shell}, ["bash", join(folder, SCRIPT)], False)


def _values(job: Job) -> dict[str, str]:
    """The values in the program, as Python literals."""
    settings, packed = job.settings, job.data.kind == "sft"
    chosen: dict[str, Any] = {
        **settings.model.model_dump(), **settings.parallel.model_dump(), **settings.optimizer.model_dump(),
        "start_from": model_name(settings.start_from) if settings.start_from else None,
        "rope_base": integral_rope_base(job),
        "vocabulary_size": job.data.vocabulary_size,
        "sequence_length": job.data.pack_size if packed else settings.sequence_length,
        "per_token_loss": packed,
        "steps": settings.steps,
        "global_batch": settings.global_batch,
        "micro_batch": 1 if packed else settings.micro_batch,
        "validate_every": settings.validate_every or settings.steps,
        "validation_batches": settings.validation_batches if job.validates else 0,
        "seed": settings.seed,
        "checkpoints": join(job.output_dir, CHECKPOINTS),
        "save_interval": settings.checkpoint_every or settings.steps,
        "mixed_precision": None if settings.precision == "float32" else "bf16_mixed",
    }  # fmt: skip
    return {**{name: repr(value) for name, value in chosen.items()}, "model_folder": MODEL}


def _data_values(job: Job) -> dict[str, str]:
    data = job.data
    chosen: dict[str, Any] = {
        "blend": join(data.path, "blend.json"),
        "cache": join(job.output_dir, "cache"),
        "sequence_length": job.settings.sequence_length,
        "seed": job.settings.seed,
        "root": data.path,
        "pack_size": data.pack_size,
        "pad_seq_to_mult": data.pad_seq_to_mult or 1,
        "validates": job.validates,
    }
    if data.kind == "sft":
        chosen |= {"train": _folder(job, "train"), "valid": _folder(job, "valid") if job.validates else None}
    return {name: repr(value) for name, value in chosen.items()}


def _folder(job: Job, split: str) -> str:
    """The folder of a split's packs."""
    folders = {os.path.dirname(file) for source in job.data.of(split) for file in source.files}  # noqa: PTH120 - may be a URL
    if len(folders) == 1:
        return folders.pop()
    raise InputError(
        f"launcher=megatron-bridge: the packs of {split} are in {len(folders)} folders ({', '.join(sorted(folders))}), and "
        "Megatron-Bridge reads one; prepare them into one output folder"
    )


def _tokenizer(job: Job) -> dict[str, str]:
    """The arguments of TokenizerConfig: the tokenizer of the initial weights, which is that of the data, or the data's."""
    if job.settings.start_from is not None:
        return {"tokenizer_type": repr(HUGGING_FACE), "tokenizer_model": "START_FROM"}
    name = hugging_face_name(job)
    if name is not None:
        return {"tokenizer_type": repr(HUGGING_FACE), "tokenizer_model": repr(name)}
    if job.data.kind == "sft":
        raise InputError(
            f"launcher=megatron-bridge: it pads packs with the EOS of a Hugging Face tokenizer, and {job.data.tokenizer['model']!r} is "
            "not one; set start_from to a model with this tokenizer, or launcher=local"
        )
    return {"tokenizer_type": repr(NULL), "vocab_size": repr(job.data.vocabulary_size)}
