"""Perplexities of held-out documents, held against the model's own loss of one document at a time."""

import json
import math

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from megatron.core.datasets.indexed_dataset import IndexedDataset
from tokenmill.tasks.errors import InputError, RunError
from tokenmill.tasks.score.weights import find_model
from tokenmill.tasks.train import held_out as held_out_module
from tokenmill.tasks.train.evaluate import evaluate
from tokenmill.tasks.train.held_out import held_out
from tokenmill.tasks.train.prepared import prepared_data
from tokenmill.tasks.train.results import artifact_record, markdown, publish_results, read_results
from tokenmill.tasks.train.settings import EvaluateSettings
from transformers import LlamaForCausalLM

from tests.preparing_sft import chat_vocabulary
from tests.train.small_data import TEXTS, packs, texts
from tests.train.small_training import saved_model

torch.set_num_threads(1)

QUIET = EvaluateSettings(documents=0)
VOCABULARY = 700


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("evaluated")


@pytest.fixture(scope="module")
def tokenizer(folder):
    return chat_vocabulary(folder / "tokenizer", VOCABULARY)


@pytest.fixture(scope="module")
def pretrain(folder, tokenizer):
    return prepared_data(texts(folder / "pre", tokenizer, holdout={"valid": 0.2, "test": 0.1}, prefix_size=1)[0])


@pytest.fixture(scope="module")
def sft_made(folder, tokenizer):
    out, manifest = packs(folder / "sft", tokenizer, holdout={"valid": 0.3, "test": 0.1}, pad_seq_to_mult=8)
    return prepared_data(out), manifest


@pytest.fixture(scope="module")
def sft(sft_made):
    return sft_made[0]


@pytest.fixture(scope="module")
def model(folder):
    return saved_model(folder / "model", VOCABULARY)


def documents_by_megatron(prefix):
    read = IndexedDataset(prefix)
    return [(np.array(read[number]), np.array(read[number])) for number in range(len(read))]


def documents_by_row(path):
    """Each sequence of each pack with its labels, as a trainer that shifts would take them: token by token."""
    found = []
    for pack in pq.read_table(path).to_pylist():
        ends = [*pack["seq_start_id"][1:], len(pack["input_ids"])]
        for start, end in zip(pack["seq_start_id"], ends, strict=True):
            ids, mask = pack["input_ids"][start:end], pack["loss_mask"][start:end]
            labels = [-100] + [ids[place + 1] if mask[place] else -100 for place in range(len(ids) - 1)]
            found.append((np.array(ids), np.array(labels)))
    return found


READ = {"pretrain": documents_by_megatron, "sft": documents_by_row}


def truth(folder, data, split, limit=None):
    """Per dataset: the sum of the model's own losses, and of how many tokens."""
    model = LlamaForCausalLM.from_pretrained(folder).eval()
    found = {}
    for source in data.of(split):
        nll = tokens = documents = 0
        for pair in (pair for file in source.files for pair in READ[data.kind](file)):
            documents += 1
            ids, labels = (torch.from_numpy(each.astype(np.int64))[None, :limit] for each in pair)
            count = int((labels[0, 1:] != -100).sum())
            if count:
                with torch.inference_mode():
                    nll += float(model(ids, labels=labels).loss) * count
                tokens += count
        before = found.get(source.dataset, (0, 0, 0))
        found[source.dataset] = tuple(a + b for a, b in zip(before, (nll, tokens, documents), strict=True))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["pretrain", "sft"])
@pytest.mark.parametrize("split", ["valid", "test"])
def test_perplexity_matches_the_models_loss(request, model, kind, split):
    data = request.getfixturevalue(kind)
    found, wanted = evaluate(model, data, EvaluateSettings(documents=0, split=split)), truth(model, data, split)
    assert len(wanted) > 1
    assert {each.dataset: (each.tokens, each.documents) for each in found.sources} == {
        name: (tokens, documents) for name, (_, tokens, documents) in wanted.items()
    }
    for source in found.sources:
        nll, tokens, _ = wanted[source.dataset]
        assert source.nll == pytest.approx(nll, rel=1e-5)
        assert source.perplexity == pytest.approx(math.exp(nll / tokens), rel=1e-5)
    nll, tokens, documents = map(sum, zip(*wanted.values(), strict=True))
    assert found.overall.perplexity == pytest.approx(math.exp(nll / tokens), rel=1e-5)
    assert (found.overall.tokens, found.overall.documents) == (tokens, documents)
    assert found.overall.truncated == found.overall.cut_tokens == 0


