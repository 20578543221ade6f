"""The loss of tasks with one logit: is it there or not."""

import torch.nn.functional as F
from torch import Tensor


def binary_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """The mean over windows of logits (B, 1, 1, 1) and labels (B,)."""
    if logits.numel() != len(labels):
        raise ValueError(
            f"Each of the {len(labels)} labels needs one logit, but there are logits of shape {tuple(logits.shape)}; "
            f"train on windows of the size of the receptive field."
        )
    return F.binary_cross_entropy_with_logits(logits.flatten(), labels.to(logits.dtype))
