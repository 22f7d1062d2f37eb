"""The blend: typed, frozen, and fully checked before any data is read.

Dataset names become folder names, so they must be safe path segments: ASCII letters, digits, `.`, `_` and `-`, at most
128 characters, not `..`, not reserved by Windows, and unique regardless of case (file systems may ignore case).
"""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, cast

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, JsonValue, WithJsonSchema, model_validator
from tokenmill.tasks.errors import nearest
from tokenmill.tasks.strict import COMMENT, Seed, Strict

from .predicates import where_of

Split = Literal["train", "valid", "test"]
SPLITS: tuple[Split, ...] = ("train", "valid", "test")

_SEGMENT = "^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$"
ROUNDING = 1e-6
"""By how much shares may miss 1."""

_RESERVED = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\..*)?", re.IGNORECASE)


def _path_segment(name: str) -> str:
    if not re.fullmatch(_SEGMENT, name) or name.endswith(".") or _RESERVED.fullmatch(name):
        raise ValueError(
            "not a safe name; use 1 to 128 ASCII letters, digits, '.', '_' or '-', starting with a letter or digit"
        )
    return name


Name = Annotated[str, AfterValidator(_path_segment), WithJsonSchema({"type": "string", "pattern": _SEGMENT})]


def _plain_values(wanted: object) -> object:
    values = cast("list[object]", wanted) if isinstance(wanted, list) else [wanted]
    plain = [isinstance(each, str | bool) or (isinstance(each, int) and abs(each) < 2**63) for each in values]
    if not plain or not all(plain):
        raise ValueError("not a value to filter by; use text, true or false, an integer of 64 bits, or a list of these")
    return wanted


Group = Annotated[str, Field(pattern=rf"^{_SEGMENT[1:-1]}(/{_SEGMENT[1:-1]})*$")]
Share = Annotated[float, Field(ge=0, le=1)]

Value = str | int | bool
Wanted = Annotated[Value | list[Value], BeforeValidator(_plain_values)]
"""The value that a field must have, or a list of alternatives."""

Where = Annotated[str, AfterValidator(lambda text: where_of(text).normal)]
"""A predicate on the fields of rows, see `blend.predicates`, in one spelling."""

TransformSpec = str | dict[str, JsonValue]
"""A transform of rows for reinforcement learning: its name, or a mapping of its name to its argument."""


class Fim(Strict, frozen=True):
    """Fill in the middle: which documents are rearranged, and how. Names and defaults match Megatron's `--fim-*`."""

    rate: Share = Field(default=0.5, description="Share of documents to rearrange; 0 turns it off.")
    spm_rate: Share = Field(default=0.5, description="Share of these as suffix, prefix, middle; the rest as PSM.")
    split_sample: str | None = Field(
        default=None, min_length=1, description="Rearrange each fragment between these strings separately."
    )
    fragment_rate: Share | None = Field(
        default=None, description="Share of fragments to rearrange in chosen documents with split_sample."
    )
    skip_prefix: str | None = Field(
        default=None, min_length=1, description="Don't rearrange documents and fragments that begin with this."
    )
    prefix_token: str | None = Field(default=None, min_length=1, description="Token before the prefix; else detected.")
    middle_token: str | None = Field(default=None, min_length=1, description="Token before the middle; else detected.")
    suffix_token: str | None = Field(default=None, min_length=1, description="Token before the suffix; else detected.")
    seed: Seed = Field(default=42, description="Seed for choosing documents, layouts and cuts.")

    @model_validator(mode="after")
    def _belong_together(self) -> Self:
        tokens = [self.prefix_token, self.middle_token, self.suffix_token]
        if (self.split_sample is None) != (self.fragment_rate is None):
            raise ValueError("split_sample and fragment_rate belong together; set both, or neither")
        if any(tokens) and len({token for token in tokens if token}) < len(tokens):
            raise ValueError(
                "set prefix_token, middle_token and suffix_token to three different tokens, or none of them"
            )
        return self


