"""API keys and the commands for them, on both databases."""

import json

import pytest
from sqlalchemy import select

from optpipe import InputError
from optpipe_cli.app import optpipe
from optpipe_server.database import Database
from optpipe_server.database.keys import Caller, Keys
from optpipe_server.database.tables import keys as table


@pytest.fixture
def keys(database: Database) -> Keys:
    return Keys(database)


def test_a_key_gives_its_name_and_scopes(keys: Keys) -> None:
    assert not keys.read().any
    one, two = keys.create("a", ["read", "submit"]), keys.create("b", {"admin"})
    assert keys.read().any
    assert keys.read().check(one) == Caller("a", frozenset({"read", "submit"}))
    assert keys.read().check(two) == Caller("b", frozenset({"admin"}))
    # A set, because the order is open if both were made in the same millisecond.
    listed = {(row.name, row.scopes, row.revoked_at) for row in keys.list()}
    assert listed == {("a", "submit read", None), ("b", "admin", None)}


def test_a_wrong_key_is_rejected(keys: Keys) -> None:
    key, other = keys.create("a", ["read"]), keys.create("a", ["read"])
    _, key_id, secret = key.split("_")
    wrong = [
        "",
        "op__",
        key_id,
        secret,
        key[:-1] + ("0" if key[-1] != "0" else "1"),
        key.upper(),
        f"{key} ",
        f"{key}\n",
        f"op_{'0' * 16}_{secret}",
        f"op_{key_id}_{other.split('_')[2]}",
        "op_\0_\ud800",
        f"op_{key_id}_{'٠' * 48}",
        "x" * 10**6,
    ]
    assert [keys.read().check(text) for text in wrong] == [None] * len(wrong)
    assert keys.read().check(key)


def test_the_key_itself_is_not_stored(keys: Keys, database: Database) -> None:
    key = keys.create("a", ["read"])
    with database.read() as db:
        [row] = db.execute(select(table)).all()
    assert not any(key.split("_")[2] in str(value) for value in row)
    assert not any(row.secret_sha256 in str(value) for value in keys.list()[0])


def test_a_revoked_key_is_rejected_and_keys_are_still_required(keys: Keys) -> None:
    key = keys.create("a", ["read"])
    key_id = key.split("_")[1]
    keys.revoke(key_id)
    assert keys.read().check(key) is None
    before = keys.list()
    keys.revoke(key_id)
    assert keys.list() == before
    assert keys.read().any, "a service that asked for keys does not open when the last one goes"
    with pytest.raises(InputError, match="id = 'nobody': no key has this id"):
        keys.revoke("nobody")
    with pytest.raises(InputError, match="id: this is a whole key") as refused:
        keys.revoke(key)
    assert key.split("_")[2] not in str(refused.value)


@pytest.mark.parametrize(
    ("name", "scopes", "message"),
    [
        ("", ["read"], "name = ''"),
        ("x" * 65, ["read"], "name = 'xxx"),
        ("a b", ["read"], "name = 'a b'"),
        ("a\n", ["read"], "name = "),
        ("a", ["write"], "scope = 'write': expected submit, read, admin"),
        ("a", [], "scope: a key needs at least one"),
    ],
)
def test_a_wrong_name_or_scope_is_refused(keys: Keys, name: str, scopes: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        keys.create(name, scopes)
    assert not keys.read().any


def test_the_commands_work_beside_a_running_service(
    database: Database, database_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def keys(*words: str) -> str:
        optpipe()(["keys", *words, "--database", database_url])
        return capsys.readouterr().out

    key = keys("create", "a", "--scope", "submit", "--scope", "read")
    assert Keys(database).read().check(key.strip()) == Caller("a", frozenset({"submit", "read"}))
    key_id = key.split("_")[1]
    [shown] = json.loads(keys("list", "--json"))
    assert (shown["id"], shown["scopes"]) == (key_id, ["submit", "read"])
    assert keys("revoke", key_id) == f"{key_id} is revoked\n"
    assert Keys(database).read().check(key.strip()) is None
