"""The engine `server`, against a stand-in with the interfaces of vLLM and SGLang: right scores, and one clear error."""

import json
import math
import threading

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenmill.tasks.errors import InputError, RunError
from tokenmill.tasks.score import server as engine
from tokenmill.tasks.score.kind import NLL
from tokenmill.tasks.score.models import CausalScorer, PoolingEmbedder
from tokenmill.tasks.score.server import KEY, Server, ServerEmbedder, ServerScorer
from tokenmill.tasks.score.settings import NllSettings
from tokenmill.tasks.score.tables import NonFiniteError
from transformers import LlamaConfig, LlamaForCausalLM

from tests import preparing_sft
from tests.preparing_rl import write_rows
from tests.preparing_scores import chat, plan, prepare, table_of
from tests.score.server_stand_in import StandIn, by_bytes, serving
from tests.score.test_embed import WORDS, texts
from tests.score.test_embed import tokenizer as word_tokenizer
from tests.score.tiny_models import SHAPE, completions, corpus, llama


@pytest.fixture(scope="module")
def model():
    return llama()


@pytest.fixture
def vllm(model):
    with serving(StandIn(model)) as stand_in:
        yield stand_in


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    monkeypatch.setattr(engine, "DELAYS", (0, 0, 0))


def connected(stand_in, concurrency=4):
    return Server(stand_in.url, "tiny", concurrency)


def scorer(stand_in, max_length=None, encode=by_bytes):
    return ServerScorer(connected(stand_in), max_length, encode)


def place(row):
    return f"a.jsonl: row {row}"


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "limit"), [("vllm", 89), ("sglang", 82)])
def test_a_server_gives_the_scores_that_its_model_gives_here(model, kind, limit):
    sequences = completions(*corpus(11))
    with serving(StandIn(model, kind)) as stand_in:
        found = scorer(stand_in).score(sequences)
        cut = scorer(stand_in, max_length=30).score(sequences)
    expected = CausalScorer(model, max_length=limit).score(sequences)
    assert sum(expected["truncated"].to_pylist()) > 0
    for name in found.column_names:
        np.testing.assert_allclose(found[name].to_numpy(), expected[name].to_numpy(), rtol=1e-5, err_msg=name)
    assert cut["cut_token_count"] == CausalScorer(model, max_length=30).score(sequences)["cut_token_count"]


def test_a_token_that_the_server_puts_before_a_text_does_not_matter(model):
    with serving(StandIn(model, tokenize=lambda text, special=False: [300, *by_bytes(text)])) as stand_in:
        scorer(stand_in)


def test_mismatched_tokenizer_is_rejected(vllm):
    with pytest.raises(InputError, match=r"tokenizer: the server encodes '3.14 naïve .* as .* set tokenizer"):
        scorer(vllm, encode=lambda text: [token + 1 for token in by_bytes(text)])
    with pytest.raises(InputError, match="tokenizer: the server encodes"):
        scorer(vllm, encode=lambda text: [1, *by_bytes(text), 2])


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        (lambda ids, logprobs: ([*ids[:-1], 7], logprobs), "token 8 is 7, not 4"),
        (lambda ids, logprobs: (ids[:-2], logprobs[:-2]), "7 were returned"),
        (lambda ids, logprobs: ([*ids[:2], *ids[3:]], logprobs[:-1]), "8 were returned"),
    ],
)
def test_mismatched_log_probabilities_are_rejected(vllm, change, difference):
    vllm.change = change
    with pytest.raises(RunError, match=rf"a\.jsonl: row 0: .* don't belong to the 9 tokens sent: {difference}"):
        scorer(vllm).score(completions([(4, 1, 3)] * 9), place)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "value"),
    [("vllm", math.nan), ("vllm", -9999.0), ("sglang", None), ("sglang", math.inf), ("sglang", -math.inf)],
)
def test_a_log_probability_that_is_not_finite_names_its_row(model, kind, value):
    with serving(StandIn(model, kind)) as stand_in:
        stand_in.change = lambda ids, logprobs: (ids, [value, *logprobs[1:]] if ids[0] == 17 else logprobs)
        sequences = completions(*([(number, 1, 3)] * 5 for number in range(30)))
        with pytest.raises(NonFiniteError, match=r"a\.jsonl: row 17: the NLL of a token is (nan|-?inf); .* float32"):
            scorer(stand_in).score(sequences, place)


def test_an_answer_that_json_cannot_hold_names_its_row(vllm, monkeypatch):
    ready, refused = scorer(vllm), (400, {"error": {"message": engine.NOT_JSON}})
    answer = vllm.answer
    monkeypatch.setattr(vllm, "answer", lambda path, body: refused if body["prompt"][0] == 17 else answer(path, body))
    with pytest.raises(NonFiniteError, match=r"a\.jsonl: row 17: the NLL of a token is nan"):
        ready.score(completions(*([(number, 1, 3)] * 5 for number in range(30))), place)