class Fields(Strict, frozen=True):
    """The fields that hold the parts of a conversation; dots separate nested keys, also inside JSON text."""

    prompt: str | None = Field(default=None, min_length=1, description="Field that holds the question.")
    response: str | None = Field(default=None, min_length=1, description="Field that holds the answer.")
    system: str | None = Field(default=None, min_length=1, description="Field that holds the system prompt.")
    history: str | None = Field(default=None, min_length=1, description="Field that holds the turns before.")
    tools: str | None = Field(default=None, min_length=1, description="Field that holds the tools.")

    @model_validator(mode="after")
    def _pairs(self) -> Self:
        if (self.prompt is None) != (self.response is None):
            raise ValueError("'prompt' and 'response' belong together; name both, or neither")
        return self


class DataSource(Strict, frozen=True):
    """One dataset of a blend: the place of its rows, and its weight."""

    model_config = ConfigDict(
        json_schema_extra={
            "patternProperties": {
                COMMENT: {},
                "^category$": {"type": "string"},
                "^chat_template_kwargs$": {"type": "object"},
            }
        }
    )

    name: Name = Field(description="Unique name; becomes part of file names.")
    path: str = Field(
        min_length=1,
        pattern=r"\S",
        description="File, folder (recursive), glob, s3://, gs://, hf://org/name or hf://org/name@revision.",
    )
    weight: float = Field(
        default=1.0, ge=0, strict=True, description="Relative share of training tokens; with 0, prepared but not used."
    )
    split: str | None = Field(default=None, description="Split of the dataset.")
    subset: str | None = Field(
        default=None, description="Configuration of a Hugging Face dataset, or a folder in other datasets."
    )
    text_field: str = Field(
        default="text", min_length=1, description="Field that holds the text; dots separate nested keys."
    )
    document_per: Literal["file", "line"] = Field(
        default="file", description="A document of .txt files: a whole file, or a line."
    )
    revision: str | None = Field(default=None, description="Branch, tag or commit of a Hugging Face dataset.")
    messages_field: str | None = Field(
        default=None, min_length=1, description="Field that holds the messages; detected if omitted."
    )
    tools_field: str = Field(default="tools", min_length=1, description="Field that holds the tools.")
    template_variables: dict[str, JsonValue] = Field(
        default={}, description="Variables of its chat template, added to the setting; also chat_template_kwargs."
    )
    fields: Fields | None = Field(
        default=None, description="Fields of question, answer, system prompt, history and tools; detected if omitted."
    )
    used_in: str | None = Field(default=None, min_length=1, description="Keep only rows whose used_in names this.")
    filters: dict[str, Wanted] = Field(
        default={}, description="Keep only rows whose field has this value, or one of these."
    )
    where: Where | None = Field(
        default=None,
        description="Keep only rows for which this predicate is true, for example int_score >= 3 and length(text) > 200.",
    )
    converter: str | None = Field(
        default=None, min_length=1, description="Converter to Harmony; chosen by the path if omitted."
    )
    share: float | None = Field(
        default=None, gt=0, le=1, description="Share of its group's tokens, or of all, instead of a weight."
    )
    tokens: int | None = Field(default=None, ge=1, description="Tokens to read of it, instead of a weight.")
    min_epochs: float | None = Field(default=None, gt=0, description="Read it at least this often.")
    max_epochs: float | None = Field(default=None, gt=0, description="Read it at most this often.")
    group: Group | None = Field(default=None, description="Group that it is in; 'code/python' is in 'code'.")
    license: str | None = Field(
        default=None, min_length=1, description="License of the dataset, for its card; best an SPDX identifier."
    )
    languages: list[str] | None = Field(
        default=None,
        min_length=1,
        description="Languages of the dataset, for its card, as codes of BCP 47; never guessed.",
    )
    domain: str | None = Field(default=None, min_length=1, description="Topic of the dataset, for its report.")
    fim: Fim | None = Field(default=None, description="Fill in the middle for this dataset, instead of the setting.")
    transforms: list[TransformSpec] = Field(
        default=[], description="Transforms of each row for reinforcement learning, in order."
    )

    @model_validator(mode="before")
    @classmethod
    def _other_names(cls, data: object) -> object:
        """The published blends of Nemotron 3 Ultra call the domain `category`; TRL and Megatron-Bridge name variables so."""
        if not isinstance(data, Mapping):
            return data
        given = cast("Mapping[str, object]", data)
        names = {"category": "domain", "chat_template_kwargs": "template_variables"}
        return {new if (new := names.get(key, key)) not in given else key: value for key, value in given.items()}

    @model_validator(mode="after")
    def _one_of_each(self) -> Self:
        named = self.named_fields
        if self.used_in is not None and "used_in" in self.filters:
            raise ValueError("'used_in' is given as a key and under 'filters'; keep one of the two")
        if self.messages_field is not None and "prompt" in named:
            raise ValueError("'messages_field' and 'fields.prompt' both name the conversation; keep one")
        if self.tools_field != "tools" and "tools" in named:
            raise ValueError("'tools_field' and 'fields.tools' both name the tools; keep one")
        given = [name for name in ("share", "tokens") if getattr(self, name) is not None]
        given += ["weight"] if given and self.weight != 1.0 else []
        if len(given) > 1:
            raise ValueError(f"{' and '.join(map(repr, given))} are given; keep one of them")
        if self.min_epochs and self.max_epochs and self.min_epochs > self.max_epochs:
            raise ValueError("'min_epochs' is above 'max_epochs'; lower it")
        return self

    @property
    def named_fields(self) -> dict[str, str]:
        """`fields` by the part that they hold, without parts that aren't named."""
        return self.fields.model_dump(exclude_none=True) if self.fields else {}

    @property
    def budgeted(self) -> bool:
        """Whether more than its weight decides how much of it is read."""
        return any(
            value is not None for value in (self.share, self.tokens, self.min_epochs, self.max_epochs, self.group)
        )


