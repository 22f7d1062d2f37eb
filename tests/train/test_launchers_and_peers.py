"""What launchers write for Megatron-LM and Megatron-Bridge passes through the peers' own parser and configurations.

Importing them takes some ten seconds, so one process reads all cases. `make` unpacks both peers into the virtual environment.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenmill.tasks.train.launchers import launch_of

from tests.flows.cloning import REPOSITORY
from tests.peers import megatron_in_turn
from tests.train.launcher_jobs import FOLDER, HUB, job, phased

pytestmark = pytest.mark.slow

PEERS = Path(sys.prefix) / "peers"

MODEL = {"layers": 4, "hidden": 48, "heads": 6, "key_value_heads": 2, "feed_forward": 96, "rope_base": 500_000.0}
OPTIMIZER = {
    "learning_rate": 1e-3, "minimum_learning_rate": 1e-5, "warmup_steps": 2, "decay": "linear", "distributed": True,
    "weight_decay": 0.05, "beta2": 0.98, "epsilon": 1e-7, "clip": 0.5,
}  # fmt: skip
CHOSEN = {
    "model": MODEL, "optimizer": OPTIMIZER, "parallel": {"tensor": 2, "sequence": True, "context": 2}, "steps": 30,
    "sequence_length": 64, "global_batch": 16, "micro_batch": 4, "validate_every": 10, "validation_batches": 3,
    "checkpoint_every": 15, "seed": 5,
}  # fmt: skip
PLAIN = {"precision": "float32", "model": {"tied_embeddings": True}, "global_batch": 64}

SPLITS = {"train": ["0.25", "/d/a b", "0.75", "/d/b"], "valid": ["1.0", "/d/v"], "test": None}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("peers")


@pytest.fixture(scope="module")
def cases(folder):
    """Jobs by a name, and the machines that they ask for."""
    data, model = prepared(folder / "pre pared"), llama(folder / "it's $HOME")
    (folder / "trained").mkdir()
    llama(folder / "trained/model")
    packs = {"kind": "sft", "path": data, "validate_every": 2}
    return {
        "megatron-lm": job(launcher="megatron-lm", **CHOSEN),
        "megatron-lm, plain": job(launcher="megatron-lm", tokenizer=HUB, **PLAIN),
        "megatron-lm, two machines": job(launcher="megatron-lm", nodes=2, global_batch=16, micro_batch=1, parallel={"pipeline": 2}, model=MODEL),
        "megatron-lm, phases": phased(steps=5, optimizer={"warmup_steps": 1}),
        "megatron-bridge": job(launcher="megatron-bridge", path=data, **CHOSEN),
        "megatron-bridge, plain": job(launcher="megatron-bridge", path=data, tokenizer=HUB, **PLAIN),
        "megatron-bridge, packs": job(launcher="megatron-bridge", tokenizer=HUB, micro_batch=8, **packs),
        "megatron-bridge, never validated": job(launcher="megatron-bridge", tokenizer=HUB, **{**packs, "validate_every": None}),
        "megatron-bridge, further": job(launcher="megatron-bridge", start_from=model, **packs),
        "megatron-bridge, from a training": job(launcher="megatron-bridge", start_from=str(folder / "trained"), path=data, global_batch=64),
    }  # fmt: skip


@pytest.fixture(scope="module")
def found(cases, folder):
    """What the peers have made of each case."""
    assert PEERS.is_dir(), (
        f"the peers are not in {PEERS}; put them there with: rm .venv/installed-dev; make .venv/installed-dev"
    )
    plan = [asked_of_peer(made, folder / str(number)) for number, made in enumerate(cases.values())]
    done = subprocess.run(
        [sys.executable, "-m", megatron_in_turn.__name__, str(PEERS)],
        cwd=REPOSITORY,
        input=json.dumps(plan), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return dict(zip(cases, json.loads(done.stdout), strict=True))


def prepared(place):
    """What Megatron-Bridge looks at before it trains: a blend, and packs with their columns."""
    row = {
        "input_ids": (pa.int32(), [1, 2, 3, 7]),
        "seq_start_id": (pa.int32(), [0]),
        "loss_mask": (pa.int8(), [0, 1, 1, 0]),
    }
    table = pa.table({name: pa.array([values], pa.list_(kind)) for name, (kind, values) in row.items()})
    for split in ("train", "valid"):
        (place / split).mkdir(parents=True)
        pq.write_table(table, place / split / "00.parquet")
    (place / "blend.json").write_text(json.dumps(SPLITS))
    return str(place)


def llama(place):
    """A model's folder, as far as its shape is told there."""
    place.mkdir()
    shape = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32, "intermediate_size": 64,
        "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 3, "vocab_size": 1024, "hidden_act": "silu",
    }  # fmt: skip
    (place / "config.json").write_text(json.dumps(shape))
    return str(place)


