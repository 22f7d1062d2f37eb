"""Where transformers' AutoTokenizer gives other ids than the tokenizer.json that it loads."""

import json
import sys

import pytest
from tokenizers.normalizers import NFC
from tokenmill.flows.cli import run
from tokenmill.tasks.report.autotokenizer import check_autotokenizer
from tokenmill.tasks.report.doctor import examine
from tokenmill.tasks.tokenize.load import find_vocabulary
from tokenmill.tasks.tokenize.settings import TokenizerSource
from transformers import AutoTokenizer

from tests.preparing import write_lines
from tests.tokenize.small_vocabularies import BOS, EOS, byte_level_bpe, reference

pytestmark = pytest.mark.slow


def checked(model):
    return check_autotokenizer(str(model))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two folders with one tokenizer.json, which normalizes; a GPT-2 tokenizer, made of its vocabulary, doesn't."""
    classes = {"same": "PreTrainedTokenizerFast", "other": "GPT2Tokenizer"}
    folders = {name: byte_level_bpe(tmp_path_factory.mktemp(name)) for name in classes}
    for name, folder in folders.items():
        tokenizer = reference(folder)
        tokenizer.normalizer = NFC()
        tokenizer.save(str(folder / "tokenizer.json"))
        config = {"tokenizer_class": classes[name], "bos_token": BOS, "eos_token": EOS}
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folders


def test_ids_that_differ_are_counted_and_shown(folders):
    same, other = checked(folders["same"]), checked(folders["other"] / "tokenizer.json")
    assert same.differences == []
    assert same.texts > 300
    assert f" of {other.texts} texts get other ids" in other.differences[0]
    autos = [AutoTokenizer.from_pretrained(folder) for folder in folders.values()]
    assert len({tuple(auto.encode("e\u0301")) for auto in autos}) == 2


def test_an_end_that_differs(folders, tmp_path):
    folder = byte_level_bpe(tmp_path)
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": EOS})
    )
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": BOS}))
    auto = AutoTokenizer.from_pretrained(folder).eos_token_id
    own = find_vocabulary(TokenizerSource(model=str(folder))).eos
    assert own != auto
    assert f"EOS is {own}, AutoTokenizer's {auto}" in checked(folder).differences


def test_token_that_only_the_configuration_lists(tmp_path):
    folder = byte_level_bpe(tmp_path)
    number = reference(folder).get_vocab_size()
    token = {"content": "<|tool|>", "special": True, "lstrip": False, "rstrip": False, "normalized": False}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": EOS, "added_tokens_decoder": {number: token}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (count, shown) = [each for each in checked(folder).differences if "BOS" not in each]
    assert count.startswith("1 of ")
    assert "'a <|tool|> b<|tool|>' gives" in shown


def test_incomparable_tokenizers(folders, tmp_path, monkeypatch):
    broken = byte_level_bpe(tmp_path)
    (broken / "config.json").write_text("{")
    assert "AutoTokenizer can't load" in checked(broken).line
    assert "an encoding of tiktoken's" in checked("o200k_harmony").line
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert "transformers isn't installed" in checked(folders["same"]).line


def test_doctor_and_comparison_agree(folders, tmp_path, capsys):
    states = {name: examine(str(tmp_path), None, str(folder))[-1] for name, folder in folders.items()}
    assert {name: check.state for name, check in states.items()} == {"same": "ok", "other": "broken"}
    assert "texts get other ids" in states["other"].found
    write_lines(tmp_path / "some.jsonl", ["a text"])
    models = list(map(str, folders.values()))
    assert run(["compare-tokenizers", str(tmp_path / "some.jsonl"), *models, "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)["compare-tokenizers"]["autotokenizer"]
    assert [bool(check["differences"]) for check in found.values()] == [False, True]
    assert run(["doctor", str(tmp_path), "--tokenizer", models[1], "--format", "json"]) == 0
    assert "texts get other ids" in capsys.readouterr().out
