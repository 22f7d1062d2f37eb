"""Slurm: Debian's `slurm-wlm` and `munge` on this machine, as processes of whoever asks, under a temporary folder.

Both nodes are this machine, each with a daemon and a port of its own; jobs find them by name in a hosts file that only
they see. Jobs are not confined: no cgroups, no accounting.
"""

import os
import subprocess
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from shutil import which
from tempfile import TemporaryDirectory

from tests.flows.prefect_commands import clean_environment, free_port, running, wait_until

START_SECONDS = 60
NEEDED = ("slurmctld", "slurmd", "munged", "sbatch", "unshare")
MISSING = (
    "Slurm's daemons need root, and apt-get install slurm-wlm munge"
    if os.geteuid() or not all(which(name, path=f"{os.environ['PATH']}:/usr/sbin") for name in NEEDED)
    else None
)
"""Why there can be no Slurm here, or None."""

NODES = ("node1", "node2")

CONFIGURATION = """\
ClusterName=tests
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={controller}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
SlurmUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
SchedulerParameters=sched_interval=1,sched_min_interval=0,batch_sched_delay=0,bf_interval=1
MpiDefault=none
ReturnToService=2
KillWait=2
InactiveLimit=0
MaxArraySize=10
{nodes}
PartitionName=cpu Nodes=ALL Default=YES MaxTime=01:00:00 State=UP
PartitionName=brief Nodes=ALL MaxTime=00:01:00 State=UP OverTimeLimit=0
"""


@dataclass(frozen=True)
class Slurm:
    """A controller with two nodes of two cores. `environment` is for the commands that use it."""

    environment: dict[str, str]
    folder: Path

    def call(self, *command):
        """What a command of Slurm prints."""
        return subprocess.run(
            command, env=self.environment, check=True, capture_output=True, text=True, cwd=self.folder
        ).stdout

    def jobs(self, states="all"):
        """Of each job: its number, state and name."""
        printed = self.call("squeue", "--noheader", f"--states={states}", "--format=%i %T %j")
        return [line.split(maxsplit=2) for line in printed.splitlines()]

    def set_nodes(self, state):
        """Drain or resume all nodes."""
        self.call("scontrol", "update", f"NodeName={','.join(NODES)}", f"State={state}", "Reason=maintenance")

    def nodes_are(self, state):
        """Whether `sinfo` has all nodes in a state, such as `idle`."""
        return self.call("sinfo", "--noheader", "--Node", "--partition=cpu", "--format=%T").split() == [state] * len(
            NODES
        )


@contextmanager
def slurm():
    """A running Slurm whose nodes are idle."""
    with TemporaryDirectory(prefix="slurm-") as name, ExitStack() as stack:
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "state").mkdir()
        nodes = [
            f"NodeName={node} NodeHostname=localhost NodeAddr=127.0.0.1 Port={free_port()} CPUs=2 RealMemory=4000 State=UNKNOWN"
            for node in NODES
        ]
        configuration = folder / "slurm.conf"
        configuration.write_text(
            CONFIGURATION.format(folder=folder, controller=free_port(), nodes="\n".join(nodes)), "utf-8"
        )
        environment = clean_environment() | {"SLURM_CONF": str(configuration)}
        found = Slurm(environment, folder)
        _start(stack, folder, environment, "munged", "munged", *_munge(folder))
        wait_until((folder / "munge.socket").exists, START_SECONDS, folder / "munged.out")
        _start(stack, folder, environment, "slurmctld", "slurmctld", "-D", "-i")
        hosts = Path("/etc/hosts").read_text() + f"127.0.0.1 {' '.join(NODES)}\n"
        (folder / "hosts").write_text(hosts)
        with_hosts = ["unshare", "--mount", "sh", "-c", 'mount --bind "$0" /etc/hosts && exec "$@"', folder / "hosts"]
        for node in NODES:
            _start(stack, folder, environment, node, *with_hosts, "slurmd", "-D", "-N", node)
        wait_until(lambda: _answers(found), START_SECONDS, folder / "slurmctld.out")
        yield found
        found.call("scancel", "--user=root")


def _munge(folder):
    """The options of a munge daemon with a key of its own; it insists on private folders."""
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o400)
    return [
        *("--foreground", "--force", f"--key-file={folder}/munge.key", f"--socket={folder}/munge.socket"),
        *(f"--pid-file={folder}/munge.pid", f"--seed-file={folder}/munge.seed", f"--log-file={folder}/munge.log"),
    ]


def _start(stack, folder, environment, name, *command):
    """Run a daemon until the end; its output is in a file of that name."""
    path = environment["PATH"] + ":/usr/sbin"
    own = environment | {"PATH": path}
    stack.enter_context(running([*map(str, command)], own, folder, folder / f"{name}.out"))


def _answers(found):
    try:
        return found.nodes_are("idle")
    except subprocess.CalledProcessError:
        return False
