"""Blends of raw text in, training-ready token shards out."""

# Generated from the models that check settings: python -m tests.settings_page

from collections.abc import Iterable, Mapping, Sequence
from os import PathLike
from typing import Any, Literal, Protocol, TypedDict

from pandas import DataFrame

from tokenmill.tasks.dataset.dataset import Dataset
from tokenmill.tasks.errors import InputError, RunError

__all__ = ["InputError", "RunError", "dataframe", "dedup", "embeddings", "filter", "harmony", "nll", "open", "pretrain", "rl", "sft"]

class ArrowStream(Protocol):
    """A table from pandas, polars, pyarrow, DuckDB or `datasets`."""

    def __arrow_c_stream__(self, requested_schema: object = None) -> object: ...

def open(output_dir: str | PathLike[str]) -> Dataset:
    """Open a published output: splits, parts, documents, packs, rows, and their origins."""

def dataframe(
    output_dir: str | PathLike[str], rows: Literal["documents", "packs", "shards"] = "documents"
) -> DataFrame:
    """The documents, packs or shards of an output of tokens, as pandas."""

class Blend(TypedDict, total=False):
    """Datasets and weights: either one flat list, `datasets`, or a list per split."""

    datasets: Sequence[DataSource] | None
    train: Sequence[DataSource] | None
    valid: Sequence[DataSource] | None
    test: Sequence[DataSource] | None
    tokens: int | None
    temperature: float | None
    groups: Mapping[str, float] | None
    phases: Sequence[Phase] | None

class C4Quality(TypedDict, total=False):
    """C4's rules (arXiv 1910.10683, section 2.2). Lines that fail a rule do not count as sentences."""

    remove_lines: bool
    remove_citations: bool
    filter_no_terminal_punct: bool
    min_num_sentences: int
    min_words_per_line: int
    max_word_length: int
    filter_lorem_ipsum: bool
    filter_javascript: bool
    filter_curly_bracket: bool
    filter_policy: bool

class Classifier(TypedDict, total=False):
    """A classifier, with the name that its drops are counted under."""

    model: str
    keep: Sequence[str]
    threshold: float
    name: str

class Curriculum(TypedDict, total=False):
    """How the pass rates of training rows move from batch to batch."""

    field: str | None
    pass_rate_range: float
    spread: float
    drop_unsolved_at: float
    drop_solved_at: float

class DataSource(TypedDict, total=False):
    """One dataset of a blend: the place of its rows, and its weight."""

    name: str
    path: str
    weight: float
    split: str | None
    subset: str | None
    text_field: str
    document_per: Literal["file", "line"]
    revision: str | None
    messages_field: str | None
    tools_field: str
    template_variables: Mapping[str, Any]
    fields: Fields | None
    used_in: str | None
    filters: Mapping[str, str | int | bool | Sequence[str | int | bool]]
    where: str | None
    converter: str | None
    share: float | None
    tokens: int | None
    min_epochs: float | None
    max_epochs: float | None
    group: str | None
    license: str | None
    languages: Sequence[str] | None
    domain: str | None
    fim: Fim | None
    transforms: Sequence[str | Mapping[str, Any]]

class DedupChoices(TypedDict, total=False):
    """How to find duplicates among conversations, and how to treat them."""

    mode: Literal["off", "tag", "drop"]
    near: bool
    threshold: float
    near_on: Literal["conversation", "prompt"]
    cap: int | None
    evaluations: Blend | str | None

class Fields(TypedDict, total=False):
    """The fields that hold the parts of a conversation; dots separate nested keys, also inside JSON text."""

    prompt: str | None
    response: str | None
    system: str | None
    history: str | None
    tools: str | None

class Fim(TypedDict, total=False):
    """Fill in the middle: which documents are rearranged, and how. Names and defaults match Megatron's `--fim-*`."""

    rate: float
    spm_rate: float
    split_sample: str | None
    fragment_rate: float | None
    skip_prefix: str | None
    prefix_token: str | None
    middle_token: str | None
    suffix_token: str | None
    seed: int

class FineWebQuality(TypedDict, total=False):
    """FineWeb's rules (arXiv 2406.17557, section 3.6)."""

    line_punct_thr: float | None
    line_punct_exclude_zero: bool
    stop_chars: str | None
    short_line_thr: float | None
    short_line_length: int
    char_duplicates_ratio: float | None
    new_line_ratio: float | None

class GopherQuality(TypedDict, total=False):
    """Gopher's quality rules (arXiv 2112.11446, appendix A.1.1)."""

    min_doc_words: int | None
    max_doc_words: int | None
    min_avg_word_length: float | None
    max_avg_word_length: float | None
    max_symbol_word_ratio: float | None
    max_bullet_lines_ratio: float | None
    max_ellipsis_lines_ratio: float | None
    max_non_alpha_words_ratio: float | None
    min_stop_words: int | None
    stop_words: Sequence[str]

class GopherRepetition(TypedDict, total=False):
    """Gopher's repetition rules (arXiv 2112.11446, table A1)."""

    dup_line_frac: float | None
    dup_para_frac: float | None
    dup_line_char_frac: float | None
    dup_para_char_frac: float | None
    top_n_grams: Mapping[str, float]
    dup_n_grams: Mapping[str, float]

class Holdout(TypedDict, total=False):
    """Shares of documents held out for validation and testing, chosen by a hash of the document."""

    valid: float
    test: float
    seed: int

class Model(TypedDict, total=False):
    """A fastText model that must give a document one of some labels."""

    model: str
    keep: Sequence[str]
    threshold: float

class PersonalData(TypedDict, total=False):
    """What to do with personal data and secrets."""

    emails: Literal["off", "count", "mask", "drop"]
    ips: Literal["off", "count", "mask", "drop"]
    secrets: Literal["off", "count", "mask", "drop"]
    email_mask: str
    ip_mask: str
    secret_mask: str
    only_public_ips: bool

class Phase(TypedDict, total=False):
    """A phase of training: its size, and its mix."""

    name: str
    share: float | None
    tokens: int | None
    mix: Mapping[str, float] | None
    ramp: int | None

class SelectionChoices(TypedDict, total=False):
    """Pools, candidates and the limits of a selection."""

    pools: str
    scores: Sequence[str]
    unique: bool
    materialize: bool
    view: Literal["prompt", "reasoning_excerpt", "behavior"] | Literal["none"]
    require: str
    share: float
    min_distinct_behaviors: float | None
    min_tool_call_fraction: float

