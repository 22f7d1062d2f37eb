"""deployments/: every profile, manifest and image file is parsed, rendered where that is possible, and what it refers to
is looked up: console scripts, options of Dask's commands, settings of Prefect and Dask, files, fields of resources.
"""

import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from functools import cache
from importlib import import_module
from inspect import signature
from itertools import chain, pairwise
from pathlib import Path

import pytest
import yaml
from dask import config
from dask_jobqueue import SLURMCluster
from distributed.cli import dask_scheduler, dask_worker
from prefect.settings import Settings
from prefect.settings.legacy import _get_settings_fields  # the names of all settings as environment variables
from tokenmill.flows.cli import app
from tokenmill.tasks.shards.runner import Profile
from tokenmill.tasks.strict import parse

REPOSITORY = Path(__file__).parents[1]
FOLDER = REPOSITORY / "deployments"
PROFILES = sorted((FOLDER / "clusters").glob("*.yaml"))
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
IMAGE = f"tokenmill:{PROJECT['version']}"

COMMANDS = {"worker": dask_worker.main, "scheduler": dask_scheduler.main}
OF_STORES = {
    "HF_TOKEN",
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "AWS_DEFAULT_REGION",
    "AWS_ENDPOINT_URL",
}
OF_CONTAINERS = {"PYTHONUNBUFFERED", "DO_NOT_TRACK"}


def written(name):
    return yaml.safe_load((FOLDER / name).read_text())


def profile(name):
    return parse(Profile, written(f"clusters/{name}.yaml"), name)


def accepted(command):
    """Options of a `dask worker` or `dask scheduler` command, as Dask itself parses them."""
    dask, kind, *arguments = command
    assert dask == "dask"
    return COMMANDS[kind].make_context(kind, list(arguments)).params


@pytest.mark.parametrize("path", PROFILES, ids=lambda path: path.stem)
def test_every_profile_has_only_known_keys_names_a_class_and_is_listed_in_the_docs(path):
    assert parse(Profile, yaml.safe_load(path.read_text()), path.name).cluster_class
    assert f"`{path.name}`" in (REPOSITORY / "docs/clusters.md").read_text()


def job_script(found):
    with SLURMCluster(**found.cluster_kwargs | {"interface": "lo"}) as cluster:
        return cluster.job_script()


def worker_options(script):
    """Of the job's last line, read by Dask's own command."""
    arguments = shlex.split(script.strip().splitlines()[-1])
    assert arguments[1:3] == ["-m", "distributed.cli.dask_worker"]
    return dask_worker.main.make_context("worker", arguments[3:]).params


@pytest.mark.parametrize("name", ["ssh", "slurm", "slurm-gpu"])
def test_dashboards_listen_on_loopback_only(name):
    """`--no-dashboard` leaves the list of workers and the counts of tasks to be read by anyone."""
    address = profile(name).cluster_kwargs["scheduler_options"]["dashboard_address"]
    assert address.startswith("127.0.0.1:")


@pytest.mark.parametrize(
    ("name", "chosen", "asked"),
    [
        ("slurm", ("32", 1, None), ["-p cpu", "--cpus-per-task=32"]),
        ("slurm-gpu", (None, 1, "GPU=1"), ["--gpus-per-node=1", "--cpus-per-task=8"]),
    ],
    ids=["a process per core", "one process with one GPU"],
)
def test_slurm_job_starts_processes_and_ends_in_time(name, chosen, asked):
    script = job_script(profile(name))
    options = worker_options(script)
    assert (options["n_workers"], options["nthreads"], options["resources"]) == chosen
    assert {f"#SBATCH {option}" for option in asked} <= {*script.splitlines()}
    hours, minutes, seconds = map(int, re.search(r"#SBATCH -t (\d+):(\d+):(\d+)", script).groups())
    lifetime, stagger = (int(options[key].removesuffix("m")) for key in ("lifetime", "lifetime_stagger"))
    assert lifetime + stagger < hours * 60 + minutes + seconds / 60
    before = script.rpartition("\n")[0].rpartition("\n")[0]
    printed = subprocess.run(["bash", "-c", f"{before}\nenv"], capture_output=True, text=True, check=True).stdout
    assert "PREFECT_PLUGINS_ENABLED=false" in printed.splitlines()


ON_KUBERNETES = ["kubernetes", "kubernetes-gpu"]


def container(part, name):
    (found,) = profile(name).cluster_kwargs["custom_cluster_spec"]["spec"][part]["spec"]["containers"]
    return found


