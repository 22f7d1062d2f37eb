"""Settings with a new name: the old one names it, in every place where settings are written, and old outputs remain readable."""

import json
from pathlib import Path

import pytest
from tokenmill.flows.cli import run
from tokenmill.flows.score import score_candidates
from tokenmill.tasks.blend.load import load_blend
from tokenmill.tasks.errors import InputError
from tokenmill.tasks.nightly.changes import plan_changes
from tokenmill.tasks.renamed import RENAMED
from tokenmill.tasks.seal import sealed
from tokenmill.tasks.shards.manifest import read_manifest

from tests.building import plan_here, prepare_here

BLENDS = Path(__file__).parents[1] / "blends"
KIND_OF = {"oversize": "sft", "thoughts": "harmony", "rules_off": "harmony", "selection": "harmony", "curriculum": "rl"}
OPTIONS = [old for old in RENAMED if old not in {"what", "keep"}]


@pytest.mark.parametrize("old", OPTIONS)
def test_renamed_settings_name_the_new_one(old, tmp_path, capsys):
    kind = KIND_OF.get(old.partition(".")[0], "pretrain")
    blend, leaf, new = str(BLENDS / "tiny.json"), old.rpartition(".")[2], RENAMED[old].rpartition(".")[2]
    config = tmp_path / "settings.yaml"
    config.write_text(f"{old}: 1\n" if leaf == old else f"{old.partition('.')[0]}: {{{leaf}: 1}}\n")
    for given in ([f"{old}=1"], ["--config", str(config)]):
        assert run([kind, blend, "-o", str(tmp_path / "out"), *given]) == 2
        assert f"{leaf!r} has a new name, {new!r}" in capsys.readouterr().err
    assert run([kind, blend, "-o", str(tmp_path / "out"), f"--{leaf.replace('_', '-')}", "1"]) == 2
    assert leaf != old or f"write {new}=VALUE" in capsys.readouterr().err


def test_renamed_blend_keys_name_the_new_one():
    fim = {"name": "a", "path": "a.jsonl", "fim": {"no_prefix": "#"}}
    with pytest.raises(InputError, match=r"datasets\[0\]\.fim: 'no_prefix' has a new name, 'skip_prefix'"):
        load_blend({"datasets": [fim]})


@pytest.mark.parametrize(("name", "new"), [("what", "mode"), ("bad_row_ceiling", "max_bad_row_fraction")])
def test_renamed_flow_parameters_name_the_new_one(name, new):
    with pytest.raises(InputError, match=f"score-candidates: {name!r} has a new name, {new!r}"):
        score_candidates("blend.json", "out", **{name: "embed"})
    with pytest.raises(InputError, match=f"{name!r} has a new name, {new!r}"):
        score_candidates.validate_parameters({"blend": "blend.json", "output_dir": "out", name: "embed"})


def renamed_back(written):
    """A document of JSON with the old names: of recipes, too, which have them anyway."""
    text = json.dumps(written)
    for old, new in RENAMED.items():
        text = text.replace(f'"{new.rpartition(".")[2]}": ', f'"{old.rpartition(".")[2]}": ')
    return json.loads(text.replace('"source_identity": "mtime"', '"source_identity": "stat"'))


def test_outputs_with_old_names_are_read_as_new_ones(tmp_path):
    tokens = {"prefix_token": "<|start|>", "middle_token": "<|message|>", "suffix_token": "<|call|>"}
    source = {"name": "a", "path": str(BLENDS / "tiny/paragraphs.jsonl"), "fim": {**tokens, "skip_prefix": "The"}}
    chosen = {"change_detection": "mtime", "max_bad_row_fraction": 0.5, "fim": {**tokens, "skip_prefix": "#"}}
    _, written = prepare_here("pretrain", {"datasets": [source]}, tmp_path, **chosen)
    old = renamed_back(written)
    assert (old["settings"]["source_identity"], old["blend"]["datasets"][0]["fim"]["no_prefix"]) == ("stat", "The")
    (tmp_path / "manifest.json").write_bytes(sealed(old))
    read = read_manifest(str(tmp_path))
    assert (read["settings"], read["blend"]) == (written["settings"], written["blend"])
    again = plan_here("pretrain", {"datasets": [source]}, tmp_path, **chosen)
    assert [*again.plan.pending, *plan_changes(read, again)] == []