class TokenizerSettings(TypedDict, total=False):
    """The tokenizer to use, and the ids to add to each document."""

    model: str
    revision: str | None
    trust_remote_code: bool
    add_bos: bool
    add_eos: bool

class TokenizerSource(TypedDict, total=False):
    """The tokenizer to use."""

    model: str
    revision: str | None
    trust_remote_code: bool

def pretrain(
    data: Blend | Mapping[str, Any] | str | PathLike[str] | Iterable[Mapping[str, Any]] | ArrowStream,
    output_dir: str | PathLike[str],
    *,
    cluster: str = "local",
    cluster_timeout: float | None = None,
    workers: int | None = None,
    shard_size: int | str = 256000000,
    store: str | None = None,
    holdout: Holdout = ...,
    change_detection: Literal["hash", "mtime"] = "hash",
    on_bad_row: Literal["quarantine", "fail"] = "quarantine",
    max_bad_row_fraction: float = 0.001,
    max_shrink_fraction: float = 0.5,
    allow_shrink: Sequence[str] = ...,
    previous: str | None = None,
    scale: Literal["tiny", "small", "medium", "full"] = "full",
    sample: int | None = None,
    force: bool = False,
    allow_partial: bool = False,
    tokenizer: TokenizerSettings = ...,
    special_tokens_in_text: Literal["literal", "allow", "reject"] = "literal",
    min_doc_chars: int | None = None,
    max_doc_tokens: int | None = None,
    fim: Fim | None = None,
    prefix_size: int | str = 32000000000,
    weight: float = 1.0,
    split: str | None = None,
    subset: str | None = None,
    text_field: str = "text",
    document_per: Literal["file", "line"] = "file",
    revision: str | None = None,
    messages_field: str | None = None,
    tools_field: str = "tools",
    template_variables: Mapping[str, Any] = ...,
    fields: Fields | None = None,
    used_in: str | None = None,
    filters: Mapping[str, str | int | bool | Sequence[str | int | bool]] = ...,
    where: str | None = None,
    converter: str | None = None,
    share: float | None = None,
    tokens: int | None = None,
    min_epochs: float | None = None,
    max_epochs: float | None = None,
    group: str | None = None,
    license: str | None = None,
    languages: Sequence[str] | None = None,
    domain: str | None = None,
    transforms: Sequence[str | Mapping[str, Any]] = ...,
) -> dict[str, Any]:
    """Prepare a blend for pretraining: Megatron .bin/.idx and blend.json.

    Returns the artifact record. Keys of a dataset apply to rows and tables, not to blends.

    Args:
        cluster: local, a scheduler address, or a YAML file with a profile.
        cluster_timeout: Seconds to wait for a worker: by default 60 on a local or SSH cluster, 600 at an address,
            else no limit.
        workers: Worker processes; all cores by default.
        shard_size: Source bytes per shard, for example 256MB.
        store: Folder or URI of the shards; preparations can share it.
        holdout: Documents to hold out of a flat blend.
        change_detection: How to notice that a local file changed: by a hash of its content, or by size and
            modification time (mtime).
        on_bad_row: What to do with a row that cannot be read.
        max_bad_row_fraction: Share of a dataset's rows that may be bad.
        max_shrink_fraction: Share of a dataset's documents that may be lost since the last version.
        allow_shrink: Datasets that may lose a larger share, or disappear.
        previous: Output folder of the last version; output_dir by default.
        scale: Leading share of each dataset: 1 %, 10 %, 30 % or all.
        sample: Leading rows of each dataset.
        force: Build every shard again, even if it has a valid receipt.
        allow_partial: Publish even if shards are missing; the manifest lists them.
        tokenizer: Tokenizer of the documents.
        special_tokens_in_text: Control strings in text: encode as text or as control ids, or reject the row.
        min_doc_chars: Drop and count shorter documents.
        max_doc_tokens: Cut longer documents; EOS is kept.
        fim: Fill in the middle; a dataset's own `fim` replaces it.
        prefix_size: Bytes of tokens in one published .bin, for example 32GB.
        weight: Relative share of training tokens; with 0, prepared but not used.
        split: Split of the dataset.
        subset: Configuration of a Hugging Face dataset, or a folder in other datasets.
        text_field: Field that holds the text; dots separate nested keys.
        document_per: A document of .txt files: a whole file, or a line.
        revision: Branch, tag or commit of a Hugging Face dataset.
        messages_field: Field that holds the messages; detected if omitted.
        tools_field: Field that holds the tools.
        template_variables: Variables of its chat template, added to the setting; also chat_template_kwargs.
        fields: Fields of question, answer, system prompt, history and tools; detected if omitted.
        used_in: Keep only rows whose used_in names this.
        filters: Keep only rows whose field has this value, or one of these.
        where: Keep only rows for which this predicate is true, for example int_score >= 3 and length(text) > 200.
        converter: Converter to Harmony; chosen by the path if omitted.
        share: Share of its group's tokens, or of all, instead of a weight.
        tokens: Tokens to read of it, instead of a weight.
        min_epochs: Read it at least this often.
        max_epochs: Read it at most this often.
        group: Group that it is in; 'code/python' is in 'code'.
        license: License of the dataset, for its card; best an SPDX identifier.
        languages: Languages of the dataset, for its card, as codes of BCP 47; never guessed.
        domain: Topic of the dataset, for its report.
        transforms: Transforms of each row for reinforcement learning, in order.
    """

