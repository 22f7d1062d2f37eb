"""Dask clusters that somebody else has started: `dask scheduler` and `dask worker` commands, also on hosts of their own."""

import os
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.flows.prefect_commands import clean_environment, free_port, running, wait_until

DASK = str(Path(sys.executable).with_name("dask"))
START_SECONDS = 60


@contextmanager
def scheduler(folder, host="127.0.0.1", port=None, settings=None):
    """Address and process of a scheduler; `settings` are environment variables of Dask."""
    protocol = "tls" if "://" in host else "tcp"
    address = f"{protocol}://{host.rpartition('/')[2]}:{port or free_port()}"
    command = [DASK, "scheduler", "--host", host, "--port", address.rpartition(":")[2]]
    log = folder / "scheduler.log"
    environment = clean_environment() | (settings or {})
    with running([*command, "--dashboard-address", "127.0.0.1:0"], environment, folder, log) as process:
        wait_until(lambda: "Scheduler at:" in log.read_text(), START_SECONDS, log)
        yield address, process


@contextmanager
def worker(address, folder, name, host="127.0.0.1", prefix=(), settings=None):
    """The process of one single-threaded worker with its nanny, which has reached the scheduler."""
    command = [*prefix, DASK, "worker", address, "--host", host, "--nthreads", "1", "--name", name, "--no-dashboard"]
    log = folder / f"{name}.log"
    with running(command, clean_environment() | (settings or {}), folder, log) as process:
        wait_until(lambda: "Registered to:" in log.read_text(), START_SECONDS, log)
        yield process


@dataclass(frozen=True)
class Network:
    """This machine at `address`, and hosts beside it that reach nothing but each other, over cables that can be cut."""

    bridge: str
    subnet: str

    @property
    def address(self):
        return f"{self.subnet}.1"

    def host(self, number):
        return f"{self.subnet}.{number}"

    def on(self, number):
        """What a command is put after to run on a host."""
        return ["ip", "netns", "exec", f"{self.bridge}n{number}"]

    def cut(self, number):
        """No packet reaches or leaves the host any more, so nobody is told that connections end."""
        ip(f"link set {self.bridge}v{number} down")


def ip(command):
    subprocess.run(["ip", *command.split()], check=True, capture_output=True)


@contextmanager
def network(hosts):
    """Hosts with these numbers, as network namespaces on a bridge. Needs root."""
    number = os.getpid()
    found = Network(f"tm{number % 100_000}", f"10.{200 + number % 50}.{number // 50 % 250}")
    with ExitStack() as stack:
        ip(f"link add {found.bridge} type bridge")
        stack.callback(ip, f"link del {found.bridge}")
        ip(f"addr add {found.address}/24 dev {found.bridge}")
        ip(f"link set {found.bridge} up")
        for host in hosts:
            ip(f"netns add {found.bridge}n{host}")
            stack.callback(ip, f"netns del {found.bridge}n{host}")
            ip(f"link add {found.bridge}v{host} type veth peer name eth0 netns {found.bridge}n{host}")
            # The kernel removes a namespace's interfaces some time later, and the next network needs their names.
            stack.callback(ip, f"link del {found.bridge}v{host}")
            ip(f"link set {found.bridge}v{host} master {found.bridge} up")
            ip(f"-n {found.bridge}n{host} addr add {found.host(host)}/24 dev eth0")
            ip(f"-n {found.bridge}n{host} link set eth0 up")
            ip(f"-n {found.bridge}n{host} link set lo up")
        yield found
