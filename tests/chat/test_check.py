"""Before a run a template and a tokenizer either show that their masks come out right, or are refused with the reason."""

import itertools
import json

import pyarrow as pa
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from tokenmill.tasks.chat import check
from tokenmill.tasks.chat.check import checked_renderer, load_template, renderer_of, text_encoder
from tokenmill.tasks.chat.conversation import Conversation, Rejected
from tokenmill.tasks.chat.encoding import Batch
from tokenmill.tasks.chat.loss import LossPolicy
from tokenmill.tasks.chat.probes import PROBES
from tokenmill.tasks.chat.programs import Programs
from tokenmill.tasks.chat.template import ChatTemplate
from tokenmill.tasks.errors import InputError
from tokenmill.tasks.tokenize.load import find_vocabulary
from tokenmill.tasks.tokenize.settings import TokenizerSource

from tests.tokenize.small_vocabularies import TRAINING_TEXT, VERBATIM, byte_level_bpe, sentencepiece_model, word_piece

IM = ("<|im_start|>", "<|im_end|>")
ASKS = "{{ '<|im_start|>assistant\n' if add_generation_prompt }}"
LOOP = "{% for m in messages %}"
HEAD = "{{ '<|im_start|>' ~ m.role ~ '\n' }}"
WORDS = "{{ m.content or '' }}"
CALLS = "{% for c in m.tool_calls or [] %}{{ '<call>' ~ c.function.name }}{% endfor %}"
END = "{{ '<|im_end|>\n' }}"
GOOD = LOOP + HEAD + WORDS + CALLS + END + "{% endfor %}" + ASKS
TAGGED = LOOP + HEAD + "{% if m.role == 'assistant' %}{% generation %}" + WORDS + CALLS + END
TAGGED += "{% endgeneration %}{% else %}" + WORDS + END + "{% endif %}{% endfor %}" + ASKS


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory):
    return found(byte_level_bpe(tmp_path_factory.mktemp("vocabulary"), special=("<s>", "<|endoftext|>", *IM)))


def found(folder):
    return find_vocabulary(TokenizerSource(model=str(folder)))


@pytest.fixture
def checked(tmp_path, vocabulary):
    """`checked(source)`: the renderer of a template after its self-check, and what is to be known about it."""

    def of(source, policy=None, split="auto", special="literal", used=vocabulary, **variables):
        template = ChatTemplate(source, variables)
        return checked_renderer(template, used, policy or LossPolicy(), split, special, str(tmp_path / "store"))

    return of


def trained(renderer, used, talk):
    """What is trained on, written out by the tokenizer, per sequence."""
    sequences = renderer.sequences(talk)
    assert not isinstance(sequences, Rejected), sequences
    batch = Batch()
    for pieces in sequences:
        batch.add(pieces)
    encoded = batch.encode(text_encoder(used, renderer.controls, "reference", "literal"))
    spans = itertools.pairwise(encoded.offsets.tolist())
    return [used.decode(encoded.ids[start:stop][encoded.trained[start:stop] == 1].tolist()) for start, stop in spans]


TALK = Conversation(
    [{"role": "user", "content": "2 * 3?"}, {"role": "assistant", "content": "6."}, {"role": "user", "content": "* 2?"},
     {"role": "assistant", "content": "12!"}, {"role": "user", "content": "* 2?"}, {"role": "assistant", "content": "24"}],
    [],
)  # fmt: skip


def test_a_good_template_is_taken(checked, vocabulary):
    outcome = checked(GOOD)
    assert outcome.refused == {}
    assert trained(outcome.renderer, vocabulary, TALK) == ["6.<|im_end|>12!<|im_end|>24<|im_end|>"]
    assert dict(outcome.renderer.controls.ids) == {token: vocabulary.controls[token] for token in IM}
    assert outcome.renderer.openings.prompts == ("<|im_start|>assistant\n",)


@pytest.mark.parametrize("policy", [pytest.param(LossPolicy(on, *flags), marks=[pytest.mark.slow] * (not all(flags))) for on in ("assistant_all", "last_turn", "final_only") for flags in itertools.product([True, False], repeat=3)])  # fmt: skip
def test_the_bundled_template_is_taken_under_every_policy(vocabulary, tmp_path, policy):
    template = load_template("nano3", vocabulary, {})
    outcome = checked_renderer(template, vocabulary, policy, "auto", "literal", str(tmp_path))
    assert all(reason.startswith("nothing_trained") for reason in outcome.refused.values())
    assert outcome.renderer == renderer_of(template, vocabulary, policy, "auto", "literal")
    assert outcome.warnings == []


