"""`windlass stacks`: the software stacks that a prediction can be for."""

from windlass.api import AsJson
from windlass.cli.console import console, print_json
from windlass.report import stack_table, stacks_table
from windlass.stacks import load_stack, stack_constants, stack_names


def stacks(name: str | None = None, *, as_json: AsJson = False) -> None:
    """List the software stacks that `--stack` can name, or show one with all its constants.

    For example: `windlass stacks nemo`.

    Args:
        name: A stack, or a `.toml` file of your own; all of them in short if not given.
        as_json: Print the stacks, or the one with its constants, as JSON.
    """
    if name is None:
        known = [load_stack(each) for each in stack_names()]
        if as_json:
            print_json(known)
        else:
            console.print(stacks_table(known, console.width))
        return
    stack = load_stack(name)
    constants = stack_constants(stack)
    if as_json:
        print_json({"stack": stack, "constants": constants})
    else:
        console.print(stack_table(stack, constants))
