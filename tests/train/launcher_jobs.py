"""Jobs that launchers are given."""

from tokenmill.tasks.strict import parse
from tokenmill.tasks.train.job import Job, TrainData, TrainPhase, TrainSource
from tokenmill.tasks.train.settings import TrainSettings

FOLDER = "/data/runs/it's $HOME and 100%"
"""What shells, templates and string formats would all like to change."""

HUB = {"model": "org/tokenizer", "revision": None, "trust_remote_code": False}
ENCODING = {"model": "o200k_harmony", "revision": None, "trust_remote_code": False}


def job(kind="pretrain", tokenizer=ENCODING, output_dir=FOLDER, path="/data/pre pared", **settings):
    """A job on one dataset with train and valid."""
    ending = ".parquet" if kind == "sft" else ""
    sources = [
        TrainSource(dataset="a", split=split, files=[f"{path}/{split}/00{ending}"], weights=[1.0], tokens=1000)
        for split in ("train", "valid")
    ]
    data = TrainData(
        path=path, kind=kind, made_from="xxh3_128:00", tokenizer=tokenizer, fingerprint="sha256:00", vocabulary_size=1000,
        eos=7, sources=sources, pack_size=512 if kind == "sft" else None, pad_seq_to_mult=4 if kind == "sft" else None,
    )  # fmt: skip
    return Job(settings=parse(TrainSettings, settings, "settings"), data=data, output_dir=output_dir)


def phased(**settings):
    """A job with two phases of 3 and 2 steps."""
    made = job(launcher="megatron-lm", processes=8, global_batch=8, micro_batch=1, **settings)
    train, valid = made.data.sources
    sources = [
        train.model_copy(update={"phase": number, "weights": [weight], "files": [f"/d/{number}"]})
        for number, weight in ((0, 24.0), (1, 16.0))
    ]
    phases = [TrainPhase(name="main", tokens=384, samples=24), TrainPhase(name="end", tokens=256, samples=16)]
    data = made.data.model_copy(update={"sources": [*sources, valid], "phases": phases})
    return made.model_copy(update={"data": data})
