"""The gate: an encoder that is wrong once is never used, and what was found is remembered exactly as long as it holds."""

import json
import os
import shutil
from dataclasses import dataclass, replace
from unicodedata import normalize

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import AddedToken, Tokenizer
from tokenizers.normalizers import NFC
from tokenmill.tasks.blend.load import load_blend
from tokenmill.tasks.errors import InputError
from tokenmill.tasks.runtime import cores
from tokenmill.tasks.shards.receipt import Receipt
from tokenmill.tasks.strict import parse
from tokenmill.tasks.tokenize import gate as gate_module
from tokenmill.tasks.tokenize import kind, sweep
from tokenmill.tasks.tokenize.encoders import ENGINES, Encoder, Tokens
from tokenmill.tasks.tokenize.gate import Comparison, Gate, Speed, fastest_engine
from tokenmill.tasks.tokenize.kind import PRETRAIN
from tokenmill.tasks.tokenize.load import load_vocabulary
from tokenmill.tasks.tokenize.settings import PretrainSettings

from tests.peers import vocabularies
from tests.preparing import blend_of, prepare, tree, write_lines
from tests.tokenize.small_vocabularies import byte_level_bpe, ids_of, load, reference, word_piece

NOTHING_HELD_OUT = {"valid": 0, "test": 0}
TEXTS = [f"document number {number} of the data" for number in range(40)]


@pytest.fixture
def model(small, tmp_path):
    """The small tokenizer in a folder of this test's own, so that no other test's encoders are met."""
    return shutil.copytree(small, tmp_path / "model")


@pytest.fixture
def source(tmp_path):
    return write_lines(tmp_path / "some.jsonl", TEXTS)


@dataclass
class Lying:
    """An encoder that gets the first id of one text wrong."""

    honest: Encoder
    about: str

    def encode(self, texts):
        found = self.honest.encode(texts)
        ids = found.ids.copy()
        ids[found.offsets[:-1][np.array(texts.to_pylist()) == self.about]] -= 1
        return Tokens(ids, found.offsets)


@pytest.fixture
def swap(monkeypatch):
    """`swap(**fields)`: from now on every vocabulary that is loaded has these fields instead of its own."""

    def swap(**fields):
        def load(settings):
            vocabulary = load_vocabulary(settings)
            return replace(vocabulary, **{name: make(vocabulary) for name, make in fields.items()})

        monkeypatch.setattr(kind, "load_vocabulary", load)
        monkeypatch.setattr(kind, "planned_vocabulary", lambda source, _: load(source))

    return swap


def lying_about(text, *engines):
    """Makes the engines get one text wrong; all of them, unless some are named."""

    def fast(vocabulary):
        def make(engine, literal):
            honest = vocabulary.fast(engine, literal)
            return Lying(honest, text) if engine in (engines or ENGINES) else honest

        return make

    return fast


def plan(source, output, model, **settings):
    chosen = parse(PretrainSettings, {"tokenizer": {"model": str(model)}, **settings}, "settings")
    return PRETRAIN.plan(load_blend(blend_of(source)), chosen, str(output))


def verdict_of(planned):
    [verdict] = planned.found.verdicts.values()
    return verdict


def bytes_of(output):
    return {name: content for name, content in tree(output / "train").items() if name.endswith(("bin", "idx"))}


def receipts(output):
    return [Receipt.load(path.read_bytes()) for path in output.glob("shards/pretrain/*/receipt.json")]


def settings_of(model):
    return {"tokenizer": {"model": str(model)}, "holdout": NOTHING_HELD_OUT}


