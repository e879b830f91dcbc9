"""The arithmetic of the log's cursor: what is fresh, what is late, and where a lane stands after a part of it."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import pytest

from pillarbox.cursor import FIRST_XID, NOTHING, Cursor, RowAt, Snapshot, Window, look
from pillarbox.errors import StoreError


def snapshot(text: str) -> Snapshot:
    return Snapshot.parse(text)


def rows(*places: str) -> list[RowAt]:
    """Rows as ``id@xid``, sorted by id."""
    return sorted(RowAt(*map(int, place.split("@"))) for place in places)


class TestSnapshot:
    @pytest.mark.parametrize(
        "text", ["3:3:", "10:20:10,14,15", "748:748:", "18446744073709551615:18446744073709551615:"]
    )
    def test_the_text_is_postgresql_s_own(self, text: str) -> None:
        assert str(Snapshot.parse(text)) == text

    def test_it_shows_what_had_ended(self) -> None:
        now = snapshot("10:15:10,13")
        assert [xid for xid in range(8, 18) if now.shows(xid)] == [8, 9, 11, 12, 14]

    def test_what_runs_at_or_above_xmax_is_hidden_though_it_is_not_listed(self) -> None:
        now = snapshot("10:15:10,13")
        assert not any(now.shows(xid) for xid in (15, 16, 1_000_000))

    def test_nothing_shows_no_transaction(self) -> None:
        assert not NOTHING.shows(FIRST_XID)
        assert NOTHING.shows(0)  # a row from before there was a log has no transaction

    @pytest.mark.parametrize("earlier", ["9:15:", "10:14:", "9:14:"])
    def test_h102_a_snapshot_from_an_earlier_time_is_known(self, earlier: str) -> None:
        assert snapshot(earlier).lies_below(snapshot("10:15:"))
        assert not snapshot("10:15:").lies_below(snapshot(earlier))

    def test_a_snapshot_of_the_same_moment_is_not_earlier(self) -> None:
        assert not snapshot("10:15:10").lies_below(snapshot("10:15:10,12"))


class TestText:
    """A cursor is kept as text, in the lane's row and in announcements."""

    @pytest.mark.parametrize(
        "cursor",
        [
            Cursor(),
            Cursor(7, snapshot("10:15:10,13")),
            Cursor(7, snapshot("10:15:10,13"), snapshot("13:17:13,16"), (10, 15), 4),
            Cursor(7, snapshot("10:10:"), snapshot("12:12:"), (10,)),
        ],
        ids=str,
    )
    def test_it_comes_back_as_it_was(self, cursor: Cursor) -> None:
        assert Cursor.parse(str(cursor)) == cursor

    def test_the_beginning_is_short(self) -> None:
        assert str(Cursor()) == "0 3:3:"

    def test_pages_say_more(self) -> None:
        cursor = Cursor(7, snapshot("10:15:10,13"), snapshot("13:17:13,16"), (10, 15), 4)
        assert str(cursor) == "7 10:15:10,13 13:17:13,16 10,15 4"


