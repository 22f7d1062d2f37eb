"""The rules of the code that a parser can check: each is a function from a module's syntax tree to its violations."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]

LEVELS = [
    "kit", "blend", "sources", "shards", "tokenize", "chat", "harmony", "pack", "rl", "dedup", "filter", "select", "score",
    "dataset", "train", "report", "nightly",
]  # fmt: skip
"""The packages of `tasks/`, lowest first. Modules directly in `tasks/` are below all of them, flows above."""

LONGEST_FUNCTION = 60

WRITERS = ("tasks/shards/publish.py",)

WRITING_CALLS = {
    *(f"os.{name}" for name in ["write", "pwrite", "writev", "sendfile", "copy_file_range", "truncate", "ftruncate"]),
    *(f"os.{name}" for name in ["replace", "rename", "renames", "link", "symlink", "mkfifo"]),
    *(f"shutil.{name}" for name in ["copy", "copy2", "copyfile", "copyfileobj", "copytree", "move", "make_archive"]),
    *(f"numpy.{name}" for name in ["save", "savez", "savez_compressed", "savetxt", "memmap"]),
    *(f"pyarrow.{name}" for name in ["OSFile", "output_stream", "create_memory_map"]),
    *(f"pyarrow.parquet.{name}" for name in ["write_table", "write_to_dataset", "write_metadata"]),
    "pyarrow.feather.write_feather",
    "json.dump",
}
WRITING_METHODS = {
    *("write_text", "write_bytes", "touch", "rename", "hardlink_to", "symlink_to", "link_to"),
    *("tofile", "to_parquet", "to_csv", "to_json", "to_feather", "save_to_disk"),
    *(
        "pipe",
        "pipe_file",
        "put_file",
        "cp_file",
        "copy_file",
        "mv",
        "mv_file",
        "open_output_stream",
        "open_append_stream",
    ),
}
WRITING_FLAGS = {"O_WRONLY", "O_RDWR", "O_CREAT", "O_APPEND", "O_TRUNC"}

HTML = re.compile(r"</(?:html|head|body|style|section|table|t[hdr]|h[1-6]|p|ul|li|dl|dd|pre|svg|figure|span|a)>")

MODE = r"[rbtU]*[wax+][rbtwax+]*"
"""What a writing mode looks like, to tell it from a name where either may stand."""

READER = "tasks/dataset/stored.py"
PACK_COLUMNS = {"seq_start_id", "role_start"}

PICKLING = {"pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}

BOUNDARIES = {("tasks/shards/stage.py", "_failure"), ("tasks/shards/runner.py", "_starting")}
"""The functions that may catch anything, to put it in words: what a batch on another machine died of, and why a cluster class
that a user has named does not start.
"""

DASK = {"dask", "distributed", "prefect_dask"}


@dataclass(frozen=True)
class Module:
    """A module's path in the repository, and its tree with every name resolved through its imports."""

    path: str
    tree: ast.Module

    @property
    def package(self):
        """The package the module is in, '' for modules directly in `tasks/`, 'flows' for flows."""
        top, *rest = self.path.split("/")
        return top if top == "flows" else rest[0] if len(rest) > 1 else ""

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """Every node of the tree."""
        return list(ast.walk(self.tree))

    def imports(self) -> Iterator[tuple[ast.stmt, str]]:
        """Every imported dotted name, `from a import b` giving `a.b`, wherever in the module it stands."""
        for node in self.nodes:
            if isinstance(node, ast.Import):
                yield from ((node, alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                own = ["tokenmill", *self.path.removesuffix(".py").split("/")]
                package = own[: -node.level] if node.level else []
                source = ".".join([*package, *filter(None, [node.module])])
                yield from ((node, f"{source}.{alias.name}") for alias in node.names)

    def names(self) -> dict[str, str]:
        """What each name bound by an import stands for."""
        bound = {}
        for node in self.nodes:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    bound[alias.asname or alias.name.split(".")[0]] = (
                        alias.name if alias.asname else alias.name.split(".")[0]
                    )
            elif isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    bound[alias.asname or alias.name] = f"{node.module}.{alias.name}"
        return bound

    @cached_property
    def calls(self) -> list[tuple[ast.Call, str]]:
        """Every call and the dotted name of what is called; what is not a name becomes `?`."""
        names = self.names()
        return [(node, dotted(node.func, names)) for node in self.nodes if isinstance(node, ast.Call)]


def dotted(node, names):
    if isinstance(node, ast.Name):
        return names.get(node.id, node.id)
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value, names)}.{node.attr}"
    return "?"


