"""The report of a study: tables and figures from result files alone, as one page, CSV, PNG and PDF.

In: the folder of a study. Out: `report.html`, `results.csv` (a row an evaluation), `summary.csv` (a row a network and
training set) and figures, in a folder of their own.
"""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path

import torch
from torch.utils.flop_counter import FlopCounterMode

import rotopath
from rotopath import runs
from rotopath.models.protocols import unwrap
from rotopath.recipe import NetworkOptions, Recipe, write_recipe
from rotopath.reports.figures import Section, write_page
from rotopath.reports.study_figures import PATCHES, SCORES, draw_curves, draw_maps, draw_polar, draw_scores
from rotopath.studies.results import Estimate, StudyResult, Summary, read_results, summarise
from rotopath.tasks import PAPER, Classify, Detect, Segment
from rotopath.writing import write_text

# Lafarge et al. (2020), with all of the training data: mean and deviation of three seeds.
PUBLISHED: Mapping[str, Mapping[int, str]] = {
    "mitosis": {1: "0.556 ± 0.016", 8: "0.626 ± 0.015"},
    "nuclei": {1: "0.754 ± 0.006", 8: "0.771 ± 0.006"},
    "tumor": {1: "0.863 ± 0.003", 8: "0.892 ± 0.004"},
}


def report(study: Path | str, out: Path | str | None = None) -> Path:
    """Write the page, tables and figures of a study into a folder, its own `report` when left out; gives the page."""
    study = Path(study)
    out = Path(out) if out else study / "report"
    results = read_results(study)
    summaries = summarise(results)
    out.mkdir(parents=True, exist_ok=True)
    _write_csv(out / "results.csv", [_result_row(one) for one in results])
    _write_csv(out / "summary.csv", [_summary_row(one) for one in summaries])
    sections: list[Section] = []
    for part in dict.fromkeys(one.part for one in results):
        sections += _part_sections(
            part,
            [one for one in results if one.part == part],
            [one for one in summaries if one.group.part == part],
            out,
        )
    sections.append(_cost(results))
    lead = (
        "Networks that look in N orientations at once, against an ordinary one (N=1) of about as many weights, trained "
        "on the same windows. Scores are those of the test set, at the operating point of the validation set."
    )
    done = len({one.folder for one in results})
    footer = f"{done} runs, {len(results)} evaluations. Written by rotopath {rotopath.__version__}."
    return write_page(out / "report.html", f"rotopath: the study {study.name}", lead, sections, footer)


def _part_sections(part: str, results: list[StudyResult], summaries: list[Summary], out: Path) -> list[Section]:
    recipe, score = results[0].recipe, results[0].recipe.kind.score_name
    regimes = {one.recipe.regime: _regime(recipe, one.recipe.regime) for one in results}
    fullest = next(iter(regimes))
    full = [one for one in results if one.recipe.regime == fullest and one.rotations == 1]
    first = [one for one in full if one.recipe.seed == full[0].recipe.seed]
    figures = out / "figures"
    sections = [
        Section(
            f"{part}: scores",
            f"{SCORES.get(score, score)} by training data. Boxes reach from one standard deviation over seeds below "
            f"the mean to one above; dots are seeds. {_data(results[0])}",
            picture=draw_scores(summaries, score, regimes, figures / f"{part}-scores.png"),
        ),
        Section(
            "",
            "Mean and standard deviation over seeds. In brackets: 95 % intervals of the mean, and of its difference to "
            "N=1 of the same seeds, as it is and with the mean prediction over turned inputs; for other patients "
            "(patches where slides are not known) and other seeds, if there are several. Scatter is the standard "
            "deviation of predictions when inputs turn; decisions change if they depend on the angle.",
            [_head(score), *_rows(summaries, regimes)],
        ),
        _published(recipe, summaries, fullest, regimes[fullest]),
    ]
    if polar := draw_polar(first, _label_names(recipe), figures / f"{part}-polar.png"):
        sections.append(
            Section(
                f"{part}: predictions as windows turn",
                "Radius: the probability (of several classes, that of the likeliest), from 0 in the middle to 1 at the "
                "rim; a network that does not care draws a "
                f"circle. The {PATCHES} windows on which N={first[0].recipe.orientations} scatters most, first "
                f"seed, training data: {regimes[fullest]}.",
                picture=polar,
            )
        )
    if maps := draw_maps(first, figures / f"{part}-maps.png"):
        sections.append(
            Section(
                f"{part}: maps as fields rotate",
                "Borders of objects (or objects, where a task has no borders) that networks see in fields rotated by "
                "sixteen angles, rotated back: their mean in grey, and their standard deviation from white to red. "
                f"First seed, training data: {regimes[fullest]}.",
                picture=maps,
            )
        )
    sections.append(
        Section(
            f"{part}: learning curves",
            f"The loss on validation windows after every epoch, every seed, training data: {regimes[fullest]}.",
            picture=draw_curves(full, figures / f"{part}-curves.png"),
        )
    )
    sections.append(
        Section(
            f"{part}: settings",
            "One recipe; runs differ in orientations, regime and seed alone. "
            f"{_versions(results)} Each run folder holds its own recipe, log, weights and provenance.",
            details=write_recipe(first[-1].recipe),
        )
    )
    return sections


