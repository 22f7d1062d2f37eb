"""Datasets of the Hugging Face hub: `hf://org/name[@revision]` becomes files pinned to one commit.

Branches move, so a branch is resolved to its commit first, and every URI contains the commit: the same files can be read as
long as the repository exists. One request lists a whole repository with sizes and checksums; nothing is downloaded.

Subsets and splits match `datasets.load_dataset`: the card declares them, or else paths decide (`selection`). Without a
subset, the default configuration is used; a repository with several configurations and no default needs a subset. Training data
without a split is `train`, and unread files are counted. If several formats have the same rows, one is read.
"""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from posixpath import normpath
from typing import Any, cast
from urllib.parse import unquote

from huggingface_hub.errors import HFValidationError, RevisionNotFoundError
from huggingface_hub.hf_api import DatasetInfo, RepoSibling
from huggingface_hub.utils import validate_repo_id
from tokenmill.tasks.blend.models import DataSource
from tokenmill.tasks.errors import InputError

from .files import Found, InputWarning, SourceFile
from .formats import describe
from .hub_client import explained, information, require_access
from .selection import (
    MissingSplitError,
    all_splits,
    data_names,
    ending_of,
    glob_pattern,
    kinds_skipped,
    missing,
    of_one_format,
    of_split,
    of_subset,
    shortened,
    split_called,
    unread,
)

REFERENCE = re.compile(
    r"(?P<repository>[^/@]+/[^/@]+|[^/@]+(?=@|\Z))"
    r"(?:@(?P<revision>refs/(?:convert|pr)/[^/]+|[^/]+))?(?:/(?P<inside>.+))?"
)

CONVERTED = "refs/convert/"
"""Where the hub keeps copies of a dataset in other formats, which `~parquet` is short for."""

OTHER_KINDS = {"models": "model", "spaces": "Space", "buckets": "bucket"}


Splits = Mapping[str, list[str]]
"""The files of each split."""


@dataclass(frozen=True, slots=True)
class Configuration:
    """A subset that a card declares: a folder, and in it glob patterns by split; without patterns, paths decide."""

    name: str = "default"
    is_default: bool = True
    folder: str = ""
    patterns: Mapping[str, list[str]] = field(default_factory=dict[str, list[str]])

    def splits(self, names: Sequence[str]) -> Splits:
        """Return the files of each split among the `names` of a repository."""
        prefix = f"{self.folder}/" if self.folder else ""
        below = [name.removeprefix(prefix) for name in names if name.startswith(prefix)]
        found: Splits = {} if self.patterns else all_splits(below)
        for split, paths in self.patterns.items():
            globs = [glob_pattern(path) for path in paths]
            found = {
                **found,
                split: [name for name in below if name in paths or any(glob.match(name) for glob in globs)],
            }
        return {split: [prefix + name for name in files] for split, files in found.items()}


def hub_files(source: DataSource, wanted: str | None = None) -> Found:
    """Return the files of a hub dataset at the current commit of its revision, and how many others were skipped.

    `wanted` is the split to take of several where `source` names none; None takes all. `uri` is
    `hf://datasets/org/name@commit/path`, `version` the SHA-256 of a large file or the git blob id of a small one. Raises
    InputError if the repository, revision, subset or split does not exist or cannot be accessed.
    """
    info, inside = _information(*parse(source))
    siblings = {sibling.rfilename: sibling for sibling in info.siblings or []}
    names = data_names(siblings, source.path)
    root = f"hf://datasets/{info.id}@{info.sha}"
    if inside in names:  # one file: nothing else was asked for, so nothing is unread
        return Found([_file(root, siblings[inside])], {})
    offered, splits = _inside(names, inside, source) if inside else _declared(names, info, source)
    taken = _taken(splits, offered, source, wanted)
    chosen = sorted({name for files in taken.values() for name in of_one_format(files)})
    sizes = {name: sibling.size or 0 for name, sibling in siblings.items()}
    # Data files that the source silently omits are warned about; of several causes, the last counts.
    causes: dict[str, tuple[str, str]] = {}
    if source.split is None:
        causes.update(dict.fromkeys(offered, ("unread_subset", "files without a split or from a different subset")))
        causes.update({name: ("unread_split", f"split {split!r}") for split, files in splits.items() for name in files})
    for files in filter(None, taken.values()):
        read = ending_of(of_one_format(files)[0])
        causes.update({name: ("unread_format", f"{ending_of(name)} beside {read}") for name in files})
    left: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for name in sorted(causes.keys() - {*chosen}):
        left[causes[name]].append(name)
    warnings = unread(siblings, None, sizes.__getitem__)
    for (kind, what), files in sorted(left.items()):
        size = sum(sizes[name] for name in files)
        warnings.append(InputWarning(kind, f"{what}, such as {files[0]}", len(files), size))
    return Found([_file(root, siblings[name]) for name in chosen], kinds_skipped(siblings, None), warnings)


