"""Every kind: how a night explains that a source changed, a source that lost its rows, and the story of every row."""

import json
import os
from collections import Counter

import pytest
import yaml
from tokenmill.tasks.dataset.fates import FOLLOWED
from tokenmill.tasks.errors import RunError
from tokenmill.tasks.nightly.blends import KINDS as NIGHTLY
from tokenmill.tasks.nightly.blends import find_blends
from tokenmill.tasks.nightly.night import compare_blend, follow_prepared
from tokenmill.tasks.report.summary import artifact_record
from tokenmill.tasks.report.why import why_row

from tests.building import prepare_here
from tests.kinds.preparations import LONG_AGO
from tests.preparing import tree

pytestmark = pytest.mark.slow


@pytest.fixture
def sources(prepared):
    """The JSON Lines that are prepared; afterwards they are as they were."""
    paths = [*prepared.folder.glob("*.jsonl"), *prepared.folder.glob("*/*.jsonl")]
    found = {path: path.read_bytes() for path in sorted(paths) if path.stem != "exam"}
    yield found
    for path, content in found.items():
        path.write_bytes(content)
        os.utime(path, LONG_AGO)


def test_a_night_names_what_changed(prepared, sources, tmp_path):
    if prepared.kind not in NIGHTLY:
        pytest.skip("is not prepared at night")
    folder = tmp_path / "blends" / prepared.kind
    folder.mkdir(parents=True)
    (folder / "some.json").write_text(json.dumps(prepared.blend))
    (folder / "some.yaml").write_text(yaml.safe_dump(prepared.settings))
    (blend,) = find_blends(str(tmp_path / "blends"))

    def up_to_date():
        """Prepare a version if there is a reason to; the reasons."""
        compared = compare_blend(blend, str(tmp_path / "out"), {}, 1.7e9)
        if compared.reasons:
            _, manifest = prepare_here(prepared.kind, blend.path, compared.path, **compared.chosen)
            follow_prepared(compared, artifact_record(manifest, compared.path))
        return compared.reasons

    (first,) = up_to_date()
    assert first.startswith("nothing was published before")
    assert up_to_date() == []
    path, content = next(iter(sources.items()))
    path.write_bytes(content.replace(b'": ', b'":\t', 1))
    (reason,) = up_to_date()
    assert reason.endswith(f": 1 changed ({path.name})")
    assert up_to_date() == []


def test_a_source_that_lost_its_rows_is_not_published(prepared, sources):
    prepared.run()
    before, names = tree(prepared.out), {path.stem for path in sources} | {path.parent.name for path in sources}
    for left, words in ((3, r"\d+ documents?, \d+% fewer than the \d+ "), (0, "gave no documents")):
        for path, content in sources.items():
            path.write_bytes(b"\n".join(content.splitlines()[:left]) + b"\n\n")
        with pytest.raises(RunError, match=rf"{words}.*allow_shrink=\["):
            prepared.run()
        found = tree(prepared.out)
        assert {name for name in before if not name.startswith("shards/") and found[name] != before[name]} <= {
            "manifest.json"
        }
    assert {*prepared.run(allow_shrink=sorted(names))[1]["totals"]["datasets"]}


def test_every_row_has_a_story(prepared, sources):
    if prepared.kind not in FOLLOWED:
        pytest.skip("scores are joined to rows by ids")
    _, manifest = prepared.run()
    fates = [
        fate
        for path, content in sources.items()
        for line in range(1, len(content.splitlines()) + 1)
        for fate in why_row(str(prepared.out), f"{path}:{line}")[0]
    ]
    assert len(fates) == manifest["totals"]["rows"]
    assert sum(fate.kept for fate in fates) == manifest["totals"]["documents"]
    assert Counter(fate.reason for fate in fates if not fate.kept) == manifest["totals"]["dropped"]
