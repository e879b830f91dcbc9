"""CloudEvents 1.0, structured JSON mode: the whole envelope is in the body, for consumers that read no headers."""

from __future__ import annotations

from collections.abc import Mapping
from uuid import UUID

import msgspec

from ..codec import Content, parse_moment
from ..errors import UnknownEventError
from .json import parse_object

# Headers that become extension attributes. The specification allows only lower-case letters and digits.
EXTENSIONS = {
    "tenant_id": "tenantid",
    "aggregate_type": "aggregatetype",
    "version": "aggregateversion",
    "correlation_id": "correlationid",
    "causation_id": "causationid",
    "user_id": "userid",
    "traceparent": "traceparent",
    "tracestate": "tracestate",
}


class CloudEventsCodec:
    """``type`` is the event's name, ``source`` the service, ``subject`` the aggregate, ``data`` the payload."""

    name = "cloudevents"
    content_type = "application/cloudevents+json"

    def encode(self, content: Content, headers: Mapping[str, str]) -> bytes:
        return msgspec.json.encode(
            {
                "specversion": "1.0",
                "id": str(content.event_id),
                "source": headers.get("source_service", "pillarbox"),
                "type": content.name,
                "subject": headers["aggregate_id"],
                "time": headers["occurred_at"],
                "datacontenttype": "application/json",
                "schemaversion": f"v{content.version}",
                **{attribute: headers[name] for name, attribute in EXTENSIONS.items() if name in headers},
                "data": content.payload,
            }
        )

    def decode(self, body: bytes, headers: Mapping[str, str]) -> Content:  # noqa: ARG002  the envelope is in the body
        envelope = parse_object(body)
        try:
            if envelope["specversion"] != "1.0":
                raise UnknownEventError(f"CloudEvents version {envelope['specversion']!r} is not 1.0")
            data = envelope["data"]
            if not isinstance(data, dict):
                raise UnknownEventError("the CloudEvent's data is not a JSON object")
            return Content(
                name=str(envelope["type"]),
                version=int(str(envelope["schemaversion"]).removeprefix("v")),
                event_id=UUID(str(envelope["id"])),
                occurred_at=parse_moment(str(envelope["time"])),
                payload=data,
            )
        except KeyError as missing:
            raise UnknownEventError(f"the CloudEvent has no attribute {missing.args[0]!r}") from None
        except ValueError as error:
            raise UnknownEventError(f"the CloudEvent cannot be read: {error}") from None
