"""Data sets of the Hugging Face hub: `hf://org/name[@revision]` becomes files pinned to one commit.

Branches move, so a branch is resolved to its commit first, and every URI contains the commit: the same files can be read as
long as the repository exists. One request lists a whole repository with sizes and checksums; nothing is downloaded.

The data set's card declares subsets and splits; if it declares none, paths decide (`selection`). Without a subset, the
card's default configuration is used, as in `load_dataset`; without a default, all configurations.
"""

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import unquote

from httpx2 import ConnectError, ConnectTimeout
from huggingface_hub import HfApi
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.hf_api import DatasetInfo, RepoSibling
from tokenmill.tasks.blend.models import DataSource
from tokenmill.tasks.errors import InputError

from .files import Found, SourceFile
from .formats import describe
from .selection import choose, data_names, glob_pattern, kinds_skipped, missing, unread

REFERENCE = re.compile(
    r"hf://(?:datasets/)?(?P<repository>[^/@]+/[^/@]+)"
    r"(?:@(?P<revision>refs/(?:convert|pr)/[^/]+|[^/]+))?(?:/(?P<inside>.+))?/?"
)


@dataclass(frozen=True, slots=True)
class Reference:
    """A data set of the hub: repository, revision (None: the default branch), path or glob inside."""

    repository: str
    revision: str | None
    inside: str | None


@dataclass(frozen=True, slots=True)
class Configuration:
    """A `configs` entry of a card: glob patterns by split; under None, patterns without a split."""

    name: str
    is_default: bool
    patterns: dict[str | None, list[str]]


def hub_files(source: DataSource) -> Found:
    """The files of a hub data set at the current commit of its revision, and how many others were skipped.

    `uri` is `hf://datasets/org/name@commit/path`, `version` the SHA-256 of a large file or the git blob id of a small
    one. Raises InputError if the repository, revision, subset or split does not exist or cannot be accessed.
    """
    reference = parse(source)
    info = _information(reference)
    siblings = {sibling.rfilename: sibling for sibling in info.siblings or []}
    names = data_names(siblings, source.path)
    chosen = _inside(names, reference.inside, source) if reference.inside else _declared(names, info, source)
    root = f"hf://datasets/{reference.repository}@{info.sha}"
    files = [_file(root, siblings[name]) for name in chosen]
    if reference.inside in names:
        return Found(files, {})
    return Found(files, kinds_skipped(siblings, None), unread(siblings, None, lambda name: siblings[name].size or 0))


def parse(source: DataSource) -> Reference:
    """The reference in `source.path`, with the revision of the path or of the `revision` field.

    Raises InputError if the path is malformed or the two revisions differ.
    """
    match = REFERENCE.fullmatch(source.path)
    if not match:
        raise InputError(f"{source.path}: not a data set of the hub; write hf://org/name or hf://org/name@revision")
    in_path = unquote(match["revision"]) if match["revision"] else None
    if in_path and source.revision and in_path != source.revision:
        raise InputError(f"{source.path}: conflicts with 'revision' {source.revision!r}; keep one of the two")
    return Reference(match["repository"], in_path or source.revision, match["inside"])


def _information(reference: Reference) -> DatasetInfo:
    """Commit, files and card of the repository. One request, two for a gated repository."""
    where = f"hf://{reference.repository}" + (f"@{reference.revision}" if reference.revision else "")
    endpoint = os.environ.get("HF_ENDPOINT") or None
    api = HfApi(endpoint=endpoint)
    try:
        info = api.dataset_info(reference.repository, revision=reference.revision, files_metadata=True)
        if info.gated:
            # The metadata of a gated repository is public; this request checks access to its files.
            api.auth_check(reference.repository, repo_type="dataset")
    except (HfHubHTTPError, HFValidationError) as error:
        if reason := _reason(error, reference.revision):
            raise InputError(f"{where}: {reason}") from error
        raise
    except (ConnectError, ConnectTimeout) as error:
        raise InputError(
            f"{where}: {api.endpoint} cannot be reached ({error}); check the network, or name a mirror in HF_ENDPOINT"
        ) from error
    except OfflineModeIsEnabled as error:
        raise InputError(f"{where}: HF_HUB_OFFLINE is set; unset it, or use a local copy of the data") from error
    return info


def _reason(error: HfHubHTTPError | HFValidationError, revision: str | None) -> str | None:
    """The cause of `error` with a remedy; None if the hub itself failed."""
    if isinstance(error, GatedRepoError):
        return "access is restricted; accept the terms on its hub page, then set HF_TOKEN to a token of that account"
    if isinstance(error, RevisionNotFoundError):
        return f"it has no branch, tag or commit {revision!r}; check the revision, or leave it out"
    if isinstance(error, HFValidationError):
        return f"not a valid name of a data set: {error}"
    refused = error.response.status_code in {401, 403}
    if refused and "Invalid credentials" in str(error):
        return f"the hub refused HF_TOKEN (or the saved login); renew it: {error}"
    if refused or isinstance(error, RepositoryNotFoundError):
        return "no such data set, or it is private; check the spelling, or set HF_TOKEN to a token with access"
    return None


