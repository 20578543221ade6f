"""Pretrained models, which are part of the package: a folder each, with the files of a run and a card.

In: a name. Out: its folder. `tools/publish.py` makes them from the runs of a study.
"""

from pathlib import Path

HOME = Path(__file__).parent
CARD = "card.md"


def list_pretrained() -> list[str]:
    """The names of the models that come with the package, for `rp.load`.

    >>> rp.models.list_pretrained()
    ['mitosis-amida13-n8', 'nuclei-kumar-n8', 'tumor-pcam-n8']
    """
    return sorted(card.parent.name for card in HOME.glob(f"*/{CARD}"))


def find(name: str) -> Path | None:
    """The folder of the model, if there is one of that name."""
    return HOME / name if name in list_pretrained() else None
