"""How a command ends when somebody stops it, on a real terminal, and what it does without standard streams or a home.

A process that a run has started is known by a variable of its environment, in whatever session it is.
"""

import json
import os
import pty
import signal
import subprocess
import sys
import uuid
from contextlib import contextmanager
from pathlib import Path
from threading import Thread

import psutil
import pytest
from tokenmill.flows.process import INTERRUPTED, Stream

from tests.flows.prefect_commands import add_database, clean_environment, wait_until
from tests.flows.preparation_runs import DEADLINE, TOKENMILL, ran, receipts
from tests.preparing import blend_of, prepare, write_lines

REPOSITORY = Path(__file__).parents[2]
MARK = "TOKENMILL_TEST_RUN"
CTRL_C = b"\x03"
NOT_WRITABLE = "/proc"
"""Not even by root."""
SECONDS = 2 * DEADLINE
SHARD_SIZE = 250_000

PATIENT = """
import sys
import tokenmill.flows.process
from tokenmill.flows.cli import main
tokenmill.flows.process.GRACE = 1000
sys.exit(main())
"""
"""The command, but it would take a quarter of an hour to end after the first Ctrl-C."""


SLOWLY = """
import sys, time
import tokenmill.tasks.tokenize.shard as shard
from tokenmill.flows.cli import main
from tokenmill.tasks.shards import executor
executor.LITTLE_BYTES = 1e9
read = shard.read_texts
shard.read_texts = lambda *given: [print("reading", file=sys.stderr), time.sleep(3600)] and read(*given)
sys.exit(main())
"""
"""The command, but its one process would take hours to read the first shard."""


def closed_in_the_end(descriptor):
    """Bytes from a terminal until its last process has ended."""
    try:
        while piece := os.read(descriptor, 65_536):
            yield piece
    except OSError:
        return


class Terminal:
    """A command as the foreground process of a terminal of its own."""

    def __init__(self, command, environment):
        self.mark = uuid.uuid4().hex
        self.pid, self.keyboard = pty.fork()
        if self.pid == 0:
            os.execve(command[0], command, {**environment, MARK: self.mark})
        self.shown = []
        self.reader = Thread(target=lambda: self.shown.extend(closed_in_the_end(self.keyboard)), daemon=True)
        self.reader.start()
        self.status = None

    def press(self, key):
        os.write(self.keyboard, key)

    def has(self, name):
        return any(name in " ".join(process.info["cmdline"] or []) for process in marked(self.mark))

    def runs(self):
        if self.status is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            self.status = os.waitstatus_to_exitcode(status) if ended else None
        return self.status is None

    def wait(self):
        """The exit code, and what was to be seen; nothing that was started may be left."""
        wait_until(lambda: not self.runs(), SECONDS)
        wait_until(lambda: not marked(self.mark), SECONDS)
        self.reader.join(SECONDS)
        return self.status, b"".join(self.shown).decode(errors="replace")


def marked(mark):
    """The living processes of a run, in whatever session."""
    found = psutil.process_iter(["environ", "cmdline", "status"])
    return [each for each in found if (each.info["environ"] or {}).get(MARK) == mark]