class TestLook:
    def test_the_first_one_finds_everything_that_is_committed(self) -> None:
        window = look(Cursor(), rows("1@3", "2@5", "3@4"), snapshot("6:6:"), 10)
        assert (window.ids, window.after(3)) == ((1, 2, 3), Cursor(3, snapshot("6:6:")))

    def test_what_is_not_visible_is_not_found(self) -> None:
        assert look(Cursor(), rows("1@3", "2@5", "3@4"), snapshot("4:6:4"), 10).ids == (1, 2)

    def test_an_empty_one_still_moves_the_snapshot(self) -> None:
        window = look(Cursor(3, snapshot("6:6:")), [], snapshot("9:9:"), 10)
        assert window.dealt_with(()) == Cursor(3, snapshot("9:9:"))

    def test_late_rows_come_before_fresh_ones_and_count_towards_the_limit(self) -> None:
        start = Cursor(2, snapshot("3:5:3"))
        window = look(start, rows("1@3", "2@4", "3@6", "4@7"), snapshot("8:8:"), 2)
        assert (window.late, window.fresh, window.more) == ((1,), (3,), False)

    def test_late_rows_that_fill_the_limit_leave_no_room_for_fresh_ones(self) -> None:
        window = look(Cursor(3, snapshot("3:5:3")), rows("1@3", "2@3", "3@4", "4@6"), snapshot("8:8:"), 2)
        assert (window.ids, window.more) == ((1, 2), False)
        assert window.after(2) == Cursor(3, snapshot("8:8:"))

    def test_rows_without_a_transaction_are_fresh_once(self) -> None:
        window = look(Cursor(), rows("1@0", "2@0", "3@5"), snapshot("6:6:"), 2)
        assert window.ids == (1, 2)
        assert look(window.after(2), rows("1@0", "2@0", "3@5"), snapshot("6:6:"), 2).ids == (3,)

    def test_h01_a_row_that_commits_late_with_a_low_id_is_found(self) -> None:
        """A writes row 1 and sleeps; B writes row 2 and commits; a poller that remembers 2 would never see 1."""
        a, b = RowAt(1, 3), RowAt(2, 4)
        first = look(Cursor(), [b], snapshot("3:5:3"), 10)
        assert first.ids == (2,)
        second = look(first.after(1), [a, b], snapshot("5:5:"), 10)
        assert (second.late, second.fresh) == ((1,), ())
        assert look(second.after(1), [a, b], snapshot("5:5:"), 10).ids == ()

    def test_what_the_snapshot_lists_is_not_enough(self) -> None:
        """A has number 3, B has 4 and writes row 1, A writes row 2 and commits: nobody above 3 has ended, so the
        snapshot ends at 4 and lists nobody. B is at work, and its row 1 is late when it commits.
        """
        a, b = RowAt(2, 3), RowAt(1, 4)
        first = look(Cursor(), [a], snapshot("4:4:"), 10)
        assert (first.ids, first.after(1).seen.running) == ((2,), ())
        assert look(first.after(1), [b, a], snapshot("5:5:"), 10).late == (1,)

    def test_h02_a_transaction_with_a_low_number_may_write_last(self) -> None:
        """A has number 3 by an audit row; B writes row 1 and commits; A writes row 2 of the same key."""
        assert look(Cursor(), rows("1@4", "2@3"), snapshot("5:5:"), 10).ids == (1, 2)


class TestPaging:
    start = Cursor(9, snapshot("3:6:3,4"))
    table = rows("1@4", "2@3", "4@3", "6@3", "7@5", "8@3", "9@5", "10@7", "11@7")
    now = snapshot("4:8:4")

    def test_more_late_rows_than_the_limit_are_paged(self) -> None:
        window = look(self.start, self.table, self.now, 3)
        assert (window.ids, window.more) == ((2, 4, 6), True)
        assert window.after(3) == Cursor(9, self.start.seen, self.now, (3,), 6)

    def test_fresh_rows_wait_until_the_last_page(self) -> None:
        first = look(self.start, self.table, self.now, 3).after(3)
        last = look(first, self.table, self.now, 3)
        assert (last.ids, last.more) == ((8,), False)
        assert last.after(1) == Cursor(9, self.now)
        assert look(last.after(1), self.table, self.now, 3).ids == (10, 11)

    def test_what_commits_meanwhile_waits_as_well_and_is_not_lost(self) -> None:
        """Row 1 becomes visible between two pages, below what is done."""
        cursor, found, later = look(self.start, self.table, self.now, 3).after(3), [], snapshot("9:9:")
        for _ in range(3):
            window = look(cursor, self.table, later, 3)
            found.append(window.ids)
            cursor = window.after(len(window.ids))
        assert found == [(8,), (1, 10, 11), ()]

    def test_a_cut_within_late_rows_begins_to_page(self) -> None:
        window = look(self.start, self.table, self.now, 10)
        assert window.ids == (2, 4, 6, 8, 10, 11)
        assert window.after(1) == Cursor(9, self.start.seen, self.now, (3,), 2)
        assert look(window.after(1), self.table, self.now, 10).ids == (4, 6, 8)

    def test_a_cut_behind_the_last_late_row_does_not(self) -> None:
        window = look(self.start, self.table, self.now, 10)
        assert window.after(4) == Cursor(9, self.now)

    def test_a_cut_within_fresh_rows_moves_high(self) -> None:
        window = look(self.start, self.table, self.now, 10)
        assert window.after(5) == Cursor(10, self.now)

    def test_a_cut_within_a_page_goes_on_there(self) -> None:
        first = look(self.start, self.table, self.now, 2).after(1)
        assert look(first, self.table, self.now, 10).ids == (4, 6, 8)

    def test_the_last_page_may_be_empty(self) -> None:
        """Somebody discarded the rest."""
        first = look(self.start, self.table, self.now, 3).after(3)
        without = [row for row in self.table if row.id != 8]
        assert look(first, without, self.now, 3).dealt_with(()) == Cursor(9, self.now)


