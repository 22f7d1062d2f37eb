"""The blend: every mistake is found before any data is touched, and told with its place and its remedy."""

import json
import re
from pathlib import Path

import fsspec
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


@pytest.mark.parametrize("wanted", [None, 1.5, {"a": 1}, [], [["a"]], ["a", None], 2**63, -(2**64)], ids=repr)
def test_filters_take_plain_values_only(wanted):
    found = refusal({"datasets": [source(filters={"level": wanted})]})
    assert found.startswith("blend: datasets[0].filters.level: not a value to filter by; use text, true or false")
    assert "\n" not in found


@pytest.mark.parametrize(
    ("filters", "valid"),
    [({}, True), ({"a": "x"}, True), ({"a": [1, True, "x"]}, True), ({"a": 1.5}, False), ({"a": [None]}, False)],
)
def test_schema_of_filters(filters, valid):
    """Prefect's server checks blends against the schema."""
    schema = Blend.model_json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    blend = {"datasets": [source(filters=filters)]}
    assert jsonschema.Draft202012Validator(schema).is_valid(blend) == valid


SCHEMA = "blends/schema/blend.json"


@pytest.mark.parametrize(
    ("blend", "valid"),
    [
        ({"$schema": f"../{SCHEMA}", "datasets": [source()]}, True),
        ({"datasets": [source(category="math", chat_template_kwargs={"a": 1})]}, True),
        ({"datasets": [source(wieght=1)]}, False),
        ({"$schemas": "", "datasets": [source()]}, False),
        ({"datasets": [source(path="")]}, False),
        *((json.loads(path.read_bytes()), True) for path in sorted((REPOSITORY / "blends").glob("*.json"))),
    ],
)
def test_the_schema_accepts_what_loads(blend, valid):
    schema = json.loads((REPOSITORY / SCHEMA).read_bytes())
    assert jsonschema.Draft202012Validator(schema).is_valid(blend) == valid
    if valid:
        assert load_blend(blend)
    else:
        assert refusal(blend)


def test_a_blend_per_split_keeps_its_splits_in_order():
    blend = load_blend({"test": [A], "train": [A, B]})
    assert {split: [each.name for each in sources] for split, sources in blend.parts().items()} == {
        "train": ["a", "b"],
        "test": ["a"],
    }
    assert blend.datasets is None


def test_weights_are_known_by_split_and_name():
    blend = load_blend({"train": [source(weight=2), {**B, "weight": 0}], "valid": [source(weight=0.5)]})
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
    ],
)  # fmt: skip
def test_mistakes_name_location_and_remedy(blend, sentence):
    found = refusal(blend)
    assert found.startswith(f"blend: {sentence}")
    assert "\n" not in found


@pytest.mark.parametrize(
    "weight",
    [float("nan"), float("inf"), -float("inf"), -1, -0.001, "1", "half", "", True, None, [1], {"a": 1}],
    ids=repr,
)
def test_a_weight_is_a_finite_number_of_at_least_zero(weight):
    found = refusal({"datasets": [source(weight=weight), B]})
    assert found.startswith("blend: datasets[0].weight: ")
    assert "\n" not in found


@pytest.mark.parametrize("weight", [0, 0.0, 1, 1e-300, 1e300, 2**53])
def test_every_other_number_is_a_weight(weight):
    assert load_blend({"datasets": [source(weight=weight), B]}).datasets[0].weight == weight


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


@pytest.mark.parametrize("name", ["a", "0", "x" * 128, "A-b_c.d", "nemotron-cc-v2.1", "com", "console", "a..b", "nul1"])
def test_every_other_name_is_safe(name):
    assert load_blend({"datasets": [source(name=name)]}).datasets[0].name == name


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


@pytest.mark.parametrize("path", sorted((REPOSITORY / "blends").glob("*.json")), ids=lambda path: path.name)
def test_the_blends_of_this_repository_load(path):
    blend = load_blend(str(path))
    named = sum(map(len, blend.parts().values())) + len(blend.phases or [])
    assert named == path.read_text().count('"name"')


