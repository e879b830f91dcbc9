"""``examples/route_plans`` over HTTP, on a broker in memory that the tests can reach into, and on a real Pulsar and
Redis; and its README, command by command.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest

from pillarbox import Message, Pillarbox
from pillarbox.inbox import DeadLetter
from pillarbox.outbox import Status
from pillarbox.stores import operations
from pillarbox.stores.audit import Author
from pillarbox.stores.inspection import Filter
from pillarbox.stores.operations import Action, Run, Selection
from pillarbox.transports.memory import MemoryTransport
from tests.readme import Reader, dead_links
from tests.servers import Database, DatabaseServer, Pulsar, Server, Servers, wait_until
from tests.web import ROOT, Process, TestClient, environment, free_port

README = ROOT / "examples" / "route_plans" / "README.md"
VARIABLES = ("DATABASE_URL", "PULSAR_URL", "REDIS_URL")


class Office:
    """The people of one tenant, at work with the service."""

    def __init__(self, client: httpx.Client, tenant: str) -> None:
        self.tenant = tenant
        self._client = client

    def ask(self, method: str, path: str, **options: Any) -> httpx.Response:
        return self._client.request(method, path, headers={"x-tenant-id": self.tenant}, **options)

    def do(self, method: str, path: str, **content: object) -> int:
        """A command that succeeds; the version that it answers with."""
        answer = self.ask(method, path, json=content or None)
        assert answer.is_success, answer.text
        version: int = answer.json()["version"]
        return version

    def see(self, path: str, **parameters: object) -> Any:
        answer = self.ask("GET", path, params=parameters)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def draft(self, *plans: str, day: str = "2026-03-02") -> None:
        for plan in plans:
            self.do("POST", "/plans", id=plan, day=day)

    def start(self, plan: str, vehicle: str = "van-7") -> int:
        """Draft a plan, and send it on its way; its version is 4 then."""
        self.draft(plan)
        self.do("POST", f"/plans/{plan}/stops", address="1 Mill Lane")
        self.do("PUT", f"/plans/{plan}/vehicle", vehicle=vehicle)
        return self.do("POST", f"/plans/{plan}/start")

    def employ(self, name: str, vehicle: str = "van-7") -> None:
        assert self.ask("PUT", f"/drivers/{vehicle}", json={"name": name}).status_code == 204

    def wait_for(self, path: str, expected: object) -> None:
        wait_until(lambda: self.ask("GET", path).json() == expected, f"{path} to be {expected}")

    def wait_until_gone(self, plan: str) -> None:
        wait_until(lambda: self.ask("GET", f"/plans/{plan}").status_code == 404, f"{plan} to be gone")


@dataclass
class Service:
    """The application in this process: its clients, and what is behind it."""

    client: TestClient
    box: Pillarbox
    broker: MemoryTransport

    def office(self) -> Office:
        return Office(self.client, f"t{uuid4().hex[:12]}")

    def sent(self, topic: str) -> list[Message]:
        return self.broker.sent(topic)

    def bring(self, message: Message) -> None:
        """Bring a message past the outbox, and wait until the consumers have dealt with it."""
        self._call(self.broker.send, "somebody", [message])
        self._wait_for_consumers(message.topic)

    def redeliver(self, topic: str) -> None:
        """Bring all messages of a topic once more, and wait until the consumers have dealt with them."""
        self._call(self.broker.redeliver, topic)
        self._wait_for_consumers(topic)

    def dead_letters(self, office: Office) -> list[DeadLetter]:
        """What the consumers have rejected of the tenant."""

        async def find() -> list[DeadLetter]:
            return [dead async for dead in self.box.dead_letters(tenant=office.tenant)]

        found: list[DeadLetter] = self._call(find)
        return found

    def redrive(self, office: Office) -> int:
        """Have the tenant's dead letters tried again; how many there are."""
        selection = Selection(Action.REDRIVE, Filter(Status.FAILED, tenant=office.tenant))

        async def request() -> int:
            async with self.box.engine.begin() as connection:
                run = await connection.run_sync(operations.request, selection, Author("ann", "mended"), Run(), 10)
            return run.requested

        requested: int = self._call(request)
        return requested

    def _wait_for_consumers(self, topic: str) -> None:
        members = [self._call(self.broker.subscribe, [topic], consumer) for consumer in self.box.consumers]
        wait_until(
            lambda: all(member.backlog() == 0 for member in members), f"the messages of {topic} to be dealt with"
        )
        for member in members:
            self._call(member.close)

    def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """On the loop of the application, where its broker lives."""
        assert self.client.portal is not None
        return self.client.portal.call(function, *arguments)


