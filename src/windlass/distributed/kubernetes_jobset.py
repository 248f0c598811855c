"""The text of a Kubernetes JobSet or Kubeflow TrainJob that runs a prepared run: a pod a host."""

import json
import os
import re
from dataclasses import dataclass
from typing import Literal

from windlass.distributed.launch_script import ClusterJob, require_plain_text
from windlass.errors import RequestError

_RESTARTS = 3
_QUANTITY = re.compile(r"\d+(\.\d+)?([kMGTPE]i?|m)?")
"""Source: Kubernetes, "Resource Management for Pods and Containers"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KubernetesJob:
    """What the pods of a run need."""

    kind: Literal["jobset", "trainjob"] = "jobset"
    """Which controller starts them: JobSet's, or Kubeflow Trainer's."""

    image: str
    """Container image that holds this Python, under the same path as here."""
    volume_claim: str
    """Persistent volume claim that holds the run folder; mounted at the folder above it."""
    cpus: int | None = None
    """CPU cores of each pod; no request if not given."""
    gpus: int | None = None
    """GPUs of each pod; one for each device of the plan if not given."""
    host_memory: str | None = None
    """Memory of each pod, such as `64Gi`; no limit if not given."""
    grace_seconds: int = 120
    """Time that a pod has to complete and save the current step once it is asked to end."""


def jobset(job: ClusterJob, kubernetes: KubernetesJob) -> str:
    """The text of a YAML file with two documents: a JobSet and a NetworkPolicy for its pods.

    Values are written as JSON strings, which are YAML strings without exceptions.

    Raises:
        InputErrors: all values that cannot stand in a file of text.
        RequestError: the memory is no quantity.
    """
    limits = _limits(job, kubernetes)
    name, head = json.dumps(job.name), json.dumps(f"{job.name}-hosts-0-0.{job.name}")
    resources = "".join(
        f"                  {key}: {_text(value)}\n" for key, value in limits.items()
    )
    return f"""\
# Submit this with `kubectl apply -f`; it needs the JobSet controller (jobset.sigs.k8s.io).
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata:
  name: {name}
spec:
  network:
    enableDNSHostnames: true  # a headless service: pods find the first one by its name
    subdomain: {name}
  failurePolicy:
    maxRestarts: {_RESTARTS}
  replicatedJobs:
  - name: hosts
    replicas: 1
    template:
      spec:
        completionMode: Indexed
        parallelism: {job.nodes}
        completions: {job.nodes}
        backoffLimit: 0  # one pod alone cannot be restarted
        template:
          spec:
            restartPolicy: Never
            terminationGracePeriodSeconds: {kubernetes.grace_seconds}
            securityContext:  # the run folder belongs to this user
              runAsUser: {os.getuid()}
              runAsGroup: {os.getgid()}
            containers:
            - name: windlass
              image: {_text(kubernetes.image)}
              command: ["sh", {_text(str(job.script))}]
              env:
              - name: HEAD
                value: {head}
              - name: PORT
                value: "{job.port}"
              - name: NODE_RANK
                valueFrom:
                  fieldRef:
                    fieldPath: "metadata.annotations['batch.kubernetes.io/job-completion-index']"
              resources:
                limits:{"" if resources else " {}"}
{resources}\
              volumeMounts:
              - name: runs
                mountPath: {_text(str(job.folder.parent))}
              - name: shared-memory
                mountPath: /dev/shm
            volumes:
            - name: runs
              persistentVolumeClaim:
                claimName: {_text(kubernetes.volume_claim)}
            - name: shared-memory
              emptyDir:
                medium: Memory
---
# Nobody but the pods of this run reaches their ports, if the cluster's network knows policies.
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata:
  name: {name}
spec:
  podSelector:
    matchLabels:
      jobset.sigs.k8s.io/jobset-name: {name}
  policyTypes: ["Ingress"]
  ingress:
  - from:
    - podSelector:
        matchLabels:
          jobset.sigs.k8s.io/jobset-name: {name}
"""


def trainjob(job: ClusterJob, kubernetes: KubernetesJob) -> str:
    """The text of a YAML file with a Kubeflow TrainJob, as Kubeflow Trainer 2.2 and later reads it.

    Raises:
        InputErrors: all values that cannot stand in a file of text.
        RequestError: the memory is no quantity.
    """
    limits = _limits(job, kubernetes)
    resources = (
        "".join(f"\n        {key}: {_text(value)}" for key, value in limits.items()) or " {}"
    )
    return f"""\
# Submit this with `kubectl create -f`; it needs Kubeflow Trainer and its runtime torch-distributed,
# which gives each pod PET_MASTER_ADDR and its index.
apiVersion: trainer.kubeflow.org/v1alpha1
kind: TrainJob
metadata:
  name: {json.dumps(job.name)}
spec:
  runtimeRef:
    name: torch-distributed
  trainer:
    image: {_text(kubernetes.image)}
    numNodes: {job.nodes}
    command: ["sh", {_text(str(job.script))}]
    env:
    - name: PORT
      value: "{job.port}"
    resourcesPerNode:
      limits:{resources}
  runtimePatches:
  - manager: windlass/launch
    trainingRuntimeSpec:
      template:
        spec:
          replicatedJobs:
          - name: node
            template:
              spec:
                template:
                  spec:
                    terminationGracePeriodSeconds: {kubernetes.grace_seconds}
                    securityContext:  # the run folder belongs to this user
                      runAsUser: {os.getuid()}
                      runAsGroup: {os.getgid()}
                    containers:
                    - name: node
                      volumeMounts:
                      - name: runs
                        mountPath: {_text(str(job.folder.parent))}
                    volumes:
                    - name: runs
                      persistentVolumeClaim:
                        claimName: {_text(kubernetes.volume_claim)}
"""


def _limits(job: ClusterJob, kubernetes: KubernetesJob) -> dict[str, str]:
    """What each pod may take."""
    memory = kubernetes.host_memory
    values = {"--image": kubernetes.image, "--volume-claim": kubernetes.volume_claim}
    require_plain_text({"the folder": str(job.folder), "--host-memory": memory} | values)
    if memory is not None and not _QUANTITY.fullmatch(memory):
        raise RequestError(f"`--host-memory` is {memory!r}, no quantity such as `64Gi`")
    gpus = kubernetes.gpus or (job.per_node if job.device_kind == "cuda" else 0)
    limits = {"cpu": kubernetes.cpus, "memory": memory, "nvidia.com/gpu": gpus}
    return {key: str(value) for key, value in limits.items() if value}


def _text(value: str) -> str:
    return json.dumps(value, ensure_ascii=False)
