"""Makes pretrained models of the package from the runs of a study: of each part, the best seed on the validation set.

.venv/bin/python tools/publish.py runs/samples/mitosis runs/samples/tumor runs/samples/nuclei

Looks at the finished runs with 8 orientations and all training data. What data that is, and under which terms, stands
in tools/datasets.toml; everything else in a card (tools/card.md) comes from the files of the runs.
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
from rotopath.data import MODEL_SPACING_UM_PX
from rotopath.data.batches import reader_of
from rotopath.models import ARCHITECTURES
from rotopath.pretrained import CARD, HOME
from rotopath.recipe import HARDWARE, Recipe, read_recipe, write_recipe
from rotopath.tasks import TASKS
from rotopath.writing import replaced_folder

DATASETS, TEMPLATE = (Path(__file__).with_name(name) for name in ("datasets.toml", "card.md"))
FREE = "The data is free for any use, and so are these weights."
LIMITED = (
    "**The weights inherit the limits of the data: use them for research, and not commercially.** The licence of "
    "rotopath, Apache-2.0, covers its code and not these weights."
)
ORIENTATIONS = 8
MOST_BYTES = 500_000  # of weights
PLACES = ("path",)  # what provenance knows of the machine


@dataclass(frozen=True)
class Dataset:
    """What a card says about the data of a model."""

    source: str
    images: int
    name: str  # in that of the model
    title: str
    terms: str
    commercial: bool
    about: str
    limits: Sequence[str]


@dataclass(frozen=True)
class Trained:
    """A finished run."""

    folder: Path
    recipe: Recipe
    metrics: dict[str, Any]
    point: dict[str, float]

    def score(self, split: str) -> float:
        return float(self.metrics[split][TASKS[self.recipe.task].SCORE])


def publish(part: Path, home: Path = HOME) -> Path:
    """Write the folder of the pretrained model that the runs of a part give; it replaces the one of that name."""
    seeds = find_seeds(part)
    chosen = max(seeds, key=lambda one: one.score("valid"))  # never by test
    provenance = _read(chosen.folder / runs.PROVENANCE)
    dataset = find_dataset(provenance["data"]["source"], provenance["data"]["images"])
    if (chosen.folder / runs.WEIGHTS).stat().st_size > MOST_BYTES:
        raise SystemExit(f"{chosen.folder / runs.WEIGHTS} has over {MOST_BYTES} bytes, too many for the package.")
    provenance["data"] = {key: value for key, value in provenance["data"].items() if key not in PLACES}
    provenance["data"] |= {"title": dataset.title, "terms": dataset.terms, "commercial": dataset.commercial}
    provenance["chosen"] = {
        "by": f"the best {TASKS[chosen.recipe.task].SCORE} on the validation set",
        "seeds": [{"seed": one.recipe.seed, "valid": one.score("valid"), "test": one.score("test")} for one in seeds],
    }
    place = home / f"{chosen.recipe.task}-{dataset.name}-n{ORIENTATIONS}"
    with replaced_folder(place) as unfinished:
        for name in (runs.WEIGHTS, runs.POINT, runs.METRICS):
            shutil.copyfile(chosen.folder / name, unfinished / name)
        runs.write_text(unfinished / runs.RECIPE, write_recipe(_anywhere(chosen.recipe, dataset)))
        runs.write_json(unfinished / runs.PROVENANCE, provenance)
        runs.write_text(unfinished / CARD, write_card(place.name, chosen, seeds, dataset))
    return place


def find_seeds(part: Path) -> list[Trained]:
    """The finished runs with 8 orientations and all training data, by seed."""
    finished = []
    for weights in sorted(part.glob(f"*/{runs.WEIGHTS}")):
        folder = weights.parent
        metrics, point = (_read(folder / name) for name in (runs.METRICS, runs.POINT))
        finished.append(Trained(folder, read_recipe(folder / runs.RECIPE), metrics, point))
    most = max((_amount(one.recipe) for one in finished), default=0)
    seeds = [one for one in finished if one.recipe.orientations == ORIENTATIONS and _amount(one.recipe) == most]
    if not seeds:
        raise SystemExit(f"{part} has no finished run with {ORIENTATIONS} orientations and all training data.")
    if len({dataclasses.replace(one.recipe, seed=0) for one in seeds}) > 1:
        raise SystemExit(f"{part} holds runs that differ in more than their seed; publish a part of one study.")
    return sorted(seeds, key=lambda one: one.recipe.seed)


def find_dataset(source: str, images: int) -> Dataset:
    known = [Dataset(**table) for table in tomllib.loads(DATASETS.read_text(encoding="utf-8"))["dataset"]]
    for dataset in known:
        if (dataset.source, dataset.images) == (source, images):
            return dataset
    raise SystemExit(
        f"{DATASETS.name} says nothing about {source} with {images} images; describe it there, with terms."
    )


def write_card(name: str, chosen: Trained, seeds: Sequence[Trained], dataset: Dataset) -> str:
    """The card of a model, as Markdown."""
    recipe, test = chosen.recipe, chosen.metrics["test"]
    network, key = ARCHITECTURES[recipe.task], TASKS[recipe.task].SCORE
    low, high = test[f"{key}_interval"]
    held_out = {split: _count(chosen.metrics[split]["images"]) for split in ("valid", "test")}
    counts = held_out | {"train": dataset.images - sum(held_out.values())}
    rows = [(f"{one.recipe.seed}{' (this model)' if one is chosen else ''}", one) for one in seeds]
    return TEMPLATE.read_text(encoding="utf-8").format(
        name=name,
        does=network.task,
        title=dataset.title,
        task=recipe.task,
        orientations=ORIENTATIONS,
        weights=sum(network.weights(ORIENTATIONS)),
        kilobytes=(chosen.folder / runs.WEIGHTS).stat().st_size // 1000,
        spacing_um_px=MODEL_SPACING_UM_PX[recipe.task],
        stain="normalised by Macenko's method" if reader_of(recipe.task).normalise_stain else "as it is",
        window_px=network.receptive_field,
        stride_px=network.stride,
        score=_spell(key),
        test_score=chosen.score("test"),
        low=low,
        high=high,
        spread=_tell_spread([one.score("test") for one in seeds]),
        terms=dataset.terms,
        use="any use" if dataset.commercial else "not for commercial use",
        inherited=FREE if dataset.commercial else LIMITED,
        about=dataset.about.strip().format(**counts),
        recipe=recipe,
        mined="" if recipe.mining is None else ", a part of them mistakes of a first baseline",
        count=len(seeds),
        seeds="\n".join(f"| {seed} | {one.score('valid'):.3f} | {one.score('test'):.3f} |" for seed, one in rows),
        scores=_tell_scores(chosen),
        limits="\n".join(f"- {limit}" for limit in dataset.limits),
    )


def _tell_spread(scores: Sequence[float]) -> str:
    if len(scores) == 1:
        return f"{scores[0]:.3f} (a single seed)"
    return f"{mean(scores):.3f} ± {stdev(scores):.3f} (mean and standard deviation of {len(scores)} seeds)"


def _tell_scores(chosen: Trained) -> str:
    """The single numbers of the test set; and how answers change when inputs turn, where that was measured."""
    test = chosen.metrics["test"]
    single = {name: value for name, value in test.items() if isinstance(value, float) and name not in chosen.point}
    said = "On the test set: " + ", ".join(f"{_spell(name)} {one:.3f}" for name, one in single.items()) + "."
    evaluated = chosen.folder / "evaluation-test.json"
    if evaluated.exists() and "rotation" in (again := _read(evaluated)["test"]):
        fair = again["rotation"]["fair"]
        said += (
            f" When inputs turn by sixteen angles between the quarter turns, probabilities scatter by "
            f"{fair['deviation']:.3f}, and {100 * fair['changed']:.1f} % of decisions are not the same at every angle."
        )
    return said


def _read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def _spell(name: str) -> str:
    """The name of a score, as people write it."""
    return name.upper() if len(name) < 4 else name.replace("aji_plus", "AJI+").replace("_", " ")


def _count(images: int | dict[str, Any]) -> int:
    """Nuclei have scores of each image."""
    return images if isinstance(images, int) else len(images)


def _amount(recipe: Recipe) -> float:
    """Of training data; all of it where a recipe names none."""
    return float("inf") if recipe.regime is None else recipe.regime


def _anywhere(recipe: Recipe, dataset: Dataset) -> Recipe:
    """The recipe without what only holds on the machine it was followed on."""
    usual = {field.name: field.default for field in dataclasses.fields(Recipe) if field.name in HARDWARE}
    return dataclasses.replace(recipe, data=dataset.source, **usual)  # type: ignore[arg-type]


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        made = publish(Path(argument))
        print(f"{made.name}: {sum(path.stat().st_size for path in made.iterdir()) // 1000} kB in {made}")
