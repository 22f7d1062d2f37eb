"""A blend is up to date once it was prepared, and no longer once a file changed that its settings name."""

import json
import os

import pytest
import yaml
from tokenmill.tasks.nightly.blends import find_blends
from tokenmill.tasks.nightly.night import compare_blend, follow_prepared
from tokenmill.tasks.report.summary import artifact_record

from tests import preparing_harmony
from tests.nightly.nights import FIRST, at
from tests.preparing_sft import write_rows

CHAT = [
    {"messages": [{"role": "user", "content": f"q {n}"}, {"role": "assistant", "content": "yes"}]} for n in range(20)
]


class OneBlend:
    """A blend of a kind over one file of conversations, with settings."""

    def __init__(self, folder, kind, prepare, settings, **source):
        self.folder, self.out, self.prepare = folder, str(folder / "out"), prepare
        self.blends = folder / "blends"
        (self.blends / kind).mkdir(parents=True)
        os.utime(write_rows(folder / "chat.jsonl", CHAT), (1_000_000_000, 1_000_000_000))
        data_set = {"name": "chat", "path": str(folder / "chat.jsonl"), **source}
        (self.blends / kind / "chat.json").write_text(json.dumps({"datasets": [data_set]}))
        (self.blends / kind / "chat.yaml").write_text(yaml.safe_dump(settings))

    def compare(self):
        (blend,) = find_blends(str(self.blends))
        return compare_blend(blend, self.out, {}, at(FIRST))

    def bring_up_to_date(self):
        compared = self.compare()
        _, manifest = self.prepare(compared.blend.path, compared.path, **compared.chosen)
        follow_prepared(compared, artifact_record(manifest, compared.path))
        assert self.compare().reasons == []


@pytest.mark.slow
def test_harmony_is_up_to_date_until_pools_or_evaluations_change(tmp_path):
    pools, evaluations = tmp_path / "pools.yaml", write_rows(tmp_path / "exam.jsonl", [{"text": "who is it? " * 20}])
    pools.write_text(
        yaml.safe_dump({"pools": [{"name": "all", "description": "all", "predicate": "stats_token_len > 0"}]})
    )
    exam = {"datasets": [{"name": "exam", "path": str(evaluations)}]}
    settings = {
        "max_bad_row_fraction": 1.0, "selection": {"pools": str(pools), "view": "none"}, "dedup": {"evaluations": exam},
    }  # fmt: skip
    blend = OneBlend(tmp_path, "harmony", preparing_harmony.prepare, settings, converter="openai_messages")
    blend.bring_up_to_date()
    pools.write_text(pools.read_text().replace("> 0", "> 1"))
    assert blend.compare().reasons == ["selection.pools: the files it names changed"]
    write_rows(evaluations, [{"text": "who was it? " * 20}])
    assert blend.compare().reasons == [
        "dedup.evaluations: the files it names changed", "selection.pools: the files it names changed",
    ]  # fmt: skip
