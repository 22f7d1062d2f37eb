"""The commands of the README and of `docs/`, as they stand there: each is one that exists, with options and settings that exist, and those
about a Prefect server run in a clone, on a host of its own, where nobody else listens on the ports they name.
"""

import json
import re
import shlex
import tomllib
from collections import Counter
from contextlib import ExitStack

import pytest
from tokenmill.flows.cli import app
from tokenmill.flows.options import choices_of
from tokenmill.tasks.described import describe
from tokenmill.tasks.shards.kinds import preparation

from tests import settings_page
from tests.flows.cloning import REPOSITORY, clone_into
from tests.flows.prefect_commands import wait_until
from tests.flows.terminals import RUN_SECONDS, URL, Terminal, lonely_host, started
from tests.preparing import blend_of, write_lines

PAGES = {
    path.relative_to(REPOSITORY): path.read_text("utf-8")
    for path in [
        REPOSITORY / "README.md",
        REPOSITORY / "tests/GUARANTEES.md",
        *sorted((REPOSITORY / "docs").glob("*.md")),
    ]
}
README = "\n".join(PAGES.values())
PROGRAMS = ("make", "pip", "prefect", "tokenmill")
SETTINGS = settings_page.SETTINGS | {"plan": settings_page.SETTINGS["pretrain"]}


def blocks(text):
    """The commands of each block that names no language or shows a terminal, without their remarks."""
    found = re.findall(r"^```(.*?)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [
        [
            re.sub(r"\s+(#|\|\| true).*", "", line.removeprefix("$ ")).strip()
            for line in block.splitlines()
            if not language or line.startswith("$ ")
        ]
        for language, block in found
        if language in {"", "console"}
    ]


def commands(text):
    """The command lines in blocks, and those in the running text that have arguments."""
    standing = [line for block in blocks(text) for line in block]
    inline = [found.replace(" …", "") for found in re.findall(r"`([^`\n]+)`", text) if found.count(" ") > 1]
    return [line for line in [*standing, *inline] if line.split(" ", 1)[0] in PROGRAMS]


def of_tokenmill():
    """The words of each `tokenmill` command, also of those behind a pipe."""
    parts = [part.strip() for line in commands(README) for part in line.split(" | ")]
    return list(dict.fromkeys(part for part in parts if part.startswith("tokenmill ")))


def test_the_readme_shows_every_command():
    shown = {shlex.split(line)[1] for line in of_tokenmill()}
    names = {name for name in app if not name.startswith("-")}
    assert shown | {"demo"} == names, "demo is what `make demo` runs"


@pytest.mark.parametrize("line", of_tokenmill())
def test_readme_commands_exist_with_their_options(line):
    words = shlex.split(line)[1:]
    app.parse_args(words, exit_on_error=False, print_error=False)
    overrides = [word for word in words if re.match(r"[a-z_.]+=", word)]
    if overrides:
        kinds = [words[number + 1] for number, word in enumerate(words) if word == "--kind"]
        name = kinds[0] if kinds else " ".join(words[: 2 if words[0] == "score" else 1])
        choices_of(SETTINGS[name], overrides)


def test_the_tests_and_modules_that_are_named_exist():
    named = re.findall(r"`((?:tests|tasks|flows|blends|deployments)/[\w./-]*)`", README)
    saved = {path for path in named if f"as `{path}`" in README}
    assert [path for path in named if not (REPOSITORY / path).exists() and path not in saved] == []
    assert sum(path.startswith("tests/") for path in named) > 20


def test_the_navigation_has_every_page_once():
    navigation = tomllib.loads((REPOSITORY / "zensical.toml").read_text())["project"]["nav"]
    listed = re.findall(r"'([\w-]+\.md)'", str(navigation))
    assert {page.name for page in PAGES if page.parent.name == "docs"} <= {*listed}
    assert len(listed) == len({*listed})


@pytest.mark.parametrize("path", settings_page.generated(), ids=lambda path: path.name)
def test_generated_files_match_the_models(path):
    assert path.read_text("utf-8") == settings_page.generated()[path], "run python -m tests.settings_page"


@pytest.mark.parametrize(
    ("kind", "group", "required"),
    [
        ("pretrain", "fim", []),
        ("filter", "language", ["model", "keep"]),
        ("filter", "classifiers", ["model", "keep", "name"]),
    ],
)
def test_optional_groups_are_off_unless_set(kind, group, required):
    described = describe(preparation(kind).settings)
    rows = {each.key: each for each in described if each.key.startswith(f"{group}.")}
    assert next(iter(rows.values())).meaning.endswith(f"{group} is off unless set.")
    assert not any(each.required for each in rows.values())
    assert {key.partition(".")[2] for key, each in rows.items() if "Required within" in each.meaning} == {*required}
    assert not any("off unless set" in each.meaning for each in described if each.key.startswith("tokenizer."))


