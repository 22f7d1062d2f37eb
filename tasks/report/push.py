"""Push a preparation to a dataset repository of the Hugging Face hub, private by default and never half-visible.

The repository is looked up or created first, and its visibility is checked, so that private data never becomes public. All
files go in one commit if the hub's limits allow it (1,000 files, and 100 MB of files kept in git). Otherwise the last commit
adds blend.json, manifest.json and README.md, and removes files from earlier pushes that are not in this one. Files of finished
pushes are listed in the repository's manifest. Files from unfinished ones are recognized by their folder and by names that differ
from this push's only in numbers and keys. If new files precede the last commit, the first commit removes the old blend.json
and README.md. So a reader who starts from those two always reads one finished push. A dataset card that no push brought, such
as one that a person wrote, remains, and the generated one is omitted. To finish an interrupted push, run it
again: only missing files are sent, and without changes it doesn't commit.

The token is HF_TOKEN or the saved login, the Hub's address HF_ENDPOINT.

It uploads the files that a preparation's manifest lists, without local paths:

    data/… splits/… train/…   the shards under their published names, and files beside them (tools/…)
    README.md …               the cards of the run (`cards`), made again from the published files
    blend.json                the published one, with paths relative to itself
    manifest.json             the published one without its volatile part, plus the size and hash of every pushed file

Everything else in the output folder remains here: receipts, temporary files, and the quarantine, which has rejected rows with
their local paths. The manifest names local files without their folders. Every push of the same preparation uploads the same
bytes, but for the day in croissant.json.
"""

import os
import re
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, cast

import orjson
from httpx2 import TransportError
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, get_token
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled, RepositoryNotFoundError
from huggingface_hub.hf_api import DatasetInfo
from rich.console import Console
from tokenmill.tasks.errors import InputError, RunError
from tokenmill.tasks.kit.parts import counted
from tokenmill.tasks.seal import sealed, unsealed
from tokenmill.tasks.shards.manifest import (
    BLEND,
    BLENDS,
    MANIFEST,
    PublishedFile,
    content_problem,
    problems_in,
    published_files,
    recorded_outputs,
    size_problem,
    stored_entries,
)
from tokenmill.tasks.shards.publication import MOST_SHOWN, QUARANTINE, described
from tokenmill.tasks.shards.publish import Output
from tokenmill.tasks.shards.store import read_bytes
from tokenmill.tasks.storage import absolute, is_local, join

from .cards import CARD, cards
from .measured import Measured, measured

MOST_FILES = 1_000
MOST_BYTES = 100_000_000
LARGE = 10_000_000  # files of at least this size are never kept in git, so their content isn't part of a commit
LAST = (CARD,)  # files that describe the others; they go in the last commit, with the documents of the parcel
READ_BY = (BLEND, *LAST)  # files that name the row folders
NOT_FOUND, SERVER_ERRORS = 404, 500

# Statuses that the user must fix, with the remedy
MISTAKES = {
    401: "the Hub rejected HF_TOKEN (or the saved login); renew it",
    403: "the token may not write there; use one that may, or push to a different name",
    NOT_FOUND: "the Hub doesn't have this name, or the token may not see it; check the organization and the token",
}

# Transient statuses
PASSING = {
    409: "it changed while this push went on; push again",
    412: "it changed while this push went on; push again",
    429: "too many requests; wait, then push again to continue",
}


# Text that can only be a path: relative to here, or with several slashes
RELATIVE = re.compile(r"\.{1,2}/.+|(?:[\w.-]+/){2,}[\w.-]*")

AGAIN = "run the preparation again to repair it, then push"


@dataclass(frozen=True, slots=True)
class Parcel:
    """What to push: published files, with their paths in the output folder, and documents generated for the hub."""

    output_dir: str
    kind: str
    files: Sequence[PublishedFile]
    documents: Mapping[str, bytes]

    @property
    def sizes(self) -> dict[str, int]:
        """Return the size in bytes of all pushed files, by path. Documents are last."""
        files = {file.recorded.path: file.recorded.size for file in self.files}
        return files | {name: len(content) for name, content in self.documents.items()}