def sft(
    data: Blend | Mapping[str, Any] | str | PathLike[str] | Iterable[Mapping[str, Any]] | ArrowStream,
    output_dir: str | PathLike[str],
    *,
    cluster: str = "local",
    cluster_timeout: float | None = None,
    workers: int | None = None,
    shard_size: int | str = 256000000,
    store: str | None = None,
    holdout: Holdout = ...,
    change_detection: Literal["hash", "mtime"] = "hash",
    on_bad_row: Literal["quarantine", "fail"] = "quarantine",
    max_bad_row_fraction: float = 0.001,
    max_shrink_fraction: float = 0.5,
    allow_shrink: Sequence[str] = ...,
    previous: str | None = None,
    scale: Literal["tiny", "small", "medium", "full"] = "full",
    sample: int | None = None,
    force: bool = False,
    allow_partial: bool = False,
    loss_on: Literal["assistant_all", "assistant_bodies", "last_turn", "final_only"] = "assistant_all",
    loss_reasoning: bool = True,
    loss_empty_reasoning: bool = True,
    loss_tool_calls: bool = True,
    loss_end_of_turn: bool = True,
    tokenizer: TokenizerSource = ...,
    special_tokens_in_text: Literal["literal", "allow", "reject"] = "literal",
    chat_template: str = "auto",
    allow_text_markers: bool = False,
    template_variables: Mapping[str, Any] = ...,
    split_turns: Literal["auto", "never"] = "auto",
    pack_size: int = 4096,
    packing: Literal["best_fit_decreasing", "first_fit_decreasing", "first_fit_shuffle", "concatenative"] = "best_fit_decreasing",
    on_oversize: Literal["drop", "truncate", "error"] = "drop",
    pad_seq_to_mult: int = 1,
    sampling: Literal["none", "down", "up"] = "none",
    seed: int = 42,
    weight: float = 1.0,
    split: str | None = None,
    subset: str | None = None,
    text_field: str = "text",
    document_per: Literal["file", "line"] = "file",
    revision: str | None = None,
    messages_field: str | None = None,
    tools_field: str = "tools",
    fields: Fields | None = None,
    used_in: str | None = None,
    filters: Mapping[str, str | int | bool | Sequence[str | int | bool]] = ...,
    where: str | None = None,
    converter: str | None = None,
    share: float | None = None,
    tokens: int | None = None,
    min_epochs: float | None = None,
    max_epochs: float | None = None,
    group: str | None = None,
    license: str | None = None,
    languages: Sequence[str] | None = None,
    domain: str | None = None,
    fim: Fim | None = None,
    transforms: Sequence[str | Mapping[str, Any]] = ...,
) -> dict[str, Any]:
    """Prepare a blend of conversations for SFT: packed Parquet with exact loss masks, and blend.json.

    Returns the artifact record. Keys of a dataset apply to rows and tables, not to blends.

    Args:
        cluster: local, a scheduler address, or a YAML file with a profile.
        cluster_timeout: Seconds to wait for a worker: by default 60 on a local or SSH cluster, 600 at an address,
            else no limit.
        workers: Worker processes; all cores by default.
        shard_size: Source bytes per shard, for example 256MB.
        store: Folder or URI of the shards; preparations can share it.
        holdout: Documents to hold out of a flat blend.
        change_detection: How to notice that a local file changed: by a hash of its content, or by size and
            modification time (mtime).
        on_bad_row: What to do with a row that cannot be read.
        max_bad_row_fraction: Share of a dataset's rows that may be bad.
        max_shrink_fraction: Share of a dataset's documents that may be lost since the last version.
        allow_shrink: Datasets that may lose a larger share, or disappear.
        previous: Output folder of the last version; output_dir by default.
        scale: Leading share of each dataset: 1 %, 10 %, 30 % or all.
        sample: Leading rows of each dataset.
        force: Build every shard again, even if it has a valid receipt.
        allow_partial: Publish even if shards are missing; the manifest lists them.
        loss_on: Which of the assistant's messages are trained on.
        loss_reasoning: Train on reasoning.
        loss_empty_reasoning: Train on empty reasoning, where the template writes it after its generation prompt.
        loss_tool_calls: Train on tool calls.
        loss_end_of_turn: Train on the token that ends a turn.
        tokenizer: Tokenizer of the conversations.
        special_tokens_in_text: Control strings in text: encode as text or as control ids, or reject the row.
        chat_template: nano3, lightning35, harmony, tokenizer (the model's own), a file, or the Jinja text itself.
            auto: harmony with Harmony's tokenizer, otherwise the tokenizer's own.
        allow_text_markers: Accept a template whose markers are plain text to the tokenizer, not control tokens.
        template_variables: Variables for the template, for example enable_thinking; strftime_now returns date.
        split_turns: One sequence per user turn where the template strips reasoning from history.
        pack_size: Maximum stored tokens per pack.
        packing: Algorithm that assigns sequences to packs.
        on_oversize: What to do with sequences longer than a pack.
        pad_seq_to_mult: Pad sequences to a multiple plus one, for context parallelism (2 x CP).
        sampling: Apply weights by dropping (down) or repeating (up) packs.
        seed: Shuffle seed for packs and files.
        weight: Relative share of training tokens; with 0, prepared but not used.
        split: Split of the dataset.
        subset: Configuration of a Hugging Face dataset, or a folder in other datasets.
        text_field: Field that holds the text; dots separate nested keys.
        document_per: A document of .txt files: a whole file, or a line.
        revision: Branch, tag or commit of a Hugging Face dataset.
        messages_field: Field that holds the messages; detected if omitted.
        tools_field: Field that holds the tools.
        fields: Fields of question, answer, system prompt, history and tools; detected if omitted.
        used_in: Keep only rows whose used_in names this.
        filters: Keep only rows whose field has this value, or one of these.
        where: Keep only rows for which this predicate is true, for example int_score >= 3 and length(text) > 200.
        converter: Converter to Harmony; chosen by the path if omitted.
        share: Share of its group's tokens, or of all, instead of a weight.
        tokens: Tokens to read of it, instead of a weight.
        min_epochs: Read it at least this often.
        max_epochs: Read it at most this often.
        group: Group that it is in; 'code/python' is in 'code'.
        license: License of the dataset, for its card; best an SPDX identifier.
        languages: Languages of the dataset, for its card, as codes of BCP 47; never guessed.
        domain: Topic of the dataset, for its report.
        fim: Fill in the middle for this dataset, instead of the setting.
        transforms: Transforms of each row for reinforcement learning, in order.
    """

