<<<<<<< HEAD
from .cluster_launch import Scheduler, launch
from .cluster_worker import ClusterHost, ClusterRank, run_cluster_rank, run_host
from .elastic import ElasticRecovery
from .kubernetes_jobset import KubernetesJob
from .launch_script import RayJob, SlurmJob
from .rank_main import (
    become_ranks, joined_ranks, meeting_in_file, rank_process, run_rank,
)  # fmt: skip

__all__ = [
    "ClusterHost", "ClusterRank", "ElasticRecovery", "KubernetesJob", "RayJob", "Scheduler",
    "SlurmJob", "become_ranks", "joined_ranks", "launch", "meeting_in_file",
=======
from .cluster_launch import Scheduler, launch_texts, prepare_cluster_run
from .cluster_worker import ClusterHost, ClusterRank, run_cluster_rank, run_host
from .elastic import ElasticRecovery
from .kubernetes_jobset import KubernetesJob
from .launch_script import ClusterJob, RayJob, SlurmJob
from .rank_main import joined_ranks, rank_process, run_rank
from .rank_server import become_ranks

__all__ = [
    "ClusterHost", "ClusterJob", "ClusterRank", "ElasticRecovery", "KubernetesJob", "RayJob",
    "Scheduler", "SlurmJob", "become_ranks", "joined_ranks", "launch_texts", "prepare_cluster_run",
>>>>>>> 42d20ea1 (engines: a plan is exported to torchtitan and Megatron-LM by files of data)
    "rank_process", "run_cluster_rank", "run_host", "run_rank",
]  # fmt: skip
