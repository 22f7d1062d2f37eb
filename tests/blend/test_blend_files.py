"""The blends in blends/ and in pages: every one is prepared, and those of Nemotron 3 carry the published datasets and weights."""

import gzip
import json
import re
from collections import Counter
from functools import reduce
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenmill.tasks.blend.load import load_blend
from tokenmill.tasks.blend.mix import solve
from tokenmill.tasks.rl.tables import KEY_SETS
from tokenmill.tasks.rl.transforms import tables_asked_for
from tokenmill.tasks.sources.discovery import discover
from tokenmill.tasks.sources.hub import parse
from tokenmill.tasks.sources.selection import in_split

from tests.building import prepare_here
from tests.tokenize.small_vocabularies import byte_level_bpe

BLENDS = Path(__file__).parents[2] / "blends"
FILES = sorted(BLENDS.glob("*.json"))

MATH, CC2, CC21 = "nvidia/Nemotron-CC-Math-v1", "nvidia/Nemotron-CC-v2", "nvidia/Nemotron-CC-v2.1"
SPECIALIZED, SPECIALIZED11 = (
    "nvidia/Nemotron-Pretraining-Specialized-v1",
    "nvidia/Nemotron-Pretraining-Specialized-v1.1",
)
FINEPDFS, LONG_CONTEXT = "HuggingFaceFW/finepdfs", "nvidia/Nemotron-Pretraining-Long-Context-v1"
PREFIX = "Nemotron-Pretraining-"

PHASE1_TO_PHASE2 = {
    (CC2, "Medium-Quality"): (0.6, None),
    (CC21, "Medium-Quality"): (1.2, None),
    (CC21, "Medium-High-Quality-Synthetic"): (11.3, 6.2),
    (FINEPDFS, "eng_Latn"): (6.1, 14.3),
    (SPECIALIZED, PREFIX + "STEM-SFT"): (3.5, 4.0),
    (SPECIALIZED11, PREFIX + "Multiple-Choice"): (4.0, 4.2),
    (SPECIALIZED, PREFIX + "Scientific-Coding"): (0.5, 0.6),
    (SPECIALIZED11, PREFIX + "Code-Concepts"): (2.0, 2.4),
    (SPECIALIZED11, PREFIX + "Unconditional-Algorithmic"): (0.8, 0.9),
    (SPECIALIZED, PREFIX + "RQA"): (0.1, 0.05),
    (SPECIALIZED, PREFIX + "InfiniByte-Reasoning"): (0.1, 0.05),
}
"""Published weights that differ between the two phases of Nemotron 3 Super; the others are the same in both."""

