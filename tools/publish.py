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
from rotopath.model_file import WEIGHTS, ModelInfo, RunError, write_model
from rotopath.models import ARCHITECTURES
from rotopath.models.protocols import unwrap
from rotopath.pretrained import CARD, HOME
from rotopath.recipe import HARDWARE, Recipe, write_recipe
from rotopath.writing import atomic_folder, write_json, write_text

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
    info: ModelInfo

    def score(self, split: str) -> float:
        return float(self.metrics[split][self.info.task.score_name])


def publish(part: Path, home: Path = HOME) -> Path:
    """Write the folder of the pretrained model that the runs of a part give; it replaces the one of that name."""
    seeds = find_seeds(part)
    chosen = max(seeds, key=lambda one: one.score("valid"))  # never by test
    provenance = _read(chosen.folder / runs.PROVENANCE)
    dataset = find_dataset(provenance["data"]["source"], provenance["data"]["images"])
    if (chosen.folder / WEIGHTS).stat().st_size > MOST_BYTES:
        raise SystemExit(f"{chosen.folder / WEIGHTS} has over {MOST_BYTES} bytes, too many for the package.")
    provenance["data"] = {key: value for key, value in provenance["data"].items() if key not in PLACES}
    provenance["data"] |= {"title": dataset.title, "terms": dataset.terms, "commercial": dataset.commercial}
    provenance["chosen"] = {
        "by": f"the best {chosen.info.task.score_name} on the validation set",
        "seeds": [{"seed": one.recipe.seed, "valid": one.score("valid"), "test": one.score("test")} for one in seeds],
    }
    place = home / f"{chosen.recipe.task}-{dataset.name}-n{ORIENTATIONS}"
    card = write_card(place.name, chosen, seeds, dataset)
    with atomic_folder(place) as unfinished:
        for name in (WEIGHTS, runs.METRICS):
            shutil.copyfile(chosen.folder / name, unfinished / name)
        weights = (unfinished / WEIGHTS).read_bytes()
        write_model(unfinished, chosen.info.task, chosen.info.network, chosen.info.point, weights)
        write_text(unfinished / runs.RECIPE, write_recipe(_anywhere(chosen.recipe, dataset)))
        write_json(unfinished / runs.PROVENANCE, provenance)
        write_text(unfinished / CARD, card)
    return place


def find_seeds(part: Path) -> list[Trained]:
    """The finished runs with 8 orientations and all training data, by seed."""
    finished = []
    for weights in sorted(part.glob(f"*/{WEIGHTS}")):
        folder = weights.parent
        recipe = runs.read_run_recipe(folder)
        if recipe.task not in ARCHITECTURES or recipe.network_name != recipe.task:
            raise SystemExit(
                f"{folder} has the task {recipe.task!r} and the network {recipe.network_name!r}, of which cards do not "
                f"know what they do; publish the paper's networks for their own tasks."
            )
        finished.append(Trained(folder, recipe, _read(folder / runs.METRICS), runs.read_info(folder)))
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
    recipe, task, geometry = chosen.recipe, chosen.info.task, chosen.info.network.geometry
    network = unwrap(runs.load(chosen.folder).network)  # its weights are checked while they are read
    held_out = {split: _count(chosen.metrics[split]["images"]) for split in ("valid", "test")}
    counts = held_out | {"train": dataset.images - sum(held_out.values())}
    rows = [(f"{one.recipe.seed}{' (this model)' if one is chosen else ''}", one) for one in seeds]
    return TEMPLATE.read_text(encoding="utf-8").format(
        name=name,
        does=ARCHITECTURES[recipe.task].task,
        title=dataset.title,
        task=recipe.task,
        orientations=ORIENTATIONS,
        weights=sum(weight.numel() for weight in network.parameters()),
        kilobytes=(chosen.folder / WEIGHTS).stat().st_size // 1000,
        spacing_um_px=task.spacing_um_px,
        stain="normalised by Macenko's method" if task.stain == "macenko" else "as it is",
        window_px=geometry.smallest_px,
        stride_px=geometry.stride_px,
        score=_spell(task.score_name),
        test_score=chosen.score("test"),
        interval=_tell_interval(chosen.metrics["test"][f"{task.score_name}_interval"]),
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


def _tell_interval(found: Sequence[float] | None) -> str:
    if found is None:
        return "too few cases for an interval"
    low, high = found
    return f"95 % interval {low:.3f} to {high:.3f}"


def _tell_spread(scores: Sequence[float]) -> str:
    if len(scores) == 1:
        return f"{scores[0]:.3f} (a single seed)"
    return f"{mean(scores):.3f} ± {stdev(scores):.3f} (mean and standard deviation of {len(scores)} seeds)"


def _tell_scores(chosen: Trained) -> str:
    """The single numbers of the test set; and how answers change when inputs turn, where that was measured."""
    test = chosen.metrics["test"]
    single = {name: value for name, value in test.items() if isinstance(value, float) and name not in chosen.info.point}
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
        try:
            made = publish(Path(argument))
        except RunError as error:
            raise SystemExit(str(error)) from None
        print(f"{made.name}: {sum(path.stat().st_size for path in made.iterdir()) // 1000} kB in {made}")
