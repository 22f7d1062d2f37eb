"""Whatever would stop a training, or make it one of something else, is refused before it starts, and with what to do."""

import json
import re
import shutil
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import fsspec
import numpy as np
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenmill.flows.cli import run
from tokenmill.tasks.errors import InputError
from tokenmill.tasks.seal import sealed, unsealed
from tokenmill.tasks.strict import parse
from tokenmill.tasks.tokenize.binidx import index, read_index
from tokenmill.tasks.train import training
from tokenmill.tasks.train.job import Job, TrainData, TrainSource
from tokenmill.tasks.train.launchers.launch import process_count, start_place
from tokenmill.tasks.train.preflight import RUNTIME_SETTINGS, check, epochs_of, plan_training
from tokenmill.tasks.train.settings import TrainSettings

from tests.preparing_sft import CHATML
from tests.tokenize.small_vocabularies import byte_level_bpe
from tests.train.small_data import packs, texts

SMALL = {
    "sequence_length": 64, "steps": 3, "global_batch": 4, "micro_batch": 2, "max_epochs": None, "processes": 1,
    "model": {"heads": 4, "key_value_heads": 2, "layers": 4},
}  # fmt: skip


@pytest.fixture(scope="module")
def prepared(tmp_path_factory, vocabulary, store):
    """A preparation of each kind, which tests leave as it is; the packs are padded to a multiple of 4."""
    folder = tmp_path_factory.mktemp("prepared")
    return {
        "pretrain": texts(folder / "texts", vocabulary, store=store)[0],
        "sft": packs(folder / "packs", vocabulary, pad_seq_to_mult=4, store=store)[0],
    }


@pytest.fixture
def job(prepared, tmp_path):
    """Makes the job of a small training, which passes all checks, with some other settings."""
    return lambda kind="pretrain", **settings: planned(prepared[kind], tmp_path / "trained", **settings)


def planned(path, output_dir, **settings):
    return plan_training(str(path), parse(TrainSettings, merged(SMALL, settings), "settings"), str(output_dir))


def merged(base, settings):
    both = {name: {**base.get(name, {}), **value} for name, value in settings.items() if isinstance(value, dict)}
    return {**base, **settings, **both}


def refusal(chosen):
    with pytest.raises(InputError) as caught:
        check(chosen)
    return str(caught.value)


@pytest.mark.parametrize("kind", ["pretrain", "sft"])
def test_a_small_training_passes_and_nothing_is_written(job, kind):
    chosen = job(kind)
    assert check(chosen)
    assert not Path(chosen.output_dir).exists()


