"""Added tokens, and the texts around them that engines and the reference may match differently.

Hugging Face `tokenizers` finds added tokens in three steps: tokens that aren't `normalized`, in the unchanged text; then, in the
rest, the others, in normalized text; each step takes the leftmost token, of those the longest. A token that strips takes the
whitespace beside it. A match that is rejected (a special token where control strings are text, or a `single_word` within a word)
still hides the tokens that overlap it. Engines take fewer steps. Their ids equal the reference's unless two tokens compete
for the same characters:

*   a token that strips whitespace, if an added token begins or ends with whitespace;
*   a `single_word`, because libraries differ on where a word ends;
*   two tokens that overlap, if one of them can be rejected, or if the leftmost is normalized and the other isn't;

or unless a normalized token is one in the text as it is only: NFC makes `foo` and an acute accent `foó`, and a Kelvin sign a K.

Such texts are `tangles`: documents that contain one are encoded by the reference. All else is tried by the gate (`neighbors`).
"""

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from string import ascii_letters
from typing import Any, Literal
from unicodedata import combining, decomposition, normalize

import orjson
from pydantic import BaseModel, Field, ValidationError

SPACES = "\t\n\x0b\x0c\r\x1c\x1d\x1e\x1f\x85\u00a0\u1680\u2000\u2007\u2028\u2029\u202f\u205f\u3000\u2581"
"""Characters that some libraries strip; the last is SentencePiece's own space."""

RUNS = [
    *(space * count for space in " \t\n" for count in (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 15, 16, 17, 23, 24, 25, 31, 32)),
    *("\t  ", "  \t", " \n", "\n ", "\r\n", "\n\n  ", "    \n", "\n\t", " \t \t ", "\u00a0 ", " \u3000", "\u2028\n"),
    *SPACES,
    "",
]
"""Whitespace beside an added token."""

FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")

TRIED = 24
"""Added tokens of each kind that are tried beside whitespace and each other."""


@dataclass(frozen=True, slots=True)
class Added:
    """An added token of a tokenizer.json, with its flags."""

    content: str
    special: bool = False
    normalized: bool = False
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False

    @classmethod
    def of(cls, token: Mapping[str, Any]) -> "Added":
        return cls(token["content"], **{name: bool(token.get(name)) for name in FLAGS})

    @property
    def flags(self) -> tuple[bool, ...]:
        """What decides how it is matched."""
        return (self.special, self.normalized, self.lstrip, self.rstrip, self.single_word)

    @property
    def is_spaced(self) -> bool:
        """Whether whitespace begins or ends it."""
        return bool(self.content) and not {self.content[0], self.content[-1]}.isdisjoint(f" {SPACES}")


