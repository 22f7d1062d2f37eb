"""docs/reasons.md lists every reason for dropping a row that is written in the code, and no others."""

import ast
import re
from pathlib import Path
from typing import get_args

import pytest
from tokenmill.tasks.chat.conversation import Reason
from tokenmill.tasks.dedup import decisions
from tokenmill.tasks.filter.models import models_of
from tokenmill.tasks.filter.personal import _kinds
from tokenmill.tasks.filter.settings import FilterSettings, GopherRepetition, PersonalData
from tokenmill.tasks.harmony.semantics import WARNINGS
from tokenmill.tasks.harmony.shard import RULES
from tokenmill.tasks.pack.packs import UNPACKED_REASONS
from tokenmill.tasks.rl.targets import nemo_gym
from tokenmill.tasks.shards.build import FILTERED
from tokenmill.tasks.sources import json_rows, parquet

ROOT = Path(__file__).parents[1]
CODE = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
MADE_BY = {"Rejected", "RejectionError", "Refused", "BadRow", "refuse", "drop", "_empty"}
"""Functions that take a reason."""


def constants(node):
    match node:
        case ast.Constant(str(text)):
            return {text}
        case ast.IfExp(body=first, orelse=second):
            return constants(first) | constants(second)
        case ast.Tuple([first, *_]) | ast.Call(ast.Attribute(ast.Name("REASONS"), "get"), [_, first]):
            return constants(first)
    return set()


def written(node):
    """The reasons that a node of the syntax tree writes out."""
    match node:
        case ast.Call(func=ast.Name(name) | ast.Attribute(attr=name)) if name in MADE_BY:
            return set().union(*map(constants, node.args[:2]))
        case ast.Call(func=ast.Name("Counter")):
            return {keyword.arg for keyword in node.keywords}
        case (
            ast.Subscript(ast.Name("drops"), found)
            | ast.Return(ast.Tuple([_, _]) as found)
            | ast.Yield(ast.Tuple([_, _]) as found)
            | ast.Assign([ast.Name("found") | ast.Tuple([ast.Name("reason"), *_])], ast.Tuple() as found)
            | ast.Assign([ast.Name("reason")], found)
        ):
            return constants(found)
    return set()


def in_code():
    packages = ("sources", "shards", "tokenize", "chat", "harmony", "pack", "rl", "filter", "score", "select")
    files = [path for package in packages for path in (ROOT / "tasks" / package).rglob("*.py")]
    found = {reason for path in files for node in ast.walk(ast.parse(path.read_text())) for reason in written(node)}
    sizes = GopherRepetition()
    return {
        *filter(CODE.fullmatch, found),
        *get_args(Reason),
        *decisions.REASONS,
        *UNPACKED_REASONS.values(),
        *nemo_gym.REASONS.values(),
        *(f"{code}_{rule}" for code, rule in RULES.items() if code not in WARNINGS),
        *re.findall(r'Fault\("(R\d+)"', (ROOT / "tasks/harmony/render.py").read_text()),
        *(f"top_{size}_gram" for size in sizes.top_n_grams),
        *(f"duplicated_{size}_n_grams" for size in sizes.dup_n_grams),
        *(kind.reason for kind in _kinds(PersonalData())),
        *(name for name, _ in models_of(FilterSettings(language={"model": "m", "keep": ["en"]}))),
        *(FILTERED, json_rows.NOT_COMPARABLE, parquet.NULL[0]),
    }


def on_the_page():
    cells = re.findall(r"^\| (`.*?) \|", (ROOT / "docs/reasons.md").read_text("utf-8"), re.MULTILINE)
    return {code for cell in cells for code in re.findall(r"`([^`]+)`", cell)}


@pytest.mark.slow
def test_every_reason_is_explained():
    assert in_code() == on_the_page()