Readings = Sequence[tuple[str | None, str | None]]
"""Revision (None: the default branch) and path or glob inside a repository, both as a path may be meant: in `@feature/x/y`, the
branch may be `feature`, `feature/x` or `feature/x/y`.
"""


def parse(source: DataSource) -> tuple[str, Readings]:
    """Return the repository in `source.path`, and its readings, with the revision of the path or of the `revision` field.

    Raises InputError if the path is malformed or the two revisions differ.
    """
    place = source.path.removeprefix("hf://").strip("/")
    kind, _, rest = place.partition("/")
    if kind in OTHER_KINDS:
        raise InputError(f"{source.path}: is a {OTHER_KINDS[kind]}, and sources are datasets; write hf://org/name")
    match = REFERENCE.fullmatch(rest if kind == "datasets" and rest else place)
    if not match:
        raise InputError(f"{source.path}: not a dataset of the Hub; write hf://org/name or hf://org/name@revision")
    in_path, inside = match["revision"], match["inside"]
    if in_path is None:
        return match["repository"], [(source.revision, inside)]
    # A branch may have slashes, so each step may be part of its name.
    steps = [in_path, *(inside or "").split("/")] if inside else [in_path]
    readings = [("/".join(steps[:size]), "/".join(steps[size:]) or None) for size in range(1, len(steps) + 1)]
    # The Hub's own short form of a copy in a different format is `~parquet`.
    plain = ((unquote(revision), inside) for revision, inside in readings)
    readings = [(CONVERTED + name[1:] if name.startswith("~") else name, inside) for name, inside in plain]
    if source.revision is None:
        return match["repository"], readings
    if same := [reading for reading in readings if reading[0] == source.revision]:
        return match["repository"], same
    raise InputError(f"{source.path}: conflicts with 'revision' {source.revision!r}; keep one of the two")


def _information(repository: str, readings: Readings) -> tuple[DatasetInfo, str | None]:
    """Commit, files and card of the repository, and the path inside it. One request, two for a gated repository.

    Raises an error in a line, with the cause and a remedy.
    """
    # In `@feature/x/y`, only the Hub knows how much is the branch: the shortest reading is tried first, and its error is shown.
    missing: list[Exception] = []
    for revision, inside in readings:
        where = f"hf://{repository}" + (f"@{revision}" if revision else "")
        try:
            validate_repo_id(repository)
            info = DatasetInfo(**information("dataset", repository, revision, sizes=True))
            if info.gated:  # the listing is public, so the refusal would come with the first row
                require_access("dataset", info.id)
        except RevisionNotFoundError as error:
            missing.append(explained(error, "dataset", where))
        except (OSError, HFValidationError) as error:
            raise explained(error, "dataset", where) from error
        else:
            return info, inside
    raise missing[0]


def _file(root: str, sibling: RepoSibling) -> SourceFile:
    kind = describe(sibling.rfilename)
    # LFS names content by its SHA-256; git names a small file by its blob, which is as good.
    size, version = (sibling.lfs.size, sibling.lfs.sha256) if sibling.lfs else (sibling.size, sibling.blob_id)
    if kind is None or size is None:
        raise InputError(f"{root}/{sibling.rfilename}: the Hub does not report its size; check HF_ENDPOINT")
    return SourceFile(f"{root}/{sibling.rfilename}", size, *kind, version=version)


def _inside(names: list[str], inside: str, source: DataSource) -> tuple[list[str], Splits]:
    """Return the files in a folder or glob of a repository, and their splits; files of a glob are `train` unless `source` names one."""
    below, pattern = [name for name in names if name.startswith(f"{inside}/")], glob_pattern(inside)
    found = below or [*filter(pattern.match, names)]
    if not found:
        raise missing(source, "path", inside, names)
    if source.subset is not None:
        found = of_subset(found, source)
    whole = Configuration(folder=inside if below else "", patterns={} if below or source.split else {"train": [inside]})
    return found, whole.splits(found)


