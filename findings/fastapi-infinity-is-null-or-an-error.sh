#!/usr/bin/env bash
# FastAPI 0.163.2, pydantic 2.14.3: a float that is infinite is sent as null, with status 200, where the function names what it
# returns, also for a model whose field is a float; without that annotation the same value is an error 500. A body with 1e400 is
# taken as infinite, and comes back as null.
#
# Expected: one behaviour for both, and no null in a field whose schema is a number. Seen: a client that reads the answer by the
# service's own OpenAPI schema fails on null.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq --disable-pip-version-check fastapi==0.163.2 pydantic==2.14.3 httpx2==2.16.2 httpx==0.28.1
"$folder/venv/bin/python" -W ignore - <<'PYTHON' | tee "$folder/seen"
from fastapi import FastAPI
from fastapi.testclient import TestClient
from pydantic import BaseModel


class Time(BaseModel):
    ms: float


app = FastAPI()


@app.get("/named")
def named() -> Time:
    return Time(ms=float("inf"))


@app.get("/not-named")
def not_named():
    return Time(ms=float("inf"))


@app.post("/echo")
def echo(time: Time) -> Time:
    return time


client = TestClient(app, raise_server_exceptions=False)
body = {"content": '{"ms": 1e400}', "headers": {"content-type": "application/json"}}
for answer in client.get("/named"), client.get("/not-named"), client.post("/echo", **body):
    print(answer.request.url.path, answer.status_code, answer.text)
print(client.get("/openapi.json").json()["components"]["schemas"]["Time"]["properties"])
PYTHON
diff - "$folder/seen" <<'SEEN'
/named 200 {"ms":null}
/not-named 500 Internal Server Error
/echo 200 {"ms":null}
{'ms': {'type': 'number', 'title': 'Ms'}}
SEEN
echo "as stated"