def parcel_of(output_dir: str) -> Parcel:
    """Collect the files of a published preparation, and check that each has its recorded size.

    Raises InputError unless the folder has a complete preparation, and RunError when a file is missing or has the wrong size.
    """
    output_dir = absolute(output_dir)
    if not is_local(output_dir):
        raise InputError(f"{output_dir}: only a local folder can be pushed; prepare the data with a local --output-dir")
    data = measured(output_dir)
    manifest = data.manifest
    if manifest["missing"]:
        raise InputError(f"{output_dir}: {len(manifest['missing'])} planned shards are missing from it; {AGAIN}")
    files = _recorded(data)
    _require(output_dir, files, size_problem)
    _require(output_dir, [file for file in files if file.recorded.path == BLEND], content_problem)  # it is read below
    pushed = [file for file in files if file.recorded.path.partition("/")[0] not in {*BLENDS, QUARANTINE}]
    documents = {**cards(data), BLEND: _relative_blend(output_dir)}
    made = [described(name, content) for name, content in documents.items()]
    # Match the folders that the manifest may name: the output, its store, and those of local source files
    sources = {os.path.dirname(file) for file in data.source_files if is_local(file)}  # noqa: PTH120 - a string
    known = {data.path, data.store.place, *sources} - {"", "/"}
    folders = sorted(known, key=len, reverse=True)
    pattern = re.compile(rf"(?<![\w.-])(?<!:/)(?:{'|'.join(map(re.escape, folders))})/")

    def without_folders(text: str) -> str:
        text = pattern.sub("", text)
        return _name(text) if text.startswith(("/", "~/", "file://")) else text

    def without_path(text: str) -> str:
        # A relative path; a Hub id has one slash and doesn't exist here. A text may be too long for pathlib
        return _name(text) if RELATIVE.fullmatch(text) or os.path.exists(text) else text  # noqa: PTH110

    public = _changed(manifest, without_folders)
    public |= {
        "settings": _changed(public["settings"], without_path),
        "files": [asdict(file) for file in [*(file.recorded for file in pushed), *made]],
        "volatile": {},
    }
    return Parcel(output_dir, manifest["type"], pushed, {**documents, MANIFEST: sealed(public)})


def _recorded(data: Measured) -> list[PublishedFile]:
    """Every published file, once.

    Raises RunError for a shard without a valid receipt, InputError for a file outside the output.
    """
    outputs = recorded_outputs(data.manifest)
    for store, entry in stored_entries(data.manifest):
        if outputs[entry["key"]] is None:
            raise RunError(
                f"{data.path}: the shard of {entry['place']} doesn't have a valid receipt in {store.place}; {AGAIN}"
            )
    files: dict[str, PublishedFile] = {}
    for file in published_files(data.path, data.manifest, outputs):
        path = file.place.removeprefix(f"{data.path}/")
        if path == file.place:
            raise InputError(f"{file.place}: is outside {data.path}; prepare the data with a local store")
        files[file.place] = replace(file, recorded=replace(file.recorded, path=path))
    return list(files.values())


def _require(output_dir: str, files: Iterable[PublishedFile], check: Callable[[str, Output, str], str | None]) -> None:
    problems = problems_in(files, check)
    if problems:
        last = f"{output_dir}: {len(problems)} files differ from the publication; {AGAIN}"
        raise RunError("\n".join([*problems[:MOST_SHOWN], last]))


def _relative_blend(output_dir: str) -> bytes:
    place = join(output_dir, BLEND)

    def relative(text: str) -> str:
        if not text.startswith("/"):
            return text
        if not text.startswith(f"{output_dir}/"):
            raise InputError(f"{place}: {text} is outside this folder, which may have been moved; {AGAIN}")
        return text.removeprefix(f"{output_dir}/")

    return orjson.dumps(_changed(orjson.loads(read_bytes(place) or b""), relative), option=orjson.OPT_INDENT_2)


def _changed(value: Any, change: Callable[[str], str]) -> Any:  # noqa: ANN401 - any JSON
    """JSON with every text in it changed."""
    if isinstance(value, Mapping):
        named = cast("Mapping[str, Any]", value)
        return {name: _changed(each, change) for name, each in named.items()}
    if isinstance(value, list):
        return [_changed(each, change) for each in cast("list[Any]", value)]
    return change(value) if isinstance(value, str) else value


def _name(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2]


@dataclass(frozen=True, slots=True)
class Target:
    """A repository to push to: `head` is its latest commit (None for a new repository), `names` its files."""

    api: HfApi
    repository: str
    private: bool
    head: str | None
    names: frozenset[str]

    @property
    def uri(self) -> str:
        return f"hf://{self.repository}"