SPECIALIZED12, LEGAL = "nvidia/Nemotron-Pretraining-Specialized-v1.2", "nvidia/Nemotron-Pretraining-Legal-v1"
ULTRA_PHASES = {
    (CC2, "High-Quality-Synthetic"): (7.5, 7.902),
    (CC21, "High-Quality-Synthetic"): (14.9, 15.698),
    (CC21, "Medium-High-Quality-Synthetic"): (10.3, 6.2),
    (CC2, "High-Quality"): (2.2, 2.2),
    (CC21, "High-Quality"): (4.3, 4.3),
    (CC2, "Medium-High-Quality"): (1.9, 1.9),
    (CC21, "Medium-High-Quality"): (3.8, 3.8),
    (CC2, "Medium-Quality"): (1.433, None),
    (CC21, "Medium-Quality"): (2.867, None),
    (SPECIALIZED, PREFIX + "STEM-SFT"): (9.2, 9.2),
    (SPECIALIZED11, PREFIX + "Code-Concepts"): (3.12, 3.12),
    (SPECIALIZED, PREFIX + "Scientific-Coding"): (0.78, 0.78),
    (SPECIALIZED12, PREFIX + "Multiple-Choice"): (0.544, 1.326),
    (SPECIALIZED12, PREFIX + "Generative"): (0.352, 0.858),
    (SPECIALIZED12, PREFIX + "Fact-Seeking"): (0.224, 0.546),
    (SPECIALIZED12, PREFIX + "Moral-Scenarios"): (0.096, 0.234),
    (SPECIALIZED11, PREFIX + "Economics"): (0.224, 0.546),
    (SPECIALIZED11, PREFIX + "Formal-Logic"): (0.16, 0.39),
    (MATH, "3"): (1.3, 1.3),
    (MATH, "4plus"): (2.9, 2.9),
    (MATH, "4plus_MIND"): (1.7, 1.7),
    (SPECIALIZED, PREFIX + "Math-Textbooks"): (0.5, 0.5),
    (CC2, "Diverse-QA"): (2.5, 2.5),
    (CC2, "Translated-Diverse-QA"): (1.0, 1.0),
    (CC21, "High-Quality-Translated-To-English"): (0.5, 0.5),
    (CC21, "High-Quality-Translated-To-English-Synthetic"): (0.5, 0.5),
    (CC21, "Medium-High-Quality-Translated-To-English"): (0.5, 0.5),
    (FINEPDFS, "eng_Latn"): (4.9, 7.6 + 2.1),
    (SPECIALIZED, PREFIX + "Wiki-Rewrite"): (0.6, 0.6),
    (LEGAL, PREFIX + "Legal-Case-Law-Summary"): (None, 0.1),
}
"""Published weights of Nemotron 3 Ultra; of finepdfs, phase 2 takes the same documents twice there."""
ULTRA_OPEN = 80.8

CHAT, PROOFS, SWE = (
    "nvidia/Nemotron-Instruction-Following-Chat-v1",
    "nvidia/Nemotron-Math-Proofs-v1",
    "nvidia/Nemotron-SWE-v1",
)
AGENTIC, PROGRAMMING = "nvidia/Nemotron-Agentic-v1", "nvidia/Nemotron-Competitive-Programming-v1"

SUPER_SFT = {
    (CHAT, "chat_if"): 14.3,
    (CHAT, "structured_outputs"): 14.3,
    (PROOFS, "lean"): 2.0,
    (SWE, None): 3.0,
    (AGENTIC, "interactive_agent"): 1.0,
    (AGENTIC, "tool_calling"): 1.0,
    (PROGRAMMING, "competitive_coding_cpp.part_00"): 5.2,
    (PROGRAMMING, "competitive_coding_cpp.part_01"): 5.2,
    (PROGRAMMING, "competitive_coding_python.part_00"): 5.2,
    (PROGRAMMING, "competitive_coding_python.part_01"): 5.1,
    (PROGRAMMING, "infinibyte.part_00"): 1.0,
    (PROGRAMMING, "infinibyte.part_01"): 1.0,
}
"""Published weights of the fine-tuning data of Nemotron 3 Super; Nano takes the same datasets."""


def blend(name):
    return load_blend(str(BLENDS / f"{name}.json"))


def weights(name):
    """`{(repository, subset): weight}` of a blend of hub datasets."""
    return {(parse(source)[0], source.subset): source.weight for source in blend(name).datasets}


def split_weights(name):
    """`{(repository, split): weight}` of a blend of hub datasets."""
    return {(parse(source)[0], source.split): source.weight for source in blend(name).datasets}


@pytest.mark.parametrize(
    ("name", "data_sets", "total"),
    [
        ("nano3-pretrain", 23, 23.0),
        ("nano3-pretrain-small", 5, 5.0),
        ("super3-pretrain-phase1", 29, 80.4),
        ("super3-pretrain-phase2", 27, 82.9),
        ("super3-pretrain-long-context", 28, 103.6),
    ],
)
def test_counts_and_sums_are_the_published_ones(name, data_sets, total):
    assert len(weights(name)) == data_sets
    assert sum(weights(name).values()) == pytest.approx(total, abs=1e-9)


def test_nano_takes_every_dataset_at_the_same_weight():
    found = weights("nano3-pretrain")
    assert set(found.values()) == {1.0}
    assert Counter(repository for repository, _ in found) == {MATH: 3, CC2: 6, CC21: 8, SPECIALIZED: 6}
    assert weights("nano3-pretrain-small").keys() < found.keys()


