"""The peer: how NeMo-RL reads a configuration, and which of its keys a run asks for before it trains.

Facts of `nemo_rl/utils/config.py` (`load_config`), of `nemo_rl/data/utils.py`, of `setup` in `nemo_rl/algorithms/{sft,dpo,grpo}.py`
and of the scripts in `examples/`, as of August 2026. Written anew on OmegaConf, which is what NeMo-RL uses.

A section of a file with `_override_: true` replaces the section that it inherits, and that is looked for at the top level
only. `EXAMPLES` are the files that are inherited from, with the keys that matter here.

`start` reads a configuration as far as a run does until it has its data, and raises what comes: KeyError for a key that is
not there, AssertionError for what is checked, OmegaConf's errors for interpolations that lead nowhere.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf

Config = dict[str, Any]

POLICY = {
    "model_name": "org/example",
    "tokenizer": {"name": "${policy.model_name}", "chat_template": "{{ 'Context: ' }}", "chat_template_kwargs": None},
    "train_global_batch_size": 32,
    "train_micro_batch_size": 1,
    "max_total_sequence_length": 1024,
}
DATA = {
    "max_input_seq_length": "${policy.max_total_sequence_length}",
    "shuffle": True,
    "num_workers": 1,
    "train": {"dataset_name": "example", "split": "train"},
    "validation": {"dataset_name": "example", "split": "validation"},
}
CHECKPOINTING = {"enabled": True, "checkpoint_dir": "results", "metric_name": "val:loss", "save_period": 10}
LOGGER = {"log_dir": "logs", "wandb_enabled": True, "wandb": {"name": "example-${data.train.dataset_name}"}}
VALIDATES = {"val_period": 10, "val_at_start": True, "val_at_end": False, "seed": 42}

COMMON = {"policy": POLICY, "checkpointing": CHECKPOINTING, "logger": LOGGER}

EXAMPLES: dict[str, Config] = {
    "examples/configs/sft.yaml": {
        **COMMON,
        "sft": VALIDATES,
        "data": {
            **DATA, "add_bos": True, "add_eos": True, "add_generation_prompt": False,
            "default": {"prompt_file": None, "system_prompt_file": None, "processor": "sft_processor"},
        },
    },
    "examples/configs/dpo.yaml": {**COMMON, "dpo": VALIDATES, "data": DATA},
    "examples/configs/grpo_math_1B.yaml": {
        **COMMON,
        "policy": {**POLICY, "train_global_batch_size": 512},
        "grpo": {**VALIDATES, "max_val_samples": 256, "num_prompts_per_step": 32, "num_generations_per_prompt": 16},
        "data": {
            **DATA, "use_multiple_dataloader": False, "validation": None,
            "train": {"dataset_name": "example", "split_validation_size": 0.05, "seed": "${grpo.seed}"},
            "default": {"prompt_file": "examples/prompts/cot.txt", "processor": "math_hf_data_processor", "env_name": "math"},
        },
        "env": {"math": {"num_workers": 8}},
    },
    "examples/nemo_gym/grpo_workplace_assistant_nemotron_nano_v2_9b.yaml": {
        **COMMON,
        "policy": {
            **POLICY,
            "train_global_batch_size": "${mul:${grpo.num_prompts_per_step},${grpo.num_generations_per_prompt}}",
        },
        "grpo": {
            **VALIDATES, "max_val_samples": None, "num_prompts_per_step": 64, "num_generations_per_prompt": 16,
        },
        "data": {
            **DATA, "max_input_seq_length": None, "num_workers": 0, "use_multiple_dataloader": False,
            "default": {"dataset_name": "NemoGymDataset", "env_name": "nemo_gym", "processor": "nemo_gym_data_processor"},
        },
        "env": {"should_use_nemo_gym": True, "nemo_gym": {"config_paths": ["for_training.yaml", "workplace.yaml"]}},
    },
}  # fmt: skip

REGISTRY = {"ResponseDataset", "openai_format", "NemoGymDataset"}
PREFERENCES = {"PreferenceDataset", "BinaryPreferenceDataset"}
PROCESSORS = {"sft_processor", "math_hf_data_processor", "nemo_gym_data_processor", "default"}

ALGORITHMS = {
    "examples/run_sft.py": "sft",
    "examples/run_dpo.py": "dpo",
    "examples/run_grpo.py": "grpo",
    "examples/nemo_gym/run_grpo_nemo_gym.py": "grpo",
}


def write_examples(folder: Path) -> None:
    """Make `folder` a checkout of NeMo-RL, as far as configurations inherit from it."""
    for name, content in EXAMPLES.items():
        place = folder / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(yaml.safe_dump(content))


def load_config(path: Path) -> DictConfig:
    """A file on top of what it inherits from."""
    config = OmegaConf.load(path)
    assert isinstance(config, DictConfig)
    if "defaults" not in config:
        return config
    parents = config.pop("defaults")
    merged = OmegaConf.create({})
    for parent in [parents] if isinstance(parents, str) else parents:
        merged = on_top_of(merged, load_config(path.parent / str(parent)))
    return on_top_of(merged, config)


def on_top_of(inherited: DictConfig, config: DictConfig) -> DictConfig:
    for section in list(config):
        if isinstance(config[section], DictConfig) and config[section].get("_override_", False):
            config[section].pop("_override_")
            inherited.pop(section, None)
    return OmegaConf.merge(inherited, config)


@dataclass(frozen=True)
class Started:
    """A run that has its data: all settings, and the datasets as their classes are called."""

    config: Config
    train: list[Config]
    validation: list[Config]
    max_input_seq_length: int | None


def start(program: str, path: Path) -> Started:
    """What `program`, one of ALGORITHMS, does with `--config path`."""
    OmegaConf.register_resolver("mul", lambda a, b: a * b, replace=True)
    config = OmegaConf.to_container(load_config(path), resolve=True)
    algorithm, data = ALGORITHMS[program], config["data"]
    train, validation = data_sets(data, "train"), data_sets(data, "validation")
    for data_set in [*train, *validation]:
        check_data_set(algorithm, data_set)
    if algorithm == "sft":
        assert all(key in data for key in ("add_bos", "add_eos", "add_generation_prompt"))
    if algorithm == "grpo":
        start_grpo(program, config, [*train, *validation])
    check_validation(algorithm, config, validation)
    assert {"shuffle", "num_workers"} <= set(data)
    return Started(config, train, validation, data["max_input_seq_length"])


def data_sets(data: Config, split: str) -> list[Config]:
    """The datasets of a split, each filled up from `default`."""
    found = data[split] if split == "train" else data.get(split)
    listed = found if isinstance(found, list) else [found] if found is not None else []
    return [{**(data.get("default") or {}), **each} for each in listed]


def check_data_set(algorithm: str, data_set: Config) -> None:
    assert data_set["dataset_name"] in (PREFERENCES if algorithm == "dpo" else REGISTRY)
    assert Path(data_set["data_path"]).suffix == ".jsonl"
    assert data_set.get("processor", "default") in PROCESSORS
    prompt = data_set.get("prompt_file")
    assert prompt is None, "a prompt that rows were not made for"
    assert not data_set.get("split_validation_size"), "rows of the training split are taken away"


def start_grpo(program: str, config: Config, read: list[Config]) -> None:
    assert config["data"]["use_multiple_dataloader"] is False
    generated = config["grpo"]["num_prompts_per_step"] * config["grpo"]["num_generations_per_prompt"]
    # BatchedDataDict.shard_by_batch_size asserts this in the first step, after all that it generated.
    assert generated % config["policy"]["train_global_batch_size"] == 0
    for data_set in read:
        assert data_set["env_name"] in config["env"]
    if "nemo_gym" in program:
        assert config["env"]["should_use_nemo_gym"]
        assert config["grpo"]["max_val_samples"] is None


def check_validation(algorithm: str, config: Config, validation: list[Config]) -> None:
    """Without data to validate on, nothing may ask for it, and no checkpoint may be chosen by it."""
    section, metric = config[algorithm], config["checkpointing"]["metric_name"]
    if not validation:
        assert section["val_period"] == 0
        assert not section["val_at_start"]
        assert not section["val_at_end"]
        assert metric is None or metric.startswith("train:")
