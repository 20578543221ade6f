"""Write the report of a study: an HTML page, tables and figures.

The report contains the results of all finished runs of the study. The report folder contains `report.html`, the figures
as PNG and PDF, and these tables:

- `results.csv`: a row for each evaluation.
- `summary.csv`: a row for each network, with and without TTA, and each amount of training data.
- `claims.csv`: a row for each claim of the paper, with its answer.
- `designs.csv`: a row for each pair of networks of two parts that differ only in the options of their networks.
- `parts.csv`: a row for each part of the study: its data, its settings and its hardware.

An amount of training data is called a *regime*. N is the number of orientations of a network. TTA is test-time
augmentation: predictions are averaged over rotations of the input. "The paper" is Lafarge et al. (2020).
"""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from statistics import mean, stdev

import numpy as np

import rotopath
from rotopath import runs
from rotopath.models.protocols import unwrap
from rotopath.recipe import NetworkOptions, Recipe, format_recipe
from rotopath.reports.figures import Section, write_page
from rotopath.reports.study_figures import (
    FIELDS_SHOWN,
    SCORE_LABELS,
    WINDOWS_SHOWN,
    draw_curves,
    draw_maps,
    draw_rotated_windows,
    draw_scores,
)
from rotopath.studies.plan import count_operations
from rotopath.studies.results import (
    Claim,
    DesignComparison,
    Estimate,
    StudyResult,
    Summary,
    check_claims,
    check_provenance,
    find_designs,
    margin,
    read_results,
    summarize,
)
from rotopath.tasks import PAPER, Classify, Detect, Segment
from rotopath.writing import write_text

# Scores of Lafarge et al. (2020) by task and N, with all training data: mean and standard deviation over three seeds.
PUBLISHED: Mapping[str, Mapping[int, str]] = {
    "mitosis": {1: "0.556 ± 0.016", 8: "0.626 ± 0.015"},
    "nuclei": {1: "0.754 ± 0.006", 8: "0.771 ± 0.006"},
    "tumor": {1: "0.863 ± 0.003", 8: "0.892 ± 0.004"},
}
PCAM_TEST_PATCHES, AMIDA13_TEST_MITOSES, KUMAR_TEST_FIELDS = 32_768, 533, 8  # sizes of the paper's test sets
INTRODUCTION = (
    "Networks with N orientations, compared with ordinary CNNs (N=1). All networks of a task have about the same "
    "number of weights and were trained on the same windows. Scores were computed on the test set, with decision "
    "thresholds that were chosen on the validation set."
)
TABLE_TEXT = (
    "Mean and standard deviation over seeds. In brackets: 95 % confidence intervals. They include the variation "
    "between cases and, with several seeds, the variation between seeds. A case is a patient or, for patches, a slide; "
    "if patients or slides are unknown, each image or patch is a case. Minus N=1: the score minus the score of N=1 "
    "with the same seed, mean over seeds. Minus N=1 with TTA: the same, but minus the score of N=1 with test-time "
    "augmentation (predictions averaged over rotations of the input). For the last two columns, inputs were rotated by "
    "16 angles. Deviation: the standard deviation of the predicted probability over the angles, averaged over inputs. "
    "Changed: the percentage of inputs whose decision differs between angles. An input is a window or, for tasks with "
    "outlined objects, a pixel."
)


CLAIMS_TEXT = (
    "Yes or no: the 95 % confidence interval of the difference is entirely above or below 0. Not decided: it contains "
    "0, or there is one seed only. The difference is that of which the claim states that it is above 0: a difference "
    "of scores or, for the last claim, of deviations over angles. About one of 40 such intervals lies on the wrong "
    "side of 0 by chance."
)
DESIGNS_TEXT = (
    "Networks of two parts whose recipes differ only in the options of the networks, such as preset = faithful. The "
    "first of them is the paper's design. Differences are second minus first, mean over seeds, in brackets the 95 % "
    "confidence interval. It includes the variation between cases, as in the tables above, except for changed "
    "decisions and AUC: there, it is for other seeds on the same inputs."
)


