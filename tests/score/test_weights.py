"""Models on disk: what names them, what is refused, and that what is loaded is what was saved."""

import json
import os
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenmill.tasks.errors import InputError
from tokenmill.tasks.score import weights
from tokenmill.tasks.score.kind import EMBEDDINGS, NLL
from tokenmill.tasks.score.models import CausalScorer, load_scorer
from tokenmill.tasks.score.settings import EmbedSettings, NllSettings
from tokenmill.tasks.score.weights import TEXT, WEIGHTS, find_model

from tests.score.tiny_models import completions, corpus, gpt_oss, llama, save_mxfp4


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "saved"
    llama().save_pretrained(folder)
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    return Path(shutil.copytree(saved, tmp_path / "model"))


def digest(folder, patterns=WEIGHTS):
    return find_model(str(folder)).digest(patterns)


def flip(path, place=-1):
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def tied():
    return llama(tie_word_embeddings=True)


@pytest.fixture(scope="module")
def quantized(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "mxfp4"
    return folder, save_mxfp4(folder)


@pytest.mark.slow
@pytest.mark.parametrize("made", [llama, tied, gpt_oss, None], ids=["llama", "tied", "gpt_oss", "mxfp4"])
def test_a_model_that_was_saved_scores_as_before(tmp_path, quantized, made):
    folder, model = (tmp_path, made()) if made else quantized
    if made:
        model.save_pretrained(folder)
    found = load_scorer(find_model(str(folder)), device="cpu")
    assert found.score(completions(*corpus())) == CausalScorer(model).score(completions(*corpus()))


def test_missing_model_package_is_named(quantized, monkeypatch):
    monkeypatch.setattr("transformers.quantizers.quantizer_mxfp4.is_accelerate_available", lambda: False)
    with pytest.raises(InputError, match=r"needs a package .*[Aa]ccelerate.*pip install torch==.* 'accelerate>="):
        load_scorer(find_model(str(quantized[0])), device="cpu")


def test_precision_is_chosen(saved):
    coarse = load_scorer(find_model(str(saved)), device="cpu", precision="bfloat16").score(completions(*corpus()))
    fine = load_scorer(find_model(str(saved)), device="cpu").score(completions(*corpus()))
    assert coarse["nll_mean"] != fine["nll_mean"]
    np.testing.assert_allclose(coarse["nll_mean"].to_numpy(), fine["nll_mean"].to_numpy(), rtol=1e-2)


def test_a_copy_elsewhere_is_the_same_model(saved, folder):
    assert digest(saved) == digest(folder)
    assert digest(saved).startswith("xxh3_128:")


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: flip(folder / "model.safetensors"),
        lambda folder: flip(folder / "config.json"),
        lambda folder: (folder / "model.safetensors").rename(folder / "other.safetensors"),
    ],
    ids=["weights", "configuration", "name"],
)
def test_every_byte_of_weights_and_configuration_counts(folder, change):
    before = digest(folder)
    change(folder)
    assert digest(folder) != before


def test_unloaded_files_do_not_count(folder):
    before = digest(folder), digest(folder, (*WEIGHTS, *TEXT))
    (folder / "README.md").write_text("A model.")
    (folder / "original").mkdir()
    shutil.copy(folder / "model.safetensors", folder / "original")
    assert (digest(folder), digest(folder, (*WEIGHTS, *TEXT))) == before
    (folder / "tokenizer.json").write_text("{}")  # which counts where text is read
    assert digest(folder) == before[0]
    assert digest(folder, (*WEIGHTS, *TEXT)) != before[1]


def test_hashes_are_remembered_until_a_file_changes(folder, monkeypatch):
    read = []
    hashed = weights.file_hash
    monkeypatch.setattr(weights, "file_hash", lambda place: read.append(Path(place).name) or hashed(place))
    for path in folder.iterdir():
        os.utime(path, (1e9, 1e9))
    first = digest(folder)
    assert sorted(read) == ["config.json", "model.safetensors"]
    assert digest(folder) == first
    assert len(read) == 2
    flip(folder / "model.safetensors")
    os.utime(folder / "model.safetensors", (1e9 + 5, 1e9 + 5))
    assert digest(folder) != first
    assert read[2:] == ["model.safetensors"]


def test_the_hash_of_a_file_that_has_just_changed_is_not_trusted(folder):
    for path in folder.iterdir():
        path.touch()
    before, status = digest(folder), (folder / "config.json").stat()
    flip(folder / "config.json")
    os.utime(folder / "config.json", ns=(status.st_atime_ns, status.st_mtime_ns))
    assert digest(folder) != before


def test_pickled_weights_are_rejected(folder):
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(InputError, match="other weights are pickles"):
        digest(folder)
    with pytest.raises(InputError, match="cannot be loaded"):
        load_scorer(find_model(str(folder)), device="cpu")


def test_checkpoint_with_missing_weights_is_rejected(folder):
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        InputError, match=r"lacks 1 of the weights of a LlamaForCausalLM, model\.layers\.1\.mlp\.up_proj"
    ):
        load_scorer(find_model(str(folder)), device="cpu")


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_truncated_weights_are_rejected(folder, name):
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[: len(content) // 2])
    with pytest.raises(InputError, match="cannot be loaded"):
        load_scorer(find_model(str(folder)), device="cpu")


def test_code_of_a_repository_is_not_run(folder):
    config = json.loads((folder / "config.json").read_text())
    mine = {"AutoConfig": "mine.Config", "AutoModelForCausalLM": "mine.Model"}
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "mine", "auto_map": mine}))
    (folder / "mine.py").write_text(f"open({str(folder / 'ran')!r}, 'w')")
    with pytest.raises(InputError, match="cannot be loaded"):
        load_scorer(find_model(str(folder)), device="cpu")
    assert not (folder / "ran").exists()


def test_non_model_folder_is_explained(tmp_path):
    (tmp_path / "model.gguf").write_text("x")
    with pytest.raises(InputError, match=r"doesn't contain config\.json"):
        find_model(str(tmp_path))
    with pytest.raises(InputError, match="is a file; give the folder"):
        find_model(str(tmp_path / "model.gguf"))


def test_a_model_of_the_hub_has_the_digest_of_its_files_at_a_commit(hub, saved):
    commit = hub.model("some/model-1.5").commit(saved, "v1")
    found = find_model("hf://some/model-1.5", "v1")
    assert (found.name, found.revision) == ("some/model-1.5", commit)
    assert found.digest() == digest(saved)


@pytest.mark.parametrize("package", ["torch", "transformers"])
def test_missing_torch_names_the_install(monkeypatch, saved, package):
    monkeypatch.setitem(sys.modules, package, None)
    remedy = rf"{package} cannot be imported .*; install it with: pip install torch==.* 'accelerate>="
    embedding = EmbedSettings(engine="transformers", model=str(saved), pooling="mean")
    for kind, settings in ((NLL, NllSettings(model=str(saved))), (EMBEDDINGS, embedding)):
        with pytest.raises(InputError, match=remedy):
            kind.check(None, settings, "out")
