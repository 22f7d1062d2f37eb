"""The files of a model: found in a folder or on the hub, and identified by their content.

Copies of a model count as one model, independent of place and name: the identity of scores includes a digest of every byte of
the weights and the configuration. Hashing runs at disk speed (10 s for 16 GB at 1.6 GB/s) and is cached per file by path, size
and modification time, so that a machine hashes each file once.

Weights are safetensors. Other formats are pickles, which can run code when they are read, and are rejected.
"""

import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import xxhash
from huggingface_hub.utils import filter_repo_objects
from tokenmill.tasks.errors import InputError
from tokenmill.tasks.shards.manifest import file_hash
from tokenmill.tasks.shards.store import remembered
from tokenmill.tasks.storage import user_cache
from tokenmill.tasks.tokenize.hub_files import fetched, named_model

WEIGHTS = ("config.json", "*.safetensors", "*.safetensors.index.json")  # the files that determine NLL

# The files that, with WEIGHTS, determine an embedding: the tokenizer, and the modules of sentence-transformers.
TEXT = (
    "added_tokens.json", "merges.txt", "modules.json", "sentence*_config.json", "special_tokens_map.json",
    "spiece.model", "tokenizer*", "vocab*", "[0-9]_*/config.json", "[0-9]_*/*.safetensors",
)  # fmt: skip

OTHER_COPIES = ["original/*", "metal/*", "onnx/*", "openvino/*"]  # the same weights in formats that are not loaded

THREADS = 8

RACY_NANOSECONDS = 2_000_000_000


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The files of a model on this machine."""

    name: str  # as it was asked for
    folder: Path
    revision: str | None  # commit, if it's from the hub

    @property
    def public_name(self) -> str:
        """The id on the hub, or the name of the folder without the path."""
        return self.name if self.revision else self.folder.name

    def digest(self, patterns: Iterable[str] = WEIGHTS) -> str:
        """`xxh3_128:…` of the names and contents of the files that match `patterns`.

        Raises InputError if there are no *.safetensors.
        """
        files = sorted({path for pattern in patterns for path in self.folder.glob(pattern) if path.is_file()})
        if not any(path.suffix == ".safetensors" and path.parent == self.folder for path in files):
            raise InputError(
                f"model: {self.name!r} has no *.safetensors in {self.folder}; other weights are pickles, which run code "
                "when they are read: save the model once with save_pretrained(), which writes safetensors"
            )

        def content(path: Path) -> str:
            real = path.resolve()
            read_at, status = time.time_ns(), real.stat()
            tag = xxhash.xxh3_128_hexdigest(f"{real}\n{status.st_size}\n{status.st_mtime_ns}".encode())
            # A file modified this recently before it was read may have changed since; its hash isn't cached.
            if read_at - status.st_mtime_ns < RACY_NANOSECONDS:
                return file_hash(str(real))
            return remembered(user_cache("models", f"{tag}.json"), str, lambda: file_hash(str(real)))

        whole = xxhash.xxh3_128()
        with ThreadPoolExecutor(THREADS) as pool:
            for path, found in zip(files, pool.map(content, files), strict=True):
                whole.update(f"{path.relative_to(self.folder)}\n{found}\n".encode())
        return f"xxh3_128:{whole.hexdigest()}"


def find_model(name: str, revision: str | None = None) -> ModelFiles:
    """Return the model in a folder, or in a repository of the hub at `revision`, which is downloaded to the hub's cache.

    Raises InputError if it cannot be found, and for a folder without a config.json.
    """
    path = Path(name).expanduser()
    if path.is_file():
        raise InputError(f"model: {name!r} is a file; give the folder that save_pretrained() wrote")
    if path.is_dir():
        found = ModelFiles(name, path.absolute(), None)
    else:
        model = named_model(name, revision, "model")
        prefix = f"{model.inside}/" if model.inside else ""
        patterns, others = ([f"{prefix}{each}" for each in listed] for listed in ([*WEIGHTS, *TEXT], OTHER_COPIES))

        def choose(names: Sequence[str]) -> list[str]:
            return list(filter_repo_objects(names, allow_patterns=patterns, ignore_patterns=others))

        folder = fetched(model, choose, "model")
        found = ModelFiles(model.name, folder / model.inside, folder.name)
    if not (found.folder / "config.json").is_file():
        raise InputError(
            f"model: {found.folder} doesn't contain config.json; give the folder that save_pretrained() wrote"
        )
    return found
