"""Reads the distributed section of files by NeMo AutoModel's own function, in its environment."""

import json
import sys
from pathlib import Path

import yaml
from nemo_automodel.recipes._dist_utils import parse_distributed_section

for path in sys.argv[1:]:
    content = yaml.safe_load(Path(path).read_text())
    read = parse_distributed_section(content["distributed"])
    pipeline = read["pipeline_config"]
    print(
        "PARSED",
        json.dumps(
            {
                "parallel.tensor": read["tp_size"],
                "parallel.pipeline": read["pp_size"],
                "parallel.context": read["cp_size"],
                "parallel.data": read["dp_size"],
                "sharding.replicate": read["dp_replicate_size"],
                "parts": len(pipeline.module_fqns_per_model_part) if pipeline else 1,
            }
        ),
    )