def report(study: Path | str, out: Path | str | None = None) -> Path:
    """Write the HTML report, tables and figures of a study, and return the path of the HTML file.

    `study` is the folder with all runs of the study. `out` is the folder for the report. None means the subfolder
    `report` of the study folder. Raises RunError if the study has no finished runs.
    """
    study = Path(study)
    out = Path(out) if out else study / "report"
    results = read_results(study)
    for result in results:
        check_provenance(result)
    summaries = summarize(results)
    claims, designs = check_claims(results), find_designs(results)
    parts = list(dict.fromkeys(result.part for result in results))
    tables: dict[str, list[dict[str, object]]] = {
        "results": [_result_row(result) for result in results],
        "summary": [_summary_row(summary) for summary in summaries],
        "claims": [_claim_row(claim) for claim in claims],
        "designs": [_design_row(design) for design in designs],
        "parts": [_part_row([result for result in results if result.part == part]) for part in parts],
    }
    out.mkdir(parents=True, exist_ok=True)
    for name, rows in tables.items():
        if rows:
            _write_csv(out / f"{name}.csv", rows)
        else:
            (out / f"{name}.csv").unlink(missing_ok=True)  # of an earlier report
    sections: list[Section] = []
    for name in parts:
        part = PartReport(
            name,
            [result for result in results if result.part == name],
            [summary for summary in summaries if summary.condition.part == name],
            [claim for claim in claims if claim.part == name],
            out / "figures",
        )
        sections += part.sections()
    if designs:
        names = _column_names(tables["designs"])
        cells = [[str(row.get(name, "")) for name in names] for row in tables["designs"]]
        sections.append(Section("Designs", DESIGNS_TEXT, [names, *cells]))
    sections.append(cost_section(results))
    run_count = len({result.folder for result in results})
    footer = f"{run_count} runs, {len(results)} evaluations. Written by rotopath {rotopath.__version__}."
    return write_page(out / "report.html", f"rotopath: study {study.name}", INTRODUCTION, sections, footer)


