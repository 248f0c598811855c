from .cluster_launch import Scheduler, launch, launch_texts
from .cluster_worker import ClusterHost, ClusterRank, run_cluster_rank, run_host
from .elastic import ElasticRecovery
from .kubernetes_jobset import KubernetesJob
from .launch_script import ClusterJob, RayJob, SlurmJob
from .rank_main import (
    become_ranks, joined_ranks, meeting_in_file, rank_process, run_rank,
)  # fmt: skip

__all__ = [
    "ClusterHost", "ClusterJob", "ClusterRank", "ElasticRecovery", "KubernetesJob", "RayJob",
    "Scheduler", "SlurmJob", "become_ranks", "joined_ranks", "launch", "launch_texts",
    "meeting_in_file", "rank_process", "run_cluster_rank", "run_host", "run_rank",
]  # fmt: skip