def _data(result: StudyResult) -> str:
    about = result.provenance["data"]
    return f"Data: {about['source']}, {about['images']:,} images (fingerprint {about['fingerprint']})."


def _label_names(recipe: Recipe) -> Sequence[str]:
    """What the labels of rotated windows stand for."""
    task = recipe.make_task()
    return (task.absent, task.class_names[0].lower()) if task.is_single else task.output_names


def _published(recipe: Recipe, summaries: Sequence[Summary], fullest: float | None, regime: str) -> Section:
    """The paper's numbers beside ours, or a plain word why they are no measure of them."""
    if recipe.task not in PAPER or recipe.classes:
        return Section("", "The paper has no such task, so there is nothing to compare these scores with.")
    reason = incomparable(summaries[0].results[0])
    if reason is not None:
        return Section("", f"These scores cannot be compared with those of Lafarge et al. (2020): {reason}")
    ours = {
        one.group.orientations: _spread(one)
        for one in summaries
        if one.group.regime == fullest and one.group.rotations == 1
    }
    rows = [[f"N={n}", paper, ours.get(n, "–")] for n, paper in PUBLISHED[recipe.task].items()]
    text = f"The test set has as many cases as the paper's; training data: {regime}, and settings as below."
    if recipe.kind is Segment:
        text += " Hits have an IoU of at least one half, and the paper may count otherwise (rotopath evaluate --rule)."
    return Section("", f"Beside the paper's. {text}", [["", "Lafarge et al. (2020)", "here"], *rows])


def incomparable(result: StudyResult) -> str | None:
    """Why a score says nothing about the paper's, if it does not: it is of other test data."""
    source, scores, kind = result.provenance["data"]["source"], result.scores, result.recipe.kind
    if "synthetic" in source:
        return "this tissue is synthetic."
    if kind is Classify and scores["images"] != 32768:
        return f"the paper tests on the 32,768 patches of PCam's test set, and here there are {scores['images']:,}."
    if kind is Detect and scores["hits"] + scores["missed"] != 533:
        mitoses = scores["hits"] + scores["missed"]
        return f"the paper tests on 533 mitoses in whole high-power fields of 11 cases, and here there are {mitoses}."
    if kind is Segment and len(scores["images"]) != 8:
        return f"the paper tests on 8 fields, and here there are {len(scores['images'])}."
    return None


def _head(score: str) -> list[str]:
    return [
        "data",
        "network",
        SCORES.get(score, score),
        "interval",
        "minus N=1",
        "minus N=1, turned",
        "scatter",
        "changed",
    ]


def _rows(summaries: Sequence[Summary], regimes: Mapping[float | None, str]) -> list[list[str]]:
    """A row for each summary; what training data it is about is said once."""
    rows = []
    for before, one in zip([None, *summaries], summaries, strict=False):
        same = before is not None and before.group.regime == one.group.regime
        rows.append(
            [
                "" if same else regimes[one.group.regime],
                one.group.label,
                _spread(one),
                _bracket(one.mean),
                _signed(one.over_plain),
                _signed(one.over_turned),
                "–" if one.scatter is None else f"{one.scatter:.4f}",
                "–" if one.changed is None else f"{one.changed:.1%}",
            ]
        )
    return rows


def _spread(one: Summary) -> str:
    """The mean, and the deviation over seeds where there are several."""
    return f"{one.mean.value:.3f}" + (f" ± {one.deviation:.3f}" if len(one.results) > 1 else "")


def _bracket(estimate: Estimate) -> str:
    return f"[{estimate.low:.3f}, {estimate.high:.3f}]" if estimate.has_interval else "–"


