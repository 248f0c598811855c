"""Makes DeepSpeed's configuration object of files, in DeepSpeed's environment."""

import json
import sys
from pathlib import Path

from deepspeed.runtime import config as deepspeed_config
from deepspeed.runtime.config import DeepSpeedConfig

# It asks its process group for this rank before it asks how many there are.
deepspeed_config.dist.get_rank = lambda *_: 0


class Ranks:
    """Stands for the ranks of a run, which the configuration counts."""

    def __init__(self, count):
        self.count = count

    def get_data_parallel_world_size(self):
        return self.count


for path in sys.argv[1:]:
    content = json.loads(Path(path).read_text())
    micro, steps = content["train_micro_batch_size_per_gpu"], content["gradient_accumulation_steps"]
    ranks = content["train_batch_size"] // (micro * steps)
    config = DeepSpeedConfig(content, mpu=Ranks(ranks))
    print(
        "PARSED",
        json.dumps(
            {
                "batch.micro": config.train_micro_batch_size_per_gpu,
                "batch.accumulation": config.gradient_accumulation_steps,
                "batch.global": config.train_batch_size,
                "sharding.kind": {0: "none", 1: "optimizer", 3: "parameters"}[
                    int(config.zero_config.stage)
                ],
                "train.clip": config.gradient_clipping,
            }
        ),
    )
