import json
import os
import re
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import BaseModel
from rich.console import Console
from tokenmill.flows.options import choices_of
from tokenmill.tasks.errors import closest
from tokenmill.tasks.pack.settings import SftSettings
from tokenmill.tasks.report.summary import artifact_record, markdown, print_summary
from tokenmill.tasks.shards.kinds import KINDS, preparation
from tokenmill.tasks.sources.forms import read_blend

from tests import preparing_rl
from tests.flows.preparation_runs import TOKENMILL, called, ran
from tests.preparing import blend_of, compressed, prepare, tree, write_lines

TINY = Path(__file__).parents[2] / "blends/tiny"
NOWHERE = {"PREFECT_API_URL": "http://127.0.0.1:1/api"}


@pytest.fixture
def data(tmp_path):
    return write_lines(tmp_path / "data" / "a.jsonl", [f"document number {number}" for number in range(200)])


@pytest.fixture
def blend(tmp_path, data):
    path = tmp_path / "blend.json"
    path.write_text(json.dumps(blend_of(data)))
    return path


WRONG = {
    "missing data": ("pretrain", {"path": "data/b.jsonl"}, [], ["b.jsonl", "a.jsonl"]),
    "unknown key": ("pretrain", {"wieght": 1}, [], ["wieght", "did you mean 'weight'"]),
    "tokenizer that is not there": ("pretrain", {}, ["tokenizer.model=./nowhere"], ["./nowhere", "check"]),
    "unknown inner setting": ("pretrain", {}, ["tokenizer.modle=x"], ["tokenizer.modle", "model"]),
    "setting out of bounds": ("pretrain", {}, ["holdout.valid=2"], ["holdout.valid", "less than 1"]),
    "foreign code": ("pretrain", {}, ["tokenizer.trust_remote_code=true"], ["trust_remote_code"]),
    "option that is no number": ("pretrain", {}, ["--sample", "many"], ["many"]),
    "unknown transform": ("rl", {"transforms": ["selct"]}, [], ["transform 1", "'selct'", "did you mean 'select'"]),
    "wrong target": ("rl", {}, ["target=nemo_gim"], ["target", "'nemo_gym'", "'nemo_gim'"]),
    "table that is not there": (
        "rl", {"transforms": [{"resolve_placeholders": {"marbles": {"path": "no_such.parquet", "style": "dapo"}}}]}, [],
        ["'marbles'", "no_such.parquet"],
    ),
    "transforms that nothing takes up": (
        "rl", {"transforms": ["passthrough"]}, ["transforms=[{select: [uuid]}]"], ["transforms", "remove them"]
    ),
    "broken override": ("rl", {}, ["transforms=[{select: [uuid]}"], ["transforms=[{select: [uuid]}", "YAML"]),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_wrong_call_prints_one_line_and_writes_no_files(case, tmp_path, blend):
    command, changes, arguments, expected = WRONG[case]
    content = json.loads(blend.read_text())
    content["datasets"][0].update(changes)
    blend.write_text(json.dumps(content))
    before = sorted(tmp_path.rglob("*"))
    result = called(command, blend, "--output-dir", tmp_path / "out", *arguments)
    (complaint,) = result.stderr.strip().splitlines()
    assert (result.returncode, result.stdout) == (2, "")
    assert all(part in complaint for part in expected), complaint
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("place", ["a_file/out", "/proc/tokenmill", "/sys/tokenmill"])
def test_an_output_that_cannot_be_written_is_a_wrong_call(place, tmp_path, blend, monkeypatch):
    (tmp_path / "a_file").write_text("")
    monkeypatch.chdir(tmp_path)
    result = called("pretrain", blend, "--output-dir", place)
    assert result.returncode == 2, result.stderr
    assert result.stderr.startswith("tokenmill: ")
    assert "choose a different --output-dir" in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_names_in_messages_do_not_control_the_terminal(tmp_path):
    assert called("verify", f"{tmp_path}/\x1b[31mred").stderr.startswith(f"tokenmill: {tmp_path}/␛[31mred: ")


@pytest.mark.slow
def test_a_prefect_server_that_does_not_answer_is_a_wrong_call(tmp_path, blend):
    result = ran(TOKENMILL, "pretrain", blend, "--output-dir", tmp_path / "out", env=os.environ | NOWHERE)
    assert result.returncode == 2, result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert NOWHERE["PREFECT_API_URL"] in result.stderr
    assert "prefect server start" in result.stderr


@pytest.mark.slow
def test_verify_reads_a_record(tmp_path, blend):
    prepare(str(blend), tmp_path / "out", shard_size=1000)
    printed = json.dumps({"pretrain": {"path": str(tmp_path / "out"), "type": "pretrain"}})
    piped = called("verify", stdin=printed)
    assert piped.returncode == 0, piped.stderr
    assert json.loads(piped.stdout)["verify"]["path"] == str(tmp_path / "out")


@pytest.mark.slow
@pytest.mark.parametrize("command", ["train", "pipeline"])
@pytest.mark.parametrize("text", ["steps: [", "- steps", "steps: 1\nsteps: 2"])
def test_training_file_without_settings_is_rejected(tmp_path, command, text):
    (tmp_path / "mine.yaml").write_text(text)
    folders = [tmp_path] * (command == "train")
    refused = called(command, *folders, "--output-dir", tmp_path / "out", "--config", tmp_path / "mine.yaml")
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1), refused.stderr
    assert re.search(r"mine\.yaml: (not valid YAML|must hold a mapping)", refused.stderr)