def test_containers_that_read_stores_get_credentials_region_and_endpoint():
    (flows,) = manifests()["Deployment"]["spec"]["template"]["spec"]["containers"]
    for found in (flows, *(container("worker", name) for name in ON_KUBERNETES)):
        assert [source["secretRef"]["name"] for source in found["envFrom"]] == ["tokenmill"]
    reading = [service for name, service in services().items() if name != "server"]
    assert [OF_STORES - service["environment"].keys() for service in reading] == [set()] * len(reading)


def test_deployments_can_write_where_they_do_by_default():
    defaults = [
        each["parameters"]["output_dir"]
        for each in yaml.safe_load((REPOSITORY / "prefect.yaml").read_text())["deployments"]
    ]
    assert {place.partition("/")[0] for place in defaults} == {"output"}
    (folder,) = [rest for word, rest in dockerfile() if word == "WORKDIR"]
    (account,) = [rest for word, rest in dockerfile() if word == "RUN" and "useradd" in rest]
    assert f"install --directory --owner tokenmill /data {folder}/output" in account
    for name in ("worker", "dask-worker"):
        assert f"output:{folder}/output" in services()[name]["volumes"]


def test_kubernetes_workers_have_one_thread_and_the_declared_gpu():
    cpu, gpu = (container("worker", name) for name in ON_KUBERNETES)
    assert accepted(cpu["args"])["nthreads"] == 1
    assert cpu["resources"]["limits"]["cpu"] == "1"
    options = accepted(gpu["args"])
    assert (options["nthreads"], options["resources"], options["name"]) == (1, "GPU=1", "$(DASK_WORKER_NAME)")
    assert gpu["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert "nvidia.com/gpu" not in str(container("scheduler", "kubernetes-gpu"))


@pytest.mark.parametrize("name", ON_KUBERNETES)
def test_the_service_leads_to_the_schedulers_ports(name):
    resource, scheduler = profile(name).cluster_kwargs["custom_cluster_spec"], container("scheduler", name)
    service = resource["spec"]["scheduler"]["service"]
    ports = {port["name"]: port["containerPort"] for port in scheduler["ports"]}
    assert service["selector"] == {
        "dask.org/cluster-name": resource["metadata"]["name"],
        "dask.org/component": "scheduler",
    }
    assert {port["targetPort"]: port["port"] for port in service["ports"]} == ports
    assert ports == {"tcp-comm": 8786, "http-dashboard": 8787}  # where `dask scheduler` listens by itself
    assert scheduler["readinessProbe"]["httpGet"]["port"] in ports
    assert accepted(scheduler["args"])["host"] == "0.0.0.0"


def manifests():
    documents = yaml.safe_load_all((FOLDER / "kubernetes/prefect-worker.yaml").read_text())
    return {document["kind"]: document for document in documents}


def test_the_manifests_refer_to_each_other():
    found = manifests()
    names = {(kind, document["metadata"]["name"]) for kind, document in found.items()}
    binding, deployment = found["RoleBinding"], found["Deployment"]["spec"]
    assert (binding["roleRef"]["kind"], binding["roleRef"]["name"]) in names
    assert [(subject["kind"], subject["name"]) in names for subject in binding["subjects"]] == [True]
    pod = deployment["template"]
    assert ("ServiceAccount", pod["spec"]["serviceAccountName"]) in names
    assert deployment["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    assert {document["metadata"]["namespace"] for document in found.values()} == {
        profile(name).cluster_kwargs["namespace"] for name in ("kubernetes", "kubernetes-gpu")
    }


def services():
    """Of compose.yaml: those that run the image of tokenmill, by name."""
    return {name: service for name, service in written("compose.yaml")["services"].items() if name != "database"}


def images():
    (worker,) = manifests()["Deployment"]["spec"]["template"]["spec"]["containers"]
    return {
        worker["image"],
        *(container(part, name)["image"] for part in ("worker", "scheduler") for name in ON_KUBERNETES),
        *(service["image"] for service in services().values()),
    }


def test_everything_runs_the_image_of_this_version():
    assert {image.removeprefix("registry.example/") for image in images()} == {IMAGE}
    assert f"-t {IMAGE} " in (FOLDER / "Dockerfile").read_text()


def dockerfile():
    """Instructions and their arguments, continued lines joined."""
    text = re.sub(r"^\s*#.*\n", "", (FOLDER / "Dockerfile").read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [tuple(line.split(maxsplit=1)) for line in text.splitlines() if line.strip()]


def test_image_copies_the_whole_package():
    copied = set(chain.from_iterable(rest.split()[:-1] for word, rest in dockerfile() if word == "COPY"))
    assert {name for name in copied if not (REPOSITORY / name).exists()} == set()
    packages = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = {package.split(".")[1] for package in packages if "." in package}
    assert {*folders, "__init__.py", "pyproject.toml", "constraints.txt"} <= copied
    let_in = {line[1:] for line in (FOLDER / "Dockerfile.dockerignore").read_text().split() if line.startswith("!")}
    assert let_in == copied


def test_image_runs_unprivileged_with_pinned_versions():
    words = dockerfile()
    users = [rest for word, rest in words if word == "USER"]
    assert users == ["tokenmill"]
    (install,) = [rest for word, rest in words if word == "RUN" and "pip install" in rest]
    assert "--constraint constraints.txt" in install
    assert words.index(("USER", "tokenmill")) > words.index(("RUN", install))
    extras = re.search(r"EXTRAS=(\S+)", (FOLDER / "Dockerfile").read_text())[1].split(",")
    assert set(extras) <= PROJECT["optional-dependencies"].keys()


def environments():
    """Names of environment variables, by where they are set."""
    yield from re.findall(r"(\w+)=\S+", next(rest for word, rest in dockerfile() if word == "ENV"))
    for service in services().values():
        yield from service["environment"]
    (worker,) = manifests()["Deployment"]["spec"]["template"]["spec"]["containers"]
    yield from (variable["name"] for variable in worker["env"])
    yield from re.findall(r"export (\w+)=", (FOLDER / "local.sh").read_text())


def test_every_variable_is_a_setting_that_prefect_or_dask_knows():
    names = set(environments()) - OF_STORES - OF_CONTAINERS
    prefect, dask = ({name for name in names if name.startswith(prefix)} for prefix in ("PREFECT_", "DASK_"))
    assert names == prefect | dask
    assert prefect <= _get_settings_fields(Settings).keys()
    assert len(prefect) > 4
    keys = [name.removeprefix("DASK_").lower().replace("__", ".") for name in dask]  # logging levels are by logger
    assert [key for key in keys if not key.startswith("logging.") and config.get(key, "unknown") == "unknown"] == []


def commands():
    for service in services().values():
        yield service["command"]
    yield manifests()["Deployment"]["spec"]["template"]["spec"]["containers"][0]["command"]


def test_commands_are_scripts_of_the_image_and_dasks_options_are_right():
    found = list(commands())
    assert {command[0] for command in found} == {"prefect", "dask", "tokenmill"}
    for command in found:
        if command[0] == "tokenmill":
            app.parse_args(command[1:], exit_on_error=False, print_error=False)
    assert [accepted(command)["nthreads"] for command in found if command[:2] == ["dask", "worker"]] == [1]
    assert [accepted(command)["host"] for command in found if command[:2] == ["dask", "scheduler"]] == ["0.0.0.0"]


@pytest.mark.slow
def test_prefects_options_are_in_its_help():
    for command in commands():
        if command[0] == "prefect":
            assert unknown_to_prefect(command) == set()


@cache
def help_of(*command):
    arguments = [str(Path(sys.executable).with_name("prefect")), *command, "--help"]
    return subprocess.run(arguments, capture_output=True, text=True, check=True).stdout


def unknown_to_prefect(command):
    """Options that the help of the subcommand does not list; `--no-prompt` is one of `prefect` itself."""
    subcommand = [word for word in command[1:] if re.fullmatch(r"[a-z-]+", word) and not word.startswith("-")][:2]
    options = {word for word in command if word.startswith("--")} - {"--no-prompt"}
    subcommand = ["deploy"] if "deploy" in command else subcommand
    return {option for option in options if not re.search(rf"{option}\b", help_of(*subcommand))}


def test_secrets_are_external():
    for service in written("compose.yaml")["services"].values():
        for name, value in service["environment"].items():
            if "AUTH" in name:
                assert value.startswith("${PREFECT_AUTH:?")
            if "PASSWORD" in name or "DATABASE_CONNECTION" in name:
                assert "${POSTGRES_PASSWORD:?" in value
            if name in OF_STORES:
                assert value is None


def test_only_the_server_is_reachable_and_only_locally():
    composed = written("compose.yaml")
    every = composed["services"]
    published = {name: service["ports"] for name, service in every.items() if "ports" in service}
    assert published == {"server": ["127.0.0.1:4200:4200"]}
    assert every["scheduler"]["networks"] == every["database"]["networks"] == ["inside"]
    assert composed["networks"]["inside"] == {"internal": True}
    address = every["server"]["environment"]["PREFECT_SERVER_DATABASE_CONNECTION_URL"]
    user, host = re.fullmatch(r"postgresql\+asyncpg://(\w+):\$\{[^}]+\}@(\w+):5432/\1", address).groups()
    assert every[host]["environment"]["POSTGRES_USER"] == user
    assert every[host]["image"].startswith("postgres:")
    assert {name for service in every.values() for name in service.get("depends_on", [])} <= every.keys()
    mounted = {volume.split(":")[0] for service in every.values() for volume in service.get("volumes", [])}
    assert mounted == composed["volumes"].keys()


def page(name):
    """The commands and files that a tutorial shows, by language: commands have none."""
    text = (REPOSITORY / "docs" / name).read_text("utf-8")
    return re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def lines_of(name):
    return [shlex.split(line) for language, block in page(name) if not language for line in block.splitlines()]


def test_the_profile_of_the_tutorial_makes_a_job_that_ends_in_time():
    """With Slurm here, `tests/flows/test_slurm.py` runs the page."""
    (text,) = [block for language, block in page("tutorial-slurm.md") if language == "yaml"]
    script = job_script(parse(Profile, yaml.safe_load(text), "slurm.yaml"))
    options = worker_options(script)
    assert (options["n_workers"], options["nthreads"], options["lifetime"]) == ("2", 1, "25m")
    assert {"#SBATCH -p cpu", "#SBATCH --cpus-per-task=2", "#SBATCH -t 00:30:00"} <= {*script.splitlines()}
    (batch,) = [line for line in lines_of("tutorial-slurm.md") if line[0] == "sbatch"]
    check_inside(shlex.split(batch[-1]))


def check_inside(command):
    """A command in a container: its options and the deployment's parameters exist."""
    if command[0] == "tokenmill":
        app.parse_args(command[1:], exit_on_error=False, print_error=False)
        return
    assert command[:3] == ["prefect", "deployment", "run"]
    assert unknown_to_prefect(command) == set()
    named = command[3].rpartition("/")[2]
    (deployment,) = [
        each
        for each in yaml.safe_load((REPOSITORY / "prefect.yaml").read_text())["deployments"]
        if each["name"] == named
    ]
    module, _, function = deployment["entrypoint"].rpartition(".")
    chosen = {word.partition("=")[0] for flag, word in pairwise(command) if flag == "-p"}
    assert chosen <= signature(getattr(import_module(module), function).fn).parameters.keys()


@pytest.mark.slow
def test_commands_of_the_tutorial_about_compose_fit_the_file():
    """No container is started: neither images nor the daemon of Docker are here."""
    lines = [line for line in lines_of("tutorial-containers.md") if line[:2] == ["docker", "compose"]]
    every = written("compose.yaml")["services"].keys()
    asked = set(re.findall(r"\$\{(\w+):\?", (FOLDER / "compose.yaml").read_text()))
    assert asked == {line[1].partition("=")[0] for line in lines_of("tutorial-containers.md") if line[0] == "export"}
    for _, _, flag, file, verb, *rest in lines:
        assert (flag, (REPOSITORY / file).resolve()) == ("-f", FOLDER / "compose.yaml")
        assert verb in {"up", "ps", "exec"}
        assert {word.partition("=")[0] for word in rest if "=" in word and verb == "up"} <= every
        if verb == "exec":
            assert rest[0] in every
            check_inside(rest[1:])
    assert sum(line[4] == "exec" for line in lines) == 2


@pytest.mark.slow
def test_commands_of_the_tutorial_about_kubernetes_fit_the_manifests():
    """No cluster is here: kubectl itself reads the commands that make things, and nothing is built, pushed or installed."""
    lines = lines_of("tutorial-containers.md")
    (build,) = [line for line in lines if line[:2] == ["docker", "build"]]
    assert (REPOSITORY / build[build.index("-f") + 1]).exists()
    assert build[build.index("-t") + 1] in images()
    arguments = {rest.partition("=")[0] for word, rest in dockerfile() if word == "ARG"}
    assert build[build.index("--build-arg") + 1].partition("=")[0] in arguments
    for line in lines:
        if line[:2] == ["prefect", "deployment"]:
            check_inside(line)
    kubectl = [line for line in lines if line[0] == "kubectl"]
    assert {line[2] for line in kubectl if line[1] == "--namespace"} == {
        manifests()["Deployment"]["metadata"]["namespace"]
    }
    (inside,) = [line for line in kubectl if "exec" in line]
    assert inside[4] == f"deploy/{manifests()['Deployment']['metadata']['name']}"
    check_inside(inside[inside.index("--") + 1 :])
    (applied,) = [line for line in kubectl if "apply" in line]
    assert (REPOSITORY / applied[-1]).resolve() == FOLDER / "kubernetes"
    if shutil.which("kubectl"):
        made = [
            subprocess.run([*line, "--dry-run=client", "-o", "name"], capture_output=True, text=True, check=True)
            for line in kubectl
            if "create" in line
        ]
        assert [each.stdout.strip() for each in made] == ["namespace/tokenmill", "secret/tokenmill"]