class TestDealtWith:
    window = Window(Cursor(5, snapshot("3:6:3")), snapshot("7:7:"), late=(1, 2), fresh=(6, 7), xids=(3,))

    @pytest.mark.parametrize("count", range(5))
    def test_it_is_what_comes_after_the_first_rows(self, count: int) -> None:
        expected = self.window.after(count) if count else self.window.start
        assert self.window.dealt_with(self.window.ids[:count]) == expected

    @pytest.mark.parametrize("ids", [{2}, {1, 6}, {1, 2, 7}, {7}])
    def test_a_gap_is_refused(self, ids: set[int]) -> None:
        with pytest.raises(StoreError, match="would be passed over"):
            self.window.dealt_with(ids)

    def test_rows_that_were_not_found_do_not_matter(self) -> None:
        """Failed rows that are sent again are in the batch, too."""
        assert self.window.dealt_with({1, 2, 3, 4}) == Cursor(5, snapshot("7:7:"))

    def test_with_none_of_them_the_lane_stays_where_it_is(self) -> None:
        assert self.window.dealt_with(()) == self.window.start


class TestWhatIsPrunable:
    """H101: a row may go when its id is up to high and its transaction lies below the xmin of seen."""

    @staticmethod
    def prunable(settled: Cursor, row: RowAt) -> bool:
        return row.id <= settled.high and row.xid < settled.seen.xmin

    def test_h101_not_what_is_only_below_high(self) -> None:
        """T1 writes row 1, T2 writes row 2, which is sent; T1 commits; then retention runs."""
        settled = look(Cursor(), rows("2@4"), snapshot("3:5:3"), 10).after(1)
        assert not self.prunable(settled, RowAt(1, 3))
        assert not settled.covers(RowAt(1, 3))

    def test_it_is_always_covered(self) -> None:
        for cursor, table in random_places(seed=3):
            assert all(cursor.covers(row) for row in table if self.prunable(cursor, row))

    def test_not_what_is_still_to_be_paged_through(self) -> None:
        settled = TestPaging.start.paged(snapshot("9:9:"), (3,), 4)
        assert not any(self.prunable(settled, row) for row in TestPaging.table if not settled.covers(row))


class TestEveryRowOnce:
    def test_a_committed_row_is_dealt_with_or_late_or_fresh(self) -> None:
        for cursor, table in random_places(seed=1):
            for row in table:
                kinds = [cursor.covers(row), cursor.is_late(row), cursor.is_fresh(row)]
                if cursor.paging is None:
                    assert sum(kinds) == 1
                else:  # or waits until the last page
                    assert sum(kinds) <= 1

    def test_what_waits_for_the_last_page_is_late_or_fresh_after_it(self) -> None:
        for cursor, table in random_places(seed=2):
            if cursor.paging is None:
                continue
            closed = Cursor(cursor.high, cursor.paging)
            for row in table:
                waits = not (cursor.covers(row) or cursor.is_late(row))
                assert waits == (not closed.covers(row))

    @pytest.mark.parametrize("seed", range(50))
    def test_looks_with_any_limits_and_cuts_find_each_row_once(self, seed: int) -> None:
        """And the rows between two cursors are the batch, whenever they are read."""
        draw = random.Random(seed)
        written, commits = random_history(draw)
        cursor, found, batches = Cursor(), list[int](), list[tuple[Cursor, Cursor, tuple[int, ...]]]()
        for moment in sorted(draw.choices(range(len(commits) + 1), k=30)) + [len(commits)] * 60:
            visible = [row for row in written if row.xid in commits[:moment]]
            window = look(cursor, visible, snapshot_of(commits, moment), draw.randint(1, 4))
            part = window.ids[: draw.randint(min(1, len(window.ids)), len(window.ids))]
            batches.append((cursor, window.dealt_with(part), part))
            cursor = Cursor.parse(str(batches[-1][1]))
            found += part
            for start, end, expected in batches:
                assert tuple(row.id for row in visible if end.covers(row) and not start.covers(row)) == expected
        assert sorted(found) == [row.id for row in written]


