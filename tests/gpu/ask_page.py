"""Ask a running page for what people ask for, over its API: a video, another decode, a comparison. Prints one line."""

from __future__ import annotations

import json
import sys
import time
from urllib.error import URLError
from urllib.request import urlopen

from gradio_client import Client

PROMPT = "a red circle moves right on a plain navy background, static camera"


def wait_for(address: str, seconds: float = 90) -> None:
    """Until the model is loaded."""
    ends = time.monotonic() + seconds
    while True:
        try:
            urlopen(f"{address}/readyz").close()
            return
        except URLError as error:
            if time.monotonic() > ends:
                body = error.read().decode() if hasattr(error, "read") else ""
                sys.exit(f"not ready after {seconds} s: {error} {body}")
            time.sleep(0.5)


def main(address: str) -> None:
    """The three endpoints, one after the other."""
    wait_for(address)
    client = Client(address, verbose=False)
    _, stats = client.predict(prompt=PROMPT, seconds=2, seed=7, api_name="/generate")
    _, again = client.predict(job=stats["job"], decoder="reference", api_name="/decode")
    figures, *_ = client.predict(job=stats["job"], a="auto", b="reference:fp32", api_name="/compare")
    told = {"device": stats["device"], "decode": stats["decode"]["decoder"], "again": again["decode"]["decoder"]}
    print(json.dumps(told | {"peaks": stats["peak_bytes"], "verdict": figures["verdict"]}))


if __name__ == "__main__":
    main(sys.argv[1])
