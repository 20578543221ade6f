"""`rotopath train`: train a network from a recipe. `rotopath recipes` and `rotopath init`: list and write recipes.

`rotopath demo`: train two networks on synthetic tissue.
"""

import json
import webbrowser
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rotopath.reports import terminal

if TYPE_CHECKING:
    from rotopath.recipe import Recipe
    from rotopath.training.loop import TrainingPlan

# Of recipes that `rotopath init` writes
EPOCHS, STEPS, LEAST_STEPS = 20, 500, 50  # steps of an epoch: largest and smallest number
LONGEST_S = 3600  # of a training on the CPU, unless it has `LEAST_STEPS`
WINDOW_PX = 128  # largest side of windows of networks with an output for each pixel
MAX_ENLARGEMENT = 2  # images are not resampled to more than twice their size
MAX_MEASURED = 200  # number of images whose sizes are read


def train(
    recipe: Annotated[
        Path,
        typer.Argument(help="Recipe: a TOML file, or the name of a recipe of the package (see `rotopath recipes`)."),
    ],
    changes: Annotated[
        list[str] | None, typer.Option("--set", help="Override a key of the recipe: key=value. Can be repeated.")
    ] = None,
    from_: Annotated[
        str | None,
        typer.Option(
            "--from",
            help="Start from the weights of this model (fine-tuning): the name of a pretrained model, or a run folder. "
            "Short for --set from=MODEL.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Run folder, for the trained model, the log and the scores. Default for a recipe NAME.toml with 8 "
            "orientations and seed 0: runs/NAME-N8-seed0."
        ),
    ] = None,
) -> None:
    """Train a network as a recipe specifies, and print its scores.

    To resume an interrupted training, run the same command again.
    """
    with terminal.user_errors_in_one_sentence():
        from rotopath.recipe import read_recipe
        from rotopath.reports.progress import TrainingProgress
        from rotopath.runs import METRICS
        from rotopath.training import can_resume, is_first_process, name_folder
        from rotopath.training import train as train_run

        checked = read_recipe(recipe, [*(changes or []), *([f"from={json.dumps(from_)}"] if from_ else [])])
        folder = out or name_folder(recipe.stem, checked)
        console = terminal.console if is_first_process() else Console(quiet=True)
        print_line = partial(console.print, highlight=False, markup=False, soft_wrap=True)
        try:
            with TrainingProgress(checked, console) as progress:
                run = train_run(checked, folder, on_progress=progress.show, on_message=print_line)
        except KeyboardInterrupt as error:
            if can_resume(folder):
                terminal.exit_interrupted(error, folder)
            note = ": it begins with the first step, because there was no checkpoint yet"
            terminal.exit_interrupted(error, note=note)
        if not is_first_process():
            raise typer.Exit  # only the first of several processes prints
        if checked.mining is not None:
            from rotopath.data import open_data
            from rotopath.reports.contact_sheet import draw_hard_examples
            from rotopath.training import MINED, read_hard_examples

            dataset = open_data(checked.data, None, checked.data_spacing_um_px)
            examples, spacing_um_px = read_hard_examples(folder / MINED), run.task.spacing_um_px
            sheet = draw_hard_examples(dataset, examples, spacing_um_px, folder / "mined.png")
            terminal.print_path("Hard examples", sheet)
    terminal.print_scores(str(folder), folder / METRICS)


def recipes() -> None:
    """List the recipes of the package. `rotopath train NAME --set data=PATH` trains with one of them.

    They have the settings of the paper. For your own data, write a recipe with `rotopath init`.
    """
    from rotopath.recipe import RECIPES, list_recipes

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("name", no_wrap=True)
    table.add_column("recipe")
    for name, line in list_recipes().items():
        table.add_row(Text(name, "bold"), line)
    terminal.console.print(table)
    terminal.print_path("Files", RECIPES)