@dataclass(frozen=True)
class PartReport:
    """One part of a study (one task on one dataset), and the sections of the HTML report about this part."""

    part: str  # name of the part
    results: Sequence[StudyResult]
    summaries: Sequence[Summary]
    claims: Sequence[Claim]
    figures: Path  # folder for figures

    @property
    def recipe(self) -> Recipe:
        """The recipe of the first run. Other recipes differ from it only in orientations, training data and seed."""
        return self.results[0].recipe

    @property
    def regimes(self) -> Mapping[float | None, str]:
        """Labels such as "4 cases", by regime (None: all training data). The largest regime is first."""
        kind = self.recipe.kind
        amounts = dict.fromkeys(result.recipe.regime for result in self.results)
        return {regime: "all" if regime is None else kind.describe_regime(regime) for regime in amounts}

    @property
    def full(self) -> list[StudyResult]:
        """Results of the largest regime, without test-time augmentation."""
        regime = next(iter(self.regimes))
        return [result for result in self.results if result.recipe.regime == regime and result.rotations == 1]

    @property
    def full_name(self) -> str:
        """Label of the largest regime, such as "all"."""
        return next(iter(self.regimes.values()))

    @property
    def best_seeds(self) -> list[StudyResult]:
        """The result in `full` of each network whose seed has the highest score on the validation set."""
        best: dict[int, StudyResult] = {}
        for result in self.full:
            known = best.setdefault(result.recipe.orientations, result)
            if result.validation_score > known.validation_score:
                best[result.recipe.orientations] = result
        return list(best.values())

    def sections(self) -> list[Section]:
        """Return all sections: scores, claims, comparison with the paper, rotated inputs, learning curves, settings."""
        return [
            *self._score_sections(),
            *self._claim_sections(),
            self._published_section(),
            *self._rotation_sections(),
            Section(
                f"{self.part}: learning curves",
                f"Loss on validation windows after each epoch, for each run. Training data: {self.full_name}.",
                figure=draw_curves(self.full, self.figures / f"{self.part}-curves.png"),
            ),
            Section(
                f"{self.part}: settings",
                "The recipes of all runs are equal except for orientations, training data and seed. "
                f"{_describe_versions(self.results)} Each run folder contains its recipe, log, weights and provenance.",
                details=format_recipe(self.best_seeds[-1].recipe),
            ),
        ]

    def _score_sections(self) -> list[Section]:
        """Return two sections about the main score: the first contains a figure, and the second a table."""
        score = self.recipe.kind.score_name
        data = self.results[0].provenance["data"]
        path = self.figures / f"{self.part}-scores.png"
        return [
            Section(
                f"{self.part}: scores",
                f"{SCORE_LABELS.get(score, score)} for each network and amount of training data. Lines are means over "
                "seeds, boxes extend one standard deviation above and below the mean, and each dot is a seed. Data: "
                f"{data['source']}, {data['images']:,} images (fingerprint {data['fingerprint']}).",
                figure=draw_scores(self.summaries, score, self.regimes, path),
            ),
            Section("", TABLE_TEXT, [_score_header(score), *self._score_rows()]),
        ]

    def _score_rows(self) -> list[list[str]]:
        """Return a table row for each summary. Only the first row of a regime contains the label of the regime."""
        rows = []
        previous: float | str | None = ""  # regime of the previous row; "" differs from all regimes, also from None
        for summary in self.summaries:
            regime = summary.condition.regime
            rows.append(
                [
                    self.regimes[regime] if regime != previous else "",
                    summary.condition.label,
                    _format_mean(summary),
                    _format_interval(summary.mean),
                    _format_difference(summary.over_plain),
                    _format_difference(summary.over_rotated),
                    "–" if summary.scatter is None else f"{summary.scatter:.4f}",
                    "–" if summary.changed is None else f"{summary.changed:.1%}",
                ]
            )
            previous = regime
        return rows

    def _claim_sections(self) -> list[Section]:
        """Return a section with the answers to the paper's claims, if the part has the networks for any of them."""
        if not self.claims:
            return []
        rows = [
            [claim.text, claim.answer, _format_difference(claim.difference), "yes" if claim.is_stated else ""]
            for claim in self.claims
        ]
        header = ["claim", "holds here", "difference", "stated in the paper"]
        return [Section(f"{self.part}: the paper's claims", CLAIMS_TEXT, [header, *rows])]

    def _published_section(self) -> Section:
        """Return a section that compares scores with the paper, or states why they cannot be compared."""
        recipe = self.recipe
        if recipe.task not in PAPER or recipe.classes:
            return Section("", "Lafarge et al. (2020) did not study this task, so there is no published score.")
        reason = why_not_comparable(self.summaries[0].results[0])
        if reason is not None:
            return Section("", f"These scores cannot be compared with Lafarge et al. (2020): {reason}")
        means = {
            summary.condition.orientations: _format_mean(summary)
            for summary in self.summaries
            if summary.condition.regime == next(iter(self.regimes)) and summary.condition.rotations == 1
        }
        rows = [[f"N={n}", paper, means.get(n, "–")] for n, paper in PUBLISHED[recipe.task].items()]
        text = (
            "Comparison with the paper. The test set has the same size as in the paper. Training data: "
            f"{self.full_name}; all settings are listed below."
        )
        if recipe.kind is Segment:
            text += (
                " Here, an object is a true positive if its IoU is at least 0.5; the paper may count true positives "
                "in another way. Other ways are available with rotopath evaluate --rule."
            )
        return Section("", text, [["", "Lafarge et al. (2020)", "this study"], *rows])

    def _rotation_sections(self) -> list[Section]:
        """Return a section for each of two figures: predictions for rotated windows, and maps of rotated fields.

        Only the runs in `best_seeds` are used. A figure is left out if one of these runs has no predictions for it.
        """
        results, sections = self.best_seeds, []
        if polar := draw_rotated_windows(results, _list_labels(self.recipe), self.figures / f"{self.part}-polar.png"):
            sections.append(
                Section(
                    f"{self.part}: predictions for rotated windows",
                    "Radius: the predicted probability, from 0 at the center to 1 at the edge. With several classes, "
                    "this is the probability of the class that is most likely on average over all angles. Angle: the "
                    "rotation of the window. If the prediction does not depend on the rotation, the curve is a circle. "
                    f"The figure shows up to {WINDOWS_SHOWN} of the windows that were saved with the evaluation: the "
                    "first ones of each class, whatever is predicted for them. Of each network, the run with the "
                    "highest score on the validation set is shown. Training data: "
                    f"{self.full_name}.",
                    figure=polar,
                )
            )
        if maps := draw_maps(results, self.figures / f"{self.part}-maps.png"):
            sections.append(
                Section(
                    f"{self.part}: maps of rotated fields",
                    "Fields (annotated images) were rotated by 16 angles and predicted, and the maps were rotated "
                    f"back. The figure shows the centers of the first {FIELDS_SHOWN} fields. The maps contain "
                    "probabilities of object borders, or of objects if the task has no borders. Gray: mean over "
                    "angles. White to red: standard deviation over angles. First both in one map, as in the paper, "
                    "then each alone. Of each network, the run with the highest score on the validation set is shown. "
                    f"Training data: {self.full_name}.",
                    figure=maps,
                )
            )
        return sections


