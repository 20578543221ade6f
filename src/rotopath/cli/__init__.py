"""The command line: parses, calls, prints. Modules are imported only when a command needs them."""

from rotopath.cli import looking, running, studies, tissue  # noqa: F401  # in the order of their commands' help
from rotopath.cli.door import app

__all__ = ["app"]
