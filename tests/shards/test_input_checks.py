"""What is refused before anything is written, for every kind of preparation, by planning and by the command line."""

import json

import pytest
from tokenmill.flows.cli import run
from tokenmill.tasks.blend.load import load_blend
from tokenmill.tasks.errors import InputError
from tokenmill.tasks.select.settings import NormalizationSettings
from tokenmill.tasks.select.shard import require_fitting
from tokenmill.tasks.shards.kinds import KINDS, preparation
from tokenmill.tasks.strict import parse

from tests.preparing import blend_of, prepare, write_lines
from tests.tokenize.small_vocabularies import byte_level_bpe


@pytest.fixture
def data(tmp_path):
    write_lines(tmp_path / "data/a.jsonl", [f"document {number}" for number in range(20)])
    return tmp_path / "data"


def refusal(name, blend, output_dir, **settings):
    """What a plan of this kind is refused with."""
    kind, model = preparation(name), {"model": "nowhere"} if name == "nll" else {}
    with pytest.raises(InputError) as error:
        kind.plan(load_blend(blend), parse(kind.settings, {**model, **settings}, "settings"), output_dir)
    return str(error.value)


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_may_not_overlap_inputs(kind, data):
    blend = blend_of(data)
    before = sorted(data.parent.rglob("*"))
    assert "the output folder" in refusal(kind, blend, f"{data}/out")
    assert "the store" in refusal(kind, blend, f"{data.parent}/out", store=f"{data}/shards")
    assert "the store" in refusal(kind, blend, None, store=f"{data}/shards")
    assert f"is inside the output folder {data.parent}" in refusal(kind, blend, str(data.parent))
    assert sorted(data.parent.rglob("*")) == before


@pytest.mark.slow
def test_cache_among_the_data_is_rejected(data, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", f"{data}/cache")
    assert "XDG_CACHE_HOME" in refusal("pretrain", blend_of(data), f"{data.parent}/out")
    monkeypatch.setenv("XDG_CACHE_HOME", f"{data}/.cache")
    out = prepare(blend_of(data), data.parent / "out", tokenizer={"model": str(byte_level_bpe(data.parent, 400))})
    assert out[1]["totals"]["documents"] == 20


def test_secondary_inputs_may_not_overlap(data):
    beside = data.parent / "beside"
    write_lines(beside / "b.jsonl", ["one two three"])
    evaluations = {"datasets": [{"name": "exam", "path": str(beside)}]}
    assert "evaluation 'exam'" in refusal("dedup", blend_of(data), f"{beside}/out", evaluations=evaluations)
    chosen = parse(NormalizationSettings, {"dedup": {"evaluations": evaluations}}, "settings")
    with pytest.raises(InputError, match="evaluation 'exam'"):
        require_fitting(chosen, f"{beside}/out")
    tables = [{"resolve_placeholders": {"questions": {"path": str(beside), "style": "dapo"}}}]
    assert "table 'questions'" in refusal("rl", blend_of(data), f"{beside}/out", transforms=tables)


@pytest.mark.parametrize("kind", KINDS)
def test_blend_file_is_not_overwritten(kind, data, tmp_path):
    mine = tmp_path / "project/blend.json"
    mine.parent.mkdir()
    mine.write_text(json.dumps(blend_of(data)))
    assert str(mine) in refusal(kind, str(mine), str(mine.parent))


COMMANDS = [
    ["pretrain", "BLEND", "--output-dir", ""],
    ["sft", "BLEND", "--output-dir", "  "],
    ["rl", "BLEND", "--output-dir="],
    ["harmony", "", "--output-dir", "OUT"],
    ["dedup", "BLEND", "--output-dir", "OUT", "store="],
    ["dedup", "BLEND", "--output-dir", "OUT", "store= "],
    ["score", "embed", "", "--output-dir", "OUT"],
    ["score", "embed", "BLEND", "--output-dir", "OUT", "store="],
    ["plan", "BLEND", "--output-dir", ""],
    ["plan", "BLEND", "tokenizer.revision="],
    ["plan", "BLEND", "store=~nobody-of-this-name/store"],
    ["pretrain", "BLEND", "--output-dir", "~nobody-of-this-name/out"],
    ["nightly", "BLENDS", "--output-dir", ""],
    ["verify", ""],
    ["view", "OUT", "--html", ""],
    ["lineage", ""],
    ["prune", "", "--keep", "OUT"],
    ["train", "OUT", "--output-dir", ""],
    ["train", "OUT", "start_from=", "--output-dir", "OUT"],
    ["evaluate", "OUT", "--output-dir", ""],
]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_empty_place_fails_without_files(command, data, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "blend.json").write_text(json.dumps(blend_of(data)))
    places = {"BLEND": str(tmp_path / "blend.json"), "OUT": str(tmp_path / "out"), "BLENDS": str(data)}
    before = sorted(tmp_path.rglob("*"))
    assert run([places.get(word, word) for word in command]) == 2
    complaint = capsys.readouterr().err
    assert complaint.startswith("tokenmill: ")
    assert len(complaint.splitlines()) == 1, complaint
    assert sorted(tmp_path.rglob("*")) == before


def test_nights_do_not_publish_among_their_blends(data, tmp_path, capsys):
    (tmp_path / "blends/pretrain").mkdir(parents=True)
    (tmp_path / "blends/pretrain/web.json").write_text(json.dumps(blend_of(data)))
    assert run(["nightly", f"{tmp_path}/blends", "--output-dir", f"{tmp_path}/blends/out"]) == 2
    assert f"contains the output folder {tmp_path}/blends/out" in capsys.readouterr().err


def test_home_folder_is_resolved_in_every_setting(data, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    tokenizer = {"model": str(byte_level_bpe(tmp_path, 400))}
    for place in ("~/out", "~"):
        prepare(blend_of(data), place, tokenizer=tokenizer, store="~/store")
    assert (tmp_path / "home/out/blend.json").exists()
    assert (tmp_path / "home/blend.json").exists()
    assert (tmp_path / "home/store/pretrain").exists()
    assert not (tmp_path / "~").exists()