def rl(
    data: Blend | Mapping[str, Any] | str | PathLike[str] | Iterable[Mapping[str, Any]] | ArrowStream,
    output_dir: str | PathLike[str],
    *,
    cluster: str = "local",
    cluster_timeout: float | None = None,
    workers: int | None = None,
    shard_size: int | str = 256000000,
    store: str | None = None,
    holdout: Holdout = ...,
    change_detection: Literal["hash", "mtime"] = "hash",
    on_bad_row: Literal["quarantine", "fail"] = "quarantine",
    max_bad_row_fraction: float = 0.001,
    max_shrink_fraction: float = 0.5,
    allow_shrink: Sequence[str] = ...,
    previous: str | None = None,
    scale: Literal["tiny", "small", "medium", "full"] = "full",
    sample: int | None = None,
    force: bool = False,
    allow_partial: bool = False,
    transforms: Sequence[str | Mapping[str, Any]] = ...,
    target: Literal["none", "nemo_gym", "nemo_rl_sft", "nemo_rl_chat", "nemo_rl_grpo_math", "nemo_rl_dpo"] = "none",
    splits: Literal["holdout", "source"] = "holdout",
    val_holdout: int | None = None,
    compression: Literal["none", "zstd"] = "none",
    max_tokens: int | None = None,
    tokenizer: TokenizerSource = ...,
    batch_size: int | None = None,
    sampling: Literal["none", "down", "up"] = "none",
    curriculum: Curriculum = ...,
    seed: int = 42,
    weight: float = 1.0,
    split: str | None = None,
    subset: str | None = None,
    text_field: str = "text",
    document_per: Literal["file", "line"] = "file",
    revision: str | None = None,
    messages_field: str | None = None,
    tools_field: str = "tools",
    template_variables: Mapping[str, Any] = ...,
    fields: Fields | None = None,
    used_in: str | None = None,
    filters: Mapping[str, str | int | bool | Sequence[str | int | bool]] = ...,
    where: str | None = None,
    converter: str | None = None,
    share: float | None = None,
    tokens: int | None = None,
    min_epochs: float | None = None,
    max_epochs: float | None = None,
    group: str | None = None,
    license: str | None = None,
    languages: Sequence[str] | None = None,
    domain: str | None = None,
    fim: Fim | None = None,
) -> dict[str, Any]:
    """Prepare a blend of rows for reinforcement learning: JSON Lines that NeMo-RL and NeMo-Gym read.

    Returns the artifact record. Keys of a dataset apply to rows and tables, not to blends.

    Args:
        cluster: local, a scheduler address, or a YAML file with a profile.
        cluster_timeout: Seconds to wait for a worker: by default 60 on a local or SSH cluster, 600 at an address,
            else no limit.
        workers: Worker processes; all cores by default.
        shard_size: Source bytes per shard, for example 256MB.
        store: Folder or URI of the shards; preparations can share it.
        holdout: Documents to hold out of a flat blend.
        change_detection: How to notice that a local file changed: by a hash of its content, or by size and
            modification time (mtime).
        on_bad_row: What to do with a row that cannot be read.
        max_bad_row_fraction: Share of a dataset's rows that may be bad.
        max_shrink_fraction: Share of a dataset's documents that may be lost since the last version.
        allow_shrink: Datasets that may lose a larger share, or disappear.
        previous: Output folder of the last version; output_dir by default.
        scale: Leading share of each dataset: 1 %, 10 %, 30 % or all.
        sample: Leading rows of each dataset.
        force: Build every shard again, even if it has a valid receipt.
        allow_partial: Publish even if shards are missing; the manifest lists them.
        transforms: Transforms for datasets that list none.
        target: Trainer whose requirements rows are checked against.
        splits: Hold out validation and test rows, or use the splits of the sources.
        val_holdout: Number of last rows per dataset to hold out, instead of shares by hash.
        compression: Plain JSON Lines, or compressed with zstd.
        max_tokens: Drop rows with more tokens of text.
        tokenizer: Tokenizer that max_tokens counts with.
        batch_size: Order the training rows so that every step of so many holds each dataset's share.
        sampling: Apply weights in batches by dropping (down) or repeating (up) rows.
        curriculum: Order batches by the pass rates of their rows.
        seed: Shuffle seed for rows in batches.
        weight: Relative share of training tokens; with 0, prepared but not used.
        split: Split of the dataset.
        subset: Configuration of a Hugging Face dataset, or a folder in other datasets.
        text_field: Field that holds the text; dots separate nested keys.
        document_per: A document of .txt files: a whole file, or a line.
        revision: Branch, tag or commit of a Hugging Face dataset.
        messages_field: Field that holds the messages; detected if omitted.
        tools_field: Field that holds the tools.
        template_variables: Variables of its chat template, added to the setting; also chat_template_kwargs.
        fields: Fields of question, answer, system prompt, history and tools; detected if omitted.
        used_in: Keep only rows whose used_in names this.
        filters: Keep only rows whose field has this value, or one of these.
        where: Keep only rows for which this predicate is true, for example int_score >= 3 and length(text) > 200.
        converter: Converter to Harmony; chosen by the path if omitted.
        share: Share of its group's tokens, or of all, instead of a weight.
        tokens: Tokens to read of it, instead of a weight.
        min_epochs: Read it at least this often.
        max_epochs: Read it at most this often.
        group: Group that it is in; 'code/python' is in 'code'.
        license: License of the dataset, for its card; best an SPDX identifier.
        languages: Languages of the dataset, for its card, as codes of BCP 47; never guessed.
        domain: Topic of the dataset, for its report.
        fim: Fill in the middle for this dataset, instead of the setting.
    """

