"""Plan the order of a training run on documents.

build indices (mapped over Dask, by prefix) ─► blend ─► digest steps, count reads (mapped) ─► order.json
"""

from typing import Any

from tokenmill.tasks.shards.stage import function_workers, step_task
from tokenmill.tasks.strict import Place
from tokenmill.tasks.train.order import artifact_record, checked_data, make_order
from tokenmill.tasks.train.settings import OrderSettings

from .prefect_server import flow


@flow(name="order-samples")
def order_samples(output_dir: Place, settings: OrderSettings) -> dict[str, Any]:
    """Plan which samples each step of a training run reads, and build megatron-core's indices for it.

    Args:
        output_dir: The output folder of a preparation for pretraining.
        settings: Settings of the training run that decide its order.
    """
    data = step_task("plan")(checked_data)(output_dir, settings)
    with function_workers(settings) as run_all:
        order = make_order(data, settings, run_all)
    return artifact_record(order, data.path)