@pytest.mark.slow
def test_an_encoder_that_errs_on_one_document_is_not_used(source, model, tmp_path, swap):
    honest, _ = prepare(blend_of(source), tmp_path / "honest", **settings_of(model))
    assert verdict_of(honest).backend == "gigatoken"
    swap(fast=lying_about(TEXTS[3]))
    planned, manifest = prepare(blend_of(source), tmp_path / "gated", **settings_of(model))
    verdict = verdict_of(planned)
    assert verdict.backend == "reference"
    assert list(verdict.refused) == list(ENGINES)
    assert all(repr(TEXTS[3]) in reason for reason in verdict.refused.values())
    assert manifest["tokenizer"]["gate"]["datasets/some"] == {"backend": "reference", "refused": verdict.refused}
    told = planned.notes["datasets/some"]
    assert all(f"{engine} {reason}" in told for engine, reason in verdict.refused.items())
    assert [recipe["recipe"]["backend"] for recipe in manifest["recipes"]] == ["reference"]
    assert [receipt.identity["recipe"]["backend"] for receipt in receipts(tmp_path / "gated")] == ["reference"]
    assert not set(planned.plan.keys) & set(honest.plan.keys)
    found, expected = (list(bytes_of(tmp_path / name).values()) for name in ("gated", "honest"))
    assert found == expected


@pytest.mark.slow
def test_when_one_engine_errs_the_next_one_is_used(source, model, tmp_path, swap):
    honest, _ = prepare(blend_of(source), tmp_path / "honest", **settings_of(model))
    swap(fast=lying_about(TEXTS[3], "gigatoken"))
    planned, _ = prepare(blend_of(source), tmp_path / "gated", **settings_of(model))
    assert verdict_of(planned).backend == "fastokens"
    assert "fastokens is used; gigatoken encodes" in planned.notes["datasets/some"]
    assert verdict_of(honest).backend == "gigatoken"
    assert list(bytes_of(tmp_path / "gated").values()) == list(bytes_of(tmp_path / "honest").values())


BREAKING = ["<|turn|>", "<|turn|", "\x85word\x85", "\u3000word\u3000", "\u0340\u0340", "\x1b", " " * 9 + "word"]