def test_settings_page_lists_each_setting_once():
    rows = [line.split(" | ") for line in settings_page.page().splitlines() if line.startswith("| `")]
    assert max(Counter(tuple(row[:4]) for row in rows).values()) == 1
    assert {row[-1] for row in rows if row[0].startswith("| `holdout.")} == {"pretrain, sft, rl |"}


def test_pages_use_the_public_api_only():
    assert re.findall(r"^(?:from|import) tokenmill\.(?:tasks|flows).*", README, re.MULTILINE) == []


def test_make_targets_are_there():
    targets = re.findall(r"^([a-z-]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)
    inline = re.findall(r"`make ([a-z-]+)`", README)
    standing = [line.split()[1] for line in commands(README) if line.startswith("make ")]
    assert {"demo", "test", "up", "down"} <= {*inline, *standing} <= {*targets}


def test_extras_are_there():
    extras = {name for found in re.findall(r"\.\[([a-z0-9,]+)\]'", README) for name in found.split(",")}
    known = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {"s3", "train"} <= extras <= known.keys()
    listed = re.search(r"Extras: ([^.]*)", (REPOSITORY / "docs/start.md").read_text())[1]
    assert {*re.findall(r"`(\w+)`", listed)} == known.keys() - {"dev"}


SERVER, OTHER_DATA, _ = blocks(re.search(r"^## With a Prefect server\n(.*?)^## ", README, re.MULTILINE | re.DOTALL)[1])
"""The commands from a fresh clone to a run, and one with parameters of its own. (What is set at the server is read in
`test_deployment`.)"""


@pytest.fixture(scope="module")
def host():
    """What a command is put after to run on a host on which nothing listens."""
    with lonely_host() as found:
        yield found


@pytest.fixture(scope="module")
def terminal(host, tmp_path_factory):
    """A shell on the host, in a clone, with the virtual environment active."""
    return Terminal(host, clone_into(tmp_path_factory.mktemp("clone")), tmp_path_factory.mktemp("home"))


@pytest.fixture(scope="module")
def printed(terminal):
    """What each command of the first block printed; server and worker are running."""
    found = {}
    with ExitStack() as stack:
        for line in SERVER:
            if " start" in line:
                context, log = terminal.keep_running(line)
                started(terminal, line, stack.enter_context(context), log)
            else:
                found[line] = terminal.run(line)
        yield found


def run_of(terminal, output):
    """The flow run that a command made, once it has ended."""
    run = re.search(r"UUID: (\S+)", output)[1]

    def ended():
        found = json.loads(terminal.get(f"{URL}/api/flow_runs/{run}"))
        return found if found["state_type"] in {"COMPLETED", "FAILED", "CRASHED", "CANCELLED"} else None

    return wait_until(ended, RUN_SECONDS)


@pytest.mark.weekly
def test_from_a_fresh_clone_to_a_completed_run(terminal, printed):
    assert f"{URL}/api" in README
    (last,) = [line for line in SERVER if line.startswith("prefect deployment run")]
    found = run_of(terminal, printed[last])
    assert found["state_type"] == "COMPLETED", found["state"]
    assert (terminal.folder / found["parameters"]["output_dir"] / "blend.json").exists()


@pytest.mark.weekly
def test_ui_address_in_the_readme(terminal, printed):
    assert "<title>Prefect" in terminal.get(f"{URL}/")
    assert json.loads(terminal.get(f"{URL}/ui-settings"))["api_url"] == f"{URL}/api"


@pytest.mark.weekly
def test_other_data_and_settings_are_parameters(terminal, printed, tmp_path):
    path = tmp_path / "blend.json"
    path.write_text(json.dumps(blend_of(write_lines(tmp_path / "rye.jsonl", ["a grain of rye"] * 40))))
    (line,) = OTHER_DATA
    found = run_of(terminal, terminal.run(line.replace("/data/", f"{tmp_path}/")))
    assert found["state_type"] == "COMPLETED", found["state"]
    assert found["parameters"]["shard_size"] == "64MB"
    assert json.loads((tmp_path / "out/manifest.json").read_text())["totals"]["rows"] == 40
