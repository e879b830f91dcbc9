"""The contract of outbox stores with detours: other tenants can pass a tenant, and only the tenant is affected.

A binding is made as for `OutboxStoreContract`, whose promises are included.
"""

from __future__ import annotations

import pytest

from ...errors import LeaseLostError, StoreError
from ...outbox import Batch, Failure, Lane, Page, Row, Status
from .outbox import ROUTE, OutboxStoreContract, World, delivery


class DetourContract(OutboxStoreContract):
    """The promises of `part`, `join`, and of polls of a detour."""

    async def test_a_lane_passes_over_a_tenant_with_a_detour_which_has_its_rows(self, world: World) -> None:
        lane = await self.tenants(world, "loud", "calm", "loud", None)
        lane = await world.store.part(lane, ["loud"])
        page = await world.store.poll(lane, limit=10)
        assert [row.tenant for row in page.fresh] == ["calm", None]
        lane = await self.sent(world, lane, page)
        page = await world.store.poll(lane, limit=10, detour="loud")
        assert [row.tenant for row in page.fresh] == ["loud", "loud"]

    async def test_h110_a_detour_sees_only_what_its_lane_has_passed_over(self, world: World) -> None:
        lane = await self.tenants(world, "calm")
        lane = await world.store.part(lane, ["loud"])
        await world.append([delivery(tenant="loud")])
        assert (await world.store.poll(lane, limit=10, detour="loud")).fresh == ()
        lane = await self.sent(world, lane, await world.store.poll(lane, limit=10))
        assert len((await world.store.poll(lane, limit=10, detour="loud")).fresh) == 1

    async def test_a_lane_with_nothing_but_rows_of_detours_moves_on(self, world: World) -> None:
        lane = await world.store.part(await self.tenants(world, "loud", "loud"), ["loud"])
        page = await world.store.poll(lane, limit=10)
        assert (page.fresh, page.passed) == ((), True)
        lane = await world.store.announce(lane, Batch(cursor=page.cursor), settle=False)
        assert not (await world.store.poll(lane, limit=10)).passed
        assert len((await world.store.poll(lane, limit=10, detour="loud")).fresh) == 2

    async def test_everybody_gets_everything_once_and_in_order(self, world: World) -> None:
        """With batches of two, and a detour that begins in the middle, ends, and begins again."""
        tenants = ["loud", "calm", "loud", "loud", None, "loud", "calm", "loud", "loud", "loud", "calm"]
        lane = await self.tenants(world, *tenants)
        everything = [row.id for row in (await world.store.poll(lane, limit=100)).fresh]
        got: list[Row] = []
        for step in range(30):
            if step in {1, 12}:
                lane = await world.store.part(lane, ["loud"])
            if step == 6:
                await world.append([delivery(tenant=tenant) for tenant in ("loud", "calm", "loud")])
            for detour in (None, *(lane.detours or ())):
                page = await world.store.poll(lane, limit=2, detour=detour)
                got += page.fresh
                lane = await self.sent(world, lane, page)
            if step in {10, 20}:
                lane = await world.store.join(lane, ["loud"])
                assert not lane.detours
        assert len(got) == len({row.id for row in got}) == len(everything) + 3
        for tenant in ("loud", "calm", None):
            ids = [row.id for row in got if row.tenant == tenant]
            assert ids == sorted(ids)

    async def test_h110_a_detour_ends_only_when_it_has_come_as_far_as_its_lane(self, world: World) -> None:
        lane = await world.store.part(await self.tenants(world, "calm", "loud"), ["loud"])
        lane = await self.sent(world, lane, await world.store.poll(lane, limit=10))
        lane = await world.store.join(lane, ["loud"])
        assert [*(lane.detours or ())] == ["loud"]
        page = await world.store.poll(lane, limit=10, detour="loud")
        lane = await world.store.join(await self.sent(world, lane, page), ["loud"])
        assert not lane.detours
        assert (await world.store.poll(lane, limit=10)).fresh == ()

    async def test_a_successor_finds_the_detours_and_rebuilds_their_batch(self, world: World) -> None:
        lane = await world.store.part(await self.tenants(world, "loud", "calm", "loud", "loud", lease=0.05), ["loud"])
        lane = await self.sent(world, lane, await world.store.poll(lane, limit=10))
        page = await world.store.poll(lane, limit=2, detour="loud")
        first = lane.next_number
        await world.store.announce(lane, self.batch_of(page), settle=False)
        new = await self.lane(world, "r2")
        assert [*(new.detours or ())] == ["loud"]
        assert [(number, row.id) for number, row in await world.store.rebuild(new)] == [
            (first, page.fresh[0].id),
            (first + 1, page.fresh[1].id),
        ]
        [left] = (await world.store.poll(new, limit=10, detour="loud")).fresh
        assert left.id > page.fresh[1].id
        assert [await self.status(world, row) for row in (*page.fresh, left)] == ["SENDING", "SENDING", "PENDING"]
        new = await world.store.settle(new)
        assert [await self.status(world, row) for row in (*page.fresh, left)] == ["SENT", "SENT", "PENDING"]

    async def test_h103_a_batch_of_the_lane_is_rebuilt_without_the_rows_of_its_detours(self, world: World) -> None:
        lane = await world.store.part(await self.tenants(world, "loud", "calm", "loud", "calm", lease=0.05), ["loud"])
        page = await world.store.poll(lane, limit=10)
        await world.store.announce(lane, self.batch_of(page), settle=False)
        new = await self.lane(world, "r2")
        assert [row.id for _, row in await world.store.rebuild(new)] == [row.id for row in page.fresh]
        loud = (await world.store.poll(new, limit=10, detour="loud")).fresh
        assert [await self.status(world, row) for row in loud] == ["PENDING", "PENDING"]

    async def test_failed_rows_of_a_detour_are_redone_and_hold_their_key(self, world: World) -> None:
        lane = await world.store.part(await self.tenants(world, "loud", "loud"), ["loud"])
        page = await world.store.poll(lane, limit=10)
        lane = await world.store.announce(lane, Batch(cursor=page.cursor), settle=False)
        page = await world.store.poll(lane, limit=10, detour="loud")
        one, two = page.fresh
        refused = Batch(failures=[Failure(one.id, 1, "no", 0.0)], parked=[two.id], cursor=page.cursor)
        lane = await world.store.announce(lane, refused, settle=False)
        assert {key.tenant for key in lane.waiting} == {"loud"}
        assert (await world.store.poll(lane, limit=10, detour="loud")).fresh == ()
        assert [row.id for row in await self.due(world, lane, 2)] == [one.id, two.id]
        lane = await world.store.join(lane, ["loud"])
        assert not lane.detours
        assert [row.id for row in await self.due(world, lane, 2)] == [one.id, two.id]

    async def test_a_row_that_is_discarded_before_its_detour_comes_to_it_is_never_sent(self, world: World) -> None:
        lane = await world.store.part(await self.tenants(world, "loud", "calm", "loud"), ["loud"])
        lane = await self.sent(world, lane, await world.store.poll(lane, limit=10))
        one, two = (await world.store.poll(lane, limit=10, detour="loud")).fresh
        asked = await world.request(one.id, "discard")
        page = await world.store.poll(lane, limit=10)
        lane = await world.store.announce(lane, Batch(requests=[asked], cursor=page.cursor), settle=False)
        await world.append([delivery(tenant="calm")])
        lane = await self.sent(world, lane, await world.store.poll(lane, limit=10))
        page = await world.store.poll(lane, limit=10, detour="loud")
        assert [row.id for row in page.fresh] == [two.id]
        lane = await self.sent(world, lane, page)
        assert await world.status(one.id) is Status.DISCARDED

    async def test_detours_are_fenced_and_wait_for_what_is_under_way(self, world: World) -> None:
        old = await self.tenants(world, "loud", "calm", lease=0.05)
        page = await world.store.poll(old, limit=1)
        new = await self.lane(world, "r2")
        with pytest.raises(LeaseLostError):
            await world.store.part(old, ["loud"])
        new = await world.store.announce(new, self.batch_of(page), settle=False)
        with pytest.raises(StoreError, match="under way"):
            await world.store.part(new, ["loud"])

    async def test_a_lane_whose_detour_has_something_left_is_ready(self, world: World) -> None:
        lane = await world.store.part(await self.tenants(world, "loud"), ["loud"])
        page = await world.store.poll(lane, limit=10)
        lane = await world.store.announce(lane, Batch(cursor=page.cursor), settle=False)
        assert lane.name in await world.store.ready([ROUTE.id])
        lane = await self.sent(world, lane, await world.store.poll(lane, limit=10, detour="loud"))
        lane = await world.store.join(lane, ["loud"])
        assert lane.name not in await world.store.ready([ROUTE.id])

    # -- helpers -------------------------------------------------------------------------------------------------------

    async def tenants(self, world: World, *tenants: str | None, lease: float = 30.0) -> Lane:
        """A lane with a row of each of these tenants."""
        await world.register(ROUTE)
        await world.append([delivery(tenant=tenant) for tenant in tenants])
        return await self.lane(world, lease=lease)

    def batch_of(self, page: Page) -> Batch:
        """A batch of the whole page."""
        return Batch(items=[row.id for row in page.fresh], cursor=page.cursor)

    async def sent(self, world: World, lane: Lane, page: Page) -> Lane:
        """Send the whole page, unless it is empty."""
        if not page.fresh and not page.passed:
            return lane
        lane = await world.store.announce(lane, self.batch_of(page), settle=False)
        return await world.store.settle(lane) if lane.announced else lane

    async def status(self, world: World, row: Row) -> str:
        """The status of a row."""
        return (await world.status(row.id)).value
