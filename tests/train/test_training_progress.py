"""How often a server is told of the progress of a training, however long that takes."""

import math
from itertools import pairwise

from tokenmill.tasks.train.progress import OF_ELAPSED, REFRESH_SECONDS, UpdateSchedule

A_DAY = 86_400.0


def shown(seconds, step):
    """When something is shown in a training of so many seconds, whose steps take `step` seconds each."""
    schedule = UpdateSchedule(began=1000.0)
    return [now for number in range(int(seconds / step)) if schedule.due(now := 1000.0 + number * step)]


def test_the_first_step_is_shown_at_once_and_two_updates_are_never_closer_than_five_seconds():
    times = shown(600, 0.1)
    assert times[0] == 1000.0
    assert min(later - earlier for earlier, later in pairwise(times)) >= REFRESH_SECONDS
    assert len(times) >= 600 / REFRESH_SECONDS / 1.1


def test_ten_times_the_days_are_not_ten_times_the_updates():
    days, ten = len(shown(A_DAY, 0.5)), len(shown(10 * A_DAY, 0.5))
    assert ten - days <= OF_ELAPSED * math.log(10) + 1
    assert ten < 7_000


def test_steps_that_take_minutes_are_all_shown():
    assert len(shown(A_DAY, 300)) == A_DAY / 300
