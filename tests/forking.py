"""Functions in processes of their own, by plain fork: `multiprocessing` is changed by Dask once a cluster has run."""

import os
import traceback


def in_processes(*works):
    """Run each function in a child of its own, all at once; yields while any of them runs. All must end well."""
    running = [fork(work) for work in works]
    codes = []
    while running:
        yield
        ended = [(pid, status) for pid, status in (os.waitpid(pid, os.WNOHANG) for pid in running) if pid]
        codes += [os.waitstatus_to_exitcode(status) for _, status in ended]
        running = [pid for pid in running if pid not in {done for done, _ in ended}]
    assert codes == [0] * len(works), "a child failed; see its traceback on stderr"


def fork(work):
    """Run `work` in a child and return its process id; the child's exit code is 0 when it ended well."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        work()
        code = 0
    except BaseException:  # noqa: BLE001 - the child must never return into the caller's stack
        traceback.print_exc()
    finally:
        os._exit(code)