def _file(root: str, sibling: RepoSibling) -> SourceFile:
    kind = describe(sibling.rfilename)
    size, version = (sibling.lfs.size, sibling.lfs.sha256) if sibling.lfs else (sibling.size, sibling.blob_id)
    if kind is None or size is None:
        raise InputError(f"{root}/{sibling.rfilename}: the hub does not report its size; check HF_ENDPOINT")
    return SourceFile(f"{root}/{sibling.rfilename}", size, *kind, version=version)


def _inside(names: list[str], inside: str, source: DataSource) -> list[str]:
    """The files of the file, folder or glob `inside` a repository; paths decide subset and split."""
    if inside in names:
        return [inside]
    pattern = glob_pattern(inside)
    found = [name for name in names if name.startswith(f"{inside}/") or pattern.match(name)]
    if not found:
        raise missing(source, "path", inside, names)
    return choose(found, source)


def _declared(names: list[str], info: DatasetInfo, source: DataSource) -> list[str]:
    """The files of the subset and split of `source`, by the card or else by their paths."""
    declared = configurations(info.card_data.to_dict() if info.card_data else {})
    wanted = _wanted(declared, source.subset)
    if not wanted:
        rows = names if source.subset or source.split else _without_root_json(names)
        return choose(rows, source, [configuration.name for configuration in declared])
    chosen = sorted({name for configuration in wanted for name in _of(configuration, names, source)})
    if not chosen:
        patterns = [path for each in wanted for paths in each.patterns.values() for path in paths]
        raise InputError(f"{source.path}: no readable file matches the patterns of its card: {patterns}")
    return chosen


def _wanted(declared: list[Configuration], subset: str | None) -> list[Configuration]:
    """The configuration called `subset`; without a subset the default, or all if there is no default."""
    if subset is not None:
        return [configuration for configuration in declared if configuration.name == subset]
    return [configuration for configuration in declared if configuration.is_default] or declared


def _of(configuration: Configuration, names: list[str], source: DataSource) -> list[str]:
    """The files of a configuration, in the split of `source` if it has one."""
    patterns = configuration.patterns
    if source.split is None:
        return _matching(names, [path for paths in patterns.values() for path in paths])
    if None not in patterns:
        if source.split not in patterns:
            raise missing(source, "split", source.split, [split for split in patterns if split])
        return _matching(names, patterns[source.split])
    return choose(_matching(names, patterns[None]), source.model_copy(update={"subset": None}))


def _matching(names: list[str], patterns: Iterable[str]) -> list[str]:
    compiled = [glob_pattern(pattern) for pattern in patterns]
    return [name for name in names if any(pattern.match(name) for pattern in compiled)]


def _without_root_json(names: list[str]) -> list[str]:
    """`names` without `.json` files at the root, which hold metadata if there are other files."""
    return [name for name in names if "/" in name or not name.endswith(".json")] or names


def configurations(card: dict[str, Any]) -> list[Configuration]:
    """The configurations of a card that declare files.

    `data_files` is a path, a list of paths, `{split: path}`, or a list of `{"split": …, "path": path or paths}`; paths
    are globs below `data_dir` (https://huggingface.co/docs/hub/datasets-manual-configuration).
    """
    entries = cast("list[dict[str, Any]]", card.get("configs") or [])
    return [_configuration(entry) for entry in entries if entry.get("data_files") or entry.get("data_dir")]


def _configuration(entry: dict[str, Any]) -> Configuration:
    name = str(entry.get("config_name", "default"))
    folder = _plain(str(entry.get("data_dir") or ""))
    patterns: dict[str | None, list[str]] = {}
    for split, path in _split_paths(entry.get("data_files") or "**"):
        below = _plain(str(path))
        patterns.setdefault(split, []).append(f"{folder}/{below}" if folder else below)
    return Configuration(name, bool(entry.get("default")) or name == "default", patterns)


def _split_paths(data_files: Any) -> list[tuple[str | None, str]]:  # noqa: ANN401 - from YAML
    if isinstance(data_files, dict):
        named = cast("dict[str, Any]", data_files)
        pairs = [(named.get("split"), named["path"])] if "path" in named else list(named.items())
        return [(split, path) for split, paths in pairs for path in _listed(paths)]
    if isinstance(data_files, list):
        return [pair for item in _listed(data_files) for pair in _split_paths(item)]
    return [(None, str(data_files))]


def _listed(value: Any) -> list[Any]:  # noqa: ANN401 - as above
    return cast("list[Any]", value) if isinstance(value, list) else [value]


def _plain(path: str) -> str:
    return path.removeprefix("./").strip("/")
