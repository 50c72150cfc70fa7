"""What one tenant may have of what all share: streams, computations, comparisons, submissions, and jobs without a
key."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from pathlib import Path

import pytest
from support.service.jobs import submit

from optpipe_server.database import Database, Jobs
from optpipe_server.database.keys import Keys
from optpipe_server.database.refusals import MissingError
from optpipe_server.http.job_updates import JobUpdates
from optpipe_server.http.replies import ReplyError
from optpipe_server.http.shares import QUEUED_OF_A_TENANT, ComputeQueue, Shares, Turns
from optpipe_server.settings import LOCAL


def test_a_tenant_has_its_share_and_another_one_too() -> None:
    shares = Shares(7, 2, "apples")
    with ExitStack() as held:
        for tenant in ("a", "a", "b"):
            held.enter_context(shares.one(tenant))
        with pytest.raises(ReplyError, match="Your tenant has 2 apples already") as refused, shares.one("a"):
            pass
        assert refused.value.status_code == 429
        for tenant in ("b", LOCAL, LOCAL, LOCAL):
            held.enter_context(shares.one(tenant))
    with shares.one("a"), shares.one("a"):
        pass


def test_a_tenant_has_half_of_the_streams(tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path / 'jobs.sqlite'}")
    updates = JobUpdates(Jobs(database), most=2)

    async def follow(*tenants: str) -> None:
        for tenant in tenants[:1]:
            async with updates.subscribe(tenant, "job", version=0):
                await follow(*tenants[1:])

    with pytest.raises(ReplyError, match="Your tenant has 1 clients that follow jobs already"):
        asyncio.run(follow("a", "a"))
    asyncio.run(follow("a", "b"))
    database.close()


def test_turns_of_a_tenant_hold_up_only_itself() -> None:
    async def turns() -> list[str]:
        free, said, go_on = Turns(1), list[str](), asyncio.Event()

        async def have(tenant: str) -> None:
            async with free.one(tenant):
                said.append(tenant)
                if tenant == "a":
                    await go_on.wait()

        greedy = [asyncio.create_task(have("a")) for _ in range(3)]
        await asyncio.wait_for(asyncio.gather(have("b"), have(LOCAL)), 60)
        seen = sorted(said)
        go_on.set()
        await asyncio.gather(*greedy)
        assert len(said) == 5
        return seen

    assert asyncio.run(turns()) == [LOCAL, "a", "b"]


def test_computations_run_one_at_a_time_and_those_of_a_tenant_leave_room_for_others() -> None:
    async def ask() -> tuple[list[int], str]:
        queue, go_on = ComputeQueue(), asyncio.Event()
        loop, inside, most = asyncio.get_running_loop(), 0, 0

        def held() -> str:
            nonlocal inside, most
            inside += 1
            most = max(most, inside)
            asyncio.run_coroutine_threadsafe(go_on.wait(), loop).result(60)
            inside -= 1
            return "done"

        greedy = [asyncio.create_task(queue.run("a", held)) for _ in range(QUEUED_OF_A_TENANT + 3)]
        other = asyncio.create_task(queue.run("b", lambda: "done"))
        await asyncio.sleep(0)
        go_on.set()
        answers = await asyncio.gather(*greedy, return_exceptions=True)
        assert most == 1
        return [answer.status_code for answer in answers if isinstance(answer, ReplyError)], await other

    assert asyncio.run(ask()) == ([429] * 3, "done")


def test_a_key_for_local_does_not_share_the_jobs_without_a_key(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'jobs.sqlite'}"
    database = Database(url)
    jobs = Jobs(database)
    own, keyed = submit(database, LOCAL), submit(database, "local")
    with pytest.raises(MissingError):
        jobs.job("local", own)
    Keys(database).create("local", ["read"])
    assert [job.id for job in jobs.page("local", None, None, 9)] == [keyed]
    database.close()