def harmony(
    data: Blend | Mapping[str, Any] | str | PathLike[str] | Iterable[Mapping[str, Any]] | ArrowStream,
    output_dir: str | PathLike[str],
    *,
    cluster: str = "local",
    cluster_timeout: float | None = None,
    workers: int | None = None,
    shard_size: int | str = 256000000,
    store: str | None = None,
    change_detection: Literal["hash", "mtime"] = "hash",
    on_bad_row: Literal["quarantine", "fail"] = "quarantine",
    max_bad_row_fraction: float = 0.001,
    max_shrink_fraction: float = 0.5,
    allow_shrink: Sequence[str] = ...,
    previous: str | None = None,
    scale: Literal["tiny", "small", "medium", "full"] = "full",
    sample: int | None = None,
    force: bool = False,
    allow_partial: bool = False,
    effort: Literal["low", "medium", "high"] = "medium",
    keep_reasoning: Literal["last_turn", "keep_all"] = "last_turn",
    parallel_calls: Literal["interleave", "grouped", "reject"] = "interleave",
    special_strings: Literal["reject", "escape"] = "reject",
    trailing: Literal["drop", "reject"] = "drop",
    proofs: Literal["proof", "formalize", "both"] = "proof",
    disabled_rules: Sequence[str] = ...,
    min_completion_chars: int = 1,
    cross_check: float = 0.02,
    messages_json: bool = False,
    dedup: DedupChoices = ...,
    selection: SelectionChoices = ...,
    weight: float = 1.0,
    split: str | None = None,
    subset: str | None = None,
    text_field: str = "text",
    document_per: Literal["file", "line"] = "file",
    revision: str | None = None,
    messages_field: str | None = None,
    tools_field: str = "tools",
    template_variables: Mapping[str, Any] = ...,
    fields: Fields | None = None,
    used_in: str | None = None,
    filters: Mapping[str, str | int | bool | Sequence[str | int | bool]] = ...,
    where: str | None = None,
    converter: str | None = None,
    share: float | None = None,
    tokens: int | None = None,
    min_epochs: float | None = None,
    max_epochs: float | None = None,
    group: str | None = None,
    license: str | None = None,
    languages: Sequence[str] | None = None,
    domain: str | None = None,
    fim: Fim | None = None,
    transforms: Sequence[str | Mapping[str, Any]] = ...,
) -> dict[str, Any]:
    """Normalize chat data into Harmony: deduplicated Parquet in pools, ready to be scored.

    Returns the artifact record. Keys of a dataset apply to rows and tables, not to blends.

    Args:
        cluster: local, a scheduler address, or a YAML file with a profile.
        cluster_timeout: Seconds to wait for a worker: by default 60 on a local or SSH cluster, 600 at an address,
            else no limit.
        workers: Worker processes; all cores by default.
        shard_size: Source bytes per shard, for example 256MB.
        store: Folder or URI of the shards; preparations can share it.
        change_detection: How to notice that a local file changed: by a hash of its content, or by size and
            modification time (mtime).
        on_bad_row: What to do with a row that cannot be read.
        max_bad_row_fraction: Share of a dataset's rows that may be bad.
        max_shrink_fraction: Share of a dataset's documents that may be lost since the last version.
        allow_shrink: Datasets that may lose a larger share, or disappear.
        previous: Output folder of the last version; output_dir by default.
        scale: Leading share of each dataset: 1 %, 10 %, 30 % or all.
        sample: Leading rows of each dataset.
        force: Build every shard again, even if it has a valid receipt.
        allow_partial: Publish even if shards are missing; the manifest lists them.
        effort: Reasoning effort of rows without one in the source.
        keep_reasoning: Keep all reasoning, or only that after the last user message.
        parallel_calls: How to write parallel calls, which Harmony does not have.
        special_strings: Control strings in data: reject the row, or break them up.
        trailing: Messages after the assistant's last one: drop them, or reject the row.
        proofs: What to train on in rows with proofs.
        disabled_rules: Codes of rules that rows may break, for example S15.
        min_completion_chars: Answers with fewer characters count as empty.
        cross_check: Share of rows, sampled by a hash, that the official parser checks too; less of rows over 1,000
            characters.
        messages_json: Also write the messages of each row as JSON.
        dedup: How to find and treat duplicates.
        selection: Which rows go into pools and become candidates.
        weight: Relative share of training tokens; with 0, prepared but not used.
        split: Split of the dataset.
        subset: Configuration of a Hugging Face dataset, or a folder in other datasets.
        text_field: Field that holds the text; dots separate nested keys.
        document_per: A document of .txt files: a whole file, or a line.
        revision: Branch, tag or commit of a Hugging Face dataset.
        messages_field: Field that holds the messages; detected if omitted.
        tools_field: Field that holds the tools.
        template_variables: Variables of its chat template, added to the setting; also chat_template_kwargs.
        fields: Fields of question, answer, system prompt, history and tools; detected if omitted.
        used_in: Keep only rows whose used_in names this.
        filters: Keep only rows whose field has this value, or one of these.
        where: Keep only rows for which this predicate is true, for example int_score >= 3 and length(text) > 200.
        converter: Converter to Harmony; chosen by the path if omitted.
        share: Share of its group's tokens, or of all, instead of a weight.
        tokens: Tokens to read of it, instead of a weight.
        min_epochs: Read it at least this often.
        max_epochs: Read it at most this often.
        group: Group that it is in; 'code/python' is in 'code'.
        license: License of the dataset, for its card; best an SPDX identifier.
        languages: Languages of the dataset, for its card, as codes of BCP 47; never guessed.
        domain: Topic of the dataset, for its report.
        fim: Fill in the middle for this dataset, instead of the setting.
        transforms: Transforms of each row for reinforcement learning, in order.
    """

def dedup(
    data: Blend | Mapping[str, Any] | str | PathLike[str] | Iterable[Mapping[str, Any]] | ArrowStream,
    output_dir: str | PathLike[str],
    *,
    cluster: str = "local",
    cluster_timeout: float | None = None,
    workers: int | None = None,
    shard_size: int | str = 256000000,
    store: str | None = None,
    change_detection: Literal["hash", "mtime"] = "hash",
    on_bad_row: Literal["quarantine", "fail"] = "quarantine",
    max_bad_row_fraction: float = 0.001,
    max_shrink_fraction: float = 0.5,
    allow_shrink: Sequence[str] = ...,
    previous: str | None = None,
    scale: Literal["tiny", "small", "medium", "full"] = "full",
    sample: int | None = None,
    force: bool = False,
    allow_partial: bool = False,
    mode: Literal["tag", "drop"] = "drop",
    near: bool = True,
    threshold: float = 0.8,
    cap: int | None = None,
    cap_by: str | None = None,
    id_field: str | None = None,
    evaluations: Blend | str | None = None,
    weight: float = 1.0,
    split: str | None = None,
    subset: str | None = None,
    text_field: str = "text",
    document_per: Literal["file", "line"] = "file",
    revision: str | None = None,
    messages_field: str | None = None,
    tools_field: str = "tools",
    template_variables: Mapping[str, Any] = ...,
    fields: Fields | None = None,
    used_in: str | None = None,
    filters: Mapping[str, str | int | bool | Sequence[str | int | bool]] = ...,
    where: str | None = None,
    converter: str | None = None,
    share: float | None = None,
    tokens: int | None = None,
    min_epochs: float | None = None,
    max_epochs: float | None = None,
    group: str | None = None,
    license: str | None = None,
    languages: Sequence[str] | None = None,
    domain: str | None = None,
    fim: Fim | None = None,
    transforms: Sequence[str | Mapping[str, Any]] = ...,
) -> dict[str, Any]:
    """Remove duplicate documents from a blend of text, and documents that overlap evaluations.

    Returns the artifact record. Keys of a dataset apply to rows and tables, not to blends.

    Args:
        cluster: local, a scheduler address, or a YAML file with a profile.
        cluster_timeout: Seconds to wait for a worker: by default 60 on a local or SSH cluster, 600 at an address,
            else no limit.
        workers: Worker processes; all cores by default.
        shard_size: Source bytes per shard, for example 256MB.
        store: Folder or URI of the shards; preparations can share it.
        change_detection: How to notice that a local file changed: by a hash of its content, or by size and
            modification time (mtime).
        on_bad_row: What to do with a row that cannot be read.
        max_bad_row_fraction: Share of a dataset's rows that may be bad.
        max_shrink_fraction: Share of a dataset's documents that may be lost since the last version.
        allow_shrink: Datasets that may lose a larger share, or disappear.
        previous: Output folder of the last version; output_dir by default.
        scale: Leading share of each dataset: 1 %, 10 %, 30 % or all.
        sample: Leading rows of each dataset.
        force: Build every shard again, even if it has a valid receipt.
        allow_partial: Publish even if shards are missing; the manifest lists them.
        mode: Drop duplicates, or tag every row with its outcome.
        near: Also find near-duplicates: texts that share most of their runs of five words or characters.
        threshold: Minimum Jaccard similarity of near-duplicates.
        cap: Maximum documents per prompt; the shortest are kept.
        cap_by: Field with the prompt of a document.
        id_field: Field with the name of a document; by default its file and row.
        evaluations: Blend of evaluations; documents that share 13 consecutive words with one, or contain a shorter
            one, are contaminated.
        weight: Relative share of training tokens; with 0, prepared but not used.
        split: Split of the dataset.
        subset: Configuration of a Hugging Face dataset, or a folder in other datasets.
        text_field: Field that holds the text; dots separate nested keys.
        document_per: A document of .txt files: a whole file, or a line.
        revision: Branch, tag or commit of a Hugging Face dataset.
        messages_field: Field that holds the messages; detected if omitted.
        tools_field: Field that holds the tools.
        template_variables: Variables of its chat template, added to the setting; also chat_template_kwargs.
        fields: Fields of question, answer, system prompt, history and tools; detected if omitted.
        used_in: Keep only rows whose used_in names this.
        filters: Keep only rows whose field has this value, or one of these.
        where: Keep only rows for which this predicate is true, for example int_score >= 3 and length(text) > 200.
        converter: Converter to Harmony; chosen by the path if omitted.
        share: Share of its group's tokens, or of all, instead of a weight.
        tokens: Tokens to read of it, instead of a weight.
        min_epochs: Read it at least this often.
        max_epochs: Read it at most this often.
        group: Group that it is in; 'code/python' is in 'code'.
        license: License of the dataset, for its card; best an SPDX identifier.
        languages: Languages of the dataset, for its card, as codes of BCP 47; never guessed.
        domain: Topic of the dataset, for its report.
        fim: Fill in the middle for this dataset, instead of the setting.
        transforms: Transforms of each row for reinforcement learning, in order.
    """

