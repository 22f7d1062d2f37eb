"""Start a different trainer's script, unchanged, so that it reads in the planned order and records its reads.

    python -m torch.distributed.run … -m tokenmill.tasks.train.peer MODEL/job.json pretrain_gpt.py --num-layers …

Megatron-LM and Megatron-Bridge build datasets by megatron-core's BlendedMegatronDatasetBuilder and take batches from torch's
DataLoader. For this process, the first then uses the indices of the order (`recorder.use_order`), and the second records.
"""

import runpy
import sys
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader

from .job import Job, job_of
from .recorder import ReadRecorder, use_order


def follow(job: Job) -> None:
    """Make this process's training follow the order of a job, and record it in the job's folder."""
    from megatron.core import num_microbatches_calculator, parallel_state  # noqa: PLC0415 - of the trainer's own folder
    from megatron.core.datasets.blended_megatron_dataset_builder import (  # noqa: PLC0415
        BlendedMegatronDatasetBuilder,
    )

    build, iterate = BlendedMegatronDatasetBuilder.build, DataLoader.__iter__
    recorders: list[ReadRecorder] = []

    def built(builder: Any) -> list[Any]:  # noqa: ANN401 - megatron-core has no types
        use_order(builder.config, job.data)
        train, *others = build(builder)
        if train is None:  # processes of a model share their samples; see is_built_on_rank
            return [train, *others]
        batch = num_microbatches_calculator.get_current_global_batch_size()
        progress: dict[str, Any] = {}
        # The step with which Megatron-LM continues, and the skipped ones; Megatron-Bridge keeps them to itself.
        if (known := sys.modules.get("megatron.training.global_vars")) is not None:
            arguments = known.get_args()
            skipped = list(getattr(arguments, "iterations_to_skip", ()))
            progress = {"first_step": arguments.iteration + 1, "skipped": skipped}
        recorders.append(
            ReadRecorder(
                train, job.data, job.output_dir, global_batch=batch,
                steps=job.settings.steps if job.data.phases else builder.sizes[0] // batch,
                replica=parallel_state.get_data_parallel_rank(), replicas=parallel_state.get_data_parallel_world_size(),
                **progress,
            )
        )  # fmt: skip
        return [recorders[-1].dataset, *others]

    def batches(loader: DataLoader[Any]) -> Any:  # noqa: ANN401 - as torch has it
        found = iterate(loader)
        recorder = next((each for each in recorders if each.dataset is loader.dataset), None)
        return recorder.watch(found) if recorder else found

    for changed, name, method in ((BlendedMegatronDatasetBuilder, "build", built), (DataLoader, "__iter__", batches)):
        setattr(changed, name, method)


def main() -> None:
    """Run the script that the command line names, as its main program."""
    place, program, *arguments = sys.argv[1:]
    sys.path.insert(0, str(Path(program).parent))
    follow(job_of(Path(place).read_bytes(), place))
    sys.argv = [program, *arguments]
    runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    main()
