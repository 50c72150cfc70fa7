"""What the search over one device works on: the columns of a state, the device, and the states that are known."""

from __future__ import annotations

from typing import NamedTuple

from optpipe.model.arrays import Flags, Floats, Ints

QUEUES = 2  # other devices that a state of one stage knows
# Columns of a state: the time; until when compute is busy, and with what; forwards started; weight gradients that wait;
# of each line until when it is busy, with what, and whose part it carries; how many activations are held or away; the
# bytes that are taken until the running op ends; of each queue when the last micro-batch that passes it can be back;
# and of the n-th activation when its B may start, its parts that are there, and when the n-th B of all may start.
NOW, UNTIL, RUNS, STARTED, WAITING, LINE, VISITS, LEVEL, QUEUE, FIRST = 0, 1, 2, 3, 4, 5, 11, 12, 13, 13 + QUEUES
# What runs on compute, and on a line.
IDLE, FORWARD, BACKWARD, AGAIN, WEIGHT = 0.0, 1.0, 2.0, 3.0, 4.0
OUT, BACK = 1.0, 2.0
# In place of the parts of an activation that are there: it is to be computed again, or is being computed.
CHECKPOINT, COMING = -1.0, -2.0
ROWS, DONE, TAKEN, FULL, LENGTH, CELLS = range(6)  # columns of `tally`
MOST_VISITS = 128  # activations that a state tells apart


class OneStage(NamedTuple):
    """A device with one stage; all others only take time, `queues` for one micro-batch after the other.

    Attributes
    ----------
    ms
        Of F, B, W, C, O and R (one part); from the end of F to the start of B at least; from the end of the last B to
        the end.
    queues
        (2, 2) other devices, one row each, that micro-batches pass between F and B here, one after the other: ms from
        the end of F to the start of B by the device's own work, and the ms of that work.
    rules
        Micro-batches; lines: 0 if nothing leaves, 1 for both directions; whether activations are computed again.
    size
        Bytes of the memory, of an activation while F, C and B run, between F and C, of one that waits for W, and while
        W runs.
    present
        (parts + 1,) bytes of an activation with so many parts there.
    shares
        (measures, 6) what these sizes are worth of the memory: while F, C, B and W run, between F and C, and the most
        that one activation holds while it waits for no W, or 1.
    worth
        (measures, parts + 1) likewise of `present`.
    less
        (measures, parts + 1) by how many ms of all the memory an activation takes less for each further part that
        leaves, falling; then with a recompute.
    """

    ms: Floats
    queues: Floats
    rules: Ints
    size: Ints
    present: Ints
    shares: Floats
    worth: Floats
    less: Floats


class Known(NamedTuple):
    """The states of a search, a row each.

    Attributes
    ----------
    cells
        The columns of all rows, one row after the other; of each as many as it uses.
    begin
        (rows,) the first cell of each.
    bound
        (rows,) the least end of each.
    chain
        (rows,) the next one with the same hash, then -1.
    table
        The first one of each hash, or -1.
    heap
        (rows,) a heap of rows, the least end on top.
    same
        (columns,) which of them are alike where one state stands for another; in the others it is no later.
    tally
        (6,) how many rows there are, whether one is complete, states taken, whether no row, cell or column is left, the
        heap's length, and the cells in use.
    """

    cells: Floats
    begin: Ints
    bound: Floats
    chain: Ints
    table: Ints
    heap: Ints
    same: Flags
    tally: Ints