@pytest.mark.parametrize("text", ["{{ messages }}", "{% for each in messages %}{% endfor %}", "{# none #}"])
def test_a_template_in_an_override_is_text(text):
    assert choices_of(SftSettings, [f"chat_template={text}"]).chat_template == text


def test_options_override_the_config_file_and_overrides_override_both(tmp_path, blend):
    config = tmp_path / "settings.yaml"
    config.write_text("sample: 50\nshard_size: 1kB\ntokenizer: {add_bos: true}\n")
    planned = called("plan", blend, "--format", "json", "--config", config, "--sample", "20", "tokenizer.add_bos=false")
    assert planned.returncode == 0, planned.stderr
    assert planned.stderr.startswith(f"{config}: shard_size=1kB (default 256MB)\n")
    one = json.loads(planned.stdout)["plan"]
    all_rows = json.loads(called("plan", blend, "--format", "json", "shard_size=1kB").stdout)["plan"]
    assert 0 < one["shards"]["total"] < all_rows["shards"]["total"]
    wrong = called("plan", blend, "--config", config, "smaple=3")
    assert wrong.returncode == 2
    assert "sample" in wrong.stderr


@pytest.mark.slow
@pytest.mark.parametrize("command", ["plan", "verify", "--help"])
def test_light_commands_import_neither_prefect_nor_dask(command, tmp_path, blend):
    prepare(str(blend), tmp_path / "out")
    arguments = {"plan": ["plan", str(blend)], "verify": ["verify", str(tmp_path / "out")], "--help": ["--help"]}[
        command
    ]
    heavy = {"prefect", "dask", "distributed", "pandas", *(("numpy", "pyarrow") if command == "--help" else ())}
    script = (
        "import sys; from tokenmill.flows.cli import run; code = run(sys.argv[1:]); "
        f"sys.exit(str(found) if (found := {heavy} & set(sys.modules)) else code)"
    )
    result = ran(sys.executable, "-c", script, *arguments)
    assert result.returncode == 0, (result.returncode, result.stderr)


def test_transforms_are_equal_in_every_spelling(tmp_path):
    """A preparation stands there already; a plan asks for its shard again exactly where its rows would be others."""
    out, config, questions = tmp_path / "out", tmp_path / "settings.yaml", tmp_path / "questions.json"
    questions.write_text(json.dumps(blend_of(TINY / "questions.jsonl")))
    uuid, renamed = [{"select": ["uuid", "agent_ref"]}], [{"rename": {"uuid": "uuid", "asked": "question"}}]
    preparing_rl.prepare(str(questions), out, transforms=uuid)
    published = tree(out)
    config.write_text(json.dumps({"transforms": uuid, "holdout": {"valid": 0, "test": 0}, "max_bad_row_fraction": 1.0}))

    def planned(*arguments):
        result = called("rl", questions, "--output-dir", out, "--dry-run", *arguments)
        assert result.returncode == 0, result.stderr
        ((kind, record),) = json.loads(result.stdout).items()
        assert (kind, record["path"]) == ("plan", str(out))
        return record

    assert planned("--config", config)["shards"] == {"total": 1, "pending": 0, "cached": 1}
    again = planned("--config", config, f"transforms={json.dumps(renamed)}")
    assert again["shards"]["pending"] == 1
    (reason,) = again["reasons"]
    assert reason.startswith("recipe.transforms changed")
    same = planned("transforms=[{select: [uuid, agent_ref]}]", "holdout={valid: 0, test: 0}")
    assert same["shards"]["pending"] == 0
    assert tree(out) == published


# Help, formats, and what is given instead of a blend.


