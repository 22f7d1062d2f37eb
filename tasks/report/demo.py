"""The demo: a blend built from Python's standard library.

Its text is the source of the library's modules and their docstrings.
"""

import ast
import sysconfig
from pathlib import Path

import orjson
from rich.console import Console
from tokenmill.tasks.shards.publish import publish, publish_bytes

MOST_BYTES = 24_000_000  # of source text
BLENDS = Path(__file__).parents[2] / "blends"
# Bundled blends of toy conversations and questions
CHAT_BLEND, QUESTIONS_BLEND, HARMONY_BLEND = (str(BLENDS / f"tiny-{kind}.json") for kind in ("sft", "rl", "harmony"))


def write_demo_blend(folder: str) -> str:
    """Write two JSON Lines files and a blend to `folder`; return the path of the blend."""
    library = Path(sysconfig.get_path("stdlib"))
    sources: list[str] = []
    docstrings: list[str] = []
    total = 0
    for module in sorted(path for path in library.rglob("*.py") if "site-packages" not in path.parts):
        try:
            text = module.read_text("utf-8")
            tree = ast.parse(text)
        except (UnicodeDecodeError, SyntaxError, ValueError):  # the library tests Python with such files
            continue
        total += len(text)
        if total > MOST_BYTES:
            break
        sources.append(text)
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                docstrings += filter(None, [ast.get_docstring(node)])
    for name, texts in (("source", sources), ("docstrings", docstrings)):
        with publish(f"{folder}/data/python_{name}.jsonl") as file:
            for text in texts:
                file.write(orjson.dumps({"text": text}, option=orjson.OPT_APPEND_NEWLINE))
    blend = {
        "datasets": [
            {"name": "python-source", "path": "data/python_source.jsonl", "weight": 3.0},
            {"name": "python-docstrings", "path": "data/python_docstrings.jsonl", "weight": 1.0},
        ]
    }
    place = f"{folder}/blend.json"
    publish_bytes(place, orjson.dumps(blend, option=orjson.OPT_INDENT_2))
    return place


def print_next_steps(prepared: str, blend: str, console: Console) -> None:
    """Print the files to look at and three commands to try."""
    console.print(
        f"\n[bold]Look at[/]\n"
        f"  {prepared}/blend.json      the input of Megatron: prefixes and their weights\n"
        f"  {prepared}/manifest.json   the inputs and row counts of each shard\n"
        f"  {prepared}/shards/         shards and prefixes, each with its receipt\n"
        f"  {prepared.removesuffix('prepared')}conversations.html   packed conversations, colored by loss mask\n"
        f"[bold]Try[/]\n"
        f"  tokenmill plan {blend} --output-dir {prepared} shard_size=4MB\n    everything is already built\n"
        f"  change a weight in {blend} and run step 2 again\n    all shards are reused\n"
        f"  flip a byte in {prepared}/shards/prefix/*/train.bin, then verify\n    it names the file"
    )
