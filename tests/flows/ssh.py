"""OpenSSH: a server of Debian's `openssh-server` on loopback, with keys of its own, as a process of whoever asks."""

import getpass
import os
import subprocess
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from shutil import which
from tempfile import TemporaryDirectory

from tests.flows.prefect_commands import clean_environment, free_port, running, wait_until

START_SECONDS = 30
SSHD = which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
MISSING = None if SSHD and which("ssh-keygen") else "OpenSSH is not installed: apt-get install openssh-server"
"""Why there can be no server here, or None."""


@dataclass(frozen=True)
class SshServer:
    """`options` are those of `asyncssh.connect` that the server accepts; `stranger` is a key that it refuses."""

    options: dict[str, object]
    stranger: str


@contextmanager
def ssh_server():
    """A running server for this user."""
    with TemporaryDirectory(prefix="ssh-") as name:
        folder, port = Path(name), free_port()
        for key in ("host", "user", "stranger"):
            subprocess.run(
                ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / key], check=True, capture_output=True
            )
        host_key = (folder / "host.pub").read_text()
        (folder / "known_hosts").write_text(f"[127.0.0.1]:{port} {host_key}[localhost]:{port} {host_key}")
        options = {
            "Port": port, "ListenAddress": "127.0.0.1", "HostKey": folder / "host", "PidFile": folder / "pid",
            "AuthorizedKeysFile": folder / "user.pub", "StrictModes": "no", "PasswordAuthentication": "no",
            "PermitRootLogin": "prohibit-password", "UsePAM": "no",
        }  # fmt: skip
        (folder / "config").write_text("".join(f"{key} {value}\n" for key, value in options.items()))
        Path("/run/sshd").mkdir(exist_ok=True)  # Debian's server insists on it
        log = folder / "log"
        with running([SSHD, "-D", "-e", "-f", str(folder / "config")], clean_environment(), folder, log):
            wait_until(lambda: "Server listening" in log.read_text(), START_SECONDS, log)
            accepted = {
                "port": port, "username": getpass.getuser(), "client_keys": [str(folder / "user")],
                "known_hosts": str(folder / "known_hosts"),
            }  # fmt: skip
            yield SshServer(accepted, str(folder / "stranger"))
