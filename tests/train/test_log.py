"""The log of a training: whole, readable while it grows, and its end in the error when training failed."""

import pytest
from tokenmill.tasks.errors import InputError, RunError
from tokenmill.tasks.train.watch import LAST, logged


def test_growing_log_is_readable_and_resumes(tmp_path):
    place = tmp_path / "out/training.log"
    for start in ("first", "second"):
        with logged(str(place)) as log:
            log.write(f"é {start}")
            assert place.read_text().splitlines()[-1] == f"é {start}"
    assert place.read_text() == "é first\né second\n"


def log_and_fail(place, lines, error):
    with logged(str(place)) as log:
        for line in lines:
            log.write(line)
        raise error


def test_a_failure_shows_the_last_lines_and_where_all_are(tmp_path):
    place = tmp_path / "training.log"
    place.write_text("a line of an earlier start\n")
    lines = [f"line {number}" for number in range(LAST + 2)]
    with pytest.raises(RunError) as caught:
        log_and_fail(place, lines, RunError("training failed: ValueError: cause"))
    cause, heading, *shown = str(caught.value).splitlines()
    assert cause == "training failed: ValueError: cause"
    assert heading == f"The last lines of its log, {place}:"
    assert [line.strip() for line in shown] == lines[2:]


TORCHRUN = """\
E1122 17:27:02.934000 32154 .venv/lib/python3.11/site-packages/torch/distributed/elastic/multiprocessing/api.py:988] failed (exitcode: 1) local_rank: 0 (pid: 32170) of binary: python
Traceback (most recent call last):
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
"""


def test_the_report_of_torchrun_does_not_hide_the_last_lines_of_the_trainer(tmp_path):
    place, lines = tmp_path / "training.log", ["step 7", "KeyError: 'loss'"]
    with pytest.raises(RunError, match=r"^failed\n.*:\n  step 7\n  KeyError: 'loss'$"):
        log_and_fail(place, [*lines, *TORCHRUN.splitlines()], RunError("failed"))
    assert place.read_text() == "\n".join([*lines, TORCHRUN])


def test_silent_failure_is_reported(tmp_path):
    place = tmp_path / "training.log"
    with pytest.raises(RunError, match=f"^killed\nIt wrote nothing to its log, {place}$"):
        log_and_fail(place, [], RunError("killed"))


def test_input_error_does_not_need_a_log(tmp_path):
    with pytest.raises(InputError, match=r"^steps: too many$"):
        log_and_fail(tmp_path / "training.log", ["a line"], InputError("steps: too many"))
