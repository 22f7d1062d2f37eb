"""How many examples a property is tried on: as many as its test says, a quarter of them in `.ci/run`, and a tenth in `make test`."""

from hypothesis import settings


def max_examples(count):
    """Try a property on `count` examples where the profile tries 100."""
    return settings(max_examples=max(1, count * settings().max_examples // 100))
