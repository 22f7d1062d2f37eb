"""Documents rearranged to fill in the middle lose nothing, are the same everywhere, and look as Megatron makes them."""

import importlib.util
import json
import math
import sys
import textwrap
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenmill.tasks.blend.models import Fim
from tokenmill.tasks.errors import InputError
from tokenmill.tasks.report.view import view_output
from tokenmill.tasks.report.why import why_row
from tokenmill.tasks.shards.kinds import preparation
from tokenmill.tasks.strict import parse
from tokenmill.tasks.tokenize.encoders import Tokens
from tokenmill.tasks.tokenize.fim import FimEncoder, FimRecipe, fim_recipe
from tokenmill.tasks.tokenize.gate import NASTY
from tokenmill.tasks.tokenize.load import load_vocabulary
from tokenmill.tasks.tokenize.settings import PretrainRecipe, PretrainSettings, TokenizerSettings

from tests import preparing_dedup
from tests.building import plan_here
from tests.peers import vocabularies
from tests.preparing import blend_of, ids_of_documents, prefixes_of, prepare, write_lines
from tests.tokenize.small_vocabularies import VERBATIM, byte_level_bpe, reference, sentencepiece_model

PREFIX, MIDDLE, SUFFIX = 256, 257, 258
CONTROL = ["<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"]
NOTHING_HELD_OUT = {"valid": 0, "test": 0}
SPLIT = "\x1e"
CODE = [path.read_text("utf-8") for path in sorted(Path(textwrap.__file__).parent.glob("[a-d]*.py"))]


class Bytes:
    """An encoder whose ids are the bytes of a text, so that nothing but the arrangement is under test."""

    def encode(self, texts):
        pieces = [np.frombuffer(text.encode(), np.uint8).astype(np.uint32) for text in texts.to_pylist()]
        offsets = np.cumsum([0, *map(len, pieces)])
        return Tokens(np.concatenate([np.zeros(0, np.uint32), *pieces]), offsets)


def as_text(ids):
    return bytes(ids).decode()


def recipe_of(prefix=PREFIX, middle=MIDDLE, suffix=SUFFIX, **chosen):
    fim = parse(Fim, chosen, "fim").model_dump(exclude={"prefix_token", "middle_token", "suffix_token", "skip_prefix"})
    return FimRecipe(**fim, no_prefix=chosen.get("skip_prefix"), prefix=prefix, middle=middle, suffix=suffix)


def encoded(texts, recipe, encoder=None, **more):
    """The ids of each text as lists, and the counts."""
    column = pa.array(["not in the slice", *texts], pa.large_string())[1:]
    filled = FimEncoder(encoder or Bytes(), recipe, **more).encode(column, np.ones(len(texts), np.bool_))
    return [filled.tokens.ids[start:stop].tolist() for start, stop in pairwise(filled.tokens.offsets)], filled.counts


def taken_apart(ids, recipe, decode, separator=None):
    """What stands before the first rearranged fragment, and prefix, middle, suffix, layout and text behind of each.

    With an empty prefix both layouts are the same; it counts as PSM.
    """
    marks = [place for place, each in enumerate(ids) if each == recipe.prefix]
    fragments = []
    for start, stop in pairwise([*marks, len(ids)]):
        block = ids[start + 1 : stop]
        suffix, middle = block.index(recipe.suffix), block.index(recipe.middle)
        prefix, suffix, rest = (
            decode(each) for each in (block[:suffix], block[suffix + 1 : middle], block[middle + 1 :])
        )
        middle, found, behind = rest.partition(separator) if separator else (rest, "", "")
        fragments.append((prefix, middle, suffix, found + behind))
    return decode(ids[: marks[0]] if marks else ids), fragments


def inverted(ids, recipe, decode, separator=None):
    """The text that was rearranged."""
    before, fragments = taken_apart(ids, recipe, decode, separator)
    return before + "".join(prefix + middle + suffix + behind for prefix, middle, suffix, behind in fragments)


rates = st.sampled_from([0.0, 0.3, 1.0])
texts = st.lists(
    st.one_of(
        st.text(max_size=40),
        st.text("a\r\n\t é漢😀\u0301\u200d" + SPLIT, max_size=30),
        st.sampled_from([*(text for text in NASTY if len(text) < 400), *CONTROL, "".join(CONTROL), "x", "\r\n", "é"]),
    ),
    max_size=12,
)