FAULTS = {
    "no loop over messages": ("{{ messages[0].content ~ '<|im_end|>' ~ messages[1].content ~ '<|im_end|>' }}" + ASKS, "does not write message"),
    "answers that are left out": (LOOP + "{% if m.role != 'assistant' %}" + HEAD + WORDS + END + "{% endif %}{% endfor %}" + ASKS, "does not write message 2"),
    "content that is left out": (LOOP + HEAD + "{{ m.content if m.role == 'user' }}" + END + "{% endfor %}" + ASKS, "content of message 2"),
    "content that is changed": (LOOP + HEAD + "{{ m.content | upper }}" + END + "{% endfor %}" + ASKS, "content of message 2"),
    "everything twice": (LOOP + HEAD + WORDS + END + "{% endfor %}" + LOOP + WORDS + "{% endfor %}" + ASKS, "two places"),
    "it refuses everything": ("{{ raise_exception('not today') }}", "not today"),
    "it dies": (LOOP + HEAD + "{{ m.content + 1 }}" + END + "{% endfor %}" + ASKS, "TypeError"),
    "it writes nothing": ("", "does not write message 2"),
    "answers that do not begin as the prompt does": (GOOD.replace(ASKS, "{{ 'Now, assistant:' if add_generation_prompt }}"), "generation prompt"),
    "tags around nothing": (TAGGED.replace("{% generation %}", "{% generation %}{% endgeneration %}{% if true %}").replace("{% endgeneration %}{% else %}", "{% endif %}{% else %}"), "mask"),
    "tags around the end alone": (TAGGED.replace("{% generation %}" + WORDS, WORDS + "{% generation %}"), "mask"),
    "tags around the header alone": (LOOP + "{% generation %}" + HEAD + "{% endgeneration %}" + WORDS + END + "{% endfor %}" + ASKS, "mask"),
    "tags around users": (TAGGED.replace("m.role == 'assistant'", "m.role == 'user'"), "mask"),
    "tags around the whole": ("{% generation %}" + LOOP + HEAD + WORDS + END + "{% endfor %}{% endgeneration %}" + ASKS, "mask"),
    "tags around half of the answer": (TAGGED.replace(WORDS + CALLS, "{{ m.content[:1] }}{% endgeneration %}{{ m.content[1:] }}{% generation %}", 1).replace("{% generation %}" + END + "{% endgeneration %}", END), "mask"),
}  # fmt: skip


@pytest.mark.parametrize(("source", "reason"), FAULTS.values(), ids=FAULTS)
def test_templates_without_right_masks_are_rejected(checked, source, reason):
    with pytest.raises(InputError, match=r"^chat_template: ") as refusal:
        checked(source)
    assert reason in str(refusal.value)


ODD = {
    "a loop over numbers": "{% for n in range(messages | length) %}{% set m = messages[n] %}" + HEAD + WORDS + END + "{% endfor %}" + ASKS,
    "a look at what follows, before the answer": LOOP + HEAD + "{% for n in messages[loop.index:] %}{{ n.missing }}{% endfor %}" + WORDS + END + "{% endfor %}" + ASKS,
    "a look at what follows, behind the answer": LOOP + HEAD + WORDS + "{% for n in messages[loop.index:] %}{{ n.missing }}{% endfor %}" + END + "{% endfor %}" + ASKS,
    "a look at what came before": LOOP + "{% for n in messages[:loop.index0] %}{{ n.missing }}{% endfor %}" + HEAD + WORDS + END + "{% endfor %}" + ASKS,
    "a look at all, now and then": LOOP + HEAD + "{% if loop.index == 2 %}{% for n in messages %}{{ n.missing }}{% endfor %}{% endif %}" + WORDS + END + "{% endfor %}" + ASKS,
    "the last message first": "{% for m in messages[::-1] %}" + HEAD + WORDS + END + "{% endfor %}" + ASKS,
    "the last message by itself": "{% for m in messages[:-1] %}" + HEAD + WORDS + END + "{% endfor %}{% for m in messages[-1:] %}" + HEAD + WORDS + END + "{% endfor %}" + ASKS,
    "answers before questions": "{% for m in messages if m.role == 'assistant' %}" + HEAD + WORDS + END + "{% endfor %}{% for m in messages if m.role != 'assistant' %}" + HEAD + WORDS + END + "{% endfor %}" + ASKS,
    "the end of a message in the next turn of the loop": LOOP + "{{ '<|im_end|>\n' if not loop.first }}" + HEAD + WORDS + "{% endfor %}{{ '<|im_end|>\n' }}" + ASKS,
    "a message in a message": LOOP + HEAD + "{% for n in [m] %}" + WORDS + "{% endfor %}" + END + "{% endfor %}" + ASKS,
    "words behind the end": LOOP + HEAD + WORDS + END + "{{ 'Next:' }}{% endfor %}" + ASKS,
    "a question with its answer": "{% for m in messages %}{% if m.role == 'user' %}" + HEAD + WORDS + END + "{% set m = messages[loop.index] %}{% if m %}" + HEAD + WORDS + END + "{% endif %}{% endif %}{% endfor %}" + ASKS,
}  # fmt: skip


