"""NeMo-RL: a configuration that inherits from one of its examples, and the script that fits the rows.

The target of `tokenmill rl` decides what runs: supervised fine-tuning, DPO, or GRPO with mathematics or with NeMo-Gym. The
configuration has only model, data and paths; the rest is in the example in the checkout at NEMO_RL, so that it fits
that version.
"""

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import orjson
import yaml
from tokenmill.tasks.errors import InputError
from tokenmill.tasks.rl.targets import TargetName
from tokenmill.tasks.shards.manifest import read_manifest
from tokenmill.tasks.shards.records import Manifest
from tokenmill.tasks.storage import absolute, join, open_binary
from tokenmill.tasks.train.settings import TrainSettings

from .launch import SCRIPT, Launch, local_folder, model_name, require_files, script, start_place

CONFIG = "nemo_rl.yaml"
INTERPOLATION = re.compile(r"(\\*)\$\{")

HEADING = (
    f"# NeMo-RL settings; {SCRIPT} next to this file runs them. All others are in the file that it inherits from.\n"
)
GYM_HEADING = (
    "# Add the configurations of the resources servers that the rows' agent_ref name to env.nemo_gym.config_paths.\n"
)


@dataclass(frozen=True, slots=True)
class _Recipe:
    """How NeMo-RL reads the rows of a target: script, example to inherit from, section of the algorithm, and readers."""

    program: str
    example: str
    algorithm: str
    reader: Mapping[str, Any]
    more: Mapping[str, Any] = field(default_factory=dict[str, Any])


# Keys of an algorithm's data section beyond the common ones (`nemo_rl/algorithms/*.py`). SFT doesn't add a token that
# the chat template has already written.
ASKED: Mapping[str, Mapping[str, bool]] = {
    "sft": {"add_bos": True, "add_eos": True, "add_generation_prompt": False},
    "grpo": {"use_multiple_dataloader": False},
    "dpo": {},
}

NO_VALIDATION = {"val_period": 0, "val_at_start": False, "val_at_end": False}

# The batch of a GRPO step. NeMo-RL splits the generated rows into batches of `train_global_batch_size`, and fails
# unless they divide evenly.
ROLLOUTS = "${mul:${grpo.num_prompts_per_step},${grpo.num_generations_per_prompt}}"

# Use the tokenizer's template; the example's is for questions with a context.
OWN_TEMPLATE = {"chat_template": "default"}

GYM = {
    "env": {
        "should_use_nemo_gym": True,
        "nemo_gym": {"config_paths": ["responses_api_models/vllm_model/configs/vllm_model_for_training.yaml"]},
    }
}

SFT, SFT_EXAMPLE = "examples/run_sft.py", "examples/configs/sft.yaml"
GRPO, GRPO_EXAMPLE = "examples/run_grpo.py", "examples/configs/grpo_math_1B.yaml"

RECIPES: Mapping[TargetName, _Recipe] = {
    "nemo_rl_sft": _Recipe(SFT, SFT_EXAMPLE, "sft", {"dataset_name": "ResponseDataset", "processor": "sft_processor"}),
    "nemo_rl_chat": _Recipe(
        SFT,
        SFT_EXAMPLE,
        "sft",
        {
            "dataset_name": "openai_format", "chat_key": "messages", "tool_key": "tools",
            "use_preserving_dataset": True, "processor": "sft_processor",
        },
    ),
    "nemo_rl_dpo": _Recipe("examples/run_dpo.py", "examples/configs/dpo.yaml", "dpo", {}),
    "nemo_rl_grpo_math": _Recipe(
        GRPO,
        GRPO_EXAMPLE,
        "grpo",
        {"dataset_name": "ResponseDataset", "processor": "math_hf_data_processor", "env_name": "math"},
    ),
    "nemo_gym": _Recipe(
        "examples/nemo_gym/run_grpo_nemo_gym.py",
        "examples/nemo_gym/grpo_workplace_assistant_nemotron_nano_v2_9b.yaml",
        "grpo",
        {"dataset_name": "NemoGymDataset", "processor": "nemo_gym_data_processor", "env_name": "nemo_gym"},
        GYM,
    ),
}  # fmt: skip


