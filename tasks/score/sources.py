"""The rows to score: from a published normalization, a blend, or any files."""

from collections.abc import Mapping
from typing import Any, Literal

from tokenmill.tasks.blend.load import load_blend
from tokenmill.tasks.blend.models import Blend
from tokenmill.tasks.errors import InputError
from tokenmill.tasks.harmony.planning import KIND as HARMONY
from tokenmill.tasks.select.shard import PART as CANDIDATES
from tokenmill.tasks.shards.manifest import BLEND, read_manifest
from tokenmill.tasks.storage import absolute, join

What = Literal["nll", "embed"]


def scored_blend(place: Blend | Mapping[str, Any] | str, what: What) -> Blend:
    """The blend to score: the one at `place`, the rows (nll) or candidates (embed) of a published normalization, or the
    rows of a file, folder or glob.

    Raises InputError for an invalid blend, and for a normalization without candidates.
    """
    if not isinstance(place, str) or place.endswith(".json"):
        return load_blend(place)
    folder = absolute(place)
    manifest = read_manifest(folder)
    if manifest is None or manifest["type"] != HARMONY:
        return load_blend({"datasets": [{"name": "rows", "path": folder}]})
    if what == "nll":
        return load_blend(join(folder, BLEND))
    if not manifest.get("selection", {}).get("candidates"):
        raise InputError(
            f"{folder}: this normalization has no candidates to embed; run it again with selection.view=prompt, or name "
            "a folder of rows"
        )
    return load_blend({"datasets": [{"name": CANDIDATES, "path": join(folder, CANDIDATES)}]})
