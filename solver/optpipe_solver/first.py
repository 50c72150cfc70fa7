"""`python -m optpipe_solver.first`: bounds and a first schedule in milliseconds, for many requests."""

from optpipe_solver.portfolio.first_schedules import main

if __name__ == "__main__":
    main()