ANYWHERE = {"launcher": "megatron-bridge"}
SETTINGS = [
    ("pretrain", {"parallel": {"context": 2}, "processes": 2, "micro_batch": 1}, ANYWHERE, "remove it, or set launcher=megatron-bridge"),
    ("pretrain", {"parallel": {"sequence": True}}, ANYWHERE, "parallel.sequence=true: launcher=local does not split sequences"),
    ("pretrain", {"parallel": {"sequence": True}, "launcher": "slurm"}, ANYWHERE, "launcher=slurm does not split"),
    ("pretrain", {"processes": 3, "parallel": {"tensor": 2}}, {"processes": 4}, "set nodes and processes so that their product is a multiple of 2"),
    ("pretrain", {"nodes": 1, "parallel": {"tensor": 2}}, {"nodes": 2}, "1 machine(s) of 1 process(es) do not divide into replicas of 2"),
    ("pretrain", {"processes": 3, "parallel": {"tensor": 3}, "model": {"heads": 4, "key_value_heads": 4, "hidden": 48, "feed_forward": 96, "vocabulary_multiple": 96}}, {"model": {"heads": 6, "key_value_heads": 6, "hidden": 48, "feed_forward": 96, "vocabulary_multiple": 96}}, "model.heads=4 is not divisible by 3"),
    ("pretrain", {"processes": 4, "parallel": {"tensor": 4}}, {"model": {"key_value_heads": 4}}, "parallel.tensor=4: model.key_value_heads=2 is not divisible by 4"),
    ("pretrain", {"processes": 2, "parallel": {"tensor": 2}, "model": {"feed_forward": 175}}, {"model": {"feed_forward": 176}}, "model.feed_forward=175"),
    ("pretrain", {"processes": 2, "parallel": {"tensor": 2}, "model": {"vocabulary_multiple": 501}}, {"model": {"vocabulary_multiple": 502}}, "the padded vocabulary=501 is not divisible by 2; choose a divisor of it, or a model.vocabulary_multiple that is"),
    ("pretrain", {"processes": 3, "parallel": {"pipeline": 3}}, {"model": {"layers": 6}}, "parallel.pipeline=3: model.layers=4"),
    ("pretrain", {"global_batch": 6, "micro_batch": 4}, {"global_batch": 8}, "set global_batch=8"),
    ("pretrain", {"processes": 4, "micro_batch": 2}, {"micro_batch": 1}, "global_batch=4 is not a multiple of 8, the micro_batch=2 of 4 replica(s)"),
    ("sft", {"sequence_length": 62}, {"sequence_length": 63}, "set sequence_length=64, or prepare with pack_size=62"),
    ("sft", {"processes": 4, "parallel": {"context": 4}, **ANYWHERE}, {"processes": 2, "parallel": {"context": 2}}, "has pad_seq_to_mult=4; prepare it again with pad_seq_to_mult=8"),
    ("sft", {"processes": 6, "parallel": {"context": 2, "tensor": 3, "sequence": True}, "model": {"heads": 6, "key_value_heads": 6, "hidden": 48, "feed_forward": 96, "vocabulary_multiple": 96}, **ANYWHERE}, {"parallel": {"context": 2, "tensor": 3, "sequence": False}}, "prepare it again with pad_seq_to_mult=12"),
    ("sft", {"processes": 3, "parallel": {"tensor": 3, "sequence": True}, "model": {"heads": 6, "key_value_heads": 6, "hidden": 48, "feed_forward": 96, "vocabulary_multiple": 96}, **ANYWHERE}, {"parallel": {"tensor": 3, "sequence": False}}, "prepare it again with pad_seq_to_mult=3"),
    ("sft", {"processes": 8, "parallel": {"tensor": 8, "sequence": True}, "model": {"heads": 8, "key_value_heads": 8}, **ANYWHERE}, {"processes": 4, "parallel": {"tensor": 4, "sequence": True}}, "prepare it again with pad_seq_to_mult=8"),
    ("pretrain", {"processes": 3, "parallel": {"context": 3}, **ANYWHERE}, {"sequence_length": 66}, "sequence_length=64 must be a multiple of 6; set it to 66"),
    ("pretrain", {"steps": 1000, "max_epochs": 4.0}, {"max_epochs": 400.0}, "epochs"),
    ("sft", {"steps": 1000, "max_epochs": 4.0}, {"max_epochs": None}, "more than max_epochs=4"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "bad", "better", "remedy"), SETTINGS, ids=[case[3][:60] for case in SETTINGS])
def test_impossible_settings_fail_and_neighbors_pass(job, kind, bad, better, remedy):
    assert remedy in refusal(job(kind, **bad))
    check(job(kind, **merged(bad, better)))


def test_tokens_that_megatron_bridge_does_not_train_on_are_counted(tmp_path, vocabulary):
    """A template with EOS before each answer: an older Bridge clears the loss of the answer's first token."""
    template = CHATML.replace("{%- generation %}", "{{- '<|endoftext|>' }}{%- generation %}")
    template = template.replace("assistant\\n' if add", "assistant\\n<|endoftext|>' if add")
    given = {"chat_template": template, "holdout": {"valid": 0, "test": 0}, "pad_seq_to_mult": 4}
    out, manifest = packs(tmp_path, vocabulary, **given)
    answers = manifest["totals"]["documents"]
    lines = check(planned(out, tmp_path / "trained", **ANYWHERE))
    assert [line.split(" of ")[0] for line in lines if "#5213" in line] == [str(answers)]
    assert not [line for line in check(planned(out, tmp_path / "trained")) if "#5213" in line]
    plain, _ = packs(tmp_path, vocabulary, out="plain", **given | {"chat_template": CHATML})
    assert not [line for line in check(planned(plain, tmp_path / "trained", **ANYWHERE)) if "#5213" in line]


def train_tokens(path):
    """The tokens of each dataset of the train split, by the sizes of the files."""
    manifest = unsealed((Path(path) / "manifest.json").read_bytes())
    counts = {}
    for entry in manifest["derived"]["shards"]:
        for name in entry["published"].get("train", []):
            size = (Path(path) / f"{name}.bin").stat().st_size
            counts[entry["dataset"]] = counts.get(entry["dataset"], 0) + size // 2
    return counts


