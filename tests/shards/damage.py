"""What may happen to a file, and which files of an output folder are vouched for."""

from pathlib import Path


def flip(path, place):
    """Change one byte where it lies, so that a hard link changes as well."""
    with path.open("r+b") as stream:
        stream.seek(place)
        byte = stream.read(1)
        stream.seek(place)
        stream.write(bytes([byte[0] ^ 0x10]))


def truncate(path, length):
    with path.open("r+b") as stream:
        stream.truncate(length)


def replaced(path, content):
    """Another file under the same name, so that a hard link is broken."""
    path.unlink()
    path.write_bytes(content)


DAMAGES = {
    "a byte flipped": lambda path: flip(path, path.stat().st_size // 2),
    "a byte less": lambda path: truncate(path, path.stat().st_size - 1),
    "emptied": lambda path: truncate(path, 0),
    "deleted": Path.unlink,
    "replaced": lambda path: replaced(path, path.read_bytes()[:-1] + b"\xfe"),
}


def proofs(out):
    """Every file that verification vouches for: all but the caches of planning."""
    caches = {"index.json", "gates"}
    return sorted(path for path in out.rglob("*") if path.is_file() and not caches & set(path.parts))


def names_of(path, out):
    """The path, and those of its hard links."""
    return {str(other) for other in proofs(out) if other.samefile(path)}
