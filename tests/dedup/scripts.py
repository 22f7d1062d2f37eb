"""Texts in many scripts, and what they are cut into, in plain Python: by Unicode's properties, not by the table under test."""

import base64
import random
import sysconfig
import unicodedata
from functools import cache
from itertools import accumulate
from pathlib import Path

import regex

LETTERS_OF = regex.compile(r"[\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}\p{Tibetan}\p{Javanese}\p{Balinese}]")
LONGEST_WORD = 40

RANGES = {
    "Chinese": ["\u4e00-\u55ff"],
    "Japanese": ["\u3041-\u3096", "\u30a1-\u30fa", "\u4e00-\u4eff"],
    "Thai": ["\u0e01-\u0e2e", "\u0e30-\u0e3a", "\u0e40-\u0e4c"],
    "Lao": ["\u0e94-\u0ea3", "\u0ea7-\u0ebd", "\u0ec0-\u0ec4"],
    "Khmer": ["\u1780-\u17a2", "\u17b6-\u17d1"],
    "Burmese": ["\u1000-\u1021", "\u102b-\u1035"],
    "Tibetan": ["\u0f49-\u0f69", "\u0f71-\u0f72"],
    "Javanese": ["\ua984-\ua9b2", "\ua9b4-\ua9bd"],
    "Balinese": ["\u1b13-\u1b33", "\u1b36-\u1b3a"],
    "Korean": ["\uac00-\ud7a3"],
    "English": ["a-z"],
}
BLANK = {"Korean": " ", "English": " "}
LANGUAGES = [*RANGES, "Chinese and English"]
UNBROKEN = ["minified code", "base64", "digits"]


@cache
def alphabet(language):
    found = [chr(code) for each in RANGES[language] for code in range(ord(each[0]), ord(each[-1]) + 1)]
    return [each for each in found if unicodedata.category(each) != "Cn"]


@cache
def vocabulary(language):
    """Three thousand words of two to five characters, and how much of a text consists of them up to each: as Zipf says."""
    generator = random.Random(language)
    if language == "Chinese and English":
        words = [*vocabulary("Chinese")[0][:2000], *(f" {word} " for word in vocabulary("English")[0][:1000])]
        generator.shuffle(words)
    else:
        words = ["".join(generator.choices(alphabet(language), k=generator.randint(2, 5))) for _ in range(3000)]
    return words, [*accumulate(1 / rank for rank in range(10, len(words) + 10))]


def written(generator, language, words):
    """A text of so many words, in normal form."""
    found = generator.choices(vocabulary(language)[0], cum_weights=vocabulary(language)[1], k=words)
    return normal(BLANK.get(language, "").join(found))


@cache
def library():
    """Python's own library without white space."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    return "".join("".join(path.read_text("utf-8").split()) for path in sorted(folder.glob("[a-d]*.py")))


def unbroken(generator, what, size):
    """A text of so many characters without a blank."""
    if what == "minified code":
        start = generator.randrange(len(library()) - size)
        return library()[start : start + size]
    if what == "digits":
        return "".join(generator.choices("0123456789", k=size))
    return base64.b64encode(generator.randbytes(size)).decode()[:size]


def changed(generator, text, edits):
    """The text with as many characters replaced by others that it holds, blanks being left alone."""
    found = list(text)
    places = [place for place, each in enumerate(found) if each != " "]
    for place in generator.sample(places, edits):
        found[place] = generator.choice([found[other] for other in places if found[other] != found[place]])
    return normal("".join(found))


def normal(text):
    return " ".join(unicodedata.normalize("NFC", text).split())


def units(text):
    """The units of a text in normal form: strings with the kind of each."""
    found, word = [], ""
    for each in f"{text} ":
        kind = kind_of(each)
        if kind == "words" and each != " ":
            word += each
            continue
        found += cut(word) if word else []
        word = ""
        if each != " ":
            found.append((each, kind))
    return found


def kind_of(character):
    if LETTERS_OF.match(character):
        return "letters"
    wide = unicodedata.east_asian_width(character) in "WFH" and unicodedata.category(character)[0] in "LMN"
    return "characters" if wide and not unicodedata.name(character).startswith("HANGUL") else "words"


def cut(word):
    """A word, or the pieces of a long one: a cut is where the hash of the four bytes before has two leading zeros."""
    if len(word) <= LONGEST_WORD:
        return [(word, "words")]
    pieces = [""]
    for place, each in enumerate(word):
        before = word[:place].encode()[-4:]
        if len(before) == 4 and (int.from_bytes(before, "little") * 0x9E3779B1 & 0xFFFFFFFF) >> 30 == 0:
            pieces.append("")
        pieces[-1] += each
    return [(piece, "pieces") for piece in pieces]


def runs(text, words, sizes):
    """The runs of a text that are as long as so many words, as tuples of units, given how many of each kind count for one;
    a shorter text is one run.
    """
    found = units(text)
    weights = [1 / sizes.get(kind, 1) for _, kind in found]
    whole = []
    for start in range(len(found)):
        total, stop = 0, start
        while total < words and stop < len(found):
            total += weights[stop]
            stop += 1
        if total >= words:
            whole.append(tuple(unit for unit, _ in found[start:stop]))
    return whole or ([tuple(unit for unit, _ in found)] if found else [])


def size(text, sizes):
    """How long a text is, in words, given how many units of each kind count for one."""
    return sum(1 / sizes.get(kind, 1) for _, kind in units(text))


def shingles(text):
    """What near-duplicates are compared by."""
    return {*runs(text, 5, {"letters": 2})}


def jaccard(one, other):
    return len(one & other) / len(one | other)
