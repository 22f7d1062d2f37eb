"""Settings for the quality rules.

Names and defaults match datatrove's filters, which define the rules; a reason for dropping a document is the name that
datatrove gives it. A threshold of null turns its rule off.
"""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator
from tokenmill.tasks.shards.settings import PreparationSettings
from tokenmill.tasks.strict import Place, Strict

Family = Literal["gopher_repetition", "gopher_quality", "c4", "fineweb"]
Treatment = Literal["off", "count", "mask", "drop"]

Share = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=0)]
Ratios = dict[Annotated[str, Field(pattern=r"^[1-9][0-9]?$")], Share]
"""The largest share of characters, by the number of words in a run, from 1 to 99."""

STOP_WORDS = ["the", "be", "to", "of", "and", "that", "have", "with"]


class GopherQuality(Strict, frozen=True):
    """Gopher's quality rules (arXiv 2112.11446, appendix A.1.1)."""

    min_doc_words: Count | None = Field(default=50, description="Minimum words that are not only symbols.")
    max_doc_words: Count | None = Field(default=100_000, description="Maximum words that are not only symbols.")
    min_avg_word_length: float | None = Field(default=3, ge=0, description="Minimum mean length of these words.")
    max_avg_word_length: float | None = Field(default=10, ge=0, description="Maximum mean length of these words.")
    max_symbol_word_ratio: float | None = Field(
        default=0.1, ge=0, description="Maximum hash signs per word, and maximum ellipses per word."
    )
    max_bullet_lines_ratio: Share | None = Field(
        default=0.9, description="Maximum share of lines that begin with a bullet."
    )
    max_ellipsis_lines_ratio: Share | None = Field(
        default=0.3, description="Maximum share of lines that end with an ellipsis."
    )
    max_non_alpha_words_ratio: Share | None = Field(
        default=0.8, description="Minimum share of words with a letter, under the name that datatrove gives it."
    )
    min_stop_words: Count | None = Field(default=2, description="Minimum different stop words.")
    stop_words: list[str] = Field(default=STOP_WORDS, description="Stop words, as they are written.")


class GopherRepetition(Strict, frozen=True):
    """Gopher's repetition rules (arXiv 2112.11446, table A1)."""

    dup_line_frac: Share | None = Field(default=0.3, description="Maximum share of lines that occurred before.")
    dup_para_frac: Share | None = Field(default=0.3, description="Maximum share of paragraphs that occurred before.")
    dup_line_char_frac: Share | None = Field(default=0.2, description="Maximum share of characters in such lines.")
    dup_para_char_frac: Share | None = Field(default=0.2, description="Maximum share of characters in such paragraphs.")
    top_n_grams: Ratios = Field(
        default={"2": 0.2, "3": 0.18, "4": 0.16},
        description="Maximum share of characters in the most frequent run of words, by its number of words.",
    )
    dup_n_grams: Ratios = Field(
        default={"5": 0.15, "6": 0.14, "7": 0.13, "8": 0.12, "9": 0.11, "10": 0.10},
        description="Maximum share of characters in runs of words that occurred before, by their number of words.",
    )


class C4Quality(Strict, frozen=True):
    """C4's rules (arXiv 1910.10683, section 2.2). Lines that fail a rule do not count as sentences."""

    remove_lines: bool = Field(
        default=False,
        description="Also remove these lines and citations from kept documents, as datatrove does; later rules see the rest.",
    )
    remove_citations: bool = Field(default=True, description="Judge lines without [1], [edit] and [citation needed].")
    filter_no_terminal_punct: bool = Field(default=True, description="Fail lines that do not end a sentence.")
    min_num_sentences: int = Field(default=5, ge=-1, description="Minimum sentences in the kept lines; -1 for any.")
    min_words_per_line: int = Field(default=3, ge=-1, description="Minimum words of a line; -1 for any.")
    max_word_length: int = Field(
        default=1000, ge=-1, description="Maximum length of a line's longest word; -1 for any."
    )
    filter_lorem_ipsum: bool = Field(default=True, description="Drop documents with lorem ipsum.")
    filter_javascript: bool = Field(default=True, description="Fail lines that mention JavaScript.")
    filter_curly_bracket: bool = Field(default=True, description="Drop documents with a curly bracket.")
    filter_policy: bool = Field(default=True, description="Fail lines about cookies, terms of use and privacy.")