def at(node, problem):
    return f"{node.lineno}: {problem}"


def writes_only_through_publish(module):
    if module.path in WRITERS:
        return
    for call, name in module.calls:
        method = name.rpartition(".")[2]
        if name in WRITING_CALLS or ("." in name and method in WRITING_METHODS):
            yield at(call, f"{name}() writes")
        elif method in {"open", "fdopen"} and opens_for_writing(call, name):
            yield at(call, f"{name}() may write")
        elif "." in name and method == "put" and len(call.args) > 1:
            yield at(call, f"{name}() uploads")
        elif "." in name and method == "replace" and len(call.args) == 1 and not call.keywords:
            yield at(call, f"{name}() with one argument renames a file")


def opens_for_writing(call, name):
    """Whether the mode or the flags of an `open` say more than reading, or cannot be read off the source.

    Nothing is written to the null device.
    """
    if call.args and dotted(call.args[0], {}) == "os.devnull":
        return False
    if name == "os.open":
        return any(isinstance(node, ast.Attribute) and node.attr in WRITING_FLAGS for node in ast.walk(call))
    modes = [keyword.value for keyword in call.keywords if keyword.arg == "mode"] + call.args[1:2]
    if "." in name and not modes:
        modes = call.args[:1]  # `Path.open` takes its mode first, where others take a name
        return any(isinstance(mode, ast.Constant) and re.fullmatch(MODE, str(mode.value)) for mode in modes)
    return any(not isinstance(mode, ast.Constant) or re.search(r"[wax+]", str(mode.value)) for mode in modes)


def imports_prefect_only_in_stages_and_flows(module):
    if module.package == "flows" or module.path.endswith("/stage.py"):
        return
    for node, name in module.imports():
        if name.split(".")[0] == "prefect":
            yield at(node, "prefect is imported outside of stage.py and flows/")


def imports_dask_only_in_shards(module):
    if module.package == "shards":
        return
    for node, name in module.imports():
        if name.split(".")[0] in DASK:
            yield at(node, f"{name} is imported outside of tasks/shards/")


def imports_packages_only_downwards(module):
    level = level_of(module.package)
    if level is None:
        yield f"1: {module.package} is not a known package"
        return
    for node, name in module.imports():
        first, _, within = name.partition(".")
        top, _, rest = within.partition(".")
        if first in {"flows", "tasks"}:
            yield at(node, f"{name} is imported without tokenmill")
        if first != "tokenmill":
            continue
        if top == "flows" and module.package != "flows":
            yield at(node, f"{name} lies above {module.package or 'tasks'}")
        if top != "tasks":
            continue
        package = rest.split(".")[0]
        package = package if (REPOSITORY / "tasks" / package).is_dir() or package in LEVELS else ""
        if package != module.package and not level_of(package) < level:
            yield at(node, f"{name} does not lie below {module.package or 'tasks'}")


def level_of(package):
    if package in {"", "flows"}:
        return -1 if package == "" else len(LEVELS)
    return LEVELS.index(package) if package in LEVELS else None


def catches_only_what_it_names(module):
    boundary = [node for node in module.nodes if (module.path, getattr(node, "name", "")) in BOUNDARIES]
    exempt = {inner for outer in boundary for inner in ast.walk(outer)}
    for node in module.nodes:
        if not isinstance(node, ast.ExceptHandler) or node in exempt:
            continue
        caught = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
        broad = {getattr(kind, "id", None if kind else "everything") for kind in caught}
        raises_on = isinstance(node.body[-1], ast.Raise) and node.body[-1].exc is None
        if broad & {"everything", "Exception"} or ("BaseException" in broad and not raises_on):
            yield at(node, "a broad except; name the errors (BaseException may be caught to clean up and raise on)")
    for call, name in module.calls:
        if name == "contextlib.suppress" and {getattr(kind, "id", "") for kind in call.args} & {
            "Exception",
            "BaseException",
        }:
            yield at(call, "a broad suppress; name the errors")


