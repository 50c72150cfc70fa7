"""The client of the solver service: asks for schedules while the training runs, and never makes a step wait.

- `client`: the calls of the training; `remote_search`: the job on the service, and the check of its schedules;
- `connection`, `answers`, `outages`: HTTP requests, what is read of the answers, waits and warnings;
- `adoptions`: tells the service which schedules run;
- `stream`: the client of a training that schedules each step itself; `background`: the thread of both clients.
"""