class FineWebQuality(Strict, frozen=True):
    """FineWeb's rules (arXiv 2406.17557, section 3.6)."""

    line_punct_thr: Share | None = Field(default=0.12, description="Minimum share of lines that end a sentence.")
    line_punct_exclude_zero: bool = Field(default=False, description="Keep documents in which no line ends a sentence.")
    stop_chars: str | None = Field(
        default=None,
        min_length=1,
        description="Characters that end a sentence; by default, the characters of all scripts.",
    )
    short_line_thr: Share | None = Field(default=0.67, description="Maximum share of short lines.")
    short_line_length: Count = Field(default=30, description="Maximum characters of a short line.")
    char_duplicates_ratio: Share | None = Field(
        default=0.01, description="Maximum share of characters in lines that occurred before."
    )
    new_line_ratio: float | None = Field(default=0.3, ge=0, description="Maximum line breaks per word.")


class Model(Strict, frozen=True):
    """A fastText model that must give a document one of some labels."""

    model: Place = Field(description="File of the model, .bin or .ftz.")
    keep: list[str] = Field(min_length=1, description="Labels to keep, without __label__.")
    threshold: float = Field(default=0.65, ge=0, le=1, description="Minimum score for one of these labels.")


class Classifier(Model, frozen=True):
    """A classifier, with the name that its drops are counted under."""

    name: str = Field(pattern=r"^[a-z][a-z0-9_]*$", description="Name that drops are counted under.")


class PersonalData(Strict, frozen=True):
    """What to do with personal data and secrets."""

    emails: Treatment = Field(default="off", description="Count or mask e-mail addresses, or drop documents with one.")
    ips: Treatment = Field(default="off", description="The same for public IPv4 addresses.")
    secrets: Treatment = Field(default="off", description="The same for private keys and access tokens.")
    email_mask: str = Field(default="email@example.com", description="Replaces an e-mail address.")
    ip_mask: str = Field(default="192.0.2.1", description="Replaces an IPv4 address.")
    secret_mask: str = Field(default="<SECRET>", description="Replaces a secret.")
    only_public_ips: bool = Field(default=True, description="Keep private and reserved IPv4 addresses.")


FAMILIES: list[Family] = ["gopher_repetition", "gopher_quality", "c4", "fineweb"]


class FilterSettings(PreparationSettings, frozen=True):
    """Settings of the quality rules for a blend of text."""

    rules: list[Family] = Field(
        default=FAMILIES, description="Families of rules, in their order; the first rule that fails is the reason."
    )
    gopher_repetition: GopherRepetition = Field(default=GopherRepetition(), description="Gopher's repetition rules.")
    gopher_quality: GopherQuality = Field(default=GopherQuality(), description="Gopher's quality rules.")
    c4: C4Quality = Field(default=C4Quality(), description="C4 rules.")
    fineweb: FineWebQuality = Field(default=FineWebQuality(), description="FineWeb rules.")
    language: Model | None = Field(default=None, description="Languages to keep, after the families of rules.")
    classifiers: list[Classifier] = Field(default=[], description="Classifiers, after the language.")
    personal: PersonalData = Field(default=PersonalData(), description="Personal data, last.")

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if "holdout" in self.model_fields_set:
            raise ValueError("holdout does not apply to filters, which split no rows; remove it")
        if len(set(self.rules)) < len(self.rules):
            raise ValueError(f"rules: {', '.join(self.rules)}: name each family once")
        names = [each.name for each in self.classifiers]
        if len(set(names)) < len(names):
            raise ValueError(f"classifiers: {', '.join(names)}: give each a unique name")
        return self
