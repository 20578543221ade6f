"""List and find the pretrained models, which are part of the package.

The folder of this module contains one folder for each model, with the files of a run folder and a card. A card is a
Markdown file that describes the data, scores, limits and terms of use of the model. The script `tools/publish.py` makes
these folders from the runs of a study.
"""

from pathlib import Path

HOME = Path(__file__).parent  # contains the folders of the models
CARD = "card.md"


def list_pretrained() -> list[str]:
    """Return the names of the pretrained models, sorted. `rotopath.load` accepts these names.

    >>> rp.models.list_pretrained()
    ['mitosis-amida13-n8', 'nuclei-kumar-n8', 'tumor-pcam-n8']
    """
    return sorted(card.parent.name for card in HOME.glob(f"*/{CARD}"))


def find_folder(name: str) -> Path | None:
    """Return the folder of the pretrained model `name`, or None if no pretrained model has this name."""
    return HOME / name if name in list_pretrained() else None