def test_one_source_has_to_fill_a_row(job, prepared):
    most = max(train_tokens(prepared["pretrain"]).values())
    assert f"set sequence_length={most - 1} or less, or prepare more data" in refusal(job(sequence_length=most))
    check(job(sequence_length=most - 1))


def test_short_validation_split_is_reported(job):
    by_length = [source.tokens for source in job().data.of("valid")]
    shorter = min(by_length)
    assert len(set(by_length)) == 2
    told = [line for line in check(job(sequence_length=shorter, validate_every=1)) if "validation split" in line]
    assert len(told) == 1
    assert f"{shorter:,} tokens of the validation split, repeated to fill rows of {shorter:,}" in told[0]
    assert not [line for line in check(job(sequence_length=shorter)) if "validation split" in line]
    assert not [
        line for line in check(job(sequence_length=shorter - 1, validate_every=1)) if "validation split" in line
    ]


def data_of(kind, sources):
    return TrainData(
        path="/prepared", kind=kind, made_from="xxh3_128:0", tokenizer={}, fingerprint="sha256:0", vocabulary_size=10,
        eos=0, sources=sources,
    )  # fmt: skip


WEIGHTED = st.lists(st.tuples(st.integers(1, 10**9), st.lists(st.integers(1, 40), min_size=1, max_size=3)), min_size=1, max_size=5)  # fmt: skip


@given(WEIGHTED, st.integers(1, 10**6), st.integers(1, 4096), st.integers(2, 8192))
def test_texts_are_drawn_by_weight(sources, steps, batch, length):
    listed = [
        TrainSource(dataset=f"d{number}", split="train", files=["x"] * len(weights), weights=weights, tokens=tokens)
        for number, (tokens, weights) in enumerate(sources)
    ]
    other = TrainSource(dataset="d0", split="valid", files=["y"], weights=[1000.0], tokens=1)
    settings = TrainSettings(steps=steps, global_batch=batch, sequence_length=length)
    found = epochs_of(Job(settings=settings, data=data_of("pretrain", [*listed, other]), output_dir="/out"))
    whole = sum(sum(weights) for _, weights in sources)
    wanted = [Fraction(steps * batch * length) * sum(weights) / whole / tokens for tokens, weights in sources]
    assert [each.source for each in found] == [source.dataset for source in listed]
    assert [each.count for each in found] == pytest.approx([float(often) for often in wanted])


@given(st.lists(st.integers(1, 30), min_size=1, max_size=4), st.integers(1, 40), st.integers(1, 9))
def test_packs_are_all_read_before_one_is_read_again(rows, steps, batch):
    listed = [
        TrainSource(
            dataset=f"d{number}", split="train", files=["x"], weights=[float(count)], tokens=count * 60, rows=count
        )
        for number, count in enumerate(rows)
    ]
    settings = TrainSettings(steps=steps, global_batch=batch)
    (found,) = epochs_of(Job(settings=settings, data=data_of("sft", listed), output_dir="/out"))
    read = [0] * sum(rows)
    for number in range(steps * batch):
        read[number % len(read)] += 1
    assert min(read) <= found.count <= max(read)
    assert found.count == pytest.approx(sum(read) / len(read))


def test_epochs_are_reported_by_source(job, prepared):
    held = train_tokens(prepared["pretrain"])
    drawn = {"a": 3 * 4 * 64 * 3 / 4, "b": 3 * 4 * 64 / 4}
    assert check(job()) == [
        f"{name}: {drawn[name] / held[name]:.2f} epochs ({drawn[name]:,.0f} tokens drawn, of {held[name]:,})"
        for name in ("a", "b")
    ]


def test_suggested_steps_pass_and_one_more_fails(job):
    words = refusal(job(steps=1000, max_epochs=1.5))
    steps = int(words.partition("set steps=")[2].partition(" ")[0])
    check(job(steps=steps, max_epochs=1.5))
    refusal(job(steps=steps + 1, max_epochs=1.5))


@pytest.mark.parametrize("kind", ["pretrain", "sft"])
def test_without_a_train_split_nothing_is_trained(job, kind):
    chosen = job(kind)
    data = chosen.data.model_copy(update={"sources": chosen.data.of("valid")})
    assert "the train split is empty; prepare datasets under" in refusal(chosen.model_copy(update={"data": data}))


@pytest.fixture
def own(tmp_path, vocabulary, store):
    """Makes a preparation of a kind whose published files a test may replace; the shards are those of the others."""
    return lambda kind: Path((texts if kind == "pretrain" else packs)(tmp_path / kind, vocabulary, store=store)[0])


