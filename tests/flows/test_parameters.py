"""What a Prefect server checks before it makes a run: the parameters, against the schema that a deployment sends it.

Wrong values are taken from the settings themselves: whatever value a field refuses, the server must refuse as well.
Prefect's own validation is asked, as the server asks it.
"""

import os
import re
from functools import cache
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import get_args

import orjson
import pytest
import yaml
from prefect.exceptions import ParameterTypeError
from prefect.flows import load_flow_from_entrypoint
from prefect.utilities.schema_tools.validation import ValidationError as Refused
from prefect.utilities.schema_tools.validation import preprocess_schema, validate
from pydantic import BaseModel, TypeAdapter, ValidationError
from tokenmill.flows.preparation import preparation_flow
from tokenmill.flows.training_commands import _settings as training_settings
from tokenmill.tasks.blend.models import DataSource
from tokenmill.tasks.dedup.settings import DedupSettings
from tokenmill.tasks.pack.settings import SftSettings
from tokenmill.tasks.rl.settings import RlSettings
from tokenmill.tasks.score.settings import EmbedSettings, NllSettings
from tokenmill.tasks.select.settings import NormalizationSettings
from tokenmill.tasks.shards.kinds import KINDS, preparation
from tokenmill.tasks.shards.settings import Holdout
from tokenmill.tasks.strict import Size
from tokenmill.tasks.tokenize.settings import PretrainSettings
from tokenmill.tasks.train.pipeline_settings import load_settings
from tokenmill.tasks.train.settings import EvaluateSettings, OrderSettings, TrainSettings

REPOSITORY = Path(__file__).parents[2]
DEPLOYMENTS = {each["name"]: each for each in yaml.safe_load((REPOSITORY / "prefect.yaml").read_text())["deployments"]}

SETTINGS = {
    "pretrain-data-prep": ((), [PretrainSettings(holdout=Holdout(seed=2**64 - 1))]),
    "sft-data-prep": ((), [SftSettings(seed=2**64 - 1)]),
    "rl-data-prep": ((), [RlSettings()]),
    "harmony-normalize": ((), [NormalizationSettings()]),
    "deduplicate-blend": ((), [DedupSettings()]),
    "score-candidates": ((), [NllSettings(model="org/name"), EmbedSettings()]),
    "order-samples": (("settings",), [OrderSettings(sequence_length=8, global_batch=1, steps=1)]),
    "train-model": (("settings",), [TrainSettings()]),
    "evaluate-model": (("settings",), [EvaluateSettings(seed=2**64 - 1)]),
    "pipeline": (("settings",), [load_settings("pipeline-tiny")]),
}
"""Of each deployment, the parameter that holds its settings (none where each is a parameter), and examples of each type."""

VALUES = [
    *(None, True, -1, 0, 1, 7, 1.5, 2**32, -0.5, [], [5], [""], {"zzz": 1}),
    *("", "banana", "0", "0MB", "-5MB", "1,000MB", "64MB more", "64MB", "../a", "null"),
]


@pytest.mark.parametrize("name", KINDS)
def test_the_file_of_a_flow_pictures_the_stages_of_its_kind(name):
    flow = DEPLOYMENTS[KINDS[name].flow]["entrypoint"].rpartition(".")[0]
    picture = import_module(flow).__doc__.partition("\n\n")[2]
    stages = [stage.name for stage in preparation(name).stages]
    assert re.findall("|".join(stages), picture) == stages


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch):
    monkeypatch.chdir(REPOSITORY)


@cache
def schema_of(name):
    """What a deployment sends to the server."""
    os.chdir(REPOSITORY)
    flow = load_flow_from_entrypoint(DEPLOYMENTS[name]["entrypoint"])
    return flow.parameters.model_dump_for_openapi()


@cache
def ready(name):
    return preprocess_schema(schema_of(name))


def refused(name, chosen):
    """What the server says against a run with these parameters besides those of the deployment."""
    return [each.message for each in validate(DEPLOYMENTS[name]["parameters"] | chosen, ready(name), preprocess=False)]


def fields_of(model, place=()):
    """The path of every field, through models that it holds; 0 stands for the first of a list."""
    for name, field in model.model_fields.items():
        yield (*place, name)
        for inner, deeper in models_in(field.annotation):
            yield from fields_of(inner, (*place, name, *deeper))