@given(texts, rates, rates, st.sampled_from([None, 0.5, 1.0]), st.integers(0, 2**64 - 1))
@example([], 1.0, 0.5, None, 0)
@example(["", "a", "", "😀", "\r\n"], 1.0, 0.3, None, 0)
@example([f"a{SPLIT}{SPLIT}b{SPLIT}"], 1.0, 0.0, 1.0, 1)
def test_every_document_can_be_put_back(texts, rate, spm_rate, fragment_rate, seed):
    split = {} if fragment_rate is None else {"split_sample": SPLIT, "fragment_rate": fragment_rate}
    recipe = recipe_of(rate=rate, spm_rate=spm_rate, seed=seed, **split)
    documents, counts = encoded(texts, recipe)
    assert [inverted(ids, recipe, as_text, SPLIT if split else None) for ids in documents] == texts
    assert [ids == [] for ids in documents] == [text == "" for text in texts]
    assert counts["psm"] + counts["spm"] == sum(ids.count(PREFIX) for ids in documents)
    assert counts["documents"] == sum(PREFIX in ids for ids in documents)
    if rate == 1 and fragment_rate in {None, 1.0}:
        assert counts["psm"] + counts["spm"] == sum(
            bool(part) for text in texts for part in (text.split(SPLIT) if split else [text])
        )


@given(texts, st.lists(st.integers(0, 12), max_size=3))
def test_batches_do_not_matter(texts, cuts):
    recipe = recipe_of(rate=0.7, split_sample=SPLIT, fragment_rate=0.5)
    bounds = sorted({0, len(texts), *(min(cut, len(texts)) for cut in cuts)})
    batches = [encoded(texts[start:stop], recipe)[0] for start, stop in pairwise(bounds)]
    assert [ids for batch in batches for ids in batch] == encoded(texts, recipe)[0]


def test_the_rates_are_those_asked_for_and_cuts_are_uniform():
    texts = [f"document number {number} é\n" for number in range(10_000)]
    _, counts = encoded(texts, recipe_of(rate=0.4, spm_rate=0.25))
    assert within_three_sigma(counts["documents"], 10_000, 0.4)
    assert within_three_sigma(counts["spm"], counts["documents"], 0.25)
    documents, _ = encoded(texts, recipe_of(rate=0.4, spm_rate=0))
    fragments = [taken_apart(ids, recipe_of(), as_text)[1][0] for ids in documents if PREFIX in ids]
    lengths = np.array([[len(piece) for piece in fragment[:3]] for fragment in fragments])
    places = lengths.sum(axis=1) + 1  # for each of the two cuts, of which one or both are the first with this chance
    first = 1 - ((places - 1) / places) ** 2
    for piece in (0, 2):
        empty = np.count_nonzero(lengths[:, piece] == 0)
        assert within(empty, first.sum(), math.sqrt((first * (1 - first)).sum()))


def within_three_sigma(count, of, rate):
    return within(count, of * rate, math.sqrt(of * rate * (1 - rate)))


def within(count, expected, sigma):
    return abs(count - expected) < 3 * sigma


def test_fragments_are_chosen_one_by_one():
    repeated, texts = SPLIT.join(["same text"] * 50), [f"{number}{SPLIT}b" for number in range(2_000)]
    recipe = recipe_of(rate=1, split_sample=SPLIT, fragment_rate=0.4)
    [document], counts = encoded([repeated], recipe)
    assert within_three_sigma(counts["psm"] + counts["spm"], 50, 0.4)
    assert len({fragment[:3] for fragment in taken_apart(document, recipe, as_text, SPLIT)[1]}) > 5
    _, counts = encoded(texts, recipe)
    assert within_three_sigma(counts["psm"] + counts["spm"], 4_000, 0.4)
    _, counts = encoded(texts, recipe_of(rate=0.5, split_sample=SPLIT, fragment_rate=1))
    assert within_three_sigma(counts["documents"], 2_000, 0.5)
    assert counts["psm"] + counts["spm"] == 2 * counts["documents"]