@pytest.mark.parametrize("failure", [429, 502, 503, 504, "hang up"])
def test_a_request_that_fails_for_a_passing_reason_is_sent_again(vllm, model, failure):
    sequences = completions(*corpus(3, 6))
    ready = scorer(vllm)
    first = len(vllm.asked)
    vllm.before = lambda number: failure if number <= first + 3 else None
    expected = CausalScorer(model, max_length=89).score(sequences)
    np.testing.assert_allclose(ready.score(sequences)["nll_sum"].to_numpy(), expected["nll_sum"].to_numpy(), rtol=1e-5)
    assert len(vllm.asked) > first + 6


def test_busy_server_is_an_error(vllm):
    vllm.before = lambda number: 503
    with pytest.raises(RunError, match=r"/v1/models answered 503: .*\(4 tries\); start the server.*shards are reused"):
        connected(vllm)
    assert vllm.asked == ["/v1/models"] * 4


def test_dead_server_is_an_error(model):
    with serving(StandIn(model)) as stand_in:
        pass
    with pytest.raises(RunError, match=rf"{stand_in.url}/v1/models cannot be reached: .*\(4 tries\)"):
        connected(stand_in)


def test_rejected_request_is_not_resent_and_names_its_row(vllm):
    ready = scorer(vllm)
    vllm.asked.clear()
    vllm.before = lambda number: 400
    with pytest.raises(RunError, match=r'a\.jsonl: row 0: .*/v1/completions answered 400: {"error": "as told"}'):
        ready.score(completions([(4, 1, 3)] * 9), place)
    assert vllm.asked == ["/v1/completions"]


def test_server_key_is_read_from_the_environment(vllm, monkeypatch):
    monkeypatch.delenv(KEY, raising=False)
    connected(vllm)
    assert vllm.keys == {None}
    monkeypatch.setenv(KEY, "secret")
    connected(vllm)
    assert vllm.keys == {None, "Bearer secret"}
    vllm.before = lambda number: 401
    with pytest.raises(InputError, match=rf"answered 401: .* set {KEY} to the server's key") as refused:
        connected(vllm)
    assert "Bearer" not in str(refused.value)


def test_unserved_model_is_rejected_early(vllm):
    with pytest.raises(InputError, match=r"serves tiny, not 'other'; set model to a served one"):
        NLL.check(None, NllSettings(model="other", engine="server", server=f"{vllm.url}/v1"), "out")
    NLL.check(None, NllSettings(model="tiny", engine="server", server=f"{vllm.url}/v1/"), "out")


def test_server_without_prompt_log_probabilities_is_rejected(vllm, monkeypatch):
    bare = (200, {"choices": [{"text": "a"}], "data": [{"id": "tiny"}]})
    monkeypatch.setattr(vllm, "answer", lambda path, body: bare)
    with pytest.raises(RunError, match=r"not the response of vLLM or SGLang \(KeyError\('prompt_logprobs'\)\)"):
        scorer(vllm)


def test_server_without_tokenizer_is_rejected(vllm):
    vllm.kind = "other"
    with pytest.raises(InputError, match=r"/v1/completions answered 404: .* needs a vLLM or SGLang server"):
        scorer(vllm)


def test_as_many_requests_are_in_flight_as_may_be_and_no_more(vllm):
    ready = ServerScorer(connected(vllm, 3), None, by_bytes)
    full, lock, now, most = threading.Barrier(3, timeout=30), threading.Lock(), [0], [0]

    def together(number):
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        full.wait()  # breaks, and fails the request, unless three are in flight at once
        with lock:
            now[0] -= 1

    vllm.before = together
    ready.score(completions(*([(4, 1, 3)] * 9 for _ in range(12))))
    assert most == [3]


def test_after_a_failure_no_more_requests_are_sent(vllm):
    ready, failed = ServerScorer(connected(vllm, 1), None, by_bytes), threading.Event()
    vllm.asked.clear()
    vllm.before = lambda number: 400 if not failed.is_set() and not failed.set() else None
    with pytest.raises(RunError, match="row 0"):
        ready.score(completions(*([(4, 1, 3)] * 9 for _ in range(2_000))), place)
    assert len(vllm.asked) < 2_000


# Embeddings.