@pytest.mark.parametrize("partial", [True, False])
def test_partial_preparation_is_rejected(own, tmp_path, partial):
    out = own("pretrain")
    manifest = unsealed((out / "manifest.json").read_bytes())
    manifest["missing"] = ["datasets/a/x@0", "datasets/a/x@9"][: 2 * partial]
    manifest["volatile"]["store"] = str(tmp_path / "on another machine")
    (out / "manifest.json").write_bytes(sealed(manifest))
    chosen = planned(out, tmp_path / "trained")
    if partial:
        words = "published without 2 of its shards, datasets/a/x@0 among them; .*again without allow_partial"
        assert re.search(words, refusal(chosen))
    else:
        check(chosen)


def test_preparation_changed_after_planning_is_rejected(tmp_path, vocabulary):
    out, _ = texts(tmp_path, vocabulary)
    chosen = planned(out, tmp_path / "trained")
    check(chosen)
    texts(tmp_path, vocabulary, holdout={"valid": 0.3, "test": 0})
    assert "prepared again since this job was planned; start over" in refusal(chosen)


def spoil(path, content):
    """Put another file in its place, which leaves that of the store as it is."""
    path.unlink()
    if content is not None:
        path.write_bytes(content)


SPOILT = [
    ("pretrain", ".bin", lambda data: None, "missing"),
    ("pretrain", ".bin", lambda data: data[:-2], "bytes instead of"),
    ("pretrain", ".bin", lambda data: data + b"\0\0", "bytes instead of"),
    ("pretrain", ".idx", lambda data: None, "missing"),
    ("pretrain", ".idx", lambda data: data[:-8], "bytes instead of"),
    ("pretrain", ".idx", lambda data: b"NOTINDEX0" + data[9:], "its header does not match"),
    ("pretrain", ".idx", lambda data: data[:17] + b"\x04" + data[18:], "its header does not match"),
    ("pretrain", ".idx", lambda data: data[:18] + bytes([data[18] ^ 1]) + data[19:], "its header does not match"),
    ("sft", ".parquet", lambda data: None, "missing"),
    ("sft", ".parquet", lambda data: data[:-9], "cannot be read as Parquet"),
    ("sft", ".parquet", lambda data: b"", "cannot be read as Parquet"),
]


@pytest.mark.parametrize(("kind", "ending", "damage", "problem"), SPOILT)
def test_incomplete_files_are_rejected_by_name(own, tmp_path, kind, ending, damage, problem):
    out = own(kind)
    chosen = planned(out, tmp_path / "trained")
    check(chosen)
    splits = out / "splits" if kind == "sft" else out
    path = min((splits / "valid").glob(f"*{ending}"))
    spoil(path, damage(path.read_bytes()))
    words = refusal(chosen)
    assert words.startswith(f"{path}: ")
    assert problem in words
    files = sum(len(source.files) for source in chosen.data.sources)
    assert f"; 1 of {files} files are wrong: see all with `tokenmill verify {out}`, then run the same" in words


def test_all_files_that_are_not_whole_are_counted(own, tmp_path):
    out = own("sft")
    chosen = planned(out, tmp_path / "trained")
    valid, train = (min((out / "splits" / split).glob("*.parquet")) for split in ("valid", "train"))
    spoil(train, valid.read_bytes())
    told = refusal(chosen)
    assert (f"{train}: " in told, " packs instead of " in told) == (True, True)
    spoil(valid, None)
    assert "; 2 of " in refusal(chosen)


def test_four_byte_ids_are_accepted(own, tmp_path):
    out = own("pretrain")
    for place in out.glob("*/*.bin"):
        lengths = read_index(place.with_suffix(".idx").read_bytes(), place.stat().st_size).lengths
        spoil(place.with_suffix(".idx"), index(lengths, np.dtype("<i4")))
        spoil(place, np.fromfile(place, "<u2").astype("<i4").tobytes())
    chosen = planned(out, tmp_path / "trained")
    assert "bytes instead of" in refusal(chosen)
    manifest = unsealed((out / "manifest.json").read_bytes())
    manifest["tokenizer"]["dtype"] = "int32"
    (out / "manifest.json").write_bytes(sealed(manifest))
    check(chosen)