def models_in(annotation):
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation, ()
    deeper = (0,) if getattr(annotation, "__origin__", None) is list else ()
    for argument in get_args(annotation):
        yield from ((inner, (*deeper, *place)) for inner, place in models_in(argument))


def nested(place, value):
    for part in reversed(place):
        value = [value] if part == 0 else {part: value}
    return value


def refuses(model, place, value):
    """Whether the field itself refuses the value, not a rule that needs other fields too."""
    try:
        model.model_validate(nested(place, value))
    except ValidationError as error:
        return any(is_of(place, detail["loc"]) for detail in error.errors())
    return False


def is_of(place, location):
    """Whether an error at `location` is of the field at `place`; pydantic puts names of types in between."""
    found = iter(location)
    return all(part in found for part in place)


@pytest.mark.slow
@pytest.mark.parametrize("name", SETTINGS)
def test_server_and_setting_reject_the_same_values(name):
    parameter, examples = SETTINGS[name]
    models, missed, caught = [type(each) for each in examples], [], 0
    for place in dict.fromkeys(place for model in models for place in fields_of(model)):
        if not parameter and place[0] not in schema_of(name)["properties"]:
            continue
        for value in VALUES:
            of = [model for model in models if place[0] in model.model_fields]
            may_be_left_out = value is None and len(models) > 1
            if may_be_left_out or not all(refuses(model, place, value) for model in of):
                continue
            caught += 1
            if not refused(name, nested((*parameter, *place), value)):
                missed.append((".".join(map(str, place)), value))
    assert missed == []
    assert caught > 100


@pytest.mark.parametrize("name", SETTINGS)
def test_the_server_accepts_every_default_and_large_seeds(name):
    parameter, examples = SETTINGS[name]
    for settings in examples:
        written = nested(parameter, settings.model_dump(mode="json"))
        taken = {key: value for key, value in written.items() if key in schema_of(name)["properties"]}
        assert refused(name, taken) == []


@pytest.mark.parametrize("size", ["256MB", "1GiB", "1.5 kB", "0.5GB", ".5MB", "7", 7, "64mb", "64M", "010"])
def test_the_server_accepts_every_way_to_write_a_size(size):
    assert TypeAdapter(Size).validate_python(size) > 0
    assert refused("pretrain-data-prep", {"shard_size": size}) == []


def of_one(**fields):
    return {"datasets": [{"name": "a", "path": "a.jsonl", **fields}]}


@pytest.mark.parametrize(
    ("chosen", "sentence"),
    [
        ({"max_bad_row_fraction": 7}, "7 is greater than the maximum of 1"),
        ({"shard_size": "banana"}, "'banana' does not match"),
        ({"workers": 0}, "0 is less than the minimum of 1"),
        ({"scale": "huge"}, "'huge' is not one of ['tiny', 'small', 'medium', 'full']"),
        ({"tokenizer": {"trust_remote_code": True}}, "False was expected"),
        ({"holdout": {"seed": 2**64}}, f"{2**64} is greater than the maximum of {2**64 - 1}"),
        ({"blend": of_one(name="../up")}, "'../up' does not match"),
        ({"blend": of_one(weight=-1)}, "-1 is less than the minimum of 0"),
        ({"blend": of_one(wieght=1)}, "wieght"),
        ({"blend": {"datasets": [], "_comment": 1, "shuffle": True}}, "shuffle"),
        ({"blend": {"datasets": [{"path": "a"}]}}, "'name' is a required property"),
        ({"blend": 7}, "7 is not"),
    ],
)
def test_server_explains_the_error(chosen, sentence):
    with pytest.raises(Refused, match=re.escape(sentence)):
        validate(
            DEPLOYMENTS["pretrain-data-prep"]["parameters"] | chosen,
            schema_of("pretrain-data-prep"),
            raise_on_error=True,
        )