def rl_launch(data: str, settings: TrainSettings, output_dir: str) -> Launch:
    """Return how NeMo-RL trains on the preparation in `data`.

    Raises InputError without `start_from`, the model to train further, and for rows that NeMo-RL cannot read.
    """
    if settings.start_from is None:
        raise InputError("start_from: reinforcement learning trains a model further; name it by its Hub id or folder")
    manifest = read_manifest(absolute(data))
    if manifest is None:
        raise InputError(f"{data}: no preparation here; prepare rows with: tokenmill rl")
    return nemo_rl_launch(manifest, absolute(output_dir), model_name(start_place(settings.start_from)))


def nemo_rl_launch(manifest: Manifest, output_dir: str, model: str) -> Launch:
    """Return how NeMo-RL trains `model`, a hub id or folder, on the preparation of `tokenmill rl` with this manifest.

    Places are absolute, because NeMo-RL runs in its own folder. The first row of preferences is read for their form. Raises
    InputError for rows that NeMo-RL cannot read, and for an output folder outside a file system.
    """
    target: TargetName = manifest["settings"]["target"]
    if target not in RECIPES:
        raise InputError(
            f"launcher=nemo-rl: NeMo-RL can't read rows prepared with target={target}; prepare with "
            f"one of {', '.join(RECIPES)}"
        )
    if not manifest["train"]:
        raise InputError(
            "launcher=nemo-rl: the preparation lacks a training split; reduce holdout, or choose other sources"
        )
    if manifest["train"].endswith(".zst"):
        raise InputError("launcher=nemo-rl: NeMo-RL reads plain JSON Lines only; prepare again with compression=none")
    require_files("nemo-rl", [manifest["train"], manifest["val"]])
    recipe, place = RECIPES[target], shlex.quote(join(local_folder(output_dir, "nemo-rl"), SCRIPT))
    heading = HEADING + (GYM_HEADING if target == "nemo_gym" else "")
    settings = yaml.safe_dump(_settings(manifest, recipe, output_dir, model), sort_keys=False, allow_unicode=True)
    text = script("nemo_rl.sh", script=place, program=recipe.program, config=shlex.quote(join(output_dir, CONFIG)))
    return Launch({CONFIG: heading + settings, SCRIPT: text}, ["bash", join(output_dir, SCRIPT)], False)


def _settings(manifest: Manifest, recipe: _Recipe, output_dir: str, model: str) -> dict[str, Any]:
    validates = bool(manifest["val"])
    reader = recipe.reader
    if not reader:  # preferences: two ranked completions, or a chosen and a rejected answer
        with open_binary(manifest["train"]) as file:
            row = cast("dict[str, Any]", orjson.loads(file.readline()))
        reader = {"dataset_name": "PreferenceDataset"}
        if row.get("completions") is None:
            keys = {"prompt_key": "prompt", "chosen_key": "chosen", "rejected_key": "rejected"}
            reader = {"dataset_name": "BinaryPreferenceDataset", **keys}
    template = OWN_TEMPLATE if recipe.algorithm == "sft" else {}
    size = manifest.get("batches", {}).get("size")
    prompts = {"num_prompts_per_step": size} if size and recipe.algorithm == "grpo" else {}
    rows = {"train_global_batch_size": ROLLOUTS if prompts else size} if size else {}
    algorithm = {**prompts, **({} if validates else NO_VALIDATION)}
    return {
        "defaults": f"${{oc.env:NEMO_RL}}/{recipe.example}",
        **({recipe.algorithm: algorithm} if algorithm else {}),
        "checkpointing": {
            "checkpoint_dir": _literal(join(output_dir, "checkpoints")),
            **({} if validates else {"metric_name": None}),
        },
        "policy": {"model_name": _literal(model), "tokenizer": {"name": _literal(model), **template}, **rows},
        "data": {
            "_override_": True,  # replaces the example's data section, so set every key that is read
            "max_input_seq_length": "${policy.max_total_sequence_length}",
            "shuffle": "batches" not in manifest,  # the file is in the order of batches
            "num_workers": 1,
            **ASKED[recipe.algorithm],
            "train": {**reader, "data_path": _literal(manifest["train"])},
            "validation": {**reader, "data_path": _literal(manifest["val"])} if validates else None,
            "default": {"prompt_file": None, "system_prompt_file": None},
        },
        **recipe.more,
        "logger": {"log_dir": _literal(join(output_dir, "logs")), "wandb_enabled": False},
    }


def _literal(text: str) -> str:
    r"""`text` escaped for OmegaConf, where `${` begins an interpolation unless a backslash precedes it."""
    return INTERPOLATION.sub(lambda found: found[1] * 2 + r"\${", text)
