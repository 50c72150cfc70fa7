"""`python -m optpipe_solver.compare`: the schedule of every published system and every heuristic, side by side."""

from optpipe_solver.portfolio.compare_methods import main

if __name__ == "__main__":
    main()
