"""The script that makes engines, one after the other, and writes down what each of them computes.

    python tests/train/engines_in_turn.py CASES.json

A case has a `name`, the `settings` that differ from SETTINGS, a `precision`, the `rows` it reads, and `what` is done: see
DOINGS. What was found goes to NAME/found.json beside the file of cases, and the model to NAME/model.

Cases of as many `processes` share these, and all are forked from one that has imported everything, which takes longer than
a dozen cases do. megatron-core says that its groups are there once in a process; here they are taken down after each
case, and CUDA is replaced once only. Nothing heavy is imported at the top: a checkpoint is written by a process that
imports this again.
"""

import json
import os
import signal
import socket
import sys
from functools import cache, partial
from pathlib import Path

import numpy as np
from tokenmill.tasks.train.orphans import die_with_parent
from tokenmill.tasks.train.rows import FlatPacks, PackedRows, TrainBatch
from tokenmill.tasks.train.settings import TrainSettings
from tokenmill.tasks.train.training import learning_rate

from tests.forking import fork

VOCABULARY, LENGTH, PAD = 200, 32, 7
SETTINGS = {
    "steps": 6, "sequence_length": LENGTH, "global_batch": 4, "micro_batch": 2, "seed": 1,
    "model": {
        "layers": 2, "hidden": 32, "heads": 4, "key_value_heads": 2, "feed_forward": 48, "rope_base": 500.5,
        "norm_epsilon": 1e-3,
    },
    "optimizer": {
        "warmup_steps": 2, "weight_decay": 0.5, "clip": 0.4, "beta1": 0.8, "beta2": 0.9, "epsilon": 1e-7,
    },
}  # fmt: skip


def settings_of(case):
    """The settings of a case; it names those of the model and the optimizer that differ."""
    given = {name: value for name, value in case.get("settings", {}).items() if name != "engine"}
    parts = {part: {**SETTINGS[part], **given.get(part, {})} for part in ("model", "optimizer")}
    return TrainSettings.model_validate({**SETTINGS, **given, **parts})


class Progressions:
    """Rows that can be learned: each counts on from somewhere, in steps of its own."""

    def batch(self, numbers):
        rows = np.stack([progression(number, LENGTH + 1) for number in numbers])
        return TrainBatch(rows[:, :-1], rows[:, 1:], np.ones((len(numbers), LENGTH), bool), None)


def progression(number, length):
    begin, stride = np.random.default_rng(number).integers([0, 1], [VOCABULARY, 5])
    return (begin + stride * np.arange(length)) % VOCABULARY