@pytest.mark.slow
@pytest.mark.parametrize("text", [TEXTS[0], TEXTS[len(TEXTS) // 2], TEXTS[-1], *BREAKING])
def test_an_engine_that_errs_on_a_string_or_anywhere_in_the_data_is_not_used(source, model, tmp_path, swap, text):
    swap(fast=lying_about(text))
    verdict = verdict_of(plan(source, tmp_path / "out", model, shard_size=200))
    assert verdict.backend == "reference"
    assert all(repr(text) in verdict.refused[engine] for engine in ENGINES)


@pytest.mark.slow
def test_findings_are_per_dataset(source, model, tmp_path, swap):
    swap(fast=lying_about(TEXTS[3]))
    other = write_lines(tmp_path / "other.jsonl", [text.upper() for text in TEXTS])
    _, manifest = prepare(blend_of(source, other), tmp_path / "out", **settings_of(model))
    gate = manifest["tokenizer"]["gate"]
    assert [gate[f"datasets/{name}"]["backend"] for name in ("some", "other")] == ["reference", "gigatoken"]


def test_a_tokenizer_that_no_engine_can_run_is_run_by_its_reference(source, tmp_path):
    folder = word_piece(tmp_path / "model")
    planned, manifest = prepare(blend_of(source), tmp_path / "out", **settings_of(folder))
    assert verdict_of(planned).backend == "reference"
    assert "WordPiece" in manifest["tokenizer"]["gate"]["datasets/some"]["refused"]["gigatoken"]
    eos = vocabularies.end_of_document(folder)
    [content] = [path.read_bytes() for path in (tmp_path / "out/train").glob("*.bin")]
    expected = [number for ids in ids_of(reference(folder), TEXTS) for number in [*ids, eos]]
    assert np.frombuffer(content, np.uint16).tolist() == expected


def test_large_data_for_the_reference_start_workers(source, model, tmp_path, monkeypatch):
    """Engines work in threads of the command's own process; the reference would take minutes there."""
    fast, _ = prepare(blend_of(source), tmp_path / "fast", **settings_of(model))
    slow, _ = prepare(blend_of(source), tmp_path / "slow", **settings_of(word_piece(tmp_path / "model")))
    assert PRETRAIN.needs(fast).workers is PRETRAIN.needs(slow).workers is None, "nothing is left to build"
    for planned, expected in ((fast, None), (slow, cores())):
        pending = replace(planned, plan=replace(planned.plan, proven={}))
        monkeypatch.setattr(kind, "LITTLE_BYTES", 0)
        assert PRETRAIN.needs(pending).workers == expected


@pytest.fixture
def counted(swap):
    """How often an encoder of the kind was made, by kind."""
    made = {"fast": 0, "reference": 0}

    def counting(name):
        def of(vocabulary):
            def make(*arguments):
                made[name] += 1
                return getattr(vocabulary, name)(*arguments)

            return make

        return of

    swap(fast=counting("fast"), reference=counting("reference"))
    return made


def moved(source, model):
    return source.rename(source.with_name("elsewhere.jsonl"))


def other_content(source, model):
    write_lines(source, [*TEXTS[:5], "one document is another", *TEXTS[6:]])


def other_tokenizer(source, model):
    """The same folder with a tokenizer.json that has one control string more."""
    place = model / "tokenizer.json"
    definition = json.loads(place.read_bytes())
    last = definition["added_tokens"][-1]
    definition["added_tokens"].append({**last, "id": last["id"] + 1, "content": "<|more|>"})
    place.write_text(json.dumps(definition), "utf-8")


@pytest.mark.parametrize(
    ("change", "settings", "again"),
    [
        (None, {}, False),
        (moved, {"holdout": {"valid": 0.5, "test": 0.1}, "max_doc_tokens": 7}, False),
        (other_content, {}, True),
        (other_tokenizer, {}, True),
        (None, {"special_tokens_in_text": "allow"}, True),
        (None, {"sample": 3}, True),
    ],
)
def test_engines_are_compared_again_only_where_they_may_differ(
    source, model, tmp_path, counted, change, settings, again
):
    first = plan(source, tmp_path / "out", model)
    made, before = dict(counted), os.stat(source).st_mtime_ns  # noqa: PTH116
    assert min(made.values()) > 0
    source = (change and change(source, model)) or source
    os.utime(source, ns=(before + 10**9, before + 10**9))
    second = plan(source, tmp_path / "out", model, **settings)
    assert (counted["reference"] > made["reference"]) == again
    assert again or (counted, verdict_of(second)) == (made, verdict_of(first))


def test_a_cached_verdict_that_was_edited_is_not_believed(source, model, tmp_path):
    first = verdict_of(plan(source, tmp_path / "out", model))
    for place in (tmp_path / "out/shards/gates").iterdir():
        place.write_bytes(place.read_bytes().replace(b'"difference": null', b'"difference": "errs"'))
        assert b"errs" in place.read_bytes()
    assert verdict_of(plan(source, tmp_path / "out", model)) == first


def test_a_look_at_a_few_rows_does_not_vouch_for_the_rest(source, model, tmp_path, swap):
    swap(fast=lying_about(TEXTS[10]))
    assert verdict_of(plan(source, tmp_path / "out", model, sample=3)).backend == "gigatoken"
    assert verdict_of(plan(source, tmp_path / "out", model)).backend == "reference"


def test_a_tokenizer_that_changed_in_its_place_is_seen(source, model, tmp_path):
    """One process, one path, two contents: as a long-lived worker sees when somebody replaces a tokenizer."""
    first, _ = prepare(blend_of(source), tmp_path / "out", **settings_of(model))
    shutil.rmtree(model)
    byte_level_bpe(model, size=500)
    second, _ = prepare(blend_of(source), tmp_path / "out", **settings_of(model))
    assert len(second.plan.pending) == len(second.plan.keys)
    assert first.found.vocabulary.fingerprint != second.found.vocabulary.fingerprint
    eos = vocabularies.end_of_document(model)
    [content] = [path.read_bytes() for path in (tmp_path / "out/train").glob("*.bin")]
    expected = [number for ids in ids_of(reference(model), TEXTS) for number in [*ids, eos]]
    assert np.frombuffer(content, np.uint16).tolist() == expected


@pytest.mark.slow
def test_tokens_that_were_added_are_tried_in_other_normal_forms(source, model, tmp_path, monkeypatch):
    added = AddedToken("café", normalized=True)
    monkeypatch.setattr(sweep, "SWEPT", (range(0x80, 0x380),))  # all characters would take ten seconds
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.normalizer = NFC()
    assert tokenizer.add_tokens([added]) == 1
    tokenizer.save(str(model / "tokenizer.json"))
    verdict = verdict_of(plan(source, tmp_path / "out", model))
    assert verdict.backend != "gigatoken"
    assert repr(added.content)[1:-1] in normalize("NFC", verdict.refused["gigatoken"])


@pytest.mark.parametrize(
    ("column", "words"),
    [({"text": [1, 2]}, "'text' is of type int64, not text"), ({"txt": ["a", "b"]}, "did you mean 'txt'?")],
)
def test_every_parquet_file_must_have_its_text(small, tmp_path, column, words):
    """The gate's sample reads the first, middle and last slice: it would not see this one."""
    data = tmp_path / "data"
    data.mkdir()
    for number in range(5):
        pq.write_table(pa.table(column if number == 1 else {"text": ["a", "b"]}), data / f"{number}.parquet")
    with pytest.raises(InputError) as refused:
        plan(data, tmp_path / "out", small)
    assert f"{data / '1.parquet'}: " in str(refused.value)
    assert words in str(refused.value)


# The race: the faster engine of those that pass encodes large datasets, and no byte shows which one it was.


@pytest.fixture
def winner(monkeypatch, tmp_path):
    """Decides every race from now on; nothing is remembered of earlier ones."""
    monkeypatch.setattr(gate_module, "user_cache", lambda *names: str(tmp_path.joinpath("races", *names)))

    def win(name):
        monkeypatch.setattr(
            gate_module, "_race", lambda _: {each: Speed(0, 1 if each == name else 2) for each in ENGINES}
        )

    return win


@pytest.fixture
def gate(tmp_path):
    vocabulary = load(byte_level_bpe(tmp_path / "model"))
    return Gate(vocabulary, [], lambda _: iter(TEXTS), "text", str(tmp_path / "store"), literal=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", ENGINES)
def test_the_faster_engine_is_chosen_and_remembered(name, winner, gate):
    winner(name)
    assert fastest_engine(gate, 100) == name
    winner("neither")
    assert fastest_engine(gate, 100) == name


@pytest.mark.parametrize("name", ENGINES)
def test_rejected_engine_does_not_win(name, winner, gate, monkeypatch):
    winner(name)
    monkeypatch.setattr(
        "tokenmill.tasks.tokenize.gate.compare",
        lambda _vocabulary, engine, _texts, literal: Comparison(1, "errs" if engine == name or not literal else None),
    )
    (other,) = ENGINES.keys() - {name}
    assert fastest_engine(gate, 100) == other


def test_an_engine_that_loads_slowly_wins_only_large_datasets(winner, gate, monkeypatch):
    winner("neither")
    speeds = {"gigatoken": Speed(1, 0.02), "fastokens": Speed(3, 0.01)}
    monkeypatch.setattr(gate_module, "_race", lambda _: speeds)
    assert [fastest_engine(gate, size) for size in (199, 201)] == ["gigatoken", "fastokens"]


@pytest.mark.usefixtures("winner")
def test_an_engine_that_does_not_support_the_vocabulary_does_not_run(gate):
    def fast(engine, literal):
        if engine == "gigatoken":
            raise ValueError("does not know this vocabulary")
        return gate.vocabulary.fast(engine, literal)

    some = replace(gate, vocabulary=replace(gate.vocabulary, fast=fast))
    assert fastest_engine(some, 100) == "fastokens"


def test_no_byte_shows_which_engine_encoded(winner, tmp_path, monkeypatch):
    monkeypatch.setattr(kind, "RACE_FROM", 1)
    model = byte_level_bpe(tmp_path / "model")
    source = write_lines(tmp_path / "some.jsonl", TEXTS)
    trees = []
    for name in ENGINES:
        monkeypatch.setattr(gate_module, "user_cache", lambda *names, name=name: str(tmp_path.joinpath(name, *names)))
        winner(name)
        planned, _ = prepare(blend_of(source), tmp_path / name / "out", tokenizer={"model": str(model)})
        assert kind.worker_arguments(planned)["engines"] == {"datasets/some": name}
        found = tree(tmp_path / name / "out")
        trees.append({place: data for place, data in found.items() if place.endswith(("bin", "idx"))})
    assert trees[0] == trees[1]
    assert trees[0]