def pickles_nothing(module):
    for node, name in module.imports():
        if name.split(".")[0] in PICKLING:
            yield at(node, f"{name} runs code from data")
    for call, name in module.calls:
        if name.rpartition(".")[2] in {"read_pickle", "to_pickle"}:
            yield at(call, f"{name}() pickles")
        for keyword in call.keywords:
            if keyword.arg == "allow_pickle" and getattr(keyword.value, "value", True):
                yield at(call, f"{name}(allow_pickle=True) runs code from data")


def reads_published_tokens_in_dataset(module):
    """Above `pack`, one module opens `.idx` files, decodes packs, and knows that their loss mask is shifted."""
    if level_of(module.package) in {None, *range(level_of("pack") + 1)} or module.path == READER:
        return
    for node, name in module.imports():
        if name.startswith(("tokenmill.tasks.tokenize.binidx", "tokenmill.tasks.pack.parquet")):
            yield at(node, f"{name} is imported outside of {READER}")
    for node in module.nodes:
        if isinstance(node, ast.Constant) and node.value in PACK_COLUMNS:
            yield at(node, f"{node.value} is a column of packs; read them with {READER}")


def keeps_functions_short(module):
    for node in module.nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = node.end_lineno - node.lineno + 1
            if lines > LONGEST_FUNCTION:
                yield at(node, f"{node.name} has {lines} lines; {LONGEST_FUNCTION} are the most")


def says_what_it_is(module):
    if not ast.get_docstring(module.tree):
        yield "1: no module docstring"


def writes_html_only_in_the_kit(module):
    if module.path.startswith("tasks/kit/"):
        return
    for node in module.nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and HTML.search(node.value):
            yield at(node, f"{HTML.search(node.value)[0]} is HTML; it belongs into a template of tasks/kit/templates")
    for node, name in module.imports():
        if name in {"html.escape", "markupsafe.escape"}:
            yield at(node, f"{name} is for HTML, which tasks/kit writes")


LAWS = [
    writes_only_through_publish,
    imports_prefect_only_in_stages_and_flows,
    imports_dask_only_in_shards,
    imports_packages_only_downwards,
    catches_only_what_it_names,
    pickles_nothing,
    reads_published_tokens_in_dataset,
    keeps_functions_short,
    says_what_it_is,
    writes_html_only_in_the_kit,
]


@pytest.fixture(scope="module")
def modules():
    paths = sorted([*REPOSITORY.glob("flows/**/*.py"), *REPOSITORY.glob("tasks/**/*.py")])
    assert paths
    return [Module(str(path.relative_to(REPOSITORY)), ast.parse(path.read_text())) for path in paths]


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_every_module_keeps_the_rule(modules, law):
    found = [f"{module.path}:{violation}" for module in modules for violation in law(module)]
    assert not found, "\n" + "\n".join(found)


def violations(law, source, path):
    return list(law(Module(path, ast.parse(source))))


LONG = "def f():\n" + "    x = 1\n" * LONGEST_FUNCTION