@pytest.mark.parametrize("source", ODD.values(), ids=ODD)
def test_odd_templates_are_rejected_or_right(checked, vocabulary, source):
    """Never taken and wrong: every answer through the end of its turn, and nothing else."""
    try:
        outcome = checked(source)
    except InputError:
        return
    answers = {"6.<|im_end|>", "12!<|im_end|>", "24<|im_end|>"}
    (written,) = trained(outcome.renderer, vocabulary, TALK)
    assert {f"{each}<|im_end|>" for each in written.split("<|im_end|>")[:-1]} == answers
    assert len(written) == sum(map(len, answers))


@pytest.mark.parametrize("source", [GOOD, TAGGED], ids=["good", "tagged"])
def test_unsupported_features_are_reported(checked, source):
    silent = source.replace(CALLS, "")
    outcome = checked(silent)
    assert {name for name, reason in outcome.refused.items() if reason.startswith("tool_calls_left_out")} == {
        "a tool call", "parallel tool calls", "tools and reasoning in several turns",
    }  # fmt: skip
    picky = LOOP + "{{ raise_exception('no systems here') if m.role == 'system' }}" + source.removeprefix(LOOP)
    refused = checked(picky).refused
    assert {name for name, probe in PROBES.items() if probe.messages[0]["role"] == "system"} == set(refused)
    assert all("no systems here" in reason for reason in refused.values())


def test_markers_that_are_plain_text_are_a_warning(checked):
    assert checked(GOOD).warnings == []
    (warning,) = checked(GOOD.replace("<|im_start|>", "### ").replace("<|im_end|>", "***")).warnings
    assert "control token" in warning


# Tokenizers.


def saved(tokenizer, folder, **config):
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    return folder


def trained_bpe(*, prefix=False, normalizer=None, **flags):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        TRAINING_TEXT, trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)
    )
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True, **flags) for token in IM])
    return tokenizer


def metaspace():
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=["<unk>"], show_progress=False)
    tokenizer.train_from_iterator(TRAINING_TEXT, trainer)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in IM])
    return tokenizer


UNFIT = {
    "it puts a space before every text": lambda path: saved(trained_bpe(prefix=True), path),
    "it puts a space before every text, as Llama did": lambda path: saved(metaspace(), path),
    "it writes everything small": lambda path: saved(trained_bpe(normalizer=normalizers.Lowercase()), path),
    "it takes blanks away": lambda path: saved(trained_bpe(normalizer=normalizers.Strip()), path),
    "its control tokens swallow the blanks behind them": lambda path: saved(trained_bpe(rstrip=True), path),
    "it knows no line breaks": word_piece,
    "SentencePiece with a space in front": lambda path: sentencepiece_model(path / "a.model", "bpe", **VERBATIM).parent,
}


@pytest.mark.parametrize("make", UNFIT.values(), ids=UNFIT)
def test_lossy_tokenizers_are_rejected(checked, tmp_path, make):
    with pytest.raises(InputError, match=r"^chat_template: .*tokenizer"):
        checked(GOOD, used=found(make(tmp_path / "tokenizer")))


# Memory.


