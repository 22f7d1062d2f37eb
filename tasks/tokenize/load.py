"""Loading a tokenizer by encoding name, file, folder, or hub id.

An existing path has priority, then tiktoken's names, then Hub ids (`hub_files`). The default, `o200k_harmony`, doesn't need
network: the `bpe-openai` package ships the ranks of o200k and cl100k, which are unpacked once into tiktoken's own cache (tiktoken
checks their SHA-256). tiktoken downloads other encodings. Code from a repository is never run.
"""

import gzip
import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from importlib.metadata import distribution, version
from pathlib import Path
from typing import Any

import orjson
import tiktoken
import tiktoken.registry
from tokenmill.tasks.errors import InputError, RunError, nearest
from tokenmill.tasks.shards.manifest import MANIFEST
from tokenmill.tasks.shards.publish import publish_bytes
from tokenmill.tasks.shards.records import Manifest
from tokenmill.tasks.shards.store import remembered
from tokenmill.tasks.sources.opening import known_kind
from tokenmill.tasks.storage import user_cache
from tokenmill.tasks.strict import parse

from .added import TOKEN_FILES, malformed_tokens
from .rank_files import tekken_file, tiktoken_file, tiktoken_ranks
from .settings import TokenizerSettings, TokenizerSource
from .vocabulary import (
    Definition,
    Facts,
    Vocabulary,
    huggingface_fingerprint,
    huggingface_vocabulary,
    merges_definition,
    named_tokens,
    ranks_vocabulary,
    sentencepiece_vocabulary,
    tiktoken_vocabulary,
)

RANKS_URL = "https://openaipublic.blob.core.windows.net/encodings/{}.tiktoken"
"""tiktoken's source of ranks; the SHA-1 of the URL is the name of the file in its cache."""

RANKS = {"o200k_harmony": "o200k_base"}
"""The ranks of an encoding that don't have its name."""
SHIPPED = ("o200k_base", "cl100k_base")
PRETOKENIZERS = {"o200k_base": "o200k", "cl100k_base": "cl100k", "r50k_base": "r50k"}
"""gigatoken's name for the pre-tokenizer of each set of ranks."""

Controls = tuple[dict[str, int], int]
"""The control strings of an encoding with their ids, and the size of its vocabulary."""

Stamps = tuple[tuple[str, int, int], ...]

TEMPLATES = ("chat_template.jinja", "additional_chat_templates/default.jinja")
"""The chat template of newer models, which has priority over an entry in tokenizer_config.json."""

OLD_TEMPLATE = "chat_template.json"
"""The chat template of the processors of older models; used as the last choice."""

ADDED_TOKENS = "added_tokens.json"
"""The added tokens of older models, with their ids."""

MODEL_NAME = re.compile(r".+\.model(\.v\d+(m\d+)?)?|.+\.tiktoken", re.IGNORECASE)
"""SentencePiece models, also Mistral's (tokenizer.model.v3), and tiktoken's ranks."""

MERGED = ("vocab.json", "merges.txt")
"""The two files of a byte-level BPE before there was a tokenizer.json."""

TEKKEN_NAME = re.compile(r"tekken.*\.json")

NAME_CHARACTERS = 100
"""Characters of a name that a message shows."""

RENUMBERED = frozenset(
    ("BigBirdPegasus", "Barthez", "Camembert", "M2M100", "MBart", "MBart50", "Nllb", "PLBart", "Pegasus", "Speech2Text", "XGLM",
     "XLMProphetNet", "XLMRoberta")
)  # fmt: skip
"""Tokenizers of transformers whose ids differ from their SentencePiece model."""


def load_vocabulary(settings: TokenizerSettings) -> Vocabulary:
    """Return the vocabulary, with the BOS and EOS that the settings need.

    Raises InputError if it cannot be found, or if BOS or EOS is needed and the tokenizer has none.
    """
    vocabulary = find_vocabulary(settings)
    bos, eos = (settings.add_bos, vocabulary.bos), (settings.add_eos, vocabulary.eos)
    for token, (wanted, identifier) in (("bos", bos), ("eos", eos)):
        if wanted and identifier is None:
            raise InputError(
                f"tokenizer.add_{token}: {settings.model!r} does not name its {token.upper()} token; "
                f"set {token}_token in a tokenizer_config.json next to it, or set tokenizer.add_{token}=false"
            )
    return vocabulary


