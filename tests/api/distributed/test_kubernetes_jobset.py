"""The JobSet of a run, as a YAML parser reads it."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from windlass.distributed.kubernetes_jobset import KubernetesJob, jobset, trainjob
from windlass.distributed.launch_script import ClusterJob
from windlass.errors import InputErrors, RequestError
from windlass.schema.plan import Parallelism

HOSTILE = 'it\'s "a": {b} # c\\n é, - *x &y !z'
"""A folder name that YAML would read otherwise than it stands."""


def documents(folder: Path, **more: object) -> list[Any]:  # whatever a YAML document holds
    job = ClusterJob(
        parallelism=Parallelism(data=8), folder=folder, run_id="01a1-00ff62", nodes=2, per_node=4,
        device_kind="cuda",
    )  # fmt: skip
    settings: dict[str, Any] = {"image": "registry/image:1", "volume_claim": "runs", **more}
    return list(yaml.safe_load_all(jobset(job, KubernetesJob(**settings))))


def test_a_jobset_has_one_indexed_pod_a_host_that_finds_the_first_one_by_name(tmp_path: Path):
    jobs, _ = documents(tmp_path, cpus=8, host_memory="64Gi", grace_seconds=90)
    assert (jobs["apiVersion"], jobs["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    name = jobs["metadata"]["name"]
    assert jobs["spec"]["network"] == {"enableDNSHostnames": True, "subdomain": name}
    assert jobs["spec"]["failurePolicy"] == {"maxRestarts": 3}
    (replicated,) = jobs["spec"]["replicatedJobs"]
    spec = replicated["template"]["spec"]
    assert (spec["completionMode"], spec["parallelism"], spec["completions"]) == ("Indexed", 2, 2)
    pod = spec["template"]["spec"]
    assert (pod["restartPolicy"], pod["terminationGracePeriodSeconds"]) == ("Never", 90)
    (container,) = pod["containers"]
    head, port, node_rank = container["env"]
    assert head == {"name": "HEAD", "value": f"{name}-{replicated['name']}-0-0.{name}"}
    assert port["name"] == "PORT"
    assert isinstance(port["value"], str)
    path = node_rank["valueFrom"]["fieldRef"]["fieldPath"]
    assert path == "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    limits = {"cpu": "8", "memory": "64Gi", "nvidia.com/gpu": "4"}
    assert container["resources"] == {"limits": limits}


def test_only_the_pods_of_the_run_may_reach_its_ports(tmp_path: Path):
    jobs, policy = documents(tmp_path)
    pods = {"podSelector": {"matchLabels": {"jobset.sigs.k8s.io/jobset-name": "windlass-00ff62"}}}
    assert jobs["metadata"]["name"] == "windlass-00ff62"
    assert policy["spec"] == {**pods, "policyTypes": ["Ingress"], "ingress": [{"from": [pods]}]}


def test_a_hostile_folder_name_is_one_string_of_the_jobset(tmp_path: Path):
    folder = tmp_path / HOSTILE / "run"
    jobs, _ = documents(folder, image=HOSTILE, volume_claim=HOSTILE)
    pod = jobs["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["command"] == ["sh", str(folder / "launch.sh")]
    assert container["volumeMounts"][0]["mountPath"] == str(folder.parent)
    assert container["image"] == HOSTILE
    assert pod["volumes"][0]["persistentVolumeClaim"] == {"claimName": HOSTILE}


def test_what_cannot_stand_in_a_jobset_is_refused(tmp_path: Path):
    with pytest.raises(InputErrors):
        documents(tmp_path, image="a\nb")
    with pytest.raises(RequestError, match="64Gi"):
        documents(tmp_path, host_memory="much")


def test_a_trainjob_runs_the_hosts_of_a_run_with_its_folder(tmp_path: Path):
    prepared = ClusterJob(
        parallelism=Parallelism(data=8), folder=tmp_path / HOSTILE, run_id="01a1-00ff62", nodes=2,
        per_node=4, device_kind="cuda",
    )  # fmt: skip
    wanted = KubernetesJob(kind="trainjob", image=HOSTILE, volume_claim="runs", cpus=8)
    read = yaml.safe_load(trainjob(prepared, wanted))
    assert (read["apiVersion"], read["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    spec, trainer = read["spec"], read["spec"]["trainer"]
    assert spec["runtimeRef"] == {"name": "torch-distributed"}
    assert (trainer["numNodes"], trainer["image"]) == (2, HOSTILE)
    assert trainer["command"] == ["sh", str(prepared.script)]
    assert trainer["resourcesPerNode"] == {"limits": {"cpu": "8", "nvidia.com/gpu": "4"}}
    (patch,) = spec["runtimePatches"]
    (node,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pod = node["template"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert (node["name"], container["name"]) == ("node", "node")
    assert container["volumeMounts"] == [{"name": "runs", "mountPath": str(tmp_path)}]
    assert pod["volumes"][0]["persistentVolumeClaim"] == {"claimName": "runs"}
