"""What a mapped task does, in this process: no server, no cluster."""

from prefect.logging import disable_run_logger
from tokenmill.tasks.shards.plan import shard_record


def build_here(task, pending, common):
    """Build the pending shards one after the other, as one batch of the task."""
    if pending:
        with disable_run_logger():
            task.fn(number=1, batch=[shard_record(shard) for shard in pending], topic="here", **common)
