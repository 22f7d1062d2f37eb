"""The peers: Megatron-LM and Megatron-Bridge as they are on PyPI, and what they make of the files that launchers write.

    python tests/peers/megatron_in_turn.py PEERS < PLAN > FOUND

PEERS is the folder that both wheels are unpacked in, which `make` does. A plan is a list of mappings: `peer`, the number of
`processes` of the whole training, and for Megatron-LM the `arguments` of pretrain_gpt.py with its `environment`, for
Megatron-Bridge the `program`.
What is found is a mapping in the same place: what came of validated arguments, or of the configuration as `pretrain` has
updated and validated it; or `refused`, the traceback.

They need no GPU for that. Packages that are imported and not used are replaced by nothings, unless they are installed. Of
Megatron-Bridge three `__init__` are passed over, which import a hundred models; the bridge of Llama is imported by its name.
Both peers live in the namespace `megatron`, whose older half may be installed as well, so this runs in a process of its own.
"""

import contextlib
import dataclasses
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import runpy
import sys
import traceback
import types
import typing
from pathlib import Path

import torch._inductor.compile_fx  # noqa: F401 - asks for triton, and must learn that it is absent before it is replaced
import typing_extensions

UNUSED = {
    "triton": "triton",
    "transformer_engine": "transformer_engine",
    "megatron.energon": "megatron.energon",
    "datasets": "datasets",
    "torch.utils.tensorboard": "tensorboard",
}
"""Packages that are imported and not used here, and what they are installed as."""

BARE = ("megatron.bridge", "megatron.bridge.models", "megatron.bridge.recipes")
"""Packages whose `__init__` is passed over."""


class _Nothing(type):
    """The type of NOTHING: a class of which every attribute is the same class; as a decorator it changes nothing."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return NOTHING

    def __call__(cls, *arguments, **_):
        return arguments[0] if len(arguments) == 1 and callable(arguments[0]) else NOTHING


NOTHING = _Nothing("NOTHING", (), {})


class _Package(types.ModuleType):
    __path__ = ()
    __version__ = "0"

    def __getattr__(self, name):
        return getattr(NOTHING, name)


class Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds packages that are not there."""

    def __init__(self, names):
        self._names = names

    def find_spec(self, fullname, path=None, target=None):
        if any(fullname == name or fullname.startswith(f"{name}.") for name in self._names):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec):
        return _Package(spec.name)

    def exec_module(self, module):
        pass


def prepare(peers):
    """Make both peers importable."""
    sys.path.insert(0, peers)
    if not hasattr(typing, "override"):  # Python 3.11
        typing.override = typing_extensions.override
    sys.meta_path.insert(0, Absent([name for name, package in UNUSED.items() if not is_installed(package)]))
    for name in BARE:
        package = types.ModuleType(name)
        package.__path__ = [str(Path(peers, *name.split(".")))]
        sys.modules[name] = package


def is_installed(package):
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:
        return False


def megatron_lm(arguments, environment, processes):
    """The arguments as Megatron-LM has parsed and validated them."""
    from megatron.training import arguments as peer  # noqa: PLC0415

    peer.get_device_arch_version = lambda: 9  # of a Hopper, which no machine without one tells
    sys.argv = ["pretrain_gpt.py", *arguments]
    os.environ.update(environment, RANK="0", WORLD_SIZE=str(processes))
    parsed = peer.parse_args()
    peer.validate_args(parsed)
    return {**vars(parsed), "samples_in_first_phase": samples_in_first_phase(parsed)}


def samples_in_first_phase(parsed):
    """The training samples that Megatron-LM asks its data for when a run begins."""
    from megatron.training import training  # noqa: PLC0415

    parsed.iteration, parsed.consumed_train_samples = 0, 0
    training.get_args = lambda: parsed
    training.update_train_iters(parsed)
    return training.get_train_valid_test_num_samples()[0]


def megatron_bridge(program, processes):
    """The configuration of a program, as Megatron-Bridge updates and validates it before it trains."""
    from megatron.bridge.models.conversion.auto_bridge import AutoBridge  # noqa: PLC0415 - first, or its imports run in circles
    from megatron.bridge.models.gpt_provider import GPTModelProvider  # noqa: PLC0415
    from megatron.bridge.models.llama import llama_bridge  # noqa: F401, PLC0415 - tells AutoBridge of Llama

    sys.modules["megatron.bridge"].AutoBridge = AutoBridge
    vars(sys.modules["megatron.bridge.models"]).update(GPTModelProvider=GPTModelProvider, T5ModelProvider=NOTHING)
    from megatron.bridge.training import config  # noqa: PLC0415

    found = []
    for name, content in {"pretrain": lambda given, _: found.append(given), "gpt_step": NOTHING}.items():
        module = types.ModuleType(f"megatron.bridge.training.{name}")
        vars(module).update({"pretrain": content, "forward_step": content})
        sys.modules[module.__name__] = module
    os.environ.update(RANK="0", WORLD_SIZE=str(processes))
    runpy.run_path(program, run_name="__main__")
    (made,) = found
    config.runtime_config_update(made)
    return {each.name: plain(getattr(made, each.name)) for each in dataclasses.fields(made)}


def plain(value):
    """What of a configuration JSON can say."""
    if not dataclasses.is_dataclass(value):
        return value
    return {each.name: plain(getattr(value, each.name, None)) for each in dataclasses.fields(value)}


def read(peer, **given):
    """What a peer makes of what it is given."""
    try:
        with contextlib.redirect_stdout(sys.stderr):
            return PEERS[peer](**given)
    except (Exception, SystemExit):  # noqa: BLE001 - a refusal of any kind is what is looked for
        return {"refused": traceback.format_exc()}


PEERS = {"megatron-lm": megatron_lm, "megatron-bridge": megatron_bridge}

if __name__ == "__main__":
    prepare(sys.argv[1])
    plan = json.load(sys.stdin)
    answers = [read(**each) for each in plan]
    json.dump(answers, sys.stdout, default=str)
