"""A program of Megatron-LM that knows nothing of tokenmill follows the order and is recorded."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tokenmill.tasks.shards.executor import run_here
from tokenmill.tasks.train.launchers import launch_of
from tokenmill.tasks.train.launchers.launch import write_files
from tokenmill.tasks.train.order import INDICES, make_order
from tokenmill.tasks.train.preflight import plan_training
from tokenmill.tasks.train.prepared import prepared_data
from tokenmill.tasks.train.proof import prove
from tokenmill.tasks.train.settings import OrderSettings, TrainSettings

from tests.flows.cloning import REPOSITORY
from tests.peers import megatron_in_turn
from tests.preparing_sft import chat_vocabulary
from tests.train.small_data import texts

PLAN = {"sequence_length": 16, "global_batch": 8, "steps": 12, "seed": 7, "validate_every": 5, "validation_batches": 2}


def names_in(folder):
    return sorted(path.relative_to(folder) for path in Path(folder).rglob("*"))


@pytest.mark.weekly
def test_two_processes_build_no_index_and_are_proven(tmp_path):
    out, _ = texts(tmp_path, chat_vocabulary(tmp_path), holdout={"valid": 0.2, "test": 0.1})
    make_order(prepared_data(out), OrderSettings(**PLAN), run_here)
    settings = TrainSettings(**PLAN, micro_batch=2, launcher="megatron-lm", precision="float32")
    model, before = tmp_path / "model", names_in(out)
    write_files(launch_of(plan_training(out, settings, str(model)), 2), str(model))
    megatron_lm = Path(megatron_in_turn.__file__).parent / "megatron_lm"
    environment = {
        "MEGATRON_LM": str(megatron_lm), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(REPOSITORY), "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    subprocess.run(["bash", model / "train.sh"], env={**os.environ, **environment}, check=True)
    proof = prove(str(model))
    assert (proof.steps, proof.problem, proof.plan) == (12, None, f"{model}/order.json")
    assert names_in(model / "cache") == names_in(Path(out, INDICES))
    assert names_in(out) == before