def random_places(seed: int) -> Iterator[tuple[Cursor, Sequence[RowAt]]]:
    """Cursors as they come up, each with the rows that are committed in what it has seen."""
    for number in range(100):
        draw = random.Random(f"{seed} {number}")
        written, commits = random_history(draw)
        cursor = Cursor()
        for moment in sorted(draw.choices(range(len(commits) + 1), k=12)):
            visible = [row for row in written if row.xid in commits[:moment]]
            window = look(cursor, visible, snapshot_of(commits, moment), draw.randint(1, 4))
            cursor = window.dealt_with(window.ids[: draw.randint(0, len(window.ids))])
            yield cursor, visible


def random_history(draw: random.Random) -> tuple[list[RowAt], list[int]]:
    """Rows, and their transactions in the order of commit."""
    xids = list(range(FIRST_XID, FIRST_XID + 12))
    written = [RowAt(number, xid) for number, xid in enumerate(draw.choices(xids, k=30), start=1)]
    draw.shuffle(xids)
    return written, xids


def snapshot_of(commits: Sequence[int], moment: int) -> Snapshot:
    """As PostgreSQL would give it when so many have committed: it ends behind the latest of them."""
    ended = commits[:moment]
    xmax = max(ended, default=FIRST_XID - 1) + 1
    running = tuple(xid for xid in range(FIRST_XID, xmax) if xid not in ended)
    return Snapshot(min(running, default=xmax), xmax, running)


class TestDetours:
    """A cursor of a tenant's own follows that of its lane."""

    def test_a_look_that_leaves_rows_out_reaches_beyond_them(self) -> None:
        start = Cursor(1, snapshot("10:10:"))
        window = look(start, rows("3@10"), snapshot("12:12:"), limit=5, reach=8)
        assert window.after(1) == Cursor(8, snapshot("12:12:"))
        assert look(start, [], snapshot("12:12:"), limit=5, reach=8).after(0) == Cursor(8, snapshot("12:12:"))

    def test_a_page_that_was_cut_reaches_no_further_than_its_rows(self) -> None:
        window = look(Cursor(), rows("3@10", "4@10", "5@10"), snapshot("12:12:"), limit=2, reach=8)
        assert window.after(2).high == 4
        assert look(Cursor(), rows("3@10", "4@10"), snapshot("12:12:"), limit=2, reach=8).after(1).high == 3

    def test_a_look_in_the_snapshot_of_its_lane_does_not_see_what_came_later(self) -> None:
        assert look(Cursor(), rows("3@10", "4@12"), snapshot("12:12:"), limit=5, reach=4).fresh == (3,)

    def test_h110_who_came_through_late_rows_sooner_waits_for_its_lane(self) -> None:
        lane = Cursor(9, snapshot("4:7:4"), snapshot("7:7:"), (4,), 5)
        detour = Cursor(9, snapshot("7:7:"))
        assert not lane.leads(detour)
        assert not lane.has_passed(detour)
        assert Cursor(9, snapshot("7:7:")).has_passed(detour)

    def test_h110_nobody_has_passed_anybody_in_the_middle_of_late_rows(self) -> None:
        paging = Cursor(9, snapshot("4:7:4"), snapshot("7:7:"), (4,), 5)
        assert not Cursor(9, snapshot("9:9:")).has_passed(paging)
        assert Cursor(9, snapshot("9:9:")).leads(paging)
