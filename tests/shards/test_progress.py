from tasks.shards.progress import Tally


def done(key, **changes):
    record = {
        "key": key, "source": "a.jsonl@0", "source_bytes": 100, "documents": 5, "tokens": 50, "dropped": 1, "seconds": 2.0
    }  # fmt: skip
    return {**record, **changes}


def test_a_tally_adds_up_and_counts_a_shard_once():
    tally = Tally(shards=3, source_bytes=300)
    tally.add(done("one"))
    tally.add(done("two", seconds=7.5))
    tally.add(done("one", seconds=0.0))
    assert (tally.done, tally.documents, tally.tokens, tally.dropped) == (2, 10, 100, 2)
    assert tally.share == 200 / 300
    assert "2/3 shards" in tally.sentence()
    assert "slowest 7.5 s (a.jsonl@0)" in tally.sentence()