def target_of(repository: str, *, public: bool) -> Target:
    """Look up the repository, and check that it has the requested visibility.

    Raises InputError for a repository with the wrong visibility and for a missing or rejected token, and RunError when the Hub
    does not answer.
    """
    if repository.count("/") != 1 or repository.startswith("/") or repository.endswith("/"):
        raise InputError(f"{repository}: not a repository name; write ORG/NAME")
    api = HfApi(endpoint=os.environ.get("HF_ENDPOINT") or None)
    with _hub_errors(repository):
        if get_token() is None:
            raise InputError(f"hf://{repository}: pushing needs a token; set HF_TOKEN, or log in with: hf auth login")
        try:
            info = api.dataset_info(repository)
        except RepositoryNotFoundError as error:
            if error.response.status_code != NOT_FOUND:  # the library raises this for a rejected token, too
                raise
            return Target(api, repository, not public, None, frozenset())
    return _checked(api, repository, info, public=public)


def _checked(api: HfApi, repository: str, info: DatasetInfo, *, public: bool) -> Target:
    private = info.private is True
    if not private and not public:
        raise InputError(
            f"hf://{repository}: is public; push to a different name, make it private in its settings on the Hub, or "
            "pass --public if everyone may read this"
        )
    if private and public:
        raise InputError(
            f"hf://{repository}: is private, and pushing does not change that; remove --public, or make it public "
            "in its settings on the Hub"
        )
    return Target(api, repository, private, info.sha, frozenset(each.rfilename for each in info.siblings or []))


def fitted(parcel: Parcel, target: Target) -> Parcel:
    """Return the parcel without its generated card, if the repository has a card that no push brought."""
    if CARD not in parcel.documents or CARD not in target.names or CARD in _names_in_manifest(target):
        return parcel
    manifest = unsealed(parcel.documents[MANIFEST])
    listed = [file for file in manifest["files"] if file["path"] != CARD]
    documents = {name: content for name, content in parcel.documents.items() if name != CARD}
    return replace(parcel, documents={**documents, MANIFEST: sealed({**manifest, "files": listed})})


def stale_names(parcel: Parcel, target: Target) -> list[str]:
    """Return files from earlier pushes to remove: files in the repository's manifest, and files named like this push's."""
    shapes = {_shape(name) for name in parcel.sizes}
    alike = {name for name in target.names if _shape(name) in shapes}
    return sorted((_names_in_manifest(target) & target.names | alike) - parcel.sizes.keys())


def _shape(name: str) -> tuple[str, str]:
    """The folder of a file, and its name without numbers and keys."""
    folder, _, own = name.rpartition("/")
    return folder, re.sub(r"[0-9a-f]{8,}|\d+", "#", own)


def _names_in_manifest(target: Target) -> set[str]:
    if target.head is None:
        return set()
    with _hub_errors(target.repository):
        data = read_bytes(f"hf://datasets/{target.repository}@{target.head}/{MANIFEST}")
    try:
        return {file["path"] for file in unsealed(data or b"{}").get("files", [])}
    except ValueError:  # not a push's manifest
        return set()


def push(parcel: Parcel, target: Target) -> str:
    """Upload the files that the repository lacks, and return the commit that holds everything.

    Raises RunError when a file changed since publication or the Hub fails, InputError when the Hub rejects the push.
    """
    _require(parcel.output_dir, parcel.files, content_problem)
    stale = stale_names(parcel, target)
    with _hub_errors(target.repository):
        if target.head is None:
            # Create the repository, and check its visibility
            target.api.create_repo(target.repository, repo_type="dataset", private=target.private)
            info = target.api.dataset_info(target.repository)
            target = _checked(target.api, target.repository, info, public=not target.private)
        *first, last = _batches(parcel)
        # Until the last commit, new files would be read with the old blend and card, so the first commit removes these, but
        # keeps a card that wasn't pushed
        early = any(name not in target.names for names in first for name in names)
        ours = target.names & (parcel.sizes.keys() | stale)
        hidden = [name for name in READ_BY if early and name in ours]
        head = target.head
        for number, names in enumerate(first):
            head = _commit(target, parcel, head, names, () if number else hidden)
        head = _commit(target, parcel, head, last, [name for name in stale if name not in hidden])
        # The Hub skips files that a .gitignore there lists, without an error
        info = target.api.dataset_info(target.repository, revision=head, files_metadata=True)
    found = {each.rfilename: each.size for each in info.siblings or []}
    if lost := [name for name, size in parcel.sizes.items() if found.get(name) != size]:
        raise RunError(
            f"{target.uri}@{head}: the Hub skipped {len(lost)} files, {lost[0]} among them; remove .gitignore "
            "from the repository, then push again"
        )
    return head