def _declared(names: list[str], info: DatasetInfo, source: DataSource) -> tuple[list[str], Splits]:
    """Return the files among which `source` chooses, and their splits: of a configuration, or else of a folder."""
    declared = configurations(info.card_data.to_dict() if info.card_data else {})
    known = [configuration.name for configuration in declared]
    if source.subset is None:
        defaults = [each for each in declared if each.is_default or len(declared) == 1]
        if len(defaults) == 1:
            return names, defaults[0].splits(names)
        raise InputError(
            f"{source.path}: has {len(declared)} subsets and {'several defaults' if defaults else 'no default'} (dataset "
            f"{source.name!r}); name one of them in 'subset': {shortened(known)}"
        )
    for configuration in declared:
        if configuration.name == source.subset:
            splits = configuration.splits(names)
            return [name for files in splits.values() for name in files], splits
    # A card that declares nothing has the subset `default`, which the user hasn't written and isn't shown.
    found = of_subset(names, source, known if declared != [Configuration()] else [])
    return found, all_splits(found)


def _taken(splits: Splits, offered: list[str], source: DataSource, wanted: str | None) -> Splits:
    """The splits that are read: the one that `source` names, the only one, or `wanted` (None: all).

    Raises MissingSplitError if the split doesn't exist, and InputError if every file is excluded.
    """
    if source.split is not None:
        taken = {source.split: of_split(splits, offered, source)}
    elif wanted is None or len(splits) == 1:  # the only split is meant, whatever it is called
        taken = splits
    elif (called := split_called(splits, wanted)) is not None:
        taken = {called: splits[called]}
    else:
        raise MissingSplitError(
            f"{source.path}: has several splits and no {wanted!r} (dataset {source.name!r}); name one of them in 'split': "
            f"{shortened([*splits])}"
        )
    if not any(taken.values()):
        raise InputError(
            f"{source.path}: no readable file is in {' or '.join(map(repr, taken))} (dataset {source.name!r}), though the "
            "dataset's card declares it; name a different subset or split, or a path inside the repository"
        )
    return taken


def configurations(card: dict[str, Any]) -> list[Configuration]:
    """Return the configurations that a card declares, or the default one, of the whole repository.

    `data_files` is a path, a list of paths, `{split: path}`, or a list of `{"split": …, "path": path or paths}`; paths
    are globs below `data_dir` (https://huggingface.co/docs/hub/datasets-manual-configuration).
    """
    found: list[Configuration] = []
    for entry in _listed(card.get("configs") or []):
        if not isinstance(entry, dict):
            continue
        declared = cast("dict[str, Any]", entry)
        name, patterns = str(declared.get("config_name", "default")), dict[str, list[str]]()
        for split, path in _split_paths(declared.get("data_files") or []):
            patterns.setdefault(split, []).append(_plain(path))
        is_default = bool(declared.get("default")) or name == "default"
        found.append(Configuration(name, is_default, _plain(declared.get("data_dir") or ""), patterns))
    return found or [Configuration()]


def _split_paths(data_files: Any) -> list[tuple[str, Any]]:  # noqa: ANN401 - from YAML
    """Each path of `data_files` with its split."""
    if isinstance(data_files, dict):
        named = cast("dict[str, Any]", data_files)
        # `{"split": …, "path": …}`, or else each key is a split
        pairs = [(named.get("split", "train"), named["path"])] if "path" in named else list(named.items())
        return [(str(split), path) for split, paths in pairs for path in _listed(paths)]
    if isinstance(data_files, list):
        return [pair for item in _listed(data_files) for pair in _split_paths(item)]
    return [("train", data_files)]


def _listed(value: Any) -> list[Any]:  # noqa: ANN401 - as above
    return cast("list[Any]", value) if isinstance(value, list) else [value]


def _plain(path: Any) -> str:  # noqa: ANN401 - as above
    """A path in a repository without `./` and without slashes at its ends."""
    plain = normpath(str(path)).strip("/")
    return "" if plain == "." else plain