def why_not_comparable(result: StudyResult) -> str | None:
    """Return the reason why the score of an evaluation cannot be compared with the score in the paper.

    Returns None if the scores can be compared, that is, if the tissue is not synthetic and the test set has the same
    size as in the paper.
    """
    source, scores, kind = result.provenance["data"]["source"], result.scores, result.recipe.kind
    if "synthetic" in source:
        return "the tissue is synthetic."
    if kind is Classify and scores["images"] != PCAM_TEST_PATCHES:
        return f"the paper's test set has 32,768 patches (PCam); this test set has {scores['images']:,}."
    if kind is Detect and (mitoses := scores["hits"] + scores["missed"]) != AMIDA13_TEST_MITOSES:
        return f"the paper's test set has 533 mitotic figures of 11 cases; this test set has {mitoses}."
    if kind is Segment and len(scores["images"]) != KUMAR_TEST_FIELDS:
        return f"the paper's test set has 8 images; this test set has {len(scores['images'])}."
    return None


def _list_labels(recipe: Recipe) -> Sequence[str]:
    """Return the class names of windows, for figures. The name at index i is for windows with the label i."""
    task = recipe.make_task()
    return (task.background_name, task.class_names[0].lower()) if task.is_single else task.output_names


def _describe_versions(results: Sequence[StudyResult]) -> str:
    """Return a text with the versions of the software with which the runs were trained.

    It contains all commits and all versions of torch, but only the rotopath version of the first run.
    """
    records = [result.provenance for result in results]
    commits = sorted({str(record["commit"]) for record in records})
    versions = sorted({record["packages"]["torch"] for record in records})
    return f"rotopath {records[0]['rotopath']} (commit {', '.join(commits)}), torch {', '.join(versions)}."


# Cost


def cost_section(results: Sequence[StudyResult]) -> Section:
    """Return the section about the cost of each network: weights, floating-point operations and training time."""
    networks: dict[tuple[str, str, int, NetworkOptions], list[StudyResult]] = {}
    for result in results:
        if result.rotations == 1:
            recipe = result.recipe
            key = (recipe.task, recipe.network_name, recipe.orientations, recipe.network_options)
            networks.setdefault(key, []).append(result)
    rows = []
    for key, members in sorted(networks.items(), key=lambda item: (item[0][:3], str(item[0][3]))):
        task, name, n, options = key
        weights = sum(weight.numel() for weight in unwrap(runs.build(members[0].recipe)).parameters())
        minutes = [_minutes(result) for result in members]
        rows.append(
            [
                task,
                f"{name}, N={n}{_format_differing(options, [other[3] for other in networks])}",
                f"{weights:,}",
                f"{count_operations(members[0].recipe) / 1e9:.2g}",
                f"{sum(minutes) / len(minutes):.1f}",
            ]
        )
    devices = sorted({result.provenance["hardware"]["device"] for result in results})
    return Section(
        "Cost",
        "Weights: number of weights. GFLOP per window: billions of floating-point operations to predict one training "
        "window, including the rotation of kernels. Minutes per run: mean time from the start to the end of training "
        "and scoring, including interruptions; other programs may have slowed the runs down. Hardware: "
        f"{', '.join(devices)}.",
        [["task", "network", "weights", "GFLOP per window", "minutes per run"], *rows],
    )


def _format_differing(options: NetworkOptions, tables: Iterable[NetworkOptions]) -> str:
    """Return the options by which a network differs from other networks, as text such as ", width 8".

    `options` are the options of this network. `tables` contains the options of all networks of the study.
    """
    tables = list(tables)
    differing = [key for key in options if any(table.get(key) != options[key] for table in tables)]
    return "".join(f", {key} {options[key]}" for key in differing)


