"""Commands that a newcomer mistypes, and the line that helps: the exit code is 2, and nothing is published."""

import pytest
from tokenmill.flows.cli import run

BLENDS = "{0}/blends"
MISTYPED = {
    f"pretrain {BLENDS}/tiny.json": "pretrain: missing --output-dir DIR; see tokenmill pretrain --help",
    "pretrain --output-dir out": "pretrain: missing BLEND; see tokenmill pretrain --help",
    f"pretrain {BLENDS}/tiny.json out": "pretrain: missing --output-dir DIR; see tokenmill pretrain --help",
    f"pretrain {BLENDS}/tiny.json -o out --shard-size 64MB": "It is a setting: write shard_size=VALUE",
    f"pretrain {BLENDS}/tiny.json -o out shard-size=64MB": "did you mean 'shard_size'?",
    f"pretrain {BLENDS}/tiny.json -o out tokeniser.model=gpt2": "did you mean 'tokenizer'?",
    f"pretrain {BLENDS}/tiny.json -o out tokenizer.model": "write key=value, for example tokenizer.model=o200k_harmony",
    f"pretrain {BLENDS}/tinny.json -o out": "no such blend file; did you mean 'tiny.json'?",
    f"pretrian {BLENDS}/tiny.json -o out": 'Unknown command "pretrian". Did you mean "pretrain"?',
    f"plan {BLENDS}/tiny-sft.json": "prepare it with tokenmill sft or tokenmill harmony (to plan it: --kind sft)",
    f"sft {BLENDS}/tiny.json -o out": "prepare it with tokenmill pretrain or tokenmill dedup",
    f"sft {BLENDS}/tiny-sft.json -o out chat_template=chatml": "known: harmony, lightning35, nano3, tokenizer",
    f"sft {BLENDS}/tiny-sft.json -o out chat_template=harmny": "did you mean 'harmony'?",
    "batch out --step 3": "'batch' has a new name: tokenmill step",
    "nightly blends -o out --keep-versions 0": "keep-versions",
    f"pretrain {BLENDS}/tiny.json -o out --outputdir x": "outputdir",
    "nightly blends -o out --keep 3": "--keep has a new name, --keep-versions",
    f"pretrain {BLENDS}/tiny.json -o out --scheduler tcp://a:1": "--scheduler has a new name, --cluster",
    "view out --rows=3": "--rows has a new name, --limit",
    "step out --step 1 --rows 3": "--rows has a new name, --limit",
    "order out --sequence-length 128": "It is a setting: write sequence_length=VALUE",
    "train out -o model --steps 3": "It is a setting: write steps=VALUE",
    "verify --output-dir out": "write the folder without it: tokenmill verify FOLDER",
    "report -o out": "write the folder without it: tokenmill report FOLDER",
    "prune store": "prune: missing --keep; see tokenmill prune --help",
    f"plan {BLENDS}/tiny-scores.json --kind embeddings": "--kind embeddings: unknown; did you mean 'embed'?",
    "verify nowhere": "no manifest.json here; point at the --output-dir of a preparation",
}


@pytest.mark.parametrize("line", MISTYPED)
def test_a_mistyped_command_gets_one_helpful_line(line, pytestconfig, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run(line.format(pytestconfig.rootpath).split()) == 2
    (shown,) = capsys.readouterr().err.splitlines()
    assert MISTYPED[line] in shown
    assert not (tmp_path / "out/manifest.json").exists()
