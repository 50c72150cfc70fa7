"""What a busy machine may take, where a program gives up sooner."""

GRACE_S = 100.0  # for a solver to end after its time limit