def init(
    data: Annotated[Path, typer.Argument(help="Dataset: a manifest, or a folder (see `rotopath data check --help`).")],
    out: Annotated[
        Path | None, typer.Option(help="Recipe file to write. Default: NAME.toml in the current folder for data NAME.")
    ] = None,
    task: Annotated[
        str | None,
        typer.Option(
            help="Task (mitosis, nuclei, tumor) or kind of task (classify, detect, segment). Default: the kind that "
            "fits the annotations: classify for labels, detect for points, segment for outlines."
        ),
    ] = None,
    from_: Annotated[
        str | None, typer.Option("--from", help="Start from the weights of this model: a pretrained model, or a run.")
    ] = None,
    spacing_um_px: Annotated[
        float | None, typer.Option("--spacing-um-px", help="Pixel spacing, in µm/px, of images that specify none.")
    ] = None,
) -> None:
    """Write a recipe for a dataset, with comments, and with steps, batch and window for the data and this machine.

    Nothing is trained. Change what you like in the file, and train with `rotopath train FILE`.
    """
    with terminal.user_errors_in_one_sentence():
        from rotopath.writing import write_text

        full = data.resolve()
        path = out or Path(f"{full.parent.name if full.stem == 'manifest' else full.stem}.toml")
        if path.exists():
            terminal.exit_with_error(f"{path} exists; choose another file with --out.")
        text = draft_recipe(data, path, task, from_, spacing_um_px)
        write_text(path, text)
    terminal.console.print(text, highlight=False, markup=False, soft_wrap=True)
    terminal.print_path("Recipe", path)


