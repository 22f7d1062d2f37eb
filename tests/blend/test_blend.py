"""The blend: every mistake is found before any data is touched, and told with its place and its remedy."""

import json
import re
from pathlib import Path

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenmill.tasks.blend.load import load_blend
from tokenmill.tasks.blend.models import Blend
from tokenmill.tasks.errors import InputError
from tokenmill.tasks.shards.publication import blend_weights

REPOSITORY = Path(__file__).parents[2]
A, B = {"name": "a", "path": "/data/a"}, {"name": "b", "path": "/data/b"}


def source(**changed):
    return {**A, **changed}


def refusal(blend):
    with pytest.raises(InputError) as refused:
        load_blend(blend)
    return str(refused.value)


@pytest.fixture
def write(tmp_path):
    def write(content, name="blend.json"):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
        return path

    return write


def test_a_flat_blend_with_all_its_defaults():
    (only,) = load_blend({"datasets": [A]}).datasets
    assert only.model_dump() == {
        "name": "a", "path": "/data/a", "weight": 1.0, "split": None, "subset": None, "text_field": "text",
        "revision": None, "messages_field": None, "tools_field": "tools", "template_variables": {}, "fields": None, "document_per": "file", "used_in": None, "filters": {},
        "where": None, "transforms": [], "converter": None, "fim": None, "license": None, "languages": None,
        "domain": None,
        "share": None, "tokens": None, "min_epochs": None, "max_epochs": None, "group": None,
    }  # fmt: skip


def test_the_category_of_a_published_blend_is_the_domain():
    """As the blends of Nemotron 3 Ultra have it, beside comments of theirs."""
    (only,) = load_blend({"datasets": [source(category="sft-code", _new_in_ultra=True, _note="New.")]}).datasets
    assert only.domain == "sft-code"
    with pytest.raises(InputError, match=r"datasets\[0\].category: unknown key"):
        load_blend({"datasets": [source(category="sft-code", domain="code")]})


def test_filters_keep_the_types_of_their_values():
    """True is no 1 and "1" is no 1: a filter compares with what the rows hold."""
    wanted = {"reasoning": "on", "turns": 1, "verified": True, "level": ["easy", 2, False], "a.b": "1"}
    (only,) = load_blend({"datasets": [source(used_in="nano_v3", filters=wanted)]}).datasets
    assert repr(only.filters) == repr(wanted)
    assert only.used_in == "nano_v3"


SCHEMA = "blends/schema/blend.json"


@pytest.mark.parametrize(
    ("blend", "valid"),
    [
        ({"$schema": f"../{SCHEMA}", "datasets": [source()]}, True),
        ({"datasets": [source(category="math", chat_template_kwargs={"a": 1})]}, True),
        ({"datasets": [source(wieght=1)]}, False),
        ({"$schemas": "", "datasets": [source()]}, False),
        ({"datasets": [source(path="")]}, False),
        ({"datasets": [source(filters={"a": [1, True, "x"], "b": "x"})]}, True),
        *(({"datasets": [source(filters={"a": wrong})]}, False) for wrong in (1.5, [None])),
        *((json.loads(path.read_bytes()), True) for path in sorted((REPOSITORY / "blends").glob("*.json"))),
    ],
)
def test_the_schema_accepts_what_loads(blend, valid):
    """Prefect's server checks blends against the schema."""
    schema = json.loads((REPOSITORY / SCHEMA).read_bytes())
    jsonschema.Draft202012Validator.check_schema(schema)
    assert jsonschema.Draft202012Validator(schema).is_valid(blend) == valid
    if valid:
        assert load_blend(blend)
    else:
        assert refusal(blend)


def test_weights_are_known_by_split_in_order_and_by_name():
    blend = load_blend({"valid": [source(weight=0.5)], "train": [source(weight=2), {**B, "weight": 0}]})
    assert [(split, len(sources)) for split, sources in blend.parts().items()] == [("train", 2), ("valid", 1)]
    assert blend.datasets is None
    assert blend_weights(blend) == {("train", "a"): 2.0, ("train", "b"): 0.0, ("valid", "a"): 0.5}
    assert blend_weights(load_blend({"datasets": [A]})) == {("datasets", "a"): 1.0}


