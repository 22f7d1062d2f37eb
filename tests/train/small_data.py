"""Small preparations to train on, of texts and of packs, with one small vocabulary."""

from tests import preparing, preparing_sft
from tests.peers.conversations import assistant, talk, user

TEXTS = [f"document {number} says hello to the {number * 7919 % 1000}th world" for number in range(150)]
TALKS = [
    talk(user(f"Question {number}?"), assistant(f"Answer {number * 7919 % 1000}, and so on.")) for number in range(90)
]


def texts(folder, vocabulary, out="out", weights=None, **settings):
    """Prepare two datasets of texts, `a` of 100 and `b` of 50, a fifth of them held out; the output folder and manifest."""
    paths = [
        preparing.write_lines(folder / "a.jsonl", TEXTS[:100]),
        preparing.write_lines(folder / "b.jsonl", TEXTS[100:]),
    ]
    out = out if "://" in str(out) else folder / out
    chosen = {"tokenizer": {"model": str(vocabulary)}, "holdout": {"valid": 0.2, "test": 0}, "shard_size": 3000}
    blend = preparing.blend_of(*paths, **(weights or {"a": 3.0}))
    return str(out), preparing.prepare(blend, out, **{**chosen, **settings})[1]


def packs(folder, vocabulary, out="out", **settings):
    """Prepare two datasets of conversations, `a` of 60 and `b` of 30, in packs of 64; the output folder and manifest."""
    paths = [
        preparing_sft.write_rows(folder / "a.jsonl", TALKS[:60]),
        preparing_sft.write_rows(folder / "b.jsonl", TALKS[60:]),
    ]
    out = out if "://" in str(out) else folder / out
    chosen = {"tokenizer": {"model": str(vocabulary)}, "pack_size": 64, "holdout": {"valid": 0.2, "test": 0}}
    blend = preparing.blend_of(*paths, a=3.0)
    return str(out), preparing_sft.prepare(blend, out, **{**chosen, **settings})[1]
