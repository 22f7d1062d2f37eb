"""Models on the Hugging Face hub: what names one, which commit it is at, and its files in the hub's cache on this machine.

A branch is resolved to its commit once, and all files are taken from that commit, so that files from two commits are never
mixed. A commit never changes, so it is asked for once per machine; with a commit given, files that are here are
used without a request. If the hub can't be reached, the cache is used as it is.
"""

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from urllib.parse import unquote, urlsplit

from huggingface_hub import constants, hf_hub_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from huggingface_hub.file_download import repo_folder_name
from huggingface_hub.utils import validate_repo_id
from tokenmill.tasks.errors import InputError, RunError
from tokenmill.tasks.runtime import in_threads
from tokenmill.tasks.shards.publish import publish_bytes
from tokenmill.tasks.shards.store import recalled, remembered
from tokenmill.tasks.sources.hub_client import (
    PASSING,
    SECONDS,
    WAITS,
    HubUnreachableError,
    endpoint,
    explained,
    information,
    patiently,
    wait_here,
)
from tokenmill.tasks.storage import user_cache

HOSTS = ("huggingface.co", "www.huggingface.co", "hf.co")

BEFORE_REVISION = frozenset({"tree", "blob", "resolve", "raw", "commit", "commits"})
"""The words of the hub's addresses that a revision follows."""

NO_OWNERS = frozenset({"api", "blog", "collections", "docs", "learn", "models", "organizations", "papers", "posts"})
"""First words in Hub addresses that aren't account names."""

COMMIT = re.compile(r"[0-9a-f]{40}")
FILE = re.compile(r"/?[^/]+\.(?:json|model|tiktoken|jinja|txt)(?:\.v\d+)?")
"""The end of a reference that is a file, because a branch may have slashes too."""

MOST_NAMES = 8
DOWNLOADS = 8
"""Concurrent downloads, as of the hub's own client."""

Choice = Callable[[Sequence[str]], Sequence[str]]
"""The names to fetch of those in a repository."""


@dataclass(frozen=True, slots=True)
class HubModel:
    """A model of the hub: its repository, revision (None: the default branch), and a file or folder in it ("": all)."""

    repository: str
    revision: str | None
    inside: str = ""

    @property
    def name(self) -> str:
        """The model without its revision, as `named_model` reads it."""
        return f"hf://{self.repository}/{self.inside}" if self.inside else self.repository

    @property
    def place(self) -> Path:
        return Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=self.repository, repo_type="model")


def named_model(name: str, revision: str | None, setting: str) -> HubModel:
    """Return the model that `name` means, if it isn't an existing path: an id, `id@revision`, hf://, or a page of the Hub.

    Raises InputError, beginning with the setting, for a missing path, a dataset, a revision that conflicts with `revision`,
    and anything that can't be an id.
    """
    is_page = ("://" in name and not name.startswith("hf://")) or name.partition("/")[0] in HOSTS
    model = _of_page(name, setting) if is_page else _of_id(name, setting)
    try:
        validate_repo_id(model.repository)
    except HFValidationError as error:
        why = " ".join(str(error).split())
        raise InputError(
            f"{setting}: {name!r} is neither a path that exists nor a Hub id such as org/name: {why}"
        ) from error
    if model.revision and revision and model.revision != revision:
        raise InputError(
            f"{setting}: {name!r} names the revision {model.revision!r}, and the setting for revisions is {revision!r}; "
            "keep one of the two"
        )
    return HubModel(model.repository, model.revision or revision, model.inside)


def _of_page(name: str, setting: str) -> HubModel:
    url = urlsplit(name if "://" in name else f"https://{name}")
    parts = [unquote(part) for part in url.path.strip("/").removesuffix(".git").split("/")]
    if url.hostname not in (*HOSTS, urlsplit(endpoint()).hostname):
        raise InputError(f"{setting}: {name!r} is not a page of the Hub; give org/name, or a local path")
    _require_model(parts[0], name, setting)
    if parts[0] in NO_OWNERS:
        raise InputError(f"{setting}: {name!r} is not the page of a model; give org/name, or a local path")
    # An old repository has no owner: gpt2/tree/main.
    end = next((place for place in (1, 2) if parts[place : place + 1] and parts[place] in BEFORE_REVISION), 2)
    verb, rest = parts[end : end + 1], parts[end + 1 :]
    if verb and (verb[0] not in BEFORE_REVISION or not rest):
        raise InputError(f"{setting}: {name!r} is a page next to the model's files; write {'/'.join(parts[:end])}")
    # A pull request's revision is refs/pr/7.
    length = 3 if rest[:1] == ["refs"] else 1
    return HubModel("/".join(parts[:end]), "/".join(rest[:length]) or None, "/".join(rest[length:]))


