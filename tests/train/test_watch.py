"""Watching a trainer: what it says, why it failed, and that nobody is left, whoever ended it and how."""

import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
from tokenmill.tasks.errors import InputError, RunError
from tokenmill.tasks.train import orphans
from tokenmill.tasks.train import watch as watch_module
from tokenmill.tasks.train.events import Failed, Saved, Validated
from tokenmill.tasks.train.launchers.launch import Launch, on_one_machine
from tokenmill.tasks.train.watch import LAST, MAX_LINE_BYTES, logged, run

SOON = 20.0
"""Seconds after which a test fails instead of waiting."""

PARENT_OF_A_SESSION = """
    import subprocess, sys
    child = subprocess.Popen([sys.executable, "-c", CHILD], start_new_session=True)
"""
SILENT = "import signal; print('ready', flush=True); signal.pause()"
DEAF = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); signal.pause()"


class Cancelled(BaseException):
    """What an orchestrator raises in a task that is to end."""


@pytest.fixture
def trainer(tmp_path):
    """Makes a launch of a Python program, which names its process to `pid` when it begins."""

    def make(program, **names):
        beginning = f"import os, sys\nprint('pid', os.getpid(), flush=True)\n{assigned(names)}"
        script = tmp_path / "trainer.py"
        script.write_text(beginning + "\n".join(line.removeprefix("    ") for line in program.splitlines()))
        return Launch({}, [sys.executable, str(script)], True)

    return make


def assigned(names):
    return "".join(f"{name} = {value!r}\n" for name, value in names.items())


def told(event):
    """The statement by which a trainer tells of an event."""
    return f"print({json.dumps(event.model_dump())!r}, flush=True)"


def watched(launch):
    """Everything a launch tells, in order."""
    said = []
    run(launch, said.append, said.append)
    return [each for each in said if not (isinstance(each, str) and each.startswith("pid "))]


class Pids(list):
    """The process ids in lines such as `pid 12`."""

    def hear(self, line):
        if line.startswith("pid "):
            self.append(int(line.split()[1]))