@dataclass(frozen=True, slots=True)
class AddedTokens:
    """The added tokens of a tokenizer; `normalizes` is whether it changes text before it looks for normalized ones, `composes`
    whether it brings text into NFC or NFKC then.
    """

    tokens: Sequence[Added] = ()
    normalizes: bool = False
    composes: bool = False

    def tangles(self, *, literal: bool) -> list[str]:
        """Regular expressions for documents that no engine is trusted with. With `literal`, special tokens are text.

        Raises ValueError if they cannot be found, because the tokenizer changes text first.
        """
        found = [*self._stripping(literal), *self._competing(literal)]
        if self.normalizes and any(token.normalized for _, tokens in found for token in tokens):
            raise ValueError(
                "isn't trusted with added tokens that compete for whitespace or characters in normalized text"
            )
        texts = sorted({text for text, _ in found}, key=lambda text: (len(text), text))
        # A document with a longer one also contains the shorter one in it.
        shortest = [text for number, text in enumerate(texts) if not any(other in text for other in texts[:number])]
        return [*map(re.escape, shortest), *self._composed()]

    def changes_identity(self) -> bool:
        """Return whether ids of data with earlier fingerprints may be wrong."""
        return any(self._stripping(literal=False)) or any(self._competing(literal=True)) or any(self._composed())

    def _composed(self) -> Iterator[str]:
        """Regular expressions for characters that NFC makes part of a normalized token, or takes from one."""
        changed = [token.content for token in self.tokens if token.normalized and token.content]
        if not changed or not self.composes:
            return
        marks, others = composing()
        ends = {text[-1] for text in changed if composed_with(text[-1])}
        yield from (f"{re.escape(end)}[{_ranges(marks)}]" for end in sorted(ends))
        used = set("".join(changed))
        found = {text[0] for text in changed if text[0] in marks}
        found.update(*(others[each] for each in used & others.keys()))
        if found:
            yield f"[{_ranges(sorted(found))}]"

    def _stripping(self, literal: bool) -> Iterator[tuple[str, tuple[Added, ...]]]:
        spaced = any(token.is_spaced for token in self.tokens)
        for token in self.tokens:
            if (token.single_word or (spaced and (token.lstrip or token.rstrip))) and not (literal and token.special):
                yield token.content, (token,)

    def _competing(self, literal: bool) -> Iterator[tuple[str, tuple[Added, ...]]]:
        """Texts that two overlapping tokens write together."""
        for one, other, text in overlaps(self.tokens):
            rejected = any(token.single_word or (literal and token.special) for token in (one, other))
            # Engines take `one`, the leftmost and longest. The reference does too, unless `other` is found a step earlier.
            if rejected or (one.normalized and not other.normalized):
                yield text, (one, other)

    def stripping(self) -> list[str]:
        """Return a token of each type that looks at the characters next to it, without tangles."""
        spaced = any(token.is_spaced for token in self.tokens)
        looking: dict[tuple[bool, ...], str] = {}
        for token in reversed(self.tokens):
            if (token.lstrip or token.rstrip) and not spaced and not token.single_word:
                looking[token.flags] = token.content
        return list(looking.values())

    def neighbors(self) -> list[str]:
        """Texts for the gate: a few tokens of each kind beside whitespace, beside each other, and overlapping.

        Between them are letters that aren't in added tokens: a text with a tangle would be the reference's, and prove nothing.
        """
        kinds: dict[tuple[bool, ...], list[Added]] = {}
        for token in self.tokens:
            kinds.setdefault((*token.flags, token.is_spaced), []).append(token)
        # The first and the last of each kind.
        half = TRIED // 2
        tried = [each.content for tokens in kinds.values() for each in (*tokens[:half], *tokens[half:][-half:])]
        flagged = [token.content for token in self.tokens if token.lstrip or token.rstrip or token.single_word]
        spaced = [token.content for token in self.tokens if token.is_spaced][:TRIED]
        few = list(dict.fromkeys([*flagged[:TRIED], *(tokens[0].content for tokens in kinds.values())]))
        known = "".join(token.content for token in self.tokens)
        a, b = [*(letter for letter in ascii_letters if letter not in known), "a", "b"][:2]
        # Normalized tokens to which NFC joins a mark, or that it makes of other characters.
        composed: list[str] = []
        for text in [token.content for token in self.tokens if self.composes and token.normalized][:TRIED]:
            composed += [f"{a}{text}{mark}{b}" for mark in composed_with(text[-1:])[:1]]
            others = composing()[1]
            composed += [f"{a}{text.replace(each, others[each][0])}{b}" for each in sorted(set(text) & others.keys())]
        return [
            *(f"{a}{run}{token}{run}{b}{token}{run}{token}" for token in few for run in (*RUNS, *spaced)),
            *(f"{a}{run}{token}{b}" for token in flagged[:TRIED] for run in (*RUNS, *spaced)),
            *(f"{a}{one}{other} {one} {other}\n{one}" for one in few for other in tried),
            *(f"{a} {text} {b}{text}" for _, _, text in itertools.islice(overlaps(self.tokens), TRIED * TRIED)),
            *composed,
        ]


@cache
def composing() -> tuple[Mapping[str, None], Mapping[str, str]]:
    """Characters that may join an earlier one in NFC; and by character, others that NFC writes as it, or with it.

    Both are in the order of Unicode. No character above the compatibility ideographs of plane 2 has a decomposition.
    """
    marks: dict[str, None] = {}
    others: dict[str, str] = {}
    for character in map(chr, range(0x80, 0x2FA20)):
        form = normalize("NFC", character)
        if form != character:
            others |= {each: others.get(each, "") + character for each in form}
        if combining(character):
            marks[character] = None
        pair = decomposition(character).split()
        if len(pair) == 2 and not pair[0].startswith("<") and form == character:  # noqa: PLR2004 - a pair
            marks[chr(int(pair[1], 16))] = None
    jamo = (*range(0x1161, 0x1176), *range(0x11A8, 0x11C3))  # vowels and final consonants: Unicode, section 3.12
    return dict.fromkeys(sorted([*marks, *map(chr, jamo)])), others


def composed_with(character: str) -> list[str]:
    """Return the characters that join `character` in NFC."""
    own = normalize("NFC", character)
    return [
        mark for mark in composing()[0]
        if character and normalize("NFC", character + mark) != own + normalize("NFC", mark)
    ]  # fmt: skip


def _ranges(characters: Iterable[str]) -> str:
    """The content of a character class; `characters` ascend."""
    runs: list[list[int]] = []
    for code in map(ord, characters):
        if runs and runs[-1][1] == code - 1:
            runs[-1][1] = code
        else:
            runs.append([code, code])
    return "".join(f"\\x{{{first:x}}}-\\x{{{last:x}}}" for first, last in runs)