def test_padding_is_excluded(sft_made):
    data, manifest = sft_made
    read = sum(len(documents.ids) for _, documents in held_out(data, "valid"))
    assert read == manifest["totals"]["splits"]["valid"]["tokens"]
    stored = sum(len(ids) for source in data.of("valid") for ids, _ in documents_by_row(source.files[0]))
    assert stored > read


def test_every_document_with_its_last_token_is_read(pretrain):
    read = {}
    for dataset, documents in held_out(pretrain, "valid"):
        read.setdefault(dataset, []).extend(np.split(documents.ids, documents.offsets[1:-1]))
    for source in pretrain.of("valid"):
        wanted = [ids.tolist() for file in source.files for ids, _ in documents_by_megatron(file)]
        assert [ids.tolist() for ids in read[source.dataset]] == wanted


@pytest.mark.parametrize("kind", ["pretrain", "sft"])
def test_windows_change_nothing(request, kind, monkeypatch):
    data = request.getfixturevalue(kind)

    def joined():
        batches = [documents for _, documents in held_out(data, "valid")]
        lengths = np.concatenate([documents.lengths for documents in batches])
        return (
            len(batches),
            lengths.tolist(),
            *(np.concatenate([getattr(documents, name) for documents in batches]).tolist() for name in ("ids", "loss")),
        )

    whole = joined()
    monkeypatch.setattr(held_out_module, "WINDOW", 64)
    monkeypatch.setattr(held_out_module, "PACKS_AT_ONCE", 1)
    cut = joined()
    assert cut[0] > whole[0]
    assert cut[1:] == whole[1:]


@pytest.mark.parametrize("kind", ["pretrain", "sft"])
@pytest.mark.parametrize("window", [50, 1 << 20])
def test_whole_documents_are_read_up_to_a_limit(request, kind, window, monkeypatch):
    monkeypatch.setattr(held_out_module, "WINDOW", window)
    monkeypatch.setattr(held_out_module, "PACKS_AT_ONCE", 1)
    data = request.getfixturevalue(kind)
    lengths = {}
    for dataset, documents in held_out(data, "valid"):
        lengths.setdefault(dataset, []).extend(documents.lengths.tolist())
    for limit in (1, 100, 257, sum(lengths["a"])):
        read = {}
        for dataset, documents in held_out(data, "valid", limit):
            read.setdefault(dataset, []).extend(documents.lengths.tolist())
        for dataset, whole in lengths.items():
            fitting = sum(1 for total in np.cumsum(whole) if total <= limit)
            assert read[dataset] == whole[: max(1, fitting)]


@pytest.mark.slow
def test_longer_documents_than_the_model_reads_are_cut_and_counted(folder, pretrain):
    short = saved_model(folder / "short", VOCABULARY, longest=27)
    found = evaluate(short, pretrain, QUIET)
    wanted = truth(short, pretrain, "valid", limit=27)
    files = [file for source in pretrain.of("valid") for file in source.files]
    lengths = [len(ids) for file in files for ids, _ in documents_by_megatron(file)]
    assert found.overall.truncated == sum(length > 27 for length in lengths) in range(4, len(lengths))
    assert found.overall.cut_tokens == sum(max(0, length - 27) for length in lengths)
    assert found.overall.nll == pytest.approx(sum(nll for nll, _, _ in wanted.values()), rel=1e-5)
    assert "longer than the 27 tokens" in markdown(found)


def test_nan_names_its_document(folder, pretrain, monkeypatch):
    source = pretrain.of("valid")[0]
    documents = [ids.tolist() for ids, _ in documents_by_megatron(source.files[0])]
    number, rare = max(
        (number, token) for number, document in enumerate(documents) for token in document[:-1]
        if sum(token in each for each in documents) == 1
    )  # fmt: skip

    def broken(model):
        with torch.no_grad():
            model.model.embed_tokens.weight[rare] = torch.nan

    monkeypatch.setattr(held_out_module, "WINDOW", 50)
    with pytest.raises(RunError, match=rf"a: document {number + 1} of split valid: .* is nan"):
        evaluate(saved_model(folder / "broken", VOCABULARY, change=broken), pretrain, QUIET)