@pytest.mark.parametrize("kind", ["pretrain", "sft"])
def test_files_in_an_object_store_are_looked_at_as_well(tmp_path, vocabulary, kind):
    make = texts if kind == "pretrain" else packs
    out, _ = make(tmp_path, vocabulary, out=f"memory://{tmp_path.name}/out")
    chosen = planned(out, tmp_path / "trained")
    check(chosen)
    file = chosen.data.of("train")[0].files[0] + (".idx" if kind == "pretrain" else "")
    fsspec.filesystem("memory").rm(file)
    assert refusal(chosen).startswith(f"{file}: missing")


@pytest.fixture
def elsewhere(tmp_path, vocabulary, monkeypatch):
    """Makes a preparation from a folder with a tokenizer `v` and a template `chat.jinja`, and goes to another folder."""
    begun = tmp_path / "begun"
    shutil.copytree(vocabulary, begun / "v")
    (begun / "chat.jinja").write_text(CHATML)

    def prepare(make, tokenizer, **settings):
        monkeypatch.chdir(begun)
        out, _ = make(tmp_path, tokenizer, **settings)
        monkeypatch.chdir(tmp_path)
        return out

    return prepare


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["local", "slurm", "kubernetes", "megatron-lm", "megatron-bridge"])
def test_exported_files_must_exist(elsewhere, hub, tmp_path, monkeypatch, vocabulary, launcher):
    documents = elsewhere(texts, "v")
    packed = elsewhere(packs, vocabulary, out="packed", chat_template="chat.jinja")
    for out, what in ((documents, "tokenizer"), (packed, "chat template")):
        chosen = planned(out, "trained", launcher=launcher)
        if launcher.startswith("megatron"):
            check(chosen)
            continue
        told = refusal(chosen)
        assert told.startswith(f"{out}: was prepared with a {what} that is not found here: ")
        assert {"tokenizer": "tokenizer.model: 'v': no such", "chat template": "chat_template: 'chat.jinja'"}[
            what
        ] in told
        assert "train in that folder, or prepare with an absolute path" in told
        with pytest.raises(InputError, match=f"prepared with a {what} that is not found here"):
            training.run(chosen)  # a machine that trains may lack what the one had that checked
        assert not Path(chosen.output_dir).exists()
    both = elsewhere(packs, "v", out="both", chat_template="chat.jinja")
    monkeypatch.chdir(tmp_path / "begun")
    for out in (documents, packed, both):
        check(planned(out, "trained", launcher=launcher))


CONFIG = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": None,
    "dtype": "float32", "eos_token_id": 497, "head_dim": 16, "hidden_act": "silu", "hidden_size": 64,
    "initializer_range": 0.02, "intermediate_size": 176, "max_position_embeddings": 64, "mlp_bias": False,
    "model_type": "llama", "num_attention_heads": 4, "num_hidden_layers": 4, "num_key_value_heads": 2,
    "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "tie_word_embeddings": False, "transformers_version": "5.23.0", "use_cache": True, "vocab_size": 512,
}  # fmt: skip
"""A config.json as transformers 5 writes it, of the model in SMALL."""

OF_FOUR = {name: value for name, value in CONFIG.items() if name not in {"rope_parameters", "head_dim", "mlp_bias"}} | {
    "rope_theta": 10000.0, "rope_scaling": None, "torch_dtype": "float32", "transformers_version": "4.40.0",
}  # fmt: skip
"""The same as transformers 4 wrote it."""


@pytest.fixture
def model(tmp_path, vocabulary):
    """Makes the folder of a model with a config.json and the tokenizer of the data."""

    def made(config=CONFIG, tokenizer=vocabulary):
        folder = tmp_path / "model"
        shutil.copytree(tokenizer, folder)
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    return made


@pytest.mark.parametrize("config", [CONFIG, OF_FOUR, {**CONFIG, "vocab_size": 500}], ids=["v5", "v4", "unpadded"])
@pytest.mark.parametrize("kind", ["pretrain", "sft"])
def test_a_model_with_the_datas_tokenizer_and_the_same_shape_may_begin(job, model, kind, config):
    check(job(kind, start_from=str(model(config))))


