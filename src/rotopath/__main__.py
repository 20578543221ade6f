"""`python -m rotopath` runs the command `rotopath`."""

from rotopath.cli import app

app(prog_name="rotopath")
