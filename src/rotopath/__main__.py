"""Run the command `rotopath` when Python is called with `python -m rotopath`."""

from rotopath.cli import app

app(prog_name="rotopath")
