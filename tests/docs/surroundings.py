"""What the pages take for granted: files and runs that a reader has, and what nobody has here."""

from pages import printed_file

HUB = "needs the hub of Hugging Face"
HERE = "needs a machine, a server or a store that is not here"
GPU = "needs GPUs"
MINUTES = "takes many minutes"
BENCH = "runs for minutes on tables that are no part of the page"

NOT_RUN = {
    r"make |git clone |pip install ": "sets up what the tests run in",
    r"scripts/gpu-first-run.sh": "tests/benchmarks/test_gpu_first_run.py runs it",
    r"hf download ": HUB,
    r"windlass \w+ hf:(smollm2|vit)\b": HUB,
    r"windlass import smollm2": HUB,
    r"windlass export last --to hf:my-(vit|model)": HUB,
    r"windlass train hf:my-33b ": HUB,
    r"windlass train vit-b16 data.format=images data.source=imagenet": "needs ImageNet",
    r"windlass train llama3-8b ": GPU,
    r"windlass train gpt2-124m train.steps=200": GPU,
    r"python benchmarks/": BENCH,
    r"windlass validate TABLE.csv": BENCH,
    r"windlass doctor": MINUTES,
    r"windlass machines add windlass-doctor.toml": "follows `windlass doctor`",
    r"windlass plan gpt2-355m --on amd-epyc-x2": "follows `windlass doctor`",
    r"windlass recipe .*--run ": MINUTES,
    r"windlass smallest-machine": MINUTES,
    r"windlass runs publish|windlass runs .*--runs postgresql": HERE,
    r"windlass serve|windlass sync|curl ": HERE,
    r"windlass mirror .*mlflow:http": HERE,
    r"windlass import-runs": "needs the store of another tracker",
    r"windlass launch .*/data/runs": "writes to a volume of the cluster",
}
"""Command lines that are parsed but not run, by a pattern of their beginning, and why."""

NAMES = {"MODEL": "gpt-tiny", "MACHINE": "h100"}
EXPERTS = {"MODEL": "moe-tiny"}
PAGE_NAMES = {"docs/guide/data-parallelism.md": EXPERTS}
"""What a reader puts in place of a name in capitals."""

_SMALL = (
    "model.layers=2 model.width=64 model.heads=2 train.sequence=64 train.batch=4"
    " data.limit_bytes=300000 compile=false"
)
_ONE_DEVICE = "parallel.pipeline=1 parallel.tensor=1 parallel.data=1 phases=3"
_TRAIN = f"windlass train gpt-tiny {_SMALL}"


def _stopped(folder: str, keys: str = "") -> str:
    """A run that was stopped behind its first checkpoints."""
    return f"""{_TRAIN} train.steps=400 train.save_every=15 --folder {folder} {keys} & started=$!
until test -d {folder}/checkpoints/step-00000045; do kill -0 $started || exit 1; sleep 0.2; done
kill $started; wait $started; test $? -eq 130"""


_LLAMA = (
    "windlass train llama-tiny model.layers=2 train.steps=2 train.batch=4 train.sequence=128"
    " data.limit_bytes=300000 compile=false --folder runs/base && windlass export base --to hf:my-llama"
)
_CHATS = """for n in $(seq 300); do
    echo "{\\"prompt\\": \\"$n + 1 = \\", \\"completion\\": \\"$((n + 1))\\"}"
done"""
_TEXTS = """for n in $(seq 300); do echo "{\\"text\\": \\"note $n of a long day, written down\\"}"; done"""
_NOTES = "mkdir -p notes && cp /etc/services notes/ 2>/dev/null; seq 9000 > notes/numbers.txt"
_MODEL = """cat > my_model.py <<'END'
from torch import nn


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.fc1, self.fc2 = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.fc2(nn.functional.gelu(self.fc1(self.norm(x))))


def build(layers=4, width=256):
    return nn.Sequential(
        nn.Embedding(4096, width), *(Block(width) for _ in range(layers)), nn.Linear(width, 4096)
    )
END"""