@pytest.mark.parametrize("kind", [*KINDS])
def test_the_help_of_a_kind_lists_every_setting_that_it_takes(kind):
    """The fields of the model, walked here in another way, are the truth."""
    record = preparation(kind)

    def keys(model, prefix=""):
        for name, field in model.model_fields.items():
            value = field.get_default(call_default_factory=True)
            inner = type(value) if isinstance(value, BaseModel) else None
            yield from keys(inner, f"{prefix}{name}.") if inner else [f"{prefix}{name}"]

    shown = called(*KINDS[kind].command.split(), "--help").stdout
    listed = set(re.findall(r"^│ \*? +?(\S+)|^│ (\S+)", shown, re.MULTILINE))
    listed = {name for pair in listed for name in pair if name}
    listed |= {
        "".join(parts) for parts in re.findall(r"^│ +(\S+) .*\n│ +(\.\S+)", shown, re.MULTILINE)
    }  # wrapped names
    expected = {key for key in keys(record.settings) if key.split(".")[0] not in record.hidden}
    unlisted = {key for key in expected - listed if not any(name.startswith(f"{key}.") for name in listed)}
    assert not unlisted
    assert not {key for key in listed if key.split(".")[0] in record.hidden}


def test_the_examples_of_a_command_are_settings_that_it_takes(tmp_path, blend):
    for command, arguments in {
        "sft": (blend, "--output-dir", tmp_path / "out"),
        "rl": (blend, "--output-dir", tmp_path / "out"),
        "choose": (tmp_path, "--output-dir", tmp_path / "out"),
        "pretrain": (blend, "--output-dir", tmp_path / "out"),
    }.items():
        wrong = called(command, *arguments, "nothing")
        assert wrong.returncode == 2
        example = re.search(r"for example (\S+)=", wrong.stderr)[1]
        text = f"{command} --help"
        assert example in called(command, "--help").stdout, text
    assert "pack_size" not in called("pretrain", "--help").stdout


def test_a_plan_is_printed_in_the_format_that_is_asked_for(blend):
    found = {each: called("plan", blend, "--format", each).stdout for each in ("json", "text", "table")}
    assert json.loads(found["json"])["plan"]["files"] == 1
    assert "───" in found["table"]
    assert "───" not in found["text"]
    assert all("1 of 1 shard to build" in found[each] for each in ("text", "table"))
    assert called("plan", blend).stdout == found["table"]
    assert called("plan", blend, "--format", "yaml").returncode == 2


def test_a_view_is_printed_in_the_format_that_is_asked_for(tmp_path, blend, data):
    prepare(str(blend), tmp_path / "out")
    found = {each: called("view", tmp_path / "out", "--format", each).stdout for each in ("json", "text", "table")}
    (pack,) = json.loads(found["json"])["view"]["packs"]
    text = pack["sequences"][0]["passages"][0]["text"]
    assert text.startswith("document number")
    assert text.splitlines()[0][:17] in found["text"]
    assert "trained on" in found["table"]
    assert text not in found["table"]
    assert called("view", tmp_path / "out").stdout == found["text"]


def test_a_story_is_printed_in_the_format_that_is_asked_for(tmp_path, blend, data):
    prepare(str(blend), tmp_path / "out")
    row = f"{data}:17"
    found = {each: called("why", tmp_path / "out", "--row", row, "--format", each).stdout for each in ("json", "text")}
    ((fate,),) = json.loads(found["json"])["why"]["stories"]
    assert (fate["file"], fate["line"]) == (str(data), 17)
    assert f"kept as document {fate['document']} of" in " ".join(found["text"].split())
    assert called("why", tmp_path / "out", "--row", row).stdout == found["text"], "also where stdout is a pipe"


@pytest.mark.parametrize("name", ["a b.jsonl", "rows.jsonl.gz", "rows.jsonl.zst", "rows.parquet", "rows.ndjson"])
def test_a_file_of_rows_is_a_blend_of_it(tmp_path, name):
    texts = [f"document number {number}" for number in range(50)]
    path = tmp_path / name
    if name.endswith(".parquet"):
        pq.write_table(pa.table({"text": texts}), path)
    else:
        path.write_bytes(compressed(name, write_lines(tmp_path / "plain", texts).read_bytes()))
    planned = called("plan", path, "--format", "json", "holdout={valid: 0, test: 0}")
    assert planned.returncode == 0, planned.stderr
    assert json.loads(planned.stdout)["plan"]["files"] == 1
    (source,) = read_blend(str(path)).datasets
    assert (source.name, source.path) == (name.partition(".")[0].replace(" ", "-"), str(path))


CHAT = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}