def is_alive(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until(condition, what):
    deadline = time.monotonic() + SOON
    while not condition():
        assert time.monotonic() < deadline, f"waited {SOON} s for {what}"
        time.sleep(0.01)


def test_events_and_lines_keep_their_order(trainer):
    one, other = Validated(step=1, loss=2.5), Saved(step=2, path="checkpoints/step_000002")
    program = f"""
    print("before", flush=True)
    {told(one)}
    print("a warning", file=sys.stderr, flush=True)
    print('{{"event": "unknown"}}', flush=True)
    {told(other)}
    print("last", end="", flush=True)
    """
    assert watched(trainer(program)) == ["before", one, "a warning", '{"event": "unknown"}', other, "last"]


HEARD = Validated(step=1, loss=2.5)
LINES = {
    "an event behind an unfinished progress bar": (f"print('\\r 10%\\r 50% ' + {HEARD.model_dump_json()!r})", [" 50% ", HEARD]),
    "a very long line": ("print('x' * 3_000_000); print('after')", ["x" * MAX_LINE_BYTES + " … (cut)", "after"]),
    "any bytes": ("sys.stdout.buffer.write('é\\r\\n'.encode() + b'\\xff\\n\\n10%\\r90%\\r\\n')", ["é", "\ufffd", "", "90%"]),
    "halves of characters": ("for byte in 'aé𝄞\\n'.encode(): os.write(1, bytes([byte]))", ["aé𝄞"]),
    "an exception in a log that ends well": ("print('ValueError: ignored')", ["ValueError: ignored"]),
}  # fmt: skip


@pytest.mark.parametrize("name", LINES)
def test_trainer_output_is_passed_on(trainer, name):
    program, expected = LINES[name]
    assert watched(trainer(program)) == expected


def test_an_event_is_heard_while_the_trainer_still_runs(trainer, tmp_path):
    answer = tmp_path / "answer"
    program = f"""
    import time
    from pathlib import Path
    {told(Saved(step=1, path="x"))}
    end = time.monotonic() + {SOON}
    while not Path({str(answer)!r}).exists():
        assert time.monotonic() < end
    """
    run(trainer(program), lambda event: answer.touch(), lambda line: None)


TORCHRUN_SAYS = """\
E0101 12:00:00.000000 4242 torch/distributed/elastic/multiprocessing/api.py:988] failed (exitcode: 1) local_rank: 1
Traceback (most recent call last):
  File "run.py", line 7, in main
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:\x20
traceback : Signal 9 (SIGKILL) received by PID 4242
"""
PEER = "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:544] Connection closed by peer [127.0.0.1]:4242"

FAILURES = {
    "a reason that it names": (told(Failed(reason="data/x.bin: the file is cut short")), RunError, "^data/x.bin: the file is cut short$"),
    "a call that is wrong": (told(Failed(reason="steps: too many", wrong_call=True)), InputError, "^steps: too many$"),
    "an exception": ("print('fine'); {}['loss']", RunError, "KeyError: 'loss'"),
    "an exception of a module": ("import json; json.loads('{')", RunError, "json.decoder.JSONDecodeError: Expecting"),
    "an exception of a numbered process": (f"print('[rank1]: ValueError: cause')\nprint({TORCHRUN_SAYS!r})\nsys.exit(1)", RunError, "failed: ValueError: cause"),
    "the first of two": (f"print('ValueError: cause')\nprint({PEER!r})\nsys.exit(1)", RunError, "ValueError: cause"),
    "what torchrun wraps": (f"print('ZeroDivisionError: cause')\nprint({TORCHRUN_SAYS!r})\nsys.exit(1)", RunError, "ZeroDivisionError: cause"),
    "a worker that was killed": (f"print({PEER!r})\nprint({TORCHRUN_SAYS!r})\nsys.exit(1)", RunError, "SIGKILL, perhaps because memory"),
    "only a consequence": (f"print({PEER!r})\nsys.exit(1)", RunError, "Connection closed by peer"),
    "memory that ran out": ("import signal; os.kill(os.getpid(), signal.SIGKILL)", RunError, "ended by SIGKILL, perhaps because memory"),
    "a crash": ("import signal; os.kill(os.getpid(), signal.SIGSEGV)", RunError, "ended by SIGSEGV$"),
    "nothing": ("sys.exit(7)", RunError, "exit code 7"),
    "a reason, and exit code 0": (told(Failed(reason="no")) + "; sys.exit(0)", RunError, "^no$"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", FAILURES)
def test_failure_has_its_cause(trainer, name):
    program, kind, reason = FAILURES[name]
    exits = "sys.exit(1)" if "print" in program and "exit" not in program and "{}" not in program else ""
    with pytest.raises(kind, match=reason):
        run(trainer(f"{program}\n{exits}"), lambda event: None, lambda line: None)


def test_environment_of_watcher_and_launch(trainer, monkeypatch):
    monkeypatch.setenv("OF_THE_WATCHER", "here")
    made = trainer("print(os.environ['OF_THE_WATCHER'], os.environ['OF_THE_LAUNCH'], sys.stdin.read() == '')")
    assert watched(Launch({}, made.command, True, {"OF_THE_LAUNCH": "too"})) == ["here too True"]


def raise_cancelled(_):
    raise Cancelled


def press_ctrl_c(_):
    os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.slow
@pytest.mark.parametrize("end", [raise_cancelled, press_ctrl_c])
@pytest.mark.parametrize("child", [SILENT, DEAF], ids=["silent", "deaf"])
def test_no_orphan_processes_after_watcher_exits(trainer, monkeypatch, end, child):
    monkeypatch.setattr(watch_module, "GRACE", 0.3)
    pids = Pids()

    def on_line(line):
        pids.hear(line)
        if line == "ready":
            end(line)

    program = PARENT_OF_A_SESSION + "\n    print('pid', child.pid, flush=True)\n    child.wait()"
    for started, count in ((program, 2), (child, 1)):
        pids.clear()
        with pytest.raises((Cancelled, KeyboardInterrupt)):
            run(trainer(started, CHILD=child), lambda event: None, on_line)
        assert len(pids) == count
        assert not any(map(is_alive, pids))


def test_ending_trainer_may_clean_up_and_print(trainer, tmp_path, monkeypatch):
    monkeypatch.setattr(watch_module, "GRACE", 10_000)  # it's not waited for longer than it takes
    cleaned = tmp_path / "cleaned"
    program = f"""
    import signal
    from pathlib import Path
    def end(*_):
        print("x" * 1_000_000, flush=True)
        Path({str(cleaned)!r}).touch()
        sys.exit()
    signal.signal(signal.SIGTERM, end)
    {told(Saved(step=1, path="x"))}
    signal.pause()
    """
    with pytest.raises(Cancelled):
        run(trainer(program), raise_cancelled, lambda line: None)
    assert cleaned.exists()


def test_silent_trainer_can_be_interrupted(trainer):
    pids, ready, ended = Pids(), threading.Event(), []

    def on_line(line):
        pids.hear(line)
        if line == "ready":
            ready.set()

    def watch():
        try:
            run(trainer(SILENT), lambda event: None, on_line)
        except Cancelled:
            ended.append(not is_alive(pids[0]))

    thread = threading.Thread(target=watch)
    thread.start()
    assert ready.wait(SOON)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(Cancelled))
    thread.join(SOON)
    assert ended == [True]


def test_a_process_that_outlives_the_trainer_is_ended_and_not_waited_for(trainer):
    pids = Pids()
    program = PARENT_OF_A_SESSION + "\n    print('pid', child.pid, flush=True)"
    run(trainer(program, CHILD=DEAF), lambda event: None, pids.hear)
    assert len(pids) == 2
    assert not any(map(is_alive, pids))


def test_a_trainer_that_closes_its_output_is_waited_for(trainer, tmp_path):
    proof = tmp_path / "proof"
    program = f"""
    import time
    from pathlib import Path
    os.close(1), os.close(2)
    time.sleep(0.3)
    Path({str(proof)!r}).touch()
    os._exit(5)
    """
    with pytest.raises(RunError, match="exit code 5"):
        run(trainer(program), lambda event: None, lambda line: None)
    assert proof.exists()


WATCHER = """
from tokenmill.tasks.train.watch import run
from tokenmill.tasks.train.launchers.launch import Launch
run(Launch({{}}, {command!r}, True), print, lambda line: print(line, flush=True))
"""


def kill_the_watcher(command, count):
    """Watch a command in a process of its own until so many pids are told, kill the watcher, and see all of them gone."""
    watcher = subprocess.Popen([sys.executable, "-c", WATCHER.format(command=list(command))], stdout=subprocess.PIPE, text=True)  # fmt: skip
    pids = Pids()
    for line in watcher.stdout:
        pids.hear(line)
        if len(pids) == count:
            break
    assert len(pids) == count
    assert all(map(is_alive, pids))
    watcher.kill()
    watcher.wait()
    watcher.stdout.close()
    wait_until(lambda: not any(map(is_alive, pids)), f"the end of {pids}")


ORPHAN = "import os, signal; from tokenmill.tasks.train.orphans import die_with_parent; die_with_parent(); os.write(1, b'pid %d\\n' % os.getpid()); signal.pause()"


def test_a_killed_watcher_takes_trainers_in_other_sessions_with_it(trainer):
    kill_the_watcher(trainer(PARENT_OF_A_SESSION + "\n    child.wait()", CHILD=ORPHAN).command, 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "worker", [ORPHAN, "import os, signal; os.write(1, b'pid %d\\n' % os.getpid()); signal.pause()"]
)
def test_a_killed_watcher_takes_torchrun_and_its_workers_with_it(tmp_path, worker):
    script = tmp_path / "worker.py"
    script.write_text(
        f"{worker.replace('signal.pause()', '')}\nos.write(1, b'pid %d\\n' % os.getppid())\nsignal.pause()"
    )
    kill_the_watcher([sys.executable, *on_one_machine(2, [str(script)])], 4)


@pytest.mark.slow
def test_killed_torchrun_ends_trainer_processes(tmp_path):
    script, pids = tmp_path / "worker.py", Pids()
    script.write_text(ORPHAN)

    def on_line(line):
        pids.hear(line)
        if len(pids) == 2:
            os.kill(psutil.Process(pids[0]).ppid(), signal.SIGKILL)

    with pytest.raises(RunError, match="ended by SIGKILL"):
        run(Launch({}, [sys.executable, *on_one_machine(2, [str(script)])], True), lambda event: None, on_line)
    wait_until(lambda: not any(map(is_alive, pids)), f"the end of {pids}")


def test_a_command_whose_parent_is_gone_already_is_not_run():
    stranger = str(os.getppid())
    command = [sys.executable, "-I", orphans.__file__, stranger, sys.executable, "-c", "print('ran')"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (128 + signal.SIGTERM, "")


@pytest.mark.slow
def test_process_dies_with_its_parent(tmp_path):
    deaf = ORPHAN.replace("die_with_parent();", "die_with_parent(); signal.signal(signal.SIGTERM, signal.SIG_IGN);")
    parent = f"import subprocess, sys, os; subprocess.Popen([sys.executable, '-c', {deaf!r}]).wait()"
    process = subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True, cwd=Path.cwd())
    pid = int(process.stdout.readline().split()[1])
    process.kill()
    process.wait()
    process.stdout.close()
    wait_until(lambda: not is_alive(pid), f"the end of {pid}")


# The log: whole, readable while it grows, and its end in the error when training failed.


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
