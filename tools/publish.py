"""Make pretrained models from the runs of a study: from each part, the run with the best validation score.

.venv/bin/python tools/publish.py runs/samples/mitosis runs/samples/tumor runs/samples/nuclei

The arguments are parts of a study. Of each part, the finished runs with 8 orientations and the largest amount of
training data are compared; they differ only in their seed. Each model gets a card, its description in Markdown, from
the template tools/card.md. The data and its terms of use are described in tools/datasets.toml; everything else on a
card is read from the files of the runs.
"""

import dataclasses
import json
import shutil
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from rotopath import runs
from rotopath.model_file import WEIGHTS, ModelInfo, RunError, write_model
from rotopath.models import ARCHITECTURES
from rotopath.models.protocols import unwrap
from rotopath.pretrained import CARD, HOME
from rotopath.recipe import HARDWARE, Recipe, format_recipe
from rotopath.writing import atomic_folder, write_json, write_text

DATASETS, TEMPLATE = (Path(__file__).with_name(name) for name in ("datasets.toml", "card.md"))
FREE = "The data is free for any use, and so are these weights."
LIMITED = (
    "**The weights inherit the limits of the data: use them for research, and not commercially.** The license of "
    "rotopath, Apache-2.0, covers its code and not these weights."
)
ORIENTATIONS = 8
MAX_WEIGHTS_BYTES = 500_000
LOCAL_KEYS = ("path",)  # keys of the data's provenance that are valid on one machine only; they are not published


@dataclass(frozen=True)
class Dataset:
    """Description of the data that a model was trained on, for its card: a table of tools/datasets.toml."""

    source: str  # `source` and `images` identify the dataset in the provenance of a run
    images: int  # in all splits
    name: str  # part of the name of the model
    title: str
    terms: str
    commercial: bool  # whether commercial use is allowed
    about: str
    limits: Sequence[str]


@dataclass(frozen=True)
class Trained:
    """A finished run."""

    folder: Path
    recipe: Recipe
    metrics: dict[str, Any]
    info: ModelInfo

    def score(self, split: str) -> float:
        return float(self.metrics[split][self.info.task.score_name])


def publish(part: Path, home: Path = HOME) -> Path:
    """Write a pretrained model from the runs of a part of a study. Returns its folder in `home`.

    An older model of the same name is replaced.
    """
    seeds = find_seeds(part)
    chosen = max(seeds, key=lambda run: run.score("valid"))  # never chosen by the test score
    provenance = _read(chosen.folder / runs.PROVENANCE)
    dataset = find_dataset(provenance["data"]["source"], provenance["data"]["images"])
    if (chosen.folder / WEIGHTS).stat().st_size > MAX_WEIGHTS_BYTES:
        raise SystemExit(
            f"{chosen.folder / WEIGHTS} has more than {MAX_WEIGHTS_BYTES} bytes, the limit for models in the package; "
            f"publish a smaller network."
        )
    provenance["data"] = {key: value for key, value in provenance["data"].items() if key not in LOCAL_KEYS}
    provenance["data"] |= {"title": dataset.title, "terms": dataset.terms, "commercial": dataset.commercial}
    provenance["chosen"] = {
        "by": f"the best {chosen.info.task.score_name} on the validation set",
        "seeds": [{"seed": run.recipe.seed, "valid": run.score("valid"), "test": run.score("test")} for run in seeds],
    }
    folder = home / f"{chosen.recipe.task}-{dataset.name}-n{ORIENTATIONS}"
    card = write_card(folder.name, chosen, seeds, dataset)
    with atomic_folder(folder) as unfinished:
        for name in (WEIGHTS, runs.METRICS):
            shutil.copyfile(chosen.folder / name, unfinished / name)
        weights = (unfinished / WEIGHTS).read_bytes()
        write_model(unfinished, chosen.info.task, chosen.info.network, chosen.info.point, weights)
        write_text(unfinished / runs.RECIPE, format_recipe(_remove_local_settings(chosen.recipe, dataset)))
        write_json(unfinished / runs.PROVENANCE, provenance)
        write_text(unfinished / CARD, card)
    return folder


def find_seeds(part: Path) -> list[Trained]:
    """Return the finished runs with 8 orientations and the largest amount of training data, sorted by seed."""
    finished = []
    for weights in sorted(part.glob(f"*/{WEIGHTS}")):
        folder = weights.parent
        recipe = runs.read_run_recipe(folder)
        if recipe.task not in ARCHITECTURES or recipe.network_name != recipe.task:
            raise SystemExit(
                f"{folder} has the task {recipe.task!r} and the network {recipe.network_name!r}, which "
                f"no card describes; only the paper's networks, trained for their own tasks, can be published."
            )
        finished.append(Trained(folder, recipe, _read(folder / runs.METRICS), runs.read_model_info(folder)))
    most = max((_data_amount(run.recipe) for run in finished), default=0)
    seeds = [run for run in finished if run.recipe.orientations == ORIENTATIONS and _data_amount(run.recipe) == most]
    if not seeds:
        raise SystemExit(f"{part} has no finished run with {ORIENTATIONS} orientations and all training data.")
    if len({dataclasses.replace(run.recipe, seed=0) for run in seeds}) > 1:
        raise SystemExit(f"{part} has runs that differ in more than their seed; expected a part of one study.")
    return sorted(seeds, key=lambda run: run.recipe.seed)