@pytest.mark.parametrize(
    ("command", "rows", "advice"),
    [
        ("pretrain", [CHAT] * 20, "tokenmill sft"),
        ("dedup", [CHAT] * 20, "tokenmill sft"),
        ("sft", [{"text": "a document"}] * 20, "tokenmill pretrain"),
        ("pretrain", [CHAT] * 19 + [{"text": "a document"}], "missing_field 19"),
        ("pretrain", [{**CHAT, "text": "both"}] * 20, None),
        ("sft", [{"text": "both", "prompt": "Hi", "response": "Hello"}] * 20, None),
        ("pretrain", [{"txt": "a document"}] * 20, "did you mean 'txt'?"),
        ("rl", [CHAT] * 20, None),
    ],
)
def test_rows_of_a_different_form_name_the_command(tmp_path, command, rows, advice):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = called(command, path, "--output-dir", tmp_path / "out", "--dry-run")
    refusals = [line for line in result.stderr.splitlines() if line.startswith("tokenmill: ")]
    assert [advice in line and "rows.jsonl" in line for line in refusals] == [True] * bool(advice), result.stderr
    assert (result.returncode == 0) == (not advice)


@pytest.mark.parametrize(
    ("name", "known", "meant"),
    [
        ("weigth", ["weight", "width"], "weight"),
        ("data.json", ["math.json", "code.json"], None),
        ("wbe.json", ["web.json", "code.json"], "web.json"),
        ("text", ["question", "uuid", "agent_ref"], None),
        ("chat", ["math", "code"], None),
        ("blend.json", ["blend.json.bak", "blends.json"], "blends.json"),
    ],
)
def test_only_a_close_name_is_suggested(name, known, meant):
    assert closest(name, known) == meant


def test_splits_are_ordered_train_valid_test(tmp_path, blend, capsys):
    _, manifest = prepare(str(blend), tmp_path / "out", holdout={"valid": 0.2, "test": 0.2})
    assert list(artifact_record(manifest, "out")["pretrain"]["splits"]) == ["train", "valid", "test"]
    print_summary(manifest, "out", Console(file=sys.stderr))
    shown = capsys.readouterr().err
    assert re.findall(r"^ +(train|valid|test): ", shown, re.MULTILINE) == ["train", "valid", "test"]
    assert re.findall(r"^\* (train|valid|test): ", markdown(manifest, "out"), re.MULTILINE) == [
        "train",
        "valid",
        "test",
    ]
    assert "built 1 shard, reused 0" in shown


@pytest.mark.slow
def test_a_mix_is_estimated_before_a_preparation_exact_after_it_and_written_for_megatron(tmp_path, data):
    other = write_lines(data.parent / "b.jsonl", ["another document"] * 300)
    path = tmp_path / "blend.json"
    phases = [{"name": "main", "share": 0.75}, {"name": "end", "share": 0.25, "mix": {"b": 0.9}}]
    budget = {"tokens": 600, "phases": phases}
    path.write_text(json.dumps({**blend_of(data, other), **budget}))
    out = tmp_path / "out"
    before = json.loads(called("mix", path, "--output-dir", out, "--format", "json").stdout)["mix"]
    assert {each["estimated"] for each in before["datasets"].values()} == {True}
    manifest = prepare(str(path), out)[1]
    done = called(
        "mix", path, "--output-dir", out, "--format", "json", "--step-tokens", 60, "--write", tmp_path / "plain"
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["mix"]
    held = {name: sum(e["tokens"]["train"] for e in manifest["shards"] if e["dataset"] == name) for name in ("a", "b")}
    assert {name: each["tokens"] for name, each in found["datasets"].items()} == held
    assert not any(each["estimated"] for each in found["datasets"].values())
    assert [phase["drawn"] for phase in found["phases"]] == [{"a": 225, "b": 225}, {"a": 15, "b": 135}]
    assert found["steps"] == [8, 10]
    for name in ("main", "end"):
        words = json.loads((tmp_path / f"plain/phases/{name}.json").read_text())["train"]
        assert all(Path(f"{prefix}{end}").exists() for prefix in words[1::2] for end in (".bin", ".idx"))
    shown = called("mix", path, "--output-dir", out, "--format", "text", "--step-tokens", 60).stdout
    assert "Megatron-LM: --train-samples $((10 * GLOBAL_BATCH)) --phase-transition-iterations 8" in shown
    refused = called("mix", path, "--tokens", 0)
    assert refused.returncode == 2


@pytest.mark.slow
def test_demo_cannot_replace_a_file(data):
    done = called("demo", "--output-dir", data)
    assert (done.returncode, done.stderr) == (
        2,
        f"tokenmill: {data}: cannot be written, because {data} is a file; choose a different --output-dir\n",
    )