def overlaps(tokens: Sequence[Added]) -> Iterator[tuple[Added, Added, str]]:
    """Pairs of tokens that share characters, with the text that both write together: the first, which is the leftmost and
    longest, ends as the second begins, or holds it.
    """
    beginnings: dict[str, list[Added]] = {}
    for token in tokens:
        for end in range(1, len(token.content) + 1):
            beginnings.setdefault(token.content[:end], []).append(token)
    whole = {token.content: token for token in tokens}
    for one in tokens:
        text = one.content
        for start in range(len(text)):
            for other in beginnings.get(text[start:], ()) if start else ():
                yield one, other, text + other.content[len(text) - start :]
            for end in range(start + 1, len(text)):
                if text[start:end] in whole:
                    yield one, whole[text[start:end]], text


NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Keys of a configuration that name special tokens, in the order in which transformers adds them."""


class ListedToken(BaseModel, strict=True):
    """A token in a list, as `AutoTokenizer` takes it: content is optional, but a flag that isn't a boolean is an error."""

    content: str | None = None
    special: bool = False
    normalized: bool = False
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False


class TypedToken(ListedToken, strict=True):
    """A token among texts. Its type distinguishes it from other objects."""

    type: Literal["AddedToken"] = Field(alias="__type")


class MapTokens(BaseModel, strict=True):
    """The lists of tokens in special_tokens_map.json, which older versions of transformers wrote without types."""

    extra_special_tokens: list[str | ListedToken] | dict[str, str | ListedToken] | None = None
    additional_special_tokens: list[str | ListedToken] | dict[str, str | ListedToken] | None = None


class ConfigTokens(BaseModel, strict=True):
    """The lists of tokens in tokenizer_config.json."""

    added_tokens_decoder: dict[int, ListedToken] = {}
    extra_special_tokens: list[str | TypedToken] | dict[str, str | TypedToken] | None = None
    additional_special_tokens: list[str | TypedToken] | dict[str, str | TypedToken] | None = None


TOKEN_FILES: Mapping[str, type[BaseModel]] = {
    "special_tokens_map.json": MapTokens,
    "tokenizer_config.json": ConfigTokens,
}
"""Files that name and list tokens, and which lists `AutoTokenizer` reads in each; the last file takes precedence."""


def malformed_tokens(file: str, content: bytes) -> tuple[str, str, Any] | None:
    """Return the first key in a file on which `AutoTokenizer` fails, with the expected and the given value.

    Without the error, the tokens would be missing, and their text would be encoded as ordinary text.
    """
    for name, token in orjson.loads(content).items():
        text = token.get("content") if isinstance(token, dict) else token
        if name in NAMED and token is not None and not isinstance(text, str):
            return name, "the text of one token", token
    try:
        TOKEN_FILES[file].model_validate_json(content)  # in JSON, a key such as "700" is an integer
    except ValidationError as error:
        key, *inside = error.errors()[0]["loc"]
        listed = key == "added_tokens_decoder"
        place = [str(part) for part in inside if listed and part != "[key]"]
        wanted = "ids, each with a token's content and flags" if listed else "a list of tokens, or names with tokens"
        return ".".join([str(key), *place]), wanted, error.errors()[0]["input"]
    return None


def folder_tokens(config: Mapping[str, Any], ids: Mapping[str, int]) -> list[dict[str, Any]]:
    """Return the added tokens that transformers' `AutoTokenizer` makes of a folder without a tokenizer.json, as such a file lists them.

    `config` is its configuration, `ids` the vocabulary: tokens of the vocabulary keep their ids, the others follow in order.
    """
    listed = config.get("added_tokens_decoder") or {}
    more = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    special = [*(config.get(key) for key in NAMED), *(more.values() if isinstance(more, dict) else more)]
    tokens: dict[str, dict[str, Any]] = {}
    numbered = [(listed[key], False) for key in sorted(listed, key=int)]
    # A token that is listed and named keeps the flags of the list, and is special.
    for token, is_special in [*numbered, *((each, True) for each in special)]:
        flags: dict[str, Any] = token if isinstance(token, dict) else {"content": token}
        if flags.get("content"):
            written = tokens.setdefault(flags["content"], {**dict.fromkeys(FLAGS, False), **flags})
            written["special"] = written["special"] or is_special
    numbers = itertools.count(1 + max(ids.values()))
    return [
        {"id": ids[name] if name in ids else next(numbers), "content": name, **{flag: bool(token[flag]) for flag in FLAGS}}
        for name, token in tokens.items()
    ]  # fmt: skip
