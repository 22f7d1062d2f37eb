"""What megatron-core asks of CUDA, on a machine that has none: it fails as it is, and works when the CPU answers.

The change is one of a whole process, so this file is also the script that such a process runs.
"""

import json
import sys
import tempfile

import pytest
import torch

from tests.train.training_runs import started

pytestmark = pytest.mark.slow


def current_device():
    torch.zeros(2, device=torch.cuda.current_device())
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())


def named_devices():
    made = [
        torch.zeros(2, device="cuda"),
        torch.tensor([1.0], device=torch.device("cuda", 0)),
        torch.zeros(2).cuda(),
        torch.zeros(2).to("cuda"),
        torch.zeros(2).to(device="cuda:0", dtype=torch.float64),
        torch.nn.Linear(2, 2).to("cuda").weight,
    ]
    assert all(tensor.device.type == "cpu" for tensor in made)
    assert made[4].dtype == torch.float64


def types():
    for dtype, name in ((torch.float32, "Float"), (torch.bfloat16, "BFloat16")):
        assert torch.zeros(1, dtype=dtype).type() == f"torch.cuda.{name}Tensor"
    assert torch.zeros(1).type(torch.int32).dtype == torch.int32


def in_a_world(work):
    from megatron.core.parallel_state import destroy_model_parallel, initialize_model_parallel  # noqa: PLC0415
    from tokenmill.tasks.train.engine import joined  # noqa: PLC0415

    with joined("cpu"):
        initialize_model_parallel()
        try:
            work()
        finally:
            destroy_model_parallel()


def checkpoint():
    from megatron.core import dist_checkpointing  # noqa: PLC0415
    from megatron.core.dist_checkpointing import ShardedTensor  # noqa: PLC0415

    def state(tensor):
        return {"weight": ShardedTensor.from_rank_offsets("weight", tensor), "step": 7}

    with tempfile.TemporaryDirectory() as folder:
        dist_checkpointing.save(state(torch.arange(6.0)), folder)
        loaded = dist_checkpointing.load(state(torch.zeros(6)), folder)
    assert loaded["weight"].tolist() == list(range(6))
    assert loaded["step"] == 7


def attention(kind):
    """Attention as a layer asks for it; four heads of queries, two of keys and values."""
    from megatron.core.transformer.enums import AttnMaskType  # noqa: PLC0415
    from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: PLC0415

    config = TransformerConfig(
        num_layers=1, hidden_size=32, num_attention_heads=4, num_query_groups=2, attention_dropout=0.0,
        masked_softmax_fusion=False,
    )  # fmt: skip
    layer = kind(config=config, layer_number=1, attn_mask_type=AttnMaskType.causal, attention_type="self").train()
    query, key, value = (torch.rand(5, 3, heads, 8) for heads in (4, 2, 2))
    segments = torch.tensor([[0, 0, 0, 0, 0], [0, 0, 1, 1, 1], [0, 1, 2, 2, -1]])
    sees = (segments[:, :, None] == segments[:, None, :]).tril()[:, None]
    for mask, seen in ((None, torch.ones(5, 5).tril().bool()), (sees, sees)):
        said = layer(query, key, value, mask, AttnMaskType.causal)
        wanted = written_out(query, key, value, seen)
        assert torch.allclose(said, wanted, atol=1e-6), (said - wanted).abs().max()


def written_out(query, key, value, seen):
    """Softmax of scores over what each token sees, and the values in these shares."""
    key, value = (each.repeat_interleave(2, 2) for each in (key, value))
    scores = torch.einsum("qbhd,kbhd->bhqk", query, key) / 8**0.5
    shares = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    return torch.einsum("bhqk,kbhd->qbhd", shares, value).flatten(2)


def attention_of_megatron():
    from megatron.core.transformer.dot_product_attention import DotProductAttention  # noqa: PLC0415

    attention(DotProductAttention)


def attention_of_torch():
    from tokenmill.tasks.train.megatron import TorchAttention  # noqa: PLC0415

    attention(TorchAttention)


OBSTACLES = {"current device": current_device, "named devices": named_devices, "types": types, "checkpoint": checkpoint}


def main():
    from tokenmill.tasks.train.cuda_on_cpu import compute_on_cpu  # noqa: PLC0415

    before = {name: outcome(obstacle) for name, obstacle in OBSTACLES.items()}
    compute_on_cpu()
    found = {name: (before[name], outcome(obstacle)) for name, obstacle in OBSTACLES.items()}
    found["random numbers"] = (outcome(attention_of_megatron), outcome(attention_of_torch))  # not replaced but avoided
    sys.stdout.write(json.dumps(found) + "\n")


def outcome(work):
    """Why something fails, if it does."""
    try:
        in_a_world(work)
    except Exception as error:  # noqa: BLE001 - whatever it is
        return str(error) or repr(error)
    return None


@pytest.fixture(scope="module")
def found():
    with started([__file__]) as running:
        output, _ = running.communicate()
    return json.loads(output.splitlines()[-1])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA")
@pytest.mark.parametrize(
    ("obstacle", "why"),
    [
        ("current device", "not compiled with CUDA"),
        ("random numbers", "cuda rng state model-parallel-rng is not added"),
        ("named devices", "not compiled with CUDA"),
        ("types", "AssertionError"),
        ("checkpoint", "not compiled with CUDA"),
    ],
)
def test_the_cpu_answers_for_cuda(found, obstacle, why):
    before, after = found[obstacle]
    assert why in before
    assert after is None


if __name__ == "__main__":
    main()