@pytest.mark.parametrize(
    ("rows", "change", "words"),
    [
        (None, lambda data: {"fingerprint": "sha256:0"}, r"was prepared with the tokenizer .* restore its files"),
        (300, lambda data: {}, r"token \d+ is outside the model's vocabulary of 300"),
        (None, lambda data: {"sources": data.of("train")}, r"split valid doesn't have documents; prepare it with holdout\.valid"),
    ],
    ids=["another vocabulary", "a model that is too small", "nothing held out"],
)  # fmt: skip
def test_unevaluable_folders_are_rejected(folder, model, pretrain, rows, change, words):
    place = model if rows is None else saved_model(folder / "narrow", rows)
    with pytest.raises(InputError, match=words):
        evaluate(place, pretrain.model_copy(update=change(pretrain)), QUIET)


@pytest.mark.parametrize(
    ("kind", "file", "words"),
    [
        ("pretrain", "gone", r"gone: the pair is incomplete.*tokenmill verify"),
        ("sft", "gone.parquet", r"gone.parquet: missing.*tokenmill verify"),
        ("pretrain", "damaged", r"damaged\.bin: place of sequence 2"),
    ],
)
def test_a_missing_or_damaged_file_is_an_error(request, folder, kind, file, words):
    data = request.getfixturevalue(kind)
    if file == "damaged":
        for ending in (".bin", ".idx"):
            content = bytearray((folder / f"{data.of('valid')[0].files[0]}{ending}").read_bytes())
            content[40] ^= 1
            (folder / file).with_suffix(ending).write_bytes(content)
    source = data.of("valid")[0].model_copy(update={"files": [str(folder / file)]})
    with pytest.raises(RunError, match=words):
        list(held_out(data.model_copy(update={"sources": [source]}), "valid"))


@pytest.fixture(scope="module")
def results(model, sft):
    return evaluate(model, sft, EvaluateSettings(documents=1, new_tokens=6))


def test_results_are_read_as_they_were_written(results, tmp_path):
    path = publish_results(results, str(tmp_path), {"seconds": 1.5})
    assert path == str(tmp_path / "results.json")
    assert read_results(path) == read_results(str(tmp_path)) == results
    assert (tmp_path / "results.md").read_text() == markdown(results)
    assert json.loads((tmp_path / "results.json").read_text())["volatile"]["seconds"] == 1.5


@pytest.mark.slow
def test_of_a_conversation_all_before_the_first_answer_is_the_prompt(results, pretrain, model):
    for generation in results.generations:
        assert generation.prompt.endswith("<|im_start|>assistant\n")
        assert generation.prompt.count("<|im_start|>") == 2
    plain = evaluate(model, pretrain, EvaluateSettings(documents=1, prompt_tokens=3, new_tokens=2))
    for generation in plain.generations:
        assert any(text.startswith(generation.prompt) for text in TEXTS)


@pytest.mark.slow
def test_given_prompts_take_the_place_of_documents(model, pretrain):
    found = evaluate(model, pretrain, EvaluateSettings(prompts=["the shard", "a"], new_tokens=2)).generations
    assert [(each.dataset, each.prompt, each.matched) for each in found] == [
        (None, "the shard", None),
        (None, "a", None),
    ]


def test_changed_results_are_rejected(results, tmp_path):
    publish_results(results, str(tmp_path), {})
    file = tmp_path / "results.json"
    file.write_bytes(file.read_bytes().replace(b'"truncated": 0', b'"truncated": 1', 1))
    with pytest.raises(InputError, match="evaluate again"):
        read_results(str(tmp_path))
    with pytest.raises(InputError, match="no results here"):
        read_results(str(tmp_path / "nowhere"))


def test_artifact_record_is_flat_and_names_inputs(results, model, sft):
    record = artifact_record(results, "/out")["evaluate"]
    assert record["path"] == "/out/results.json"
    assert record["type"] == "results"
    assert record["perplexity"] == results.overall.perplexity
    made_from = {source["type"]: source for source in record["made_from"]}
    assert (made_from["data"]["path"], made_from["data"]["digest"]) == (sft.path, sft.made_from)
    assert (made_from["model"]["path"], made_from["model"]["digest"]) == (str(model), find_model(str(model)).digest())
    assert record["sources"] == {each.dataset: each.perplexity for each in results.sources}
    json.dumps(record)


def test_the_page_shows_every_source_and_every_continuation(results):
    page = markdown(results)
    assert f"{results.settings.max_tokens:,} tokens of each dataset" in page
    for source in results.sources:
        assert f"| {source.dataset} | {source.documents:,} | {source.tokens:,} |" in page
    assert len(results.generations) == len(results.sources)
    for generation in results.generations:
        assert json.dumps(generation.text, ensure_ascii=False) in page
