"""What the trainers of others ask for, whichever they are: data in files, a tokenizer by a name that they know, a script."""

from collections.abc import Iterable

from tokenmill.tasks.errors import InputError
from tokenmill.tasks.storage import is_local
from tokenmill.tasks.train.job import Job
from tokenmill.tasks.train.settings import Launcher

from .torchrun import on_one_machine

HUGGING_FACE, NULL = "HuggingFaceTokenizer", "NullTokenizer"
NOT_FOLDERS = (".json", ".model", ".tiktoken")

SCRIPT = "train.sh"


def require_files(launcher: Launcher, places: Iterable[str]) -> None:
    """Raises InputError unless all places of the data are paths, which is what trainers of others open."""
    stored = next((place for place in places if not is_local(place)), None)
    if stored is not None:
        raise InputError(
            f"launcher={launcher}: its trainer opens files, and {stored} is in a store of objects; prepare it again "
            "with --output-dir, and store where that is set, in a file system that the nodes mount"
        )


def places_of(job: Job) -> Iterable[str]:
    """Where the data of a job lies: its folder, and its files, which may be in a store elsewhere."""
    yield job.data.path
    for source in job.data.sources:
        yield from source.files


def hugging_face_name(job: Job) -> str | None:
    """The data's tokenizer as Hugging Face's libraries find it, a folder or a hub id; None for encodings and single files.

    A pinned revision is a name that only we know.
    """
    name, revision = str(job.data.tokenizer["model"]), job.data.tokenizer.get("revision")
    return name if "/" in name and not name.endswith(NOT_FOLDERS) and revision is None else None


def integral_rope_base(job: Job) -> int:
    """Megatron's base of rotary positions. Raises InputError unless it is a whole number, all that its options take."""
    base = job.settings.model.rope_base
    if not base.is_integer():
        raise InputError(
            f"model.rope_base={base}: launcher={job.settings.launcher} takes whole numbers only; round it, or set launcher=local"
        )
    return int(base)


def torchrun_words(job: Job, processes: int) -> str:
    """The words of a bash script that start a program in the processes of one machine of the job."""
    if job.settings.nodes == 1:
        return " ".join(on_one_machine(processes, []))
    return (
        f"-m torch.distributed.run --nnodes={job.settings.nodes} --nproc-per-node={processes} --max-restarts=0 "
        '--node-rank="${NODE_RANK:?number this machine from 0}" --master-addr="${MASTER_ADDR:?name the first machine}" '
        '--master-port="${MASTER_PORT:-29500}"'
    )