OTHER_MODELS = [
    ({"hidden_size": 128}, "hidden_size is 128, but model.hidden is 64"),
    ({"num_hidden_layers": 2}, "num_hidden_layers is 2, but model.layers is 4"),
    ({"num_attention_heads": 8}, "num_attention_heads is 8, but model.heads is 4"),
    ({"num_key_value_heads": 4}, "num_key_value_heads is 4, but model.key_value_heads is 2"),
    ({"num_key_value_heads": None}, "num_key_value_heads is 4, but model.key_value_heads is 2"),
    ({"head_dim": 32}, "head_dim is 32, but model.hidden is 16"),
    ({"intermediate_size": 64}, "intermediate_size is 64, but model.feed_forward is 176"),
    ({"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, "rope_theta is 500000.0, but model.rope_base"),
    ({"rope_parameters": {"rope_theta": 1e4, "rope_type": "llama3", "factor": 8.0}}, "rope_type is 'llama3', but only 'default'"),
    ({"rope_parameters": None, "rope_theta": 5e5}, "rope_theta is 500000.0, but model.rope_base is 10000.0"),
    ({"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type is 'linear'"),
    ({"rms_norm_eps": 1e-6}, "rms_norm_eps is 1e-06, but model.norm_epsilon is 1e-05"),
    ({"tie_word_embeddings": True}, "tie_word_embeddings is True, but model.tied_embeddings is False"),
    ({"model_type": "mistral"}, "model_type is 'mistral', but only 'llama' is supported"),
    ({"attention_bias": True}, "attention_bias is True, but only False is supported"),
    ({"mlp_bias": True}, "mlp_bias is True, but only False is supported"),
    ({"hidden_act": "gelu"}, "hidden_act is 'gelu', but only 'silu' is supported"),
    ({"hidden_size": 128, "num_hidden_layers": 2}, "hidden_size is 128, but model.hidden is 64; num_hidden_layers is 2"),
    ({"vocab_size": 499}, "vocab_size is 499, but the data has ids up to 499; use a model"),
    ({"vocab_size": 640}, "set model.vocabulary_multiple=640"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "words"), OTHER_MODELS, ids=[words[:60] for _, words in OTHER_MODELS])
def test_model_with_a_different_shape_is_rejected_by_field(job, model, change, words):
    told = refusal(job(start_from=str(model({**CONFIG, **change}))))
    assert words in told
    assert told.endswith("; set model to match these weights") or "vocab_size" in change


def test_an_embedding_of_more_rows_than_are_trained_may_be_asked_for(job, model):
    check(job(start_from=str(model({**CONFIG, "vocab_size": 640})), model={"vocabulary_multiple": 640}))


NO_START = {
    "another tokenizer": (lambda folder: byte_level_bpe(folder, size=499), "prepare the data with the model's tokenizer"),
    "no tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), "put the model's tokenizer.json next to its config.json"),
    "no config.json": (lambda folder: (folder / "config.json").unlink(), "doesn't contain config.json"),
    "no object": (lambda folder: (folder / "config.json").write_bytes(b"["), "is not a JSON object"),
}  # fmt: skip


@pytest.mark.parametrize("lacks", NO_START)
def test_unusable_start_folder_is_rejected(job, model, lacks):
    folder, (spoilt, words) = model(), NO_START[lacks]
    spoilt(folder)
    told = refusal(job(start_from=str(folder)))
    assert told.startswith("start_from")
    assert words in told
    assert ("its tokenizer is sha256:" in told) == (lacks == "another tokenizer")


def test_missing_start_folder_is_rejected(job, tmp_path):
    with pytest.raises(InputError, match="start_from: file or folder not found"):
        start_place(str(tmp_path / "nowhere"))


def test_what_people_paste_as_a_start_is_an_id_or_a_folder_for_every_trainer(hub):
    commit = hub.model("org/na.me", {"config.json": "{}", "model.safetensors": "x"}).commit({"config.json": "[]"}, "v2")
    assert {start_place(f"{form}org/na.me/") for form in ("", "hf://", "https://huggingface.co/")} == {"org/na.me"}
    folder = Path(start_place("org/na.me@v2"))
    assert (folder.name, (folder / "config.json").read_text()) == (commit, "[]")


def finished(chosen, folder):
    """What a training leaves that these checks look at."""
    (folder / "model").mkdir(parents=True)
    (folder / "job.json").write_text(chosen.model_dump_json())
    (folder / "model/config.json").write_text(json.dumps(CONFIG))
    return folder


def test_earlier_training_run_of_the_same_model_may_begin(job, tmp_path):
    other = job(model={"layers": 2, "rope_base": 5e5})
    told = refusal(job(start_from=str(finished(other, tmp_path / "other"))))
    assert "not the model of the settings: model.layers is 2, not 4; model.rope_base is 500000.0, not 10000.0" in told
    data = job().data.model_copy(update={"fingerprint": "sha256:0"})
    foreign = finished(job().model_copy(update={"data": data}), tmp_path / "foreign")
    assert "prepare the data with the model's tokenizer" in refusal(job(start_from=str(foreign)))
    earlier = finished(job("pretrain", steps=99), tmp_path / "earlier")
    check(job("sft", start_from=str(earlier)))
    shutil.rmtree(earlier / "model")
    assert refusal(job(start_from=str(earlier))).endswith("hasn't written its model yet; let it finish first")


def test_places_here_are_made_absolute(prepared, tmp_path, monkeypatch):
    (tmp_path / "earlier").mkdir()
    monkeypatch.chdir(tmp_path)
    chosen = plan_training(prepared["sft"], TrainSettings(start_from="earlier"), "trained")
    assert chosen.settings.start_from == str(tmp_path / "earlier")
    assert chosen.output_dir == str(tmp_path / "trained")
    hub = plan_training(prepared["sft"], TrainSettings(start_from="org/name"), "s3://bucket/trained")
    assert hub.settings.start_from == "org/name"
    assert hub.output_dir == "s3://bucket/trained"


@pytest.mark.parametrize("kind", ["sft", "pretrain"])
def test_preparation_folders_are_not_written_into(prepared, kind):
    told = refusal(planned(prepared["sft"], prepared[kind]))
    assert told.endswith("manifest.json here belongs to a preparation; choose a different --output-dir")


def reviewed(chosen):
    """What a dry run leaves of a job."""
    Path(chosen.output_dir).mkdir()
    (Path(chosen.output_dir) / "job.json").write_text(chosen.model_dump_json())


def begun(chosen):
    reviewed(chosen)
    (Path(chosen.output_dir) / "metrics.jsonl").touch()


ELSEWHERE = {
    "launcher": "slurm", "nodes": 2, "processes": 2, "micro_batch": 1, "retries": 0, "checkpoint_every": 2,
    "keep_checkpoints": 7, "validate_every": 2, "validation_batches": 3, "check_reads": False, "max_epochs": 1000.0,
}  # fmt: skip


def test_same_job_resumes_anywhere(job, tmp_path):
    begun(job(micro_batch=1))
    (tmp_path / "skip.jsonl").write_text('{"step": 2}\n')
    elsewhere = {**ELSEWHERE, "skip_list": str(tmp_path / "skip.jsonl")}
    assert set(elsewhere) - {"micro_batch"} == RUNTIME_SETTINGS
    for chosen in (job(micro_batch=1), job(**elsewhere)):
        assert check(chosen)[-1] == f"{chosen.output_dir}: this job resumes from its last checkpoint"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"steps": 4}, "steps was 3, now 4"),
        ({"seed": 1}, "seed was 42, now 1"),
        ({"model": {"layers": 2}}, "model.layers was 4, now 2"),
        ({"optimizer": {"learning_rate": 0.1}}, "optimizer.learning_rate was 0.003, now 0.1"),
        ({"precision": "bfloat16"}, "precision was None, now 'bfloat16'"),
        ({"device": "cpu"}, "device was None, now 'cpu'"),
        ({"global_batch": 8}, "global_batch was 4, now 8"),
        ({"sequence_length": 32}, "sequence_length was 64, now 32"),
    ],
    ids=str,
)
def test_different_job_does_not_resume(job, change, words):
    begun(job())
    told = refusal(job(**change))
    assert (
        f"a different training run was started here: {words}; choose a different --output-dir, or delete this one"
        in told
    )


