"""Tables for the terminal: models, what data sets hold, scores.

What the doctor found, for the terminal: each line has a mark, a name and plain words; colours only underline.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rotopath.data.dataset import Dataset, problems
from rotopath.data.formats import HOLDS, Check
from rotopath.model_file import WEIGHTS
from rotopath.models import Architecture
from rotopath.runs import METRICS, PROVENANCE, read_info
from rotopath.selftest import SelfTest, State

MOST_COLUMNS = 5  # of counts side by side, for a terminal of 80 characters


def pretrained_table(folders: Sequence[Path]) -> Group:
    """Pretrained models, from their files: what each is for, how well it does, and who may use it."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for title in ("name", "task", "µm/px", "test score", "size", "use"):
        table.add_column(title, justify="right" if title in ("µm/px", "size") else "left", no_wrap=True)
    for folder in folders:
        task, test = read_info(folder).task, _read(folder / METRICS)["test"]
        score = task.score_name
        table.add_row(
            Text(folder.name, "bold"),
            task.name,
            f"{task.spacing_um_px:g}",
            f"{score.replace('f1', 'F1')} {test[score]:.3f}",
            f"{(folder / WEIGHTS).stat().st_size // 1000} kB",
            "any" if _read(folder / PROVENANCE)["data"]["commercial"] else "not commercial",
        )
    legend = (
        "Part of the package, no download; trained on small samples of real data.\n"
        "None is for clinical use. Not commercial: a limit of the data, which the weights\n"
        'inherit. In Python: rp.load("NAME"). In a shell: rotopath predict NAME, evaluate\n'
        "NAME, export NAME; rotopath models NAME for its card: data, terms, scores, limits.\n"
    )
    return Group(Text("Pretrained models", style="bold"), table, Text(legend, style="dim"))


def architecture_table(architecture: Architecture, orientations: Sequence[int]) -> Group:
    """Every layer with its output size, and its channels and weights for each number of orientations."""
    a = architecture
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("\nlayer", no_wrap=True)
    table.add_column("\npx", justify="right")
    for n in orientations:
        table.add_column("\nc", justify="right")
        table.add_column(f"N={n}\nw", justify="right")
    channels = [a.channels(n) for n in orientations]
    weights = [a.weights(n) for n in orientations]
    sizes = a.sizes(a.input_px)
    for i, size in enumerate(sizes):
        counts = [str(count) for c, w in zip(channels, weights, strict=True) for count in (c[i], w[i])]
        table.add_row(_stage_name(a, i), str(size), *counts)
    table.add_row(f"{a.projection} over orientations", str(sizes[-1]), *[x for c in channels for x in (str(c[-1]), "")])
    head = "Conv 1×1, BN" if a.head_norm else "Conv 1×1"
    table.add_row(head, str(sizes[-1]), *[x for w in weights for x in (str(a.outputs), str(w[-1]))], end_section=True)
    table.add_row("total", "", *[x for w in weights for x in ("", str(sum(w)))], style="bold")
    legend = (
        f"px: side of the output for an image of {a.input_px} px; c: channels; w: weights.\n"
        f"Lift and GConv have batch norm and ReLU. "
        f"Receptive field {a.receptive_field} px, stride {a.stride} px.\n"
        f"Takes images with sides of {a.receptive_field} + {a.size_step}·k px.\n"
    )
    if any(stage.skip is not None for stage in a.stages):
        legend = f"Up 2, join k: enlarged twofold, and joined with the output of layer k before its pool.\n{legend}"
    return Group(Text(f"{a.name}: {a.task}", style="bold"), table, Text(legend, style="dim"))


def data_table(check: Check) -> Group:
    """What each split holds, with the published numbers in parentheses, and every finding below."""
    dataset = check.dataset
    quantities = list(dict.fromkeys(name for counts in check.counts.values() for name in counts))
    rows = {
        split: [_count(counts[name], dataset.published.get(split, {}).get(name)) for name in quantities]
        for split, counts in check.counts.items()
    }
    rows["all"] = [_count(sum(counts[name] for counts in check.counts.values())) for name in quantities]
    table = _tabulate(quantities, rows)
    parts: list[Text | Table] = [
        Text(f"{dataset.source}, {HOLDS[dataset.annotated]}: {dataset.root}", "bold"),
        table,
    ]
    parts.append(Text(_spacing_sentence(dataset), "dim"))
    if dataset.published:
        parts.append(Text("In parentheses: as published.", "dim"))
    parts.append(Text())
    if check.agreement:
        worst = min(check.agreement, key=check.agreement.__getitem__)
        mean = sum(check.agreement.values()) / len(check.agreement)
        sentence = (
            f"{len(check.agreement)} images have a label map and outlines; the label map counts. The two agree to an "
            f"AJI of {mean:.3f} on average, the least ({check.agreement[worst]:.3f}) in {worst}.\n"
        )
        parts.append(Text(sentence, "dim"))
    wrong = problems(check.findings)
    notes = [finding for finding in check.findings if not finding.is_problem]
    for title, found in (("problem", wrong), ("note", notes)):
        if found:
            parts.append(Text(f"{len(found)} {title}{'s' if len(found) > 1 else ''}", "bold"))
            parts += [Text(f"- {finding}") for finding in found]
            parts.append(Text())
    if not wrong:
        parts.append(Text("No problems.", "green"))
    return Group(*parts)