def asked_of_peer(made, place):
    """The files of a job's launch, written, and what a peer is to read of them."""
    launch, processes = launch_of(made, 8), 8 * made.settings.nodes
    place.mkdir()
    for name, text in launch.files.items():
        (place / name).write_text(text)
    if made.settings.launcher == "megatron-bridge":
        return {"peer": "megatron-bridge", "processes": processes, "program": str(place / "train.py")}
    return {"peer": "megatron-lm", "processes": processes, **started_by(place)}


SAYS_HOW_IT_IS_STARTED = f"""#!{sys.executable}
import json, os, sys
name = "CUDA_DEVICE_MAX_CONNECTIONS"
print(json.dumps({{"arguments": sys.argv[1:], "environment": {{name: os.environ[name]}}}}))
"""


def started_by(place):
    """What the script in `place` starts pretrain_gpt.py with."""
    python = place / "bin/python"
    python.parent.mkdir()
    python.write_text(SAYS_HOW_IT_IS_STARTED)
    python.chmod(0o755)
    machine = {
        "MEGATRON_LM": "/m",
        "NODE_RANK": "0",
        "MASTER_ADDR": "first",
        "PATH": f"{python.parent}:{os.environ['PATH']}",
    }
    done = subprocess.run(["bash", place / "train.sh"], env={**os.environ, **machine}, capture_output=True, check=True)
    said = orjson.loads(done.stdout.splitlines()[0])
    words = said["arguments"]
    return {**said, "arguments": words[words.index("/m/pretrain_gpt.py") + 1 :]}


def same(found, expected, within=""):
    """That what was found says all that is expected, part by part."""
    assert "refused" not in found, found["refused"]
    for name, value in expected.items():
        if isinstance(value, dict):
            same(found[name], value, f"{within}{name}.")
        else:
            assert found[name] == value, f"{within}{name}"