BAD = [
    (writes_only_through_publish, "tasks/pack/a.py", source)
    for source in [
        "open('x', 'w')",
        "open('x', mode='ab')",
        "open('x', mode)",
        "import gzip\ngzip.open('x', 'wt')",
        "import os\nos.open('x', os.O_RDONLY | os.O_CREAT)",
        "import os as system\nsystem.link('x', 'y')",
        "from os import rename\nrename('x', 'y')",
        "Path('x').open('w')",
        "Path('x').open(mode='a')",
        "Path('x').write_text('y')",
        "Path('x').replace('y')",
        "from shutil import move as m\nm('x', 'y')",
        "import pyarrow.parquet as pq\npq.write_table(table, 'x')",
        "import pyarrow.parquet\npyarrow.parquet.write_table(table, 'x')",
        "import pyarrow as pa\npa.OSFile('x', 'wb')",
        "import json\njson.dump({}, stream)",
        "fs.open('x', 'wb')",
        "fs.pipe_file('x', b'y')",
        "fs.put('x', 'y')",
        "filesystem(uri)[0].put_file('x', 'y')",
    ]
] + [
    (imports_prefect_only_in_stages_and_flows, "tasks/pack/a.py", "import prefect"),
    (imports_prefect_only_in_stages_and_flows, "tasks/shards/a.py", "from prefect.artifacts import create"),
    (imports_prefect_only_in_stages_and_flows, "tasks/a.py", "def f():\n    from prefect import task"),
    (imports_dask_only_in_shards, "tasks/pack/stage.py", "import dask.array"),
    (imports_dask_only_in_shards, "flows/sft.py", "from prefect_dask import DaskTaskRunner"),
    (imports_dask_only_in_shards, "tasks/pack/a.py", "def f():\n    from distributed import get_worker"),
    (imports_packages_only_downwards, "tasks/blend/a.py", "from tokenmill.tasks.sources.files import Slice"),
    (imports_packages_only_downwards, "tasks/sources/a.py", "import tokenmill.tasks.shards.publish"),
    (imports_packages_only_downwards, "tasks/shards/a.py", "from tokenmill.tasks.tokenize import binidx"),
    (imports_packages_only_downwards, "tasks/tokenize/a.py", "from tokenmill.tasks.chat import template"),
    (imports_packages_only_downwards, "tasks/chat/a.py", "from tokenmill.tasks import pack"),
    (imports_packages_only_downwards, "tasks/chat/a.py", "from ..pack import algorithms"),
    (imports_packages_only_downwards, "tasks/train/a.py", "from tokenmill.tasks.report.tables import table"),
    (imports_packages_only_downwards, "tasks/report/a.py", "from tokenmill.flows.sft import sft"),
    (imports_packages_only_downwards, "tasks/errors.py", "from tokenmill.tasks.blend import models"),
    (imports_packages_only_downwards, "tasks/attic/a.py", "import os"),
    (imports_packages_only_downwards, "flows/a.py", "from tasks.blend import models"),
    (catches_only_what_it_names, "tasks/pack/a.py", "try:\n    f()\nexcept:\n    pass"),
    (catches_only_what_it_names, "tasks/pack/a.py", "try:\n    f()\nexcept Exception:\n    raise"),
    (catches_only_what_it_names, "flows/cli.py", "try:\n    f()\nexcept (OSError, Exception) as e:\n    pass"),
    (catches_only_what_it_names, "tasks/pack/a.py", "try:\n    f()\nexcept BaseException:\n    pass"),
    (catches_only_what_it_names, "tasks/pack/a.py", "from contextlib import suppress\nwith suppress(Exception):\n    f()"),
    (catches_only_what_it_names, "tasks/shards/stage.py", "def g():\n    try:\n        f()\n    except Exception:\n        pass"),
    (pickles_nothing, "tasks/pack/a.py", "import pickle"),
    (pickles_nothing, "tasks/shards/a.py", "from cloudpickle import dumps"),
    (pickles_nothing, "tasks/pack/a.py", "import numpy as np\nnp.load('x', allow_pickle=True)"),
    (pickles_nothing, "tasks/pack/a.py", "import pandas as pd\npd.read_pickle('x')"),
    (reads_published_tokens_in_dataset, "tasks/train/a.py", "from tokenmill.tasks.tokenize.binidx import read_index"),
    (reads_published_tokens_in_dataset, "tasks/report/a.py", "import tokenmill.tasks.pack.parquet"),
    (reads_published_tokens_in_dataset, "flows/a.py", "batch.column('seq_start_id')"),
    (keeps_functions_short, "tasks/pack/a.py", LONG),
    (keeps_functions_short, "tasks/pack/a.py", "async " + LONG),
    (says_what_it_is, "tasks/pack/__init__.py", ""),
    (writes_html_only_in_the_kit, "tasks/report/a.py", "page = f'<h1>{title}</h1>'"),
    (writes_html_only_in_the_kit, "tasks/report/a.py", "from html import escape"),
    (says_what_it_is, "flows/a.py", "# a comment is not a docstring\nx = 1"),
]  # fmt: skip


