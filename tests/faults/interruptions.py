"""A preparation that is interrupted, then repeated: what preparations of every kind have to stand."""

import shutil
from pathlib import Path

from tasks.shards import publish as publish_module
from tests.faults.injection import PowerOff, fail_operation
from tests.preparing import tree


class Repeatable:
    """The same preparation again and again, into the folder `out` that can be emptied; `run` is its kind's own."""

    out: Path

    def run(self):
        raise NotImplementedError

    def clear(self):
        shutil.rmtree(self.out, ignore_errors=True)

    def temporaries(self):
        return [path for path in self.out.rglob("*") if publish_module.TEMPORARY.fullmatch(path.name)]


def assert_mended(preparation, whole, number):
    preparation.run()
    assert preparation.temporaries() == [], f"operation {number}"
    assert tree(preparation.out) == whole, f"operation {number}"


def survive(preparation, whole, number, error):
    """Fail one operation; the run may notice or may have been done with the file, but never ends well with less."""
    preparation.clear()
    with fail_operation(number, error):
        try:
            preparation.run()
        except (OSError, PowerOff) as raised:
            assert raised is error  # noqa: PT017 - whether it is raised is not the point
        else:
            assert tree(preparation.out) == whole
    assert_mended(preparation, whole, number)