@pytest.fixture(scope="module")
def blend(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    rye = write_lines(folder / "rye.jsonl", [f"rye {number} " + "grain " * 400 for number in range(4_000)])
    path = folder / "blend.json"
    path.write_text(json.dumps(blend_of(rye)))
    return path


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """No Prefect server is configured."""
    home = tmp_path_factory.mktemp("home")
    add_database(home / ".prefect")
    return clean_environment() | {"HOME": str(home), "TERM": "xterm"}


def shards(blend):
    """How many the blend is cut into."""
    ((source,),) = json.loads(blend.read_text()).values()
    return -(-Path(source["path"]).stat().st_size // SHARD_SIZE)


def arguments(blend, out):
    return ["pretrain", str(blend), "--output-dir", str(out), "--workers", "1", f"shard_size={SHARD_SIZE}"]


PROFILE = """
cluster_class: tokenmill.tasks.shards.cluster.local_cluster
cluster_kwargs: {n_workers: 1, threads_per_worker: 1, dashboard_address: "127.0.0.1:0"}
"""
"""The cluster of a run, named: Prefect starts it, and without a configured server also a temporary one."""


@pytest.fixture(scope="module")
def in_prefect(tmp_path_factory):
    path = tmp_path_factory.mktemp("cluster") / "profile.yaml"
    path.write_text(PROFILE)
    return ["--cluster", str(path)]


@contextmanager
def ending(mark):
    """Whatever is left of a run is killed after a test that has failed."""
    try:
        yield
    finally:
        for process in marked(mark):
            process.kill()


@contextmanager
def preparing(blend, out, environment, options=(), command=(TOKENMILL,)):
    terminal = Terminal([*command, *arguments(blend, out), *options], environment)
    with ending(terminal.mark):
        yield terminal


SERVER_STARTS, CLUSTER_STARTS, BUILDS = "its server starts", "its cluster starts", "it builds shards"
PUBLISHES = "it publishes"

MOMENTS = {
    SERVER_STARTS: lambda run, out, blend: run.has("server_process.py"),
    CLUSTER_STARTS: lambda run, out, blend: run.has("spawn_main"),
    BUILDS: lambda run, out, blend: receipts(out) >= 1,
    PUBLISHES: lambda run, out, blend: (out / "manifest.json").exists() or any(out.glob("train/*")),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "moment"),
    [
        *(("directly", moment) for moment in (CLUSTER_STARTS, BUILDS, PUBLISHES)),
        *(("in Prefect", moment) for moment in (SERVER_STARTS, BUILDS)),
    ],
)
def test_ctrl_c_exits_130_without_leftover_processes(way, moment, blend, environment, in_prefect, tmp_path):
    with preparing(blend, tmp_path / "out", environment, in_prefect if way == "in Prefect" else ()) as run:
        wait_until(lambda: MOMENTS[moment](run, tmp_path / "out", blend) or not run.runs(), SECONDS)
        kept = receipts(tmp_path / "out")
        run.press(CTRL_C)
        code, shown = run.wait()
    done = moment == PUBLISHES and (tmp_path / "out/blend.json").exists()  # it may have ended before the key was read
    assert code == INTERRUPTED or (done and code == 0), shown
    assert ("tokenmill: interrupted; run the same command again" in shown) == (code == INTERRUPTED)
    assert "Traceback" not in shown
    assert receipts(tmp_path / "out") >= kept


@contextmanager
def whose_server_hangs(blend, out, environment, in_prefect, command=(TOKENMILL,)):
    """A run that has built a shard, and whose server then takes no more requests: it cannot report how it ended."""
    with preparing(blend, out, environment, in_prefect, command) as run:
        wait_until(lambda: receipts(out) >= 1, SECONDS)
        (server,) = [each for each in marked(run.mark) if "server_process.py" in " ".join(each.info["cmdline"])]
        server.suspend()
        yield run


@pytest.mark.slow
def test_ctrl_c_ends_a_run_in_time_that_cannot_report_its_end(blend, environment, in_prefect, tmp_path):
    with whose_server_hangs(blend, tmp_path / "out", environment, in_prefect) as run:
        run.press(CTRL_C)
        code, shown = run.wait()
    assert code == INTERRUPTED, shown


@pytest.mark.slow
def test_a_second_ctrl_c_ends_a_run_at_once(blend, environment, in_prefect, tmp_path):
    patient = [sys.executable, "-c", PATIENT]
    with whose_server_hangs(blend, tmp_path / "out", environment, in_prefect, patient) as run:
        run.press(CTRL_C)
        wait_until(lambda: not run.has("spawn_main"), SECONDS)  # the first one has killed the workers
        assert run.runs()
        run.press(CTRL_C)
        code, shown = run.wait()
    assert code == INTERRUPTED, shown


@pytest.mark.slow
@pytest.mark.parametrize(("way", "how"), [("directly", signal.SIGTERM), ("in Prefect", signal.SIGKILL)])
def test_signal_without_terminal_ends_every_process(way, how, blend, environment, in_prefect, tmp_path):
    out, mark = tmp_path / "out", uuid.uuid4().hex
    command, options = [TOKENMILL, *arguments(blend, out)], in_prefect if way == "in Prefect" else []
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "start_new_session": True}
    with ending(mark), subprocess.Popen([*command, *options], env={**environment, MARK: mark}, **quiet) as run:
        wait_until(lambda: receipts(out) >= 1, SECONDS)
        run.send_signal(how)
        assert run.wait(SECONDS) == -how
        wait_until(lambda: not marked(mark), SECONDS)


