"""Write `VERSION.tar.xz` with a version of tokenmill: small sources, and what its commands made of them.

    git clone . /tmp/old/tokenmill; git -C /tmp/old/tokenmill checkout VERSION
    .venv/bin/pip install --no-deps --target /tmp/site /tmp/old/tokenmill
    PYTHONPATH=/tmp/site .venv/bin/python -P tests/upgrades/write.py VERSION .venv/bin/python -P -m tokenmill

Every path begins with /proc/self/cwd, the folder that a process works in, so that the absolute names in outputs hold wherever
an archive is unpacked. Add one, with a row in `VERSIONS` of `test_upgrades.py`, when the files of a kind get another form; never
write one again.

| archive | its files differ from today's |
|---|---|
| 4e4bf88 | SFT packs each shard alone; no prefixes, document maps, pages and cards; no seal in latest.json; other columns of Harmony |
| 77edf30 | the form of 4f9c51b, in formats 6 of SFT and 4 of RL |
| 4f9c51b | 2 bits for the fate of a row, and no reasons; none for SFT and Harmony, whose README.md is in the manifest |
"""

import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

HERE = "/proc/self/cwd"
TINY = Path(__file__).parents[2] / "blends/tiny"
TABLES = {"marbles": "dapo", "rectangles": "skywork"}
DATA = {
    "pretrain": "paragraphs",
    "sft": "chat",
    "rl": "questions",
    "harmony": "chat",
    "dedup": "paragraphs",
    "nll": "scored",
}
"""The file of rows of each kind."""

NIGHTLY = ("pretrain", "sft", "rl", "harmony")


def write_sources(folder):
    """Data, blends of each kind, and a model for which every token is as likely as any other."""
    for name in ("data", *(f"blends/{kind}" for kind in NIGHTLY)):
        (folder / name).mkdir(parents=True)
    for name in ("chat.jsonl", "questions.jsonl", *(f"{table}.parquet" for table in TABLES)):
        shutil.copyfile(TINY / name, folder / "data" / name)
    paragraphs = (TINY / "paragraphs.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "data/paragraphs.jsonl").write_bytes(b"".join([*paragraphs[:12], b"{broken\n", *paragraphs[:3]]))
    text = "<|start|>user<|message|>{} sacks?<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|return|>"
    scored = [json.dumps({"row_id": str(number), "text": text.format(number)}) for number in range(12)]
    (folder / "data/scored.jsonl").write_text("\n".join(scored))
    tables = {name: {"path": f"{HERE}/data/{name}.parquet", "style": style} for name, style in TABLES.items()}
    options = {"questions": {"transforms": [{"resolve_placeholders": tables}]}}
    for kind in NIGHTLY:
        source = {"name": DATA[kind], "path": f"{HERE}/data/{DATA[kind]}.jsonl", **options.get(DATA[kind], {})}
        (folder / "blends" / kind / "tiny.json").write_text(json.dumps({"datasets": [source]}))
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=201_088, max_position_embeddings=512, **sizes))
    with torch.no_grad():
        for weights in model.parameters():
            weights.zero_()
    model.save_pretrained(folder / "model")


def commands():
    """The commands that the version runs in the folder of sources."""
    yield ["score", "nll", f"{HERE}/data/scored.jsonl", "--output-dir", f"{HERE}/nll", f"model={HERE}/model"]
    yield ["dedup", f"{HERE}/blends/pretrain/tiny.json", "--output-dir", f"{HERE}/dedup", "mode=tag"]
    yield ["nightly", f"{HERE}/blends", "--output-dir", f"{HERE}/out"]


def main(version, *tokenmill):
    """Write the archive of a version, which the command `tokenmill` runs."""
    with tempfile.TemporaryDirectory() as home, tempfile.TemporaryDirectory() as folder:
        write_sources(Path(folder))
        own = {"PREFECT_HOME": home, "XDG_CACHE_HOME": home, "PREFECT_LOGGING_LEVEL": "ERROR"}
        for command in commands():
            subprocess.run([*tokenmill, *command], cwd=folder, env={**os.environ, **own}, check=True)
        with tarfile.open(Path(__file__).parent / f"{version}.tar.xz", "w:xz", preset=9) as archive:
            archive.add(folder, ".")


if __name__ == "__main__":
    main(*sys.argv[1:])