EMPTY = "the blend is empty; list at least one dataset under 'datasets' or 'train'"


@pytest.mark.parametrize(
    ("blend", "sentence"),
    [
        ({"dataset": [A]}, "dataset: unknown key; did you mean 'datasets'?"),
        ({"datasets": [A], "trian": []}, "trian: unknown key; did you mean 'train'?"),
        ({"datasets": [source(wieght=1)]}, "datasets[0].wieght: unknown key; did you mean 'weight'?"),
        ({"valid": [A, {**B, "textfield": ""}]}, "valid[1].textfield: unknown key; did you mean 'text_field'?"),
        ({"datasets": [A], "train": [B]}, "'datasets' and 'train' cannot be mixed; keep one of the two"),
        ({"datasets": [A], "test": []}, "'datasets' and 'test' cannot be mixed; keep one of the two"),
        *((empty, EMPTY) for empty in ({}, {"_comment": "x"}, {"datasets": []}, {"train": [], "valid": []})),
        ({"datasets": [{"path": "/data"}]}, "datasets[0].name: missing; give it a value"),
        ({"datasets": [{"name": "a"}]}, "datasets[0].path: missing; give it a value"),
        ({"datasets": [source(path="")]}, "datasets[0].path: String should have at least 1 character (got '')"),
        ({"datasets": [A, A]}, "the name 'a' occurs twice in 'datasets'; names must be unique"),
        ({"datasets": [A, source(name="A")]}, "the name 'A' occurs twice in 'datasets'; names must be unique"),
        ({"datasets": [source(name="A"), A]}, "the name 'a' occurs twice in 'datasets'; names must be unique"),
        ({"train": [A], "valid": [B, B]}, "the name 'b' occurs twice in 'valid'; names must be unique"),
        ({"datasets": [source(weight=0), {**B, "weight": 0.0}]}, "every weight in 'datasets' is 0; give at least one dataset a weight above 0"),
        ({"train": [A], "valid": [source(weight=0)]}, "every weight in 'valid' is 0; give at least one dataset a weight above 0"),
        ({"datasets": {"a": 1}}, "datasets: Input should be a valid list"),
        ({"datasets": ["/data/a"]}, "datasets[0]: "),
        ({"datasets": [source(text_field="")]}, "datasets[0].text_field: String should have at least 1 character"),
        ({"datasets": [source(messages="x")]}, "datasets[0].messages: unknown key; did you mean 'messages_field'?"),
        ({"version": 1, "data": [{"text": "a"}]}, "isn't a blend; its rows are a list under 'data': write these one per line"),
        ({"train": ["1.0", "/data/train/data_00000"], "valid": None}, "lists prepared files for a trainer; name the"),
        ({"datasets": [source(filter={})]}, "datasets[0].filter: unknown key; did you mean 'filters'?"),
        ({"datasets": [source(messages_field="")]}, "datasets[0].messages_field: String should have at least 1"),
        ({"datasets": [source(tools_field=None)]}, "datasets[0].tools_field: Input should be a valid string"),
        ({"datasets": [source(fields={"prompt": "q"})]}, "datasets[0].fields: 'prompt' and 'response' belong together"),
        ({"datasets": [source(fields={"answer": "a"})]}, "datasets[0].fields.answer: unknown key"),
        ({"datasets": [source(messages_field="m", fields={"prompt": "q", "response": "a"})]}, "datasets[0]: 'messages_field' and 'fields.prompt' both name the"),
        ({"datasets": [source(tools_field="t", fields={"tools": "u"})]}, "datasets[0]: 'tools_field' and 'fields.tools' both"),
        ({"datasets": [source(used_in="")]}, "datasets[0].used_in: String should have at least 1 character"),
        ({"datasets": [source(used_in=["a"])]}, "datasets[0].used_in: Input should be a valid string (got ['a'])"),
        ({"datasets": [source(filters=["a"])]}, "datasets[0].filters: Input should be a valid dictionary"),
        ({"datasets": [source(used_in="a", filters={"used_in": "b"})]}, "datasets[0]: 'used_in' is given as a key and under 'filters'; keep one of the two"),
        *(({"datasets": [source(filters={"level": wrong})]}, "datasets[0].filters.level: not a value to filter by; use text, true or false")
          for wrong in (None, 1.5, {"a": 1}, [], [["a"]], ["a", None], 2**63, -(2**64))),
        *(({"datasets": [source(weight=wrong), B]}, "datasets[0].weight: ")
          for wrong in (float("nan"), float("inf"), -float("inf"), -1, -0.001, "1", "half", "", True, None, [1], {"a": 1})),
    ],
)  # fmt: skip
def test_mistakes_name_location_and_remedy(blend, sentence):
    found = refusal(blend)
    assert found.startswith(f"blend: {sentence}")
    assert "\n" not in found