def _commit(target: Target, parcel: Parcel, head: str | None, names: Sequence[str], stale: Sequence[str]) -> str:
    """Add and remove files in one commit, and return it; its parent must be `head`."""
    additions = [CommitOperationAdd(name, parcel.documents.get(name, join(parcel.output_dir, name))) for name in names]
    commit = target.api.create_commit(
        target.repository,
        [*additions, *map(CommitOperationDelete, stale)],
        commit_message=f"tokenmill push: {parcel.kind}",
        repo_type="dataset",
        parent_commit=head,
    )
    return commit.oid


def _batches(parcel: Parcel) -> list[list[str]]:
    """The files of each commit: as few commits as the hub's limits allow, describing files last."""
    last = [*(file.recorded.path for file in parcel.files if file.recorded.path in LAST), *parcel.documents]
    batches: list[list[str]] = [[]]
    weight = 0
    for name, size in parcel.sizes.items():
        if name in last:
            continue
        in_git = size if size < LARGE else 0  # large files are uploaded before the commit, which only names them
        if len(batches[-1]) == MOST_FILES or weight + in_git > MOST_BYTES:
            batches.append([])
            weight = 0
        batches[-1].append(name)
        weight += in_git
    batches[-1] += last
    return batches


@contextmanager
def _hub_errors(repository: str) -> Generator[None]:
    """Convert errors of the hub to ours, with a remedy."""
    try:
        yield
    except (HfHubHTTPError, HFValidationError, TransportError, ConnectionError) as error:
        raise _as_ours(f"hf://{repository}", error) from error
    except (RuntimeError, ValueError) as error:
        # The library wraps errors of its threads and the hub's rejection of a README.md.
        if isinstance(error.__cause__, (HfHubHTTPError, TransportError)):
            raise _as_ours(f"hf://{repository}", error.__cause__) from error
        raise


def _as_ours(
    where: str, error: HfHubHTTPError | HFValidationError | TransportError | ConnectionError
) -> InputError | RunError:
    if isinstance(error, HFValidationError):
        return InputError(f"{where}: not a valid repository name: {error}")
    if isinstance(error, OfflineModeIsEnabled):
        return InputError(f"{where}: HF_HUB_OFFLINE is set; unset it to push")
    if isinstance(error, (TransportError, ConnectionError)):
        return RunError(
            f"{where}: the Hub cannot be reached ({error}); check the network and HF_ENDPOINT, then push again to continue"
        )
    status, message = error.response.status_code, " ".join((error.server_message or str(error)).split())
    if status in MISTAKES:
        return InputError(f"{where}: {MISTAKES[status]}: {message}")
    problem = f"the Hub rejected the push ({status}); fix the cause, then push again"
    if status >= SERVER_ERRORS:
        problem = f"the Hub failed with {status}; push again to continue"
    return RunError(f"{where}: {PASSING.get(status, problem)}: {message}")


def push_record(parcel: Parcel, target: Target, commit: str | None) -> dict[str, Any]:
    """Return the push as the JSON line for the next program; `commit` is None for a dry run."""
    return {
        "push": {
            "path": f"{target.uri}@{commit}" if commit else target.uri, "type": "push", "commit": commit,
            "files": len(parcel.sizes), "bytes": sum(parcel.sizes.values()), "private": target.private,
        }
    }  # fmt: skip


def print_plan(parcel: Parcel, target: Target, stale: Sequence[str], console: Console) -> None:
    """Print the files of a push, with their sizes, and the repository."""
    for name, size in parcel.sizes.items():
        console.print(f"{size:>15,}  {name}", markup=False, highlight=False, soft_wrap=True)
    for name in stale:
        console.print(f"{'remove':>15}  {name}", markup=False, highlight=False, soft_wrap=True)
    visibility = "private" if target.private else "public"
    state = f"which is {visibility}" if target.head else f"which would be created, {visibility}"
    commits = len(_batches(parcel))
    console.print(
        f"{counted(len(parcel.sizes), 'file')}, {sum(parcel.sizes.values()) / 1e6:,.1f} MB, would go to {target.uri}, {state}"
        + (f", in {commits} commits" if commits > 1 else ""),
        markup=False, highlight=False, soft_wrap=True,
    )  # fmt: skip


def print_pushed(parcel: Parcel, target: Target, commit: str, console: Console) -> None:
    """Print the pushed files, and the repository."""
    console.print(
        f"✓ {counted(len(parcel.sizes), 'file')}, {sum(parcel.sizes.values()) / 1e6:,.1f} MB, "
        f"{'private' if target.private else 'public'}: {target.uri}@{commit}",
        markup=False, highlight=False, soft_wrap=True,
    )  # fmt: skip