def draft_recipe(data: Path, path: Path, task: str | None, from_: str | None, spacing_um_px: float | None) -> str:
    """Return a recipe for a dataset as commented TOML, which can be trained as it is.

    `path` is the file to which it will be written, for the command at its top. The other arguments are those of `init`.
    Raises the errors of a training, such as DataError, if no network can be trained on the data.
    """
    import torch

    from rotopath import runs
    from rotopath.data import open_data
    from rotopath.data.batches import SampleReader
    from rotopath.recipe import make_recipe
    from rotopath.tasks import KINDS
    from rotopath.training.loop import check_network, find_training_window, make_plan, measure_step_s

    annotated = open_data(data, None, spacing_um_px).annotated
    values: dict[str, Any] = {"task": task or next(name for name, k in KINDS.items() if k.annotated == annotated)}
    values |= {"data": str(data), "schedule": "cosine"}
    if spacing_um_px is not None:
        values["data_spacing_um_px"] = spacing_um_px
    if from_ is not None:
        parent = runs.load(from_)
        values |= {"from": from_, "spacing_um_px": parent.task.spacing_um_px, "stain": parent.task.stain}
        values |= {"network": parent.info.network.name, "orientations": parent.info.network.orientations}
        values |= {"network_options": {key: v for key, v in parent.info.network.options.items() if v is not None}}
    plan = make_plan(make_recipe(values))
    network = runs.build(plan.recipe, plan.task)
    geometry, samples = network.geometry, plan.samples
    sides_um = [min(SampleReader(s.spacing_um_px).size_px(s)) * s.spacing_um_px for s in samples[:MAX_MEASURED]]
    window_px, finest = runs.describe_network(plan.recipe, network).window_px, samples[0].spacing_um_px
    if from_ is None:
        spacing = plan.task.spacing_um_px
        if annotated == "labels":  # windows must be inside the patches
            spacing = max(finest, min(spacing, min(sides_um) / window_px))
        values["spacing_um_px"] = float(f"{max(spacing, finest / MAX_ENLARGEMENT):.4g}")
    if geometry.stride_px == 1:  # larger windows have more outputs that depend on the same pixels as in a whole image
        largest = int(min(WINDOW_PX, min(sides_um) / values["spacing_um_px"]))
        if largest >= geometry.smallest_px:
            window_px = largest - (largest - geometry.smallest_px) % geometry.step_px
    on_gpu = torch.cuda.is_available()
    values["window_px"] = window_px
    values["batch"] = max(plan.task.default_batch // (1 if on_gpu else 4), 8, 2 * len(plan.recipe.classes))
    plan = make_plan(make_recipe(values))
    network = check_network(plan)
    step_s, device = measure_step_s(plan.recipe, network)
    windows = plan.task.count_windows(samples, find_training_window(plan.recipe, network))
    what = {
        "labels": f"{len(samples):,} training images",
        "points": f"{windows // 2:,} annotated objects in {len(samples):,} training images",
        "objects": f"{len(samples):,} training images with outlines",
    }[annotated]
    most = STEPS if on_gpu else min(STEPS, int(LONGEST_S / EPOCHS / step_s))
    steps = max(min(windows // values["batch"], most), LEAST_STEPS)
    minutes = max(1, round(EPOCHS * steps * step_s / 60))
    return _format_draft(path, values, plan, what, f"{minutes} minutes on this machine ({device.type})", steps)


def _format_draft(
    path: Path, values: dict[str, Any], plan: "TrainingPlan", what: str, duration: str, steps: int
) -> str:
    """Return the text of a recipe. `what` describes the data, and `duration` how long the training takes."""
    import tomli_w

    from rotopath.data.augmentation import OWN_STAIN

    task, recipe = plan.task, plan.recipe
    lines = [f"# {what}: {values['data']}. Written by `rotopath init`; every value may be changed."]
    lines.append(f"#   rotopath train {path}")

    def add(comment: str, **keys: object) -> None:
        lines.extend(
            ["", f"# {comment}", tomli_w.dumps({key.removesuffix("_"): v for key, v in keys.items()}).rstrip()]
        )

    add("classify: a class for each patch; detect: points; segment: outlines", task=values["task"], data=values["data"])
    if "data_spacing_um_px" in values:
        add("Pixel spacing of images that specify none", data_spacing_um_px=values["data_spacing_um_px"])
    if recipe.classes:
        add("Remove classes that the network need not know", classes=list(recipe.classes))
    add(
        "Pixel spacing, in µm/px, at which the network reads images, and stain normalization: none or macenko",
        spacing_um_px=values["spacing_um_px"],
        stain=task.stain,
    )
    if recipe.from_:
        add("Start from the weights of this model, which has this network (docs: Fine-tuning)", from_=recipe.from_)
        add("Its weights learn at this fraction of the learning rate", from_rate=recipe.from_rate)
        add("Number of first convolutions whose weights are not trained", frozen_stages=0)
        add("The network of this model", network=recipe.network_name, orientations=recipe.orientations)
    else:
        if models := _list_parents(recipe):
            lines += [
                "",
                "# With few images, start from a pretrained model; `rotopath init --from NAME` also sets its stain.",
            ]
            lines += [f"# from = {json.dumps(name)}  # terms of its data: {terms}" for name, terms in models]
        add("Number of orientations; 1 is an ordinary CNN, which is faster and depends on the rotation", orientations=8)
    add(f"Steps in total: epochs × steps, about {duration}", epochs=EPOCHS, steps=steps)
    add("Windows per step, and their side in px", batch=values["batch"], window_px=values["window_px"])
    add("Decrease the learning rate to 0 along a cosine", learning_rate=recipe.learning_rate, schedule="cosine")
    if len(recipe.classes) > 1:
        lines += [
            "",
            "# For rare classes (docs: Rare classes)",
            '# sampler = "balanced"',
            '# loss_weights = "balanced"',
        ]
    stain = recipe.augmentation.stain or OWN_STAIN
    add(
        "Random changes of the windows: see `rotopath data show --augment`. Others: free_rotation, elastic (px)",
        augmentation={"stain": stain, "brightness": recipe.augmentation.brightness},
    )
    lines += ["# scale = 0.1  # ±10 %", "# blur = 1.5  # px", "# jpeg = 50  # lowest quality"]
    if recipe.from_:
        lines += ["", tomli_w.dumps({"network_options": values["network_options"]}).rstrip()]
    return "\n".join(lines) + "\n"


def _list_parents(recipe: "Recipe") -> list[tuple[str, str]]:
    """Return the pretrained models whose weights fit a recipe, and the terms of their data."""
    from rotopath import pretrained, runs
    from rotopath.model_file import RunError, read_json

    parents = []
    for name in pretrained.list_pretrained():
        candidate, info = replace(recipe, from_=name), runs.read_model_info(pretrained.HOME / name)
        if info.task.kind == recipe.kind.kind:
            with suppress(RunError):
                runs.find_parent(candidate, candidate.make_task(), runs.build(candidate))
                parents.append((name, read_json(pretrained.HOME / name / runs.PROVENANCE)["data"]["terms"]))
    return parents


def demo(
    out: Annotated[
        Path, typer.Option(help="Folder for images, runs and report. Existing images and runs are reused.")
    ] = Path("demo"),
    steps: Annotated[int, typer.Option(min=1, help="Training steps per epoch. Each training has three epochs.")] = 220,
    size: Annotated[int, typer.Option(min=160, help="Height and width of the synthetic images, in pixels.")] = 512,
) -> None:
    """Train an ordinary and a rotation-equivariant network on synthetic tissue, and compare both in an HTML report.

    The report shows the scores and detections of both networks, and their predictions for rotated images.

    The demo takes a few minutes.
    """
    if out.exists() and not out.is_dir():
        terminal.exit_with_error(f"--out {out} is a file, but the demo needs a folder; choose another path with --out.")
    with terminal.user_errors_in_one_sentence():
        from rotopath.reports.demo_report import run_demo

        report = run_demo(out, terminal.console, steps, size)
    terminal.print_path("Report", report)
    if terminal.console.is_terminal:
        webbrowser.open(report.resolve().as_uri())