def planned_vocabulary(source: TokenizerSource, fingerprint: str | None) -> Vocabulary:
    """Return the vocabulary that a shard was planned with, on this worker. Raises RunError if a different one is found."""
    vocabulary = find_vocabulary(source)
    if vocabulary.fingerprint != fingerprint:
        raise RunError(
            f"tokenizer.model: {source.model!r} is {vocabulary.fingerprint} on this worker but {fingerprint} in the plan; "
            "give all workers the same files, or pin tokenizer.revision"
        )
    return vocabulary


def find_vocabulary(source: TokenizerSource) -> Vocabulary:
    """Return the vocabulary of `source.model`, loaded again only if its files change. Raises InputError if it cannot be found."""
    path = _path(source.model)
    if path is None:
        return load_named(source.model, source.revision, ())
    # Name, size and modification time of every local file of the tokenizer, which may change while a worker runs.
    folder = path if path.is_dir() else path.parent
    beside = [folder / name for name in (*TOKEN_FILES, *TEMPLATES, OLD_TEMPLATE, ADDED_TOKENS, "merges.txt")]
    files = [*sorted(path.iterdir()), *beside] if path.is_dir() else [path, *beside]
    stamps = ((file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files if file.is_file())
    return load_named(source.model, source.revision, tuple(stamps))


def pinned(source: TokenizerSource, commit: str | None) -> TokenizerSource:
    """`source` at a commit of its repository, so that all workers load the same files; as it is if it is not from the hub."""
    if commit is None:
        return source
    from .hub_files import named_model

    name = named_model(source.model, source.revision, "tokenizer.model").name
    return source.model_copy(update={"model": name, "revision": commit})


def commit_notes(source: TokenizerSource, vocabulary: Vocabulary) -> dict[str, str]:
    """What to show of a tokenizer from the hub: the commit that it was loaded at."""
    if vocabulary.commit is None:
        return {}
    return {"tokenizer": f"{source.model} is at commit {vocabulary.commit}"}


def commit_of(vocabulary: Vocabulary) -> dict[str, str]:
    """Return the manifest's entry for the commit of a tokenizer from the hub; none for others."""
    return {"commit": vocabulary.commit} if vocabulary.commit else {}


def recorded_vocabulary(manifest: Manifest) -> Vocabulary:
    """Return the vocabulary that the shards of a manifest were built with. Raises InputError if the one found differs."""
    chosen = manifest["settings"]["tokenizer"]
    named = {name: value for name, value in chosen.items() if name in TokenizerSource.model_fields}
    source = parse(TokenizerSource, named, f"{MANIFEST}: settings.tokenizer")
    vocabulary = find_vocabulary(pinned(source, manifest["tokenizer"].get("commit")))
    recorded = manifest["tokenizer"]["fingerprint"]
    if vocabulary.fingerprint != recorded:
        raise InputError(
            f"tokenizer.model: {named['model']!r} is {vocabulary.fingerprint} here, but the shards were made with "
            f"{recorded}; put back the files from that tokenizer, or prepare the data again"
        )
    return vocabulary


@lru_cache(maxsize=4)
def load_named(model: str, revision: str | None, _: Stamps) -> Vocabulary:
    """Return the vocabulary for a name, kept while its files are unchanged."""
    path = _path(model)
    # A path that exists precedes names, so that a new one of the hub or of tiktoken changes nothing.
    if path:
        return _from_folder(path) if path.is_dir() else _from_file(path)
    encodings = tiktoken.registry.list_encoding_names()
    if model in encodings:
        return _from_tiktoken(model)
    # The hub's client takes 0.15 s to import.
    from .hub_files import fetched, named_model

    try:
        named = named_model(model, revision, "tokenizer.model")
        folder = fetched(named, partial(_hub_names, named.inside), "tokenizer.model")
    except InputError as error:
        if "/" in model:
            raise
        raise InputError(f"{error}; among the encodings of tiktoken: {nearest(model, encodings)}") from error
    return load_commit(folder, named.inside)


def _path(model: str) -> Path | None:
    """The file or folder that a name means; None if it means none."""
    try:
        path = Path(model).expanduser()
        return path if path.is_dir() or path.is_file() else None
    except (OSError, RuntimeError) as error:  # a name too long, a folder that is closed, or the `~` of nobody
        why = error.strerror if isinstance(error, OSError) else error
        raise InputError(
            f"tokenizer.model: {model[:NAME_CHARACTERS]!r} cannot be read: {why}; check the path"
        ) from error


def _from_folder(folder: Path) -> Vocabulary:
    """The vocabulary of the file that transformers' `AutoTokenizer` would take, if the folder has several."""
    if (definition := folder / "tokenizer.json").is_file():
        return _from_json(definition)
    names = sorted(file.name for file in folder.iterdir() if file.is_file())
    folders = sorted(f"{each.name}/" for each in folder.iterdir() if each.is_dir())
    models = [name for name in names if MODEL_NAME.fullmatch(name)]
    usual = [name for name in ("tokenizer.model", "tiktoken.model") if name in models]
    tekken = [name for name in names if TEKKEN_NAME.fullmatch(name)]
    merges = ["vocab.json"] if {"vocab.json", "merges.txt"}.issubset(names) else []
    # Each kind has priority over the next, as in `AutoTokenizer`; of two files of a kind, neither is taken.
    chosen = next((found for found in (usual, tekken, models, merges) if found), [])
    if len(chosen) == 1:
        return _from_file(folder / chosen[0], in_folder=True)
    there = [*names, *folders]
    held = f"{', '.join(there[:6])}{' …' if len(there) > 6 else ''}" if there else "nothing"  # noqa: PLR2004 - enough to see
    found = f"several: {', '.join(chosen)}; name one of them" if chosen else held
    adapted = "; name the model that this adapter is for" if "adapter_config.json" in names else ""
    raise InputError(
        f"tokenizer.model: {folder} should hold one tokenizer.json, SentencePiece or tiktoken .model, .tiktoken, tekken.json, or "
        f"vocab.json with merges.txt; it holds {found}{adapted}{_code_of(_config(folder))}"
    )


def _code_of(config: Mapping[str, Any]) -> str:
    """What to do about a tokenizer that is code in its repository."""
    code = (config.get("auto_map") or {}).get("AutoTokenizer")
    if not code:
        return ""
    name = next(filter(None, code), "") if isinstance(code, list) else code
    return (
        f"; its tokenizer is code from its repository ({name}), which isn't run: save it as a tokenizer.json, with "
        "AutoTokenizer.from_pretrained(…, trust_remote_code=True).save_pretrained(…) where it has a fast one"
    )


def _from_file(path: Path, *, in_folder: bool = False) -> Vocabulary:
    """The vocabulary of a file, by its content; `in_folder` if only its folder was named."""
    if path.suffix.lower() == ".json":
        return _from_json(path)
    config = _slow_config(path.parent)
    content = path.read_bytes()
    # By content, because `.model` is the ending of both formats.
    try:
        if ranks := tiktoken_file(content, config):
            return ranks_vocabulary(ranks, config)
        vocabulary = sentencepiece_vocabulary(content, config)
    except ValueError as error:
        if tiktoken_ranks(content):
            raise InputError(f"tokenizer.model: {path} {error}{_code_of(config)}") from error
        what = "is neither a tokenizer.json, a tekken.json, nor a SentencePiece or tiktoken model"
        raise _not_a_tokenizer(path, content, f"{what}; give the folder or file of a tokenizer") from error
    if in_folder and (code := _code_of(config)):
        raise InputError(
            f"tokenizer.model: {path.parent} holds {path.name}{code}, or name {path.name} itself to take its ids as they are"
        )
    # These classes have their own table of ids beside the model, in code.
    name = str(config.get("tokenizer_class")).removesuffix("Fast")
    if name.removesuffix("Tokenizer") in RENUMBERED:
        raise InputError(
            f"tokenizer.model: {path} is a SentencePiece model whose pieces {name} numbers anew; save it as a tokenizer.json: "
            f"AutoTokenizer.from_pretrained({str(path.parent)!r}).save_pretrained(…)"
        )
    return vocabulary


def _from_json(path: Path) -> Vocabulary:
    content, config = path.read_bytes(), _config(path.parent)
    try:
        definition = Definition.of(content)
    except KeyError:
        return _from_other_json(path, content)
    except (ValueError, TypeError, AttributeError) as error:
        why = f" ({error}); fetch or save it again" if isinstance(error, orjson.JSONDecodeError) else ""
        raise _not_a_tokenizer(path, content, f"is not a tokenizer.json with a model and a vocab{why}") from error
    return _from_definition(path, definition, config)


def _not_a_tokenizer(path: Path, content: bytes, otherwise: str) -> InputError:
    """Return the error for a different file type, with its remedy; `otherwise` describes an unknown one."""
    if found := known_kind(content, path.name):
        kind, remedy = found
        otherwise = f"holds {kind}; {'unpack it' if remedy.startswith('name it') else remedy}"
    return InputError(f"tokenizer.model: {path} {otherwise}")


def _from_other_json(path: Path, content: bytes) -> Vocabulary:
    """The vocabulary of a tekken.json, or of a vocab.json with the merges.txt beside it."""
    parsed, config = orjson.loads(content), _slow_config(path.parent)
    merges = path.parent / "merges.txt"
    try:
        if {"config", "vocab"} <= parsed.keys():
            return ranks_vocabulary(tekken_file(content, parsed), config)
        if merges.is_file() and all(isinstance(number, int) for number in parsed.values()):
            definition, config = merges_definition(parsed, merges.read_text("utf-8"), config)
            return _from_definition(path, definition, config)
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"tokenizer.model: {path} {error}{_code_of(config)}") from error
    raise InputError(
        f"tokenizer.model: {path} is not a tokenizer.json with a model and a vocab, nor a tekken.json, nor a vocab.json with "
        "merges.txt next to it"
    )


