"""What names a model of the hub, and what a user sees for each state that the hub, the account or the cache can be in."""

import functools
import json
import shutil
import socket
from pathlib import Path

import pyarrow as pa
import pytest
from huggingface_hub import constants, hf_hub_download, snapshot_download
from tokenizers.pre_tokenizers import ByteLevel
from tokenmill.flows.cli import run
from tokenmill.tasks.chat.check import load_template
from tokenmill.tasks.errors import InputError, RunError
from tokenmill.tasks.score.weights import find_model
from tokenmill.tasks.sources import hub_client
from tokenmill.tasks.tokenize import load
from tokenmill.tasks.tokenize.hub_files import HubModel, named_model
from tokenmill.tasks.tokenize.load import find_vocabulary, pinned
from tokenmill.tasks.tokenize.settings import TokenizerSource

from tests.hub_server import EXPIRED
from tests.preparing import blend_of, prepare, write_lines
from tests.tokenize.small_vocabularies import sentencepiece_model, word_piece
from tests.tokenize.test_formats import kimi, llama3, tekken

IDS = ["Qwen/Qwen2.5-7B", "meta-llama/Llama-3.1-8B", "mistralai/Mistral-7B-v0.3", "Qwen/Qwen3-0.6B"]

MEMBER = "hf_member"

