"""What several tests share.

- `problems`: problems and schedules, built or drawn by hypothesis
- `oracles`: independent judges: other simulators, enumeration of all schedules, plain references
- `fakes`: what stands in for a solver, an engine, a service, CUDA
- `traces`: recordings of trainings as other programs write them
- `service`: the real service: its processes, its database, jobs and requests
- `ranks`: processes of torch that run functions of it, and models for them
- `deploy`: compose, clusters, what is started from the repository's files
"""
