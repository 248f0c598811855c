"""`windlass machines`, which lists, and its commands `list`, `show`, `new`, `add`, `compare`."""

from cyclopts import App

from windlass import jobs
from windlass.cli.command import as_command

app = App(
    name="machines",
    help="List the machines that can be named; show, write or add one; compare them for a model.",
)
app.default(as_command(jobs.machines))
app.command(as_command(jobs.machines), name="list", sort_key=0)
app.command(as_command(jobs.show_machine), name="show", sort_key=1)
app.command(as_command(jobs.write_machine), name="new", sort_key=2)
app.command(as_command(jobs.add_machine), name="add", sort_key=3)
app.command("windlass.cli.command:api.compare.compare_machines", name="compare", sort_key=4)
