"""Stands in for Megatron-LM's pretrain_gpt.py: its data path on megatron-core from the index, by its own arguments; no model.

    MEGATRON_LM=tests/peers/megatron_lm bash MODEL/train.sh

To run all of Megatron-LM on a CPU, name a checkout whose `megatron/core/datasets` has the helpers (`helpers_cpp*.so`) that come
with megatron-core:

    MEGATRON_LM=CHECKOUT PYTHONPATH=tests/peers/on_cpu:.:CHECKOUT bash MODEL/train.sh --distributed-backend gloo \\
        --use-cpu-initialization --transformer-impl local --no-persist-layer-norm --no-rope-fusion \\
        --no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-bias-swiglu-fusion --no-bias-dropout-fusion
"""

import argparse
import json
from pathlib import Path

from megatron.core import num_microbatches_calculator, parallel_state
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.tokenizers.text.libraries.null_tokenizer import NullTokenizer
from torch import distributed
from torch.utils.data import DataLoader

NUMBERS = ("seq-length", "micro-batch-size", "global-batch-size", "train-iters", "eval-iters", "eval-interval", "seed")


def main():
    parser = argparse.ArgumentParser()
    for name in NUMBERS:
        parser.add_argument(f"--{name}", type=int)
    for name in ("per-split-data-args-path", "data-cache-path"):
        parser.add_argument(f"--{name}")
    given, _ = parser.parse_known_args()
    distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel()
    replica, replicas = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    num_microbatches_calculator.init_num_microbatches_calculator(
        replica, None, given.global_batch_size, given.micro_batch_size, replicas
    )
    train, validations = given.train_iters, given.train_iters // given.eval_interval + 1
    sizes = [steps * given.global_batch_size for steps in (train, validations * given.eval_iters, given.eval_iters)]
    blends = json.loads(Path(given.per_split_data_args_path).read_text())
    config = GPTDatasetConfig(
        random_seed=given.seed, sequence_length=given.seq_length, path_to_cache=given.data_cache_path,
        blend_per_split=[blend and (blend[1::2], [float(weight) for weight in blend[::2]]) for blend in blends.values()],
        reset_position_ids=False, reset_attention_mask=False, eod_mask_loss=False, create_attention_mask=False,
        tokenizer=NullTokenizer(500),
    )  # fmt: skip
    dataset, *_ = BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config).build()
    rows = [range(at, at + given.micro_batch_size) for at in range(0, sizes[0], given.micro_batch_size)]
    loader = DataLoader(dataset, batch_sampler=rows[replica::replicas])
    assert all(set(batch) >= {"tokens", "labels"} and "sample_number" not in batch for batch in loader)


if __name__ == "__main__":
    main()