UNSAFE = [
    "", ".", "..", "../a", "a/b", "a\\b", "/a", ".hidden", "-a", "_a", "a b", "a\n", "a\0", "ä", "名", "a:b", "a*",
    "~", "$HOME", "a'", 'a"', "a;b", "a|b", "a%2fb", "a.", "x" * 129, "CON", "nul", "nul.txt", "Com1", "LPT9.jsonl",
    "\u202ea", "a\u0301", "\ud800",
]  # fmt: skip


@pytest.mark.parametrize("name", UNSAFE, ids=ascii)
def test_unsafe_path_segments_are_rejected(name):
    found = refusal({"datasets": [source(name=name)]})
    assert found.startswith("blend: datasets[0].name: not a safe name; use 1 to 128 ASCII letters")
    assert repr(name)[:40] in found  # a long one is shortened


@pytest.mark.parametrize("transforms", ["sft", [1], [["sft"]], [None], {"sft": {}}], ids=repr)
def test_transforms_are_a_list_of_names_and_objects(transforms):
    assert refusal({"datasets": [source(transforms=transforms)]}).startswith("blend: datasets[0].transforms")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("weight", weight) for weight in (0, 0.0, 1, 1e-300, 1e300, 2**53)),
        *(("name", name) for name in ("a", "0", "x" * 128, "A-b_c.d", "nemotron-cc-v2.1", "com", "console", "a..b", "nul1")),
    ],
)  # fmt: skip
def test_plain_weights_and_safe_names_are_kept(key, value):
    other = {"name": "other", "path": "/data/b"}
    assert getattr(load_blend({"datasets": [source(**{key: value}), other]}).datasets[0], key) == value


@given(st.text(max_size=140))
def test_a_name_that_is_accepted_is_one_segment_on_every_file_system(name):
    try:
        load_blend({"datasets": [source(name=name)]})
    except InputError:
        return
    assert re.fullmatch(r"[!-~]{1,128}", name)
    assert not set(name) & set('/\\:*?"<>|')
    assert name not in {".", ".."}


def test_underscore_keys_are_comments_at_both_levels(write):
    """As in the blends of Nano3, which carry notes for people and for other tools."""
    commented = {
        "_comment": "what this is",
        "_version": 3,
        "datasets": [{**A, "_hf_dataset": "nvidia/x", "_num_tokens": 5, "_": None}, {"_note": ["b"], **B}],
    }
    assert load_blend(str(write(commented))) == load_blend({"datasets": [A, B]})