def filter(
    data: Blend | Mapping[str, Any] | str | PathLike[str] | Iterable[Mapping[str, Any]] | ArrowStream,
    output_dir: str | PathLike[str],
    *,
    cluster: str = "local",
    cluster_timeout: float | None = None,
    workers: int | None = None,
    shard_size: int | str = 256000000,
    store: str | None = None,
    change_detection: Literal["hash", "mtime"] = "hash",
    on_bad_row: Literal["quarantine", "fail"] = "quarantine",
    max_bad_row_fraction: float = 0.001,
    max_shrink_fraction: float = 0.5,
    allow_shrink: Sequence[str] = ...,
    previous: str | None = None,
    scale: Literal["tiny", "small", "medium", "full"] = "full",
    sample: int | None = None,
    force: bool = False,
    allow_partial: bool = False,
    rules: Sequence[Literal["gopher_repetition", "gopher_quality", "c4", "fineweb"]] = ...,
    gopher_repetition: GopherRepetition = ...,
    gopher_quality: GopherQuality = ...,
    c4: C4Quality = ...,
    fineweb: FineWebQuality = ...,
    language: Model | None = None,
    classifiers: Sequence[Classifier] = ...,
    personal: PersonalData = ...,
    weight: float = 1.0,
    split: str | None = None,
    subset: str | None = None,
    text_field: str = "text",
    document_per: Literal["file", "line"] = "file",
    revision: str | None = None,
    messages_field: str | None = None,
    tools_field: str = "tools",
    template_variables: Mapping[str, Any] = ...,
    fields: Fields | None = None,
    used_in: str | None = None,
    filters: Mapping[str, str | int | bool | Sequence[str | int | bool]] = ...,
    where: str | None = None,
    converter: str | None = None,
    share: float | None = None,
    tokens: int | None = None,
    min_epochs: float | None = None,
    max_epochs: float | None = None,
    group: str | None = None,
    license: str | None = None,
    languages: Sequence[str] | None = None,
    domain: str | None = None,
    fim: Fim | None = None,
    transforms: Sequence[str | Mapping[str, Any]] = ...,
) -> dict[str, Any]:
    """Keep the documents of a blend that pass quality, language and personal-data rules.

    Returns the artifact record. Keys of a dataset apply to rows and tables, not to blends.

    Args:
        cluster: local, a scheduler address, or a YAML file with a profile.
        cluster_timeout: Seconds to wait for a worker: by default 60 on a local or SSH cluster, 600 at an address,
            else no limit.
        workers: Worker processes; all cores by default.
        shard_size: Source bytes per shard, for example 256MB.
        store: Folder or URI of the shards; preparations can share it.
        change_detection: How to notice that a local file changed: by a hash of its content, or by size and
            modification time (mtime).
        on_bad_row: What to do with a row that cannot be read.
        max_bad_row_fraction: Share of a dataset's rows that may be bad.
        max_shrink_fraction: Share of a dataset's documents that may be lost since the last version.
        allow_shrink: Datasets that may lose a larger share, or disappear.
        previous: Output folder of the last version; output_dir by default.
        scale: Leading share of each dataset: 1 %, 10 %, 30 % or all.
        sample: Leading rows of each dataset.
        force: Build every shard again, even if it has a valid receipt.
        allow_partial: Publish even if shards are missing; the manifest lists them.
        rules: Families of rules, in their order; the first rule that fails is the reason.
        gopher_repetition: Gopher's repetition rules.
        gopher_quality: Gopher's quality rules.
        c4: C4 rules.
        fineweb: FineWeb rules.
        language: Languages to keep, after the families of rules.
        classifiers: Classifiers, after the language.
        personal: Personal data, last.
        weight: Relative share of training tokens; with 0, prepared but not used.
        split: Split of the dataset.
        subset: Configuration of a Hugging Face dataset, or a folder in other datasets.
        text_field: Field that holds the text; dots separate nested keys.
        document_per: A document of .txt files: a whole file, or a line.
        revision: Branch, tag or commit of a Hugging Face dataset.
        messages_field: Field that holds the messages; detected if omitted.
        tools_field: Field that holds the tools.
        template_variables: Variables of its chat template, added to the setting; also chat_template_kwargs.
        fields: Fields of question, answer, system prompt, history and tools; detected if omitted.
        used_in: Keep only rows whose used_in names this.
        filters: Keep only rows whose field has this value, or one of these.
        where: Keep only rows for which this predicate is true, for example int_score >= 3 and length(text) > 200.
        converter: Converter to Harmony; chosen by the path if omitted.
        share: Share of its group's tokens, or of all, instead of a weight.
        tokens: Tokens to read of it, instead of a weight.
        min_epochs: Read it at least this often.
        max_epochs: Read it at most this often.
        group: Group that it is in; 'code/python' is in 'code'.
        license: License of the dataset, for its card; best an SPDX identifier.
        languages: Languages of the dataset, for its card, as codes of BCP 47; never guessed.
        domain: Topic of the dataset, for its report.
        fim: Fill in the middle for this dataset, instead of the setting.
        transforms: Transforms of each row for reinforcement learning, in order.
    """