def _minutes(result: StudyResult) -> float:
    """Return the time in minutes from the start to the end of the training and scoring of a run."""
    start, end = (datetime.fromisoformat(result.provenance[key]) for key in ("begun", "finished"))
    return (end - start).total_seconds() / 60


# Tables


def _score_header(score: str) -> list[str]:
    """Return the column titles of the score table. `score` is the name of the main score."""
    score = SCORE_LABELS.get(score, score)
    return ["data", "network", score, "95 % interval", "minus N=1", "minus N=1 with TTA", "deviation", "changed"]


def _result_row(result: StudyResult) -> dict[str, object]:
    """Return the row of `results.csv` for one evaluation."""
    recipe = result.recipe
    robustness = result.scores.get("rotation", {}).get("fair", {})
    return {
        "part": result.part,
        "task": recipe.task,
        "N": recipe.orientations,
        "regime": "all" if recipe.regime is None else f"{recipe.regime:g}",
        "seed": recipe.seed,
        "rotations": result.rotations,
        "score": recipe.kind.score_name,
        "validation": f"{result.validation_score:.4f}",
        "test": f"{result.score:.4f}",
        "mean over fields": f"{result.scores['mean_f1']:.4f}" if "mean_f1" in result.scores else "",
        "scatter": f"{robustness['deviation']:.5f}" if robustness else "",
        "changed": f"{robustness['changed']:.4f}" if robustness else "",
    }


def _summary_row(summary: Summary) -> dict[str, object]:
    """Return the row of `summary.csv` for one summary: a network, with or without TTA, and a regime."""
    condition, recipe = summary.condition, summary.results[0].recipe
    return {
        "part": condition.part,
        "task": recipe.task,
        "N": condition.orientations,
        "regime": "all" if condition.regime is None else f"{condition.regime:g}",
        "rotations": condition.rotations,
        "seeds": len(summary.results),
        "score": recipe.kind.score_name,
        "mean ± deviation": _format_mean(summary),
        "mean over fields": _format_over_fields(summary),
        "interval": _format_interval(summary.mean),
        "minus N=1": _format_difference(summary.over_plain),
        "minus N=1 rotated": _format_difference(summary.over_rotated),
        "scatter": "" if summary.scatter is None else f"{summary.scatter:.4f}",
        "changed, %": "" if summary.changed is None else f"{100 * summary.changed:.1f}",
    }


def _claim_row(claim: Claim) -> dict[str, object]:
    """Return the row of `claims.csv` for one claim."""
    return {
        "part": claim.part,
        "claim": claim.text,
        "stated in the paper": "yes" if claim.is_stated else "no",
        "holds here": claim.answer,
        "difference": _format_difference(claim.difference, 4),
        "seeds": claim.seeds,
    }


def _design_row(design: DesignComparison) -> dict[str, object]:
    """Return the row of `designs.csv` for one comparison. "First" is the paper's design, "second" has options."""
    base, changed = design.base, design.changed
    recipe = base[0].recipe
    row = {
        "part": changed[0].part,
        "compared with": base[0].part,
        "options": ", ".join(f"{key} = {value}" for key, value in design.options.items()),
        "N": recipe.orientations,
        "regime": "all" if recipe.regime is None else f"{recipe.regime:g}",
        "steps": recipe.epochs * recipe.step_count,
        "seeds": len(base),
        "score": recipe.kind.score_name,
    }
    groups = (base, changed)
    row |= _compare_values("score", [[result.score for result in group] for group in groups], 3)
    row["score, difference"] = _format_difference(design.compare())
    if all("rotation" in result.scores for group in groups for result in group):
        rotation = [[result.scores["rotation"]["fair"] for result in group] for group in groups]
        row |= _compare_values("scatter", [[angles["deviation"] for angles in group] for group in rotation], 4)
        if (over_cases := design.compare(lambda result: result.scatter_terms)) is not None:
            row["scatter, difference"] = _format_difference(over_cases, 4)
        row |= _compare_values("changed, %", [[100 * angles["changed"] for angles in group] for group in rotation], 1)
    if all("auc" in result.scores for group in groups for result in group):
        row |= _compare_values("AUC", [[float(result.scores["auc"]) for result in group] for group in groups], 3)
    return row


