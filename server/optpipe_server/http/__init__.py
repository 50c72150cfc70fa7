"""The API over HTTP.

`server` runs uvicorn with `app`, whose middleware is asked before every route; `auth` reads keys. `jobs`, `results` and
`tools` are the routes of jobs and tools, `app` has the others; `schemas` are what they read and reply. All of them work
on `service`.
"""
