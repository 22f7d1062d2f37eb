"""A template is found by the name it goes by, and a name that goes for none is never rendered as one."""

import json

import pytest
from tokenmill.tasks.chat.check import load_template
from tokenmill.tasks.chat.conversation import Conversation
from tokenmill.tasks.chat.parse import conversation
from tokenmill.tasks.errors import InputError
from tokenmill.tasks.tokenize.load import find_vocabulary
from tokenmill.tasks.tokenize.settings import TokenizerSource
from transformers.utils.chat_template_utils import render_jinja_template

from tests.peers import chat_templates
from tests.peers.conversations import SEARCH, WEATHER, assistant, call, system, talk, tool, user
from tests.tokenize.small_vocabularies import byte_level_bpe

SOURCE = "{% for m in messages %}{{ m.content }}{% endfor %}"
SHORT = talk(user("q"), assistant("a"))
CALLING = talk(
    system("S."), user("Rain?"), assistant("", call("weather", place="Ulm")), tool("no"), assistant("No."), tools=[WEATHER, SEARCH]
)  # fmt: skip


@pytest.fixture
def vocabulary(tmp_path):
    """`vocabulary(own)`: one whose tokenizer has that template of its own."""
    folder = byte_level_bpe(tmp_path / "tokenizer", special=("<s>", "<|endoftext|>", "<|im_start|>", "<|im_end|>"))

    def of(own=None):
        (folder / "chat_template.jinja").unlink(missing_ok=True)
        if own is not None:
            (folder / "chat_template.jinja").write_text(own, "utf-8")
        return find_vocabulary(TokenizerSource(model=str(folder)))

    return of


def read(record):
    found = conversation(record, None, "tools")
    assert isinstance(found, Conversation)
    return found


def write(template, record=CALLING):
    given = read(record)
    return template.render(given.messages, given.tools).text


def test_the_tokenizers_own_knows_the_tokenizers_tokens(vocabulary):
    """As in transformers, which gives every template bos_token, eos_token and so on."""
    found = load_template("tokenizer", vocabulary("{{ bos_token }}" + SOURCE + "{{ eos_token }}"), {})
    assert write(found, SHORT) == "<s>qa<|endoftext|>"
    chosen = load_template("tokenizer", vocabulary("{{ bos_token }}" + SOURCE), {"bos_token": "<x>"})
    assert write(chosen, SHORT) == "<x>qa"


def test_templates_from_files_and_texts_know_the_tokenizers_tokens(vocabulary, tmp_path):
    (tmp_path / "own.jinja").write_text("{{ bos_token }}" + SOURCE, "utf-8")
    for chosen in (str(tmp_path / "own.jinja"), "{{ bos_token }}" + SOURCE):
        assert write(load_template(chosen, vocabulary(), {}), SHORT) == "<s>qa"


@pytest.mark.parametrize(
    "field", [SOURCE, [{"name": "tool_use", "template": "no"}, {"name": "default", "template": SOURCE}], None]
)
def test_the_tokenizers_own_in_its_config_or_in_a_file(vocabulary, tmp_path, field):
    config = tmp_path / "tokenizer" / "tokenizer_config.json"
    own = vocabulary(None if field else SOURCE)
    if field:
        config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": field}))
    assert load_template("tokenizer", vocabulary() if field else own, {}).source == SOURCE


@pytest.mark.parametrize("named", [None, [{"name": "rag", "template": SOURCE}]])
def test_a_tokenizer_without_one(vocabulary, tmp_path, named):
    config = tmp_path / "tokenizer" / "tokenizer_config.json"
    vocabulary()
    if named:
        config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": named}))
    with pytest.raises(InputError, match=r"chat_template: the tokenizer doesn't include a template .*nano3"):
        load_template("tokenizer", vocabulary(), {})


def test_a_file(vocabulary, tmp_path, monkeypatch):
    path = tmp_path / "own.jinja"
    path.write_text(SOURCE + "é", "utf-8")
    assert load_template(str(path), vocabulary(), {}).source == SOURCE + "é"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert load_template("~/own.jinja", vocabulary(), {}).source == SOURCE + "é"