def test_an_outcome_is_remembered(checked, monkeypatch):
    source = GOOD.replace(CALLS, "")
    first = checked(source)
    monkeypatch.setattr(check, "_require_right", None)  # looking again would fail now
    again = checked(source)
    assert (again.refused, again.warnings) == (first.refused, first.warnings)
    assert first.refused
    for other in (
        {"policy": LossPolicy("last_turn")},
        {"split": "never"},
        {"special": "allow"},
        {"used": None},
        {"x": 1},
    ):
        with pytest.raises((TypeError, AttributeError)):
            checked(source, **other)
    with pytest.raises(TypeError):
        checked(source + " ")


# Text between control tokens.


def test_tokens_that_only_the_template_makes_control_tokens_are_text_in_data(tmp_path):
    tokenizer = trained_bpe()
    tokenizer.add_tokens([AddedToken("<call>", normalized=False), AddedToken("<other>", normalized=False)])
    used = found(saved(tokenizer, tmp_path / "tokenizer"))
    renderer = renderer_of(ChatTemplate(GOOD, {}), used, LossPolicy(), "auto", "literal")
    assert set(renderer.controls.ids) == {*IM, "<call>"}
    encoder = text_encoder(used, renderer.controls, "reference", "literal")
    ids = set(_encode(encoder, "<call><other><|im_end|>"))
    assert used.controls["<call>"] not in ids
    assert used.controls["<other>"] in ids, "text to the template is text as the tokenizer sees it"


def test_user_tags_are_text_and_answer_tags_are_tokens(tmp_path):
    """For a template that doesn't write them, and a tokenizer that doesn't flag them as special, as Qwen's."""
    tokenizer = trained_bpe()
    tokenizer.add_tokens([AddedToken(tag, normalized=False) for tag in ("<think>", "</think>", "<tool_call>")])
    used = found(saved(tokenizer, tmp_path / "tokenizer"))
    question, answer = "Is <think> a tag? <tool_call>", "<think>Yes.</think> It is."
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    plain = renderer_of(ChatTemplate(GOOD, {}), used, LossPolicy(), "auto", "literal")
    assert set(plain.controls.written.ids) == {*IM, "<call>"} & set(used.controls)
    for renderer in (plain, Programs(plain)):
        for number in range(6):  # a program is learned at the fourth
            talk = Conversation([{**turns[0], "content": f"{question} {number}"}, turns[1]], [])
            batch = Batch()
            batch.add(renderer.sequences(talk)[0])
            encoded = batch.encode(text_encoder(used, plain.controls, "reference", "literal"))
            ids = encoded.ids.tolist()
            trained = encoded.ids[encoded.trained == 1].tolist()
            assert trained == tokenizer.encode(f"{answer}<|im_end|>").ids
            assert [ids.count(used.controls[tag]) for tag in ("<think>", "</think>", "<tool_call>")] == [1, 1, 0]
            assert used.decode(ids) == (
                f"<|im_start|>user\n{question} {number}<|im_end|>\n<|im_start|>assistant\n{answer}<|im_end|>\n"
            )


def _encode(encoder, words):
    return encoder.encode(pa.array([words], pa.large_string())).ids.tolist()


def test_mask_must_begin_at_the_end_of_the_prompt(checked, monkeypatch):
    """The check asks the template again, and does not trust what the probes have found."""
    right = check.completions

    def one_late(*args):
        found = right(*args)
        late = (
            {} if isinstance(found, Rejected) else {n: each._replace(start=each.start + 1) for n, each in found.items()}
        )
        return late or found

    monkeypatch.setattr(check, "completions", one_late)
    with pytest.raises(InputError, match="generation prompt ends at"):
        checked(GOOD)


def test_a_template_that_needs_tools_is_taken_with_tools(checked):
    outcome = checked("{{ raise_exception('no tools') if not tools }}" + GOOD)
    assert "no tools" in outcome.refused["one turn"]
    assert "a tool call" not in outcome.refused


def test_a_token_of_a_role_that_only_a_rendering_shows_is_a_control_token(tmp_path):
    tokenizer = trained_bpe()
    tokenizer.add_tokens([AddedToken("<|developer|>", normalized=False)])
    used = found(saved(tokenizer, tmp_path / "tokenizer"))
    source = GOOD.replace("'<|im_start|>' ~ m.role", "'<|' ~ m.role ~ '|>'")
    assert "<|developer|>" in renderer_of(ChatTemplate(source, {}), used, LossPolicy(), "auto", "literal").controls.ids