def test_other_data_does_not_go_on_in_its_place_but_the_same_data_elsewhere_does(job, tmp_path, vocabulary, store):
    chosen = job()
    begun(chosen)
    same, _ = texts(tmp_path / "same", vocabulary, store=store)
    assert "resumes" in check(planned(same, chosen.output_dir))[-1]
    other, _ = texts(tmp_path / "same", vocabulary, weights={"a": 1.0}, store=store)
    assert "data.content was 'xxh3_128:" in refusal(planned(other, chosen.output_dir))


@pytest.mark.parametrize("content", ["{", "[]", '{"settings": {"step": 3}}'])
def test_foreign_files_are_not_overwritten(job, content):
    chosen = job()
    reviewed(chosen)
    (Path(chosen.output_dir) / "job.json").write_text(content)
    assert "isn't a job of this version: name a different folder, or delete it" in refusal(chosen)


REVIEWED = {
    "local": set(),
    "slurm": {"node.sh", "job.sbatch"},
    "kubernetes": {"job.yaml", "job.sh"},
    "megatron-lm": {"train.sh"},
    "megatron-bridge": {"train.sh", "train.py"},
}


@pytest.mark.parametrize("launcher", REVIEWED)
def test_preflight_dry_run_writes_files_only(prepared, tmp_path, monkeypatch, capsys, launcher):
    monkeypatch.setenv("PATH", str(tmp_path / "without srun and kubectl"))
    monkeypatch.setenv("TOKENMILL_IMAGE", "image")
    monkeypatch.setenv("TOKENMILL_CLAIM", "claim:/")
    out, before = tmp_path / "out", set(psutil.Process().children())
    for steps in (3, 4):  # what was only reviewed may be changed
        arguments = ["train", prepared["pretrain"], "--output-dir", str(out), "--dry-run", f"launcher={launcher}"]
        assert run([*arguments, "processes=1", "sequence_length=64", f"steps={steps}"]) == 0
        record = json.loads(capsys.readouterr().out)["train"]
        assert (record["path"], record["type"]) == (str(out), "plan")
        assert set(record["files"]) == {path.name for path in out.iterdir()} == {"job.json", *REVIEWED[launcher]}
        assert json.loads((out / "job.json").read_bytes())["settings"]["steps"] == steps
    assert set(psutil.Process().children()) <= before


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine on which nvidia-smi says what a test wants it to."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def says(lines, code=0):
        tool = tmp_path / "nvidia-smi"
        tool.write_text(f'#!/bin/sh\n[ "$1" = -L ] || exit 9\nprintf "{lines}"\nexit {code}\n')
        tool.chmod(0o755)

    return says