@pytest.mark.slow
def test_ctrl_c_ends_a_run_that_builds_in_its_own_process(blend, environment, tmp_path):
    out = tmp_path / "out"
    run = Terminal([sys.executable, "-c", SLOWLY, "pretrain", str(blend), "--output-dir", str(out)], environment)
    with ending(run.mark):
        wait_until(lambda: b"reading" in b"".join(run.shown) or not run.runs(), SECONDS)
        assert len(marked(run.mark)) == 1
        run.press(CTRL_C)
        code, shown = run.wait()
    assert code == INTERRUPTED, shown
    assert "tokenmill: interrupted; run the same command again" in shown
    assert "Traceback" not in shown


@pytest.mark.slow
def test_a_run_ends_when_its_terminal_is_closed(blend, environment, tmp_path):
    with preparing(blend, tmp_path / "out", environment) as run:
        wait_until(lambda: receipts(tmp_path / "out") >= 1, SECONDS)
        os.close(run.keyboard)
        wait_until(lambda: not run.runs(), SECONDS)
        wait_until(lambda: not marked(run.mark), SECONDS)


SCRIPT = """
from tokenmill.flows.pretrain import pretrain_data_prep
pretrain_data_prep({blend!r}, {out!r}, workers=1)
"""


@pytest.mark.slow
def test_flow_call_at_import_names_the_remedy(blend, prefect_server, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(blend=str(blend), out=str(tmp_path / "out")))
    run = ran(sys.executable, script, env=prefect_server.environment)
    assert run.returncode == 1
    last = run.stderr.strip().splitlines()
    assert any('put the call under `if __name__ == "__main__":`' in line and str(script) in line for line in last)
    assert "Nanny failed to start" not in run.stderr
    assert run.stderr.count("Beginning flow run") == 1


# Standard streams.

REDIRECTED = {
    "as they are": ("", 0),
    "closed": (">&-", 0),
    "all closed": ("<&- >&- 2>&-", 0),
    "full": (">/dev/full", 1),
    "both full": (">/dev/full 2>/dev/full", 1),
    "an unread pipe": ("| head -c 0", 0),
    "both an unread pipe": ("2>&1 | head -c 0", 0),
}


def redirected(how, *words, environment=None):
    """The exit code of a command, and what it says on stderr if that is not redirected."""
    command = f"set -o pipefail; {TOKENMILL} {' '.join(map(str, words))} {REDIRECTED[how][0]}"
    run = ran("bash", "-c", command, stdin=subprocess.DEVNULL, env=environment)
    return run.returncode, run.stderr


@pytest.fixture(scope="module")
def prepared(blend, tmp_path_factory):
    out = tmp_path_factory.mktemp("prepared") / "out"
    prepare(str(blend), out, shard_size=2_000_000)
    return out


@pytest.mark.slow
@pytest.mark.parametrize("how", REDIRECTED)
def test_commands_work_without_standard_streams(how, prepared, blend, tmp_path):
    commands = [["--version"], ["plan", blend], ["verify", prepared], ["view", prepared]]
    for words in commands if how in {"all closed", "both full"} else commands[:1]:
        code, complaint = redirected(how, *words)
        assert code == REDIRECTED[how][1], complaint
        assert "Traceback" not in complaint
        assert "Exception ignored" not in complaint
    if how == "full":
        assert complaint.strip().splitlines()[-1] == (
            "tokenmill: stdout: No space left on device; the command finished, but its output is lost"
        )
    assert redirected("both an unread pipe", "plan", tmp_path / "no_such.json")[0] == 2


