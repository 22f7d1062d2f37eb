"""What can be known to be wrong before anything is started."""

from pathlib import Path
from tempfile import TemporaryFile

from tasks.blend.models import Blend
from tasks.errors import InputError
from tasks.sources.discovery import discover
from tasks.storage import absolute, is_local


def require_usable(blend: Blend, store: str | None, output_dir: str) -> None:
    """Raises InputError for local sources that are not there, and for a store or output folder that cannot be written."""
    for sources in blend.parts().values():
        for source in sources:
            if is_local(source.path):
                discover(source)
    for place in (store or output_dir, output_dir):
        _require_writable(absolute(place))


def _require_writable(place: str) -> None:
    if not is_local(place):
        return
    folder = Path(place)
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir():
        raise InputError(f"{place}: cannot be written, because {folder} is a file; choose another --output-dir")
    try:
        TemporaryFile(dir=folder).close()
    except OSError as error:
        reason = f"{folder} does not take files ({error.strerror})"
        raise InputError(f"{place}: cannot be written, because {reason}; choose another --output-dir") from error
