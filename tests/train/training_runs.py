"""Trainings in processes of their own: whole ones by the trainer, and engines one after the other by a script.

A process that computes with megatron-core on a CPU has CUDA replaced for good, and its start costs some seconds of
imports; so no test does it in its own process, and as many cases as possible share one.
"""

import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import BinaryIO, TextIO

from tokenmill.tasks.train.events import Failed, Started, TrainStep, Validated, event_in
from tokenmill.tasks.train.job import JOB
from tokenmill.tasks.train.launchers.launch import TRAINER, on_one_machine

REPOSITORY = Path(__file__).parents[2]
ENGINES_IN_TURN, FORKED_TRAINERS = (
    REPOSITORY / f"tests/train/{name}.py" for name in ("engines_in_turn", "forked_trainers")
)


@dataclass(frozen=True)
class Ended:
    """What a training has told, and its exit code."""

    events: list
    code: int

    def of(self, kind):
        return [event for event in self.events if isinstance(event, kind)]

    @property
    def started(self):
        (started,) = self.of(Started)
        return started

    @property
    def losses(self):
        """The loss of each step, by step."""
        return {event.step: event.loss for event in self.of(TrainStep)}

    @property
    def validated(self):
        return {event.step: event.loss for event in self.of(Validated)}

    @property
    def reasons(self):
        return [event.reason for event in self.of(Failed)]


def run_python(program, **how):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY), "PYTHONWARNINGS": "ignore"}
    return subprocess.Popen([sys.executable, *program], env=environment, cwd=REPOSITORY, **how)


@contextmanager
def started(program, processes=1):
    """A running program of so many processes, whose output is a pipe of lines; it is gone afterwards."""
    program = program if processes == 1 else on_one_machine(processes, program)
    running = run_python(program, stdout=subprocess.PIPE, text=True)
    try:
        with running:
            yield running
    finally:
        running.kill()


@cache
def forking():
    """The socket of a process that forks trainers; it ends with this one."""
    ours, theirs = socket.socketpair()
    with theirs:
        run_python([str(FORKED_TRAINERS), str(theirs.fileno())], pass_fds=[theirs.fileno()])
    return ours


@dataclass
class Forked:
    """A trainer, with what tests need of `Popen`."""

    pid: int
    stdout: TextIO
    ended: BinaryIO
    returncode: int | None = None

    def communicate(self):
        self.stdout.read()
        self.returncode = int(self.ended.read())


@contextmanager
def forked(path):
    """A running trainer, as `started` has it, of one process that torchrun did not start."""
    (output, its_output), (ended, its_ended) = os.pipe(), os.pipe()
    socket.send_fds(forking(), [str(path).encode()], [its_output, its_ended])
    os.close(its_output)
    os.close(its_ended)
    pid = int(forking().recv(100))
    with open(output) as stdout, open(ended, "rb") as code:  # noqa: PTH123 - descriptors
        running = Forked(pid, stdout, code)
        try:
            yield running
        finally:
            if running.returncode is None:
                os.kill(pid, signal.SIGKILL)
                running.communicate()


@contextmanager
def training(job, processes=1):
    """A running trainer, as `started` has it. One process alone is not started by torchrun."""
    place = Path(job.output_dir, JOB)
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(job.model_dump_json())
    with forked(place) if processes == 1 else started([*TRAINER, str(place)], processes) as running:
        yield running


def train(job, processes=1):
    """Run a job to its end."""
    with training(job, processes) as running:
        events = [event for line in running.stdout if (event := event_in(line))]
        running.communicate()
    return Ended(events, running.returncode)


def engines_in_turn(folder, cases):
    """Run the script that does `cases`, each in as many processes as it asks for; what each has found is in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    plan = folder / "cases.json"
    plan.write_text(json.dumps(cases))
    with started([str(ENGINES_IN_TURN), str(plan)]) as running:
        running.communicate()
    assert running.returncode == 0, "an engine failed; see its traceback on stderr"


def found(folder, case):
    """What a case has found."""
    return json.loads((folder / case / "found.json").read_text())