BEFORE = {
    "docs/guide/chat-data.md": {
        "": f"""{_CHATS} > chats.jsonl; {_LLAMA}; mv my-llama model
echo '{{"messages": [{{"role": "user", "content": "?"}}]}}' > bad.jsonl
echo '{{"messages": [{{"role": "asistant", "content": "4"}}, {{"role": "user"}}]}}' >> bad.jsonl; echo '{{x' >> bad.jsonl""",
    },
    "README.md": {
        "windlass resume last": _stopped("runs/stopped"),
        f"windlass resume last {_ONE_DEVICE}": _stopped(
            "runs/stopped-8",
            "parallel.pipeline=2 parallel.tensor=2 parallel.data=2"
            " sharding.parameters=2 sharding.optimizer=2",
        ).replace("400", "120"),
    },
    "docs/quickstart.md": {"windlass resume": _stopped("runs/stopped")},
    "docs/guide/checkpoints-and-resume.md": {
        "windlass resume": _stopped("runs/first"),
        "windlass resume RUN parallel.data=4 --elastic": _stopped("runs/RUN", "train.keep=99"),
        f"windlass resume last {_ONE_DEVICE}": _stopped("runs/other"),
        "windlass train --from RUN@300 data.source=books": "mkdir books; seq 90000 > books/numbers",
        "windlass resume last": "echo '# edited' >> $(ls -dt runs/*/ | head -1)request.toml",
    },
    "docs/guide/clusters.md": {
        "": """windlass machines new cluster device=h100 devices=4 hosts=2 network=100Gb/s
mkdir my-text; seq 90000 > my-text/numbers.txt
python3 - <<'END'
from tokenizers import ByteLevelBPETokenizer
from pathlib import Path

tokenizer = ByteLevelBPETokenizer()
ends = ["<|endoftext|>"]
tokenizer.train("my-text/numbers.txt", vocab_size=300, show_progress=False, special_tokens=ends)
Path("gpt2").mkdir()
tokenizer.save("gpt2/tokenizer.json")
END""",
    },
    "docs/guide/comparing-runs.md": {
        "": f"""{_TRAIN} train.steps=4 --folder runs/1a2b3c; {_TRAIN} train.steps=4 --folder runs/GOOD
{_TRAIN} train.steps=4 train.learning_rate=0.005 --folder runs/BAD""",
    },
    "docs/guide/data.md": {
        "": f"""mkdir books; seq 900 > books/a.txt; seq 500 > books/b.txt; seq 300 > val.txt
{_TEXTS} > code.jsonl""",
    },
    "docs/guide/dataflow.md": {"": _MODEL},
    "docs/guide/your-own-model.md": {
        "": f"cat > my_model.py <<'END'\n{printed_file('docs/guide/your-own-model.md', 'my_model.py')}END",
    },
    "docs/guide/evaluation.md": {
        "": f"""{_TRAIN} train.steps=4
cat > sums.yaml <<'END'
task: sums
dataset_path: json
dataset_kwargs: {{data_files: {{test: sums.jsonl}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{context}}}}"
doc_to_choice: choices
doc_to_target: answer
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
END
echo '{{"context": "1 + 1 =", "choices": [" 2", " 3"], "answer": 0}}' > sums.jsonl
sed '/choice:/d; s/multiple_choice/loglikelihood/; s/answer/target/; s/acc_norm/perplexity/' sums.yaml |
    sed 's/sums/targets/' > targets.yaml
echo '{{"context": "1 + 1 =", "target": " 2"}}' > targets.jsonl
sed '/choice:/d; s/multiple_choice/loglikelihood_rolling/; s/answer/"{{{{text}}}}"/' sums.yaml |
    sed 's/"{{{{context}}}}"/""/; s/acc_norm/byte_perplexity/; s/acc/bits_per_byte/; s/sums/texts/' > texts.yaml
echo '{{"text": "one and one are two"}}' > texts.jsonl""",
    },
    "docs/guide/fine-tuning.md": {
        "": f"""{_LLAMA}; {_NOTES}; {_TEXTS} > more.jsonl
for n in $(seq 300); do echo "{{\\"text\\": \\"review $n\\", \\"label\\": $((n % 3))}}"; done > reviews.jsonl
for n in $(seq 300); do
    echo "{{\\"premise\\": \\"$n\\", \\"hypothesis\\": \\"$n\\", \\"label\\": $((n % 2))}}"
done > pairs.jsonl
windlass train bert-tiny model.layers=2 train.steps=2 train.batch=4 train.sequence=64 data.limit_bytes=300000
windlass export last --to hf:my-bert; {_TRAIN} train.steps=2 --folder runs/RUN""",
    },
    "docs/guide/images.md": {
        "": """python3 - <<'END'
import numpy
from PIL import Image
from pathlib import Path

for name in ("cat", "dog"):
    Path("photos", name).mkdir(parents=True)
    for index in range(40):
        pixels = numpy.random.default_rng(index).integers(0, 255, (32, 32, 3), dtype="uint8")
        Image.fromarray(pixels).save(f"photos/{name}/{index}.png")
END
cat > my_model.py <<'END'
from torch import nn


def build(width=16):
    return nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(width, 2),
    )
END""",
    },
    "docs/guide/judging-runs.md": {
        "": f"""for seed in 1 2 3; do {_TRAIN} train.steps=4 train.seed=$seed; done
windlass plan gpt-tiny {_SMALL} --out plan.toml""",
    },
    "docs/guide/many-sites.md": {
        "": f"""{_TRAIN} train.steps=2 --runs pod-a/runs; {_TRAIN} train.steps=2 --runs pod-b/runs""",
    },
    "docs/guide/record.md": {
        "": f"""{_TRAIN} train.steps=4 --folder runs/3f9a21; {_TRAIN} train.steps=4
windlass runs tag last candidate old""",
    },
    "docs/guide/sparse-training.md": {"": _MODEL},
    "docs/guide/sweeps.md": {
        "windlass sweep show gpt-tiny-1a2b3c --picture sweep.svg": f"windlass sweep gpt-tiny {_SMALL}"
        " train.steps=4 train.learning_rate=1e-3,1e-2 --name gpt-tiny-1a2b3c",
    },
    "docs/guide/timelines-and-figures.md": {"": f"{_TRAIN} train.steps=4 --folder runs/RUN"},
    "docs/guide/proving-a-plan.md": {
        "windlass check plan.toml --faults": f"windlass plan gpt-tiny {_SMALL} --out plan.toml",
    },
}
"""What a reader has before a line of a page; before its first one where no line is named."""

ENDS = {
    "windlass judge last": (0, 1),
    "windlass fit  gpt-tiny --memory 400MiB batch.micro=16": (0, 1),
    "windlass bisect GOOD BAD --metric loss": (0, 1),
    "windlass plan gpt3-175b --on ipu-pod256 train.batch=128 train.sequence=2048 parallel.pipeline=8"
    " parallel.tensor=8 parallel.data=4 batch.micro=1": (2,),
}
"""Exit codes of commands that answer a question, and of one whose page says that it does not fit."""
