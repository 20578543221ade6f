"""Progress in the terminal: of a training, a bar with loss, pace and time left, and a line for each epoch; of slides, a
bar for the one that is looked at, one for all of them, and a line for each that is over.
"""

from pathlib import Path
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from rotopath.predicting import Outcome, read_summary
from rotopath.recipe import Recipe


class _Shown:
    """A bar on a console, while the block runs that it is opened for."""

    def __init__(self, console: Console, *columns: ProgressColumn) -> None:
        self._console = console
        timed = (TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
        self._bar = Progress(*columns, *timed, console=console, transient=True, disable=not console.is_terminal)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()


class TrainingProgress(_Shown):
    """Shows the rows of a training's log as they come."""

    def __init__(self, recipe: Recipe, console: Console) -> None:
        loss = TextColumn("{task.fields[loss]}{task.fields[score]}  {task.fields[pace]}")
        super().__init__(console, TextColumn("{task.description}"), BarColumn(), loss)
        self._recipe = recipe
        self._task = self._bar.add_task("starting", total=recipe.epochs * recipe.steps, loss="", score="", pace="")

    def show(self, stage: str, row: dict[str, float]) -> None:
        """One row of a stage's log, or how many pictures are scored; a row with a validation loss ends an epoch."""
        if "pictures" in row:
            scored = f"{stage}, {row['done']:g} of {row['pictures']:g} images"
            self._bar.update(self._task, description=scored, completed=row["done"], total=row["pictures"])
            return
        epochs = self._recipe.epochs
        if stage == "baseline" and self._recipe.mining is not None:
            epochs = self._recipe.mining.epochs
        epoch = f"{stage}, epoch {row['epoch'] + 1:g} of at most {epochs}"
        self._bar.update(
            self._task,
            total=epochs * self._recipe.steps,
            completed=row["step"],
            description=epoch,
            loss=f"loss {row['loss']:.4f}",
            pace=f"{row['images_per_second']:,.0f} images/s",
        )
        if "validation_loss" in row:
            accuracy = f"{row['validation_accuracy']:.3f}"
            self._bar.update(self._task, score=f"  validation accuracy {accuracy}")
            line = f"{epoch}: loss {row['loss']:.4f}, validation loss {row['validation_loss']:.4f}, accuracy {accuracy}"
            self._console.print(f"{line}, {row['images_per_second']:,.0f} images/s", highlight=False, soft_wrap=True)


class SlideProgress(_Shown):
    """Shows how far a batch of slides is."""

    def __init__(self, slides: int, console: Console) -> None:
        count = TextColumn("{task.completed:g} of {task.total:g} {task.fields[what]}")
        super().__init__(console, TextColumn("{task.description}"), BarColumn(), count)
        self._all = self._bar.add_task("all", total=slides, what="slides")
        self._one = self._bar.add_task("", total=1, what="tiles", visible=False)
        self._at: Path | None = None

    def show(self, slide: Path, done: int, tiles: int) -> None:
        """How many tiles of a slide are done."""
        if slide != self._at:
            self._at = slide
            self._bar.reset(self._one, total=tiles, visible=True, description=slide.name)
        self._bar.update(self._one, completed=done)

    def tell(self, outcome: Outcome) -> None:
        """A slide that is over."""
        self._bar.advance(self._all)
        self._bar.update(self._one, visible=False)
        if outcome.state == "failed":
            line = f"{outcome.path.name} failed: {outcome.reason}"
        elif outcome.state == "skipped":
            line = f"{outcome.path.name}: done before, skipped"
        else:
            line = f"{outcome.path.name}: {read_summary(outcome.folder)}"
        self._console.print(line, highlight=False, soft_wrap=True, markup=False)