def _signed(difference: Estimate | None) -> str:
    if difference is None:
        return "–"
    interval = f" [{difference.low:+.3f}, {difference.high:+.3f}]" if difference.has_interval else ""
    return f"{difference.value:+.3f}{interval}"


def _cost(results: Sequence[StudyResult]) -> Section:
    """Weights, arithmetic and time of every network."""
    rows = []
    seen: dict[tuple[str, str, int, NetworkOptions], list[StudyResult]] = {}
    for one in results:
        if one.rotations == 1:
            recipe = one.recipe
            key = (recipe.task, recipe.network_name, recipe.orientations, recipe.network_options)
            seen.setdefault(key, []).append(one)
    for (task, name, n, options), members in sorted(seen.items(), key=lambda pair: (pair[0][:3], str(pair[0][3]))):
        network = unwrap(runs.build(members[0].recipe))
        weights = sum(parameter.numel() for parameter in network.parameters())
        minutes = [_minutes(one) for one in members]
        rows.append(
            [
                task,
                f"{name}, N={n}{_differing(options, seen)}",
                f"{weights:,}",
                f"{_operations(members[0]) / 1e9:.2g}",
                f"{sum(minutes) / len(minutes):.1f}",
            ]
        )
    return Section(
        "Cost",
        "Weights; floating-point operations for one window of training, in billions, the rotation of kernels included; "
        "and the mean duration of a run in minutes, of training and scoring, with whatever ran beside it or "
        "interrupted it. "
        f"Hardware: {', '.join(sorted({one.provenance['hardware']['device'] for one in results}))}.",
        [["task", "network", "weights", "GFLOP a window", "minutes a run"], *rows],
    )


def _differing(options: NetworkOptions, others: Iterable[tuple[str, str, int, NetworkOptions]]) -> str:
    """The options in which a network differs from others of this table."""
    every = [other[3] for other in others]
    differing = [key for key in options if any(other.get(key) != options[key] for other in every)]
    return "".join(f", {key} {options[key]}" for key in differing if any(key in other for other in every))


def _operations(result: StudyResult) -> int:
    network = runs.build(result.recipe)
    side = runs.describe_network(result.recipe, network).window_px
    module = unwrap(network).to("meta").eval()
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        module(torch.empty(1, 3, side, side))
    return int(counter.get_total_flops())


def _minutes(result: StudyResult) -> float:
    begun, finished = (datetime.fromisoformat(result.provenance[key]) for key in ("begun", "finished"))
    return (finished - begun).total_seconds() / 60


def _versions(results: Sequence[StudyResult]) -> str:
    about = [one.provenance for one in results]
    commits = sorted({str(one["commit"]) for one in about})
    torches = sorted({one["packages"]["torch"] for one in about})
    return f"rotopath {about[0]['rotopath']} (commit {', '.join(commits)}), torch {', '.join(torches)}."


def _regime(recipe: Recipe, regime: float | None) -> str:
    return "all" if regime is None else recipe.kind.describe_regime(regime)


def _result_row(one: StudyResult) -> dict[str, object]:
    turned = one.scores.get("rotation", {}).get("fair", {})
    return {
        "part": one.part,
        "task": one.recipe.task,
        "N": one.recipe.orientations,
        "regime": "all" if one.recipe.regime is None else f"{one.recipe.regime:g}",
        "seed": one.recipe.seed,
        "rotations": one.rotations,
        "score": one.recipe.kind.score_name,
        "test": f"{one.score:.4f}",
        "scatter": f"{turned['deviation']:.5f}" if turned else "",
        "changed": f"{turned['changed']:.4f}" if turned else "",
    }


def _summary_row(one: Summary) -> dict[str, object]:
    recipe = one.results[0].recipe
    return {
        "part": one.group.part,
        "task": recipe.task,
        "N": one.group.orientations,
        "regime": "all" if one.group.regime is None else f"{one.group.regime:g}",
        "rotations": one.group.rotations,
        "seeds": len(one.results),
        "score": recipe.kind.score_name,
        "mean ± deviation": _spread(one),
        "interval": _bracket(one.mean),
        "minus N=1": _signed(one.over_plain),
        "minus N=1 turned": _signed(one.over_turned),
        "scatter": "" if one.scatter is None else f"{one.scatter:.4f}",
        "changed": "" if one.changed is None else f"{one.changed:.3f}",
    }


def _write_csv(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_text(path, text.getvalue())