def test_super_phases_differ_as_published():
    first, second = weights("super3-pretrain-phase1"), weights("super3-pretrain-phase2")
    changed = {key: (first.get(key), second.get(key)) for key in first | second if first.get(key) != second.get(key)}
    assert changed == PHASE1_TO_PHASE2


def test_supers_long_context_is_phase_two_and_long_documents():
    added = weights("super3-pretrain-long-context").items() - weights("super3-pretrain-phase2").items()
    assert added == {((LONG_CONTEXT, None), 20.7)}
    (source,) = [source for source in blend("super3-pretrain-long-context").datasets if LONG_CONTEXT in source.path]
    assert source.split == "train"


@pytest.mark.parametrize(
    ("name", "whole"),
    [("super3-pretrain-phase1", 100), ("super3-pretrain-phase2", 100)]
    + [(f"ultra3-pretrain-phase{number}", 99.9) for number in (1, 2)],
)
def test_missing_parts_complete_the_published_blend(name, whole):
    missing = json.loads((BLENDS / f"{name}.json").read_text())["_missing"]
    assert sum(missing.values()) + sum(weights(name).values()) == pytest.approx(whole)


def test_ultra_carries_the_published_weights_in_both_phases():
    for number in (0, 1):
        published = {key: each[number] for key, each in ULTRA_PHASES.items() if each[number]}
        assert weights(f"ultra3-pretrain-phase{number + 1}") == pytest.approx(published)
        assert sum(published.values()) == pytest.approx(ULTRA_OPEN)


def test_ultra_phases_match_the_single_phase_blends():
    both = blend("ultra3-pretrain")
    mix = solve(both, {source.name: 10**12 for source in both.training()})
    assert [phase.tokens for phase in mix.phases] == [pytest.approx(15e12), pytest.approx(5e12)]
    for number, phase in enumerate(mix.phases, 1):
        alone = {source.name: source.weight for source in blend(f"ultra3-pretrain-phase{number}").training()}
        drawn = {name: tokens * ULTRA_OPEN / phase.tokens for name, tokens in phase.drawn.items()}
        assert drawn == pytest.approx(alone, rel=1e-3)


def test_lightning_takes_nanos_datasets():
    for name in ("pretrain", "pretrain-small", "sft"):
        assert blend(f"lightning35-{name}") == blend(f"nano3-{name}")
    tiny = {("nvidia/Nemotron-Science-v1", "MCQ"): 1.0, (CHAT, "chat_if"): 1.0}
    assert split_weights("lightning35-sft-tiny") == tiny
    assert {source.used_in for source in blend("lightning35-sft-tiny").datasets} == {"nano_v3"}


def test_subsets_of_the_specialized_collections_carry_their_full_names():
    for path in FILES:
        for source in load_blend(str(path)).datasets or []:
            if "Specialized" in source.path or "Legal" in source.path:
                assert source.subset.startswith(PREFIX), source


def test_chat_carries_the_published_weights():
    assert split_weights("nano3-sft") == dict.fromkeys(SUPER_SFT, 1.0)
    assert split_weights("super3-sft") == split_weights("ultra3-sft") == SUPER_SFT
    for name, used_in in {"nano3": "nano_v3", "super3": None, "ultra3": "nano_v3"}.items():
        assert {source.used_in for source in blend(f"{name}-sft").datasets} == {used_in}
    assert sum(SUPER_SFT.values()) == pytest.approx(58.3, abs=1e-9)
    missing, ultras = (
        json.loads((BLENDS / f"{name}-sft.json").read_text())["_missing"] for name in ("super3", "ultra3")
    )
    assert missing == ultras
    assert len(missing) == 13
    assert max(missing, key=missing.get) == "science"
    assert sum(missing.values()) == pytest.approx(47.5)


