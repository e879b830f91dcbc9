"""The order service, on http://127.0.0.1:8000.

python -m examples.orders
"""

from __future__ import annotations

import argparse

import uvicorn

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--port", type=int, default=8000)
port = parser.parse_args().port
print(f"open http://127.0.0.1:{port}/docs when it runs; Ctrl-C ends it", flush=True)
uvicorn.run("examples.orders.service:app", host="127.0.0.1", port=port, access_log=False)