def _of_id(name: str, setting: str) -> HubModel:
    is_reference = name.startswith("hf://")
    path, _, after = name.removeprefix("hf://").strip("/" if is_reference else "").rstrip("/").partition("@")
    parts = path.split("/")
    if is_reference:
        _require_model(parts[0], name, setting)
        parts = parts[parts[0] == "models" :]
    elif name.startswith((".", "/", "~")) or "\\" in name or len(parts) > 2:  # noqa: PLR2004 - org/name
        raise InputError(f"{setting}: file or folder not found: {name!r}; check the path")
    # Behind the revision of hf://org/name@v1/tokenizer.json there may be a file; slashes alone belong to a branch.
    file = FILE.search(after) if is_reference and "/" in after else None
    revision = unquote(after[: file.start()] if file else after)
    return HubModel("/".join(parts[:2]), revision or None, file[0].strip("/") if file else "/".join(parts[2:]))


def _require_model(kind: str, name: str, setting: str) -> None:
    if kind in {"datasets", "spaces"}:
        raise InputError(
            f"{setting}: {name!r} is a {kind.removesuffix('s')} of the Hub; give a model, such as org/name"
        )


def fetched(model: HubModel, choose: Choice, setting: str) -> Path:
    """Return the local folder with one commit of a model, with the files that `choose` picks; its name is the commit.

    If the hub can't be reached or is busy, the folder as it is in the cache. Raises InputError if that isn't there, if the hub
    rejects, if every file is excluded, or if the cache can't be written.
    """
    where = f"{setting}: {model.name!r}" + (f" (revision {model.revision})" if model.revision else "")
    cached = _cached(model)
    try:
        if cached and cached.name == model.revision:
            names = recalled(_listing(model, cached.name), list[str])
            if names is not None and all((cached / name).is_file() for name in choose(names)):
                return cached  # what a commit holds never changes
        return _downloaded(model, choose, where, waits=() if cached else WAITS)
    except LocalEntryNotFoundError as error:  # the connection was lost between two files
        raise RunError(f"{where}: {' '.join(str(error).split())[:200]}; run the same command again") from error
    except OSError as error:
        # With a filled cache, a hub that is away or busy doesn't stop anybody.
        is_passing = isinstance(error, HfHubHTTPError) and error.response.status_code in PASSING
        if cached and (is_passing or isinstance(error, HubUnreachableError)):
            return cached
        is_absent = isinstance(error, HubUnreachableError)
        raise explained(
            error, "model", f"{where} is neither a local path nor in the Hub's cache" if is_absent else where
        ) from error


def _cached(model: HubModel) -> Path | None:
    """The folder of the commit that the model's revision was at when it was last asked for, if the cache has it."""
    revision = model.revision or "main"
    with suppress(OSError):
        commit = revision if COMMIT.fullmatch(revision) else (model.place / "refs" / revision).read_text().strip()
        folder = model.place / "snapshots" / commit
        return folder if folder.is_dir() else None
    return None


def _downloaded(model: HubModel, choose: Choice, where: str, waits: Sequence[float]) -> Path:
    """The folder of the model's current commit, after its chosen files were downloaded."""
    # One request answers both questions, so a commit in between can't mix two states.
    found = information("model", model.repository, model.revision, waits=waits, seconds=SECONDS)
    commit, names = found["sha"], [sibling["rfilename"] for sibling in found["siblings"]]
    remembered(_listing(model, commit), list[str], lambda: names)
    chosen = choose(names)
    if not chosen:
        derived = any(name.endswith((".gguf", "adapter_config.json")) for name in names)
        remedy = "; name the model that it was made from" if derived else ""
        more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
        held = ", ".join(sorted(names)[:MOST_NAMES]) + more or "no file"
        raise InputError(f"{where}: it has none of the files that are needed; it has {held}{remedy}")
    folder = model.place / "snapshots" / commit
    missing = [name for name in chosen if not (folder / name).is_file()]  # a file of a commit never changes
    download = partial(_download, model, commit)
    for _ in in_threads(lambda name: patiently(partial(download, name), waits=waits), missing, DOWNLOADS):
        pass
    # Only now: the cache must not lead from a branch to a commit of which files are missing.
    if model.revision != commit:
        publish_bytes(str(model.place / "refs" / (model.revision or "main")), commit.encode())
    return folder


def _download(model: HubModel, commit: str, name: str) -> None:
    """Download a file into the cache. Raises HfHubHTTPError also if the Hub's client reports that the file isn't in its cache."""
    wait_here()
    try:
        hf_hub_download(model.repository, name, revision=commit, endpoint=endpoint())
    except LocalEntryNotFoundError as error:
        if isinstance(error.__cause__, HfHubHTTPError):
            raise error.__cause__ from None
        raise


def _listing(model: HubModel, commit: str) -> str:
    return user_cache("hub", f"{model.repository.replace('/', '--')}-{commit}.json")