WEIGHTS = {"config.json": "{}", "model.safetensors": "x" * 300, "original/model.safetensors": "y"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return word_piece(tmp_path_factory.mktemp("vocabulary") / "small")


@pytest.fixture(scope="module")
def files(folder):
    """A model's repository: a tokenizer, weights, and what no tokenizer needs."""
    return {path.name: path.read_bytes() for path in folder.iterdir()} | WEIGHTS | {"README.md": "# A model"}


@pytest.fixture(autouse=True)
def forgetful():
    load.load_named.cache_clear()


def vocabulary(model, revision=None):
    return find_vocabulary(TokenizerSource(model=model, revision=revision))


LOADERS = {
    "tokenizer.model": lambda model, revision=None: vocabulary(model, revision).commit,
    "model": lambda model, revision=None: find_model(model, revision).revision,
}
"""What takes a model of the hub, by the setting that its messages begin with; each returns the commit."""


@pytest.mark.parametrize("name", IDS)
def test_ids_with_dots_prepare_the_smallest_blend(hub, files, tmp_path, capsys, name):
    hub.model(name, files)
    blend = Path(__file__).parents[2] / "blends" / "tiny.json"
    assert run(["pretrain", str(blend), "--output-dir", str(tmp_path / "out"), f"tokenizer.model={name}"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["pretrain"]["documents"] == 2048


PASTED = {
    ("org/na.me-1.5", None): HubModel("org/na.me-1.5", None),
    ("org/name", "v2"): HubModel("org/name", "v2"),
    ("bert-base-uncased", None): HubModel("bert-base-uncased", None),
    ("org/name/", None): HubModel("org/name", None),
    ("org/name@v1.0", None): HubModel("org/name", "v1.0"),
    ("org/name@v1.0", "v1.0"): HubModel("org/name", "v1.0"),
    ("org/name@feature/x", None): HubModel("org/name", "feature/x"),
    ("org/name@refs/pr/7", None): HubModel("org/name", "refs/pr/7"),
    ("hf://org/name", None): HubModel("org/name", None),
    ("hf://gpt2", None): HubModel("gpt2", None),
    ("hf://models/org/name/", "v2"): HubModel("org/name", "v2"),
    ("hf://org/name@feature%2Fx", None): HubModel("org/name", "feature/x"),
    ("hf://org/name/sub/tokenizer.json", None): HubModel("org/name", None, "sub/tokenizer.json"),
    ("hf://org/name@v1/tokenizer.json", None): HubModel("org/name", "v1", "tokenizer.json"),
    ("https://huggingface.co/org/na.me", None): HubModel("org/na.me", None),
    ("https://huggingface.co/org/na.me/", None): HubModel("org/na.me", None),
    ("huggingface.co/org/name/tree/main", None): HubModel("org/name", "main"),
    ("https://hf.co/org/name/tree/refs%2Fpr%2F7", None): HubModel("org/name", "refs/pr/7"),
    ("https://huggingface.co/org/name/tree/refs/pr/7/sub", None): HubModel("org/name", "refs/pr/7", "sub"),
    ("https://huggingface.co/gpt2/tree/main", None): HubModel("gpt2", "main"),
    ("https://huggingface.co/gpt2", None): HubModel("gpt2", None),
    ("https://huggingface.co/org/name.git", None): HubModel("org/name", None),
    ("https://hf.co/org/name/blob/v2/a/tokenizer.json?x=1#L1", None): HubModel("org/name", "v2", "a/tokenizer.json"),
    ("https://hf.co/org/name/resolve/main/a.json?download=true", None): HubModel("org/name", "main", "a.json"),
    ("https://huggingface.co/org/name/commit/" + "a" * 40, None): HubModel("org/name", "a" * 40),
}  # fmt: skip
"""Names with the setting for revisions, and the models that they mean."""

OTHERS = {
    "file or folder not found: './org/name'; check the path": ["./org/name"],
    "file or folder not found: '~/models/name'": ["~/models/name"],
    "file or folder not found: 'a/b/c'": ["a/b/c"],
    "file or folder not found": [r"C:\models\name"],
    "neither a path that exists nor a Hub id": ["org/na me", "org/na--me", "", "hf://", "https://huggingface.co/"],
    "is a dataset of the Hub; give a model": ["hf://datasets/org/name", "https://huggingface.co/datasets/org/name/tree/main"],
    "is a space of the Hub; give a model": ["https://huggingface.co/spaces/org/name"],
    "write org/name": ["https://huggingface.co/org/name/discussions/3"],
    "is not the page of a model; give org/name": ["https://huggingface.co/collections/org/name-123"],
    "is not a page of the Hub": ["https://github.com/org/name", "s3://bucket/tokenizer.json"],
}  # fmt: skip
"""Sentences for names that mean none."""


@pytest.mark.parametrize(("name", "expected"), PASTED.items())
def test_what_people_paste_is_a_model(name, expected):
    found = named_model(*name, "tokenizer.model")
    assert found == expected
    assert named_model(found.name, found.revision, "tokenizer.model") == found


@pytest.mark.parametrize(("name", "words"), [(name, words) for words, names in OTHERS.items() for name in names])
def test_other_names_are_answered_in_a_line(name, words):
    with pytest.raises(InputError) as refused:
        named_model(name, None, "tokenizer.model")
    assert str(refused.value).startswith("tokenizer.model: ")
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


def test_two_revisions_of_a_model():
    with pytest.raises(
        InputError, match="names the revision 'v1', and the setting for revisions is 'v2'; keep one of the two"
    ):
        named_model("org/name@v1", "v2", "tokenizer.model")


def test_a_mirror_s_pages_are_the_hub_s(hub, files):
    sha = hub.model("org/name", files).commit(files, "v2")
    assert vocabulary(f"{hub.url}/org/name/blob/v2/tokenizer.json").commit == sha


def test_paths_precede_encodings_and_ids(hub, files, folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    hub.model("org/name", files | {"tokenizer_config.json": "{}"})
    shutil.copytree(folder, "org/name")
    assert vocabulary("org/name").commit is None
    assert vocabulary("cl100k_base").commit is None
    shutil.rmtree("org/name")
    assert vocabulary("org/name").commit == hub.models["org/name"].branches["main"]


@pytest.mark.parametrize("kept", ["old-name", "old/Name"])
def test_renamed_repositories_are_found(hub, files, kept):
    hub.model("org/name", files)
    hub.renamed[f"models/{kept}"] = "org/name"
    assert {load(kept) for load in LOADERS.values()} == {hub.models["org/name"].branches["main"]}


def without_endpoint(hub, monkeypatch):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{unused.getsockname()[1]}")


def through_proxy(hub, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "")
    monkeypatch.setenv("HF_ENDPOINT", "http://hub.invalid")


def offline(hub, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def faulty(path, does, **options):
    return lambda hub, monkeypatch: hub.fault(path, does, **options)


def token(value):
    return lambda hub, monkeypatch: monkeypatch.setenv("HF_TOKEN", value)


def home_is_a_file(hub, monkeypatch):
    place = Path(constants.HF_HUB_CACHE)
    place.parent.mkdir(parents=True)
    place.write_text("x")


def login_is_below_a_file(hub, monkeypatch):
    place = Path(constants.HF_TOKEN_PATH)
    place.parent.parent.mkdir(parents=True, exist_ok=True)
    place.parent.write_text("x")


UNREACHABLE = r"http://\S+ can't be reached.*; check the network, or name a mirror in HF_ENDPOINT"
GATED = "access is restricted; accept the terms on its Hub page, then set HF_TOKEN to a token of that account"
MISSING = "no such model on the Hub, or it is private; check the spelling, or set HF_TOKEN to a token with access"

CONDITIONS = {
    "all is well": ("org/open", None, None),
    "no such repository": ("org/nope", None, MISSING),
    "no such repository, with a token": ("org/nope", token(MEMBER), MISSING),
    "private": ("org/private", None, MISSING),
    "private, with a token of a member": ("org/private", token(MEMBER), None),
    "gated": ("org/gated", None, GATED),
    "gated, with a token of someone else": ("org/gated", token("hf_stranger"), GATED),
    "gated, with a token of a member": ("org/gated", token(MEMBER), None),
    "an expired token": ("org/open", token(EXPIRED), "the Hub rejected HF_TOKEN .*; renew it, or unset it"),
    "no such revision": ("org/open@v9", None, "it doesn't have a branch, tag or commit with that name; check the revision, or remove it"),
    "nothing that is needed": ("org/empty", None, "it has none of the files that are needed; it has README.md$"),
    "a dataset": ("org/rows", None, "it is a dataset, and a model is needed; give the id of a model$"),
    "an adapter": ("org/adapter", None, "it has adapter_config.json; name the model that it was made from$"),
    "busy once": ("org/open", faulty("/api/*", 429, headers={"Retry-After": "7"}), None),
    "busy at a file": ("org/open", faulty("*/resolve/*", 503, times=2), None),
    "busy for ever": ("org/open", faulty("/api/*", 503, times=99), r"the Hub failed \(.*503.*\); run the same command again$"),
    "limited for ever": ("org/open", faulty("/api/*", 429, times=99), r"the Hub has had too many requests \(429: [^)]*\); run the same command again$"),
    "limited at a file, for a day": ("org/open", faulty("*/resolve/*", 429, times=99, headers={"Retry-After": "86400"}),
                                     r"the Hub has had too many requests \(429: [^)]*\); run the same command again in 86,400 seconds$"),
    "limited at a file, for a minute": ("org/open", faulty("*/resolve/*", 429, headers={"Retry-After": "60"}), None),
    "a cut download": ("org/open", faulty("/lfs/*", "cut", method="GET", times=2), None),
    "unreachable": ("org/open", without_endpoint, UNREACHABLE),
    "a dead proxy": ("org/open", through_proxy, r"can't be reached through the proxy http://127.0.0.1:9"),
    "offline": ("org/open", offline, "HF_HUB_OFFLINE is set; unset it"),
    "a login page": ("org/open", faulty("/api/*", "login page"), "doesn't answer as a Hub; a proxy or a login page"),
    "the cache is a file": ("org/open", home_is_a_file, r"/hub\S* cannot be written .*; free space there, or set HF_HOME"),
    "HF_HOME is a file": ("org/open", login_is_below_a_file, r"/token cannot be .*; free space there, or set HF_HOME"),
}  # fmt: skip
"""By what is the case: the model, how that comes about, and the sentence behind its name; None if it is loaded."""


@pytest.mark.parametrize("setting", LOADERS)
@pytest.mark.parametrize("condition", CONDITIONS)
def test_error_messages(hub, files, monkeypatch, setting, condition):
    model, happens, expected = CONDITIONS[condition]
    for name, options in {"open": {}, "gated": {"gated": True}, "private": {"private": True}}.items():
        hub.model(f"org/{name}", files, members={MEMBER}, **options)
    hub.model("org/empty", {"README.md": "# Nothing"})
    hub.dataset("org/rows", {"a.jsonl": "{}"})
    hub.model("org/adapter", {"adapter_config.json": "{}"})
    if happens:
        happens(hub, monkeypatch)
    if expected is None:
        repository = hub.models[model]
        assert LOADERS[setting](model) == repository.branches["main"]
        assert not hub.faults
        return
    with pytest.raises((InputError, RunError), match=expected) as refused:
        LOADERS[setting](model)
    assert str(refused.value).startswith(f"{setting}: {model.partition('@')[0]!r}")
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 400


@pytest.mark.timeout(100)  # the system itself would wait for more than two minutes
def test_a_host_that_swallows_packets_is_given_up_soon(hub, monkeypatch):
    monkeypatch.setattr(hub_client, "SECONDS", 0.3)
    with socket.socket() as silent, socket.socket() as first, socket.socket() as second:
        silent.bind(("127.0.0.1", 0))
        silent.listen(0)
        for waiting in (first, second):  # which fill the queue, so that the next connection is never made
            waiting.setblocking(False)
            waiting.connect_ex(silent.getsockname())
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(InputError, match="can't be reached"):
            vocabulary("org/name")


def filled_file_by_file(hub, name):
    for file in ("tokenizer.json", "tokenizer_config.json"):
        hf_hub_download(name, file, endpoint=hub.url)


FILLED = [
    lambda hub, name: vocabulary(name),
    lambda hub, name: snapshot_download(name, endpoint=hub.url),
    filled_file_by_file,
]


@pytest.mark.slow
@pytest.mark.parametrize("fill", FILLED)
@pytest.mark.parametrize("state", [offline, without_endpoint, faulty("*", 503, times=9)])
@pytest.mark.parametrize("revision", [None, "main", "commit"])
def test_a_filled_cache_is_enough(hub, folder, monkeypatch, fill, state, revision):
    tokenizer = {path.name: path.read_bytes() for path in folder.iterdir()}
    commit = hub.model("org/na.me", tokenizer).branches["main"]
    fill(hub, "org/na.me")
    load.load_named.cache_clear()
    hub.requests.clear()
    state(hub, monkeypatch)
    found = vocabulary("org/na.me", commit if revision == "commit" else revision)
    assert (found.commit, found.fingerprint) == (commit, vocabulary(str(folder)).fingerprint)
    assert found.eos is not None
    assert len(hub.requests) <= 1
    assert hub.waits == []


@pytest.mark.slow
def test_a_cache_that_transformers_filled_gives_the_same_tokenizer_offline(hub, files, monkeypatch):
    from transformers import AutoTokenizer  # noqa: PLC0415 - seconds

    config = json.loads(files["tokenizer_config.json"]) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    hub.model(
        "org/na.me", files | {"tokenizer_config.json": json.dumps(config), "config.json": '{"model_type": "bert"}'}
    )
    AutoTokenizer.from_pretrained("org/na.me")
    offline(hub, monkeypatch)
    theirs, ours = AutoTokenizer.from_pretrained("org/na.me"), vocabulary("org/na.me")
    assert (len(theirs), theirs.eos_token_id) == (ours.size, ours.eos)
    text = "the same text"
    assert ours.reference(True).encode(pa.array([text], pa.large_string())).ids.tolist() == theirs.encode(text)


def test_concurrent_commit_does_not_mix_files(hub, files):
    repository = hub.model("org/name", files)
    first = repository.branches["main"]
    hub.fault("*/tokenizer*.json", lambda: repository.commit({"README.md": "# No tokenizer any more"}))
    found = vocabulary("org/name")
    assert (found.commit, found.eos is not None) == (first, True)


@pytest.mark.parametrize("kept", [True, False], ids=["tokenizer kept", "tokenizer changed"])
def test_the_next_run_takes_the_next_commit(hub, files, kept):
    repository = hub.model("org/name", files)
    first = vocabulary("org/name")
    sha = repository.commit(files | {"README.md": "# More"} | ({} if kept else {"tokenizer_config.json": "{}"}))
    load.load_named.cache_clear()
    found = vocabulary("org/name")
    assert (found.commit, found.eos == first.eos) == (sha, kept)
    assert vocabulary("org/name", first.commit).commit == first.commit


def test_workers_load_the_planned_commit_without_a_request(hub, files):
    repository = hub.model("org/name", files)
    first = repository.branches["main"]
    source = TokenizerSource(model=f"{hub.url}/org/name/tree/main")
    planned = find_vocabulary(source)
    assert find_model("org/name").revision == first
    repository.commit(files | {"tokenizer_config.json": "{}"})
    hub.requests.clear()
    load.load_named.cache_clear()
    worker = pinned(source, planned.commit)
    assert (worker.model, worker.revision) == ("org/name", first)
    assert find_vocabulary(worker) is planned
    assert find_model("org/name", first).revision == first
    assert hub.requests == []


def test_the_commit_is_in_the_manifest_and_shown_and_found_again(hub, files, tmp_path):
    repository = hub.model("org/name", files)
    first = repository.branches["main"]
    blend = blend_of(write_lines(tmp_path / "texts.jsonl", ["a text", "another text"]))
    planned, manifest = prepare(blend, tmp_path / "out", tokenizer={"model": "org/name"})
    assert planned.notes["tokenizer"] == f"org/name is at commit {first}"
    assert manifest["tokenizer"]["commit"] == first
    repository.commit({"README.md": "# No tokenizer any more"})
    load.load_named.cache_clear()
    assert load.recorded_vocabulary(manifest).commit == first
    place = Path(constants.HF_HUB_CACHE) / "models--org--name/snapshots" / first
    _, of_folder = prepare(blend, tmp_path / "folder", tokenizer={"model": str(place)})
    assert [each["key"] for each in of_folder["shards"]] == [each["key"] for each in manifest["shards"]]
    assert "commit" not in of_folder["tokenizer"]


@pytest.mark.parametrize("unreachable", [offline, without_endpoint])
def test_good_data_verify_without_the_hub_and_without_its_cache(hub, files, tmp_path, monkeypatch, capsys, unreachable):
    hub.model("org/name", files)
    rows = write_lines(tmp_path / "texts.jsonl", [f"text {number}" for number in range(50)])
    assert run(["pretrain", str(rows), "--output-dir", str(tmp_path / "out"), "tokenizer.model=org/name"]) == 0
    load.load_named.cache_clear()
    load.load_commit.cache_clear()
    assert run(["verify", str(tmp_path / "out")]) == 0
    assert "not checked" not in capsys.readouterr().err
    shutil.rmtree(constants.HF_HUB_CACHE)
    load.load_named.cache_clear()
    load.load_commit.cache_clear()
    unreachable(hub, monkeypatch)
    assert run(["verify", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().err
    assert "not checked: the section 'Tokens per byte'" in said
    assert "tokenizer.model: 'org/name'" in said
    assert "✗" not in said


VOCABULARY = json.dumps({letter: number for number, letter in enumerate(ByteLevel.alphabet())})

TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
NAMED = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": TEMPLATE}]


@pytest.mark.parametrize(
    "written",
    [
        {"chat_template.jinja": TEMPLATE},
        {"tokenizer_config.json": json.dumps({"chat_template": TEMPLATE})},
        {"tokenizer_config.json": json.dumps({"chat_template": NAMED})},
        {"additional_chat_templates/default.jinja": TEMPLATE, "additional_chat_templates/rag.jinja": "no"},
        {"chat_template.jinja": TEMPLATE, "additional_chat_templates/default.jinja": "no"},
        {"chat_template.json": json.dumps({"chat_template": TEMPLATE})},
        {"chat_template.jinja": TEMPLATE, "tokenizer_config.json": json.dumps({"chat_template": "no"})},
        {"tokenizer_config.json": json.dumps({"chat_template": TEMPLATE}), "chat_template.json": '{"chat_template": "no"}'},
    ],
    ids=" ".join,
)  # fmt: skip
def test_a_chat_template_is_found_in_every_file_it_may_be_in(hub, files, tmp_path, written):
    hub.model("org/name", files | written)
    of_hub = vocabulary("org/name")
    for name, content in hub.models["org/name"].commits[of_hub.commit].items():
        (tmp_path / "local" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "local" / name).write_bytes(content)
    for found in (of_hub, vocabulary(str(tmp_path / "local"))):
        assert load_template("tokenizer", found, {}).source == TEMPLATE


@pytest.mark.parametrize("make", [kimi, llama3, tekken], ids=lambda make: make.__name__)
def test_repository_with_only_ranks_is_loaded(hub, tmp_path, make):
    model, _, (bos, eos, size) = make(tmp_path)
    folder = model if model.is_dir() else model.parent
    hub.model("org/ranks", {**{path.name: path.read_bytes() for path in folder.iterdir()}, **WEIGHTS})
    found = vocabulary("org/ranks")
    assert (found.bos, found.eos, found.size) == (bos, eos, size)
    assert found.fingerprint == vocabulary(str(model)).fingerprint
    assert not [request for request in hub.requests if "weights" in request.path]


def test_sentencepiece_repository_and_nested_file_are_loaded(hub, files, tmp_path):
    model = sentencepiece_model(tmp_path / "tokenizer.model", "unigram")
    hub.model("org/pieces", {"tokenizer.model": model.read_bytes(), "params/other.bin": "x"})
    assert vocabulary("org/pieces").fingerprint == vocabulary(str(model)).fingerprint
    hub.model("org/two", {"vocab.json": VOCABULARY, "merges.txt": "#version: 0.2\n", "other.txt": "x"})
    assert vocabulary("hf://org/two/vocab.json").fingerprint == vocabulary("org/two").fingerprint
    hub.model("org/deep", {f"sub.v1/{name}": content for name, content in files.items()})
    whole = functools.partial(vocabulary, "hf://org/deep/sub.v1")
    assert whole().eos == vocabulary("hf://org/deep/sub.v1/tokenizer.json").eos is not None
    assert not [request for request in hub.requests if "weights" in request.path or "other.bin" in request.path]
