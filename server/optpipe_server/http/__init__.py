"""The API over HTTP.

`server` runs uvicorn with `app`; `auth`, `limits` and `connections` stand before every route. `routes`, `results`,
`tools` and `health` are the routes; `bodies` are what they read, `views` what they write, `schemas`, `openapi` and
`examples` how the API's description shows both. `service` is what the routes work on.
"""
