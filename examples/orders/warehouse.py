"""Somebody else's service, which our events go to. Stop it, and start it again: nothing is lost.

    python -m examples.orders.warehouse

It prints what arrives, once: it knows events by their ids. It refuses articles that it does not have; `PUT
/articles/NAME` gives it one more.
"""

from __future__ import annotations

import argparse
from typing import Annotated, Any

import uvicorn
from fastapi import Body, FastAPI, Header, HTTPException

app = FastAPI(title="Warehouse")
articles = {"tea", "cup"}
seen: dict[str, str] = {}


@app.post("/events", status_code=204)
async def receive(
    event: Annotated[dict[str, Any], Body()],
    event_id: Annotated[str, Header(convert_underscores=False)],
    event_type: Annotated[str, Header(convert_underscores=False)],
) -> None:
    article = event.get("article")
    if article is not None and article not in articles:
        raise HTTPException(422, f"we have no {article}")
    if event_id not in seen:
        seen[event_id] = event_type
        print(event_type, event["order_id"], flush=True)


@app.put("/articles/{name}", status_code=204)
async def stock(name: str) -> None:
    articles.add(name)


@app.get("/events")
async def received() -> list[str]:
    return list(seen.values())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=8001)
    uvicorn.run(app, host="127.0.0.1", port=parser.parse_args().port, log_level="warning")
