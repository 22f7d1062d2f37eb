"""Slices of rows become scores: the right ones, one for each row that can have one, and a reason for every other row."""

import json
import math

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from tokenmill.tasks.errors import InputError, RunError
from tokenmill.tasks.harmony.message import HarmonyMessage
from tokenmill.tasks.harmony.render import render
from tokenmill.tasks.harmony.vocabulary import encoding
from tokenmill.tasks.score import engines
from tokenmill.tasks.score.conversations import chat_of
from tokenmill.tasks.score.embed import HashEmbedder
from tokenmill.tasks.score.engines import device_for_worker
from tokenmill.tasks.score.kind import device_of_plan
from tokenmill.tasks.score.models import CausalScorer
from tokenmill.tasks.score.nll import summed
from tokenmill.tasks.score.tables import NLL, SCHEMA
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, LlamaModel

from tests import preparing_sft
from tests.preparing import write_lines
from tests.preparing_rl import write_rows
from tests.preparing_scores import (
    chat,
    harmony_model,
    normalization,
    plan,
    prepare,
    rows_of,
    table_of,
    vectors_of,
)
from tests.score.test_embed import tokenizer
from tests.score.tiny_models import SHAPE, completions, corpus, llama


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A normalization, and a random model."""
    folder = tmp_path_factory.mktemp("scored")
    normalization(folder, count=14)
    harmony_model(folder / "random")
    return folder


@pytest.fixture(scope="module")
def scored(folder):
    """The NLL of the normalization under the random model."""
    prepare("nll", str(folder / "out"), folder / "nll", model=str(folder / "random"))
    return table_of(folder / "nll/nll")


def labels_of(ids):
    """What a model writes after `<|start|>assistant`, to the end of the text, found in the ids alone."""
    prompt = encoding().encode("<|start|>assistant", allowed_special="all")
    start = next(place for place in range(len(ids)) if ids[place : place + 2] == prompt) + 2
    return [-100] * start + ids[start:]


@pytest.mark.slow
def test_row_nll_is_the_models_loss_on_assistant_text(folder, scored):
    model = AutoModelForCausalLM.from_pretrained(folder / "random", dtype=torch.float32)
    texts = {row["row_id"]: row["text"] for row in rows_of(folder / "out").to_pylist()}
    for row in scored.to_pylist():
        ids = encoding().encode(texts[row["row_id"]], allowed_special="all")
        labels = labels_of(ids)
        with torch.inference_mode():
            loss = model(torch.tensor([ids]), labels=torch.tensor([labels])).loss.item()
        assert row["nll_mean"] == pytest.approx(loss, abs=1e-5)
        assert row["ppl"] == pytest.approx(math.exp(loss), rel=1e-4)
        assert row["completion_token_count"] == sum(label >= 0 for label in labels)
        assert row["total_token_count"] == len(ids)
        assert not row["truncated"]
        assert row["nll_tool_call"] is None
        assert min(row["analysis_token_count"], row["final_token_count"]) > 2


@pytest.mark.slow
def test_scores_record_their_model(folder, scored):
    assert scored.schema.equals(NLL)
    (made,) = {tuple(row.values()) for row in scored.select(["model", "engine", "dtype", "loss_mode"]).to_pylist()}
    assert made == ("random", "transformers", "float32", "assistant_all")
    assert str(folder) not in str(scored.to_pylist())


@pytest.mark.parametrize(
    "loss",
    [{"loss_end_of_turn": False}, {"loss_on": "assistant_bodies"}, {"loss_on": "final_only", "loss_tool_calls": False}],
)
def test_other_tokens_are_scored_where_that_is_asked_for(folder, scored, tmp_path, loss):
    prepare("nll", str(folder / "out"), tmp_path / "out", model=str(folder / "random"), **loss, sample=5)
    found = {row["row_id"]: row for row in table_of(tmp_path / "out/nll").to_pylist()}
    for row in scored.to_pylist():
        if row["row_id"] not in found:
            continue
        other = found[row["row_id"]]
        difference = other["completion_token_count"] - row["completion_token_count"]
        if "loss_end_of_turn" in loss:
            assert difference == -2
        elif loss["loss_on"] == "assistant_bodies":
            assert difference < -2
        else:
            assert other["completion_token_count"] == other["final_token_count"] == row["final_token_count"]
    assert len(found) == 10


@pytest.mark.slow
def test_rows_that_are_too_long_are_cut_flagged_and_counted(folder, scored, tmp_path):
    lengths = dict(zip(scored["row_id"].to_pylist(), scored["total_token_count"].to_pylist(), strict=True))
    middle = int(np.median(list(lengths.values())))
    _, manifest = prepare(
        "nll", str(folder / "out"), tmp_path / "out", model=str(folder / "random"), max_length=middle - 3
    )
    whole = {row["row_id"]: row for row in scored.to_pylist()}
    rows = table_of(tmp_path / "out/nll").to_pylist()
    assert len(rows) == 28
    for row in rows:
        assert row["truncated"] == (lengths[row["row_id"]] > middle - 3)
        counted = row["completion_token_count"] + row["cut_token_count"]
        assert counted == whole[row["row_id"]]["completion_token_count"]
        assert (
            (row["nll_mean"] is None)
            == (row["completion_token_count"] == 0)
            == (row["percentile_within_split"] is None)
        )
    assert manifest["totals"]["truncated"] == sum(row["truncated"] for row in rows) > 0
    tiny = prepare("nll", str(folder / "out"), tmp_path / "tiny", model=str(folder / "random"), max_length=2)[1]
    assert tiny["totals"]["documents"] == 28
    assert table_of(tmp_path / "tiny/nll")["nll_mean"].null_count == 28


def text_of(*messages):
    return render([HarmonyMessage(*message) for message in messages])


SILENT = text_of(("user", "hello?"))
ANSWERED = render(
    [HarmonyMessage("user", "hi"), HarmonyMessage("assistant", "ho", channel="final", terminator="return")]
)
MESSY = [
    {"row_id": "a", "text": ANSWERED, "dataset": "own", "split": "mine"},
    {"id": 7, "text": ANSWERED},
    {"text": ANSWERED},
    {"row_id": None, "id": [1], "text": ANSWERED},
    {"row_id": "b", "text": SILENT},
    {"row_id": "c", "text": "no tags"},
    {"row_id": "d"},
    {"row_id": "e", "text": 5},
    b"{broken",
    b"",
    {"row_id": "f", "text": ANSWERED, "used_in": "other"},
]  # fmt: skip
REASONS = {
    "no_id": 2, "no_completion": 1, "text_outside_message": 1, "no_text": 2, "malformed_json": 1, "blank_line": 1,
    "filtered": 1,
}  # fmt: skip


def messy(folder, rows):
    path = write_rows(
        folder / "messy.jsonl", [{"used_in": "it", **row} if isinstance(row, dict) else row for row in rows]
    )
    blend = {"datasets": [{"name": "messy", "path": str(path), "used_in": "it"}]}
    (folder / "messy.json").write_text(json.dumps(blend))
    return str(folder / "messy.json")


def test_every_row_has_a_score_or_a_reason(folder, tmp_path):
    blend = messy(tmp_path, MESSY)
    _, manifest = prepare("nll", blend, tmp_path / "out", model=str(folder / "random"), max_bad_row_fraction=1.0)
    assert manifest["totals"]["dropped"] == REASONS
    assert manifest["totals"]["rows"] == len(MESSY) == manifest["totals"]["documents"] + sum(REASONS.values())
    found = table_of(tmp_path / "out/nll").select(["row_id", "id", "dataset", "split"]).to_pylist()
    assert [tuple(row.values()) for row in found] == [("a", None, "own", "mine"), ("7", "7", "messy", None)]
    lines = [json.loads(line) for line in (tmp_path / "out/quarantine/messy.jsonl").read_text().splitlines()]
    assert [line["line"] for line in lines] == [3, 4, 6, 7, 8, 9]


def test_every_text_has_a_vector_or_a_reason(tmp_path):
    rows = [
        {"row_id": "a", "embed_text": "one two", "text": "three"},
        {"row_id": "b", "text": "three four"},
        {"row_id": "c", "text": "  \n"},
        {"row_id": "d", "embed_text": None},
        {"embed_text": "nameless"},
    ]
    _, manifest = prepare("embed", messy(tmp_path, rows), tmp_path / "out", dimensions=16, max_bad_row_fraction=1.0)
    assert manifest["totals"]["dropped"] == {"empty_text": 1, "no_text": 1, "no_id": 1}
    table = table_of(tmp_path / "out/embeddings")
    assert table["row_id"].to_pylist() == ["a", "b"]
    expected = HashEmbedder(16).encode(["one two", "three four"])
    np.testing.assert_allclose(vectors_of(table), expected, atol=1e-3)
    assert table["token_count"].to_pylist() == [2, 2]
    assert table["truncated"].to_pylist() == [False, False]


def embedding_model(folder):
    torch.manual_seed(1)
    LlamaModel(llama(64).config).eval().save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.mark.slow
def test_a_model_embeds_candidates_as_it_embeds_texts(folder, tmp_path):
    model = embedding_model(tmp_path / "embedder")
    rows = [{"row_id": str(number), "text": " ".join(f"w{each}" for each in range(number + 1))} for number in range(80)]
    chosen = {"engine": "transformers", "model": model, "pooling": "last", "dimensions": 8, "max_tokens": 40}
    planned, _ = prepare("embed", messy(tmp_path, rows), tmp_path / "out", **chosen)
    assert len(planned.plan.shards) > 5
    table = table_of(tmp_path / "out/embeddings").sort_by("token_count")
    assert table["token_count"].to_pylist() == list(range(2, 82))
    assert table["truncated"].to_pylist() == [count > 40 for count in range(2, 82)]
    assert vectors_of(table).shape == (80, 8)
    np.testing.assert_allclose(np.linalg.norm(vectors_of(table), axis=1), 1, atol=2e-3)
    np.testing.assert_array_equal(vectors_of(table)[-1], vectors_of(table)[40])


# Other models, through their own templates.


@pytest.fixture(scope="module")
def other_model(tmp_path_factory):
    """A model with ChatML and a small vocabulary that knows nothing."""
    folder = tmp_path_factory.mktemp("models") / "chatml"
    preparing_sft.chat_vocabulary(folder)
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**{**SHAPE, "vocab_size": 512}, max_position_embeddings=4096))
    torch.nn.init.zeros_(model.lm_head.weight)
    model.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("form", ["harmony", "chats"])
def test_model_with_a_different_template_scores_its_training_text(folder, other_model, tmp_path, form):
    chats = [chat(number) for number in range(20)]
    for row in chats:
        row["messages"] += [{"role": "user", "content": "Again?"}, {"role": "assistant", "content": "No."}]
    if form == "harmony":
        rows = rows_of(folder / "out").to_pylist()
        given = [{"row_id": row["row_id"], "text": row["text"]} for row in rows]
        trained = [chat(number, split=split) for split in ("easy", "hard") for number in range(14)]
    else:
        given = [{"row_id": str(number), **row} for number, row in enumerate(chats)]
        trained = chats
    chosen = {"model": other_model, "chat_template": preparing_sft.CHATML, "shard_size": "1MB"}
    _, manifest = prepare("nll", messy(tmp_path, given), tmp_path / "out", **chosen)
    rows = table_of(tmp_path / "out/nll")
    np.testing.assert_allclose(rows["nll_mean"].to_numpy(), math.log(512), atol=1e-5)
    assert manifest["totals"]["documents"] == len(given)
    assert rows["final_token_count"].to_pylist() == [0] * len(given)
    prepare("nll", messy(tmp_path, given[7:8]), tmp_path / "one", model=other_model, chat_template=preparing_sft.CHATML)
    (one,) = table_of(tmp_path / "one/nll").drop_columns("percentile_within_split").to_pylist()
    assert one in rows.drop_columns("percentile_within_split").to_pylist()
    source = {"name": "a", "path": str(write_rows(tmp_path / "sft.jsonl", trained))}
    _, packed = preparing_sft.prepare({"datasets": [source]}, tmp_path / "sft", tokenizer={"model": other_model})
    (entry,) = packed["derived"]["shards"]
    assert sum(rows["completion_token_count"].to_pylist()) == entry["facts"]["all"]["loss_tokens"]
    assert sum(rows["total_token_count"].to_pylist()) == entry["facts"]["all"]["tokens"]


def test_harmony_becomes_a_chat_with_thoughts_calls_and_results():
    messages = [
        HarmonyMessage("system", "You are ChatGPT."),
        HarmonyMessage("developer", "# Instructions\n\nBe brief."),
        HarmonyMessage("user", "Weather?"),
        HarmonyMessage("assistant", "Look it up.", channel="analysis"),
        HarmonyMessage("assistant", "One moment.", channel="commentary"),
        HarmonyMessage("assistant", '{"at": "home"}', "functions.weather", "commentary", "json", terminator="call"),
        HarmonyMessage("functions.weather", "rain", "assistant", "commentary"),
        HarmonyMessage("assistant", "print(1)", "python", "analysis", terminator="call"),
        HarmonyMessage("python", "1", "assistant", "analysis"),
        HarmonyMessage("assistant", "Rain.", channel="final"),
        HarmonyMessage("assistant", "Take a coat.", channel="final", terminator="return"),
    ]
    calls = [
        {"type": "function", "function": {"name": "weather", "arguments": '{"at": "home"}'}},
        {"type": "function", "function": {"name": "python", "arguments": '{"code": "print(1)"}'}},
    ]
    assert chat_of(messages)["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "One moment.", "reasoning_content": "Look it up.", "tool_calls": calls[:1]},
        {"role": "tool", "name": "weather", "content": "rain"},
        {"role": "assistant", "content": "", "tool_calls": calls[1:]},
        {"role": "tool", "name": "python", "content": "1"},
        {"role": "assistant", "content": "Rain."},
        {"role": "assistant", "content": "Take a coat."},
    ]


@pytest.mark.parametrize(
    "body", ['{"number": ' + "9" * 5_000 + "}", '{"deep": ' + "[" * 100_000], ids=["a long number", "deep nesting"]
)
def test_a_call_that_no_parser_takes_is_code(body):
    call = HarmonyMessage("assistant", body, "functions.weather", "commentary", "json", terminator="call")
    ((said,),) = (turn["tool_calls"] for turn in chat_of([call])["messages"])
    assert json.loads(said["function"]["arguments"]) == {"code": body}


def test_score_of_several_sequences_covers_all_tokens():
    sequences = corpus(count=9)
    table = CausalScorer(llama()).score(completions(*sequences))
    owners = np.array([0, 0, 0, 1, 3, 3, 4, 4, 4])
    found = summed(table, owners, 5)
    assert found.schema.equals(SCHEMA)
    for row in range(5):
        some = table.filter(owners == row)
        assert found["completion_token_count"][row].as_py() == sum(some["completion_token_count"].to_pylist())
        if row == 2:
            assert found["nll_mean"][row].as_py() is None
            continue
        tokens = found["completion_token_count"][row].as_py()
        assert found["nll_mean"][row].as_py() == pytest.approx(sum(some["nll_sum"].to_pylist()) / tokens)
        for part in ("analysis", "tool_call", "final"):
            counts = np.array(some[f"{part}_token_count"].to_pylist())
            mean = (np.array(some[f"nll_{part}"].fill_null(0).to_pylist()) * counts).sum() / max(counts.sum(), 1)
            assert (found[f"nll_{part}"][row].as_py() or 0) == pytest.approx(mean)


# What is refused before anything is scored.

SERVED = {"engine": "server", "server": "http://a:1", "model": "small"}


@pytest.mark.parametrize(
    ("what", "settings", "words"),
    [
        ("nll", {}, "model: missing"),
        ("nll", {"model": "./nowhere"}, "file or folder not found: './nowhere'"),
        ("nll", {"model": "small"}, "'small' has a vocabulary of 500 tokens, .* chat_template=tokenizer"),
        ("nll", {"model": "small", "tokenizer": {"model": "o200k_base"}}, "remove tokenizer"),
        ("nll", {"model": "small", "holdout": {"valid": 0.1}}, "holdout does not apply"),
        ("embed", {"model": "small"}, "engine=hash takes no model"),
        ("embed", {"engine": "transformers", "pooling": "mean"}, "needs a model"),
        ("embed", {"engine": "transformers", "model": "small"}, "needs pooling, last or mean"),
        ("embed", {"loss_on": "final_only"}, "loss_on: unknown key"),
        ("embed", {"device": "cuda"}, "engine=hash runs on a CPU"),
        ("embed", {"precision": "float32"}, "precision does not apply to engine=hash"),
        ("nll", {"model": "small", "server": "http://a:1"}, "server does not apply to engine=transformers"),
        ("nll", {"model": "small", "engine": "server"}, "engine=server needs server, its base URL"),
        ("nll", {**SERVED, "precision": "float32"}, "precision does not apply to engine=server"),
        ("nll", {**SERVED, "device": "cuda"}, "device does not apply to engine=server"),
        ("nll", {**SERVED, "token_budget": 9}, "token_budget does not apply to engine=server"),
        ("nll", {**SERVED, "server": "http://user:password@a:1"}, "server: String should match pattern"),
        ("embed", {**SERVED, "pooling": "last"}, "engine=transformers needs pooling"),
        ("embed", {"engine": "server", "server": "http://a:1"}, "engine=server needs a model"),
    ],
)
def test_wrong_choice_fails_before_reading(tmp_path, monkeypatch, what, settings, words):
    monkeypatch.chdir(tmp_path)
    llama().save_pretrained(tmp_path / "small")
    write_lines(tmp_path / "rows/a.jsonl", ["text"])
    with pytest.raises(InputError, match=words):
        plan(what, str(tmp_path / "rows"), tmp_path / "out", **settings)


def test_rows_without_ids_or_texts_are_rejected_early(folder, tmp_path):
    rows = rows_of(folder / "out")
    pq.write_table(rows.select(["text"]), tmp_path / "nameless.parquet")
    pq.write_table(rows.select(["row_id"]), tmp_path / "silent.parquet")
    with pytest.raises(InputError, match="none of the fields 'row_id', 'id'"):
        plan("embed", str(tmp_path / "nameless.parquet"), tmp_path / "out")
    with pytest.raises(InputError, match="none of the fields 'embed_text', 'text'"):
        plan("embed", str(tmp_path / "silent.parquet"), tmp_path / "out")


# What there is to compute with.


def test_gpus_are_dealt_out_to_workers_in_turn(monkeypatch):
    monkeypatch.setattr(engines, "gpus", lambda: 4)
    assert [device_for_worker("cuda", number) for number in (0, 3, 4, 10)] == ["cuda:0", "cuda:3", "cuda:0", "cuda:2"]
    assert device_for_worker("cpu", 3) == "cpu"
    with pytest.raises(RunError, match=r"sees 4 GPUs, and its name lacks a number .* --resources GPU=1 --name gpu-0`"):
        device_for_worker("cuda", None)
    monkeypatch.setattr(engines, "gpus", lambda: 1)
    assert device_for_worker("cuda", None) == "cuda:0"
    monkeypatch.setattr(engines, "gpus", lambda: 0)
    with pytest.raises(RunError, match="device=cuda: this worker sees no GPU"):
        device_for_worker("cuda", 0)


@pytest.mark.parametrize(("count", "device", "precision"), [(0, "cpu", "float32"), (2, "cuda", "bfloat16")])
def test_a_model_is_on_the_gpus_where_there_are_any(folder, tmp_path, monkeypatch, count, device, precision):
    monkeypatch.setattr(engines, "gpus", lambda: count)
    planned = plan("nll", str(folder / "out"), tmp_path / "out", model=str(folder / "random"))
    recipe = planned.plan.shards[0].identity["recipe"]
    assert (recipe["device"], recipe["precision"]) == (device, precision)
    assert device_of_plan(plan("embed", str(folder / "out"), tmp_path / "out")) == "cpu"