@pytest.fixture(scope="module")
def running(servers: Servers) -> Iterator[Service]:
    """One for all tests here: each has tenants of its own, and these do not see each other."""
    database = servers.create_database("embedded")
    with pytest.MonkeyPatch.context() as patch:
        for name in VARIABLES:
            patch.delenv(name, raising=False)
        patch.setenv("DATABASE_URL", database.url())
        app = import_module("examples.route_plans.service").app  # reads the variables
    its = import_module("examples.route_plans.box")
    with TestClient(app) as client:
        yield Service(client, its.box, its.broker)
    database.server.drop(database.name)


@pytest.fixture
def service(use_server: Callable[[str], Server], request: pytest.FixtureRequest) -> Service:
    use_server("embedded")
    running: Service = request.getfixturevalue("running")
    return running


@pytest.fixture
def office(service: Service) -> Office:
    return service.office()


class TestCommandsAndQueries:
    def test_the_life_of_a_plan_ends_in_the_read_model(self, service: Service, office: Office) -> None:
        office.employ("Ada")
        assert office.start("monday") == 4
        version = office.do("POST", "/plans/monday/complete")
        assert office.see("/plans/monday", at_least=version) == {
            "id": "monday",
            "day": "2026-03-02",
            "depot": "main",
            "status": "completed",
            "stops": 1,
            "vehicle": "van-7",
            "version": 5,
        }
        office.wait_for("/notifications", [{"driver": "Ada", "text": "monday has started with van-7, stops: 1"}])
        told = f"notifications.{office.tenant}"
        wait_until(lambda: len(service.sent(told)) == 1, "the event about the notification")
        [message] = service.sent(told)
        assert message.headers["causation_id"] == service.sent(f"route-plans.{office.tenant}")[3].headers["event_id"]
        assert service.client.get("/readyz").json()["ok"]

    def test_tenants_with_the_same_ids_do_not_see_each_other(self, service: Service, office: Office) -> None:
        other = service.office()
        office.start("monday")
        assert other.ask("POST", "/plans/monday/cancel").status_code == 404
        other.draft("monday", day="2026-04-01")
        office.do("POST", "/plans/monday/cancel")
        assert office.see("/plans/monday", at_least=5)["status"] == "cancelled"
        assert other.see("/plans/monday", at_least=1)["status"] == "drafted"
        assert [plan["day"] for plan in other.see("/plans")["items"]] == ["2026-04-01"]
        wait_until(lambda: len(service.dead_letters(office)) == 1, "a dead letter")
        assert (service.dead_letters(office)[0].tenant, service.dead_letters(other)) == (office.tenant, [])
        assert [message.headers["event_type"] for message in service.sent(f"route-plans.{other.tenant}")] == [
            "routing.plan.drafted"
        ]

    def test_what_is_refused_changes_nothing(self, service: Service, office: Office) -> None:
        office.draft("monday")
        refusals = {
            "the same id": office.ask("POST", "/plans", json={"id": "monday", "day": "2026-05-05"}),
            "nothing to drive": office.ask("POST", "/plans/monday/start"),
            "not on its way": office.ask("POST", "/plans/monday/complete"),
        }
        assert {why: answer.status_code for why, answer in refusals.items()} == dict.fromkeys(refusals, 409)
        assert office.ask("POST", "/plans/tuesday/start").status_code == 404
        for wrong in ({"id": "no/id"}, {"id": "x" * 51}, {"depot": "\0"}, {"depot": ""}, {"day": "soon"}):
            content = {"id": "other", "day": "2026-03-02"} | wrong
            assert office.ask("POST", "/plans", json=content).status_code == 422, wrong
        assert office.see("/plans/monday", at_least=1)["version"] == 1
        for tenant in ({}, {"x-tenant-id": "a.b"}):  # the topic's name would have one part more
            new = {"id": "monday", "day": "2026-03-02"}
            assert service.client.post("/plans", json=new, headers=tenant).status_code == 400

    def test_a_version_that_does_not_come_is_not_made_up(self, office: Office, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(import_module("examples.route_plans.summaries"), "LOOKS", 2)
        office.draft("monday")
        assert office.see("/plans/monday", at_least=1)["version"] == 1
        assert office.ask("GET", "/plans/monday", params={"at_least": 2}).status_code == 503
        assert office.ask("GET", "/plans/tuesday", params={"at_least": 1}).status_code == 404

    def test_pages(self, office: Office) -> None:
        for day in range(1, 6):
            office.draft(f"plan-{day}", day=f"2026-03-0{day}")
        office.do("POST", "/plans/plan-3/cancel")
        office.see("/plans/plan-3", at_least=2)
        wait_until(lambda: len(office.see("/plans")["items"]) == 5, "five plans")
        found, after = list[str](), dict[str, str]()
        while True:
            page = office.see("/plans", limit=2, **after)
            found += [plan["id"] for plan in page["items"]]
            office.draft(f"early-{len(found)}", day="2026-01-01")  # before all that was seen: it shifts nothing
            if page["next"] is None:
                break
            after = {"after": page["next"]}
        assert found == [f"plan-{day}" for day in range(1, 6)]
        assert [plan["id"] for plan in office.see("/plans", status="cancelled")["items"]] == ["plan-3"]
        assert office.see("/plans", vehicle="van-9")["items"] == []
        refused = office.ask("GET", "/plans", params={"after": "nonsense"})
        assert (refused.status_code, "start without a cursor" in refused.json()["detail"]) == (422, True)
        assert [plan["id"] for plan in office.see("/plans", status="cancelled", after="")["items"]] == ["plan-3"]
        assert office.ask("GET", "/plans", params={"limit": 0}).status_code == 422


class TestWhatABrokerMayDo:
    def test_duplicates_change_nothing(self, service: Service, office: Office) -> None:
        office.employ("Ada")
        office.see("/plans/monday", at_least=office.start("monday"))
        wait_until(lambda: len(office.see("/notifications")) == 1, "a notification")
        before = office.see("/plans")
        service.redeliver(f"route-plans.{office.tenant}")
        service.redeliver(f"route-plans.{office.tenant}")
        assert office.see("/plans") == before
        assert len(office.see("/notifications")) == 1

    def test_a_deleted_plan_does_not_come_back(self, service: Service, office: Office) -> None:
        topic = f"route-plans.{office.tenant}"
        office.draft("monday")
        office.do("POST", "/plans/monday/stops", address="1 Mill Lane")
        office.see("/plans/monday", at_least=2)
        assert office.do("DELETE", "/plans/monday") == 3
        office.wait_until_gone("monday")
        service.redeliver(topic)
        drafted = service.sent(topic)[0]  # and once as if the inbox had forgotten it
        service.bring(Message(topic, drafted.key, drafted.body, {**drafted.headers, "event_id": str(uuid4())}))
        assert office.ask("GET", "/plans/monday").status_code == 404
        assert office.see("/plans")["items"] == []
        assert office.ask("POST", "/plans/monday/start").status_code == 404
        assert office.ask("POST", "/plans", json={"id": "monday", "day": "2026-03-02"}).status_code == 409

    def test_an_event_of_the_first_version_is_understood(self, service: Service, office: Office) -> None:
        topic = f"route-plans.{office.tenant}"
        office.draft("monday")
        office.see("/plans/monday", at_least=1)
        headers = {**service.sent(topic)[0].headers} | {"event_id": str(uuid4()), "schema_version": "1"}
        headers |= {"aggregate_id": f"{office.tenant}:old"}
        service.bring(Message(topic, "old", b'{"plan_id": "old", "day": "2025-01-01"}', headers))
        assert office.see("/plans/old")["depot"] == "main"

    def test_a_rejected_notification_is_a_dead_letter_until_it_is_mended(
        self, service: Service, office: Office
    ) -> None:
        office.see("/plans/monday", at_least=office.start("monday"))  # nobody drives it, and the plan goes on
        wait_until(lambda: len(service.dead_letters(office)) == 1, "a dead letter")
        [dead] = service.dead_letters(office)
        assert (dead.consumer, dead.reason) == ("notifications", "nobody drives van-7")
        office.employ("Bob")
        assert service.redrive(office) == 1
        wait_until(lambda: len(office.see("/notifications")) == 1, "a notification")
        wait_until(lambda: not service.dead_letters(office), "no dead letter")
        assert service.redrive(office) == 0
        assert [each["driver"] for each in office.see("/notifications")] == ["Bob"]
        service.redeliver(f"route-plans.{office.tenant}")
        assert len(office.see("/notifications")) == 1


# -- in a process of its own -------------------------------------------------------------------------------------------


def process(folder: Path, **variables: str) -> Process:
    """The service as people start it."""
    port = free_port()
    command = ["-m", "examples.route_plans", "--port", str(port)]
    return Process(command, port, folder / "log", environment=environment(*VARIABLES) | variables)


@pytest.mark.full
def test_on_pulsar_and_redis(postgres_database: Database, pulsar: Pulsar, redis_url: str, tmp_path: Path) -> None:
    servers = {
        "DATABASE_URL": postgres_database.url(),
        "PULSAR_URL": f"{pulsar.url}?admin={pulsar.admin_url}",
        "REDIS_URL": redis_url,
    }
    offices = {"Ada": f"t{uuid4().hex[:12]}", "Bob": f"t{uuid4().hex[:12]}"}
    with process(tmp_path, **servers) as service, httpx.Client(base_url=service.url) as client:
        for driver, tenant in offices.items():
            office = Office(client, tenant)
            office.employ(driver)
            office.start("monday")
            wait_until(partial(topic_exists, pulsar, f"route-plans.{tenant}"), "the tenant's topic")
    # The client looks for new topics once a minute, and when it starts. What was sent has not gone with the process.
    with process(tmp_path, **servers) as service, httpx.Client(base_url=service.url) as client:
        for driver, tenant in offices.items():
            office = Office(client, tenant)
            office.wait_for("/notifications", [{"driver": driver, "text": "monday has started with van-7, stops: 1"}])
            assert office.see("/plans/monday", at_least=4)["status"] == "started"
        one, other = (Office(client, tenant) for tenant in offices.values())
        cancelled = one.do("POST", "/plans/monday/cancel")
        assert one.see("/plans/monday", at_least=cancelled)["status"] == "cancelled", "not what the cache has"
        one.do("DELETE", "/plans/monday")
        one.wait_until_gone("monday")
        assert other.see("/plans/monday")["status"] == "started"


def topic_exists(pulsar: Pulsar, name: str) -> bool:
    topics: list[str] = httpx.get(f"{pulsar.admin_url}/admin/v2/persistent/public/default").json()
    return f"persistent://public/default/{name}" in topics


class PlansReader(Reader):
    """Knows where the next page begins, and which delivery was listed last."""

    def __init__(self, service: Process) -> None:
        super().__init__(README, environment(*VARIABLES), {"python -m examples.route_plans": service.start})
        self._address = service.url.removeprefix("http://")
        self._next = ""
        self._event_id = ""

    def filled_in(self, command: str) -> str:
        command = command.replace("localhost:8000", self._address)
        return command.replace("NEXT", self._next).replace("EVENT_ID", self._event_id)

    def note(self, command: str, printed: str) -> None:
        if '"next":"' in printed:
            self._next = json.loads(printed)["next"]
        if "dlq list" in command:
            self._event_id = next(word for word in printed.split() if word.count("-") == 4)


def test_the_links_of_the_readme_lead_somewhere() -> None:
    assert dead_links(README) == []


def test_the_readme_is_true(tmp_path: Path, use_server: Callable[[str], Server]) -> None:
    server = use_server("embedded")
    assert isinstance(server, DatabaseServer)
    server.drop("pillarbox")  # as a newcomer has it
    service = process(tmp_path)
    try:
        PlansReader(service).follow()
        assert f"open {service.url}/docs " in service.log.read_text("utf-8")
        assert httpx.get(f"{service.url}/docs").is_success
    finally:
        service.stop()
