"""The code that builds shards: a client and its workers must have the same.

A key names the format of the client's code. A worker with older code would build other bytes under it, and no check of a finished
shard would show it. So both compare a digest of the packages that a step imports, and the versions of its kind's libraries.

A digest is taken when a process imports this module: that code it runs, even if its disk changes later. It takes 50 ms.
"""

import re
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import cast
from urllib.parse import urlsplit

from tokenmill.tasks.errors import InputError, RunError
from xxhash import xxh3_64_hexdigest

TASKS = Path(__file__).parents[1]
IMPORT = re.compile(rb"(?:from|import) tokenmill\.tasks\.(\w+)")
CODE = (".py", ".jinja")


def _loaded() -> tuple[dict[str, str], dict[str, frozenset[str]]]:
    """Return the digest of every package (and of the modules next to them), and its imports."""
    contents: dict[str, list[bytes]] = {}
    for path in sorted(path for path in TASKS.rglob("*") if path.suffix in CODE):
        place = path.relative_to(TASKS)
        contents.setdefault(place.parts[0].removesuffix(".py"), []).extend([str(place).encode(), path.read_bytes()])
    whole = {name: b"\0".join(found) for name, found in contents.items()}
    imports = {name: frozenset(match.decode() for match in IMPORT.findall(found)) for name, found in whole.items()}
    return {name: xxh3_64_hexdigest(found) for name, found in whole.items()}, imports


def _digest(digests: Iterable[str]) -> str:
    return xxh3_64_hexdigest("".join(digests).encode())[:8]


DIGESTS, IMPORTS = _loaded()


def code_of(module: str) -> str:
    """Return the digest of the packages that a module of `tokenmill.tasks` is made of."""
    wanted, seen = {module.removeprefix("tokenmill.tasks.").partition(".")[0]}, set[str]()
    while wanted:
        name = wanted.pop()
        seen.add(name)
        wanted |= IMPORTS.get(name, frozenset()) - seen
    return _digest(DIGESTS.get(name, "") for name in sorted(seen))


@cache
def built_with(module: str, libraries: tuple[str, ...]) -> dict[str, str]:
    """Return the code that builds a step here, by name: library versions, and tokenmill's with the digest of its code."""
    found = {name: _version(name) for name in libraries}
    return {**found, "tokenmill": f"{_version('tokenmill')}+{code_of(module)}"}


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "none"


REMEDY = (
    "install the same tokenmill and libraries where workers start, and start them again (`make up` does so for its own); "
    "nothing was built with others"
)


def require_same_here(module: str, planned: Mapping[str, str]) -> None:
    """Raise RunError unless this process has the code that the run was `planned` with."""
    found = differences(planned, built_with(module, tuple(planned)), "in the run")
    if found:
        raise RunError(f"this worker would build other data: {found}; {REMEDY}")


def require_same_there(here: Mapping[str, str], answers: Mapping[str, object]) -> None:
    """Raises InputError unless all workers build with the same as `here`; `answers` are theirs by address, or exceptions."""
    faults = {address: fault for address, answer in answers.items() if (fault := _fault(here, answer))}
    for fault in dict.fromkeys(faults.values()):
        hosts = ", ".join(
            sorted({urlsplit(address).hostname or address for address in faults if faults[address] == fault})
        )
        raise InputError(f"cluster: {len(faults)} of {len(answers)} workers, on {hosts}, {fault}; {REMEDY}")


def _fault(here: Mapping[str, str], answer: object) -> str:
    """Return why a worker can't build the same shards as this process; empty if it can, or is gone."""
    if isinstance(answer, ModuleNotFoundError) and not str(answer.name).startswith("tokenmill."):
        return f"have no {answer.name}, which the run has as {here['tokenmill']}"
    if isinstance(answer, OSError):
        return ""
    if not isinstance(answer, dict):
        return f"have a different tokenmill, without this check; here is {here['tokenmill']}"
    found = differences(here, cast("dict[str, str]", answer), "here")
    return f"would build other data: {found}" if found else ""


def differences(here: Mapping[str, str], there: Mapping[str, str], where: str) -> str:
    """Return `tokenizers 0.22.1 (here 0.23.3)`: the differences there; empty for none."""
    return ", ".join(
        f"{name} {there.get(name, 'none')} ({where} {found})"
        for name, found in here.items()
        if there.get(name) != found
    )


if __name__ == "__main__":
    print(_digest(DIGESTS.values()))  # noqa: T201 - for deployments/local.sh