EIGHT = "".join(f"GPU {number}: NVIDIA H100 80GB HBM3 (UUID: GPU-{number})\\n" for number in range(8))
SLICED = (
    "GPU 0: NVIDIA H100 (UUID: GPU-0)\\n  MIG 1g.10gb Device 0: (UUID: MIG-0)\\nGPU 1: NVIDIA H100 (UUID: GPU-1)\\n"
)


@pytest.mark.parametrize(
    ("lines", "visible", "count"),
    [
        (EIGHT, None, 8),
        (EIGHT, "0,1", 2),
        (EIGHT, "3", 1),
        (EIGHT, "5, 6,7", 3),
        (EIGHT, "0,9,1", 1),
        (EIGHT, "GPU-3,GPU-4", 2),
        (EIGHT, "-1", 1),
        (EIGHT, "", 1),
        (SLICED, None, 2),
        ("", None, 1),
    ],
)
def test_there_is_a_process_for_each_gpu_that_may_be_used_and_one_without(machine, monkeypatch, lines, visible, count):
    machine(lines)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert process_count(TrainSettings()) == count
    assert process_count(TrainSettings(device="cuda")) == count
    assert process_count(TrainSettings(device="cpu")) == 1
    assert process_count(TrainSettings(processes=3)) == 3
    assert process_count(TrainSettings(processes=3, device="cpu")) == 3


def test_counted_gpus_are_mentioned(machine, job):
    assert process_count(TrainSettings()) == 1, "without the tool"
    machine("NVIDIA-SMI has failed because it could not communicate with the NVIDIA driver.", 9)
    assert process_count(TrainSettings()) == 1
    machine(EIGHT)
    told = refusal(job(processes=None, parallel={"pipeline": 3}, model={"layers": 6}))
    assert "1 machine(s) of 8 process(es) (one per GPU found here, or one) do not divide" in told


@pytest.mark.slow
def test_nothing_that_computes_is_imported():
    modules = ", ".join(f"tokenmill.tasks.train.{name}" for name in ("preflight", "benchmark", "results"))
    code = f"import sys, {modules}; print({{'torch', 'megatron'}} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


def test_a_machine_that_is_to_train_has_what_trains(job, monkeypatch):
    monkeypatch.setattr("tokenmill.tasks.train.order.find_spec", lambda name: None if name == "megatron" else name)
    assert "megatron must be installed: pip install torch==" in refusal(job())
    check(job(launcher="megatron-lm", processes=1))


@pytest.mark.parametrize(("kind", "remedy"), [("pretrain", "block_hashes=true"), ("sft", "tokenmill verify")])
def test_checks_of_reads_need_block_hashes_and_documents(job, kind, remedy):
    with pytest.raises(InputError, match=remedy):
        check(job(kind, check_reads=True))