EXPECTED = {
    "megatron-lm": {
        "num_layers": 4, "hidden_size": 48, "num_attention_heads": 6, "num_query_groups": 2, "ffn_hidden_size": 96,
        "rotary_base": 500_000, "group_query_attention": True, "swiglu": True, "normalization": "RMSNorm",
        "position_embedding_type": "rope", "add_bias_linear": False, "untie_embeddings_and_output_weights": True,
        "attention_dropout": 0, "hidden_dropout": 0, "layernorm_epsilon": 1e-5, "make_vocab_size_divisible_by": 128,
        "seq_length": 64, "max_position_embeddings": 64, "per_split_data_args_path": "/data/pre pared/blend.json",
        "data_cache_path": f"{FOLDER}/cache", "tokenizer_type": "NullTokenizer", "vocab_size": 1000,
        "train_iters": 30, "global_batch_size": 16, "micro_batch_size": 4, "eval_interval": 10, "eval_iters": 3, "seed": 5,
        "lr": 1e-3, "min_lr": 1e-5, "lr_warmup_iters": 2, "lr_decay_style": "linear", "lr_decay_iters": 30,
        "weight_decay": 0.05, "adam_beta1": 0.9, "adam_beta2": 0.98, "adam_eps": 1e-7, "clip_grad": 0.5,
        "use_distributed_optimizer": True, "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 1,
        "context_parallel_size": 2, "sequence_parallel": True, "data_parallel_size": 2, "params_dtype": "torch.bfloat16",
        "save": f"{FOLDER}/checkpoints", "load": f"{FOLDER}/checkpoints", "save_interval": 15, "ckpt_format": "torch_dist",
        "eod_mask_loss": False, "reset_position_ids": False, "reset_attention_mask": False,
    },
    "megatron-lm, plain": {
        "bf16": False, "params_dtype": "torch.float32", "untie_embeddings_and_output_weights": False, "eval_iters": 0,
        "use_distributed_optimizer": False, "sequence_parallel": False, "tokenizer_type": "HuggingFaceTokenizer",
        "tokenizer_model": "org/tokenizer", "data_parallel_size": 8,
    },
    "megatron-lm, phases": {
        "train_samples": 40, "lr_decay_samples": 40, "lr_warmup_samples": 8, "phase_transition_iterations": [3],
        "samples_in_first_phase": 24,
    },
    "megatron-lm, two machines": {"world_size": 16, "data_parallel_size": 8, "pipeline_model_parallel_size": 2},
    "megatron-bridge": {
        "model": {
            "num_layers": 4, "hidden_size": 48, "num_attention_heads": 6, "num_query_groups": 2, "ffn_hidden_size": 96,
            "rotary_base": 500_000, "gated_linear_unit": True, "normalization": "RMSNorm", "seq_length": 64,
            "add_bias_linear": False, "share_embeddings_and_output_weights": False, "vocab_size": 1000,
            "attention_dropout": 0, "hidden_dropout": 0, "layernorm_epsilon": 1e-5, "make_vocab_size_divisible_by": 128,
            "tensor_model_parallel_size": 2, "context_parallel_size": 2, "sequence_parallel": True,
            "params_dtype": "torch.bfloat16", "calculate_per_token_loss": False,
        },
        "dataset": {
            "blend": None, "split": None, "seq_length": 64, "random_seed": 5, "path_to_cache": f"{FOLDER}/cache",
            "blend_per_split": [[["/d/a b", "/d/b"], [0.25, 0.75]], [["/d/v"], [1.0]], None],
        },
        "tokenizer": {"tokenizer_type": "NullTokenizer", "vocab_size": 1000},
        "train": {"train_iters": 30, "global_batch_size": 16, "micro_batch_size": 4},
        "validation": {"eval_interval": 10, "eval_iters": 3},
        "optimizer": {
            "lr": 1e-3, "min_lr": 1e-5, "weight_decay": 0.05, "adam_beta2": 0.98, "adam_eps": 1e-7, "clip_grad": 0.5,
            "use_distributed_optimizer": True, "bf16": True,
        },
        "scheduler": {"lr_decay_style": "linear", "lr_decay_iters": 30, "lr_warmup_iters": 2},
        "ddp": {"use_distributed_optimizer": True},
        "rng": {"seed": 5},
        "checkpoint": {
            "save": f"{FOLDER}/checkpoints", "load": f"{FOLDER}/checkpoints", "save_interval": 15,
            "pretrained_checkpoint": None, "ckpt_format": "torch_dist",
        },
    },
    "megatron-bridge, plain": {
        "model": {"share_embeddings_and_output_weights": True, "params_dtype": "torch.float32"},
        "optimizer": {"bf16": False, "use_distributed_optimizer": False},
        "tokenizer": {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": "org/tokenizer"},
        "validation": {"eval_iters": 0},
        "mixed_precision": None,
    },
    "megatron-bridge, packs": {
        "model": {"seq_length": 512, "calculate_per_token_loss": True},
        "dataset": {
            "seq_length": 512, "enable_offline_packing": True, "do_validation": True, "do_test": False,
            "offline_packing_specs": {"packed_sequence_size": 512, "pad_seq_to_mult": 4},
        },
        "train": {"global_batch_size": 8, "micro_batch_size": 1},
        "validation": {"eval_interval": 2, "eval_iters": 4},
        "ddp": {"average_in_collective": False},
    },
    "megatron-bridge, never validated": {
        "dataset": {"do_validation": False, "offline_packing_specs": {"packed_val_data_path": None}},
        "validation": {"eval_iters": 0},
    },
    "megatron-bridge, further": {"model": {"num_layers": 3, "hidden_size": 32, "seq_length": 512, "vocab_size": 1024}},
    "megatron-bridge, from a training": {"model": {"num_layers": 3, "seq_length": 128}, "dataset": {"seq_length": 128}},
}  # fmt: skip


@pytest.mark.parametrize("case", EXPECTED)
def test_peer_reads_the_chosen_data(found, case):
    same(found[case], EXPECTED[case])


def test_megatron_bridge_reads_the_packs_and_begins_with_the_weights_that_were_named(found, folder):
    data, model = folder / "pre pared", str(folder / "it's $HOME")
    specs = found["megatron-bridge, packs"]["dataset"]["offline_packing_specs"]
    assert [specs["packed_train_data_path"], specs["packed_val_data_path"]] == [
        str(data / "train"),
        str(data / "valid"),
    ]
    further = found["megatron-bridge, further"]
    assert further["checkpoint"]["pretrained_checkpoint"] == further["tokenizer"]["tokenizer_model"] == model
    trained = found["megatron-bridge, from a training"]["checkpoint"]["pretrained_checkpoint"]
    assert trained == str(folder / "trained/model")