def by_words(text, special=True):
    """As `word_tokenizer` reads a text, with an end token behind it."""
    return [*(3 + WORDS.index(word) if word in WORDS else 0 for word in text.split()), *([1] if special else [])]


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_a_server_gives_the_vectors_that_its_model_gives_here(model, kind):
    with serving(StandIn(model, kind, by_words)) as stand_in:
        embedder = ServerEmbedder(connected(stand_in), 12, 40)
        found = texts(9, longest=80)
        vectors, counts = embedder.encode(found), embedder.token_counts(found)
        assert stand_in.asked.count("/tokenize") == 2 + len(found)
        assert embedder.encode([]).shape == (0, 12)
    expected = PoolingEmbedder(model.model, word_tokenizer(ends_with="<end>"), "last", 12, 40)
    assert counts.tolist() == expected.token_counts(found).tolist()
    assert max(counts) > 40
    np.testing.assert_allclose(vectors, expected.encode(found), atol=1e-5)


def test_no_more_is_embedded_than_the_server_reads(model):
    with serving(StandIn(model, "sglang", by_words)) as stand_in:
        embedder = ServerEmbedder(connected(stand_in), None, 1024)
        assert (embedder.max_tokens, embedder.dimensions) == (83, 32)
        assert np.isfinite(embedder.encode([" ".join(WORDS[:100])])).all()
        with pytest.raises(InputError, match="dimensions=33: the model's vectors have 32"):
            ServerEmbedder(connected(stand_in), 33, 1024)


def test_a_number_of_a_vector_that_is_missing_is_nan(vllm, monkeypatch):
    monkeypatch.setattr(vllm, "answer", lambda path, body: (200, {"data": [{"id": "tiny", "embedding": [1.0, None]}]}))
    assert np.isnan(connected(vllm).vector([1])).tolist() == [False, True]


def test_a_vector_that_json_cannot_hold_is_nan(model, monkeypatch):
    with serving(StandIn(model, tokenize=by_words)) as stand_in:
        embedder, answer = ServerEmbedder(connected(stand_in), None, 40), stand_in.answer
        refused = (500, {"error": {"message": engine.NOT_JSON}})
        monkeypatch.setattr(
            stand_in,
            "answer",
            lambda path, body: refused if body.get("input", [[0]])[0][0] == 4 else answer(path, body),
        )
        assert np.isnan(embedder.encode(["w0", "w1", "w2"])).all(axis=1).tolist() == [False, True, False]


# Whole preparations.


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    """Chats, and a model that reads them: its folder, and the model."""
    folder = tmp_path_factory.mktemp("served")
    rows = write_rows(folder / "rows.jsonl", [{"id": n, **chat(n)} for n in range(40)])
    return chat_model(folder / "model"), str(rows)


def chat_model(folder):
    folder.mkdir()
    preparing_sft.chat_vocabulary(folder)
    model = LlamaForCausalLM(LlamaConfig(**{**SHAPE, "vocab_size": 512}, max_position_embeddings=256)).eval()
    model.save_pretrained(folder)
    return folder, model


def chosen(folder, **settings):
    return {"chat_template": preparing_sft.CHATML, "tokenizer": {"model": str(folder)}, **settings}


@pytest.mark.slow
def test_server_scores_match_its_model_at_any_address(chats, tmp_path):
    (folder, model), rows = chats
    prepare("nll", rows, tmp_path / "here", **chosen(folder, model=str(folder), max_length=200))
    read = Tokenizer.from_file(str(folder / "tokenizer.json")).encode
    stand_in = StandIn(
        model, tokenize=lambda text, special=False: read(text, add_special_tokens=False).ids, longest=256
    )
    served = chosen(folder, engine="server", model="tiny", model_revision="v1", max_length=200)
    with serving(stand_in):
        _, manifest = prepare("nll", rows, tmp_path / "out", server=stand_in.url, **served)
    here, there = (table_of(tmp_path / name / "nll").to_pylist() for name in ("here", "out"))
    assert len(there) == 40
    for one, other in zip(here, there, strict=True):
        assert other["nll_mean"] == pytest.approx(one["nll_mean"], rel=1e-5)
        made = [other[name] for name in ("model", "model_revision", "engine", "dtype")]
        assert made == ["tiny", "v1", "server", None]
        assert other["completion_token_count"] == one["completion_token_count"]
    recipe = manifest["recipes"][0]["recipe"]
    assert (recipe["model"], recipe["model_revision"], recipe["weights"]) == ("tiny", "v1", None)
    assert stand_in.url not in json.dumps({**manifest, "volatile": None})
    moved = plan("nll", rows, tmp_path / "out", server="http://127.0.0.1:9", concurrency=1, **served)
    assert not moved.plan.pending
    other = plan("nll", rows, tmp_path / "out", server="http://127.0.0.1:9", **{**served, "model_revision": "v2"})
    assert len(other.plan.pending) == len(other.plan.shards)
