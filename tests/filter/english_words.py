"""What spaCy's rules for English and datatrove's filters say about characters and words, as tasks/filter/english.json.

python -m tests.filter.english_words     writes the file again
"""

import re
import unicodedata
from collections.abc import Callable, Iterator
from pathlib import Path

import orjson

FILE = Path(__file__).parents[2] / "tasks" / "filter" / "english.json"
SURROGATES = range(0xD800, 0xE000)


def english_words() -> bytes:
    """The file as it should be."""
    import spacy
    from datatrove.utils.text import PUNCTUATION_SET, TERMINAL_PUNCTUATION
    from spacy.lang import char_classes as given
    from spacy.pipeline import Sentencizer
    from spacy.symbols import ORTH

    tokenizer = spacy.blank("en").tokenizer
    before_dot = next(
        part for part in tokenizer.suffix_search.__self__.pattern.split("|(?<=") if part.startswith("[0-9a-z")
    )
    before_dot = before_dot.removesuffix(r")\.$")
    kinds: dict[str, Callable[[str], object]] = {
        "space": str.isspace,
        "line_break": lambda char: len(f"a{char}a".splitlines()) > 1,
        "alpha": re.compile(f"[{given.ALPHA}]").match,
        "lower": re.compile(f"[{given.ALPHA_LOWER}]").match,
        "upper": re.compile(f"[{given.ALPHA_UPPER}]").match,
        "quote": re.compile(f"[{given.CONCAT_QUOTES}]").match,
        "prefix": lambda char: char not in "+." and tokenizer.find_prefix(char),
        "suffix": lambda char: char not in "+." and tokenizer.find_suffix(char),
        "icon": lambda char: char != "." and tokenizer.find_infix(char),
        "before_dot": re.compile(before_dot).match,
        "host": re.compile("[A-Za-z0-9\u00a1-\uffff]").match,
        "scheme": re.compile(r"[\w\+\-\.]").match,
        "digit": re.compile(r"\d").match,
        "letter": str.isalpha,
        "symbol": PUNCTUATION_SET.__contains__,
        "punctuation": lambda char: unicodedata.category(char).startswith("P"),
        "sentence_end": set(Sentencizer.default_punct_chars).__contains__,
    }
    units = {*given.UNITS.split("|"), *given.CURRENCY.replace("\\", "").split("|")}
    rules = tokenizer.rules.items()
    words = {
        "classes": {name: list(ranges(kind)) for name, kind in kinds.items()},
        "units": sorted(units),
        "specials": [[part[ORTH] for part in parts] for _, parts in sorted(rules)],
        "line_ends": "".join(sorted(TERMINAL_PUNCTUATION)),
    }
    lines = [f'"{name}": {orjson.dumps(value).decode()}' for name, value in words["classes"].items()]
    head = ",\n".join(lines)
    rest = ",\n".join(f'"{name}": {orjson.dumps(words[name]).decode()}' for name in ("units", "specials", "line_ends"))
    return f'{{"classes": {{\n{head}}},\n{rest}}}\n'.encode()


def ranges(kind: Callable[[str], object]) -> Iterator[tuple[int, int]]:
    """The first and last code points of the runs of characters of a kind."""
    start = None
    for number in range(0x110001):
        belongs = number < 0x110000 and number not in SURROGATES and bool(kind(chr(number)))
        if belongs and start is None:
            start = number
        elif not belongs and start is not None:
            yield start, number - 1
            start = None


if __name__ == "__main__":
    FILE.write_bytes(english_words())
