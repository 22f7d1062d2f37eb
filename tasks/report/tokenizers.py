"""Compare tokenizers on the first rows of a blend's datasets: as a table, as JSON, and as a page with bars.

Rows are read and encoded as in a preparation. Figures are exact for the rows that are read. Languages are those that the
blend states for a dataset; datasets that state the same ones are added up.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
from rich.console import Console
from tokenmill.tasks.blend.models import Blend, DataSource
from tokenmill.tasks.errors import InputError
from tokenmill.tasks.kit.charts import bars
from tokenmill.tasks.kit.parts import Block, Chart, Table, Text
from tokenmill.tasks.kit.terminal import print_table
from tokenmill.tasks.shards.planning import require_no
from tokenmill.tasks.shards.publish import Output, publish_bytes
from tokenmill.tasks.sources.discovery import discover
from tokenmill.tasks.sources.files import Slice
from tokenmill.tasks.sources.formats import read_texts
from tokenmill.tasks.sources.forms import require_form
from tokenmill.tasks.sources.parquet import Needed, require_text
from tokenmill.tasks.sources.row_filter import row_filter
from tokenmill.tasks.sources.slices import ContentIndex, cut, leading_rows
from tokenmill.tasks.storage import absolute, user_cache
from tokenmill.tasks.tokenize.encoders import Encoder
from tokenmill.tasks.tokenize.exact import encoder_of
from tokenmill.tasks.tokenize.fertility import (
    LONG_BYTES,
    TextCounts,
    TokenCounts,
    TokenKinds,
    count_texts,
    count_tokens,
    kinds_of,
)
from tokenmill.tasks.tokenize.gate import Gate, texts_of
from tokenmill.tasks.tokenize.load import find_vocabulary
from tokenmill.tasks.tokenize.settings import TokenizerSource
from tokenmill.tasks.tokenize.vocabulary import Vocabulary

from .autotokenizer import AutoTokenizerCheck, check_autotokenizer

SLICE_BYTES = 256_000_000  # bytes between the places where files may be cut, as by default in preparations


@dataclass(frozen=True, slots=True)
class Sample:
    """The first rows in a dataset: their sizes, and each tokenizer's counts.

    `unread` counts rows that are blank or cannot be read, `filtered` those that the blend omits. `languages` are those that the blend states, joined.
    """

    name: str
    languages: str
    unread: int
    filtered: int
    texts: TextCounts
    tokens: Mapping[str, TokenCounts]


@dataclass(frozen=True, slots=True, eq=False)
class Tokenizer:
    """A tokenizer to compare, by a short name."""

    name: str
    vocabulary: Vocabulary
    kinds: TokenKinds

    def encoder(self, source: DataSource, slices: Sequence[Slice]) -> Encoder:
        """Return the encoder that a preparation would use for a dataset, warm."""
        texts = partial(texts_of, source.text_field)
        gate = Gate(self.vocabulary, slices, texts, source.text_field, user_cache("plan"), literal=True)
        encoder = encoder_of(self.vocabulary, gate.verdict().backend, literal=True)
        encoder.encode(pa.array(["warm"], pa.large_string()))  # the first call takes longer
        return encoder


def compared(blend: Blend, models: Sequence[str], rows: int) -> list[Sample]:
    """Return the first `rows` rows of each dataset of a blend, encoded with each tokenizer.

    Raises InputError for a tokenizer that cannot be found, and for rows without text.
    """
    if not models or len(set(models)) < len(models):
        raise InputError("compare-tokenizers: name one or more tokenizers, each once, after the blend")
    vocabularies = [find_vocabulary(TokenizerSource(model=model)) for model in models]
    tokenizers = [
        Tokenizer(name, each, kinds_of(each)) for name, each in zip(_short(models), vocabularies, strict=True)
    ]
    found: list[Sample] = []
    for split, sources in blend.parts().items():
        for source in sources:
            require_no(source, ["converter", "transforms", "template_variables"], "a comparison of tokenizers")
            name = f"{split}/{source.name}".removeprefix("datasets/")
            found.append(_sampled(source, name, rows, tokenizers))
    return found


def _short(models: Sequence[str]) -> list[str]:
    """The last part of each path or hub id, or all of it where several end alike."""
    paths = map(Path, models)
    last = [path.stem if path.suffix in {".json", ".model"} else path.name for path in paths]
    return [own if last.count(own) == 1 else model for own, model in zip(last, models, strict=True)]


def _sampled(source: DataSource, name: str, rows: int, tokenizers: Sequence[Tokenizer]) -> Sample:
    # Slices are found one by one, so files behind those with the first rows aren't opened
    chosen, text = row_filter(source), [source.text_field]
    fields, needed = chosen.read_with(text), Needed(require_text, text, chosen) if chosen else require_text
    every = (part for file in discover(source, "train") for part in cut(file, SLICE_BYTES, fields, needed))
    leading = [chosen.on(part) for part in leading_rows(every, rows)]
    slices = ContentIndex().identify(leading, fields, "mtime")
    if not slices:
        raise InputError(f"dataset {source.name!r}: {source.path} doesn't contain rows; fix the path")
    require_form(source, "documents", slices[0])
    encoders = [each.encoder(source, slices) for each in tokenizers]
    texts, unread, filtered = TextCounts(), 0, 0
    tokens = {each.name: TokenCounts() for each in tokenizers}
    for batch in (batch for part in slices for batch in read_texts(part, source.text_field)):
        unread += len(batch.bad) + len(batch.blank)
        filtered += batch.filtered
        texts += count_texts(batch.texts)
        for each, encoder in zip(tokenizers, encoders, strict=True):
            tokens[each.name] += count_tokens(batch.texts, encoder, each.kinds)
    return Sample(name, ", ".join(source.languages or []), unread, filtered, texts, tokens)


def by_language(samples: Sequence[Sample]) -> list[Sample]:
    """Return the samples of datasets that state the same languages, added up under these; empty if none states any."""
    found: dict[str, Sample] = {}
    for each in samples:
        name = each.languages or "not stated"
        if name not in found:
            found[name] = replace(each, name=name)
            continue
        one = found[name]
        found[name] = replace(
            one, unread=one.unread + each.unread, filtered=one.filtered + each.filtered, texts=one.texts + each.texts,
            tokens={model: counts + each.tokens[model] for model, counts in one.tokens.items()},
        )  # fmt: skip
    return list(found.values()) if any(each.languages for each in samples) else []


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure that is compared: its name in JSON, the head of its column, its title, its value, the value as text."""

    name: str
    column: str
    title: str
    of: Callable[[TextCounts, TokenCounts], float]
    shown: Callable[[float], str]


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


