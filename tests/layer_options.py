"""Options of convolutions, for property tests over all combinations that a convolution accepts."""

from hypothesis import strategies as st

from rotopath import group

OPTIONS = {
    "stride": st.integers(1, 3),
    "padding": st.integers(0, 3),
    "dilation": st.integers(1, 2),
    "groups": st.sampled_from([1, 2, 4]),
    "padding_mode": st.sampled_from(["zeros", "reflect", "replicate", "circular"]),
    "kernel": st.sampled_from(group.KERNELS),
}
