"""`import_model` makes a run of a Hugging Face folder: trained elsewhere, with no step of ours."""

import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from rich.console import RenderableType

from windlass.answer import Shown
from windlass.atomic_files import free_disk_bytes
from windlass.errors import RequestError, StorageError
from windlass.flags import AnyPath, RunsFolder, Watch
from windlass.jobs import RUNS, base_of_adapters, own_tokenizer, plan
from windlass.models import find_model_folder, is_peft_folder
from windlass.schema import CHECKPOINT_FOLDER, CODE_FILE, ENVIRONMENT_FILE, TOKENIZER_FILE
from windlass.tracking import collect_environment, create_run_folder, snapshot_code
from windlass.training.inputs.run_data import save_model_config
from windlass.training.preconditions import verified_programs
from windlass.training.run_files import IMPORTED, run_documents
from windlass.units import format_bytes


class ShownRun(Shown[Path]):
    """The folder of a run that was made of an imported model."""

    def lines(self) -> Iterator[RenderableType]:
        """The run, and how its weights are trained on."""
        yield f"run     {self.value}"
        name = f"hf:{self.given['folder']}"
        yield f"train   windlass train {shlex.quote(name)}"

    def json_tree(self) -> object:
        """The run's folder."""
        return {"run": self.value}


def import_model(
    folder: AnyPath, *, root: RunsFolder = RUNS, progress: Watch = None
) -> Annotated[Path, ShownRun]:
    """Make a run of a Hugging Face folder, to be sampled, evaluated and exported.

    For example: `windlass import smollm2`. To train its weights, name `hf:smollm2` as the model.
    Weights are copied one at a time and keep their types, and so does the tokenizer. The folder's
    `config.json` and its other small files are read where they are.

    Args:
        folder: A folder with a `config.json` and safetensors, or one of PEFT, whose adapters then
            stand beside the base that it names.
        root: The folder that holds the run folders.
        progress: Called with how far planning is.

    Returns:
        The run folder.

    Raises:
        RequestError: what is named is a `config.json`, which has no weights.
        WindlassError: what is wrong with the folder, the machine or the disk.
    """
    from windlass.data import load_tokenizer
    from windlass.runtime import Manifest, import_weights

    path = Path(folder).expanduser().resolve()
    is_adapter = is_peft_folder(path)
    name = base_of_adapters(path) if is_adapter else f"hf:{path}"
    weights = find_model_folder(name).weights
    if weights is None:
        raise RequestError(f"`{folder}` is a file without weights; name its folder")
    words = (f"lora.adapter={path}",) if is_adapter else ()
    planned = plan(name, *words, progress=progress)
    request, labels = planned.request, planned.plan
    stack = planned.objects.stack(request.model_identity, seed=request.train.seed)
    _require_space(weights, Path(root))
    code = snapshot_code(None)
    documents = run_documents(planned, verified_programs(planned))
    documents |= {ENVIRONMENT_FILE: collect_environment(sys.argv, code), CODE_FILE: code}
    meta = {
        "model": name, "machine": planned.machine.name, "steps": 0, "objects": [],
        IMPORTED: str(path),
    }  # fmt: skip
    with create_run_folder(Path(root), path.name, documents=documents, meta=meta) as run:
        run.seal(*save_model_config(name, run.path))
        tokenizer = own_tokenizer(name)
        if tokenizer is not None:
            run.seal(*load_tokenizer(tokenizer).save(run.path / TOKENIZER_FILE))
        manifest = Manifest(
            step=0, samples=0, seed=request.train.seed, plan=labels.label, graph=labels.graph,
            files={},
        )  # fmt: skip
        import_weights(stack, run.path / CHECKPOINT_FOLDER, manifest)
        run.end("finished")
        return run.path


def _require_space(folder: Path, root: Path) -> None:
    """Refuses to copy weights to a disk that lacks the space."""
    needed = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    free = free_disk_bytes(root)
    if needed > free:
        raise StorageError(
            f"the weights take {format_bytes(needed)} under `{root}`, where {format_bytes(free)} "
            "are free; free some, or name a folder on another disk with `--runs`"
        )
