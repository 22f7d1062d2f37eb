"""Subsets, splits and formats of a repository are those that the `datasets` library finds in it."""

from pathlib import Path

import pytest
import yaml
from datasets.data_files import DataFilesDict, DataFilesPatternsDict
from datasets.load import LocalDatasetModuleFactory
from tokenmill.tasks.blend.models import DataSource
from tokenmill.tasks.sources.discovery import discover

TRAIN, TEST = {"split": "train", "path": "data/train*"}, {"split": "test", "path": "data/test*"}

LAYOUTS: dict[str, tuple[str, list[dict] | None]] = {
    "push_to_hub": ("data/train-00000-of-00002.parquet data/train-00001-of-00002.parquet data/test-00000-of-00001.parquet", None),
    "push_to_hub of old": ("data/train-00000-of-00001-a09b74b3ef9c3b56.parquet data/validation-00000-of-00001-a.parquet", None),
    "own split names": ("data/chat-00000-of-00012.parquet data/code_if-00011-of-00012.parquet data/train.parquet", None),
    "numbered files elsewhere": ("chat-00000-of-00012.jsonl more/data/code-00000-of-00012.jsonl", None),
    "numbered and train elsewhere": ("a/train-00000-of-00002.parquet a/train-00001-of-00002.parquet a/dev-00000-of-00001.parquet", None),
    "six digits": ("data/chat-000000-of-000012.parquet data/chat-000001-of-000012.parquet", None),
    "no word": ("a/part-0.jsonl b/part-1.jsonl README.md", None),
    "a file": ("rows.jsonl.gz", None),
    "training": ("data/training_0001.jsonl data/dev-0.jsonl", None),
    "val and eval": ("train.jsonl val.jsonl eval.jsonl", None),
    "evaluation and testing": ("x/evaluation.jsonl x/testing.jsonl x/valid.jsonl", None),
    "digits": ("train1.jsonl train2.jsonl test1.jsonl", None),
    "words inside words": ("mytrain.jsonl trainset.jsonl contest.jsonl evaluate.jsonl", None),
    "words in the middle": ("my-train-set.jsonl my.test.jsonl a_val_b.jsonl", None),
    "two words": ("train-test.jsonl only-train.jsonl", None),
    "capitals": ("Train.jsonl TEST.jsonl", None),
    "spaces": ("my train.jsonl my test 2.jsonl", None),
    "underscore at the end": ("train_.jsonl test-.jsonl", None),
    "folders": ("train/a.parquet train/deep/b.parquet test/a.parquet validation/x.parquet", None),
    "folders win": ("train/a.jsonl test.jsonl", None),
    "folders with more": ("my-train-2/a.jsonl en.dev/x.jsonl", None),
    "a folder in a folder": ("train/test/a.jsonl train/b.jsonl", None),
    "folders below": ("en/train/a.jsonl en/test/a.jsonl de/train/a.jsonl", None),
    "only held out": ("test/a.jsonl dev/b.jsonl", None),
    "a word that is no folder's": ("training-data/en/a.jsonl", None),
    "two formats": ("data/train-00000-of-00001.parquet raw/train.jsonl", None),
    "two formats without words": ("a.parquet b.jsonl c.jsonl", None),
    "as many of each": ("a.parquet b.jsonl", None),
    "lines and arrays": ("a.json b.jsonl c.ndjson", None),
    "compressed": ("a.jsonl.gz b.json.zst c.parquet", None),
    "metadata": ("metadata.jsonl metadata.parquet data.parquet", None),
    "tables": ("a.csv b.tsv c.jsonl", None),
    "more tables": ("train.csv test.csv raw/train.parquet raw/test.parquet", None),
    "notes": ("a.jsonl b.jsonl notes.txt", None),
    "texts": ("train/a.txt train/b.txt train/c.jsonl", None),
    "arrow": ("data-00000-of-00001.arrow a.jsonl", None),
    "special folders": ("__pycache__/train.jsonl a.jsonl", None),
    "descriptions": ("dataset_infos.json data/train.jsonl data/dataset_info.json statistics.json", None),
    "hidden": (".cache/train.jsonl .train.jsonl a.jsonl", None),
    "one configuration": ("data/train-0.jsonl data/test-0.jsonl more.jsonl", [{"config_name": "en", "data_files": [TRAIN, TEST]}]),
    "a text of patterns": ("a/train.jsonl b/test.jsonl", [{"config_name": "default", "data_files": "*/*.jsonl"}]),
    "a list of patterns": ("a/x.jsonl b/x.jsonl c/x.jsonl", [{"config_name": "default", "data_files": ["a/*", "./b/x.jsonl"]}]),
    "lists of paths": (
        "a/x.jsonl b/x.jsonl c/y.jsonl",
        [{"config_name": "default", "data_files": [{"split": "train", "path": ["a/*", "b/x.jsonl"]}, {"split": "dev", "path": "**/y.jsonl"}]}],
    ),
    "own names on the card": (
        "data/chat_if.jsonl data/lean.part_00.jsonl",
        [{"config_name": "default", "data_files": [{"split": "chat_if", "path": "data/chat_if.jsonl"}, {"split": "lean.part_00", "path": "data/lean.*"}]}],
    ),
    "folders of configurations": (
        "en/train.jsonl en/test.jsonl de/x.jsonl",
        [{"config_name": "en", "data_dir": "en"}, {"config_name": "de", "data_dir": "de/", "default": True}],
    ),
    "numbered files of a folder": (
        "en/data/chat-00000-of-00001.parquet en/data/code-00000-of-00001.parquet de/chat-00000-of-00001.parquet",
        [{"config_name": "en", "data_dir": "en"}, {"config_name": "de", "data_dir": "de"}],
    ),
    "a folder and patterns": (
        "deep/w.jsonl deep/er/z.jsonl w.jsonl",
        [{"config_name": "default", "data_dir": "deep", "data_files": "*.jsonl"}],
    ),
    "a configuration of everything": ("train/a.jsonl dev/b.jsonl", [{"config_name": "default", "description": "all"}]),
    "brackets and questions": (
        "d/train-1.jsonl d/train-2.jsonl d/train-x.jsonl",
        [{"config_name": "default", "data_files": [{"split": "train", "path": "d/train-[0-9].jsonl"}]}, {"config_name": "x", "data_files": "d/train-?.jsonl"}],
    ),
}  # fmt: skip