ONE = b'{"datasets": [{"name": "a", "path": "/data", "weight": %s}]}'
NOT_FINITE = ": datasets[0].weight: Input should be a finite number"
TWICE = "is written twice in one object; keep one of the two"


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b'{"datasets": [], "datasets": []}', f": the key 'datasets' {TWICE}"),
        (ONE % b'1, "weight": 2', f": the key 'weight' {TWICE}"),
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


def test_byte_order_mark_is_accepted(write):
    assert load_blend(str(write(b"\xef\xbb\xbf" + json.dumps({"datasets": [A]}).encode()))).datasets


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


def test_mistakes_in_a_file_name_the_file(write):
    path = write({"datasets": [source(wieght=1), source(weight=-1, name="b")]})
    assert refusal(str(path)).splitlines() == [
        f"{path}: datasets[0].wieght: unknown key; did you mean 'weight'?",
        f"{path}: datasets[1].weight: Input should be greater than or equal to 0 (got -1)",
    ]


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
def test_data_paths_are_relative_to_the_blend_file(write, tmp_path, monkeypatch, written, found, split):
    expected = [found.format(folder=tmp_path, parent=tmp_path.parent)]
    path = write({split: [source(path=written)]})
    assert paths_of(str(path)) == paths_of(f"file://{path}") == expected
    monkeypatch.chdir(tmp_path)
    assert paths_of("blend.json") == expected


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


def test_paths_of_tables_are_relative_to_the_blend_file(write, tmp_path, monkeypatch):
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
    assert tables_of({"datasets": [written]}) == tables
    assert tables_of("blend.json") == tables


def test_nothing_else_of_a_transform_is_taken_for_a_path(write):
    """A field that is called `path` is none, nor is a new name of a field."""
    specs = [
        *("path", {"select": ["path", "a/b"]}, {"rename": {"new": "path"}}, {"sft": {"input": "path"}}, {"x": None}),
        {"rename": {"path": "old"}},
    ]
    (only,) = load_blend(str(write({"datasets": [source(transforms=specs)]}))).datasets
    assert only.transforms == specs


def test_tables_of_a_blend_in_a_store_lie_beside_it():
    blend = {"datasets": [resolving("tables/a.parquet", "/b.parquet")]}
    fsspec.filesystem("memory").pipe_file("/blends/rl/blend.json", json.dumps(blend).encode())
    found = [table["path"] for table in tables_of("memory://blends/rl/blend.json").values()]
    assert found == ["memory://blends/rl/tables/a.parquet", "/b.parquet"]


@pytest.mark.parametrize("transforms", ["sft", [1], [["sft"]], [None], {"sft": {}}], ids=repr)
def test_transforms_are_a_list_of_names_and_objects(transforms):
    assert refusal({"datasets": [source(transforms=transforms)]}).startswith("blend: datasets[0].transforms")


def test_data_paths_of_an_object_are_relative_to_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    expected = [f"{tmp_path}/data/a.jsonl"]
    assert paths_of({"datasets": [source(path="data/a.jsonl")]}) == expected
    assert paths_of(Blend.model_validate({"datasets": [source(path="data/a.jsonl")]})) == expected


def test_a_blend_loads_from_a_uri_with_its_data_beside_it():
    system = fsspec.filesystem("memory")
    system.pipe_file("/blends/one/blend.json", json.dumps({"datasets": [source(path="data/a.jsonl"), B]}).encode())
    assert paths_of("memory://blends/one/blend.json") == ["memory://blends/one/data/a.jsonl", "/data/b"]


def test_loading_a_loaded_blend_is_identity(write):
    once = load_blend(str(write({"train": [source(path="data", filters={"a": [True, "x"]})], "valid": [B]})))
    for loaded in (once, load_blend({"datasets": [resolving("a.parquet", "hf://b")]})):
        for again in (loaded, loaded.model_dump(), json.loads(loaded.model_dump_json(exclude_none=True))):
            assert load_blend(again) == loaded