@pytest.mark.parametrize(
    ("chosen", "remedy"),
    [
        ("nano33", "did you mean 'nano3'"),
        ("Nano3", "did you mean 'nano3'"),
        ("tokeniser", "did you mean 'tokenizer'"),
        ("chatml", "known: harmony, lightning35, nano3, tokenizer"),
        ("/no/such/file.jinja", "known: harmony, lightning35, nano3, tokenizer"),
        ("nano3.jinja", "did you mean 'nano3'"),
        (".", "not a known template, a file"),
        ("bad.jinja", "bad.jinja cannot be read: "),
    ],
)
def test_unknown_template_suggests_nearest_name(vocabulary, tmp_path, monkeypatch, chosen, remedy):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.jinja").write_bytes(b"\xff\xfe{{ x }}")
    with pytest.raises(InputError, match=r"^chat_template: ") as refusal:
        load_template(chosen, vocabulary(), {})
    assert chosen in str(refusal.value)
    assert remedy in str(refusal.value)


@pytest.mark.parametrize("chosen", ["{{ messages[0 }}", "{% for m in messages %}"])
def test_a_faulty_template_is_an_error(vocabulary, tmp_path, chosen):
    (tmp_path / "bad.jinja").write_text(chosen)
    for one in (chosen, str(tmp_path / "bad.jinja")):
        with pytest.raises(InputError, match=r"^chat_template:1: "):
            load_template(one, vocabulary(), {})
    with pytest.raises(InputError, match=r"^chat_template:1: "):
        load_template("tokenizer", vocabulary(chosen), {})


def test_variables_go_to_the_template(vocabulary, tmp_path):
    (tmp_path / "own.jinja").write_text("{{ day }}", "utf-8")
    for chosen, own in (("{{ day }}", None), (str(tmp_path / "own.jinja"), None), ("tokenizer", "{{ day }}")):
        assert write(load_template(chosen, vocabulary(own), {"day": "Monday"}), SHORT) == "Monday"
    budget = load_template("nano3", vocabulary(), {"reasoning_budget": 7})
    assert "{thinking token budget: 7}" in write(budget, SHORT)
    effort = load_template("lightning35", vocabulary(), {"medium_effort": True})
    assert "{reasoning effort: efficient}" in write(effort, SHORT)


# The words in which a model was told how to call tools.


def instructions(text):
    return text.partition("</tools>")[2].partition("<|im_end|>")[0]


@pytest.mark.parametrize(
    ("chosen", "name"),
    [("nano3", "nemotron_3_nano"), ("nano3", "nemotron_3_nano_training"), ("lightning35", "nemotron_3_ultra")],
)
def test_they_are_the_models_own_where_its_template_is_of_the_same_kind(vocabulary, chosen, name):
    own = chat_templates.template(name)
    found = load_template(chosen, vocabulary(own), {})
    given = read(CALLING)
    (theirs,), _ = render_jinja_template([given.messages], tools=given.tools, chat_template=own)
    assert write(found) == theirs
    assert instructions(theirs) != instructions(write(load_template("nano3", vocabulary(), {})))


def test_a_variable_wins_over_them(vocabulary):
    own = chat_templates.template("nemotron_3_nano")
    found = load_template("nano3", vocabulary(own), {"tool_instructions": "\nAs you like."})
    assert instructions(write(found)) == "\nAs you like."


@pytest.mark.parametrize(
    "own",
    [
        chat_templates.template("qwen3"), chat_templates.template("llama3"), chat_templates.CHATML, SOURCE,
        "{{ raise_exception('<function=') }}", "<function= </tools>" + SOURCE, "</tools> <function=" + SOURCE,
        "</tools> something else <|im_end|> <function=" + SOURCE,
    ],
)  # fmt: skip
def test_templates_for_other_tokenizers_are_skipped(vocabulary, own):
    assert instructions(write(load_template("nano3", vocabulary(own), {}))) == instructions(
        write(load_template("nano3", vocabulary(), {}))
    )


def test_faulty_tokenizer_template_does_not_affect_others(vocabulary):
    assert write(load_template("nano3", vocabulary("<function= {{ messages[0 }}"), {}))


def test_only_the_bundled_template_takes_them(vocabulary):
    own = chat_templates.template("nemotron_3_nano")
    assert "tool_instructions" not in load_template("{{ tool_instructions }}" + SOURCE, vocabulary(own), {}).variables