@pytest.mark.parametrize(
    "keys",
    [
        {"fields": {"prompt": "ask", "response": "say"}},
        {"messages_field": "turns.chat", "where": "n > 3"},
        {"split": "train"},
    ],
)
def test_row_file_keys_are_flow_parameters(tmp_path, monkeypatch, keys):
    monkeypatch.setattr("tokenmill.flows.preparation.prepare", lambda _, blend, *__: {"entry": blend.training()[0]})
    flow = preparation_flow("sft")
    defaults = {name: parameter.default for name, parameter in signature(flow.fn).parameters.items()}
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"ask": "q", "say": "a"}\n')
    given = defaults | {"output_dir": str(tmp_path / "out")} | keys
    assert refused("sft-data-prep", {"blend": str(rows), **keys}) == []
    found = flow.fn(**flow.validate_parameters({**given, "blend": str(rows)}))["entry"]
    assert found == DataSource.model_validate({"name": "rows", "path": str(rows), **keys})
    state = flow.fn(**flow.validate_parameters({**given, "blend": {"datasets": [{"name": "a", "path": str(rows)}]}}))
    assert f"{next(iter(keys))}: is a key of a dataset" in state.message


def test_form_hides_remote_code():
    assert "trust_remote_code" not in schema_of("pretrain-data-prep")["definitions"]["TokenizerSettings"]["properties"]


@pytest.mark.parametrize(
    "chosen", [{"keep_versions": 0}, {"grace_seconds": -1}, {"workers": 0}, {"keep_versions": "seven"}]
)
def test_server_rejects_wrong_nightly_parameters(chosen):
    assert refused("reprep-changed-blends", chosen)


@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_prefect_can_write_the_schema_as_json(name):
    """`prefect deployment inspect -o json` writes it with orjson, which takes no integer of more than 64 bits."""
    assert orjson.loads(orjson.dumps(schema_of(name))) == schema_of(name)


@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_the_form_describes_every_parameter_and_every_setting(name):
    schema = schema_of(name)
    ours = [each for each in schema.get("definitions", {}).values() if "properties" in each]
    fields = [field for part in [schema, *ours] for field in part["properties"].items()]
    assert {name for name, field in fields if not field.get("description")} == set()


@pytest.mark.parametrize("name", [name for name, each in DEPLOYMENTS.items() if "blend" in each["parameters"]])
def test_the_form_of_every_kind_takes_remote_and_columnar_sources_and_no_others(name):
    for path in (
        "s3://bucket/rows/*.parquet",
        "gs://bucket/rows",
        "hf://org/name@main",
        "/data/rows.parquet",
        "rows.jsonl.zst",
    ):
        assert (
            refused(name, {"blend": of_one(path=path, weight=0.5, _comment="why") | {"_missing": {"code": 14}}}) == []
        ), path
    assert refused(name, {"blend": "s3://bucket/blend.json", "output_dir": "s3://bucket/out"}) == []
    for path in ("", "  ", 7, None, ["a.parquet"]):
        assert refused(name, {"blend": of_one(path=path)}) != [], path


@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_server_and_flow_reject_an_empty_output_folder(name):
    flow = load_flow_from_entrypoint(DEPLOYMENTS[name]["entrypoint"])
    defaults = {key: each.default for key, each in signature(flow.fn).parameters.items()}
    for blank in ("", "  "):
        assert refused(name, {"output_dir": blank})
        with pytest.raises(ParameterTypeError, match=r"output_dir: .*not a path"):
            flow.validate_parameters(defaults | DEPLOYMENTS[name]["parameters"] | {"output_dir": blank})


@pytest.mark.parametrize("name", SETTINGS)
def test_effective_defaults_are_the_documented_ones(name):
    """docs/settings.md is generated from the models; flows and commands start from the same values."""
    parameter, examples = SETTINGS[name]
    flow = load_flow_from_entrypoint(DEPLOYMENTS[name]["entrypoint"])
    chosen = {
        key: each.default for key, each in signature(flow.fn).parameters.items() if each.default is not each.empty
    }
    for model in map(type, examples):
        fields = {key: each for key, each in model.model_fields.items() if not each.is_required()}
        documented = {key: each.get_default(call_default_factory=True) for key, each in fields.items()}
        if not parameter:
            unset = {key for key in documented if chosen.get(key) is None and len(examples) > 1}  # the mode's default
            assert {key: chosen[key] for key in (documented.keys() & chosen) - unset}.items() <= documented.items()
        elif parameter[0] in chosen:
            assert chosen[parameter[0]] == ("pipeline-tiny" if name == "pipeline" else model())


def test_training_without_a_config_has_the_documented_defaults():
    assert training_settings(None, []) == TrainSettings()
