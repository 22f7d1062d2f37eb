"""What megatron-core asks of CUDA, on a machine that has none: it fails as it is, and works when the CPU answers.

The change is one of a whole process, so this file is also the script that such a process runs.
"""

import json
import sys

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


OBSTACLES = {"current device": current_device, "named devices": named_devices, "types": types}


def main():
    from tokenmill.tasks.train.cuda_on_cpu import compute_on_cpu  # noqa: PLC0415

    before = {name: outcome(obstacle) for name, obstacle in OBSTACLES.items()}
    compute_on_cpu()
    found = {name: (before[name], outcome(obstacle)) for name, obstacle in OBSTACLES.items()}
    sys.stdout.write(json.dumps(found) + "\n")


def outcome(work):
    """Why something fails, if it does."""
    try:
        work()
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
        ("named devices", "not compiled with CUDA"),
        ("types", "AssertionError"),
    ],
)
def test_the_cpu_answers_for_cuda(found, obstacle, why):
    before, after = found[obstacle]
    assert why in before
    assert after is None


if __name__ == "__main__":
    main()
