"""The race: the faster engine of those that pass encodes large datasets, and no byte shows which one it was."""

from dataclasses import replace

import pytest
from tokenmill.tasks.tokenize import gate as race
from tokenmill.tasks.tokenize import kind
from tokenmill.tasks.tokenize.encoders import ENGINES
from tokenmill.tasks.tokenize.gate import Comparison, Gate
from tokenmill.tasks.tokenize.load import load_vocabulary
from tokenmill.tasks.tokenize.settings import TokenizerSettings

from tests.preparing import blend_of, prepare, tree, write_lines
from tests.tokenize.small_vocabularies import byte_level_bpe

TEXTS = [f"document number {number} of the data" for number in range(200)]


@pytest.fixture
def winner(monkeypatch, tmp_path):
    """Decides every race from now on; nothing is remembered of earlier ones."""
    monkeypatch.setattr(race, "user_cache", lambda *names: str(tmp_path.joinpath("races", *names)))

    def win(name):
        monkeypatch.setattr(
            race, "_race", lambda _: {each: race.Speed(0, 1 if each == name else 2) for each in ENGINES}
        )

    return win


@pytest.fixture
def gate(tmp_path):
    vocabulary = load_vocabulary(TokenizerSettings(model=str(byte_level_bpe(tmp_path / "model"))))
    return Gate(vocabulary, [], lambda _: iter(TEXTS), "text", str(tmp_path / "store"), literal=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", ENGINES)
def test_the_faster_engine_is_chosen_and_remembered(name, winner, gate):
    winner(name)
    assert race.fastest_engine(gate, 100) == name
    winner("neither")
    assert race.fastest_engine(gate, 100) == name


@pytest.mark.parametrize("name", ENGINES)
def test_rejected_engine_does_not_win(name, winner, gate, monkeypatch):
    winner(name)
    monkeypatch.setattr(
        "tokenmill.tasks.tokenize.gate.compare",
        lambda _vocabulary, engine, _texts, literal: Comparison(1, "errs" if engine == name or not literal else None),
    )
    (other,) = ENGINES.keys() - {name}
    assert race.fastest_engine(gate, 100) == other


def test_an_engine_that_loads_slowly_wins_only_large_datasets(winner, gate, monkeypatch):
    winner("neither")
    speeds = {"gigatoken": race.Speed(1, 0.02), "fastokens": race.Speed(3, 0.01)}
    monkeypatch.setattr(race, "_race", lambda _: speeds)
    assert [race.fastest_engine(gate, size) for size in (199, 201)] == ["gigatoken", "fastokens"]


@pytest.mark.usefixtures("winner")
def test_an_engine_that_does_not_support_the_vocabulary_does_not_run(gate):
    def fast(engine, literal):
        if engine == "gigatoken":
            raise ValueError("does not know this vocabulary")
        return gate.vocabulary.fast(engine, literal)

    some = replace(gate, vocabulary=replace(gate.vocabulary, fast=fast))
    assert race.fastest_engine(some, 100) == "fastokens"


def test_no_byte_shows_which_engine_encoded(winner, tmp_path, monkeypatch):
    monkeypatch.setattr(kind, "RACE_FROM", 1)
    model = byte_level_bpe(tmp_path / "model")
    source = write_lines(tmp_path / "some.jsonl", TEXTS)
    trees = []
    for name in ENGINES:
        monkeypatch.setattr(race, "user_cache", lambda *names, name=name: str(tmp_path.joinpath(name, *names)))
        winner(name)
        planned, _ = prepare(blend_of(source), tmp_path / name / "out", tokenizer={"model": str(model)})
        assert kind.worker_arguments(planned)["engines"] == {"datasets/some": name}
        found = tree(tmp_path / name / "out")
        trees.append({place: data for place, data in found.items() if place.endswith(("bin", "idx"))})
    assert trees[0] == trees[1]
    assert trees[0]