def nll(
    data: Blend | Mapping[str, Any] | str | PathLike[str] | Iterable[Mapping[str, Any]] | ArrowStream,
    output_dir: str | PathLike[str],
    *,
    cluster: str = "local",
    cluster_timeout: float | None = None,
    workers: int | None = None,
    shard_size: int | str = 16000000,
    store: str | None = None,
    change_detection: Literal["hash", "mtime"] = "hash",
    on_bad_row: Literal["quarantine", "fail"] = "quarantine",
    max_bad_row_fraction: float = 0.001,
    max_shrink_fraction: float = 0.5,
    allow_shrink: Sequence[str] = ...,
    previous: str | None = None,
    scale: Literal["tiny", "small", "medium", "full"] = "full",
    sample: int | None = None,
    force: bool = False,
    allow_partial: bool = False,
    loss_on: Literal["assistant_all", "assistant_bodies", "last_turn", "final_only"] = "assistant_all",
    loss_reasoning: bool = True,
    loss_empty_reasoning: bool = True,
    loss_tool_calls: bool = True,
    loss_end_of_turn: bool = True,
    model_revision: str | None = None,
    server: str | None = None,
    concurrency: int = 16,
    token_budget: int = 16384,
    precision: Literal["bfloat16", "float32"] | None = None,
    device: Literal["cpu", "cuda"] | None = None,
    model: str = ...,
    engine: Literal["transformers", "server"] = "transformers",
    max_length: int | None = None,
    chat_template: str = "harmony",
    tokenizer: TokenizerSource | None = None,
    weight: float = 1.0,
    split: str | None = None,
    subset: str | None = None,
    text_field: str = "text",
    document_per: Literal["file", "line"] = "file",
    revision: str | None = None,
    messages_field: str | None = None,
    tools_field: str = "tools",
    template_variables: Mapping[str, Any] = ...,
    fields: Fields | None = None,
    used_in: str | None = None,
    filters: Mapping[str, str | int | bool | Sequence[str | int | bool]] = ...,
    where: str | None = None,
    converter: str | None = None,
    share: float | None = None,
    tokens: int | None = None,
    min_epochs: float | None = None,
    max_epochs: float | None = None,
    group: str | None = None,
    license: str | None = None,
    languages: Sequence[str] | None = None,
    domain: str | None = None,
    fim: Fim | None = None,
    transforms: Sequence[str | Mapping[str, Any]] = ...,
) -> dict[str, Any]:
    """Score the assistant's tokens under a causal language model: NLL and perplexity per row.

    Returns the artifact record. Keys of a dataset apply to rows and tables, not to blends.

    Args:
        cluster: local, a scheduler address, or a YAML file with a profile.
        cluster_timeout: Seconds to wait for a worker: by default 60 on a local or SSH cluster, 600 at an address,
            else no limit.
        workers: Worker processes; all cores by default.
        shard_size: Source bytes per shard, for example 16MB.
        store: Folder or URI of the shards; preparations can share it.
        change_detection: How to notice that a local file changed: by a hash of its content, or by size and
            modification time (mtime).
        on_bad_row: What to do with a row that cannot be read.
        max_bad_row_fraction: Share of a dataset's rows that may be bad.
        max_shrink_fraction: Share of a dataset's documents that may be lost since the last version.
        allow_shrink: Datasets that may lose a larger share, or disappear.
        previous: Output folder of the last version; output_dir by default.
        scale: Leading share of each dataset: 1 %, 10 %, 30 % or all.
        sample: Leading rows of each dataset.
        force: Build every shard again, even if it has a valid receipt.
        allow_partial: Publish even if shards are missing; the manifest lists them.
        loss_on: Which of the assistant's messages are trained on.
        loss_reasoning: Train on reasoning.
        loss_empty_reasoning: Train on empty reasoning, where the template writes it after its generation prompt.
        loss_tool_calls: Train on tool calls.
        loss_end_of_turn: Train on the token that ends a turn.
        model_revision: Commit, tag or branch of a Hub id; pin a commit. For engine=server the revision that the
            server runs.
        server: Base URL of a vLLM or SGLang server, for engine=server; its key is read from TOKENMILL_SERVER_KEY.
        concurrency: Requests in flight per worker, for engine=server.
        token_budget: Padded tokens per batch, for engine=transformers.
        precision: For engine=transformers; by default bfloat16 on CUDA and float32 on a CPU.
        device: By default GPUs if there are any, else the CPU.
        model: Hub id or folder of a causal language model; for engine=server the name that the server lists.
        engine: Engine that runs the model.
        max_length: Maximum tokens read per sequence.
        chat_template: harmony, tokenizer (the model's own), nano3, lightning35, a file, or Jinja text.
        tokenizer: By default the model's own.
        weight: Relative share of training tokens; with 0, prepared but not used.
        split: Split of the dataset.
        subset: Configuration of a Hugging Face dataset, or a folder in other datasets.
        text_field: Field that holds the text; dots separate nested keys.
        document_per: A document of .txt files: a whole file, or a line.
        revision: Branch, tag or commit of a Hugging Face dataset.
        messages_field: Field that holds the messages; detected if omitted.
        tools_field: Field that holds the tools.
        template_variables: Variables of its chat template, added to the setting; also chat_template_kwargs.
        fields: Fields of question, answer, system prompt, history and tools; detected if omitted.
        used_in: Keep only rows whose used_in names this.
        filters: Keep only rows whose field has this value, or one of these.
        where: Keep only rows for which this predicate is true, for example int_score >= 3 and length(text) > 200.
        converter: Converter to Harmony; chosen by the path if omitted.
        share: Share of its group's tokens, or of all, instead of a weight.
        tokens: Tokens to read of it, instead of a weight.
        min_epochs: Read it at least this often.
        max_epochs: Read it at most this often.
        group: Group that it is in; 'code/python' is in 'code'.
        license: License of the dataset, for its card; best an SPDX identifier.
        languages: Languages of the dataset, for its card, as codes of BCP 47; never guessed.
        domain: Topic of the dataset, for its report.
        fim: Fill in the middle for this dataset, instead of the setting.
        transforms: Transforms of each row for reinforcement learning, in order.
    """