def _from_definition(path: Path, definition: Definition, config: dict[str, Any]) -> Vocabulary:
    try:
        facts = _remembered_facts(definition, config)
        names = zip(named_tokens(config), (facts.bos, facts.eos), strict=True)
        # `AutoTokenizer` adds tokens that the configuration names, and the file lacks.
        if facts.size and any(name and number is None for name, number in names):
            definition = definition.with_tokens_of(_slow_config(path.parent))
            facts = _remembered_facts(definition, config)
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"tokenizer.model: {path} is not a tokenizer.json with a model and a vocab") from error
    if not facts.size:
        raise InputError(f"tokenizer.model: {path} has an empty vocabulary")
    if facts.dropout:
        raise InputError(
            f"tokenizer.model: {path} has BPE dropout ({facts.dropout:g}), so no two runs give the same ids; "
            "set model.dropout to null in it"
        )
    return huggingface_vocabulary(definition, config, facts, huggingface_fingerprint(definition))


def _remembered_facts(definition: Definition, config: Mapping[str, Any]) -> Facts:
    """The facts of a tokenizer.json, cached, because they take as long as its model takes to parse."""
    question = orjson.dumps([huggingface_fingerprint(definition), named_tokens(config)])
    place = user_cache("vocabularies", f"{hashlib.sha256(question).hexdigest()[:32]}.json")
    return remembered(place, Facts, lambda: definition.facts(config))


