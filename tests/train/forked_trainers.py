"""A process that has imported what trainers need, and forks one for each job that it is sent: imports take five seconds.

    python tests/train/forked_trainers.py SOCKET

A message is the path of a job; with it come two descriptors: standard output, and where the exit code is written. The answer
is the process id. Nothing heavy is imported at the top: a checkpoint is written by a process that imports this again.
"""

import os
import signal
import socket
import sys
from functools import partial

from tokenmill.tasks.train.orphans import die_with_parent

from tests.forking import fork


def trainer(path, output, ended):
    from tokenmill.tasks.train.trainer import main  # noqa: PLC0415

    os.dup2(output, 1)
    for descriptor in (output, ended):
        os.close(descriptor)
    sys.argv[1:] = [path]
    code = main()
    sys.stdout.flush()
    os._exit(code)


def watched(asked, path, output, ended):
    """Fork a trainer, tell who it is, and how it has ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    child = fork(partial(trainer, path, output, ended))
    os.close(output)
    asked.send(str(child).encode())
    _, status = os.waitpid(child, 0)
    os.write(ended, str(os.waitstatus_to_exitcode(status)).encode())


def main():
    from tokenmill.tasks.train import megatron, training  # noqa: F401, PLC0415 - for all that are forked

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # those who watch leave no zombies
    with socket.socket(fileno=int(sys.argv[1])) as asked:
        while True:
            path, descriptors, *_ = socket.recv_fds(asked, 65_536, 2)
            if not path:
                return
            fork(partial(watched, asked, path.decode(), *descriptors))
            for descriptor in descriptors:
                os.close(descriptor)


if __name__ == "__mp_main__":  # the process that writes checkpoints
    die_with_parent()
if __name__ == "__main__":
    main()
