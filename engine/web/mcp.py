"""The page's endpoints as tools for language models, by Gradio's own server of the Model Context Protocol.

Its tools are the public endpoints with their docstrings. Three things are not left to it: it would ask whatever address
the caller's Host header names for the list of endpoints, it knows no password, and it would write several outputs as
one line of Python.
"""

from __future__ import annotations

import base64
import importlib
import json
from typing import Any

import anyio
import gradio as gr
from gradio_client import Client
from gradio_client.client import Job

from engine.errors import RequestError
from engine.web.hosting import Hosting


def require() -> None:
    """Raise RequestError where the extra `mcp` is missing: Gradio would notice only while it is mounted."""
    try:
        importlib.import_module("gradio.mcp")
    except ImportError as error:
        raise RequestError(
            f"ENGINE_MCP is set and the tools' package is not here ({error}). Install .[mcp]."
        ) from error


def connect(demo: gr.Blocks, hosting: Hosting) -> None:
    """Tie the tools of a mounted page to this server alone. Raises RequestError if it has none."""
    server = demo.mcp_server_obj
    if server is None:
        raise RequestError(f"ENGINE_MCP is set and {demo.mcp_error or 'nothing serves it'}. Install .[mcp].")
    made: list[Client] = []

    def client() -> Client:
        # Made by the first call: the server must answer by then.
        if not made:
            made.append(_client(hosting))
        return made[0]

    async def results(job: Job) -> list[Any]:
        return [_as_text(output) for output in await anyio.to_thread.run_sync(job.result)]

    followed = server._execute_tool_with_progress

    async def followed_results(job: Job, token: str | int) -> list[Any]:
        return [_as_text(output) for output in await followed(job, token)]

    server._get_or_create_client = client
    server._execute_tool_with_progress = followed_results
    server._execute_tool_without_progress = results


def _client(hosting: Hosting) -> Client:
    headers = {"x-gradio-user": "mcp"}
    if hosting.login:
        headers["Authorization"] = "Basic " + base64.b64encode(":".join(hosting.login).encode()).decode()
    options: dict[str, Any] = {"download_files": False, "verbose": False, "analytics_enabled": False}
    return Client(_own_address(hosting), headers=headers, _skip_components=False, **options)


def _as_text(output: Any) -> Any:
    """Figures as JSON; a file, {"path": ...}, stays and becomes its address."""
    return json.dumps(output, ensure_ascii=False) if isinstance(output, dict) and "path" not in output else output


def _own_address(hosting: Hosting) -> str:
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(hosting.host, hosting.host)
    return f"http://{host}:{hosting.port}"