ONE = b'{"datasets": [{"name": "a", "path": "/data", "weight": %s}]}'
NOT_FINITE = ": datasets[0].weight: Input should be a finite number"
TWICE = "is written twice in one object; keep one of the two"


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b'{"datasets": [], "datasets": []}', f": the key 'datasets' {TWICE}"),
        (ONE % b'1, "weight": 2', f": the key 'weight' {TWICE}"),
        (ONE % b'-1, "wieght": 1', ": datasets[0].weight: Input should be greater than or equal to 0 (got -1)"),
        (b'{\n  "datasets": [\n    {"name": "a",, "path": "/a"}\n  ]\n}', ":3:18: not valid JSON: "),
        (b"", ":1:1: not valid JSON: "),
        (b'{"datasets": "\xff"}', ": not UTF-8 text at byte 14; a blend is a JSON file"),
        (b'{"datasets": ' + b"[" * 200_000, ""),
        *((content, ": make it an object (got ") for content in (b"[]", b"null", b"5", b'"datasets"')),
        *((ONE % weight, NOT_FINITE) for weight in (b"NaN", b"Infinity", b"-Infinity", b"1e999")),
    ],
    ids=lambda value: repr(value[:40]),
)
def test_a_mistake_in_a_file_names_the_file(write, content, sentence):
    path = write(content)
    assert refusal(str(path)).startswith(f"{path}{sentence}")


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("my-blned.json", "/my-blned.json: no such blend file; did you mean 'my-blend.json'?"),
        ("nowhere/blend.json", "/nowhere/blend.json: no such blend file"),
        ("memory://nowhere/blend.json", "memory://nowhere/blend.json: no such blend file"),
        ("org/name.v1", "/org/name.v1: no such blend file; for a dataset of the Hub, write hf://org/name.v1"),
        ("org/name.json", "/org/name.json: no such blend file"),
        ("folder/name", "/folder/name: no such blend file"),
    ],
)
def test_missing_file_suggests_nearest(write, tmp_path, monkeypatch, path, sentence):
    write({"datasets": [A]}, "my-blend.json")
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    assert refusal(path) == (sentence if "://" in path else f"{tmp_path}{sentence}")
    assert refusal(str(tmp_path)).startswith(f"{tmp_path}: cannot be read as a blend file: ")


def paths_of(blend):
    return [each.path for sources in load_blend(blend).parts().values() for each in sources]


@pytest.mark.parametrize(
    ("written", "found"),
    [
        ("data/a.jsonl", "{folder}/data/a.jsonl"),
        ("./a", "{folder}/a"),
        ("../a", "{parent}/a"),
        ("*/part-*.jsonl", "{folder}/*/part-*.jsonl"),
        ("/absolute/a.jsonl", "/absolute/a.jsonl"),
        ("file:///absolute/a.jsonl", "/absolute/a.jsonl"),
        ("~/a", str(Path.home() / "a")),
        ("s3://bucket/a/", "s3://bucket/a/"),
        ("hf://org/name@main", "hf://org/name@main"),
        ("memory://a", "memory://a"),
    ],
)
@pytest.mark.parametrize("split", ["datasets", "train", "valid"])
def test_data_paths_are_relative_to_the_blend(write, tmp_path, monkeypatch, memory, written, found, split):
    """Beside its file, or in the working directory for an object."""
    blend, expected = {split: [source(path=written)]}, [found.format(folder=tmp_path, parent=tmp_path.parent)]
    path = write(blend)
    assert paths_of(str(path)) == paths_of(f"file://{path}") == expected
    monkeypatch.chdir(tmp_path)
    assert paths_of("blend.json") == paths_of(blend) == paths_of(Blend.model_validate(blend)) == expected
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())  # a byte order mark
    assert paths_of(str(path)) == expected
    memory.pipe_file("/blends/blend.json", path.read_bytes())
    if written == "data/a.jsonl":
        assert paths_of("memory://blends/blend.json") == ["memory://blends/data/a.jsonl"]


def resolving(*paths):
    """A dataset whose transforms name tables, the last one deep within an object, beside things that are no paths."""
    tables = {f"table {number}": {"path": path, "style": "dapo", "split": "path"} for number, path in enumerate(paths)}
    return source(transforms=["sft", {"rename": {"path": "old", "new": "path"}}, {"resolve_placeholders": tables}])


def tables_of(blend):
    (only,) = load_blend(blend).datasets
    return only.transforms[-1]["resolve_placeholders"]


