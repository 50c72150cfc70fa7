"""Programs of two ranks for four micro-batches, and of a V of four stages for three, that several tests run."""


def programs(*texts: str) -> list[list[str]]:
    return [text.split() for text in texts]


ONE_F_ONE_B = programs("0F0 0F1 0BW0 0F2 0BW1 0F3 0BW2 0BW3", "1F0 1BW0 1F1 1BW1 1F2 1BW2 1F3 1BW3")
SPLIT = programs("0F0 0F1 0F2 0B0 0F3 0B1 0W0 0B2 0W1 0B3 0W2 0W3", "1F0 1B0 1F1 1W0 1B1 1F2 1W1 1B2 1F3 1B3 1W2 1W3")
OFFLOADED = programs(
    "0F0 0O0 0D0 0F1 0O1 0F2 0D1 0R0 0B0 0W0 0R1 0F3 0B1 0W1 0B2 0W2 0B3 0W3",
    "1F0 1O0 1D0 1R0 1BW0 1F1 1O1 1F2 1D1 1R1 1B1 1W1 1BW2 1F3 1BW3",
)
RECOMPUTED = programs(
    "0F0 0F1 0C0 0BW0 0F2 0BW1 0F3 0C2 0B2 0W2 0BW3", "1F0 1C0 1BW0 1F1 1BW1 1F2 1BW2 1F3 1C3 1B3 1W3"
)
# Stages 0 and 3 are on rank 0, stages 1 and 2 on rank 1.
V_SHAPED = programs(
    "0F0 0F1 0O1 3F0 0D1 3B0 0F2 3F1 3W0 3B1 0B0 0R1 3W1 3F2 0W0 0B1 3BW2 0W1 0BW2",
    "1F0 2F0 1F1 2F1 2B0 1B0 1F2 2F2 2W0 2B1 1W0 1B1 2W1 1W1 2BW2 1BW2",
)
