"""The endpoints as tools of a language model, asked for by the protocol's own client over HTTP."""

import asyncio
import base64
import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import unquote, urlsplit

import httpx
import pytest

from engine.errors import RequestError
from engine.preset import load_preset
from engine.video import probe
from tests.double import Double, Pace, serve

pytest.importorskip("mcp", reason="the extra `mcp` is not installed")
from mcp import ClientSession
from mcp.client.streamable_http import streamablehttp_client

PRESET = load_preset("tiny")
LOGIN = ("someone", "secret")
BASIC = {"Authorization": "Basic " + base64.b64encode(":".join(LOGIN).encode()).decode()}
SMALL = {"prompt": "a red circle", "seconds": 0.2, "height": 64, "width": 64, "steps": 1}


@pytest.fixture(scope="module", params=[None, LOGIN], ids=["open", "password"])
def served(request, tmp_path_factory):
    with serve(Double(PRESET, Pace()), tmp_path_factory.mktemp("outputs"), mcp=True, login=request.param) as served:
        served.headers = BASIC if request.param else {}
        yield served


def ask(served, work, **headers):
    """Run `work(session)` in a session of its own; elsewhere, since Playwright leaves a running loop in this thread."""

    async def session():
        address = f"{served.url}/gradio_api/mcp/"
        async with (
            streamablehttp_client(address, headers=served.headers | headers) as (read, write, _),
            ClientSession(read, write) as session,
        ):
            await session.initialize()
            return await work(session)

    with ThreadPoolExecutor() as elsewhere:
        return elsewhere.submit(asyncio.run, session()).result(60)


def call(served, name, arguments, **headers):
    answer = ask(served, lambda session: session.call_tool(name, arguments), **headers)
    return answer.isError, "\n".join(getattr(part, "text", "") for part in answer.content)


def test_the_tools_are_the_public_endpoints_and_every_argument_is_explained(served):
    tools = {tool.name: tool for tool in ask(served, lambda session: session.list_tools()).tools}
    assert set(tools) == {"generate", "decode", "compare"}
    for tool in tools.values():
        assert len(tool.description) > 60
        unexplained = [name for name, schema in tool.inputSchema["properties"].items() if not schema.get("description")]
        assert unexplained == [], tool.name
    assert "4n + 1" in tools["generate"].inputSchema["properties"]["seconds"]["description"]


def test_a_tool_makes_a_real_video(served, tmp_path):
    failed, text = call(served, "generate", SMALL)
    assert not failed and '"finished"' in text
    address = urlsplit(re.search(r"http\S+?\.mp4", text)[0])
    assert served.url.endswith(address.netloc)
    (tmp_path / "a.mp4").write_bytes(httpx.get(served.url + unquote(address.path), headers=served.headers).content)
    assert probe(Path(tmp_path / "a.mp4")).frames == 5


def test_a_client_that_wants_to_know_how_far_it_is_gets_the_same_answer(served):
    seen = []

    async def tell(*progress):
        seen.append(progress)

    answer = ask(served, lambda session: session.call_tool("generate", SMALL, progress_callback=tell))
    address, figures = (part.text for part in answer.content)
    assert address.endswith("video.mp4") and json.loads(figures)["frames"] == 5
    assert seen


@pytest.mark.parametrize(
    "image", ["http://169.254.169.254/latest", "https://127.0.0.1:1/a.png", "file:///etc/passwd", "/etc/passwd"]
)
def test_a_tool_takes_no_address_and_no_file_of_the_server(served, image):
    before = len(served.jobs.recent())
    failed, text = call(served, "generate", SMALL | {"image": image})
    assert failed and "root:" not in text
    assert len(served.jobs.recent()) == before


def test_a_tool_refuses_in_the_engines_words(served):
    failed, text = call(served, "generate", SMALL | {"height": 100})
    assert failed and "height = 100 must be a multiple of 32" in text


def test_the_host_header_does_not_say_whom_the_server_asks(served):
    failed, text = call(served, "generate", SMALL, **{"x-forwarded-host": "127.0.0.1:1"})
    assert not failed and '"finished"' in text


def test_without_the_extra_the_server_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr("gradio.mcp.GradioMCPServer.__init__", lambda self, blocks: 1 / 0)
    with pytest.raises(RequestError, match="ENGINE_MCP is set"), serve(Double(PRESET), tmp_path, mcp=True):
        pass