@pytest.mark.parametrize(
    ("page", "path"),
    [
        ("org/name", "org/name"),
        ("org/name/", "org/name"),
        ("org/name.git", "org/name"),
        ("wikitext", "wikitext"),
        ("wikitext/tree/main/a", "wikitext@main/a"),
        ("org/name/tree/main", "org/name@main"),
        ("org/name/tree/v1.0/data/en", "org/name@v1.0/data/en"),
        ("org/name/tree/feature/x", "org/name@feature/x"),
        ("org/name/blob/main/data/a%20b.jsonl", "org/name@main/data/a b.jsonl"),
        ("org/name/resolve/main/a.parquet?download=true#top", "org/name@main/a.parquet"),
        ("org/name/tree/refs%2Fconvert%2Fparquet/default", "org/name@refs%2Fconvert%2Fparquet/default"),
        ("org/name/raw/refs/pr/3/a.jsonl", "org/name@refs/pr/3/a.jsonl"),
    ],
)
def test_hub_page_addresses(monkeypatch, page, path):
    monkeypatch.setenv("HF_ENDPOINT", "http://mirror:80")
    for host in ("https://huggingface.co", "http://hf.co", "http://mirror:80"):
        (only,) = load_blend({"datasets": [{"name": "a", "path": f"{host}/datasets/{page}"}]}).datasets
        assert only.path == f"hf://{path}"


@pytest.mark.parametrize("page", ["org/name", "datasets/org/name/viewer/en/train", "spaces/org/name", "datasets", ""])
def test_other_pages_of_the_hub(page):
    message = refusal({"datasets": [{"name": "a", "path": f"https://huggingface.co/{page}"}]})
    assert message.startswith(f"https://huggingface.co/{page}: isn't the page of a dataset")
    assert "write hf://org/name" in message


def test_paths_of_tables_are_relative_to_the_blend_file(write, tmp_path, monkeypatch, memory):
    found = {
        "a.parquet": f"{tmp_path}/a.parquet",
        "../b/*.parquet": f"{tmp_path.parent}/b/*.parquet",
        "/c.parquet": "/c.parquet",
        "~/d.parquet": str(Path.home() / "d.parquet"),
        "hf://org/name": "hf://org/name",
        "s3://bucket/e/": "s3://bucket/e/",
        "file:///f": "/f",
    }
    written = resolving(*found)
    path = write({"datasets": [written]})
    tables = tables_of(str(path))
    assert [table["path"] for table in tables.values()] == [*found.values()]
    assert list(tables) == [f"table {number}" for number in range(7)]
    assert all(table == {"path": table["path"], "style": "dapo", "split": "path"} for table in tables.values())
    monkeypatch.chdir(tmp_path)
    assert tables_of({"datasets": [written]}) == tables_of("blend.json") == tables
    memory.pipe_file("/blends/rl/blend.json", path.read_bytes())
    stored = [table["path"] for table in tables_of("memory://blends/rl/blend.json").values()]
    assert (stored[0], stored[2:]) == ("memory://blends/rl/a.parquet", [*found.values()][2:])


def test_nothing_else_of_a_transform_is_taken_for_a_path(write):
    """A field that is called `path` is none, nor is a new name of a field."""
    specs = [
        *("path", {"select": ["path", "a/b"]}, {"rename": {"new": "path"}}, {"sft": {"input": "path"}}, {"x": None}),
        {"rename": {"path": "old"}},
    ]
    (only,) = load_blend(str(write({"datasets": [source(transforms=specs)]}))).datasets
    assert only.transforms == specs


def test_loading_a_loaded_blend_is_identity(write):
    once = load_blend(str(write({"train": [source(path="data", filters={"a": [True, "x"]})], "valid": [B]})))
    for loaded in (once, load_blend({"datasets": [resolving("a.parquet", "hf://b")]})):
        for again in (loaded, loaded.model_dump(), json.loads(loaded.model_dump_json(exclude_none=True))):
            assert load_blend(again) == loaded