@pytest.mark.parametrize("split", [split for _, split in SUPER_SFT if split])
def test_a_split_of_the_chat_data_is_the_file_of_its_name_and_no_other(split):
    found = [other for _, other in SUPER_SFT if other and in_split(f"data/{other}.jsonl", split)]
    assert found == [split]


def rows(source):
    (file,) = discover(source)
    opened = gzip.open if file.uri.endswith(".gz") else open
    with opened(file.uri, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


# Rows for reinforcement learning.

HUB = "hf://nvidia/Nemotron-"
RL = {
    "nano3-rl": [(f"{HUB}3-Nano-RL-Training-Blend", "train", "nano3")],
    "lightning35-rl": [(f"{HUB}RL-Lightning-Training-Blend/rlvr.jsonl", None, "lightning35")],
    **{
        f"ultra3-rl-{stage}": [(f"{HUB}RL-Ultra-Training-Blends/{stage}.jsonl", None, "ultra3")]
        for stage in ("rlvr1", "rlvr2", "ifbench", "rlhf", "reasoning", "swe", "mopd")
    },
    **{
        f"super3-rl-{stage}": [(f"{HUB}RL-Super-Training-Blends/{stage}.jsonl", None, tables)]
        for stage, tables in {
            **dict.fromkeys(("rlvr1", "rlvr2", "rlvr3"), "super3"), **dict.fromkeys(("swe1", "swe2", "rlhf"))
        }.items()
    },
}  # fmt: skip
"""The file or split of each blend's only dataset, and the tables that fill its placeholders, in the order of training."""
RL["super3-rl"] = [only for name, (only,) in RL.items() if name.startswith("super3-rl-")]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_rl_blends_name_their_files_tables_and_equal_weights(path):
    chains = [source.transforms for part in load_blend(str(path)).parts().values() for source in part]
    for specs in chains:
        tables_asked_for(specs)
    if path.stem not in RL:
        assert any(chains) == (path.stem in {"tiny-rl", "tiny-dpo"})
        return
    sources = load_blend(str(path)).datasets
    expected = [(*place, [{"resolve_placeholders": tables}] if tables else []) for *place, tables in RL[path.stem]]
    assert [(source.path, source.split, source.transforms) for source in sources] == expected
    assert {(source.weight, source.used_in, len(source.filters)) for source in sources} == {(1.0, None, 0)}


# Every blend is prepared as its comment says, with rows of a stand-in for the Hub.

ROWS = {
    "pretrain": {"text": "The ferry leaves at noon.", "language": "en"},
    "sft": {"messages": [{"role": "user", "content": "When?"}, {"role": "assistant", "content": "At noon."}], "used_in": ["nano_v3"]},
    "rl": {"responses_create_params": {"input": [{"role": "user", "content": "1 + 1?"}]}, "agent_ref": {"name": "math"}, "expected_answer": "2"},
}  # fmt: skip
OWN_ROWS = {
    "best": {"text": "The ferry leaves at noon. " * 40},
    "fineweb-edu": {"text": "The ferry leaves at noon. " * 9, "language": "en", "int_score": 4},
    "qa": {"ask": "When?", "reply": "At noon.", "rules": "Be brief.", "turns": [], "metadata": {"tools": []}},
    "chat": {"data": {"chat": ROWS["sft"]["messages"]}, "metadata": {"tools": []}},
}
"""Rows of datasets in pages that name fields."""
CHAT_MARKERS = ("<s>", "<|endoftext|>", "<|im_start|>", "<|im_end|>")
COUNT = 120
"""Rows of each dataset: more than a holdout of 100 for validation."""


def lines_for(source, kind, place):
    """Rows of a dataset in JSON Lines, with the fields that it names."""
    row = OWN_ROWS.get(source.name, ROWS[kind])
    if source.text_field != "text":
        row = reduce(lambda value, name: {name: value}, reversed(source.text_field.split(".")), row["text"])
    return "".join(json.dumps({**row, "id": f"{place} {number}"}) + "\n" for number in range(COUNT))


def publish_rows(hub, sources, kind):
    """The repositories of Hub datasets, with the file of each subset, split or path."""
    files = {}
    for source in sources:
        organization, name, *inside = source.path.removeprefix("hf://").split("/")
        place = "/".join(inside) or f"{source.subset or 'data'}/{source.split or 'train'}.jsonl"
        files.setdefault(f"{organization}/{name}", {})[place] = lines_for(source, kind, place)
    for repository, content in files.items():
        hub.dataset(repository, content)
    for table in {each.path: each for tables in KEY_SETS.values() for each in tables.values()}.values():
        question = {"prompt": [[{"role": "user", "content": "1 + 1?"}]], "reward_model": [{"ground_truth": "2"}]}
        pq.write_table(pa.table(question), written := pa.BufferOutputStream())
        organization, name, *inside = table.path.removeprefix("hf://").split("/")
        place = "/".join(inside) or f"data/{table.split}-00000.parquet"
        repository = hub.dataset(f"{organization}/{name}")
        commit = repository.commit({place: written.getvalue().to_pybytes()})
        repository.branches[table.revision] = commit


@pytest.mark.slow
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_prepared_as_in_its_comment(path, hub, tmp_path):
    kinds = {"dpo": "rl", "rl": "rl", "sft": "sft", "harmony": "harmony", "scores": "embeddings"}
    kind = next((kind for name, kind in kinds.items() if name in path.stem.split("-")), "pretrain")
    written = json.loads(path.read_text())
    settings = dict(re.findall(r"(\w+)=(\w+)", written["_comment"].replace("tokenizer.model=", "tokenizer=")))
    if "tokenizer" in settings:
        settings["tokenizer"] = {"model": str(byte_level_bpe(tmp_path / "model", special=CHAT_MARKERS))}
    sources = load_blend(str(path)).training()
    assert len({(source.path, source.subset, source.split) for source in sources}) == len(sources)
    if not path.stem.startswith("tiny"):
        publish_rows(hub, sources, kind)
    _, manifest = prepare_here(kind, str(path), tmp_path / "out", **settings)
    totals = manifest["totals"]
    assert totals["datasets"].keys() == {f"datasets/{source.name}" for source in sources}
    assert all(counts["documents"] for counts in totals["datasets"].values())
    assert totals["dropped"].keys() <= {"used_in", "filtered"}


PAGES = {
    "README.md": "pretrain",
    "docs/blend.md": "pretrain",
    "docs/budgets.md": "pretrain",
    "docs/data-formats.md": "sft",
    "docs/fim.md": "pretrain",
    "docs/pretrain.md": "pretrain",
    "docs/rl.md": "rl",
    "docs/sources.md": "pretrain",
}
"""Pages with a blend, or a dataset of one, and its kind. `tests/flows/test_tutorials.py` follows those that save theirs."""


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_blends_in_pages_are_prepared(page, hub, tmp_path):
    blocks = re.findall(r"^```json\n(.*?)^```$", (BLENDS.parent / page).read_text(), re.MULTILINE | re.DOTALL)
    (written,) = (json.loads(block) for block in blocks if '"path"' in block)
    blend, kind = written if "datasets" in written else {"datasets": [written]}, PAGES[page]
    if "tokens" in blend:
        blend["tokens"] = 50_000
    sources = load_blend(blend).training()
    publish_rows(hub, [source for source in sources if source.path.startswith("hf://")], kind)
    for source, entry in zip(sources, blend["datasets"], strict=True):
        if "://" not in source.path or source.path.startswith("s3://"):
            entry["path"] = str(tmp_path / f"{source.name}.jsonl")
            Path(entry["path"]).write_text(lines_for(source, kind, ""))
    controls = (*CHAT_MARKERS, "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>")
    model = str(byte_level_bpe(tmp_path / "model", special=controls))
    tokenizer = {"tokenizer": {"model": model}} if kind == "pretrain" else {}
    _, manifest = prepare_here(kind, blend, tmp_path / "out", **tokenizer)
    assert all(counts["documents"] for counts in manifest["totals"]["datasets"].values())