def _config(folder: Path) -> dict[str, Any]:
    """The configuration beside a tokenizer.json: its BOS and EOS tokens, and the model's chat template."""
    merged: dict[str, Any] = {}
    for name in TOKEN_FILES:
        file = folder / name
        if file.is_file():
            merged |= {key: value for key, value in _object(file).items() if value is not None}
    template = next((folder / name for name in TEMPLATES if (folder / name).is_file()), None)
    if template:
        return merged | {"chat_template": template.read_text("utf-8")}
    old = folder / OLD_TEMPLATE
    return {"chat_template": _object(old).get("chat_template")} | merged if old.is_file() else merged


def _slow_config(folder: Path) -> dict[str, Any]:
    """The configuration of a folder without a tokenizer.json, as transformers reads it: unless tokenizer_config.json lists the added
    tokens, special_tokens_map.json has priority, and added_tokens.json lists them.
    """
    config = _config(folder)
    if config.get("added_tokens_decoder"):
        return config
    if (file := folder / "special_tokens_map.json").is_file():
        config |= {key: value for key, value in _object(file).items() if value is not None}
    if (file := folder / ADDED_TOKENS).is_file():
        config["added_tokens_decoder"] = {number: {"content": name} for name, number in _object(file).items()}
    return config


def _object(file: Path) -> dict[str, Any]:
    try:
        content = file.read_bytes()
        found: dict[str, Any] = dict(orjson.loads(content))
    except (ValueError, TypeError) as error:
        raise InputError(f"tokenizer.model: {file} is not a JSON object: {error}; fix or remove it") from error
    if file.name in TOKEN_FILES and (wrong := malformed_tokens(file.name, content)):
        key, wanted, value = wrong
        raise InputError(
            f"tokenizer.model: {file}: {key} should be {wanted} (got {str(value)[:NAME_CHARACTERS]}); correct it"
        )
    return found