@pytest.mark.parametrize(("law", "path", "source"), BAD, ids=[f"{law.__name__}-{source}" for law, _, source in BAD])
def test_the_law_bites(law, path, source):
    assert violations(law, source, path)


GOOD = [
    (writes_only_through_publish, "tasks/pack/a.py", source)
    for source in [
        "open('x')",
        "open('x', 'rb')",
        "open(3, closefd=False)",
        "Path('x').open()",
        "Path('data').open('rb')",
        "fs.open(path)",
        "fs.open('wax', 'rb')",
        "import os\nos.open('x', os.O_RDONLY)",
        "import os\nos.open(os.devnull, os.O_WRONLY)",
        "'text'.replace('x', 'y')",
        "import dataclasses\ndataclasses.replace(record, size=1)",
        "queue.put(item)",
        "import pyarrow.parquet as pq\npq.ParquetWriter(publication, schema).write_table(table)",
        "import json\njson.dumps({})",
    ]
] + [
    (writes_only_through_publish, WRITERS[0], "import os\nos.replace('x', 'y')"),
    (imports_prefect_only_in_stages_and_flows, "tasks/pack/stage.py", "from prefect import task"),
    (imports_prefect_only_in_stages_and_flows, "flows/sft.py", "from prefect import flow"),
    (imports_prefect_only_in_stages_and_flows, "tasks/shards/a.py", "import prefect_dask"),
    (imports_dask_only_in_shards, "tasks/shards/map.py", "import distributed"),
    (imports_packages_only_downwards, "tasks/chat/a.py", "from tokenmill.tasks.chat.b import c\nfrom . import d"),
    (imports_packages_only_downwards, "tasks/shards/a.py", "from tokenmill.tasks.sources import files\nfrom tokenmill.tasks.errors import InputError"),
    (imports_packages_only_downwards, "flows/sft.py", "from tokenmill.tasks.report import tables\nfrom tokenmill.flows.cli import main"),
    (catches_only_what_it_names, "tasks/pack/a.py", "try:\n    f()\nexcept (OSError, ValueError):\n    pass"),
    (catches_only_what_it_names, "tasks/pack/a.py", "try:\n    f()\nexcept BaseException:\n    g()\n    raise"),
    (catches_only_what_it_names, "tasks/shards/stage.py", "def _failure():\n    try:\n        f()\n    except Exception:\n        pass"),
    (reads_published_tokens_in_dataset, READER, "from tokenmill.tasks.tokenize.binidx import read_index"),
    (reads_published_tokens_in_dataset, "tasks/pack/a.py", "batch.column('seq_start_id')"),
    (keeps_functions_short, "tasks/pack/a.py", LONG.removesuffix("    x = 1\n")),
    (writes_html_only_in_the_kit, "tasks/kit/html.py", "row = '</tr>'"),
    (writes_html_only_in_the_kit, "tasks/report/a.py", "'name the text <path> or <a>'"),
    (says_what_it_is, "tasks/pack/a.py", '"""What it is."""'),
]  # fmt: skip


@pytest.mark.parametrize(("law", "path", "source"), GOOD, ids=[f"{law.__name__}-{source}" for law, _, source in GOOD])
def test_the_law_lets_good_code_pass(law, path, source):
    assert violations(law, source, path) == []


def importers():
    """The modules that each module imports, by their paths."""
    paths = {
        str(path.relative_to(REPOSITORY)): path
        for top in ("flows", "tasks")
        for path in (REPOSITORY / top).rglob("*.py")
    }
    names = {path.removesuffix(".py").removesuffix("/__init__").replace("/", "."): path for path in paths}
    found = {}
    for path, place in paths.items():
        imported = [name.removeprefix("tokenmill.") for _, name in Module(path, ast.parse(place.read_text())).imports()]
        found[path] = {names[each] for name in imported for each in (name, name.rpartition(".")[0]) if each in names}
    return {path: imports - {path} for path, imports in found.items()}


def test_no_module_imports_itself_in_a_circle():
    remaining = importers()
    while free := {path for path, imports in remaining.items() if not imports & remaining.keys()}:
        remaining = {path: imports for path, imports in remaining.items() if path not in free}
    assert sorted(remaining) == []
