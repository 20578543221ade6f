"""`python -m rotopath` is the command `rotopath`."""

from rotopath.cli import app

app(prog_name="rotopath")
