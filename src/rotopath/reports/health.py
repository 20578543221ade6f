"""What the doctor found, for the terminal: each line has a mark, a name and plain words; colours only underline."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rotopath.doctor import Outcome, State

NAME_WIDTH = 20
MARKS: Mapping[State, tuple[str, str]] = {  # blue and orange are told apart by all eyes
    "works": ("✓", "dodger_blue2"),
    "fails": ("✗", "bold dark_orange"),
    "not tested": ("–", "dim"),
}


def findings(found: Mapping[str, Any]) -> Group:
    """Versions, devices, readers and extras."""
    software = found["software"]
    commit = f", commit {software['commit']}" if software["commit"] else ""
    packages = {name: version for name, version in software["packages"].items() if name != "torch"}
    lines: list[RenderableType] = [
        _title("Software"),
        _line("works", "rotopath", f"{software['rotopath']}{commit}"),
        _line("works", "Python", f"{software['python']} on {software['system']}"),
        _line("works", "torch", f"{software['packages']['torch']}, built {software['torch_build']}"),
        _line("works", "others", ", ".join(f"{name} {version}" for name, version in packages.items())),
        _title("Devices"),
        *map(_device, found["devices"]),
        _title("Readers"),
        *map(_reader, found["readers"]),
        _title("Extras"),
        *(_extra(name, about) for name, about in found["extras"].items()),
    ]
    return Group(*lines)


def self_test_title() -> Text:
    return _title("Self-test")


def outcome(one: Outcome) -> Table:
    """The line of a self-test."""
    seconds = "" if one.state == "not tested" else f" ({one.seconds:.1f} s)"
    return _line(one.state, one.what, f"{one.state}: {one.detail}{seconds}")


def verdict(outcomes: Sequence[Outcome]) -> Text:
    failed = [one.what for one in outcomes if one.state == "fails"]
    if not failed:
        return Text("\n✓ All that is installed works.", MARKS["works"][1])
    return Text(
        f"\n✗ {len(failed)} of {len(outcomes)} self-tests failed: {'; '.join(failed)}. "
        f"To report it, add what `rotopath doctor --json` prints.",
        MARKS["fails"][1],
    )


def _device(about: Mapping[str, Any]) -> Table:
    if about["device"] == "CPU":
        return _line("works", "CPU", f"{about['name']}, {about['cores']} cores, of which torch uses {about['threads']}")
    if about["name"] is None:
        return _line("not tested", "GPU", f"none in use ({about['reason']}); all runs on the CPU, slower")
    bf16 = "bf16" if about["bf16"] else "no bf16"
    return _line("works", about["device"], f"{about['name']}, {about['memory_gb']} GB, {bf16}")


def _reader(about: Mapping[str, Any]) -> Table:
    if not about["installed"]:
        return _line("not tested", about["reader"], f"not installed; reads {about['reads']}")
    if "reason" in about:
        return _line("fails", about["reader"], f"installed, and cannot be loaded: {about['reason']}")
    return _line("works", about["reader"], f"{about['version']}; reads {about['reads']}")


def _extra(name: str, about: Mapping[str, Any]) -> Table:
    if not about["missing"]:
        return _line("works", name, f"installed; for {about['for']}")
    return _line("not tested", name, f"for {about['for']}; missing {', '.join(about['missing'])}: {about['install']}")


def _title(words: str) -> Text:
    return Text(f"\n{words}", "bold")


def _line(state: State, name: str, words: str) -> Table:
    mark, style = MARKS[state]
    grid = Table.grid(padding=(0, 1))
    grid.add_column(width=1)
    grid.add_column(width=NAME_WIDTH)
    grid.add_column(overflow="fold")
    grid.add_row(Text(mark, style), Text(name, style if state == "fails" else ""), Text(words))
    return grid
