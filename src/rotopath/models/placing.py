"""Where a network lifts and where it projects: which of its values are images, features, and answers.

In: the steps of a plain network. Out: for each value, whether it is an image that nothing has lifted yet, SE(2)
features, or plain: behind the projection, which lies between features and whatever plain step reads them.
"""

from enum import Enum

from torch import fx, nn

from rotopath.models.steps import Step

PLAIN_ONLY = ("flatten", "linear", "answer", "output")
MOVABLE = (
    "pointwise",
    "dropout",
    "norm",
    "adaptive",
    "resize",
    "pad",
    "crop",
)  # as exact behind the projection as before it


class Kind(Enum):
    IMAGE = "image"
    FEATURES = "features"
    PLAIN = "plain"
    NUMBER = "number"  # a size, or a constant


def place(steps: dict[fx.Node, Step]) -> dict[fx.Node, Kind]:
    """Images are lifted by the first convolutions that look further than a point, and projected as late as possible.

    That is before what has no orientations, such as `Linear`, and at the latest at the output. But a position keeps
    an orientation of its own: the projection comes before the last gathering of all positions, and not behind it. And
    the last map to the answers, a 1×1 convolution where it is not `Linear`, reads what has been projected.
    """
    kinds: dict[fx.Node, Kind] = {}
    for node, step in steps.items():
        kinds[node] = _kind(node, step, kinds)
    if Kind.FEATURES not in kinds.values():
        raise ValueError(
            "equivariant found no convolution larger than 1×1 that reads images; there is nothing to lift."
        )
    for node in reversed(kinds):
        if kinds[node] is Kind.FEATURES and all(kinds[user] is Kind.PLAIN for user in _readers(node, kinds)):
            for each in _head(node, steps, kinds):
                kinds[each] = Kind.PLAIN
    return kinds


def _kind(node: fx.Node, step: Step, kinds: dict[fx.Node, Kind]) -> Kind:
    read = {kinds[each] for each in node.all_input_nodes} - {Kind.NUMBER}
    if step.role in ("size", "constant"):
        return Kind.NUMBER
    if step.role == "placeholder":
        return Kind.IMAGE
    if not read:
        return Kind.NUMBER
    if step.role in PLAIN_ONLY or Kind.PLAIN in read or len(read) > 1:
        return Kind.PLAIN
    lifts = step.role in ("convolution", "transposed") and not step.looks_at_points()
    return Kind.FEATURES if lifts else read.pop()


def _head(last: fx.Node, steps: dict[fx.Node, Step], kinds: dict[fx.Node, Kind]) -> list[fx.Node]:
    """The steps up to `last`, in single file, that belong behind the projection."""
    mapped = any(_is_map(steps[node]) for node in _descendants(last) if node in steps)
    file: list[fx.Node] = []
    behind = 0  # how many of the file
    node = last
    while all(user in file or kinds[user] is Kind.PLAIN for user in _readers(node, kinds)):
        step = steps[node]
        is_head = step.looks_at_points() and not mapped
        if step.role not in MOVABLE and not is_head:
            break
        file.append(node)
        if step.role == "adaptive" or is_head:
            behind = len(file)
        mapped = mapped or is_head
        read = [each for each in node.all_input_nodes if kinds[each] is Kind.FEATURES]
        if len(read) != 1:
            break
        node = read[0]
    return file[:behind]


def _is_map(step: Step) -> bool:
    return isinstance(step.layer, nn.Linear | nn.Conv2d)


def _readers(node: fx.Node, kinds: dict[fx.Node, Kind]) -> list[fx.Node]:
    return [user for user in node.users if kinds[user] is not Kind.NUMBER]


def _descendants(node: fx.Node) -> set[fx.Node]:
    found: set[fx.Node] = set()
    left = list(node.users)
    while left:
        if (user := left.pop()) not in found:
            found.add(user)
            left += user.users
    return found