@lru_cache(maxsize=4)
def load_commit(folder: Path, inside: str) -> Vocabulary:
    """Return the vocabulary in a file or folder of a commit; loaded once, whether it was asked for by branch or by commit."""
    found = folder / inside
    return replace(_from_file(found) if found.is_file() else _from_folder(found), commit=folder.name)


def _hub_names(inside: str, names: Sequence[str]) -> list[str]:
    """The names in a repository that a tokenizer is made of: `inside`, a file or a folder ("": the root), and those beside it.

    With a tokenizer.json, files in other formats are omitted: they are large, and not read.
    """
    # `inside` is a file if the repository has one with that name, else a folder.
    folder = inside.rpartition("/")[0] if inside in names else inside
    prefix = f"{folder}/" if folder else ""
    beside = [name.removeprefix(prefix) for name in names if name.startswith(prefix)]
    wanted = inside.removeprefix(prefix) if inside in names else "tokenizer.json"
    main = [name for name in beside if name == wanted] or [
        name for name in beside
        if "/" not in name and (MODEL_NAME.fullmatch(name) or TEKKEN_NAME.fullmatch(name) or name in MERGED)
    ]  # fmt: skip
    known = {*TOKEN_FILES, *TEMPLATES, OLD_TEMPLATE, ADDED_TOKENS, *(MERGED if wanted in MERGED else ())}
    more = [name for name in beside if main and name in known.difference(main)]
    return [prefix + name for name in main + more]


def _from_tiktoken(name: str) -> Vocabulary:
    ranks = RANKS.get(name, name)
    cache = os.environ.get("TIKTOKEN_CACHE_DIR") or user_cache("tiktoken")
    os.environ["TIKTOKEN_CACHE_DIR"] = cache  # where tiktoken looks, too
    path = Path(cache) / hashlib.sha1(RANKS_URL.format(ranks).encode(), usedforsecurity=False).hexdigest()
    if ranks in SHIPPED:  # the package isn't imported, because it would parse all of its ranks, in half a second
        packed = distribution("bpe-openai").locate_file(f"bpe_openai/data/{ranks}.tiktoken.gz")
        content = gzip.decompress(Path(str(packed)).read_bytes())
        if not path.is_file() or path.read_bytes() != content:
            publish_bytes(str(path), content)
    if not path.is_file():
        special, size = _controls(name)  # downloads ranks that are not shipped, into the same cache
        if not path.is_file():
            return tiktoken_vocabulary(name, "", name, None, special, size)
    # Building an encoding takes 0.3 s, and most commands need only its control strings. If these aren't cached, tiktoken replaces
    # a damaged file, so its hash is taken again.
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    place = user_cache("encodings", f"{name}-{version('tiktoken')}-{digest[:16]}.json")
    special, size = remembered(place, Controls, lambda: _controls(name))
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return tiktoken_vocabulary(name, str(path), digest, PRETOKENIZERS.get(ranks), special, size)


def _controls(name: str) -> Controls:
    """The control strings of a tiktoken encoding with their ids, and the size of its vocabulary."""
    try:
        encoding = tiktoken.get_encoding(name)
    except OSError as error:  # includes the errors of requests
        raise InputError(
            f"tokenizer.model: {name!r} is not shipped and cannot be fetched: {error}; check the "
            "network, or set TIKTOKEN_CACHE_DIR to a folder with its ranks"
        ) from error
    special = {token: encoding.encode_single_token(token) for token in sorted(encoding.special_tokens_set)}
    return special, encoding.max_token_value + 1
