"""The API over HTTP.

`server` runs uvicorn with `app`, whose middleware is asked before every route; `auth` knows keys. `jobs`, `results`,
`tools`, `health` and `page` are the routes; `bodies` are what they read, `schemas` what they reply of jobs. All of them
work on `service`.
"""