def find_dataset(source: str, images: int) -> Dataset:
    """Return the description of the dataset with this source and number of images, from tools/datasets.toml."""
    known = [Dataset(**table) for table in tomllib.loads(DATASETS.read_text(encoding="utf-8"))["dataset"]]
    for dataset in known:
        if (dataset.source, dataset.images) == (source, images):
            return dataset
    raise SystemExit(f"{DATASETS.name} has no entry for {source} with {images} images; add one, with its terms.")


def write_card(name: str, chosen: Trained, seeds: Sequence[Trained], dataset: Dataset) -> str:
    """Return the card of the model `name` in Markdown. `seeds` are the runs from which `chosen` was chosen."""
    recipe, task, geometry = chosen.recipe, chosen.info.task, chosen.info.network.geometry
    network = unwrap(runs.load(chosen.folder).network)  # loading also checks the weights
    held_out = {split: _count(chosen.metrics[split]["images"]) for split in ("valid", "test")}
    counts = held_out | {"train": dataset.images - sum(held_out.values())}
    rows = [(f"{run.recipe.seed}{' (this model)' if run is chosen else ''}", run) for run in seeds]
    return TEMPLATE.read_text(encoding="utf-8").format(
        name=name,
        does=ARCHITECTURES[recipe.task].task,
        title=dataset.title,
        task=recipe.task,
        orientations=ORIENTATIONS,
        weights=sum(weight.numel() for weight in network.parameters()),
        kilobytes=(chosen.folder / WEIGHTS).stat().st_size // 1000,
        spacing_um_px=task.spacing_um_px,
        stain="normalized by Macenko's method" if task.stain == "macenko" else "unchanged",
        window_px=geometry.smallest_px,
        stride_px=geometry.stride_px,
        score=_display_name(task.score_name),
        test_score=chosen.score("test"),
        interval=_format_interval(chosen.metrics["test"][f"{task.score_name}_interval"]),
        spread=_format_spread([run.score("test") for run in seeds]),
        terms=dataset.terms,
        use="any use" if dataset.commercial else "not for commercial use",
        inherited=FREE if dataset.commercial else LIMITED,
        about=dataset.about.strip().format(**counts),
        recipe=recipe,
        mined="" if recipe.mining is None else ", part of them hard examples: mistakes of a baseline",
        count=len(seeds),
        seeds="\n".join(f"| {seed} | {run.score('valid'):.3f} | {run.score('test'):.3f} |" for seed, run in rows),
        scores=_format_scores(chosen),
        limits="\n".join(f"- {limit}" for limit in dataset.limits),
    )


def _format_interval(interval: Sequence[float] | None) -> str:
    if interval is None:
        return "too few cases for an interval"
    low, high = interval
    return f"95 % interval {low:.3f} to {high:.3f}"


def _format_spread(scores: Sequence[float]) -> str:
    if len(scores) == 1:
        return f"{scores[0]:.3f} (a single seed)"
    return f"{mean(scores):.3f} ± {stdev(scores):.3f} (mean and standard deviation of {len(scores)} seeds)"


def _format_scores(chosen: Trained) -> str:
    """Return sentences on the scores on the test set and, if it was measured, on the robustness to rotation."""
    test = chosen.metrics["test"]
    scores = {name: value for name, value in test.items() if isinstance(value, float) and name not in chosen.info.point}
    text = "On the test set: " + ", ".join(f"{_display_name(name)} {value:.3f}" for name, value in scores.items()) + "."
    evaluated = chosen.folder / "evaluation-test.json"
    if evaluated.exists() and "rotation" in (evaluation := _read(evaluated)["test"]):
        fair = evaluation["rotation"]["fair"]
        text += (
            f" When inputs are rotated by sixteen angles between the multiples of 90°, the standard deviation of "
            f"probabilities is {fair['deviation']:.3f}, and {100 * fair['changed']:.1f} % of decisions change."
        )
    return text


def _read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def _display_name(name: str) -> str:
    """Return the name of a score as cards print it, such as "F1" for "f1"."""
    return name.upper() if len(name) < 4 else name.replace("aji_plus", "AJI+").replace("_", " ")


def _count(images: int | dict[str, Any]) -> int:
    """Return the number of images. `images` is that number or, in the scores of nuclei, has an entry for each image."""
    return images if isinstance(images, int) else len(images)


def _data_amount(recipe: Recipe) -> float:
    """Return the amount of training data of a recipe (its regime); infinity if it uses all of the data."""
    return float("inf") if recipe.regime is None else recipe.regime


def _remove_local_settings(recipe: Recipe, dataset: Dataset) -> Recipe:
    """Return the recipe without settings of the machine it ran on. The dataset's name replaces its path."""
    defaults = {field.name: field.default for field in dataclasses.fields(Recipe) if field.name in HARDWARE}
    return dataclasses.replace(recipe, data=dataset.source, **defaults)  # type: ignore[arg-type]


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        try:
            folder = publish(Path(argument))
        except RunError as error:
            raise SystemExit(str(error)) from None
        print(f"{folder.name}: {sum(path.stat().st_size for path in folder.iterdir()) // 1000} kB in {folder}")
