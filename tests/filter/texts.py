"""Real text that every development environment has, in many languages, and nasty pieces to make text from."""

import gettext
import os
import random
import sysconfig
from functools import cache
from pathlib import Path

import orjson
from tokenmill.tasks.filter import kernel

KINDS = "py md rst txt html js po c h json xml yaml toml in mo"
ENDINGS = {"", *(f".{kind}" for kind in KINDS.split())}
FILES, PARTS = 200, 16
SHARE = ("doc", "perl", "locale", "man")
ROOTS = (sysconfig.get_path("purelib"), sysconfig.get_path("stdlib"), *(f"/usr/share/{name}" for name in SHARE))

WORDS = """US$ C$ http:// https:// www. example.com .co.uk 192.168.1.1 8.8.8.8 172.16.3.4 1.2.3.4:8080 /path?q#f user@
JavaScript www.例え.jp ٣٤.٥ [1] [edit] ... .. the and have km 10 5km 3.5"""
PHRASES = ["lorem ipsum", "terms of use", "cookie policy", "coo\u212aie policy", "[citation needed]"]
PIECES = [
    *"aZbé1 2.,:;!?…'\"“”’()[]{}<>=/+-*^—–~@#$%&_|\\\t\n\r\x0b\x1c\x85\u2028\u200b\u0301\u00a0°²µK\x00ßİ\u212a中文の。、한ा१٣😀€",
    *WORDS.split(),
    *PHRASES,
    *("\r\n", "  ", "\n\n"),
]


def pieces():
    """Pieces at which rules for words, lines and sentences turn, with all special cases of English."""
    english = orjson.loads((Path(kernel.__file__).parent / "english.json").read_bytes())
    return [*PIECES * 4, *english["units"], *("".join(parts) for parts in english["specials"])]


@cache
def documents(count, longest):
    """As many documents, files or parts of them, always the same in one environment."""
    draw = random.Random(0)
    entries = sorted(str(entry) for root in ROOTS if Path(root).is_dir() for entry in Path(root).iterdir())
    draw.shuffle(entries)
    found = []
    for file in (file for entry in entries for file in _some_files(Path(entry), draw)):
        text = _text(file)
        starts = range(0, len(text), 4 * longest)[:PARTS]
        found += [text[start : start + draw.randint(1, longest)] for start in starts]
        if len(found) >= count:
            break
    return found[:count]


def _some_files(entry, draw):
    """At most FILES files of text of a package."""
    files = [Path(folder, name) for folder, _, names in os.walk(entry) for name in names] if entry.is_dir() else [entry]
    files = sorted(file for file in files if file.suffix in ENDINGS and not file.is_symlink())
    return files if len(files) <= FILES else draw.sample(files, FILES)


def _text(file):
    try:
        if file.suffix == ".mo":
            with file.open("rb") as stream:
                messages = gettext.GNUTranslations(stream)._catalog  # noqa: SLF001 - it has no public list
            return "\n".join(str(message) for message in messages.values())
        return file.read_bytes()[:1_000_000].decode()
    except (OSError, ValueError, IndexError):  # IndexError: a header that gettext cannot read
        return ""
