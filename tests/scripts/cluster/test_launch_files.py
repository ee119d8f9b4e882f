"""Files of scripts/launch: they parse, and start what docs/launch.md starts with torchrun."""

import re
import shlex
from typing import Any

import pytest
import yaml

from phalanx.configs.load import load
from phalanx.configs.validate import validate
from phalanx.moe.run.shared import HOST_LOCAL
from tests.support.pages import ROOT, TEXTS, commands, ranks_and_overrides

FOLDER = ROOT / "scripts/launch"
PLACES = {*HOST_LOCAL, "run.checkpoints"}
"""Knobs that say where data and results are."""
SKYPILOT = {"SKYPILOT_NUM_NODES", "SKYPILOT_NODE_RANK", "SKYPILOT_NODE_IPS"} | {
    "SKYPILOT_NUM_GPUS_PER_NODE"
}
OPERATOR = {"MASTER_ADDR", "MASTER_PORT", "RANK"}
"""Variables that the launcher of a file sets, by its documentation."""


def parsed(name: str) -> dict[str, Any]:
    content = yaml.safe_load((FOLDER / name).read_text("utf-8"))
    assert isinstance(content, dict)
    return content


def container() -> dict[str, Any]:
    spec = parsed("pytorchjob.yaml")["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]
    (only,) = spec["containers"]
    assert isinstance(only, dict)
    return only


def script(name: str) -> str:
    """Shell script that every node runs."""
    text = parsed(name)["run"] if name == "skypilot.yaml" else container()["args"][0]
    assert isinstance(text, str)
    return text


def launches(text: str) -> list[list[str]]:
    """Words of the calls of torchrun in a script, without what a shell would expand."""
    lines = text.replace("\\\n", " ").splitlines()
    return [shlex.split(line.replace("exec ", "")) for line in lines if "torchrun" in line]


def option(words: list[str], name: str) -> str:
    return words[words.index(name) + 1]


def test_the_job_has_a_master_and_workers_alike() -> None:
    job = parsed("pytorchjob.yaml")
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    roles = job["spec"]["pytorchReplicaSpecs"]
    assert set(roles) == {"Master", "Worker"} and roles["Master"]["replicas"] == 1
    assert roles["Master"]["template"] == roles["Worker"]["template"]
    assert container()["name"] == "pytorch" and container()["command"] == ["bash", "-c"]
    mounts = {mount["name"] for mount in container()["volumeMounts"]}
    assert {v["name"] for v in roles["Worker"]["template"]["spec"]["volumes"]} == mounts
    nodes = sum(role["replicas"] for role in roles.values())
    gpus = container()["resources"]["limits"]["nvidia.com/gpu"]
    for words in launches(script("pytorchjob.yaml")):
        assert option(words, "--nnodes") == str(nodes)
        assert option(words, "--nproc-per-node") == str(gpus)
    assert nodes * gpus == 64


def test_the_task_has_as_many_gpus() -> None:
    task = parsed("skypilot.yaml")
    assert task["num_nodes"] * int(task["resources"]["accelerators"].partition(":")[2]) == 64
    for words in launches(script("skypilot.yaml")):
        assert option(words, "--nnodes") == "$SKYPILOT_NUM_NODES"
        assert option(words, "--nproc-per-node") == "$SKYPILOT_NUM_GPUS_PER_NODE"
        assert option(words, "--node-rank") == "$SKYPILOT_NODE_RANK"
    assert "'.[train,s3]'" in task["setup"]


@pytest.mark.parametrize(
    ("name", "given"), [("pytorchjob.yaml", OPERATOR), ("skypilot.yaml", SKYPILOT)]
)
def test_every_variable_is_set(name: str, given: set[str]) -> None:
    text = script(name)
    used = set(re.findall(r"\$\{?\(*([A-Za-z_]\w*)", text)) | set(re.findall(r"\(\((\w+)", text))
    assigned = set(re.findall(r"^(\w+)=", text, re.MULTILINE))
    assert given <= used <= {*given, *assigned, "PWD", "PATH", "head"}


@pytest.mark.parametrize("name", ["pytorchjob.yaml", "skypilot.yaml"])
def test_the_cluster_is_checked_and_then_trained_on_as_the_page_says(name: str) -> None:
    check, train = launches(script(name))
    assert check[-1] == "scripts/check_cluster.py" and (ROOT / check[-1]).is_file()
    # The meeting of the first launch may still be in place when the second begins.
    assert option(check, "--master-port") != option(train, "--master-port")
    overrides = train[train.index("train.py") + 1 :]
    (shown,) = [c for c in commands(TEXTS["docs/launch.md"]) if "torchrun" in c and "train.py" in c]
    ranks, wanted = ranks_and_overrides(shown)
    assert ranks == 64
    assert [w for w in overrides if w.split("=")[0] not in PLACES] == [
        w for w in wanted if w.split("=")[0] not in PLACES
    ]
    validate(load(overrides), ranks)


def test_the_container_is_built_of_what_is_there() -> None:
    text = (FOLDER / "Dockerfile").read_text("utf-8")
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    assert [line.split()[0] for line in lines if line[:1].isupper()] == [
        *["ARG", "FROM", "RUN", "ENV", "ENV", "WORKDIR", "COPY", "RUN"]
    ]
    project = (ROOT / "pyproject.toml").read_text("utf-8")
    (extras,) = re.findall(r"'\.\[(\S+)\]'", text)
    assert all(re.search(rf"^{extra} = \[", project, re.MULTILINE) for extra in extras.split(","))
    ignored = (FOLDER / "Dockerfile.dockerignore").read_text("utf-8").split("\n")
    assert not {"phalanx", "configs", "docs", "scripts"} & set(ignored)  # docs is in the package
