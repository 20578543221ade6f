"""The paper's three networks, and what turns more faithfully in each of them than the paper's choices."""

from rotopath.models.architecture import Architecture, Stage

FAITHFUL: dict[str, str | bool] = {
    "kernel": "harmonic",
    "pooling": "rms-blur",
    "upsampling": "bilinear",
    "projection": "mean",
}

MITOSIS = Architecture(
    name="mitosis",
    task="detects mitotic figures",
    stages=(
        Stage("body", pool=2),
        Stage("body", pool=2),
        Stage("body", pool=2),
        Stage("wide"),
        Stage(16, kernel=1),
    ),
    projection="max",
    outputs=1,
    head_norm=False,
    input_px=68,
    published={1: (16, 64), 4: (10, 16), 8: (8, 8), 16: (6, 4)},
    faithful=FAITHFUL,
)

NUCLEI = Architecture(
    name="nuclei",
    task="segments nuclei (inside, border, background)",
    stages=(
        Stage("body", pool=2),
        Stage("body", pool=2),
        Stage("body"),
        Stage("body", skip=1),
        Stage("wide", skip=0),
        Stage(16, kernel=1),
    ),
    projection="max",
    outputs=3,
    head_norm=True,
    input_px=60,
    published={1: (16, 64), 4: (10, 16), 8: (8, 8), 16: (6, 4)},
    faithful=FAITHFUL,
)

TUMOR = Architecture(
    name="tumor",
    task="tells tumor from other tissue",
    stages=(
        Stage("body", pool=2),
        Stage("body", pool=2),
        Stage("body", pool=3),
        Stage("wide"),
        Stage(16, kernel=1),
    ),
    projection="mean",
    outputs=1,
    head_norm=False,
    input_px=88,
    published={1: (32, 64), 4: (19, 16), 8: (14, 8), 16: (10, 4)},
    faithful=FAITHFUL | {"smoothing": True},
)

ARCHITECTURES = {architecture.name: architecture for architecture in (MITOSIS, NUCLEI, TUMOR)}