def embeddings(
    data: Blend | Mapping[str, Any] | str | PathLike[str] | Iterable[Mapping[str, Any]] | ArrowStream,
    output_dir: str | PathLike[str],
    *,
    cluster: str = "local",
    cluster_timeout: float | None = None,
    workers: int | None = None,
    shard_size: int | str = 16000000,
    store: str | None = None,
    change_detection: Literal["hash", "mtime"] = "hash",
    on_bad_row: Literal["quarantine", "fail"] = "quarantine",
    max_bad_row_fraction: float = 0.001,
    max_shrink_fraction: float = 0.5,
    allow_shrink: Sequence[str] = ...,
    previous: str | None = None,
    scale: Literal["tiny", "small", "medium", "full"] = "full",
    sample: int | None = None,
    force: bool = False,
    allow_partial: bool = False,
    model_revision: str | None = None,
    server: str | None = None,
    concurrency: int = 16,
    token_budget: int = 16384,
    precision: Literal["bfloat16", "float32"] | None = None,
    device: Literal["cpu", "cuda"] | None = None,
    model: str | None = None,
    engine: Literal["hash", "transformers", "server"] = "hash",
    pooling: Literal["last", "mean"] | None = None,
    dimensions: int | None = None,
    max_tokens: int = 1024,
    field: str = "embed_text",
    weight: float = 1.0,
    split: str | None = None,
    subset: str | None = None,
    text_field: str = "text",
    document_per: Literal["file", "line"] = "file",
    revision: str | None = None,
    messages_field: str | None = None,
    tools_field: str = "tools",
    template_variables: Mapping[str, Any] = ...,
    fields: Fields | None = None,
    used_in: str | None = None,
    filters: Mapping[str, str | int | bool | Sequence[str | int | bool]] = ...,
    where: str | None = None,
    converter: str | None = None,
    share: float | None = None,
    tokens: int | None = None,
    min_epochs: float | None = None,
    max_epochs: float | None = None,
    group: str | None = None,
    license: str | None = None,
    languages: Sequence[str] | None = None,
    domain: str | None = None,
    fim: Fim | None = None,
    transforms: Sequence[str | Mapping[str, Any]] = ...,
) -> dict[str, Any]:
    """Embed every candidate, so that similar texts can be found.

    Returns the artifact record. Keys of a dataset apply to rows and tables, not to blends.

    Args:
        cluster: local, a scheduler address, or a YAML file with a profile.
        cluster_timeout: Seconds to wait for a worker: by default 60 on a local or SSH cluster, 600 at an address,
            else no limit.
        workers: Worker processes; all cores by default.
        shard_size: Source bytes per shard, for example 16MB.
        store: Folder or URI of the shards; preparations can share it.
        change_detection: How to notice that a local file changed: by a hash of its content, or by size and
            modification time (mtime).
        on_bad_row: What to do with a row that cannot be read.
        max_bad_row_fraction: Share of a dataset's rows that may be bad.
        max_shrink_fraction: Share of a dataset's documents that may be lost since the last version.
        allow_shrink: Datasets that may lose a larger share, or disappear.
        previous: Output folder of the last version; output_dir by default.
        scale: Leading share of each dataset: 1 %, 10 %, 30 % or all.
        sample: Leading rows of each dataset.
        force: Build every shard again, even if it has a valid receipt.
        allow_partial: Publish even if shards are missing; the manifest lists them.
        model_revision: Commit, tag or branch of a Hub id; pin a commit. For engine=server the revision that the
            server runs.
        server: Base URL of a vLLM or SGLang server, for engine=server; its key is read from TOKENMILL_SERVER_KEY.
        concurrency: Requests in flight per worker, for engine=server.
        token_budget: Padded tokens per batch, for engine=transformers.
        precision: For engine=transformers; by default bfloat16 on CUDA and float32 on a CPU.
        device: By default GPUs if there are any, else the CPU.
        model: Hub id or folder of a model. For engine=server, its name in the server's list. None for hash.
        engine: Engine that computes the vectors.
        pooling: How to pool token vectors, for engine=transformers; see the model card.
        dimensions: Numbers per vector; default: all, 256 for hash.
        max_tokens: Maximum tokens read per text.
        field: Field to embed; rows without it use their text.
        weight: Relative share of training tokens; with 0, prepared but not used.
        split: Split of the dataset.
        subset: Configuration of a Hugging Face dataset, or a folder in other datasets.
        text_field: Field that holds the text; dots separate nested keys.
        document_per: A document of .txt files: a whole file, or a line.
        revision: Branch, tag or commit of a Hugging Face dataset.
        messages_field: Field that holds the messages; detected if omitted.
        tools_field: Field that holds the tools.
        template_variables: Variables of its chat template, added to the setting; also chat_template_kwargs.
        fields: Fields of question, answer, system prompt, history and tools; detected if omitted.
        used_in: Keep only rows whose used_in names this.
        filters: Keep only rows whose field has this value, or one of these.
        where: Keep only rows for which this predicate is true, for example int_score >= 3 and length(text) > 200.
        converter: Converter to Harmony; chosen by the path if omitted.
        share: Share of its group's tokens, or of all, instead of a weight.
        tokens: Tokens to read of it, instead of a weight.
        min_epochs: Read it at least this often.
        max_epochs: Read it at most this often.
        group: Group that it is in; 'code/python' is in 'code'.
        license: License of the dataset, for its card; best an SPDX identifier.
        languages: Languages of the dataset, for its card, as codes of BCP 47; never guessed.
        domain: Topic of the dataset, for its report.
        fim: Fill in the middle for this dataset, instead of the setting.
        transforms: Transforms of each row for reinforcement learning, in order.
    """