ROW_KEYS = (
    "split", "subset", "revision", "text_field", "document_per", "messages_field", "tools_field", "template_variables", "fields",
    "used_in", "filters", "where", "converter",
)  # fmt: skip
"""The keys of a dataset that choose its rows and how to read them, which also apply to a data file in place of a blend."""


class Phase(Strict, frozen=True):
    """A phase of training: its size, and its mix."""

    name: Name = Field(description="Unique name; becomes part of file names.")
    share: float | None = Field(default=None, gt=0, le=1, description="Share of all tokens.")
    tokens: int | None = Field(default=None, ge=1, description="Tokens of the phase, instead of a share.")
    mix: dict[str, Share] | None = Field(
        default=None,
        min_length=1,
        description="Shares of datasets and groups in this phase; the others share the rest.",
    )
    ramp: int | None = Field(
        default=None, ge=1, description="Move from the previous phase's mix to the next phase's mix in this many steps."
    )

    @model_validator(mode="after")
    def _one_of_each(self) -> Self:
        for first, second in (("share", "tokens"), ("mix", "ramp")):
            if getattr(self, first) is not None and getattr(self, second) is not None:
                raise ValueError(f"{first!r} and {second!r} are given; keep one of the two")
        if self.mix is not None and sum(self.mix.values()) > 1 + ROUNDING:
            raise ValueError(
                f"the shares of 'mix' add up to {sum(self.mix.values()):.4g}, more than 1; lower one of them"
            )
        return self


