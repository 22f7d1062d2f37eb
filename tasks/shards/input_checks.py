"""Input checks that don't need a worker: sources exist, outputs are writable, and inputs and outputs do not overlap."""

from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryFile

from tokenmill.tasks.blend.load import load_blend
from tokenmill.tasks.blend.models import Blend
from tokenmill.tasks.errors import InputError
from tokenmill.tasks.sources.discovery import discover, require_no_overlap
from tokenmill.tasks.storage import absolute, is_local, join, user_cache

from .manifest import BLEND, MANIFEST
from .store import size_of


def check_inputs(blend: Blend, store: str | None, output_dir: str) -> None:
    """Raises InputError for missing local sources and unwritable store or output folders, and as `require_separate` does."""
    output_dir = absolute(output_dir)
    for sources in blend.parts().values():
        for source in sources:
            if is_local(source.path):
                discover(source)
    for place in (store_place(store, output_dir), output_dir):
        require_writable(place)
    require_separate(data_sets(blend), store_place(store, output_dir), output_dir)


def store_place(store: str | None, output_dir: str) -> str:
    """The store of shards: the named one, or one in the output folder."""
    return join(output_dir, "shards") if store is None else absolute(store)


def data_sets(blend: Blend) -> list[tuple[str, str]]:
    """A name for messages and the path of each dataset."""
    return [(f"dataset {source.name!r}", source.path) for sources in blend.parts().values() for source in sources]


def require_separate(sources: Iterable[tuple[str, str]], store: str, output_dir: str) -> None:
    """Raises InputError if inputs and outputs overlap.

    `sources` are names for messages, and paths. No source may contain a folder that a preparation writes to, or be inside
    its output folder. A blend.json in the output folder must not be an input blend, because publishing replaces it.
    """
    written = {"the output folder": output_dir, "the store": store, "the cache (XDG_CACHE_HOME)": user_cache()}
    for name, source in sources:
        require_no_overlap(name, source, written, output_dir)
    if _is_input(output_dir):
        raise InputError(
            f"{join(output_dir, BLEND)}: is an input blend, and publishing here would replace it; move it, or choose "
            "a different output folder"
        )


def _is_input(output_dir: str) -> bool:
    """Whether blend.json in the output folder is an input blend, not a published one.

    A published one has a manifest beside it, and names its own folder unless the folder was copied or moved.
    """
    place = join(output_dir, BLEND)
    if size_of(place) is None or size_of(join(output_dir, MANIFEST)) is not None:
        return False
    try:
        paths = [path for _, path in data_sets(load_blend(place))]
    except InputError:
        return False
    return not all(path.startswith(f"{output_dir}/") for path in paths)


def require_writable(place: str) -> None:
    """Raises InputError for a local folder that cannot be made or written."""
    if not is_local(place):
        return
    folder = Path(place)
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir():
        raise InputError(f"{place}: cannot be written, because {folder} is a file; choose a different --output-dir")
    try:
        TemporaryFile(dir=folder).close()
    except OSError as error:
        reason = f"{folder} is not writable ({error.strerror})"
        raise InputError(f"{place}: cannot be written, because {reason}; choose a different --output-dir") from error