FIGURES = (
    Figure("tokens_per_byte", "per byte", "Tokens per byte", lambda texts, of: _ratio(of.tokens, texts.size), "{:.3f}".format),
    Figure("tokens_per_character", "per char", "Tokens per character", lambda texts, of: _ratio(of.tokens, texts.characters), "{:.3f}".format),
    Figure("tokens_per_word", "per word", "Tokens per word", lambda texts, of: _ratio(of.tokens, texts.words), "{:.2f}".format),
    Figure("fallback_share", "fallback", "Byte fallback: tokens that aren't whole characters", lambda _, of: _ratio(of.fallback, of.tokens), "{:.2%}".format),
    Figure("long_share", "long", f"Tokens of {LONG_BYTES} bytes and more", lambda _, of: _ratio(of.long, of.tokens), "{:.2%}".format),
    Figure("mb_per_cpu_second", "MB/CPU-s", "Megabytes per CPU-second", lambda texts, of: _ratio(texts.size / 1e6, of.seconds), "{:,.1f}".format),
)  # fmt: skip


def autotokenizers(models: Sequence[str]) -> dict[str, AutoTokenizerCheck]:
    """Return whether transformers' `AutoTokenizer` gives the same ids, by the short name of each tokenizer."""
    return dict(zip(_short(models), map(check_autotokenizer, models), strict=True))


