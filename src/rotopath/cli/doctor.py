"""`rotopath doctor`: list installed and missing software and hardware, and run self-tests.

Each line contains a mark, a name and a description. Users who see no colors lose no information, because mark and
description contain the same information as the color.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rotopath.reports import terminal

if TYPE_CHECKING:
    from rotopath.selftest import SelfTestResult, State

NAME_WIDTH = 20
MARKS: Mapping["State", tuple[str, str]] = {  # mark and style; color-blind people can distinguish blue and orange
    "works": ("✓", "dodger_blue2"),
    "fails": ("✗", "bold dark_orange"),
    "not tested": ("–", "dim"),
}


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON, for a bug report.")] = False,
) -> None:
    """List installed and missing packages and devices, and run self-tests.

    The exit code is 0 if no self-test fails, and 1 if a self-test fails.
    """
    from rotopath.selftest import describe_installation, run_self_tests

    installation = describe_installation()
    if not as_json:
        terminal.console.print(installation_lines(installation), _title("Self-test"), highlight=False)
    results = []
    for result in run_self_tests():
        results.append(result)
        if not as_json:
            terminal.console.print(self_test_line(result))
    if as_json:
        content = installation | {"self_tests": [asdict(result) for result in results]}
        typer.echo(json.dumps(content, indent=1, ensure_ascii=False))
    else:
        terminal.console.print(verdict(results))
    if any(result.state == "fails" for result in results):
        raise typer.Exit(1)


def installation_lines(installation: Mapping[str, Any]) -> Group:
    """Return lines about versions, devices, image readers and extras (groups of optional packages).

    `installation` is the result of `selftest.describe_installation`.
    """
    software = installation["software"]
    commit = f", commit {software['commit']}" if software["commit"] else ""
    packages = {name: version for name, version in software["packages"].items() if name != "torch"}
    lines: list[RenderableType] = [
        _title("Software"),
        _line("works", "rotopath", f"{software['rotopath']}{commit}"),
        _line("works", "Python", f"{software['python']} on {software['system']}"),
        _line("works", "torch", f"{software['packages']['torch']}, built {software['torch_build']}"),
        _line("works", "other packages", ", ".join(f"{name} {version}" for name, version in packages.items())),
        _title("Devices"),
        *map(device_line, installation["devices"]),
        _title("Readers of image files"),
        *map(_reader_line, installation["readers"]),
        _title("Extras (optional packages)"),
        *(_extra_line(name, extra) for name, extra in installation["extras"].items()),
    ]
    return Group(*lines)


def device_line(device: Mapping[str, Any]) -> Table:
    """Return a line about the CPU, about a GPU, or about the reason why no GPU can be used.

    `device` is one of the entries "devices" of `selftest.describe_installation`.
    """
    if device["device"] == "CPU":
        return _line("works", "CPU", f"{device['name']}, {device['cores']} cores (torch uses {device['threads']})")
    if device["name"] is None:
        return _line("not tested", "GPU", f"none ({device['reason']}); everything runs on the CPU, which is slower")
    bf16 = "supports bf16" if device["bf16"] else "does not support bf16"
    return _line("works", device["device"], f"{device['name']}, {device['memory_gb']} GB, {bf16}")


def self_test_line(result: "SelfTestResult") -> Table:
    """Return a line with the name, outcome and duration of a self-test."""
    seconds = "" if result.state == "not tested" else f" ({result.seconds:.1f} s)"
    return _line(result.state, result.what, f"{result.state}: {result.detail}{seconds}")


def verdict(results: Sequence["SelfTestResult"]) -> Text:
    """Return the last line of the output: everything works, or which self-tests failed and what to do."""
    failed = [result.what for result in results if result.state == "fails"]
    if not failed:
        return Text("\n✓ Everything that is installed works.", MARKS["works"][1])
    return Text(
        f"\n✗ {len(failed)} of {len(results)} self-tests failed: {'; '.join(failed)}. "
        f"If you report a failure, add the output of `rotopath doctor --json`.",
        MARKS["fails"][1],
    )


def _reader_line(reader: Mapping[str, Any]) -> Table:
    if not reader["installed"]:
        return _line("not tested", reader["reader"], f"not installed; would read {reader['reads']}")
    if "reason" in reader:
        return _line("fails", reader["reader"], f"installed, but cannot be loaded: {reader['reason']}")
    return _line("works", reader["reader"], f"{reader['version']}; reads {reader['reads']}")


def _extra_line(name: str, extra: Mapping[str, Any]) -> Table:
    if not extra["missing"]:
        return _line("works", name, f"installed; for {extra['for']}")
    missing, command = ", ".join(extra["missing"]), extra["install"]
    return _line("not tested", name, f"for {extra['for']}; not installed: {missing}; to install, run {command}")


def _title(text: str) -> Text:
    return Text(f"\n{text}", "bold")


def _line(state: "State", name: str, description: str) -> Table:
    mark, style = MARKS[state]
    grid = Table.grid(padding=(0, 1))
    grid.add_column(width=1)
    grid.add_column(width=NAME_WIDTH)
    grid.add_column(overflow="fold")
    grid.add_row(Text(mark, style), Text(name, style if state == "fails" else ""), Text(description))
    return grid