def some_packs(count=16):
    """Packs of one to five sequences, of which the beginnings are not trained on, stored as packed Parquet has them."""
    generator, packs = np.random.default_rng(5), []
    for _ in range(count):
        lengths, room = [], LENGTH
        while room > 6 and len(lengths) < 5:
            lengths.append(int(generator.integers(4, room + 1)))
            room -= lengths[-1]
        packs.append([progression(generator.integers(1 << 30), length + 1) for length in lengths])
    masks = [[np.arange(len(ids)) % (len(ids) - 1) > len(ids) // 3 for ids in pack] for pack in packs]
    ends = [np.cumsum([0, *(len(ids) for ids in pack)]) for pack in packs]
    return FlatPacks(
        np.concatenate([ids for pack in packs for ids in pack]).astype(np.int32),
        np.concatenate([mask for pack in masks for mask in pack]).astype(np.int8),
        np.concatenate([each[:-1] for each in ends]).astype(np.int32),
        np.cumsum([0, *(each[-1] for each in ends)]),
        np.cumsum([0, *(len(pack) for pack in packs)]),
    )


def packed_rows():
    return PackedRows(some_packs(), LENGTH, PAD, 3)


def alone(batch):
    """The sequences of a batch, each as a batch of its own, filled up behind and read without any mask of attention."""
    found, length = [], batch.tokens.shape[1]
    for row, segments in enumerate(batch.segments):
        for number in np.unique(segments[segments >= 0]):
            own = segments == number
            tokens, labels = np.full((2, 1, length), PAD)
            loss = np.zeros((1, length), bool)
            for filled, array in ((tokens, batch.tokens), (labels, batch.labels), (loss, batch.loss_mask)):
                filled[0, : own.sum()] = array[row, own]
            found.append(TrainBatch(tokens, labels, loss, None))
    return found


def batches_of(case, engine, step):
    """This replica's micro-batches of a step, counted from 0."""
    numbers, kind = engine.shape.numbers(step), case.get("rows", "progressions")
    if kind == "progressions":
        return [Progressions().batch(each) for each in numbers]
    packed = [packed_rows().batch(each) for each in numbers]
    return packed if kind == "packed" else [each for batch in packed for each in alone(batch)]


def engine_of(case, world):
    from tokenmill.tasks.train.model import configuration, fresh  # noqa: PLC0415 - see the module's page

    settings = settings_of(case)
    vocabulary = settings.model.vocabulary(VOCABULARY)
    weights, precision = fresh(settings.model, vocabulary, settings.seed), case.get("precision", "float32")
    if case.get("settings", {}).get("engine") == "plain":
        from tests.train.plain import PlainEngine  # noqa: PLC0415

        config = configuration(settings.model, vocabulary, LENGTH, PAD)
        return PlainEngine(settings, precision, world, config, weights)
    from tokenmill.tasks.train import megatron  # noqa: PLC0415

    megatron.compute_on_cpu = once()
    return megatron.MegatronEngine(settings, precision, world, vocabulary, weights)


@cache
def once():
    from tokenmill.tasks.train.cuda_on_cpu import compute_on_cpu  # noqa: PLC0415

    return cache(compute_on_cpu)


def steps(case, engine, first, stop):
    """Train; the loss, the tokens trained on and the gradient's norm of each step."""
    settings, found = settings_of(case), []
    for step in range(first, stop):
        rate = learning_rate(step + 1, settings.steps, settings.optimizer)
        losses, norm = engine.step(batches_of(case, engine, step), rate)
        found.append((losses.mean, losses.tokens, norm))
    return found


def trained(case, world, folder):
    engine = engine_of(case, world)
    found = {"steps": steps(case, engine, 0, settings_of(case).steps)}
    found["after"] = engine.losses(batches_of(case, engine, 100)).mean
    publish(case, engine, world, folder)
    if world.size == 1:
        found["logits"] = logits(engine)
    return found


def publish(case, engine, world, folder):
    from tokenmill.tasks.train.model import configuration, publish_model  # noqa: PLC0415

    settings, weights = settings_of(case), engine.weights()
    if world.first:
        config = configuration(settings.model, settings.model.vocabulary(VOCABULARY), LENGTH, PAD)
        publish_model(str(folder / "model"), config, weights, {})


def logits(engine):
    """What the model says of one row, whichever engine it is in."""
    import torch  # noqa: PLC0415

    batch = Progressions().batch([999])
    tokens, positions = torch.from_numpy(batch.tokens), torch.from_numpy(batch.positions.copy())
    model = getattr(engine, "_bare", engine._model)  # noqa: SLF001 - an engine gives losses only
    model.eval()
    with torch.no_grad():
        said = model(tokens, position_ids=positions, attention_mask=None)
    return (said if isinstance(said, torch.Tensor) else said.logits)[0].tolist()


def isolated(case, world, folder):
    """The loss of the last sequence of a pack when a token of the first is changed, and when none is; with and without
    segments.
    """
    engine, batch = engine_of(case, world), packed_rows().batch([0])
    loss = batch.loss_mask & (batch.segments == batch.segments.max())
    other = batch.tokens.copy()
    other[0, 0] = (other[0, 0] + 1) % VOCABULARY

    def mean(tokens, segments):
        return engine.losses([TrainBatch(tokens, batch.labels, loss, segments)]).mean

    return {
        "sequences": int(batch.segments.max()) + 1,
        "apart": [mean(tokens, batch.segments) for tokens in (batch.tokens, other)],
        "together": [mean(tokens, None) for tokens in (batch.tokens, other)],
    }


def resumed(case, world, folder):
    """All steps at once, and in two halves with a checkpoint between them; `saved` is where, `from` another's."""
    from tokenmill.tasks.train import checkpoints  # noqa: PLC0415

    total = settings_of(case).steps
    half, place = total // 2, str(folder.parent / case.get("from", case["name"]))
    found = {}
    if "from" not in case:
        whole = engine_of(case, world)
        found["whole"] = steps(case, whole, 0, half)
        checkpoints.save(whole, world, place, half, keep=1)
        found["whole"] += steps(case, whole, half, total)
        publish(case, whole, world, folder / "whole")
        take_down()
    second = engine_of(case, world)
    found["done"] = checkpoints.resume(second, world, place)
    found["resumed"] = steps(case, second, half, total)
    publish(case, second, world, folder)
    return found


def take_down():
    from megatron.core import parallel_state  # noqa: PLC0415

    if parallel_state.is_initialized():
        parallel_state.destroy_model_parallel()


DOINGS = {"train": trained, "isolate": isolated, "resume": resumed}


def do_all(cases, folder):
    """What each of the processes does that share some cases."""
    from tokenmill.tasks.train.engine import joined  # noqa: PLC0415

    with joined("cpu") as world:
        for case in cases:
            place = folder / case["name"]
            place.mkdir(exist_ok=True)
            result = DOINGS[case.get("what", "train")](case, world, place)
            if world.first:
                (place / "found.json").write_text(json.dumps(result))
            world.wait()
            take_down()


def as_one_of(processes, rank, port, cases, folder):
    """A process of a world, made known to it as torchrun would."""
    die_with_parent()
    if processes > 1:
        known = {"RANK": rank, "WORLD_SIZE": processes, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in known.items()})
    do_all(cases, folder)


def free_port():
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


def main():
    from tokenmill.tasks.train import checkpoints, engine, megatron, model  # noqa: F401, PLC0415 - for all that are forked

    from tests.train import plain  # noqa: F401, PLC0415

    plan = Path(sys.argv[1])
    cases = json.loads(plan.read_text())
    children = []
    for processes in sorted({case.get("processes", 1) for case in cases}):
        own, port = [case for case in cases if case.get("processes", 1) == processes], free_port()
        children += [fork(partial(as_one_of, processes, rank, port, own, plan.parent)) for rank in range(processes)]
    while children:
        child, status = os.wait()
        children.remove(child)
        if status:  # the others would wait for this one
            for other in children:
                os.kill(other, signal.SIGKILL)
            sys.exit(1)


if __name__ == "__mp_main__":  # the process that writes checkpoints
    die_with_parent()
if __name__ == "__main__":
    main()