def comparison_record(samples: Sequence[Sample], checks: Mapping[str, AutoTokenizerCheck]) -> dict[str, Any]:
    """Return the comparison as a JSON line."""
    record = {
        "type": "comparison", "long_bytes": LONG_BYTES,
        "datasets": {each.name: _record(each) for each in samples},
        "languages": {each.name: _record(each) for each in by_language(samples)},
        "autotokenizer": {name: asdict(check) for name, check in checks.items()},
    }  # fmt: skip
    return {"compare-tokenizers": record}


def _record(sample: Sample) -> dict[str, Any]:
    return {
        "languages": sample.languages, "unread": sample.unread, "filtered": sample.filtered, **asdict(sample.texts),
        "tokenizers": {
            model: asdict(counts) | {each.name: each.of(sample.texts, counts) for each in FIGURES}
            for model, counts in sample.tokens.items()
        },
    }  # fmt: skip


def print_comparison(
    samples: Sequence[Sample], console: Console, *, tables: bool, checks: Mapping[str, AutoTokenizerCheck]
) -> None:
    """Print a row for each dataset and tokenizer, and for each language that the blend states, then how AutoTokenizer differs."""
    for table in _tables(samples):
        print_table(console, table, tables=tables)
    for line in [*_notes(samples), *(f"{name}: {check.line}" for name, check in checks.items())]:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _tables(samples: Sequence[Sample]) -> list[Table]:
    """The rows by dataset, and by language if the blend states any."""
    found: list[Table] = []
    for part, listed in {"dataset": samples, "languages": by_language(samples)}.items():
        columns = [part, "tokenizer", "tokens", *(figure.column for figure in FIGURES), "controls"]
        rows: list[list[str]] = []
        for sample, model, counts in ((each, *of) for each in listed for of in each.tokens.items()):
            figures = [figure.shown(figure.of(sample.texts, counts)) for figure in FIGURES]
            rows.append([sample.name, model, f"{counts.tokens:,}", *figures, f"{counts.controls:,}"])
        if rows:
            found.append(Table(f"Tokenizers by {part}", columns, rows))
    return found


def _notes(samples: Sequence[Sample]) -> list[str]:
    texts = sum((each.texts for each in samples), TextCounts())
    unread, filtered = sum(each.unread for each in samples), sum(each.filtered for each in samples)
    read = (
        f"{texts.documents:,} documents of {texts.size:,} bytes are encoded, {unread:,} rows are blank or cannot be read, "
        f"{filtered:,} are excluded by the blend."
    )
    fallback = "fallback: the share of tokens that aren't whole characters"
    long = f"long: the share of tokens with {LONG_BYTES} bytes or more"
    return [read, f"{fallback}; {long}; controls: the tokenizer's control strings in text, encoded as any other text."]


def publish_comparison(samples: Sequence[Sample], place: str) -> Output:
    """Write the page to the file or object `place`; errors as in `publish`."""
    return publish_bytes(absolute(place), comparison_page(samples).encode())


def comparison_page(samples: Sequence[Sample]) -> str:
    """Return the page: bars for each figure by dataset, and for fertility by language if the blend states any; then the tables."""
    from tokenmill.tasks.kit import html  # noqa: PLC0415 - Jinja2 takes 40 ms, and terminals need none of it

    pictures = [_bars(figure, figure.title, samples) for figure in FIGURES]
    if languages := by_language(samples):
        pictures += [_bars(figure, f"{figure.title}, by language", languages) for figure in FIGURES[:3]]
    parts: list[Block] = [*map(Text, _notes(samples)), *pictures, *_tables(samples)]
    return html.page("tokenmill compare-tokenizers", {"Tokenizers": parts})


def _bars(figure: Figure, title: str, samples: Sequence[Sample]) -> Chart:
    values = {each.name: [figure.of(each.texts, counts) for counts in each.tokens.values()] for each in samples}
    return bars(title, values, list(samples[0].tokens), figure.shown)
