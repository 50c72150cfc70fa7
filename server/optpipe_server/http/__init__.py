"""The API over HTTP.

`server` runs uvicorn with `app`; `auth`, `guarded_route` and `connections` stand before every route. `routes`,
`results`, `tools`, `own_processes`, `workbench`, `health` and `page` are the routes; `bodies` are what they read,
`schemas` what they reply of jobs, `examples` bodies for the API's description. `service` is what the routes work on.
"""