@pytest.mark.slow
@pytest.mark.parametrize(("how", "home"), [("all closed", None), ("both full", None), ("as they are", NOT_WRITABLE)])
def test_a_preparation_is_whole_without_streams_or_home(how, home, blend, environment, tmp_path):
    homeless = {"HOME": home, "XDG_CACHE_HOME": "", "TMPDIR": str(tmp_path)} if home else {}
    code, complaint = redirected(how, *arguments(blend, tmp_path / "out"), environment=environment | homeless)
    assert code == REDIRECTED[how][1], complaint
    assert "Warning" not in complaint, complaint
    assert "Traceback" not in complaint, complaint
    assert receipts(tmp_path / "out") == shards(blend)
    assert (tmp_path / "out/blend.json").exists()


def test_failing_stream_is_reported_once():
    with Path("/dev/full").open("wb", buffering=0) as full, Stream(full, "utf-8", line_buffering=True) as stream:
        stream.write("first\n")
        lost = stream.lost
        stream.write("second\n")
        assert "No space left" in str(lost)
        assert stream.lost is lost
        assert os.fstat(stream.fileno()).st_rdev == Path(os.devnull).stat().st_rdev


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_unencodable_text_is_escaped_as_json(encoding):
    text = "⟦ü 🦊⟧"
    program = f"from tokenmill.flows.process import open_streams; open_streams(); print({text!a})"
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    shown = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, check=True).stdout
    assert json.loads(f'"{shown.decode(encoding).strip()}"') == text


PRESSED = {
    "an error of a library": """
try:
    signal.raise_signal(signal.SIGINT)
    time.sleep(10)
except KeyboardInterrupt as pressed:
    raise ValueError("pydantic's serializers raise an error of their own when they are interrupted") from pressed
""",
    "late": """
process.GRACE = 0.1
try:
    signal.raise_signal(signal.SIGINT)
finally:
    time.sleep(10)
""",
    "while Python shuts down": "atexit.register(signal.raise_signal, signal.SIGINT)",
    "among Dask's connections": """
import distributed
try:
    signal.raise_signal(signal.SIGINT)
except KeyboardInterrupt:
    logging.getLogger("distributed.scheduler").critical("Closed comm while trying to write")
""",
    "while objects are freed, when Python itself makes it deadly": """
class Last:
    def __del__(self, kill=os.kill, process=os.getpid()):
        kill(process, signal.SIGINT)

last = Last()
""",
    "in the background of a shell": "assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN",
}


@pytest.mark.slow
@pytest.mark.parametrize("how", PRESSED)
def test_ctrl_c_prints_only_the_next_step(how):
    program = (
        "import atexit, logging, os, signal, time, tokenmill.flows.process as process\nprocess.end_when_interrupted()\n"
    )
    ignored = ["bash", "-c", "trap '' INT; exec \"$@\"", "-"] if "shell" in how else []
    run = ran(*ignored, sys.executable, "-c", program + PRESSED[how])
    told = (INTERRUPTED, "tokenmill: interrupted; run the same command again to continue\n")
    assert (run.returncode, run.stderr) == ((0, "") if "shell" in how or "freed" in how else told)


@pytest.mark.slow
def test_a_prefect_home_that_cannot_be_written_is_one_sentence(blend, environment, in_prefect, tmp_path):
    chosen = environment | {"PREFECT_HOME": NOT_WRITABLE, "TMPDIR": str(tmp_path)}
    run = ran(TOKENMILL, *arguments(blend, tmp_path / "out"), *in_prefect, env=chosen)
    assert run.returncode == 2, run.stderr
    (complaint,) = run.stderr.strip().splitlines()
    assert complaint.startswith(f"tokenmill: PREFECT_HOME: {NOT_WRITABLE} cannot be written")
