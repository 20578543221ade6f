"""Pretrained models. They are part of the package: one folder for each model, with the files of a run and a card.

A card describes a model in Markdown: its data, scores, limits and terms of use. `tools/publish.py` made the folders
from the runs of a study.
"""

from pathlib import Path

HOME = Path(__file__).parent
CARD = "card.md"


def list_pretrained() -> list[str]:
    """Return the names of the models that are part of the package. `rotopath.load` accepts these names.

    >>> rp.models.list_pretrained()
    ['mitosis-amida13-n8', 'nuclei-kumar-n8', 'tumor-pcam-n8']
    """
    return sorted(card.parent.name for card in HOME.glob(f"*/{CARD}"))


def find_folder(name: str) -> Path | None:
    """Return the folder of the pretrained model with this name, or None if there is none."""
    return HOME / name if name in list_pretrained() else None