def of_datasets(folder: Path) -> dict[str, dict[str, set[str]]]:
    """The files of each split of each configuration, by `datasets`."""
    found = {}
    for builder in LocalDatasetModuleFactory(str(folder)).get_module().builder_configs_parameters.builder_configs:
        files = builder.data_files
        if isinstance(files, DataFilesPatternsDict):
            files = files.resolve(str(folder / (builder.data_dir or "")))
        assert isinstance(files, DataFilesDict)
        found[builder.name] = {
            str(split): {str(Path(name).relative_to(folder)) for name in names} for split, names in files.items()
        }
    return found


@pytest.fixture
def repository(hub, tmp_path):
    """Makes a repository `org/name` of the files of a layout, and the same folder."""

    def repository(files: str, configs: list[dict] | None) -> Path:
        names = [name.replace("~", " ") for name in files.replace("my ", "my~").replace("test ", "test~").split()]
        card = f"---\n{yaml.safe_dump({'configs': configs})}---\n" if configs else "a dataset"
        for name, content in {**dict.fromkeys(names, "{}\n"), "README.md": card}.items():
            (tmp_path / "org" / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "org" / name).write_text(content)
        hub.dataset("org/name", tmp_path / "org")
        return tmp_path / "org"

    return repository


def read(**fields) -> set[str]:
    """The files that are read, all splits without one."""
    files = discover(DataSource(name="some", path="hf://org/name", **fields))
    return {file.uri.partition("@")[2].partition("/")[2] for file in files}


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_subsets_and_splits_match_datasets(repository, name):
    expected = of_datasets(repository(*LAYOUTS[name]))
    for subset, splits in expected.items():
        assert read(subset=subset) == set().union(*splits.values())
        for split, files in splits.items():
            assert read(subset=subset, split=split) == files