def test_skip_prefix_leaves_documents_as_they_are():
    texts = ["#! a", "a #!", "#", f"#! a{SPLIT}b{SPLIT}#! c"]
    recipe = recipe_of(rate=1, skip_prefix="#!", split_sample=SPLIT, fragment_rate=1)
    documents, counts = encoded(texts, recipe)
    assert [PREFIX in ids for ids in documents] == [False, True, True, True]
    assert counts == {"documents": 3, "psm": counts["psm"], "spm": 3 - counts["psm"]}
    assert as_text(documents[3][:5]) == f"#! a{SPLIT}"
    assert as_text(documents[3][-5:]) == f"{SPLIT}#! c"


def test_long_documents_are_not_rearranged():
    texts = ["short", "long " * 20, "a" * 10, "漢字"]
    documents, counts = encoded(texts, recipe_of(rate=1), most=13)
    assert [PREFIX in ids for ids in documents] == [True, False, True, True]
    assert as_text(documents[1]) == texts[1]
    assert counts["documents"] == 3


def test_documents_with_fim_tokens_are_not_rearranged():
    documents, counts = encoded([f"a{CONTROL[1]}b", "ab"], recipe_of(rate=1), reserved=CONTROL)
    assert as_text(documents[0]) == f"a{CONTROL[1]}b"
    assert counts["documents"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("family", ["cl100k_base", "deepseek"])
@pytest.mark.parametrize("treatment", ["literal", "allow"])
def test_real_vocabularies_give_back_real_code(tmp_path_factory, family, treatment):
    model = vocabularies.deepseek(tmp_path_factory.mktemp("vocabularies")) if family == "deepseek" else family
    vocabulary = load_vocabulary(TokenizerSettings(model=str(model)))
    recipe = fim_recipe(Fim(rate=1), vocabulary)
    strings = recipe.strings(vocabulary)
    guarded = vocabulary.guarding(strings)
    texts = [*CODE[:12], *(text for text in NASTY if text), *strings, f"a{min(strings)}b<|endoftext|>"]
    reserved = () if treatment == "literal" else strings
    encoder = guarded.reference(treatment == "literal")
    documents, counts = encoded(texts, recipe, encoder, reserved=reserved)
    assert counts["documents"] == len(texts) - (4 if treatment == "allow" else 0)
    for text, ids in zip(texts, documents, strict=True):
        stays = treatment == "allow" and any(each in text for each in strings)
        assert (vocabulary.decode(ids) if stays else inverted(ids, recipe, vocabulary.decode)) == text


class Megatron:
    """Megatron's own code on the ids of one document, with our choices in place of its random numbers."""

    def __init__(self, tokenizer, recipe):
        place = Path(sys.prefix) / "peers/megatron/training/datasets/fim_dataset.py"
        spec = importlib.util.spec_from_file_location("fim_dataset", place)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        wrapped = SimpleNamespace(
            ids_to_text=lambda ids, remove_special_tokens: tokenizer.decode(list(ids), skip_special_tokens=False),
            text_to_ids=lambda text: tokenizer.encode(text, add_special_tokens=False).ids,
        )
        self.dataset = object.__new__(module.GPTFIMDataset)
        self.dataset.config = SimpleNamespace(tokenizer=SimpleNamespace(_tokenizer=wrapped))
        self.dataset.fim_rate = self.dataset.fragment_fim_rate = self.dataset.fim_spm_rate = None
        self.dataset.prefix_tok_id, self.dataset.middle_tok_id, self.dataset.suffix_tok_id = (
            recipe.prefix, recipe.middle, recipe.suffix,
        )  # fmt: skip
        self.dataset.pad_tok_id = self.dataset.no_fim_prefix = None
        split = recipe.split_sample
        self.dataset.fim_split_sample = None if split is None else tokenizer.token_to_id(split)

    def rearrange(self, ids, answers):
        """`answers` are the results of binomial and randint in turn."""
        answers = iter(answers)
        self.dataset.np_rng = SimpleNamespace(binomial=lambda n, p: next(answers), randint=lambda **_: next(answers))
        found = self.dataset._fim_split_and_permute_sequence(np.array(ids))  # noqa: SLF001 - what it asks of a sample
        assert next(answers, None) is None
        return found.tolist()


@pytest.mark.slow
@pytest.mark.parametrize("split", [None, "<|turn|>"])
def test_megatron_makes_the_same_of_the_same_choices(tmp_path, split):
    folder = byte_level_bpe(tmp_path, special=("<s>", "<|endoftext|>", "<|turn|>", *CONTROL))
    vocabulary, tokenizer = load_vocabulary(TokenizerSettings(model=str(folder))), reference(folder, literal=False)
    some = {} if split is None else {"split_sample": split, "fragment_rate": 0.7}
    recipe = fim_recipe(Fim(rate=0.7, spm_rate=0.5, **some), vocabulary)
    nasty = [text for text in NASTY if text and not any(each in text for each in ("<s>", "<|endoftext|>"))]
    texts = [text[:200] for text in nasty] + textwrap.wrap(CODE[0], 200, replace_whitespace=False)[:100]
    texts = texts if split is None else [split.join(texts[start : start + 5]) for start in range(0, len(texts), 5)]
    megatron = Megatron(tokenizer, recipe)
    documents, counts = encoded(texts, recipe, vocabulary.reference(False))
    assert min(counts.values()) > 5
    for text, ids in zip(texts, documents, strict=True):
        whole = tokenizer.encode(text, add_special_tokens=False).ids
        assert megatron.rearrange(whole, choices(text, ids, recipe, tokenizer, split)) == ids


def choices(text, ids, recipe, tokenizer, split):
    """The answers of a random number generator that lead from a text to our ids, in the order in which Megatron asks."""
    parts = text.split(split) if split else [text]
    if len(parts) > 1:
        yield int(recipe.prefix in ids)
        if recipe.prefix not in ids:
            return
    stored = parts_of(ids, tokenizer.token_to_id(split)) if split else [ids]
    for part, found in zip(parts, stored, strict=True):
        yield int(recipe.prefix in found)
        if recipe.prefix not in found:
            continue
        suffix, middle = found.index(recipe.suffix), found.index(recipe.middle)
        behind = tokenizer.decode(found[suffix + 1 : middle], skip_special_tokens=False)
        last = len(part) - len(behind)
        if suffix > 1:
            yield [len(tokenizer.decode(found[1:suffix], skip_special_tokens=False)), last]
            yield 0
            continue
        # SPM, whose prefix and middle are told apart by their tokens alone
        wanted = found[middle + 1 :]
        encode = lambda piece: tokenizer.encode(piece, add_special_tokens=False).ids  # noqa: E731
        first = next(cut for cut in range(last + 1) if encode(part[:cut]) + encode(part[cut:last]) == wanted)
        yield [first, last]
        yield 1


def parts_of(ids, separator):
    places = [-1, *(place for place, each in enumerate(ids) if each == separator), len(ids)]
    return [ids[start + 1 : stop] for start, stop in pairwise(places)]


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return byte_level_bpe(tmp_path_factory.mktemp("small"), special=("<s>", "<|endoftext|>", *CONTROL))


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sources")
    lines = [line for text in CODE[:20] for line in text.splitlines() if line.strip()]
    code = [f"{number} {line}" for number, line in enumerate(lines[:600])]
    web = write_lines(folder / "web.jsonl", [f"page {n}" for n in range(200)])
    return [web, write_lines(folder / "code.jsonl", code)]


def with_fim(sources, **fim):
    blend = blend_of(*sources)
    blend["datasets"][1]["fim"] = fim
    return blend


def stored(output, split="train"):
    """The published bytes of a split."""
    return [Path(f"{prefix}{end}").read_bytes() for prefix in prefixes_of(output, split) for end in (".bin", ".idx")]


@pytest.fixture(scope="module")
def output(small, sources, tmp_path_factory):
    folder = tmp_path_factory.mktemp("output")
    blend = with_fim(sources, rate=0.5, spm_rate=0.3)
    _, manifest = prepare(blend, folder, tokenizer={"model": str(small)}, holdout={"valid": 0.1, "test": 0.1})
    return folder, manifest


def test_only_the_dataset_that_asks_for_it_is_rearranged(output, small, sources, tmp_path):
    folder, manifest = output
    chosen = {"tokenizer": {"model": str(small)}, "holdout": {"valid": 0.1, "test": 0.1}}
    _, plain = prepare(blend_of(*sources), tmp_path, **chosen)
    web, code = manifest["shards"]
    same = [shard["key"] == before["key"] for shard, before in zip((web, code), plain["shards"], strict=True)]
    assert same == [True, False]
    assert "facts" not in web
    facts, documents = code["facts"]["fim"], code["documents"]["train"]
    assert within_three_sigma(facts["documents"], documents, 0.5)
    assert facts["documents"] == facts["psm"] + facts["spm"]
    assert code["documents"] == plain["shards"][1]["documents"]
    assert code["tokens"]["train"] >= plain["shards"][1]["tokens"]["train"] + 3 * facts["documents"]
    for split in ("valid", "test"):
        assert stored(folder, split) == stored(tmp_path, split)


def test_view_and_why_show_rearrangements(output):
    folder, _ = output
    view = view_output(str(folder), dataset="code", rows=600)
    shown = [[(each.role, each.text) for each in pack.sequences[0].passages] for pack in view.packs]
    orders = [[role for role, _ in passages] for passages in shown]
    assert ["text"] in orders
    assert ["prefix", "suffix", "middle"] in orders
    assert ["suffix", "middle"] in orders or ["suffix", "prefix and middle"] in orders
    rearranged = next(pack for pack, order in zip(view.packs, orders, strict=True) if order[0] == "prefix")
    tokens = [CONTROL[0], CONTROL[2], CONTROL[1]]
    for passage, token in zip(rearranged.sequences[0].passages, tokens, strict=True):
        assert passage.text.startswith(token)
    line = rearranged.sequences[0].line
    [[fate]] = why_row(str(folder), f"code.jsonl:{line}")
    assert fate.detail == "rearranged as prefix, suffix, middle"
    [[fate]] = why_row(str(folder), "web.jsonl:1")
    assert fate.detail is None


def test_a_summary_counts_rearranged_documents(output):
    manifest = output[1]
    facts = manifest["shards"][1]["facts"]["fim"]
    assert preparation("pretrain").summary(manifest) == [
        f"code: {facts['documents']} documents rearranged to fill in the middle, {facts['psm']} as PSM and {facts['spm']} as SPM"
    ]


def keys(blend, output, model, **settings):
    return plan_here("pretrain", blend, output, tokenizer={"model": str(model)}, **settings).plan.keys


def test_a_rate_of_0_and_no_fim_are_the_same_shards_with_the_keys_of_before(small, sources, tmp_path):
    plain = keys(blend_of(*sources), tmp_path, small)
    assert keys(with_fim(sources, rate=0), tmp_path, small, fim={"rate": 0.5})[1] == plain[1]
    planned = plan_here("pretrain", blend_of(*sources), tmp_path, tokenizer={"model": str(small)})
    recipe = planned.plan.shards[0].identity["recipe"]
    assert "fim" not in recipe
    assert recipe.keys() == {name for name in PretrainRecipe.__dataclass_fields__ if name != "fim"}


def test_every_option_gives_other_shards(small, sources, tmp_path):
    options = [
        {"rate": 0.5}, {"rate": 0.6}, {"spm_rate": 0.2}, {"seed": 7}, {"skip_prefix": "#"}, {"split_sample": "\n", "fragment_rate": 0.5},
        {"split_sample": "\t", "fragment_rate": 0.5}, {"split_sample": "\n", "fragment_rate": 0.6},
        {"prefix_token": "<s>", "middle_token": CONTROL[1], "suffix_token": CONTROL[2]},
    ]  # fmt: skip
    found = {keys(with_fim(sources, **each), tmp_path, small)[1] for each in options}
    assert len(found) == len(options)


def test_setting_applies_to_training_data_without_its_own(small, sources, tmp_path):
    web, code = blend_of(*sources)["datasets"]
    blend = {"train": [web, {**code, "fim": {"rate": 0.2}}], "valid": [web], "test": [{**code, "fim": {"rate": 1}}]}
    planned = plan_here("pretrain", blend, tmp_path, tokenizer={"model": str(small)}, fim={"rate": 0.7})
    recipes = [shard.identity["recipe"].get("fim") for shard in planned.plan.shards]
    assert [recipe and recipe["rate"] for recipe in recipes] == [0.7, 0.2, None, 1]


def test_control_strings_in_text_follow_the_policy(small, tmp_path):
    texts = ["plain", f"a {CONTROL[0]} b", f"{''.join(CONTROL)}", "more"]
    source = write_lines(tmp_path / "code.jsonl", texts)
    vocabulary = load_vocabulary(TokenizerSettings(model=str(small)))
    found = {}
    for treatment in ("literal", "allow", "reject"):
        output = tmp_path / treatment
        _, manifest = prepare(
            blend_of(source), output, tokenizer={"model": str(small)}, fim={"rate": 1}, holdout=NOTHING_HELD_OUT,
            special_tokens_in_text=treatment, max_bad_row_fraction=1,
        )  # fmt: skip
        view = view_output(str(output), rows=4)
        found[treatment] = manifest["shards"][0]["facts"]["fim"]["documents"], manifest["totals"]["dropped"]
        if treatment == "literal":
            recipe = FimRecipe(**manifest["recipes"][0]["recipe"]["fim"])
            documents = ids_of_documents(output)
            assert [inverted(ids[:-1], recipe, vocabulary.decode) for ids in documents] == texts
        assert len(view.packs) == (2 if treatment == "reject" else 4)
    assert found == {"literal": (4, {}), "allow": (2, {}), "reject": (2, {"special_token_in_text": 2})}


@pytest.mark.slow
def test_vocabulary_without_fim_tokens_is_rejected(sources, tmp_path):
    with pytest.raises(InputError, match=r"prefix, middle and suffix tokens.*it has '<s>', '<\|endoftext\|>'"):
        keys(with_fim(sources, rate=0.5), tmp_path / "out", byte_level_bpe(tmp_path / "bare"))
    qwen = load_vocabulary(TokenizerSettings(model=str(vocabularies.qwen(tmp_path))))
    with pytest.raises(InputError, match=r"'<\|extra_0\|>'.* more"):
        fim_recipe(Fim(), qwen)
    named = {f"{part}_token": f"<|extra_{number}|>" for number, part in enumerate(("prefix", "middle", "suffix"))}
    recipe = fim_recipe(Fim(**named), qwen)
    assert recipe.strings(qwen) == set(named.values())
    with pytest.raises(InputError, match=r"fim.middle_token: .*'<\|extra_l\|>'; did you mean '<\|extra"):
        fim_recipe(Fim(**{**named, "middle_token": "<|extra_l|>"}), qwen)


def test_vocabulary_that_changes_pieces_is_rejected(tmp_path):
    model = sentencepiece_model(tmp_path / "some.model", "bpe", control_symbols=["<PRE>", "<MID>", "<SUF>"], **VERBATIM)
    with pytest.raises(InputError, match="changes the text of a document that is cut in pieces"):
        fim_recipe(Fim(), load_vocabulary(TokenizerSettings(model=str(model), add_eos=False)))


@pytest.mark.parametrize(
    ("fim", "message"),
    [
        ({"split_sample": "a"}, "split_sample and fragment_rate belong together"),
        ({"fragment_rate": 0.5}, "split_sample and fragment_rate belong together"),
        ({"prefix_token": "<PRE>"}, "three different tokens"),
        ({"prefix_token": "<PRE>", "middle_token": "<PRE>", "suffix_token": "<SUF>"}, "three different tokens"),
        ({"rate": 1.5}, "less than or equal to 1"),
        ({"spm": 0.5}, "spm_rate"),
    ],
)
def test_fim_setting_mistakes_are_reported(fim, message):
    with pytest.raises(InputError, match=message):
        parse(PretrainSettings, {"fim": fim}, "settings")


def test_other_kinds_reject_fim(sources, tmp_path):
    with pytest.raises(InputError, match=r"'fim' doesn't affect SFT.*tokenmill pretrain"):
        plan_here("sft", with_fim(sources, rate=0.5), tmp_path)


def test_deduplication_passes_the_key_on(sources, tmp_path):
    preparing_dedup.prepare(with_fim(sources, rate=0.25), tmp_path)
    blend = json.loads((tmp_path / "blend.json").read_bytes())
    assert [source.get("fim", {}).get("rate") for source in blend["datasets"]] == [None, 0.25]