def _tabulate(names: Sequence[str], rows: Mapping[str, Sequence[str]]) -> Table:
    """A row for each split, the last of them the sum; where names are many, a column for each split instead."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 2, 0, 0), pad_edge=False)
    if len(names) > MOST_COLUMNS:
        table.add_column("")
        for split in rows:
            table.add_column(split, justify="right")
        for name, across in zip(names, zip(*rows.values(), strict=True), strict=True):
            table.add_row(name, *across)
        return table
    table.add_column("split")
    for name in names:
        table.add_column(name, justify="right")
    for split, counts in rows.items():
        last = split == list(rows)[-1]
        if last:
            table.add_section()
        table.add_row(split, *counts, style="bold" if last else "")
    return table


def score_table(title: str, metrics: Mapping[str, Mapping[str, object]]) -> Group:
    """The single numbers among the scores of each split, with their intervals."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("")
    for split in metrics:
        table.add_column(split, justify="right")
    for name in dict.fromkeys(name for scores in metrics.values() for name in scores):
        values = [_score(scores.get(name), scores.get(f"{name}_interval")) for scores in metrics.values()]
        if any(values) and not name.endswith("_interval"):
            table.add_row(name.replace("_", " "), *values)
        first = next(iter(metrics.values())).get(name)
        if isinstance(first, dict) and name == "rotation":
            for number, value in first["fair"].items():
                table.add_row(f"rotation, {number}", f"{value:.4f}")
        if isinstance(first, dict) and name == "classes":
            _add_classes(table, metrics)
    return Group(Text(title, "bold"), table, Text(_explain_intervals(metrics), "dim"))


def _add_classes(table: Table, metrics: Mapping[str, Mapping[str, object]]) -> None:
    """A row for each number of each class."""
    classes: list[Any] = [scores.get("classes", {}) for scores in metrics.values()]
    for name, numbers in classes[0].items():
        for key in numbers:
            values = [_score(each.get(name, {}).get(key), None) for each in classes]
            if any(values):
                table.add_row(f"{name}: {key}", *values)


def _explain_intervals(metrics: Mapping[str, Mapping[str, object]]) -> str:
    intervals = [value for scores in metrics.values() for key, value in scores.items() if key.endswith("_interval")]
    if not any(intervals):
        return "No intervals: there are too few patients, slides or patches to redraw.\n"
    redrawn = next(iter(metrics.values())).get("interval_over", "patients")
    unit = {"patches": "slides", "images": "patients"}.get(str(redrawn))
    unknown = f"; {unit} are not known, and with them intervals would be wider" if unit else ""
    return f"In brackets: 95 % intervals, redrawing {redrawn}{unknown}.\n"


def _read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def _score(value: object, interval: object) -> str:
    if isinstance(value, str | int):
        return str(value)
    if not isinstance(value, float):
        return ""
    if isinstance(interval, list):
        return f"{value:.3f} [{interval[0]:.3f}, {interval[1]:.3f}]"
    return f"{value:.3f}"


def _spacing_sentence(dataset: Dataset) -> str:
    spacings = [sample.spacing_um_px for sample in dataset.samples]
    if not spacings:
        return "No images."
    least, most = min(spacings), max(spacings)
    spread = f"{least:g} µm/px" if least == most else f"{least:g} to {most:g} µm/px"
    return f"Spacing of the images: {spread}; a model resamples them to its own."


def _count(count: int, published: int | None = None) -> str:
    shown = f"{count}" if count else "–"
    return shown if published is None else f"{shown} ({published})"


def _stage_name(architecture: Architecture, i: int) -> str:
    stage = architecture.stages[i]
    before = "" if stage.skip is None else f"Up 2, join {stage.skip + 1}, "
    kind = "GConv" if i else "Lift"
    behind = f", Pool {stage.pool}" if stage.pool > 1 else ""
    return f"{i + 1}  {before}{kind} {stage.kernel}×{stage.kernel}{behind}"


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


def outcome(one: SelfTest) -> Table:
    """The line of a self-test."""
    seconds = "" if one.state == "not tested" else f" ({one.seconds:.1f} s)"
    return _line(one.state, one.what, f"{one.state}: {one.detail}{seconds}")


def verdict(outcomes: Sequence[SelfTest]) -> Text:
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