class Blend(Strict, frozen=True):
    """Datasets and weights: either one flat list, `datasets`, or a list per split.

    Budgets set how many tokens of each dataset of the training data are read, and when; `blend.mix` solves them.
    """

    datasets: list[DataSource] | None = Field(
        default=None, description="Flat blend; validation and test splits are held out."
    )
    train: list[DataSource] | None = Field(default=None, description="Per-split blend: training data.")
    valid: list[DataSource] | None = Field(default=None, description="Per-split blend: validation data.")
    test: list[DataSource] | None = Field(default=None, description="Per-split blend: test data.")
    tokens: int | None = Field(default=None, ge=1, description="Tokens to train on; default: as many as there are.")
    temperature: float | None = Field(
        default=None, ge=0, le=1, description="Multiply each weight by the dataset's tokens to this power."
    )
    groups: dict[Group, Share] | None = Field(
        default=None,
        description="Share of each group in all tokens; a group within a group: its share of the outer one.",
    )
    phases: list[Phase] | None = Field(default=None, min_length=1, description="Phases of training, in order.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        named = [split for split in SPLITS if getattr(self, split) is not None]
        if self.datasets is not None and named:
            raise ValueError(f"'datasets' and {named[0]!r} cannot be mixed; keep one of the two")
        parts = self.parts()
        if not any(parts.values()):
            raise ValueError("the blend is empty; list at least one dataset under 'datasets' or 'train'")
        for split, sources in parts.items():
            names = [source.name.lower() for source in sources]
            for number, source in enumerate(sources):
                if names[number] in names[:number]:
                    raise ValueError(f"the name {source.name!r} occurs twice in {split!r}; names must be unique")
                if split in {"valid", "test"} and source.budgeted:
                    raise ValueError(
                        f"{source.name!r} in {split!r}: budgets are for training data; keep only its weight"
                    )
            if sources and not any(source.weight for source in sources):
                raise ValueError(f"every weight in {split!r} is 0; give at least one dataset a weight above 0")
        _check_names(self)
        _check_phases(self)
        return self

    def parts(self) -> dict[str, list[DataSource]]:
        """`{"datasets": …}` for a flat blend, else the splits that it lists."""
        if self.datasets is not None:
            return {"datasets": self.datasets}
        return {split: sources for split in SPLITS if (sources := getattr(self, split)) is not None}

    def training(self) -> list[DataSource]:
        return self.parts().get("datasets") or self.parts().get("train") or []

    @property
    def budgeted(self) -> bool:
        """Whether more than plain weights decides which tokens are read."""
        own = (self.tokens, self.temperature, self.groups, self.phases)
        return any(each is not None for each in own) or any(source.budgeted for source in self.training())

    @property
    def total(self) -> int | None:
        sizes = [phase.tokens for phase in self.phases or []]
        return self.tokens or (sum(size for size in sizes if size) if sizes and all(sizes) else None)


def listed_sources(blend: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Return the datasets of a blend in JSON, by `datasets` or split."""
    return {part: blend[part] for part in ("datasets", *SPLITS) if blend.get(part)}


def _check_names(blend: Blend) -> None:
    """Require that every name in groups and mixes belongs to exactly one dataset or group."""
    sources = blend.training()
    # `code/python` is in `code`, so all beginnings of a path are groups.
    paths = [source.group.split("/") for source in sources if source.group]
    groups = {"/".join(path[:depth]) for path in paths for depth in range(1, len(path) + 1)}
    names = {source.name for source in sources}
    if both := sorted(groups & names):
        raise ValueError(f"{both[0]!r} is a dataset and a group; rename one of the two")
    for name in blend.groups or {}:
        if name not in groups:
            raise ValueError(f"groups: no dataset is in {name!r}; {nearest(name, groups)}")
    group_of = {source.name: source.group or "" for source in sources}
    for phase in blend.phases or []:
        mix = phase.mix or {}
        for name in mix:
            place = group_of.get(name) or name.rpartition("/")[0]
            # Both would be shares of the phase
            if around := next((each for each in mix if each != name and f"{place}/".startswith(f"{each}/")), None):
                raise ValueError(
                    f"phase {phase.name!r}: {name!r} is in {around!r}, and its mix names both; keep one of the two"
                )
        for name in mix:
            if name not in groups | names:
                raise ValueError(f"phase {phase.name!r}: no dataset or group {name!r}; {nearest(name, groups | names)}")


def _check_phases(blend: Blend) -> None:
    phases = blend.phases or []
    if len({phase.name.lower() for phase in phases}) < len(phases):
        raise ValueError("two phases have the same name; names must be unique")
    sizes = [phase.share or phase.tokens for phase in phases]
    total, shares = blend.total, sum(phase.share or 0 for phase in phases)
    if phases and total is None:
        raise ValueError("phases are parts of a total; set 'tokens', or 'tokens' of every phase")
    if sizes.count(None) > 1:
        raise ValueError("only one phase may omit both 'share' and 'tokens'; it takes the rest")
    if (
        phases
        and None not in sizes
        and abs(shares + sum(phase.tokens or 0 for phase in phases) / (total or 1) - 1) > ROUNDING
    ):
        raise ValueError("the phases don't add up to 'tokens'; change one of them, or omit one phase's size")
    ramps = [phase.ramp is not None for phase in phases]
    for number, phase in enumerate(phases):
        around = ramps[number - 1 : number] + ramps[number + 1 : number + 2] if number else [True]
        if phase.ramp is not None and around != [False, False]:
            raise ValueError(f"phase {phase.name!r}: a ramp connects two phases with a mix; put it between two")
    capped = [source.name for source in blend.training() if source.tokens or source.min_epochs or source.max_epochs]
    if capped and total is None:
        raise ValueError(f"{capped[0]!r}: tokens and epochs are limits within a total; set 'tokens' of the blend")