def _compare_values(name: str, values: Sequence[Sequence[float]], digits: int) -> dict[str, object]:
    """Return three columns: two groups of values, one for each seed, and their mean difference, with its interval."""
    first, second = (np.array(group) for group in values)
    differences = second - first
    value, half_width = float(differences.mean()), margin(differences)
    interval = f" [{value - half_width:+.{digits}f}, {value + half_width:+.{digits}f}]" if len(differences) > 1 else ""
    return {
        f"{name}, first": _format_values(values[0], digits),
        f"{name}, second": _format_values(values[1], digits),
        f"{name}, difference": f"{value:+.{digits}f}{interval}",
    }


def _part_row(results: Sequence[StudyResult]) -> dict[str, object]:
    """Return the row of `parts.csv` for one part of a study. A cell has several values if runs differ."""
    recipe = results[0].recipe
    by_folder = {result.folder: result for result in results}
    records = [result.provenance for result in by_folder.values()]
    steps = sorted({result.recipe.step_count for result in results})
    return {
        "part": results[0].part,
        "task": recipe.task,
        "data": ", ".join(sorted({record["data"]["source"] for record in records})),
        "images": ", ".join(sorted({str(record["data"]["images"]) for record in records})),
        "test cases": len(results[0].score_terms),
        "trainings": len(by_folder),
        "evaluations": len(results),
        "seeds": len({result.recipe.seed for result in results}),
        "epochs": recipe.epochs,
        "steps of an epoch": " to ".join(str(count) for count in dict.fromkeys((steps[0], steps[-1]))),
        "steps": recipe.epochs * steps[-1],
        "batch": recipe.batch_size,
        "learning rate": f"{recipe.learning_rate:g}",
        "schedule": recipe.schedule,
        "kept": recipe.keep,
        "precision": recipe.precision,
        "torch": ", ".join(sorted({record["packages"]["torch"] for record in records})),
        "hardware": ", ".join(sorted({record["hardware"]["device"] for record in records})),
        "commit": ", ".join(sorted({str(record.get("commit")) for record in records})),
    }


def _format_values(values: Sequence[float], digits: int) -> str:
    """Format the mean of values, and ± their standard deviation if there are several."""
    return f"{mean(values):.{digits}f}" + (f" ± {stdev(values):.{digits}f}" if len(values) > 1 else "")


def _column_names(rows: Sequence[Mapping[str, object]]) -> list[str]:
    """Return the names of all columns of a table."""
    return list(dict.fromkeys(name for row in rows for name in row))


def _write_csv(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    """Write rows to a CSV file atomically. A cell is empty if a row has no value of this name."""
    text = io.StringIO()
    writer = csv.DictWriter(text, _column_names(rows), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_text(path, text.getvalue())


def _format_mean(summary: Summary) -> str:
    """Format the mean score, followed by ± the standard deviation over seeds if there are several seeds."""
    return f"{summary.mean.value:.3f}" + (f" ± {summary.deviation:.3f}" if len(summary.results) > 1 else "")


def _format_over_fields(summary: Summary) -> str:
    """Format the mean of the scores of all fields, and ± its standard deviation over seeds; "" if it is not known."""
    if not all("mean_f1" in result.scores for result in summary.results):
        return ""
    return _format_values([float(result.scores["mean_f1"]) for result in summary.results], 3)


def _format_interval(estimate: Estimate) -> str:
    """Format the 95 % confidence interval of a mean, or return "–" if there were too few cases for an interval."""
    return f"[{estimate.low:.3f}, {estimate.high:.3f}]" if estimate.has_interval else "–"


def _format_difference(difference: Estimate | None, digits: int = 3) -> str:
    """Format a mean difference of scores with its 95 % confidence interval, with this number of decimals.

    Return "–" if `difference` is None, that is, if there is no result to compare with. The interval is left out if it
    could not be computed.
    """
    if difference is None:
        return "–"
    low, high = f"{difference.low:+.{digits}f}", f"{difference.high:+.{digits}f}"
    interval = f" [{low}, {high}]" if difference.has_interval else ""
    return f"{difference.value:+.{digits}f}{interval}"
